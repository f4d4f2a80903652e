// Weight against effect of one link, a dot for each head. A dot that has much weight and little effect is hollow; the one
// that is chosen has a ring. `choose` is told which head was clicked.

import { element, text } from "./bars.js";
import { idle, percent, ticks } from "./effects.js";
import { fill, make } from "./elements.js";
import { figure, say } from "./words.js";

/** @typedef {import("./effects.js").Point} Point */
/** @typedef {Point & {x: number, y: number}} Dot */

const [WIDE, HIGH] = [330, 176];
const [LEFT, RIGHT, TOP, BOTTOM] = [34, 12, 18, 30]; // margins
const NEAR = 14; // how far from a dot the pointer still means it
const LETTER = 6.4; // pixels that a letter of a name takes
const LABELLED = 2; // of the largest weights and of the largest effects, how many are named at most

/**
 * The plot.
 * @param {Point[]} points
 * @param {{layer: number, head: number}} chosen
 * @param {import("./words.js").Lang} lang
 * @param {(head: {layer: number, head: number}) => void} choose
 * @returns {HTMLElement}
 */
export function scatter(points, chosen, lang, choose) {
  const [right, top] = [Math.max(...points.map(({ weight }) => weight)) || 1, Math.max(...points.map(({ effect }) => effect)) || 1];
  const x = (/** @type {number} */ weight) => LEFT + (weight / right) * (WIDE - LEFT - RIGHT);
  const y = (/** @type {number} */ effect) => HIGH - BOTTOM - (effect / top) * (HIGH - TOP - BOTTOM);
  const dots = points.map((point) => ({ ...point, x: x(point.weight), y: y(point.effect) }));
  const hollow = new Set(idle(points).map(named));
  const label = say(lang, "scatter_label", { count: points.length });
  const svg = /** @type {SVGSVGElement} */ (
    element("svg", { class: "scatter", viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", "aria-label": label })
  );
  svg.append(
    ...ticks(right).flatMap((at) => [
      element("line", { class: "grid", x1: x(at), x2: x(at), y1: TOP, y2: HIGH - BOTTOM }),
      text("text", figure(at), { x: x(at), y: HIGH - BOTTOM + 12, class: "tick middle" }),
    ]),
    ...ticks(100 * top).flatMap((at) => [
      element("line", { class: "grid", x1: LEFT, x2: WIDE - RIGHT, y1: y(at / 100), y2: y(at / 100) }),
      text("text", String(at), { x: LEFT - 5, y: y(at / 100) + 3, class: "tick end" }),
    ]),
    text("text", say(lang, "scatter_x"), { x: WIDE - RIGHT, y: HIGH - 4, class: "axis-name end" }),
    text("text", say(lang, "scatter_y"), { x: 2, y: 9, class: "axis-name" }),
    ...dots.map((dot) => {
      const kind = `${hollow.has(named(dot)) ? " hollow" : ""}${named(dot) === named(chosen) ? " chosen" : ""}`;
      const place = { cx: dot.x, cy: dot.y, r: kind.includes("chosen") ? 5 : 3.5 };
      return element("circle", { class: `dot${kind}`, ...place, "data-layer": dot.layer, "data-head": dot.head });
    }),
    ...labels(dots, chosen, hollow).map(({ name, x, y, anchor }) => text("text", name, { x, y, class: `name ${anchor}` })),
  );
  const hint = say(lang, "scatter_hint") + (hollow.size > 0 ? ` ${say(lang, "scatter_hollow")}` : "");
  const readout = make("p", { class: "about" }, hint);
  const near = (/** @type {MouseEvent} */ event) => nearest(dots, at(svg, event));
  svg.addEventListener("pointermove", (event) => {
    const dot = near(event);
    svg.classList.toggle("pointing", dot !== null);
    const place = dot && { ...dot, weight: figure(dot.weight), effect: percent(dot.effect) };
    fill(readout, place ? say(lang, "scatter_at", place) : hint);
  });
  svg.addEventListener("pointerleave", () => fill(readout, hint));
  svg.addEventListener("click", (event) => {
    const dot = near(event);
    if (dot) choose({ layer: dot.layer, head: dot.head });
  });
  return make("div", { class: "scatter-plot" }, svg, readout);
}

/** @param {{layer: number, head: number}} head */
function named({ layer, head }) {
  return `L${layer}H${head}`; // as papers write it: 5.11 would read as a number beside the axes
}

/**
 * The names of dots and where they stand: of the chosen one, of the hollow ones, and of those with the largest effects and
 * weights. A name stands where it meets no other name and no dot; without such a place it is left out.
 * @param {Dot[]} dots
 * @param {{layer: number, head: number}} chosen
 * @param {Set<string>} hollow
 * @returns {{name: string, x: number, y: number, anchor: "start" | "middle" | "end"}[]}
 */
export function labels(dots, chosen, hollow) {
  const most = (/** @type {"weight" | "effect"} */ what) =>
    [...dots].sort((a, b) => b[what] - a[what]).slice(0, LABELLED).filter((dot) => dot[what] > 0);
  const wanted = new Set([
    ...dots.filter((dot) => named(dot) === named(chosen)),
    ...dots.filter((dot) => hollow.has(named(dot))),
    ...most("effect"),
    ...most("weight"),
  ]);
  /** @type {{left: number, right: number, middle: number}[]} */
  const boxes = [];
  return [...wanted].flatMap((dot) => {
    const [name, wide] = [named(dot), LETTER * named(dot).length];
    const places = /** @type {const} */ ([
      { x: dot.x + 7, y: dot.y + 3.5, anchor: "start", left: dot.x + 7 },
      { x: dot.x - 7, y: dot.y + 3.5, anchor: "end", left: dot.x - 7 - wide },
      { x: dot.x, y: dot.y - 8, anchor: "middle", left: dot.x - wide / 2 },
    ]);
    for (const { left, ...place } of places) {
      const box = { left, right: left + wide, middle: place.y - 3.5 };
      const meets = (/** @type {typeof box} */ other, /** @type {number} */ high) =>
        box.left < other.right && other.left < box.right && Math.abs(box.middle - other.middle) < high;
      const free =
        (box.left > LEFT && box.right < WIDE && box.middle > TOP - 8) &&
        !boxes.some((other) => meets(other, 11)) &&
        !dots.some((one) => one !== dot && meets({ left: one.x - 4, right: one.x + 4, middle: one.y }, 8));
      if (!free) continue;
      boxes.push(box);
      return [{ name, ...place }];
    }
    return [];
  });
}

/**
 * The dot nearest to a place; null where none is near.
 * @param {Dot[]} dots
 * @param {{x: number, y: number}} place
 * @returns {Dot | null}
 */
export function nearest(dots, { x, y }) {
  const far = (/** @type {Dot} */ dot) => Math.hypot(dot.x - x, dot.y - y);
  const first = dots.reduce((/** @type {Dot | null} */ best, dot) => (best && far(best) <= far(dot) ? best : dot), null);
  return first && far(first) <= NEAR ? first : null;
}

/**
 * Where a pointer is, in the plot's own units.
 * @param {SVGSVGElement} svg
 * @param {MouseEvent} event
 */
function at(svg, event) {
  const box = svg.getBoundingClientRect();
  return { x: ((event.clientX - box.left) / box.width) * WIDE, y: ((event.clientY - box.top) / box.height) * HIGH };
}
