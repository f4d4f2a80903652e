// The squares of a map that are finer than its pooled map: which are needed for what is seen, fetched a moment after
// the view rests, kept, and dropped when they come too late.

import { span } from "../shared/camera.js";

/** @typedef {import("../shared/camera.js").Range} Range */
/** @typedef {import("../shared/camera.js").Seen} Seen */

/** @typedef {{session: string, layer: number, head: number}} Place */
/**
 * cells: for colours; in a ragged last square scaled as if its cells were as wide as the others'.  values: as they came.
 * @typedef {{key: string, rows: Range, cols: Range, down: number, across: number, cells: Float32Array,
 *   values: Float32Array, how: string}} Square
 */

/** Cells along a side of one square, and the most of them that a view spreads over: 3 × 3 squares at worst. */
const SIDE = 128;
const ACROSS = 256;
/** Above level 4 (16 tokens a cell, 2048 a square) the pooled map serves: such a square would cost seconds. */
const COARSEST = 4;
const REST_MS = 90;
const AT_ONCE = 4;
const KEPT = 120;

/**
 * How many times two tokens make one cell, for what is seen: 0 is exact; null where only the pooled map serves.
 * @param {Seen} seen
 * @returns {number | null}
 */
export function levelFor(seen) {
  const widest = Math.max(span(seen.rows), span(seen.cols));
  const level = Math.max(0, Math.ceil(Math.log2(widest / ACROSS)));
  return level <= COARSEST ? level : null;
}

/**
 * The ranges of all squares that touch what is seen, at a level, nearest to the middle first.
 * @param {Seen} seen
 * @param {number} level
 * @param {Seen} limits
 * @returns {Seen[]}
 */
export function squaresFor(seen, level, limits) {
  const wide = SIDE << level;
  /** @type {(seen: Range, limit: Range) => Range[]} */
  const cut = ([start, stop], [, most]) => {
    const out = [];
    for (let at = Math.floor(start / wide) * wide; at < Math.min(stop, most); at += wide)
      out.push(/** @type {Range} */ ([at, Math.min(at + wide, most)]));
    return out;
  };
  const all = cut(seen.rows, limits.rows).flatMap((rows) => cut(seen.cols, limits.cols).map((cols) => ({ rows, cols })));
  const far = (/** @type {Seen} */ one) =>
    Math.hypot(middle(one.rows) - middle(seen.rows), middle(one.cols) - middle(seen.cols));
  return all.sort((one, other) => far(one) - far(other));
}

export class Squares {
  /**
   * @param {import("../source/source.js").Source} source
   * @param {() => void} arrived  told after each square
   */
  constructor(source, arrived) {
    this.source = source;
    this.arrived = arrived;
    /** @type {Map<string, Square>} */
    this.kept = new Map(); // in order of use, the oldest first
    /** @type {Map<string, AbortController>} */
    this.asked = new Map();
    /** @type {Map<string, string>} */
    this.failed = new Map();
    /** @type {{key: string, place: Place, ranges: Seen, level: number}[]} */
    this.waiting = [];
    this.timer = 0;
    this.missed = "";
  }

  /**
   * The squares at hand for what is seen; those that are missing are asked for once the view rests.
   * @param {Place} place
   * @param {Seen} seen
   * @param {Seen} limits
   * @returns {{squares: Square[], missing: number, level: number | null, error: string | null}}
   */
  at(place, seen, limits) {
    const level = levelFor(seen);
    const wanted = level === null ? [] : squaresFor(seen, level, limits).map((ranges) => this.#named(place, ranges, level));
    const squares = wanted.map(({ key }) => this.#used(key)).filter((square) => square !== undefined);
    const lost = wanted.map(({ key }) => this.failed.get(key)).find((words) => words !== undefined) ?? null;
    this.#drop(new Set(wanted.map(({ key }) => key)));
    this.waiting = wanted.filter(({ key }) => !this.kept.has(key) && !this.failed.has(key));
    this.#rest(this.waiting.map(({ key }) => key).join(" "));
    return { squares, missing: this.waiting.length, level, error: lost };
  }

  /** Let a square that failed be asked for again. */
  forgive() {
    this.failed.clear();
    this.missed = "";
  }

  destroy() {
    clearTimeout(this.timer);
    this.#drop(new Set());
  }

  /**
   * @param {Place} place
   * @param {Seen} ranges
   * @param {number} level
   */
  #named(place, ranges, level) {
    const key = [place.session, place.layer, place.head, level, ranges.rows, ranges.cols].join("/");
    return { key, place, ranges, level };
  }

  /** @param {string} key */
  #used(key) {
    const square = this.kept.get(key);
    if (square === undefined) return undefined;
    this.kept.delete(key);
    this.kept.set(key, square);
    return square;
  }

  /**
   * What is under way and no longer wanted is aborted; its answer would be stale.
   * @param {Set<string>} wanted
   */
  #drop(wanted) {
    for (const [key, controller] of this.asked) {
      if (wanted.has(key)) continue;
      this.asked.delete(key);
      controller.abort();
    }
  }

  /** @param {string} missed  the names of what is missing: when they change, the view has not come to rest */
  #rest(missed) {
    if (missed === this.missed) return;
    this.missed = missed;
    clearTimeout(this.timer);
    if (missed !== "") this.timer = setTimeout(() => this.#rested(), REST_MS);
  }

  #rested() {
    for (const one of this.waiting) {
      if (this.asked.size >= AT_ONCE) return;
      if (!this.asked.has(one.key) && !this.kept.has(one.key) && !this.failed.has(one.key)) void this.#ask(one);
    }
  }

  /** @param {{key: string, place: Place, ranges: Seen, level: number}} one */
  async #ask({ key, place, ranges, level }) {
    const controller = new AbortController();
    this.asked.set(key, controller);
    const { session, layer, head } = place;
    try {
      const tile = await this.source.tile(session, layer, head, ranges.rows, ranges.cols, SIDE, controller.signal);
      if (controller.signal.aborted) return;
      this.kept.set(key, squareOf(key, ranges, level, tile));
      for (const oldest of this.kept.keys()) if (this.kept.size > KEPT) this.kept.delete(oldest);
    } catch (error) {
      if (controller.signal.aborted) return;
      this.failed.set(key, error instanceof Error ? error.message : String(error));
    }
    this.asked.delete(key);
    this.arrived();
    this.#rested();
  }
}

/**
 * The cell of a square that a query and a key fall into: its place among the values, and its tokens, [first, last].
 * @param {Square} square
 * @param {number} query
 * @param {number} key
 * @returns {{at: number, queries: Range, keys: Range}}
 */
export function cellAt({ rows, cols, down, across }, query, key) {
  const [i, queries] = binOf(rows, down, Math.floor(query));
  const [j, keys] = binOf(cols, across, Math.floor(key));
  return { at: i * across + j, queries, keys };
}

/**
 * Bins are as even as whole tokens allow: bin c of n tokens begins at ⌊c·n ÷ bins⌋, as in the answers.
 * @param {Range} range
 * @param {number} bins
 * @param {number} token
 * @returns {[number, Range]}
 */
function binOf(range, bins, token) {
  const n = span(range);
  const bin = Math.floor(((token - range[0] + 1) * bins - 1) / n);
  return [bin, [range[0] + Math.floor((bin * n) / bins), range[0] + Math.floor(((bin + 1) * n) / bins) - 1]];
}

/**
 * @param {string} key
 * @param {Seen} ranges
 * @param {number} level
 * @param {import("../source/source.js").Tile} tile
 * @returns {Square}
 */
function squareOf(key, ranges, level, tile) {
  const [down, across] = tile.cells.shape;
  const values = tile.cells.data;
  // A pooled cell sums over its keys: one with fewer keys than the others of its level would look paler than it is.
  const by = 2 ** level / (span(ranges.cols) / across);
  const cells = by === 1 ? values : values.map((value) => value * by);
  return { key, ...ranges, down, across, cells, values, how: tile.how };
}

/** @param {Range} range */
function middle([start, stop]) {
  return (start + stop) / 2;
}
