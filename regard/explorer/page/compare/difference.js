// What the second of two sessions has more or less than the first: weights, second − first, where their tokens align.

import { translate } from "../shared/messages.js";

/** @typedef {import("../source/source.js").Overview} Overview */
/** @typedef {import("../source/source.js").Source} Source */

/**
 * Tokens of two texts that are compared one by one: all if there are as many, else those before and after what differs.
 * @typedef {{counts: [number, number], before: number, after: number}} Alignment
 */

const TOP = 12; // largest changes of a row

/**
 * Align two sessions; null where they differ in length and their tokens are too many to know them all.
 * @param {Overview} first
 * @param {Overview} second
 * @returns {Alignment | null}
 */
export function align(first, second) {
  const [a, b] = [first.labels, second.labels];
  const counts = /** @type {[number, number]} */ ([first.length, second.length]);
  if (counts[0] === counts[1]) return { counts, before: counts[0], after: 0 };
  if (a.length < counts[0] || b.length < counts[1]) return null;
  let [before, after] = [0, 0];
  const least = Math.min(...counts);
  while (before < least && a[before] === b[before]) before++;
  while (after < least - before && a[counts[0] - 1 - after] === b[counts[1] - 1 - after]) after++;
  return { counts, before, after };
}

/**
 * The token of the first session that one of the second is compared with; null where there is none.
 * @param {Alignment} alignment
 * @param {number} token
 */
export function counterpart({ counts, before, after }, token) {
  if (token < before) return token;
  return token >= counts[1] - after ? token - counts[1] + counts[0] : null;
}

/**
 * A source whose maps, tiles and rows are those of the asked session less those of the first; all else is as it was.
 * @param {Source} source
 * @param {() => string | null} first
 * @param {() => string} lang
 * @returns {Source}
 */
export function subtracting(source, first, lang) {
  const pair = async (/** @type {string} */ session, /** @type {AbortSignal | undefined} */ signal) => {
    const base = first() ?? session;
    const [one, other] = await Promise.all([source.overview(base, signal), source.overview(session, signal)]);
    return { base, one, other, alignment: align(one, other) };
  };
  /** @type {Pick<Source, "head" | "tile" | "row">} */
  const own = {
    async head(session, layer, head, language, signal) {
      const { base, alignment } = await pair(session, signal);
      const ask = (/** @type {string} */ id) => source.head(id, layer, head, language, signal);
      const [old, answer] = await Promise.all([ask(base), ask(session)]);
      const map = alignment && mapLess(answer.map, old.map, alignment);
      if (map === null) throw new Error(translate("Maps of long texts are subtracted only where both have as many tokens.", lang()));
      return { ...answer, map, signed: true, alignment, received: null, entropy: null, links: [] };
    },
    async tile(session, layer, head, rows, cols, size, signal) {
      const { base } = await pair(session, signal);
      const ask = (/** @type {string} */ id) => source.tile(id, layer, head, rows, cols, size, signal);
      const [old, tile] = await Promise.all([ask(base), ask(session)]);
      const data = tile.cells.data.map((value, i) => value - old.cells.data[i]);
      return { ...tile, cells: { shape: tile.cells.shape, data } };
    },
    async row(session, layer, head, token, start, stop, signal) {
      const { base, other, alignment } = await pair(session, signal);
      const query = alignment && counterpart(alignment, token);
      if (alignment === null || query === null) throw new Error(translate("This word has no counterpart in the first text.", lang()));
      const places = Array.from({ length: stop - start }, (_, i) => counterpart(alignment, start + i));
      const known = places.filter((place) => place !== null);
      const from = Math.min(...known, alignment.counts[0] - 1);
      const [row, old] = await Promise.all([
        source.row(session, layer, head, token, start, stop, signal),
        source.row(base, layer, head, query, from, Math.max(...known, from) + 1, signal),
      ]);
      const before = (/** @type {number | null} */ place) => (place === null ? NaN : old.weights.data[place - old.start]);
      const data = row.weights.data.map((weight, i) => weight - before(places[i]));
      const top = Array.from(data, (weight, i) => ({ key: start + i, weight }))
        .filter(({ weight }) => Math.abs(weight) > 0)
        .sort((a, b) => Math.abs(b.weight) - Math.abs(a.weight))
        .slice(0, TOP);
      // How much changed, where the whole row is known.
      const sizes = data.length === other.layers[layer].keys ? data.map((weight) => Math.abs(weight) || 0) : new Float32Array(1);
      const [weights, sum] = [data, sizes].map((values) => ({ shape: [values.length], data: values }));
      return { ...row, weights, ribbon: { sum, max: sum }, top, signed: true };
    },
  };
  return new Proxy(source, {
    get(target, name) {
      if (name in own) return own[/** @type {keyof typeof own} */ (name)];
      const found = Reflect.get(target, name);
      return typeof found === "function" ? found.bind(target) : found;
    },
  });
}

/**
 * The second map less the first; 0 where tokens have no counterpart; null where cells cannot be matched.
 * @param {import("../source/arrays.js").Numbers} map
 * @param {import("../source/arrays.js").Numbers} old
 * @param {Alignment} alignment
 */
function mapLess(map, old, alignment) {
  const [rows, cols] = map.shape;
  const { counts } = alignment;
  if (counts[0] === counts[1]) {
    if (map.data.length !== old.data.length) return null;
    return { shape: map.shape, data: map.data.map((value, i) => value - old.data[i]) };
  }
  const single = [map, old].every(({ shape }, n) => shape.every((size) => size === counts[1 - n]));
  if (!single) return null;
  const data = new Float32Array(map.data.length);
  for (let i = 0; i < rows; i++) {
    for (let j = 0; j < cols; j++) {
      const [query, key] = [counterpart(alignment, i), counterpart(alignment, j)];
      if (query !== null && key !== null) data[i * cols + j] = map.data[i * cols + j] - old.data[query * counts[0] + key];
    }
  }
  return { shape: map.shape, data };
}
