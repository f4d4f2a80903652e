// What part of a map is seen: half-open ranges of queries (rows) and keys (cols), in tokens, not always whole ones.
// Pure functions on frozen values.

/** @typedef {[number, number]} Range  [start, stop) */
/** @typedef {{rows: Range, cols: Range}} Seen */

/** No closer than this many tokens across, however far one zooms. */
const FEWEST = 4;

/**
 * Everything.
 * @param {number} queries
 * @param {number} keys
 * @returns {Seen}
 */
export function whole(queries, keys) {
  return { rows: [0, queries], cols: [0, keys] };
}

/**
 * Closer (factor > 1) or further, with the point that is `across` and `down` (0..1) of the canvas kept in place.
 * @param {Seen} seen
 * @param {number} factor
 * @param {{across: number, down: number}} point
 * @param {Seen} limits
 * @returns {Seen}
 */
export function zoomed(seen, factor, point, limits) {
  const spans = [span(seen.rows), span(seen.cols)];
  // One factor for both axes, so that squares stay squares; the axis that reaches its end first holds only itself.
  const closest = Math.max(...spans.map((wide) => Math.min(FEWEST, wide) / wide));
  const share = Math.max(1 / factor, closest);
  return within(
    { rows: around(seen.rows, share, point.down), cols: around(seen.cols, share, point.across) },
    limits,
  );
}

/**
 * Moved by whole or part tokens.
 * @param {Seen} seen
 * @param {number} down
 * @param {number} across
 * @param {Seen} limits
 * @returns {Seen}
 */
export function moved(seen, down, across, limits) {
  const shift = (/** @type {Range} */ [a, b], /** @type {number} */ by) => /** @type {Range} */ ([a + by, b + by]);
  return within({ rows: shift(seen.rows, down), cols: shift(seen.cols, across) }, limits);
}

/**
 * The whole tokens that are seen at least in part.
 * @param {Seen} seen
 * @returns {Seen}
 */
export function wholeTokens(seen) {
  const out = (/** @type {Range} */ [a, b]) => /** @type {Range} */ ([Math.floor(a + 1e-6), Math.ceil(b - 1e-6)]);
  return { rows: out(seen.rows), cols: out(seen.cols) };
}

/**
 * Kept inside the limits, its size too.
 * @param {Seen} seen
 * @param {Seen} limits
 * @returns {Seen}
 */
export function within(seen, limits) {
  return { rows: held(seen.rows, limits.rows), cols: held(seen.cols, limits.cols) };
}

/** @param {Range} range */
export function span([start, stop]) {
  return stop - start;
}

/**
 * @param {Range} range
 * @param {number} share
 * @param {number} fixed
 * @returns {Range}
 */
function around([start, stop], share, fixed) {
  const centre = start + (stop - start) * fixed;
  const wide = (stop - start) * share;
  return [centre - wide * fixed, centre + wide * (1 - fixed)];
}

/**
 * @param {Range} range
 * @param {Range} limit
 * @returns {Range}
 */
function held([start, stop], [least, most]) {
  const wide = Math.min(Math.max(stop - start, Math.min(1, most - least)), most - least);
  const from = Math.min(Math.max(start, least), most - wide);
  return [from, from + wide];
}
