// What links do, in numbers: what was measured of a link, as a measure of the atlas, as points of a scatter plot, and as
// figures for people. Pure functions.

import { EFFECT } from "./heads.js";

/** @typedef {import("./source.js").Effects} Effects */
/** @typedef {import("./source.js").LinkEffect} LinkEffect */
/** @typedef {import("./source.js").Overview} Overview */
/** A head of which weight and effect of a link are known. @typedef {{layer: number, head: number, weight: number, effect: number}} Point */

const MUCH = 0.25; // of the largest weight: what counts as a large one
const LITTLE = 0.5; // of the median effect per weight of the heads with large weights: what counts as a small effect

/**
 * An overview with the effect of a link, in per cent, among its measures.
 * @param {Overview} overview
 * @param {Effects | null} effects
 * @returns {Overview}
 */
export function withEffects(overview, effects) {
  if (!effects?.heads) return overview;
  const { shape, data } = effects.heads.effects;
  return { ...overview, measures: { ...overview.measures, [EFFECT]: { shape, data: data.map((value) => 100 * value) } } };
}

/**
 * What was measured of a link in one head: with random other keys, or as one of all heads; null where nothing was.
 * @param {Effects | null} effects
 * @param {number} layer
 * @param {number} head
 * @returns {(Point & {controls: number[], p_value: number | null}) | null}
 */
export function effectIn(effects, layer, head) {
  const link = effects?.links.find((one) => one.layer === layer && one.head === head);
  if (link) return link;
  const point = pointsOf(effects).find((one) => one.layer === layer && one.head === head && one.weight > 0);
  return point ? { ...point, controls: [], p_value: null } : null;
}

/**
 * The heads of which weight and effect are known.
 * @param {Effects | null} effects
 * @returns {Point[]}
 */
export function pointsOf(effects) {
  if (!effects?.heads) return [];
  const { weights, effects: moved } = effects.heads;
  const most = weights.shape[1];
  return Array.from(weights.data, (weight, i) => ({
    ...{ layer: Math.floor(i / most), head: i % most },
    ...{ weight, effect: moved.data[i] },
  })).filter(({ weight, effect }) => Number.isFinite(weight) && Number.isFinite(effect));
}

/**
 * The heads with much weight and little effect: a weight of at least a quarter of the largest, and less than half of the
 * effect per weight that is the median of such heads.
 * @param {Point[]} points
 * @returns {Point[]}
 */
export function idle(points) {
  const largest = Math.max(0, ...points.map(({ weight }) => weight));
  const heavy = points.filter(({ weight }) => weight > 0 && weight >= MUCH * largest);
  const ratios = heavy.map(({ weight, effect }) => effect / weight).sort((a, b) => a - b);
  const median = (ratios[Math.floor((ratios.length - 1) / 2)] + ratios[Math.floor(ratios.length / 2)]) / 2;
  return heavy.filter(({ weight, effect }) => effect / weight < LITTLE * median);
}

/**
 * The mean size of the controls.
 * @param {number[]} controls
 */
export function meanSize(controls) {
  return controls.reduce((sum, value) => sum + Math.abs(value), 0) / controls.length;
}

/**
 * A share in per cent, in three digits that count: 10.0%, 0.350%.
 * @param {number} value
 */
export function percent(value) {
  const share = 100 * value;
  if (share === 0) return "0%";
  if (Math.abs(share) < 1e-4) return "< 0.0001%";
  const digits = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(share))));
  return `${share.toFixed(Math.min(digits, 6)).replace("-", "−")}%`;
}

/**
 * A p-value in three digits that count, without needless zeros: 0.0625, 0.5.
 * @param {number} value
 */
export function pValue(value) {
  return String(Number(value.toPrecision(3)));
}

/**
 * Round numbers from 0 up to at most `most`, about four of them.
 * @param {number} most
 * @returns {number[]}
 */
export function ticks(most) {
  if (!(most > 0)) return [0];
  const rough = 10 ** Math.floor(Math.log10(most / 4));
  const step = rough * ([1, 2, 5, 10].find((times) => most / (times * rough) <= 4) ?? 10);
  return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, i) => Number((i * step).toPrecision(12)));
}
