// Rows of one query in all heads, made from the weights that an exported page carries: the same query in another layer,
// sums by cells of an image, and numbers as levels. As regard/session/heads.py does it. Pure.

import { placedTokens } from "../image/patches.js";

/** @typedef {import("./arrays.js").Levels} Levels */
/** @typedef {import("./source.js").Overview} Overview */

/**
 * The number in another layer of a query or key: the same token, or the patch at the same place; or null.
 * @param {Overview} overview
 * @param {number} layer  the one that counts it so
 * @param {number} other
 * @param {number} token
 * @param {"queries" | "keys"} side
 * @returns {number | null}
 */
export function placeIn(overview, layer, other, token, side) {
  const [ours, theirs] = [overview.layers[layer], overview.layers[other]];
  const at = side === "queries" ? 0 : 1;
  if (ours.layout && theirs.layout) return samePlace(overview, ours.layout[at], theirs.layout[at], token);
  if (ours.layout || theirs.layout) return null;
  if (ours.first !== null && theirs.first !== null) {
    const moved = side === "queries" ? token + (ours.first ?? 0) - (theirs.first ?? 0) : token;
    return moved >= 0 && moved < theirs[side] ? moved : null;
  }
  const alike = ours.kind === theirs.kind && ours.queries === theirs.queries && ours.keys === theirs.keys;
  return alike ? token : null;
}

/**
 * @param {Overview} overview
 * @param {number} from  the layout that counts it so
 * @param {number} to
 * @param {number} token
 */
function samePlace(overview, from, to, token) {
  if (from === to) return token;
  const [ours, theirs] = [from, to].map((n) => placedTokens(overview.layouts?.[n] ?? { runs: [], grids: [] }));
  const [kind, image, patch] = [ours.kinds[token], ours.images[token], ours.patches.get(token)];
  if (patch) {
    const { top, left, bottom, right } = patch.box;
    return theirs.at(image ?? 0, (top + bottom) / 2, (left + right) / 2)?.token ?? null;
  }
  const alike = theirs.kinds.flatMap((one, i) => (one === kind && theirs.images[i] === image ? [i] : []));
  return kind === "cls" && alike.length === 1 ? alike[0] : null;
}

/**
 * Sums of each row by the cells of an image.
 * @param {Float32Array[]} values  a row for each head
 * @param {import("../image/patches.js").TokenLayout} layout  of the keys
 * @param {{image: number, rows: number[][], columns: number[][]}} grid
 * @returns {{rows: Float32Array[], shape: number[]}}
 */
export function imageSums(values, layout, { image, rows, columns }) {
  const within = (/** @type {number[][]} */ spans, /** @type {number} */ at) => spans.findIndex(([a, b]) => at >= a && at < b);
  const cells = placedTokens(layout).of(image).map(({ token, box }) => {
    const [row, column] = [within(rows, (box.top + box.bottom) / 2), within(columns, (box.left + box.right) / 2)];
    return { token, cell: row * columns.length + column };
  });
  const sums = values.map((row) => {
    const summed = new Float32Array(rows.length * columns.length);
    for (const { token, cell } of cells) summed[cell] += row[token];
    return summed;
  });
  return { rows: sums, shape: [rows.length, columns.length] };
}

/**
 * Numbers as bytes with a scale per head.
 * @param {Float32Array[]} values  those of each head
 * @param {number[]} shape  of one head
 * @returns {Levels}
 */
export function levelsOf(values, shape) {
  const size = shape.reduce((a, b) => a * b, 1);
  const [data, scale] = [new Uint8Array(values.length * size), new Float32Array(values.length)];
  values.forEach((numbers, head) => {
    scale[head] = numbers.every(Number.isFinite) ? Math.max(...numbers, 0) / 255 : NaN;
    if (scale[head] > 0) numbers.forEach((value, i) => (data[head * size + i] = Math.round(value / scale[head])));
  });
  return { shape: [values.length, ...shape], data, scale };
}
