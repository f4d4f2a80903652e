// A tour in five steps, from tokens to one weight, on the reader's own session: a ring around what is explained, and a
// card beside it. The texts name the reader's own token, head and numbers.

import { effectIn, percent } from "../effects/effects.js";
import { fill, make } from "../shared/elements.js";
import { Naming } from "../shared/labels.js";
import { digits, figure, message, translate } from "../shared/messages.js";
import { latest, outcome } from "../source/source.js";
import { NO_ROWS, weightOf } from "../text/links.js";

/** @typedef {import("../source/source.js").Overview} Overview */
/** @typedef {import("../source/source.js").Source} Source */
/** @typedef {import("../state.js").State} State */
/** @typedef {import("../state.js").Store} Store */
/**
 * What the texts are made of. weight: of the link, null where no exact rows are known.
 * @typedef {{overview: Overview, state: State, query: string, key: string, weight: number | null,
 *   steps: import("../source/source.js").Steps | null, effect: number | null, measurable: boolean}} Facts
 */

const TOKENS = message(
  "The model read your text as {count} {count|token|tokens}. One of them is “{query}”. Point at another word to see what it looks at; click to hold it.",
);
const PATCHES = message(
  "The model cut the image into {rows} × {columns} patches, and each is a token. One of them is {query}. Point at another patch to see what it looks at; click to hold it.",
);
const HEADS = message(
  "{layers} {layers|layer|layers} of {heads} {heads|head|heads}: each cell is one head, and each looks elsewhere. The framed one is layer {layer}, head {head}. Click another, or use the arrow keys.",
);
const MAP = message(
  "Layer {layer}, head {head} as a map: a row is a token that looks, a column one that is looked at, and the stronger the colour, the larger the weight. The framed row is “{query}”, the dashed column “{key}”.",
);
const ROW = message(
  "The weights of “{query}” add up to 1 over {keys} {keys|token|tokens}. “{key}” gets {weight} of it.",
);
const ROOT = message(
  "How {weight} comes about: q·k of “{query}” and “{key}” is {dot}; divided by √{d} it is {scaled}; softmax over all keys makes {weight} of it.",
);
const SCALED = message(
  "How {weight} comes about: q·k of “{query}” and “{key}” is {dot}; scaled and with everything that is added it is {scaled}; softmax over all keys makes {weight} of it.",
);
const USE = message("So much of the value of “{key}” goes into “{query}” in this head.");
const EFFECT = message("Without this link the vector of “{query}” moves by {effect}.");
const MEASURE = message("“Measure in this head” says what the link does: it runs the model without it.");

/** @type {{target: string, drawer?: boolean, title: string, text: (facts: Facts) => string}[]} */
const STEPS = [
  { target: ".pane.text .text-scroll, .image-stage", title: message("Tokens"), text: sayTokens },
  { target: ".pane.atlas", title: message("Heads"), text: sayHeads },
  { target: ".pane.map", title: message("One head"), text: sayMap },
  { target: ".pane.text", title: message("One row"), text: sayRow },
  { target: ".drawer .steps", drawer: true, title: message("One weight"), text: sayWeight },
];
const GAP = 12; // between what is explained and the card, and around the card
const MEMORY = "regard.tour";

/** Was the tour taken or declined here? A browser that keeps nothing says yes, so that it is not offered again and again. */
export function isKnown() {
  try {
    return localStorage.getItem(MEMORY) !== null;
  } catch {
    return true;
  }
}

/** Do not offer the tour again. */
export function remember() {
  try {
    localStorage.setItem(MEMORY, "known");
  } catch {
    // without memory nothing is offered either
  }
}

/**
 * Begin the tour over the page inside an element; the function that comes back ends it.
 * @param {HTMLElement} element
 * @param {Store} store
 * @param {Source} source
 * @param {() => void} ended
 * @returns {() => void}
 */
export function startTour(element, store, source, ended) {
  const tour = new Tour(element, store, source, ended);
  void tour.go(0);
  return () => tour.end();
}

class Tour {
  /**
   * @param {HTMLElement} element
   * @param {Store} store
   * @param {Source} source
   * @param {() => void} ended
   */
  constructor(element, store, source, ended) {
    this.element = element;
    this.store = store;
    this.source = source;
    this.ended = ended;
    this.next = latest();
    this.at = 0;
    this.drawer = store.get().drawer;
    this.ring = make("div", { class: "tour-ring", "aria-hidden": "true" });
    this.count = make("p", { class: "tour-count" });
    this.title = make("h2", { id: "tour-title" });
    this.text = make("p", { id: "tour-text", "aria-live": "polite" });
    const button = (/** @type {string} */ role, /** @type {() => void} */ onclick) =>
      make("button", { type: "button", "data-role": `tour-${role}`, onclick });
    this.skip = button("skip", () => this.end());
    this.back = button("back", () => void this.go(this.at - 1));
    this.on = button("next", () => (this.at + 1 < STEPS.length ? void this.go(this.at + 1) : this.end()));
    this.skip.className = "quiet";
    this.on.className = "primary";
    this.card = make(
      "div",
      { class: "tour-card", role: "dialog", "aria-labelledby": "tour-title", "aria-describedby": "tour-text" },
      ...[this.count, this.title, this.text],
      make("div", { class: "tour-buttons" }, this.skip, make("span", { class: "space" }), this.back, this.on),
    );
    element.append(this.ring, this.card);
    const listening = new AbortController();
    const { signal } = listening;
    element.addEventListener("keydown", (event) => this.#key(event), { signal });
    element.addEventListener("scroll", () => this.#place(), { signal, capture: true });
    const observer = new ResizeObserver(() => this.#place());
    observer.observe(element);
    const off = store.on((_, changed) => {
      if (["session", "layer", "head", "token", "key", "lang", "drawer"].some((name) => changed.has(name))) void this.#write();
    });
    this.ends = [() => listening.abort(), () => observer.disconnect(), off];
  }

  /** @param {number} at */
  async go(at) {
    this.at = at;
    if (STEPS[at].drawer) this.store.set({ drawer: true });
    else if (this.store.get().drawer !== this.drawer) this.store.set({ drawer: this.drawer });
    this.on.focus({ preventScroll: true });
    await this.#write();
    const target = this.#target;
    if (target) reveal(target, this.element);
    this.#place();
  }

  end() {
    if (this.at < 0) return;
    this.at = -1;
    this.next();
    for (const end of this.ends) end();
    this.ring.remove();
    this.card.remove();
    this.ended();
  }

  get #target() {
    return /** @type {HTMLElement | null} */ (this.element.querySelector(STEPS[this.at]?.target ?? "none"));
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    const inside = event.composedPath().includes(this.card);
    if (event.key === "Escape" && !event.defaultPrevented) this.end();
    else if (!inside || (event.key !== "ArrowRight" && event.key !== "ArrowLeft")) return;
    else if (event.key === "ArrowLeft") this.at > 0 && void this.go(this.at - 1);
    else if (this.at + 1 < STEPS.length) void this.go(this.at + 1);
    event.preventDefault();
    event.stopPropagation();
  }

  async #write() {
    const signal = this.next();
    const found = await outcome(factsOf(this.store.get(), this.source), signal);
    if (!found || this.at < 0) return;
    const { lang } = this.store.get();
    const [facts, error] = found;
    const step = STEPS[this.at];
    fill(this.count, `${this.at + 1} / ${STEPS.length}`);
    fill(this.title, translate(step.title, lang));
    fill(this.text, facts ? step.text(facts) : translate("That did not work: {error}", lang, { error }));
    fill(this.skip, translate("End tour", lang));
    fill(this.back, translate("Back", lang));
    fill(this.on, this.at + 1 < STEPS.length ? translate("Next", lang) : translate("Done", lang));
    this.back.hidden = this.at === 0;
    this.skip.hidden = this.at + 1 === STEPS.length;
    this.#place();
  }

  /** The ring around what is explained, and the card on a side of it that has room. */
  #place() {
    const target = this.#target;
    if (!target) return;
    const page = this.element.getBoundingClientRect();
    const [box, card] = [target.getBoundingClientRect(), this.card.getBoundingClientRect()];
    const [left, top] = [Math.max(box.left - page.left, 2), Math.max(box.top - page.top, 2)];
    const [right, bottom] = [Math.min(box.right - page.left, page.width - 2), Math.min(box.bottom - page.top, page.height - 2)];
    Object.assign(this.ring.style, {
      ...{ left: `${left}px`, top: `${top}px` },
      ...{ width: `${Math.max(0, right - left)}px`, height: `${Math.max(0, bottom - top)}px` },
    });
    const [wide, high] = [card.width + 2 * GAP, card.height + 2 * GAP];
    const [x, y] =
      page.width - right >= wide ? [right + GAP, top]
      : left >= wide ? [left - GAP - card.width, top]
      : page.height - bottom >= high ? [left, bottom + GAP]
      : top >= high ? [left, top - GAP - card.height]
      : [page.width, page.height];
    const within = (/** @type {number} */ at, /** @type {number} */ size, /** @type {number} */ room) =>
      `${Math.max(GAP, Math.min(at, room - size - GAP))}px`;
    Object.assign(this.card.style, { left: within(x, card.width, page.width), top: within(y, card.height, page.height) });
  }
}

/**
 * Scroll what lies between an element and the page until the element begins in sight; nothing around the page moves.
 * @param {HTMLElement} target
 * @param {HTMLElement} page
 */
function reveal(target, page) {
  for (let at = target.parentElement; at && at !== page; at = at.parentElement) {
    if (at.scrollHeight <= at.clientHeight || !/auto|scroll/.test(getComputedStyle(at).overflowY)) continue;
    const [box, room] = [target.getBoundingClientRect(), at.getBoundingClientRect()];
    if (box.top < room.top || box.bottom > room.bottom) at.scrollTop += box.top - room.top - 8;
  }
}

/**
 * The token, head and numbers of the reader.
 * @param {State} state
 * @param {Source} source
 * @returns {Promise<Facts>}
 */
async function factsOf(state, source) {
  const { layer, head } = state;
  const session = state.session ?? "";
  const overview = await source.overview(session);
  const own = overview.layers[layer];
  const naming = new Naming(source, session, overview, () => undefined);
  const token = state.token ?? 0;
  const known = own.rows ?? overview.rows;
  const at = state.key ?? 0;
  const row = known ? await source.row(session, layer, head, token, at, at + 1).catch(() => null) : null;
  const key = state.key ?? row?.top[0]?.key ?? 0;
  const weight = row === null ? null : weightOf(row, key);
  const steps = known ? await source.steps(session, layer, head, token, key).catch(() => null) : null;
  const effects = await source.effects(session, token, key).catch(() => null);
  return {
    ...{ overview, state, query: naming.query(layer, token), key: naming.key(layer, key), weight, steps },
    effect: effectIn(effects, layer, head)?.effect ?? null,
    measurable: source.can.measure && own.no_effects === null,
  };
}

/** @param {Facts} facts */
function sayTokens({ overview, state: { lang, layer }, query }) {
  const grid = overview.layouts?.[overview.layers[layer].layout?.[1] ?? -1]?.grids[0];
  if (grid) return translate(PATCHES, lang, { rows: grid.rows.length, columns: grid.columns.length, query });
  return translate(TOKENS, lang, { count: overview.length, query });
}

/** @param {Facts} facts */
function sayHeads({ overview: { layers }, state: { lang, layer, head } }) {
  const heads = Math.max(...layers.map((one) => one.heads));
  return translate(HEADS, lang, { layers: layers.length, heads, layer, head });
}

/** @param {Facts} facts */
function sayMap({ state: { lang, layer, head }, query, key }) {
  return translate(MAP, lang, { layer, head, query, key });
}

/** @param {Facts} facts */
function sayRow({ overview, state: { lang, layer }, query, key, weight }) {
  if (weight === null) return translate(NO_ROWS, lang);
  return translate(ROW, lang, { query, key, weight: digits(weight), keys: overview.layers[layer].keys });
}

/** @param {Facts} facts */
function sayWeight({ state: { lang }, query, key, weight, steps, effect, measurable }) {
  if (weight === null || steps === null) return translate(NO_ROWS, lang);
  const at = steps.keys.indexOf(steps.key);
  const of = (/** @type {import("../source/arrays.js").Numbers | (number | null)[]} */ values) =>
    Number("data" in values ? values.data[at] : values[at]);
  const plain = Math.abs(steps.scale * Math.sqrt(steps.d) - 1) < 1e-4 && Math.abs(of(steps.scaled) - of(steps.scores)) < 1e-3;
  const numbers = { query, key, weight: digits(weight), d: steps.d, dot: figure(of(steps.dots)) };
  const how = plain
    ? translate(ROOT, lang, { ...numbers, scaled: figure(of(steps.scaled)) })
    : translate(SCALED, lang, { ...numbers, scaled: figure(of(steps.scores)) });
  const use = translate(USE, lang, { query, key });
  if (effect !== null) return [how, use, translate(EFFECT, lang, { query, effect: percent(effect) })].join(" ");
  return [how, use, ...(measurable ? [translate(MEASURE, lang)] : [])].join(" ");
}
