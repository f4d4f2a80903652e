// A map on its canvas: cells, marginals, axes, and what is chosen. Given all it shows, it keeps nothing but the cells
// that it painted before.

import { span } from "../shared/camera.js";
import {
  boxOf,
  clean,
  drawBars,
  drawCellMarks,
  drawCrossed,
  drawFrame,
  drawHatching,
  drawBitmap,
  fitted,
  bitmapOf,
  ticks,
} from "../shared/canvas.js";
import { scaleOf, signedScale } from "../shared/colours.js";

/** @typedef {import("../shared/camera.js").Range} Range */
/** @typedef {import("../shared/camera.js").Seen} Seen */
/** @typedef {import("../shared/canvas.js").Box} Box */
/** @typedef {import("../shared/canvas.js").Pen} Pen */
/** @typedef {import("../shared/colours.js").Scale} Scale */
/** @typedef {import("./tiles.js").Square} Square */

/**
 * @typedef {object} Shown
 * @property {Seen} seen
 * @property {Seen} limits
 * @property {Square} base  the pooled map of the whole head
 * @property {Square[]} squares  finer ones
 * @property {Float32Array} received
 * @property {Float32Array} entropy
 * @property {boolean} sink
 * @property {"linear" | "log" | "rank"} scale
 * @property {number | null} token
 * @property {number | null} key
 * @property {Seen | null} brush  the part that is being chosen
 * @property {import("../shared/colours.js").Paper} paper
 * @property {(index: number) => string} queryLabel
 * @property {(index: number) => string} keyLabel
 * @property {{received: string, entropy: string}} names  of the bars
 * @property {{queries: string, keys: string}} sides  of the axes: "looks from ↓", "looks at →"
 * @property {boolean} signed  cells are changes
 * @property {Range | null} apart  tokens of a map of changes that have no counterpart
 */

/** @typedef {"" | "some" | "all"} Broken  how many of some cells are NaN */
/** @typedef {{plot: Box, queries: boolean, keys: boolean}} Layout  which axes have words */

const BARS = 34;
/** Height of the line above the bars, which names the keys' axis. */
const NAME = 14;
const GAP = 5;
/** Cells are at most so many times wider than high, or higher than wide, to use the room there is. */
const STRETCH = 1.5;
/** A cell at least this many pixels high has room for its word. */
const LINE = 10.5;
const FONT = '11px system-ui, "Noto Sans", "Noto Sans KR", "Apple SD Gothic Neo", "Malgun Gothic", sans-serif';

export class MapPlot {
  /** @param {HTMLCanvasElement} canvas */
  constructor(canvas) {
    this.canvas = canvas;
    /** @type {Box} */
    this.plot = { x: 0, y: 0, width: 1, height: 1 };
    /** @type {Map<string, HTMLCanvasElement>} */
    this.bitmaps = new Map();
    this.painted = "";
  }

  /**
   * @param {Shown} shown
   * @returns {{scale: Scale, how: string, broken: Broken}} what the colours mean, and whether NaN is seen
   */
  draw(shown) {
    const { pen, width, height } = clean(this.canvas);
    pen.font = FONT;
    const layout = place(pen, shown, width, height);
    this.plot = layout.plot;
    const top = shown.squares.length > 0 ? shown.squares : [shown.base];
    const values = valuesOf(top, shown.seen, shown.sink);
    const scale = shown.signed ? signedScale(values) : scaleOf(shown.scale, values);
    pen.save();
    pen.beginPath();
    pen.rect(this.plot.x, this.plot.y, this.plot.width, this.plot.height);
    pen.clip();
    this.#cells(pen, shown, top, scale);
    for (const square of top) crossBroken(pen, shown, square, this.plot);
    if (!shown.sink) hatchFirst(pen, shown, top[0], this.plot);
    if (shown.apart) hatchApart(pen, shown, shown.apart, this.plot);
    chosen(pen, shown, this.plot);
    pen.restore();
    drawFrame(pen, this.plot, shown.paper.line);
    marginals(pen, shown, this.plot, width);
    axes(pen, shown, layout);
    return { scale, how: top.every((square) => square.how !== "pooled") ? top[0].how : "pooled", broken: brokenOf(values) };
  }

  /**
   * @param {Pen} pen
   * @param {Shown} shown
   * @param {Square[]} top
   * @param {Scale} scale
   */
  #cells(pen, shown, top, scale) {
    const look = `${scale.kind} ${scale.low} ${scale.high} ${shown.sink} ${shown.paper.dark} ${top.map(({ key }) => key).join(" ")}`;
    if (look !== this.painted) this.bitmaps.clear();
    this.painted = look;
    const layers = top[0] === shown.base ? [shown.base] : [shown.base, ...top];
    for (const square of layers) {
      const under = square === shown.base && top[0] !== square && !shown.signed;
      const own = under ? scaleOf(shown.scale, valuesOf([square], shown.seen, shown.sink)) : scale;
      let bitmap = this.bitmaps.get(square.key);
      if (!bitmap) this.bitmaps.set(square.key, (bitmap = bitmapOf(square.cells, square.across, own, shown.signed ? shown.paper.signed : shown.paper.ramp)));
      if (square !== shown.base) wipe(pen, square, shown.seen, this.plot);
      drawBitmap(pen, bitmap, square, shown.seen, this.plot);
    }
    for (const square of top) {
      const how = square.how === "pooled" ? "pooled" : "exact";
      drawCellMarks(pen, how, square, shown.seen, this.plot, how === "exact" ? shown.paper.gap : shown.paper.dot);
    }
  }
}

/**
 * How many of these are NaN.
 * @param {ArrayLike<number>} values
 * @returns {Broken}
 */
export function brokenOf(values) {
  let count = 0;
  for (let i = 0; i < values.length; i++) if (Number.isNaN(values[i])) count++;
  return count === 0 ? "" : count === values.length ? "all" : "some";
}

/**
 * The cells that are NaN, crossed; those beside each other in a row are one box.
 * @param {Pen} pen
 * @param {Shown} shown
 * @param {Square} square
 * @param {Box} plot
 */
function crossBroken(pen, { seen, paper }, { cells, down, across, rows, cols }, plot) {
  const [top, bottom] = cellsOf(rows, seen.rows, down);
  const [left, right] = cellsOf(cols, seen.cols, across);
  const [high, wide] = [span(rows) / down, span(cols) / across];
  const boxes = [];
  for (let i = top; i < bottom; i++) {
    for (let j = left; j < right; j++) {
      const first = j;
      while (j < right && Number.isNaN(cells[i * across + j])) j++;
      if (j === first) continue;
      /** @type {Range[]} */
      const [at, from] = [[rows[0] + i * high, rows[0] + (i + 1) * high], [cols[0] + first * wide, cols[0] + j * wide]];
      boxes.push(boxOf({ rows: at, cols: from }, seen, plot));
    }
  }
  if (boxes.length > 0) drawCrossed(pen, boxes, paper.paper, paper.alarm);
}

/**
 * The cells that are seen of some squares, without those of the first key where it is left out.
 * @param {Square[]} squares
 * @param {Seen} seen
 * @param {boolean} sink
 */
function valuesOf(squares, seen, sink) {
  const all = [];
  for (const { cells, down, across, rows, cols } of squares) {
    const [top, bottom] = cellsOf(rows, seen.rows, down);
    const [left, right] = cellsOf(cols, seen.cols, across);
    const first = !sink && cols[0] === 0 ? Math.max(1, left) : left;
    for (let i = top; i < bottom; i++) for (let j = first; j < right; j++) all.push(cells[i * across + j]);
  }
  return all;
}

/**
 * Which of the cells along one side of a square are seen, [first, last).
 * @param {Range} range
 * @param {Range} seen
 * @param {number} many
 */
function cellsOf(range, seen, many) {
  const each = span(range) / many;
  const first = Math.max(0, Math.floor((seen[0] - range[0]) / each + 1e-6));
  return [first, Math.min(many, Math.ceil((seen[1] - range[0]) / each - 1e-6))];
}

/**
 * @param {Pen} pen
 * @param {Seen} ranges
 * @param {Seen} seen
 * @param {Box} plot
 */
function wipe(pen, ranges, seen, plot) {
  const box = boxOf(ranges, seen, plot);
  pen.clearRect(box.x, box.y, box.width, box.height);
}

/**
 * Where the plot stands, and which axes have room for words. Those of keys hang below and take height: they give way
 * where the words of queries would not fit for them.
 * @param {Pen} pen
 * @param {Shown} shown
 * @param {number} width
 * @param {number} height
 * @returns {Layout}
 */
function place(pen, shown, width, height) {
  const { rows, cols } = shown.seen;
  // Words are measured only where they can fit at all: there may be 131,072 of them.
  const [queries, keys] = [height / span(rows) >= LINE, width / span(cols) >= LINE];
  const left = queries ? Math.min(110, 14 + widest(pen, rows, shown.queryLabel)) : 0;
  const plain = plotIn(pen, shown, width, height, left, 30);
  const readable = (/** @type {Box} */ plot) => queries && plot.height / span(rows) >= LINE;
  if (!keys) return { plot: plain, queries: readable(plain), keys };
  const below = Math.min(92, 20 + 0.78 * widest(pen, cols, shown.keyLabel));
  const worded = plotIn(pen, shown, width, height, left, below);
  const fits = worded.width / span(cols) >= LINE && readable(worded) === readable(plain);
  return fits ? { plot: worded, queries: readable(worded), keys } : { plot: plain, queries: readable(plain), keys: false };
}

/**
 * @param {Pen} pen
 * @param {Shown} shown
 * @param {number} width
 * @param {number} height
 * @param {number} left  room that the words of queries want
 * @param {number} bottom  room that is kept for keys
 * @returns {Box}
 */
function plotIn(pen, shown, width, height, left, bottom) {
  const names = [shown.names.received, shown.sides.queries].map((name) => 8 + pen.measureText(name).width);
  const beside = Math.max(...names, left, 48);
  const [right, top] = [BARS + 2 * GAP, NAME + BARS + 2 * GAP];
  let [wide, high] = [Math.max(20, width - beside - right), Math.max(20, height - top - bottom)];
  const ratio = span(shown.limits.cols) / span(shown.limits.rows);
  if (ratio > 0.4 && ratio < 2.5)
    [wide, high] = [Math.min(wide, high * ratio * STRETCH), Math.min(high, (wide / ratio) * STRETCH)];
  return { x: beside + (width - beside - right - wide) / 2, y: top, width: wide, height: high };
}

/**
 * @param {Pen} pen
 * @param {Range} range
 * @param {(index: number) => string} label
 */
function widest(pen, [start, stop], label) {
  let most = 0;
  for (let i = Math.floor(start); i < stop; i++) most = Math.max(most, pen.measureText(label(i)).width);
  return most;
}

/**
 * The first key's column, hatched.
 * @param {Pen} pen
 * @param {Shown} shown
 * @param {Square} square
 * @param {Box} plot
 */
function hatchFirst(pen, shown, square, plot) {
  const stop = span(square.cols) / square.across;
  if (shown.seen.cols[0] >= stop) return;
  drawHatching(pen, boxOf({ rows: shown.seen.rows, cols: [0, stop] }, shown.seen, plot), shown.paper.paper, shown.paper.line);
}

/**
 * The rows and the columns of tokens that have no counterpart, hatched.
 * @param {Pen} pen
 * @param {Shown} shown
 * @param {Range} apart
 * @param {Box} plot
 */
function hatchApart(pen, { seen, paper }, apart, plot) {
  for (const ranges of [{ rows: apart, cols: seen.cols }, { rows: seen.rows, cols: apart }])
    drawHatching(pen, boxOf(ranges, seen, plot), paper.paper, paper.line);
}

/**
 * The row of the query and the column of the key that are looked at, and the part that is being chosen.
 * @param {Pen} pen
 * @param {Shown} shown
 * @param {Box} plot
 */
function chosen(pen, { seen, token, key, brush, paper }, plot) {
  if (token !== null) {
    const box = boxOf({ rows: [token, token + 1], cols: seen.cols }, seen, plot);
    const y = box.height < 3 ? { ...box, y: box.y + box.height / 2 - 1.5, height: 3 } : box;
    drawFrame(pen, { ...y, x: y.x - 4, width: y.width + 8 }, paper.query, 1.5);
  }
  if (key !== null) {
    const box = boxOf({ rows: seen.rows, cols: [key, key + 1] }, seen, plot);
    const x = box.width < 3 ? { ...box, x: box.x + box.width / 2 - 1.5, width: 3 } : box;
    pen.setLineDash([4, 3]);
    drawFrame(pen, { ...x, y: x.y - 4, height: x.height + 8 }, paper.key, 1.5);
    pen.setLineDash([]);
  }
  if (brush === null) return;
  const box = boxOf(brush, seen, plot);
  pen.fillStyle = paper.veil;
  pen.fillRect(box.x, box.y, box.width, box.height);
  drawFrame(pen, box, paper.ink, 1);
}

/**
 * Received mass above the keys, entropy beside the queries.
 * @param {Pen} pen
 * @param {Shown} shown
 * @param {Box} plot
 * @param {number} width
 */
function marginals(pen, shown, plot, width) {
  const { seen, limits, paper } = shown;
  const skip = shown.sink ? 0 : 1;
  const above = { x: plot.x, y: plot.y - GAP - BARS, width: plot.width, height: BARS };
  const beside = { x: plot.x + plot.width + GAP, y: plot.y, width: BARS, height: plot.height };
  const most = (/** @type {Float32Array} */ bins, from = 0) => bins.subarray(from).reduce((a, b) => Math.max(a, b || 0), 0);
  const standing = { colour: paper.bar, lying: false, most: most(shown.received, skip), skip };
  drawBars(pen, shown.received, limits.cols[1], seen.cols, above, standing);
  const lying = { colour: paper.bar, lying: true, most: most(shown.entropy) };
  drawBars(pen, shown.entropy, limits.rows[1], seen.rows, beside, lying);
  pen.fillStyle = paper.muted;
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  pen.fillText(shown.names.received, plot.x - 5, above.y + BARS / 4);
  pen.textBaseline = "bottom";
  const wide = Math.max(BARS, pen.measureText(shown.names.entropy).width);
  pen.fillText(shown.names.entropy, Math.min(width - 2, beside.x + wide), plot.y - GAP);
  pen.fillStyle = paper.query;
  pen.fillText(shown.sides.queries, plot.x - 5, plot.y - 5);
  pen.fillStyle = paper.key;
  pen.textAlign = "left";
  pen.fillText(shown.sides.keys, plot.x, above.y - 2);
}

/**
 * Words beside the cells where there is room for them, else numbers.
 * @param {Pen} pen
 * @param {Shown} shown
 * @param {Layout} layout
 */
function axes(pen, shown, { plot, ...named }) {
  const { seen, paper } = shown;
  const [wide, high] = [plot.width / span(seen.cols), plot.height / span(seen.rows)];
  const inside = (/** @type {Range} */ [start, stop], /** @type {number} */ at) => at + 0.5 >= start && at + 0.5 <= stop;
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  const queries = named.queries ? ticks(seen.rows, Infinity) : ticks(seen.rows, plot.height / 40);
  for (const i of withChosen(queries, shown.token, named.queries ? 0 : 14 / high)) {
    if (i < Math.floor(seen.rows[0]) || !inside(seen.rows, i)) continue;
    pen.fillStyle = i === shown.token ? paper.query : paper.muted;
    const words = named.queries ? fitted(pen, shown.queryLabel(i), plot.x - 12) : String(i);
    pen.fillText((i === shown.token ? "▸" : "") + words, plot.x - 5, plot.y + (i + 0.5 - seen.rows[0]) * high);
  }
  const keys = named.keys ? ticks(seen.cols, Infinity) : ticks(seen.cols, plot.width / 60);
  for (const j of withChosen(keys, shown.key, named.keys ? 0 : 34 / wide)) {
    if (j < Math.floor(seen.cols[0]) || !inside(seen.cols, j)) continue;
    pen.fillStyle = j === shown.key ? paper.key : paper.muted;
    const words = named.keys ? fitted(pen, shown.keyLabel(j), 104) : String(j);
    keyName(pen, words, plot.x + (j + 0.5 - seen.cols[0]) * wide, plot.y + plot.height + 6, named.keys);
  }
}

/**
 * @param {Pen} pen
 * @param {string} words
 * @param {number} x
 * @param {number} y
 * @param {boolean} slanted
 */
function keyName(pen, words, x, y, slanted) {
  pen.save();
  pen.translate(x, y);
  if (slanted) pen.rotate(-0.9);
  pen.textAlign = slanted ? "right" : "center";
  pen.textBaseline = slanted ? "middle" : "top";
  pen.fillText(words, 0, 0);
  pen.restore();
}

/**
 * Marks of an axis with the chosen one among them, in the place of those too near to it.
 * @param {number[]} marks
 * @param {number | null} at
 * @param {number} near
 */
function withChosen(marks, at, near) {
  if (at === null || marks.includes(at)) return marks;
  return [...marks.filter((mark) => Math.abs(mark - at) >= near), at];
}
