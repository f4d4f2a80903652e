// The text around a map: the bar above it (zoom, scale, first key, what the colours mean) and the tip at the pointer.

import { stepAt } from "../shared/colours.js";
import { fill, focusedAround, make, segments } from "../shared/elements.js";
import { digits, howText, message, signedDigits, translate } from "../shared/messages.js";

/** @typedef {import("../state.js").State} State */

const EXACT_HINT = message("exact: each cell is one weight");
const POOLED_HINT = message("pooled: a cell is the share of its queries' attention that goes to its keys, together");
const SINK_HINT = message(
  "Show the first key, which often takes most of the attention. Off: left out of the colours and hatched.",
);
const WINDOW_HINT = message(
  "The map shows one window, that of the chosen patch: patches of different windows do not see each other.",
);

export class MapBar {
  /**
   * @param {import("../state.js").Store} store
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
   * @param {{scale: import("../shared/colours.js").Scale, how: string, broken: import("./plot.js").Broken,
   *   paper: import("../shared/colours.js").Paper, missing: number, error: string | null, isWhole: boolean, window: {window: number, windows: number} | null}} shown
   */
  show(state, shown) {
    const signed = shown.scale.signed ?? false; // of which the colours are always linear
    const built = JSON.stringify([state.lang, state.scale, state.sink, shown.isWhole, signed]);
    if (built !== this.built) this.#build(state, shown.isWhole, signed);
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
   * @param {boolean} signed
   */
  #build(state, isWhole, signed) {
    const { lang } = state;
    const button = (/** @type {string} */ sign, /** @type {string} */ label, /** @type {number} */ factor, off = false) =>
      make("button", { type: "button", title: label, "aria-label": label, disabled: off, onclick: () => this.zoom(factor) }, sign);
    const names = { linear: translate("linear", lang), log: translate("log", lang), rank: translate("rank", lang) };
    const choices = Object.entries(names).map(([value, label]) => ({ value, label }));
    const scale = segments(translate("Colour scale", lang), "scale", choices, state.scale, (kind) =>
      this.store.set({ scale: /** @type {State["scale"]} */ (kind) }));
    const box = make("input", { type: "checkbox", checked: state.sink, onchange: () => this.store.set({ sink: box.checked }) });
    const focused = focusedAround(this.controls);
    const focus = this.controls.contains(focused) ? focused?.getAttribute("data-value") : null;
    fill(
      this.controls,
      make("span", { class: "map-zoom", role: "group" },
        button("−", translate("Zoom out (−)", lang), 1 / 1.5, isWhole),
        button("+", translate("Zoom in (+)", lang), 1.5),
        button("⤢", translate("Show everything (0)", lang), 0, isWhole)),
      !signed && scale,
      make("label", { class: "map-sink", title: translate(SINK_HINT, lang) }, box, translate("first key", lang)),
    );
    if (focus) /** @type {HTMLElement | null} */ (scale.querySelector(`[data-value="${state.scale}"]`))?.focus();
  }

  /**
   * @param {State} state
   * @param {{scale: import("../shared/colours.js").Scale, how: string, broken: import("./plot.js").Broken,
   *   paper: import("../shared/colours.js").Paper, missing: number, error: string | null, window: {window: number, windows: number} | null}} shown
   */
  #explain(state, { scale, how, broken, paper, missing, error, window }) {
    const { lang } = state;
    const ramp = scale.signed ? paper.signed : paper.ramp;
    const stops = Array.from({ length: 9 }, (_, i) => ramp.css[stepAt(i / 8)]);
    const pooled = how === "pooled";
    const numbers = [
      make("span", { class: "map-low" }, scale.signed ? signedDigits(scale.low) : scale.kind === "linear" ? "0" : digits(scale.low)),
      make("span", { class: "map-ramp", style: `background: linear-gradient(90deg, ${stops.join(", ")})` }),
      make("span", { class: "map-high" }, scale.signed ? signedDigits(scale.high) : digits(scale.high)),
    ];
    fill(
      this.legend,
      ...(broken === "all" ? [] : numbers),
      broken && make("span", { class: "map-nan", title: translate("weights are NaN: see regard doctor", lang) },
        make("span", { class: "mark-broken", "aria-hidden": "true" }), "NaN"),
      make("span", { class: "map-how", "data-how": how, title: translate(pooled ? POOLED_HINT : EXACT_HINT, lang) },
        make("span", { class: pooled ? "mark-pooled" : "mark-exact", "aria-hidden": "true" }), howText(how, lang)),
      window && make("span", { class: "map-window", title: translate(WINDOW_HINT, lang) },
        translate("window {window} of {windows}", lang, window)),
      missing > 0 && !error ? make("span", { class: "map-loading" }, translate("fetching cells…", lang)) : null,
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
   * @param {{lang: string, how: string, weight: number, signed: boolean, queries: [number, number], keys: [number, number],
   *   queryLabel: (i: number) => string, keyLabel: (j: number) => string}} cell
   */
  show(x, y, { lang, how, weight, signed, queries, keys, queryLabel, keyLabel }) {
    const single = how !== "pooled";
    const name = signed ? translate("change", lang) : single ? translate("weight", lang) : translate("share", lang);
    fill(
      this.element,
      side("query", translate("query", lang), translate("queries", lang), queries, queryLabel),
      side("key", translate("key", lang), translate("keys", lang), keys, keyLabel),
      make("div", { class: "tip-weight" },
        make("span", { class: "tip-name" }, name),
        make("b", { "data-weight": weight }, signed ? signedDigits(weight) : digits(weight)), " ", make("span", { class: "tip-how" }, howText(how, lang))),
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
