// The heads of an overview as a flat list, with what can be searched and sorted, and the names of measures. Pure.

import { message, translate } from "../shared/messages.js";
import { readSearch } from "./search.js";

/** @typedef {import("../source/source.js").Overview} Overview */

/**
 * numbers: NaN also where a layer does not have the measure; broken: the measures that it has, and that are NaN.
 * @typedef {{layer: number, head: number, numbers: Record<string, number>, broken: Set<string>, label: string | null,
 *   rest: string | null}} HeadLine
 */

/** A measure that nobody chose: the effect of the chosen link where it is known, else its weight, else the first there is. */
export const AUTO = "auto";
/** The weight of the chosen link. */
export const LINK = "link";
/** Measures that are no pattern: their colours begin at the lowest number, not at 0. */
export const PLAIN = ["entropy", "effective", "received_max"];
/** The effect of a link: no pattern either, but its colours begin at 0. */
export const EFFECT = "effect";
/** Weights of a layer up to which everything is measured, asked for or not. */
const LITTLE = 2 ** 21;

/** @type {Record<string, {name: string, about: string}>} */
const MEASURES = {
  entropy: {
    name: message("entropy"),
    about: message("How spread out a query's attention is, in nats; 0 is one single key."),
  },
  effective: {
    name: message("effective keys (1/Σw²)"),
    about: message("How many keys a query spreads over: 1/Σw² of its weights, the mean over queries."),
  },
  received_max: {
    name: message("max received"),
    about: message("Share of all attention that the most looked-at key receives."),
  },
  first: {
    name: message("first token (sink)"),
    about: message("Mean weight on the first token, where many heads rest."),
  },
  own: {
    name: message("itself"),
    about: message("Mean weight on the query's own token."),
  },
  previous: {
    name: message("previous token"),
    about: message("Mean weight on the token before, of tokens that have one."),
  },
  next: {
    name: message("next token"),
    about: message("Mean weight on the token after, of tokens that have one."),
  },
  neighbours: {
    name: message("neighbours"),
    about: message("Weight on the tokens around the query."),
  },
  uniform: {
    name: message("spread evenly"),
    about: message("How close to looking everywhere alike."),
  },
  delimiter: {
    name: message("delimiters"),
    about: message("Weight on full stops, [SEP] and the like; the first token is none."),
  },
  "same token": {
    name: message("same token"),
    about: message("Weight on the nearest other places of the same token, of tokens that have some."),
  },
  induction: {
    name: message("induction"),
    about: message("Weight on what came after the same token earlier, of tokens that came before."),
  },
  link: { name: message("link weight"), about: "" },
  max_weight: { name: message("largest weight"), about: "" },
  effect: { name: message("link effect (%)"), about: "" },
};

/**
 * A measure's or pattern's name; as it is, where the page has none for it.
 * @param {string} measure
 * @param {string} lang
 * @returns {string}
 */
export function measureName(measure, lang) {
  return Object.hasOwn(MEASURES, measure) ? translate(MEASURES[measure].name, lang) : measure.replaceAll("_", " ");
}

/**
 * What a measure means, "" where the page does not know.
 * @param {string} measure
 * @param {string} lang
 * @returns {string}
 */
export function measureAbout(measure, lang) {
  const about = Object.hasOwn(MEASURES, measure) ? MEASURES[measure].about : "";
  return about && translate(about, lang);
}

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
      rest: overview.rest_of_heads?.[layer]?.[head] ?? null,
    }));
  });
}

/** @param {import("../source/source.js").Layer} layer */
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
 * @param {string[]} [ofLink]  those of the chosen link that are there, the best first
 * @returns {string}
 */
export function measureOf(overview, asked, ofLink = []) {
  const measures = Object.keys(overview.measures);
  if (asked === AUTO && ofLink.length > 0) return ofLink[0];
  return measures.includes(asked) ? asked : (measures.find((name) => name !== LINK && name !== EFFECT) ?? asked);
}

/**
 * An overview with the weight of a link among its measures.
 * @param {Overview} overview
 * @param {import("../source/source.js").LinkInHeads | null} link
 * @returns {Overview}
 */
export function withLink(overview, link) {
  return link === null ? overview : { ...overview, measures: { ...overview.measures, [LINK]: link.weights } };
}

/**
 * A head's short name: L3 H1.
 * @param {number} layer
 * @param {number} head
 */
export function headName(layer, head) {
  return `L${layer} H${head}`;
}

/**
 * The heads that fit a search, and what it asks for where that is one thing. Raises SearchError.
 * @param {HeadLine[]} heads
 * @param {string} find
 * @param {Overview} overview
 * @returns {{fits: Set<HeadLine>, part: import("./search.js").Part | undefined}}
 */
export function fitting(heads, find, overview) {
  const measures = Object.keys(overview.measures);
  const patterns = measures.filter((name) => ![...PLAIN, EFFECT, LINK].includes(name));
  const question = readSearch(find, { numbers: [...measures, "layer", "head"], patterns });
  return { fits: new Set(heads.filter(question)), part: question.part };
}

/**
 * The head that comes closest to what a search without result asks for: the highest of a measure or pattern, the lowest
 * where less was asked for; null where the search is of another kind.
 * @param {HeadLine[]} heads
 * @param {import("./search.js").Part | undefined} part
 * @returns {{head: HeadLine, name: string, value: number, lowest: boolean} | null}
 */
export function closest(heads, part) {
  if (part === undefined || "layer" in part) return null;
  const name = "pattern" in part ? part.pattern : part.name;
  const lowest = "sign" in part && part.sign.startsWith("<");
  const better = (/** @type {number} */ a, /** @type {number} */ b) => (lowest ? a < b : a > b);
  if (name === "layer" || name === "head" || ("sign" in part && ["=", "!="].includes(part.sign))) return null;
  const known = heads.filter(({ numbers }) => Number.isFinite(numbers[name]));
  if (known.length === 0) return null;
  const head = known.reduce((best, one) => (better(one.numbers[name], best.numbers[name]) ? one : best));
  return { head, name, value: head.numbers[name], lowest };
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
