// The atlas's colours: from a head's number to the colour of its cell and of the words on it, with a legend's gradient.
// It does not know which measure it paints.

import { rampFor, stepAt } from "./colourmaps.js";
import { figure } from "./words.js";

/**
 * flat: all numbers are alike in the digits that are shown, and have one colour; low and high are NaN where there is none.
 * @typedef {{low: number, high: number, flat: boolean, colour: (value: number) => string, ink: (value: number) => string,
 *   gradient: string}} Painting
 */

/** Less, nothing and more, in sRGB, on light and on dark paper: blue and orange, told apart by colour-blind eyes. */
const LIGHT = { less: [33, 102, 172], none: [247, 247, 245], more: [190, 90, 10] };
const DARK = { less: [120, 180, 240], none: [38, 41, 46], more: [250, 165, 80] };

/** What lies closer together than this is rounding of sums in fp32, and no difference between heads. */
export const NOISE = 1e-5;

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
  const { less, none, more } = dark ? DARK : LIGHT;
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
