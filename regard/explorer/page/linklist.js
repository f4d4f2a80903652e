// The strongest links of a query as lines of words: one for the link that is looked at, and a list of all that are known.
// It does not know where weights come from.

import { stepAt } from "./colourmaps.js";
import { fill, focusedAround, make } from "./elements.js";
import { digits, howWords, wordsFor } from "./panewords.js";

/** @typedef {{key: number, weight: number}} Top */
/**
 * @typedef {{key: number | null, lang: string, scale: import("./colourmaps.js").Scale,
 *   paper: import("./paper.js").Paper, name: (key: number) => string}} Listed
 */

export class LinkList {
  /** @param {(key: number) => void} go  told which key was chosen */
  constructor(go) {
    this.go = go;
    this.element = make("div", { class: "text-links", hidden: true });
    this.shown = "";
  }

  /**
   * @param {Top[]} top  strongest first
   * @param {Listed} how
   */
  show(top, { key, lang, scale, paper, name }) {
    const names = top.map((link) => name(link.key));
    const shown = JSON.stringify([top, names, key, lang, scale.kind, scale.high, paper.dark]);
    if (shown === this.shown) return;
    this.shown = shown;
    this.element.hidden = top.length === 0;
    const focus = focusedAround(this.element);
    const focused = this.element.contains(focus) ? focus?.getAttribute("data-key") : null;
    const lines = top.map((link, i) => {
      const colour = paper.ramp.css[stepAt(Math.max(0.35, scale.place(link.weight)))];
      const width = `${((100 * link.weight) / top[0].weight).toFixed(1)}%`;
      return make("li", {}, this.#line(link, names[i], link.key === key, `width: ${width}; background: ${colour}`));
    });
    fill(this.element, make("h3", {}, wordsFor(lang).strongestLinks), make("ol", {}, ...lines));
    if (focused) /** @type {HTMLElement | null} */ (this.element.querySelector(`[data-key="${focused}"]`))?.focus();
  }

  /**
   * @param {Top} link
   * @param {string} name
   * @param {boolean} chosen
   * @param {string} bar
   */
  #line({ key, weight }, name, chosen, bar) {
    const given = { type: "button", "aria-pressed": String(chosen), "data-key": key, "data-weight": weight };
    return make(
      "button",
      { ...given, onclick: () => this.go(key) },
      make("bdi", { class: "link-word" }, name),
      make("span", { class: "link-place" }, String(key)),
      make("span", { class: "link-bar" }, make("span", { style: bar })),
      make("span", { class: "link-weight" }, digits(weight)),
    );
  }
}

/**
 * One link in words: query, key, weight, whether that is exact, and what one may do.
 * @param {{row: import("./source.js").Row, key: number | null, lang: string, queryName: string, keyName: string,
 *   place: number, hint: string}} said  place: where the query stands among the words
 * @returns {Node[]}
 */
export function sayLink({ row, key, lang, queryName, keyName, place, hint }) {
  const weight = key === null ? (hasNaN(row) ? NaN : null) : weightOf(row, key);
  return [
    make("bdi", { class: "said-query" }, queryName),
    make("span", { class: "said-place" }, String(place)),
    make("span", {}, "→"),
    make("bdi", { class: "said-key" }, keyName),
    make("span", { class: "said-place" }, key === null ? "" : String(key)),
    make("b", { class: "said-weight", "data-query": row.token, "data-key": key, "data-weight": weight }, digits(weight)),
    make("span", { class: "said-how" }, Number.isNaN(weight) ? wordsFor(lang).nan : howWords(row.how, lang)),
    make("span", { class: "said-hint" }, hint),
  ];
}

/**
 * Are weights of a row NaN? Where a page holds the strongest alone, NaN stands for those that it does not hold.
 * @param {import("./source.js").Row} row
 */
export function hasNaN({ weights, how }) {
  return how !== "strongest" && weights.data.some(Number.isNaN);
}

/**
 * The weight of a key, null where this answer does not hold it.
 * @param {import("./source.js").Row} row
 * @param {number} key
 */
function weightOf(row, key) {
  const weight = row.weights.data[key - row.start];
  if (key >= row.start && key < row.stop && !(row.how === "strongest" && Number.isNaN(weight))) return weight;
  return row.top.find((link) => link.key === key)?.weight ?? null;
}
