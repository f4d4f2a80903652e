// The legend below the atlas: its colours with numbers, and what the measure means. It does not know the heads.

import { fill, make } from "./elements.js";
import { NOISE } from "./painting.js";
import { figure, say } from "./words.js";

/**
 * Draw the legend of a painting.
 * @param {HTMLElement} element
 * @param {import("./painting.js").Painting} painting
 * @param {string} about
 * @param {import("./words.js").Lang} lang
 */
export function drawLegend(element, { low: lowest, high, flat, gradient }, about, lang) {
  const low = Math.abs(lowest) < high * 1e-4 ? 0 : lowest; // not "2e−7"
  const label = flat
    ? say(lang, "legend_alike", { value: figure(Math.abs(high) < NOISE ? 0 : high) })
    : say(lang, "legend", { low: figure(low), high: figure(high) });
  const numbers = flat ? [label] : [low, (low + high) / 2, high].map(figure);
  fill(
    element,
    make("div", { class: "ramp", style: `background: ${gradient}`, role: "img", "aria-label": label }),
    make("div", { class: "ramp-numbers" }, ...numbers.map((words) => make("span", {}, words))),
    make("p", { class: "about" }, about),
  );
}
