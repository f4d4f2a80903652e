// Arcs from a query word to the keys it looks at most, drawn above the line; readable for short texts only. For eyes
// alone: the list of links and the words' own labels say the same. It does not know where weights come from.

import { digits } from "./panewords.js";

/** @typedef {{from: HTMLElement, to: HTMLElement, weight: number, place: number}} Arc */

const SVG = "http://www.w3.org/2000/svg";
/** Numbers are written on so many of the strongest arcs. */
const NUMBERED = 5;
/** Pixels above the top of an arc that its number takes. */
const NUMBER = 10;

/**
 * Draw these arcs, and no others.
 * @param {SVGSVGElement} svg  laid over the words
 * @param {Arc[]} arcs  strongest first
 * @param {import("./paper.js").Paper} paper
 */
export function drawArcs(svg, arcs, paper) {
  const origin = svg.getBoundingClientRect();
  /** @type {{x: number, y: number}[]} */
  const written = [];
  const drawn = arcs.map((arc, order) => {
    const { path, apex } = courseOf(arc, origin);
    const line = make("path", { d: path, class: "arc", stroke: paper.ramp.css[Math.round(115 + 140 * arc.place)] });
    line.setAttribute("stroke-width", String(1 + 4 * arc.place));
    const free = written.every(({ x, y }) => Math.abs(x - apex.x) > 44 || Math.abs(y - apex.y) > 11);
    if (order >= NUMBERED || !free) return [line];
    written.push(apex);
    const number = make("text", { x: apex.x, y: apex.y, class: "arc-number", fill: paper.ink, stroke: paper.paper });
    number.textContent = digits(arc.weight);
    return [line, number];
  });
  // Strong ones last, on top; numbers above all lines.
  const marks = drawn.reverse().flat();
  svg.replaceChildren(...marks.filter((mark) => mark.tagName === "path"), ...marks.filter((mark) => mark.tagName !== "path"));
}

/** A drawing for arcs, hidden from screen readers. */
export function arcsLayer() {
  return /** @type {SVGSVGElement} */ (make("svg", { class: "arcs", "aria-hidden": "true" }));
}

/**
 * The course of an arc, and where its number stands.
 * @param {Arc} arc
 * @param {DOMRect} origin
 */
function courseOf({ from, to }, origin) {
  const [start, end] = [edgesOf(from, origin), edgesOf(to, origin)];
  if (from === to) return loop({ x: start.x, y: start.top });
  if (Math.abs(start.top - end.top) < 8) {
    const lift = Math.min(30, 10 + 0.12 * Math.abs(start.x - end.x), Math.max(8, start.top - NUMBER)); // not out of sight
    const [y, over] = [start.top, start.top - lift * 1.33];
    const path = `M${start.x} ${y} C${start.x} ${over} ${end.x} ${over} ${end.x} ${end.top}`;
    return { path, apex: { x: (start.x + end.x) / 2, y: y - lift - 3 } };
  }
  // Between lines the arc runs from edge to edge that face each other, so that it crosses no word of its own lines.
  const up = end.top < start.top;
  const [y, at] = up ? [start.top, end.bottom] : [start.bottom, end.top];
  const middle = (y + at) / 2;
  const path = `M${start.x} ${y} C${start.x} ${middle} ${end.x} ${middle} ${end.x} ${at}`;
  return { path, apex: { x: end.x, y: up ? at + 13 : at - 6 } };
}

/** @param {{x: number, y: number}} at */
function loop({ x, y }) {
  return { path: `M${x - 5} ${y} C${x - 14} ${y - 20} ${x + 14} ${y - 20} ${x + 5} ${y}`, apex: { x, y: y - 17 } };
}

/**
 * @param {HTMLElement} word
 * @param {DOMRect} origin
 */
function edgesOf(word, origin) {
  const box = word.getClientRects()[0] ?? word.getBoundingClientRect();
  return { x: box.left + box.width / 2 - origin.left, top: box.top - origin.top - 1, bottom: box.bottom - origin.top + 1 };
}

/**
 * @param {string} tag
 * @param {Record<string, string | number>} given
 */
function make(tag, given) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(given)) element.setAttribute(name, String(value));
  return element;
}
