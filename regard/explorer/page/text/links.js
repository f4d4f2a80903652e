// The strongest links of a query: a line for the one that is looked at, a list, and, in short texts, arcs above the
// words. Arcs are for eyes alone: the list and the words' own labels say the same.

import { stepAt } from "../shared/colours.js";
import { fill, focusedAround, make, svgElement } from "../shared/elements.js";
import { digits, howText, message, signedDigits, translate } from "../shared/messages.js";

/** @typedef {{key: number, weight: number}} Top */
/**
 * @typedef {{key: number | null, lang: string, scale: import("../shared/colours.js").Scale,
 *   paper: import("../shared/colours.js").Paper, name: (key: number) => string}} Listed
 */

export const NO_ROWS = message(
  "This capture was made without queries and keys, so exact rows cannot be had.",
);

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
      const place = scale.place(link.weight);
      const colour = scale.signed ? paper.signed.css[stepAt(place)] : paper.ramp.css[stepAt(Math.max(0.35, place))];
      const width = `${(100 * Math.abs(link.weight / top[0].weight)).toFixed(1)}%`;
      const number = scale.signed ? signedDigits(link.weight) : digits(link.weight);
      return make("li", {}, this.#line(link, names[i], link.key === key, `width: ${width}; background: ${colour}`, number));
    });
    const title = scale.signed ? message("Largest changes") : message("Strongest links");
    fill(this.element, make("h3", {}, translate(title, lang)), make("ol", {}, ...lines));
    if (focused) /** @type {HTMLElement | null} */ (this.element.querySelector(`[data-key="${focused}"]`))?.focus();
  }

  /**
   * @param {Top} link
   * @param {string} name
   * @param {boolean} chosen
   * @param {string} bar
   * @param {string} number
   */
  #line({ key, weight }, name, chosen, bar, number) {
    const given = { type: "button", "aria-pressed": String(chosen), "data-key": key, "data-weight": weight };
    return make(
      "button",
      { ...given, onclick: () => this.go(key) },
      make("bdi", { class: "link-word" }, name),
      make("span", { class: "link-place" }, String(key)),
      make("span", { class: "link-bar" }, make("span", { style: bar })),
      make("span", { class: "link-weight" }, number),
    );
  }
}

/**
 * One link in words: query, key, weight, whether that is exact, and what one may do.
 * @param {{row: import("../source/source.js").Row, key: number | null, lang: string, queryName: string, keyName: string,
 *   place: number, hint: string}} said  place: where the query stands among the words
 * @returns {Node[]}
 */
export function sayLink({ row, key, lang, queryName, keyName, place, hint }) {
  const weight = key === null ? (hasNaN(row) ? NaN : null) : weightOf(row, key);
  const how = row.signed ? translate("change (second − first)", lang) : howText(row.how, lang);
  return [
    make("bdi", { class: "said-query" }, queryName),
    make("span", { class: "said-place" }, String(place)),
    make("span", {}, "→"),
    make("bdi", { class: "said-key" }, keyName),
    make("span", { class: "said-place" }, key === null ? "" : String(key)),
    make("b", { class: "said-weight", "data-query": row.token, "data-key": key, "data-weight": weight },
      row.signed ? signedDigits(weight) : digits(weight)),
    make(
      "span",
      { class: "said-how" },
      Number.isNaN(weight) ? translate("weights are NaN: see regard doctor", lang) : how,
    ),
    make("span", { class: "said-hint" }, hint),
  ];
}

/**
 * Are weights of a row NaN? Where a page holds the strongest alone, NaN stands for those that it does not hold.
 * @param {import("../source/source.js").Row} row
 */
export function hasNaN({ weights, how, signed }) {
  return how !== "strongest" && !signed && weights.data.some(Number.isNaN);
}

/**
 * The weight of a key, null where this answer does not hold it.
 * @param {import("../source/source.js").Row} row
 * @param {number} key
 */
export function weightOf(row, key) {
  const weight = row.weights.data[key - row.start];
  if (key >= row.start && key < row.stop && !((row.how === "strongest" || row.signed) && Number.isNaN(weight))) return weight;
  return row.top.find((link) => link.key === key)?.weight ?? null;
}

// ---------------------------------------------------------------------------------------------------------------- arcs

/** @typedef {{from: HTMLElement, to: HTMLElement, weight: number, place: number}} Arc */

/** A line of words: between its top and bottom an arc may pass at the gaps alone. @typedef {{top: number, bottom: number, gaps: number[]}} Line */

/** Numbers are written on so many of the strongest arcs. */
const NUMBERED = 2;
/** Pixels above the top of an arc that its number takes. */
const NUMBER = 10;

/**
 * Draw these arcs, and no others.
 * @param {SVGSVGElement} svg  laid over the words
 * @param {Arc[]} arcs  strongest first
 * @param {Iterable<HTMLElement>} pieces  of all words, which arcs do not cross
 * @param {import("../shared/colours.js").Paper} paper
 */
export function drawArcs(svg, arcs, pieces, paper) {
  const origin = svg.getBoundingClientRect();
  const lines = arcs.length > 0 ? linesOf(pieces, origin) : [];
  /** @type {{x: number, y: number}[]} */
  const written = [];
  const drawn = arcs.map((arc, order) => {
    const { path, apex } = courseOf(arc, origin, lines);
    const line = svgElement("path", { d: path, class: "arc", stroke: paper.ramp.css[Math.round(115 + 140 * arc.place)] });
    line.setAttribute("stroke-width", String(1 + 4 * arc.place));
    const free = written.every(({ x, y }) => Math.abs(x - apex.x) > 44 || Math.abs(y - apex.y) > 11);
    if (order >= NUMBERED || !free) return [line];
    written.push(apex);
    const number = svgElement("text", { x: apex.x, y: apex.y, class: "arc-number", fill: paper.ink, stroke: paper.paper });
    number.textContent = digits(arc.weight);
    return [line, number];
  });
  // Strong ones last, on top; numbers above all lines.
  const marks = drawn.reverse().flat();
  svg.replaceChildren(...marks.filter((mark) => mark.tagName === "path"), ...marks.filter((mark) => mark.tagName !== "path"));
}

/** A drawing for arcs, hidden from screen readers. */
export function arcsLayer() {
  return /** @type {SVGSVGElement} */ (svgElement("svg", { class: "arcs", "aria-hidden": "true" }));
}

/**
 * The course of an arc, and where its number stands: over the words of one line; from line to line through the gaps
 * between the words of those that lie between.
 * @param {Arc} arc
 * @param {DOMRect} origin
 * @param {Line[]} lines
 */
function courseOf({ from, to }, origin, lines) {
  const [start, end] = [edgesOf(from, origin), edgesOf(to, origin)];
  if (from === to) return loop({ x: start.x, y: start.top });
  const lineOf = (/** @type {Edges} */ { top, bottom }) =>
    lines.findIndex((line) => line.top - 2 < (top + bottom) / 2 && (top + bottom) / 2 < line.bottom + 2);
  const [first, last] = [lineOf(start), lineOf(end)];
  if (first === last) {
    const above = start.top - (lines[first - 1]?.bottom ?? 0) - NUMBER; // room up to the words before, or out of sight
    const lift = Math.min(30, 10 + 0.12 * Math.abs(start.x - end.x), Math.max(8, above));
    const [y, over] = [start.top, start.top - lift * 1.33];
    const path = `M${start.x} ${y} C${start.x} ${over} ${end.x} ${over} ${end.x} ${end.top}`;
    return { path, apex: { x: (start.x + end.x) / 2, y: y - lift - 3 } };
  }
  const up = last < first;
  let [x, y] = [start.x, up ? start.top : start.bottom];
  let path = `M${x} ${y}`;
  const curve = (/** @type {number} */ toX, /** @type {number} */ toY) => {
    path += ` C${x} ${(y + toY) / 2} ${toX} ${(y + toY) / 2} ${toX} ${toY}`;
    [x, y] = [toX, toY];
  };
  const between = up ? lines.slice(last + 1, first).reverse() : lines.slice(first + 1, last);
  between.forEach(({ top, bottom, gaps }, n) => {
    const straight = x + (end.x - x) / (between.length - n + 1);
    const gap = gaps.reduce((best, one) => (Math.abs(one - straight) < Math.abs(best - straight) ? one : best), gaps[0]);
    curve(gap, up ? bottom : top);
    y = up ? top : bottom;
    path += ` V${y}`;
  });
  const at = up ? end.bottom : end.top;
  curve(end.x, at);
  return { path, apex: { x: end.x, y: up ? at + 13 : at - 6 } };
}

/**
 * The lines that words stand in, from top to bottom.
 * @param {Iterable<HTMLElement>} pieces
 * @param {DOMRect} origin
 * @returns {Line[]}
 */
function linesOf(pieces, origin) {
  /** @type {Edges[][]} */
  const lines = [];
  for (const piece of pieces) {
    const edges = edgesOf(piece, origin);
    const line = lines[lines.length - 1];
    if (line && edges.top < line[0].bottom) line.push(edges);
    else lines.push([edges]);
  }
  return lines.map((line) => {
    const inner = line.slice(1).flatMap(({ left }, i) => (left - line[i].right > 1 ? [(left + line[i].right) / 2] : []));
    const gaps = [line[0].left - 5, ...inner, line[line.length - 1].right + 5];
    return { top: Math.min(...line.map(({ top }) => top)), bottom: Math.max(...line.map(({ bottom }) => bottom)), gaps };
  });
}

/** @param {{x: number, y: number}} at */
function loop({ x, y }) {
  return { path: `M${x - 5} ${y} C${x - 14} ${y - 20} ${x + 14} ${y - 20} ${x + 5} ${y}`, apex: { x, y: y - 17 } };
}

/** @typedef {{x: number, left: number, right: number, top: number, bottom: number}} Edges */

/**
 * @param {HTMLElement} word
 * @param {DOMRect} origin
 * @returns {Edges}
 */
function edgesOf(word, origin) {
  const box = word.getClientRects()[0] ?? word.getBoundingClientRect();
  const [left, right] = [box.left - origin.left, box.right - origin.left];
  return { x: (left + right) / 2, left, right, top: box.top - origin.top - 1, bottom: box.bottom - origin.top + 1 };
}
