// The legend below the atlas: its colours with numbers, and what the measure means. It does not know the heads.

import { fill, make } from "./elements.js";
import { figure, say } from "./words.js";

/**
 * Draw the legend of a painting.
 * @param {HTMLElement} element
 * @param {import("./painting.js").Painting} painting
 * @param {string} about
 * @param {import("./words.js").Lang} lang
 */
export function drawLegend(element, { low: lowest, high, gradient }, about, lang) {
  const low = Math.abs(lowest) < high * 1e-4 ? 0 : lowest; // not "2e−7"
  const label = say(lang, "legend", { low: figure(low), high: figure(high) });
  const numbers = [low, (low + high) / 2, high].map((value) => make("span", {}, figure(value)));
  fill(
    element,
    make("div", { class: "ramp", style: `background: ${gradient}`, role: "img", "aria-label": label }),
    make("div", { class: "ramp-numbers" }, ...numbers),
    make("p", { class: "about" }, about),
  );
}
