// The map pane: the pooled map of the chosen head, zooming down to exact cells, with what keys receive above and the
// entropy of queries beside. tiles.js fetches cells, plot.js draws.

import { moved, span, whole, wholeTokens, within, zoomed } from "../shared/camera.js";
import { paperUnder } from "../shared/colours.js";
import { make, watchSurroundings } from "../shared/elements.js";
import { Naming } from "../shared/labels.js";
import { digits, howText, translate } from "../shared/messages.js";
import { isAbort, latest } from "../source/source.js";
import { MapBar, MapTip } from "./bar.js";
import { listen } from "./gestures.js";
import { MapPlot } from "./plot.js";
import { cellAt, Squares } from "./tiles.js";

/** @typedef {import("../shared/camera.js").Range} Range */
/** @typedef {import("../shared/camera.js").Seen} Seen */
/** @typedef {import("../state.js").State} State */
/** @typedef {import("./tiles.js").Square} Square */

/** The view is written into the state when it has rested this long. */
const REST_MS = 200;
const NO_NAMES = { received: "", entropy: "" };
const NOTHING = new Float32Array(0);
/** Cells along a side of the map of one window. */
const CELLS = 64;
/** As many words as the text pane shows at once. */
const WINDOW = 600;

/**
 * Build the pane inside an element.
 * @param {HTMLElement} element
 * @param {import("../state.js").Store} store
 * @param {import("../source/source.js").Source} source
 * @returns {{update: () => void, destroy: () => void}}
 */
export function mount(element, store, source) {
  const pane = new MapPane(element, store, source);
  return { update: () => pane.update(), destroy: () => pane.destroy() };
}

/**
 * The window that a token is in; null where its layer is one sequence.
 * @param {import("../source/source.js").Layer | undefined} layer
 * @param {number | null} token
 */
function windowOf(layer, token) {
  const windows = layer?.windows ?? 1;
  return windows > 1 && layer ? Math.floor((token ?? 0) / (layer.queries / windows)) : null;
}

/**
 * The tokens of the second session that have no counterpart in the first; null where all have one.
 * @param {import("../compare/difference.js").Alignment} [alignment]
 * @returns {Range | null}
 */
function apartOf(alignment) {
  const [from, to] = alignment ? [alignment.before, alignment.counts[1] - alignment.after] : [0, 0];
  return from < to ? [from, to] : null;
}

class MapPane {
  /**
   * @param {HTMLElement} element
   * @param {import("../state.js").Store} store
   * @param {import("../source/source.js").Source} source
   */
  constructor(element, store, source) {
    this.element = element;
    this.store = store;
    this.source = source;
    this.next = latest();
    this.canvas = make("canvas", { class: "map-canvas", tabindex: 0, role: "img" });
    this.note = make("p", { class: "pane-note", role: "status" });
    this.bar = new MapBar(store, (factor) => this.#zoom(factor > 1 ? this.#closer() : factor, NaN, NaN));
    this.tip = new MapTip();
    this.stage = make("div", { class: "map-stage" }, this.canvas, this.tip.element, this.note);
    element.classList.add("pane-map");
    element.replaceChildren(this.bar.element, this.stage);
    this.drawing = new MapPlot(this.canvas);
    this.squares = new Squares(source, () => this.update());
    /** @type {import("../source/source.js").HeadAnswer | null} */
    this.head = null;
    /** @type {import("../source/source.js").Overview | null} */
    this.overview = null;
    /** @type {{session: string, of: Naming} | null} */
    this.names = null;
    /** @type {Square | null} */
    this.base = null;
    /** @type {import("../source/source.js").Tile | null} */
    this.part = null;
    /** @type {Seen} */
    this.limits = whole(1, 1);
    this.seen = this.limits;
    /** @type {Seen | null} */
    this.brush = null;
    this.asked = "";
    this.written = "null";
    this.frame = 0;
    this.timer = 0;
    this.error = "";
    this.ended = false;
    this.ends = [store.on(() => this.update()), listen(this.canvas, this.#gestures()), watchSurroundings(this.canvas, () => this.update())];
    this.update();
  }

  /** Ask for what is missing, and draw before the next frame. */
  update() {
    if (this.ended) return;
    const { session, layer, head, lang, region, token } = this.store.get();
    const asked = JSON.stringify([session, layer, head, lang, windowOf(this.overview?.layers[layer], token)]);
    if (asked !== this.asked) {
      this.asked = asked;
      void this.#ask();
    }
    if (JSON.stringify(region) !== this.written) this.#follow(region);
    if (this.frame === 0) this.frame = requestAnimationFrame(() => this.#draw());
  }

  destroy() {
    this.ended = true;
    for (const end of this.ends) end();
    this.next();
    cancelAnimationFrame(this.frame);
    clearTimeout(this.timer);
    this.squares.destroy();
    this.element.replaceChildren();
    this.element.classList.remove("pane-map");
  }

  async #ask() {
    const { session, layer, head, lang } = this.store.get();
    const signal = this.next();
    if (session === null) return;
    try {
      const overview = await this.source.overview(session, signal);
      const answer = await this.source.head(session, layer, head, lang, signal);
      const part = await this.#part(session, overview.layers[layer], head, signal);
      if (signal.aborted) return;
      this.#take(session, overview, answer, part);
      this.error = "";
    } catch (error) {
      if (isAbort(error)) return;
      this.error = error instanceof Error ? error.message : String(error);
    }
    this.update();
  }

  /**
   * Of a layer in windows, the one that the chosen token is in; null where there is one sequence.
   * @param {string} session
   * @param {import("../source/source.js").Layer} layer
   * @param {number} head
   * @param {AbortSignal} signal
   * @returns {Promise<import("../source/source.js").Tile | null>}
   */
  async #part(session, layer, head, signal) {
    const window = windowOf(layer, this.store.get().token);
    if (window === null || !layer.rows) return null;
    const span = (/** @type {number} */ all) => [window, window + 1].map((w) => (w * all) / (layer.windows ?? 1));
    return this.source.tile(session, layer.index, head, span(layer.queries), span(layer.keys), CELLS, signal);
  }

  /**
   * @param {string} session
   * @param {import("../source/source.js").Overview} overview
   * @param {import("../source/source.js").HeadAnswer} head
   * @param {import("../source/source.js").Tile | null} part
   */
  #take(session, overview, head, part) {
    const layer = overview.layers[head.layer];
    const limits = part
      ? { rows: /** @type {Range} */ (part.rows), cols: /** @type {Range} */ (part.cols) }
      : whole(layer.queries / (layer.windows ?? 1), layer.keys / (layer.windows ?? 1));
    if (this.names?.session !== session)
      this.names = { session, of: new Naming(this.source, session, overview, () => this.update()) };
    const cells = part?.cells ?? head.map;
    const [down, across] = cells.shape;
    const key = `base/${session}/${head.layer}/${head.head}/${limits.rows[0]}`;
    this.base = { key, ...limits, down, across, cells: cells.data, values: cells.data, how: part?.how ?? head.how };
    this.part = part;
    if (JSON.stringify(limits) !== JSON.stringify(this.limits)) {
      this.limits = limits;
      this.#follow(this.store.get().region);
    }
    [this.overview, this.head] = [overview, head];
    this.squares.forgive();
  }

  /**
   * Show the part that the state names.
   * @param {State["region"]} region
   */
  #follow(region) {
    this.written = JSON.stringify(region);
    this.seen = region === null ? this.limits : within(region, this.limits);
  }

  #draw() {
    this.frame = 0;
    const state = this.store.get();
    const { lang } = state;
    const paper = paperUnder(this.element);
    const { head, base } = this;
    this.#say(this.error || (head ? "" : translate("Choose a head to see its map.", lang)));
    if (!head || !base) return;
    const fine = this.#squares();
    const { scale, how, broken } = this.drawn = this.drawing.draw({
      ...{ seen: this.seen, limits: this.limits, base, squares: fine.squares, sink: state.sink, scale: state.scale, paper },
      ...(this.part ? { received: NOTHING, entropy: NOTHING } : {
        received: head.received?.data ?? NOTHING,
        entropy: head.entropy?.data ?? NOTHING,
      }),
      ...{ token: state.token, key: state.key, brush: this.brush },
      ...{ queryLabel: (i) => this.#queryLabel(i), keyLabel: (j) => this.#keyLabel(j) },
      ...{ signed: head.signed ?? false, apart: apartOf(head.alignment) },
      // Of a window, received and entropy are not known: only of the first.
      sides: { queries: translate("looks from ↓", lang), keys: translate("looks at →", lang) },
      names: this.part || head.signed ? NO_NAMES : { received: translate("received", lang), entropy: translate("entropy", lang) },
    });
    if (broken === "all" && !this.error) this.#say(translate("weights are NaN: see regard doctor", lang));
    this.bar.show(state, {
      ...{ scale, how, broken, paper, missing: fine.missing, error: fine.error },
      ...{ isWhole: this.#isWhole(), window: this.#window() },
    });
    this.#describe(state, broken ? translate("weights are NaN: see regard doctor", lang) : how);
  }

  #squares() {
    const none = { squares: /** @type {Square[]} */ ([]), missing: 0, error: /** @type {string | null} */ (null) };
    if (!this.head || !this.names || !this.overview) return none;
    if (!(this.overview.layers[this.head.layer].rows ?? this.overview.rows)) return none;
    if (this.base?.how !== "pooled") return none; // the map itself has every single weight
    const { layer, head } = this.head;
    return this.squares.at({ session: this.names.session, layer, head }, this.seen, this.limits);
  }

  /** @param {string} words */
  #say(words) {
    if (this.note.textContent !== words) this.note.textContent = words;
    this.note.hidden = words === "";
  }

  /**
   * @param {State} state
   * @param {string} how
   */
  #describe(state, how) {
    const link = this.head?.links[0];
    const { lang, layer, head } = state;
    const size = { queries: span(this.limits.rows), keys: span(this.limits.cols) };
    const strongest = link && `${this.#queryLabel(link.query)} → ${this.#keyLabel(link.key)} ${digits(link.weight)}`;
    const said = [
      translate("Attention map, layer {layer}, head {head}: {queries} queries by {keys} keys, {how}.", lang, {
        ...{ layer, head, ...size, how: howText(how, lang) },
      }),
      strongest && translate("Strongest link: {link}.", lang, { link: strongest }),
      translate("Plus, minus and zero zoom; shift and arrows move; drag moves; shift and drag chooses a part.", lang),
    ].filter(Boolean).join(" ");
    if (this.canvas.getAttribute("aria-label") !== said) this.canvas.setAttribute("aria-label", said);
  }

  /** @param {number} query */
  #queryLabel(query) {
    return this.names?.of.query(this.head?.layer ?? 0, query) ?? "";
  }

  /** @param {number} key */
  #keyLabel(key) {
    return this.names?.of.key(this.head?.layer ?? 0, key) ?? "";
  }

  /** Which window is shown, and of how many; null where there is one sequence. */
  #window() {
    const { windows = 1, queries } = this.overview?.layers[this.head?.layer ?? 0] ?? { queries: 1 };
    return windows > 1 ? { window: Math.floor(this.limits.rows[0] / (queries / windows)), windows } : null;
  }

  #isWhole() {
    return span(this.seen.rows) >= span(this.limits.rows) && span(this.seen.cols) >= span(this.limits.cols);
  }

  /** @returns {import("./gestures.js").Answers} */
  #gestures() {
    return {
      pan: (dx, dy) => {
        const { width, height } = this.drawing.plot;
        const [down, across] = [(-dy / height) * span(this.seen.rows), (-dx / width) * span(this.seen.cols)];
        this.#show(moved(this.seen, down, across, this.limits));
      },
      zoom: (factor, x, y) => this.#zoom(factor, x, y),
      enter: (x, y) => void this.#zoom(this.#closer(), x, y),
      brush: (from, to, done) => this.#brush(from, to, done),
      click: (x, y) => this.#choose(x, y),
      hover: (x, y) => this.#point(x, y),
      leave: () => (this.tip.hide(), this.store.set({ hover: null })),
      key: (event) => this.#key(event),
    };
  }

  /** @param {Seen} seen */
  #show(seen) {
    const before = JSON.stringify(this.seen);
    this.seen = seen;
    this.tip.hide();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.#write(), REST_MS);
    this.update();
    return JSON.stringify(seen) !== before;
  }

  #write() {
    const region = this.#isWhole() ? null : wholeTokens(this.seen);
    this.written = JSON.stringify(region);
    this.store.set({ region });
  }

  /** How much closer one step goes: in large ones down to exact cells, three from 5,000 tokens. */
  #closer() {
    return this.drawn?.how === "pooled" ? 4 : 1.5;
  }

  /**
   * @param {number} factor  0 for everything
   * @param {number} x  NaN for the middle
   * @param {number} y
   */
  #zoom(factor, x, y) {
    if (!this.head) return false;
    const { plot } = this.drawing;
    const share = (/** @type {number} */ at) => (Number.isNaN(at) ? 0.5 : Math.min(1, Math.max(0, at)));
    const point = { across: share((x - plot.x) / plot.width), down: share((y - plot.y) / plot.height) };
    return this.#show(factor === 0 ? this.limits : zoomed(this.seen, factor, point, this.limits));
  }

  /**
   * The query and the key at a place of the canvas, not rounded; null beside the plot.
   * @param {number} x
   * @param {number} y
   */
  #at(x, y) {
    const { plot } = this.drawing;
    const [across, down] = [(x - plot.x) / plot.width, (y - plot.y) / plot.height];
    if (!this.head || across < 0 || across >= 1 || down < 0 || down >= 1) return null;
    const { rows, cols } = this.seen;
    return { query: rows[0] + down * span(rows), key: cols[0] + across * span(cols) };
  }

  /**
   * @param {{x: number, y: number}} from
   * @param {{x: number, y: number}} to
   * @param {boolean} done
   */
  #brush(from, to, done) {
    const { plot } = this.drawing;
    const inside = (/** @type {{x: number, y: number}} */ { x, y }) => this.#at(
      Math.min(Math.max(x, plot.x), plot.x + plot.width - 0.01),
      Math.min(Math.max(y, plot.y), plot.y + plot.height - 0.01),
    );
    const [one, other] = [inside(from), inside(to)];
    if (!one || !other) return;
    const part = wholeTokens({
      rows: [Math.min(one.query, other.query), Math.max(one.query, other.query)],
      cols: [Math.min(one.key, other.key), Math.max(one.key, other.key)],
    });
    this.brush = done ? null : part;
    this.tip.hide();
    if (!done) return this.update();
    this.store.set({ region: part, window: [part.cols[0], Math.min(part.cols[0] + WINDOW, this.limits.cols[1])] });
  }

  /**
   * @param {number} x
   * @param {number} y
   */
  #choose(x, y) {
    const at = this.#at(x, y);
    if (at) this.store.set({ token: Math.floor(at.query), key: Math.floor(at.key), pinned: true });
  }

  /**
   * @param {number} x
   * @param {number} y
   */
  #point(x, y) {
    const [at, state] = [this.#at(x, y), this.store.get()];
    this.store.set({ hover: at && { session: state.session, token: Math.floor(at.query) } });
    if (!at || !this.base) return this.tip.hide();
    const over = (/** @type {Square} */ { rows, cols }) =>
      at.query >= rows[0] && at.query < rows[1] && at.key >= cols[0] && at.key < cols[1];
    const square = this.#squares().squares.find(over) ?? this.base;
    const cell = cellAt(square, at.query, at.key);
    this.tip.show(x, y, {
      ...{ lang: state.lang, how: square.how, weight: square.values[cell.at], queries: cell.queries, keys: cell.keys },
      signed: this.head?.signed ?? false,
      ...{ queryLabel: (at) => this.#queryLabel(at), keyLabel: (at) => this.#keyLabel(at) },
    });
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return false;
    const closer = this.#closer();
    const factor = { "+": closer, "=": closer, "-": 1 / 1.5, _: 1 / 1.5, 0: 0 }[event.key];
    if (factor !== undefined) {
      this.#zoom(factor, NaN, NaN);
      return true;
    }
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step || !event.shiftKey) return false;
    const by = 0.2 * span(this.seen.cols);
    this.#show(moved(this.seen, step[0] * by, step[1] * by, this.limits));
    return true;
  }
}
