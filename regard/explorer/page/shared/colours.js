// Colours of weights: from a weight to a place between 0 and 1, from a place to a colour, and the inks of a pane.
//
// One path through OKLCH, from pale cyan to deep navy, walked in steps of equal perceived distance. The end next to the
// paper means nothing, the far end much: more ink on light paper, more light on dark paper. Lightness alone orders the
// colours, so the map reads in grey and for colour-blind eyes. `paperUnder` reads the other inks from
// shell/colours.css.

/** @typedef {"linear" | "log" | "rank"} ScaleKind */
/** signed: 0 is in the middle, and the ramp is that of differences. @typedef {{kind: ScaleKind, low: number, high: number, signed?: boolean, place: (value: number) => number}} Scale */
/** @typedef {{dark: boolean, rgb: Uint8ClampedArray, css: string[], ink: string[]}} Ramp */

const STEPS = 256;
/** Lightness, chroma and hue at the paper's end and at the far end. */
const LIGHT = { from: [0.985, 0.006, 200], to: [0.255, 0.085, 276], bulge: 0.072 };
const DARK = { from: [0.235, 0.03, 276], to: [0.96, 0.045, 190], bulge: 0.072 };
/** Less, nothing and more, in sRGB, on light and on dark paper: blue and orange, told apart by colour-blind eyes. */
export const DIFFERENCE = {
  light: { less: [33, 102, 172], none: [247, 247, 245], more: [190, 90, 10] },
  dark: { less: [120, 180, 240], none: [38, 41, 46], more: [250, 165, 80] },
};
/** Logarithms go no further below the largest value than this many tenfolds. */
const DECADES = 5;

/** @type {Map<string, Ramp>} */
const made = new Map();

/**
 * The ramp for light or for dark paper, of weights or of differences, made once.
 * @param {boolean} dark
 * @param {boolean} [signed]
 * @returns {Ramp}
 */
export function rampFor(dark, signed = false) {
  const name = `${dark} ${signed}`;
  const known = made.get(name);
  if (known) return known;
  const ramp = rampOf(dark, signed ? differences(dark) : evenly(dark ? DARK : LIGHT).map(toRgb));
  made.set(name, ramp);
  return ramp;
}

/**
 * Is the paper under an element dark? Looks for the nearest painted background, so it is right in a notebook as well.
 * @param {Element} element
 * @returns {boolean}
 */
export function onDarkPaper(element) {
  for (let at = /** @type {Element | null} */ (element); at; at = at.parentElement) {
    const parts = (getComputedStyle(at).backgroundColor.match(/[\d.]+/g) ?? []).map(Number);
    if (parts.length < 3 || (parts.length > 3 && parts[3] < 0.5)) continue;
    return luminance(parts[0], parts[1], parts[2]) < 0.18;
  }
  return false;
}

/**
 * A scale that takes values to places 0..1. Values that are not numbers, and zero (hidden), have no part in it.
 *
 * linear: share of the largest.  log: tenfolds below the largest, five at most.  rank: share of the values that are
 * smaller, ties in the middle.
 * @param {ScaleKind} kind
 * @param {Iterable<number>} values those that are seen
 * @returns {Scale}
 */
export function scaleOf(kind, values) {
  const seen = Float64Array.from(values).filter((value) => value > 0 && Number.isFinite(value));
  if (seen.length === 0) return { kind, low: 0, high: 1, place: () => 0 };
  if (kind === "rank") return rankScale(seen.sort());
  let [low, high] = [Infinity, 0];
  for (const value of seen) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  high = Math.min(high, 1); // cells at a map's ragged edge are scaled up
  if (kind === "linear") return { kind, low: 0, high, place: (value) => clamp(value / high) };
  low = Math.min(Math.max(low, high * 10 ** -DECADES), high / 10);
  const span = Math.log(high / low);
  return { kind, low, high, place: (value) => (value > 0 ? clamp(Math.log(value / low) / span) : 0) };
}

/**
 * The scale of differences: from the largest decrease, or as much below 0 as the largest increase is above, to the other end.
 * @param {Iterable<number>} values
 * @returns {Scale}
 */
export function signedScale(values) {
  let high = 0;
  for (const value of values) if (Math.abs(value) > high) high = Math.abs(value);
  const most = high || 1;
  return { kind: "linear", signed: true, low: -most, high: most, place: (value) => clamp(0.5 + value / (2 * most)) };
}

/**
 * @param {Float64Array} sorted ascending
 * @returns {Scale}
 */
function rankScale(sorted) {
  const place = (/** @type {number} */ value) => {
    if (!(value > 0)) return 0;
    return (firstNotBelow(sorted, value) + firstNotBelow(sorted, value, true)) / (2 * sorted.length);
  };
  return { kind: "rank", low: sorted[0], high: sorted[sorted.length - 1], place };
}

/**
 * How many of the sorted values are below one, or (past) not above it.
 * @param {Float64Array} sorted
 * @param {number} value
 * @param {boolean} [past]
 */
function firstNotBelow(sorted, value, past = false) {
  let [low, high] = [0, sorted.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value || (past && sorted[middle] === value)) low = middle + 1;
    else high = middle;
  }
  return low;
}

/**
 * The step of a ramp, 0..255, for a place 0..1.
 * @param {number} place
 */
export function stepAt(place) {
  return Math.round(clamp(place) * (STEPS - 1));
}

/** @param {number} place */
function clamp(place) {
  return place > 0 ? Math.min(place, 1) : 0;
}

/** @param {boolean} dark */
function differences(dark) {
  const { less, none, more } = dark ? DIFFERENCE.dark : DIFFERENCE.light;
  return Array.from({ length: STEPS }, (_, step) => {
    const share = (2 * step) / (STEPS - 1) - 1;
    return none.map((part, i) => part + ((share < 0 ? less : more)[i] - part) * Math.abs(share));
  });
}

/**
 * @param {boolean} dark
 * @param {number[][]} colours  STEPS of them, in sRGB
 * @returns {Ramp}
 */
function rampOf(dark, colours) {
  const rgb = new Uint8ClampedArray(STEPS * 3);
  const css = [];
  const ink = [];
  for (let step = 0; step < STEPS; step++) {
    const colour = colours[step];
    rgb.set(colour, step * 3);
    css.push(`rgb(${rgb[3 * step]} ${rgb[3 * step + 1]} ${rgb[3 * step + 2]})`);
    // Black and white contrast equally at a luminance of 0.179 (WCAG 2).
    ink.push(luminance(colour[0], colour[1], colour[2]) > 0.179 ? "#000" : "#fff");
  }
  return { dark, rgb, css, ink };
}

/**
 * Points along the path at equal OKLab distance, so that equal steps look equal.
 * @param {{from: number[], to: number[], bulge: number}} path
 * @returns {number[][]} STEPS × (L, a, b)
 */
function evenly(path) {
  const fine = Array.from({ length: 1025 }, (_, i) => pointOn(path, i / 1024));
  const run = [0];
  for (let i = 1; i < fine.length; i++) run.push(run[i - 1] + distance(fine[i - 1], fine[i]));
  const points = [];
  for (let step = 0, i = 0; step < STEPS; step++) {
    const wanted = (run[run.length - 1] * step) / (STEPS - 1);
    while (i < fine.length - 1 && run[i] < wanted) i++;
    points.push(fine[i]);
  }
  return points;
}

/**
 * @param {{from: number[], to: number[], bulge: number}} path
 * @param {number} t
 */
function pointOn(path, t) {
  const [lightness, plain, hue] = path.from.map((value, i) => value + (path.to[i] - value) * t);
  const chroma = plain + path.bulge * Math.sin(Math.PI * t);
  const angle = (hue * Math.PI) / 180;
  return [lightness, chroma * Math.cos(angle), chroma * Math.sin(angle)];
}

/**
 * @param {number[]} p
 * @param {number[]} q
 */
function distance(p, q) {
  return Math.hypot(p[0] - q[0], p[1] - q[1], p[2] - q[2]);
}

/**
 * OKLab → sRGB 0..255 (Ottosson, "A perceptual color space for image processing", 2020).
 * @param {number[]} lab
 */
function toRgb([lightness, a, b]) {
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ].map((light) => 255 * (light <= 0.0031308 ? 12.92 * light : 1.055 * light ** (1 / 2.4) - 0.055));
}

/**
 * Relative luminance (WCAG 2) of sRGB 0..255.
 * @param {number} red
 * @param {number} green
 * @param {number} blue
 */
function luminance(red, green, blue) {
  const [r, g, b] = [red, green, blue].map((value) => {
    const part = Math.min(255, Math.max(0, value)) / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

// ---------------------------------------------------------------------------------------------------------------- inks

// ---------------------------------------------------------------------------------------------------------------- inks

/**
 * @typedef {{dark: boolean, ramp: Ramp, signed: Ramp, paper: string, ink: string, muted: string,
 *   line: string, gap: string, dot: string, bar: string, veil: string, query: string, key: string, alarm: string}} Paper
 */

const LIGHT_MARKS = { gap: "rgb(255 255 255 / 0.75)", dot: "rgb(27 31 38 / 0.3)", veil: "rgb(27 31 38 / 0.12)" };
const DARK_MARKS = { gap: "rgb(20 23 28 / 0.8)", dot: "rgb(232 235 240 / 0.28)", veil: "rgb(232 235 240 / 0.16)" };

/**
 * The inks for the paper under an element.
 * @param {HTMLElement} element
 * @returns {Paper}
 */
export function paperUnder(element) {
  const dark = onDarkPaper(element);
  const style = getComputedStyle(element);
  const own = (/** @type {string} */ name) => style.getPropertyValue(`--${name}`).trim();
  return {
    ...{ dark, ramp: rampFor(dark), signed: rampFor(dark, true), paper: own("paper"), ink: own("ink"), muted: own("muted"), line: own("strong-line") },
    ...{ bar: own("bar"), query: own("query"), key: own("key"), alarm: own("error"), ...(dark ? DARK_MARKS : LIGHT_MARKS) },
  };
}
