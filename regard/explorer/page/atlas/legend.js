// The atlas's colours: from a head's number to the colour of its cell and of the text on it; and the legend that shows
// them with numbers and what the measure means.

import { DIFFERENCE, rampFor, stepAt } from "../shared/colours.js";
import { fill, make } from "../shared/elements.js";
import { figure, translate } from "../shared/messages.js";

/**
 * flat: all numbers are alike in the digits that are shown, and have one colour; low and high are NaN where there is none.
 * @typedef {{low: number, high: number, flat: boolean, colour: (value: number) => string, ink: (value: number) => string,
 *   gradient: string}} Painting
 */

/** What lies closer together than this is rounding of sums in fp32, and no difference between heads. */
const NOISE = 1e-5;

/**
 * One colour path from the lowest number to the highest; one colour where these are alike in the digits that are shown.
 * @param {ArrayLike<number>} values  NaN is left out
 * @param {boolean} fromZero  whether the path begins at 0 even where the lowest number is larger
 * @param {boolean} dark
 * @returns {Painting}
 */
export function sequence(values, fromZero, dark) {
  const [least, high] = bounds(values);
  const low = fromZero ? Math.min(0, least) : least;
  const flat = !(high - low >= NOISE) || figure(low) === figure(high);
  const ramp = rampFor(dark);
  const step = (/** @type {number} */ value) => stepAt(flat ? 0 : (value - low) / (high - low));
  const stops = Array.from({ length: 9 }, (_, i) => ramp.css[stepAt(flat ? 0 : i / 8)]);
  const gradient = `linear-gradient(to right, ${stops.join(", ")})`;
  return { low, high, flat, colour: (value) => ramp.css[step(value)], ink: (value) => ramp.ink[step(value)], gradient };
}

/**
 * Two colour paths, for less and for more, that meet at 0.
 * @param {ArrayLike<number>} values  NaN is left out
 * @param {boolean} dark
 * @returns {Painting}
 */
export function difference(values, dark) {
  const [least, most] = bounds(values);
  const largest = Math.max(Math.abs(least), Math.abs(most));
  const high = largest > NOISE ? largest : 1;
  const { less, none, more } = dark ? DIFFERENCE.dark : DIFFERENCE.light;
  const mixed = (/** @type {number} */ value) => {
    const [end, share] = [value < 0 ? less : more, Math.min(1, Math.abs(value) / high)];
    return none.map((part, i) => Math.round(part + (end[i] - part) * share));
  };
  const css = (/** @type {number} */ value) => `rgb(${mixed(value).join(" ")})`;
  const stops = [-1, -0.5, 0, 0.5, 1].map((share) => css(share * high));
  const gradient = `linear-gradient(to right, ${stops.join(", ")})`;
  return { low: -high, high, flat: false, colour: css, ink: (value) => (light(mixed(value)) > 0.179 ? "#000" : "#fff"), gradient };
}

/**
 * The lowest and the highest number; NaN twice where there is none.
 * @param {ArrayLike<number>} values
 */
function bounds(values) {
  let [low, high] = [Infinity, -Infinity];
  for (let i = 0; i < values.length; i++) {
    if (values[i] < low) low = values[i];
    if (values[i] > high) high = values[i];
  }
  return low > high ? [NaN, NaN] : [low, high];
}

/**
 * Relative luminance (WCAG 2).
 * @param {number[]} rgb
 */
function light(rgb) {
  const [r, g, b] = rgb.map((part) => (part <= 10 ? part / 3294.6 : ((part / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

// ---------------------------------------------------------------------------------------------------------- the legend

/**
 * Draw the legend of a painting.
 * @param {HTMLElement} element
 * @param {Painting} painting
 * @param {string} about
 * @param {import("../shared/messages.js").Lang} lang
 */
export function drawLegend(element, { low: lowest, high, flat, gradient }, about, lang) {
  const low = Math.abs(lowest) < high * 1e-4 ? 0 : lowest; // not "2e−7"
  const label = flat
    ? translate("{value} in every head", lang, { value: figure(Math.abs(high) < NOISE ? 0 : high) })
    : translate("Colours from {low} to {high}", lang, { low: figure(low), high: figure(high) });
  const numbers = flat ? [label] : [low, (low + high) / 2, high].map(figure);
  fill(
    element,
    make("div", { class: "ramp", style: `background: ${gradient}`, role: "img", "aria-label": label }),
    make("div", { class: "ramp-numbers" }, ...numbers.map((words) => make("span", {}, words))),
    make("p", { class: "about" }, about),
  );
}
