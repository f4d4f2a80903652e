// The heads of an overview as a flat list, with what can be searched and sorted. Pure: it does not know the page.

import { readSearch } from "./search.js";

/** @typedef {import("./source.js").Overview} Overview */
/**
 * numbers: NaN also where a layer does not have the measure; broken: the measures that it has, and that are NaN.
 * @typedef {{layer: number, head: number, numbers: Record<string, number>, broken: Set<string>, label: string | null}} HeadLine
 */

/** Measures that are no pattern: their colours begin at the lowest number, not at 0. */
export const PLAIN = ["entropy", "effective", "received_max"];
/** The effect of a link: no pattern either, but its colours begin at 0. */
export const EFFECT = "effect";
/** Weights of a layer up to which everything is measured, asked for or not. */
const LITTLE = 2 ** 21;

/**
 * Every head that is there, layer by layer.
 * @param {Overview} overview
 * @returns {HeadLine[]}
 */
export function headsOf(overview) {
  return overview.layers.flatMap((found, layer) => {
    const lines = Array.from({ length: found.heads }, (_, head) => numbersOf(overview, layer, head));
    const certain = !found.rows || isLittle(found) || !overview.layers.some((other) => other.rows && isLittle(other));
    const measured = measuredIn(lines, Object.keys(overview.measures), certain);
    return lines.map((numbers, head) => ({
      layer,
      head,
      numbers: { layer, head, ...numbers },
      broken: new Set(measured.filter((name) => Number.isNaN(numbers[name]))),
      label: overview.labels_of_heads[layer]?.[head] ?? null,
    }));
  });
}

/** @param {import("./source.js").Layer} layer */
function isLittle({ heads, queries, keys, windows }) {
  return (heads * queries * keys) / (windows ?? 1) <= LITTLE;
}

/**
 * The measures that a layer has: those with a number in one of its heads, and those that are no pattern, which every layer
 * is asked for alike. Where all these are NaN, so are the patterns.
 * @param {Record<string, number>[]} lines
 * @param {string[]} names
 * @param {boolean} certain  false for a large layer beside little ones, of which alone something may have been measured
 */
function measuredIn(lines, names, certain) {
  const known = names.filter((name) => lines.some((numbers) => !Number.isNaN(numbers[name])));
  const plain = PLAIN.filter((name) => names.includes(name));
  if (plain.length === 0 || !certain) return known;
  return plain.some((name) => known.includes(name)) ? [...known, ...plain] : names;
}

/**
 * @param {Overview} overview
 * @param {number} layer
 * @param {number} head
 */
function numbersOf(overview, layer, head) {
  const entries = Object.entries(overview.measures);
  return Object.fromEntries(entries.map(([name, { shape, data }]) => [name, data[layer * shape[1] + head]]));
}

/**
 * The measure that can be shown: the asked one, or the first there is.
 * @param {Overview} overview
 * @param {string} asked
 * @returns {string}
 */
export function measureOf(overview, asked) {
  return asked in overview.measures ? asked : (Object.keys(overview.measures)[0] ?? asked);
}

/**
 * The heads that fit a search. Raises SearchError.
 * @param {HeadLine[]} heads
 * @param {string} find
 * @param {Overview} overview
 * @returns {Set<HeadLine>}
 */
export function fitting(heads, find, overview) {
  const measures = Object.keys(overview.measures);
  const patterns = measures.filter((name) => !PLAIN.includes(name) && name !== EFFECT);
  const question = readSearch(find, { numbers: [...measures, "layer", "head"], patterns });
  return new Set(heads.filter(question));
}

/**
 * Each head's number less that of the same head in another overview; null where layers or heads differ.
 * @param {HeadLine[]} heads
 * @param {Overview} overview
 * @param {Overview} baseline
 * @param {string} measure
 * @returns {number[] | null}
 */
export function lessBaseline(heads, overview, baseline, measure) {
  const counts = (/** @type {Overview} */ { layers }) => layers.map((layer) => layer.heads).join();
  if (counts(overview) !== counts(baseline) || !(measure in baseline.measures)) return null;
  const { shape, data } = baseline.measures[measure];
  return heads.map(({ layer, head, numbers }) => numbers[measure] - data[layer * shape[1] + head]);
}
