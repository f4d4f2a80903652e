// The state: one small value that all panes share, and its form in the address. A pane reads it, listens to it, and
// sets parts of it.
//
//     const store = createStore();
//     store.on((state, changed) => { if (changed.has("head")) draw(state); });
//     store.set({ layer: 3, head: 1 });
//
// As a hash: "#session=1&layer=3&head=1&token=8". Defaults are left out; what a hash says wrongly is ignored, field by
// field.

/**
 * @typedef {object} Other  the second session, when two are compared
 * @property {string} session
 * @property {boolean} difference  colour its atlas by what it has more or less than the first
 * @property {number | null} token
 * @property {number | null} key
 * @property {[number, number] | null} window
 * @property {{rows: [number, number], cols: [number, number]} | null} region
 */
/**
 * @typedef {object} State
 * @property {string | null} session
 * @property {number} layer
 * @property {number} head
 * @property {number | null} token  the query that is looked at
 * @property {number | null} key  the key that is looked at
 * @property {string} measure  what the atlas is coloured by
 * @property {"linear" | "log" | "rank"} scale  of the colours
 * @property {boolean} sink  true: the first key is shown; false: it is left out of the colours
 * @property {"en" | "ko"} lang
 * @property {"auto" | "light" | "dark"} theme
 * @property {[number, number] | null} window  tokens shown in the text pane, [a, b)
 * @property {{rows: [number, number], cols: [number, number]} | null} region  cells shown in the map; null: all
 * @property {Other | null} compare
 * @property {"grid" | "list" | "rising"} view  how the atlas is laid out: as a grid, highest first, or lowest first
 * @property {"auto" | "thumbnails" | "colour"} cells  what a cell of the atlas shows; auto: a thumbnail where it has room
 * @property {{session: string | null, token: number} | null} hover  the query under the pointer, as its layer counts it
 * @property {boolean} pinned  whether the atlas shows the chosen query in every head while nothing is pointed at
 * @property {string} find  the atlas's search
 * @property {boolean} drawer  whether the drawer is open
 * @property {string} off  heads that are switched off for predictions, "3.1,5.11"
 */
/** @typedef {(state: State, changed: Set<string>) => void} Listener */
/** @typedef {{get: () => State, set: (patch: Partial<State>) => void, on: (fn: Listener) => () => void}} Store */

/** @type {State} */
export const FIRST = Object.freeze({
  session: null,
  layer: 0,
  head: 0,
  token: null,
  key: null,
  measure: "auto",
  scale: "linear",
  sink: true,
  lang: "en",
  theme: "auto",
  window: null,
  region: null,
  compare: null,
  view: "grid",
  cells: "auto",
  hover: null,
  pinned: false,
  find: "",
  drawer: true,
  off: "",
});

/**
 * A store. Listeners hear of a change once, after it is made, with the names of what changed; `on` returns a function
 * that ends the listening. Names outside `State` are refused.
 * @param {Partial<State>} [given]
 * @returns {Store}
 */
export function createStore(given = {}) {
  let state = { ...FIRST, ...given };
  /** @type {Set<Listener>} */
  const listeners = new Set();
  return {
    get: () => state,
    set(patch) {
      const unknown = Object.keys(patch).filter((name) => !(name in FIRST));
      if (unknown.length > 0) throw new Error(`no such state: ${unknown.join(", ")}`);
      const before = /** @type {Record<string, unknown>} */ (/** @type {unknown} */ (state));
      const changed = new Set(
        Object.entries(patch)
          .filter(([name, now]) => !same(before[name], now))
          .map(([n]) => n),
      );
      if (changed.size === 0) return;
      state = { ...state, ...patch };
      for (const listener of [...listeners]) listener(state, changed);
    },
    on(listener) {
      listeners.add(listener);
      return () => void listeners.delete(listener);
    },
  };
}

/**
 * The store of the second session: its panes see `compare` in the place of `session`, `token`, `key`, `window` and
 * `region`; all else is shared, so that both show the same head in the same way.
 * @param {Store} store
 * @returns {Store}
 */
export function otherSide(store) {
  const own = /** @type {const} */ (["session", "token", "key", "window", "region"]);
  /** @param {State} state */
  const seen = (state) => (state.compare === null ? state : { ...state, ...pick(state.compare, own) });
  return {
    get: () => seen(store.get()),
    set(patch) {
      const { compare } = store.get();
      if (compare === null) return;
      const shared = Object.fromEntries(Object.entries(patch).filter(([name]) => !own.some((mine) => mine === name)));
      const mine = Object.fromEntries(Object.entries(patch).filter(([name]) => own.some((one) => one === name)));
      store.set({ ...shared, compare: { ...compare, ...mine } });
    },
    on(listener) {
      let before = seen(store.get());
      return store.on((state, changed) => {
        if (state.compare === null) return;
        const now = seen(state);
        const mine = own.filter((name) => !same(before[name], now[name]));
        const shared = [...changed].filter((name) => name === "compare" || !own.some((one) => one === name));
        before = now;
        if (mine.length + shared.length > 0) listener(now, new Set([...shared, ...mine]));
      });
    },
  };
}

/**
 * What of a comparison the page itself follows, in a word: a hovered token of the second session changes `compare`, too.
 * @param {State} state
 * @returns {string}
 */
export function compared({ compare }) {
  return compare === null ? "" : `${compare.session} ${compare.difference}`;
}

/**
 * @param {Other} from
 * @param {readonly (keyof Other)[]} names
 */
function pick(from, names) {
  return Object.fromEntries(names.map((name) => [name, from[name]]));
}

/**
 * @param {unknown} a
 * @param {unknown} b
 */
function same(a, b) {
  return Object.is(a, b) || (typeof a === "object" && JSON.stringify(a) === JSON.stringify(b));
}

// --------------------------------------------------------------------------------------------------------- the address

const NAME = /^[\w.:-]{1,200}$/;

/** @type {(text: string) => number | undefined} */
const count = (text) => (/^\d{1,9}$/.test(text) ? Number(text) : undefined);
/** @type {(text: string) => string | undefined} */
const name = (text) => (NAME.test(text) ? text : undefined);
/** @type {(text: string) => boolean | undefined} */
const flag = (text) => (text === "1" ? true : text === "0" ? false : undefined);
/** @type {(text: string) => string | undefined} */
const words = (text) => (text.length <= 300 ? text : undefined);
/** @type {(text: string) => string | undefined} */
const heads = (text) => (/^\d{1,4}\.\d{1,4}(,\d{1,4}\.\d{1,4}){0,199}$/.test(text) ? text : undefined);
/** @type {(...allowed: string[]) => (text: string) => string | undefined} */
const oneOf =
  (...allowed) =>
  (text) =>
    allowed.includes(text) ? text : undefined;

/** @param {string} text "3-16" */
function span(text) {
  const [a, b, ...more] = text.split("-").map(count);
  return a === undefined || b === undefined || more.length > 0 || a >= b ? undefined : [a, b];
}

/** @param {string} text "0-64x3-16" */
function region(text) {
  const [rows, cols, ...more] = text.split("x").map(span);
  return rows && cols && more.length === 0 ? { rows, cols } : undefined;
}

/** @type {Record<string, (text: string) => any>} */
const OWN = { session: name, token: count, key: count, window: span, region };
/** @type {Record<string, (text: string) => any>} */
const FIELDS = {
  ...OWN,
  layer: count,
  head: count,
  measure: words,
  scale: oneOf("linear", "log", "rank"),
  sink: flag,
  lang: oneOf("en", "ko"),
  theme: oneOf("auto", "light", "dark"),
  view: oneOf("grid", "list", "rising"),
  cells: oneOf("auto", "thumbnails", "colour"),
  find: words,
  drawer: flag,
  off: heads,
};

/** @param {unknown} value */
function written(value) {
  if (typeof value === "boolean") return value ? "1" : "0";
  if (Array.isArray(value)) return value.join("-");
  if (value !== null && typeof value === "object") {
    const { rows, cols } = /** @type {{rows: number[], cols: number[]}} */ (value);
    return `${rows.join("-")}x${cols.join("-")}`;
  }
  return String(value);
}

/**
 * The hash of a state, without "#".
 * @param {State} state
 * @param {Partial<State>} opened  what the page opens with, without a choice
 * @returns {string}
 */
export function toHash(state, opened) {
  const hash = new URLSearchParams();
  const now = /** @type {Record<string, unknown>} */ (/** @type {unknown} */ (state));
  const first = /** @type {Record<string, unknown>} */ (/** @type {unknown} */ ({ ...FIRST, ...opened }));
  for (const field of Object.keys(FIELDS)) {
    if (now[field] !== null && now[field] !== first[field]) hash.set(field, written(now[field]));
  }
  if (state.compare) {
    for (const [field, value] of Object.entries(state.compare)) {
      if (value !== null && value !== false) hash.set(`with.${field}`, written(value));
    }
  }
  return hash.toString();
}

/**
 * The parts of a state that a hash tells, with or without "#".
 * @param {string} hash
 * @returns {Partial<State>}
 */
export function fromHash(hash) {
  const said = new URLSearchParams(hash.replace(/^#/, ""));
  const found = read(said, FIELDS, "");
  const other = read(said, { ...OWN, difference: flag }, "with.");
  if (other.session === undefined) return found;
  const nothing = { difference: false, token: null, key: null, window: null, region: null };
  return { ...found, compare: /** @type {Other} */ ({ ...nothing, ...other }) };
}

/**
 * Does what a hash tells say where to look, and not only how?
 * @param {Partial<State>} said
 */
export function saysPlace(said) {
  return ["layer", "head", "token", "key", "window", "region", "off"].some((field) => field in said);
}

/**
 * @param {URLSearchParams} said
 * @param {Record<string, (text: string) => any>} fields
 * @param {string} prefix
 * @returns {Record<string, any>}
 */
function read(said, fields, prefix) {
  /** @type {Record<string, any>} */
  const found = {};
  for (const [field, reader] of Object.entries(fields)) {
    const text = said.get(prefix + field);
    const value = text === null ? undefined : reader(text);
    if (value !== undefined) found[field] = value;
  }
  return found;
}
