// The heads of an overview as a flat list, with what can be searched and sorted. Pure: it does not know the page.

import { readSearch } from "./search.js";

/** @typedef {import("./source.js").Overview} Overview */
/** @typedef {{layer: number, head: number, numbers: Record<string, number>, label: string | null}} HeadLine */

/** Measures that are no pattern: their colours begin at the lowest number, not at 0. */
export const PLAIN = ["entropy", "effective", "received_max"];

/**
 * Every head that is there, layer by layer.
 * @param {Overview} overview
 * @returns {HeadLine[]}
 */
export function headsOf(overview) {
  return overview.layers.flatMap(({ heads }, layer) =>
    Array.from({ length: heads }, (_, head) => ({
      layer,
      head,
      numbers: { layer, head, ...numbersOf(overview, layer, head) },
      label: overview.labels_of_heads[layer]?.[head] ?? null,
    })),
  );
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
  const patterns = measures.filter((name) => !PLAIN.includes(name));
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
