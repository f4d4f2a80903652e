// The words around a map: the bar above it (zoom, scale, first key, what the colours mean) and the tip at the pointer.
// It does not know how the map is drawn.

import { stepAt } from "./colourmaps.js";
import { fill, focusedAround, make, segments } from "./elements.js";
import { digits, howWords, wordsFor } from "./panewords.js";

/** @typedef {import("./state.js").State} State */

export class MapBar {
  /**
   * @param {import("./state.js").Store} store
   * @param {(factor: number) => unknown} zoom
   */
  constructor(store, zoom) {
    this.store = store;
    this.zoom = zoom;
    this.controls = make("div", { class: "map-controls" });
    this.legend = make("div", { class: "map-legend" });
    this.element = make("div", { class: "map-bar" }, this.controls, this.legend);
    this.built = "";
    this.legended = "";
  }

  /**
   * @param {State} state
   * @param {{scale: import("./colourmaps.js").Scale, how: string, broken: import("./mapdrawing.js").Broken,
   *   paper: import("./paper.js").Paper, missing: number, error: string | null, isWhole: boolean, window: {window: number, windows: number} | null}} shown
   */
  show(state, shown) {
    const built = JSON.stringify([state.lang, state.scale, state.sink, shown.isWhole]);
    if (built !== this.built) this.#build(state, shown.isWhole);
    this.built = built;
    const { scale, how, broken, paper, missing, error, window } = shown;
    const colours = [scale.kind, scale.low, scale.high, how, broken, paper.dark];
    const legended = JSON.stringify([state.lang, colours, missing > 0, error, window]);
    if (legended !== this.legended) this.#explain(state, shown);
    this.legended = legended;
  }

  /**
   * @param {State} state
   * @param {boolean} isWhole
   */
  #build(state, isWhole) {
    const words = wordsFor(state.lang);
    const button = (/** @type {string} */ sign, /** @type {string} */ label, /** @type {number} */ factor, off = false) =>
      make("button", { type: "button", title: label, "aria-label": label, disabled: off, onclick: () => this.zoom(factor) }, sign);
    const kinds = /** @type {const} */ (["linear", "log", "rank"]);
    const scale = segments(words.scale, "scale", kinds.map((kind) => ({ value: kind, label: words[kind] })), state.scale, (kind) =>
      this.store.set({ scale: /** @type {State["scale"]} */ (kind) }));
    const box = make("input", { type: "checkbox", checked: state.sink, onchange: () => this.store.set({ sink: box.checked }) });
    const focused = focusedAround(this.controls);
    const focus = this.controls.contains(focused) ? focused?.getAttribute("data-value") : null;
    fill(
      this.controls,
      make("span", { class: "map-zoom", role: "group" },
        button("−", words.further, 1 / 1.5, isWhole), button("+", words.closer, 1.5), button("⤢", words.all, 0, isWhole)),
      scale,
      make("label", { class: "map-sink", title: words.sinkHint }, box, words.sink),
    );
    if (focus) /** @type {HTMLElement | null} */ (scale.querySelector(`[data-value="${state.scale}"]`))?.focus();
  }

  /**
   * @param {State} state
   * @param {{scale: import("./colourmaps.js").Scale, how: string, broken: import("./mapdrawing.js").Broken,
   *   paper: import("./paper.js").Paper, missing: number, error: string | null, window: {window: number, windows: number} | null}} shown
   */
  #explain(state, { scale, how, broken, paper, missing, error, window }) {
    const words = wordsFor(state.lang);
    const stops = Array.from({ length: 9 }, (_, i) => paper.ramp.css[stepAt(i / 8)]);
    const pooled = how === "pooled";
    const numbers = [
      make("span", { class: "map-low" }, scale.kind === "linear" ? "0" : digits(scale.low)),
      make("span", { class: "map-ramp", style: `background: linear-gradient(90deg, ${stops.join(", ")})` }),
      make("span", { class: "map-high" }, digits(scale.high)),
    ];
    fill(
      this.legend,
      ...(broken === "all" ? [] : numbers),
      broken && make("span", { class: "map-nan", title: words.nan },
        make("span", { class: "mark-broken", "aria-hidden": "true" }), "NaN"),
      make("span", { class: "map-how", "data-how": how, title: pooled ? words.pooledHint : words.exactHint },
        make("span", { class: pooled ? "mark-pooled" : "mark-exact", "aria-hidden": "true" }), howWords(how, state.lang)),
      window && make("span", { class: "map-window", title: words.windowHint }, words.window(window)),
      missing > 0 && !error ? make("span", { class: "map-loading" }, words.loading) : null,
      error ? make("span", { class: "map-error", title: error }, error) : null,
    );
  }
}

export class MapTip {
  constructor() {
    this.element = make("div", { class: "map-tip", hidden: true });
  }

  hide() {
    this.element.hidden = true;
  }

  /**
   * @param {number} x
   * @param {number} y
   * @param {{lang: string, how: string, weight: number, queries: [number, number], keys: [number, number],
   *   queryLabel: (i: number) => string, keyLabel: (j: number) => string}} cell
   */
  show(x, y, { lang, how, weight, queries, keys, queryLabel, keyLabel }) {
    const words = wordsFor(lang);
    const single = how !== "pooled";
    fill(
      this.element,
      side("query", words.query, words.queries, queries, queryLabel),
      side("key", words.key, words.keys, keys, keyLabel),
      make("div", { class: "tip-weight" }, make("span", { class: "tip-name" }, single ? words.weight : words.share),
        make("b", { "data-weight": weight }, digits(weight)), " ", make("span", { class: "tip-how" }, howWords(how, lang))),
    );
    this.element.hidden = false;
    const room = this.element.parentElement?.getBoundingClientRect();
    const { offsetWidth: wide, offsetHeight: high } = this.element;
    this.element.style.left = `${x + 14 + wide > (room?.width ?? 0) ? Math.max(0, x - 14 - wide) : x + 14}px`;
    this.element.style.top = `${y + 14 + high > (room?.height ?? 0) ? Math.max(0, y - 14 - high) : y + 14}px`;
  }
}

/**
 * The query or the key of a cell, by its word, or several by their numbers.
 * @param {string} name
 * @param {string} one
 * @param {string} many
 * @param {[number, number]} tokens
 * @param {(i: number) => string} label
 */
function side(name, one, many, [from, to], label) {
  const single = from === to;
  return make("div", { class: `tip-${name}` },
    make("span", { class: "tip-name" }, single ? one : many), single && make("bdi", {}, label(from)), single && " ",
    make("span", { class: "tip-place" }, single ? String(from) : `${from}–${to}`));
}
