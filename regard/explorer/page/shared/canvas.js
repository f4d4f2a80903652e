// Marks on a canvas, each named by what it draws: cells, hatching, bars, axes, crosshair. Rectangles are in CSS pixels.

import { span } from "./camera.js";
import { stepAt } from "./colours.js";

/** @typedef {import("./camera.js").Range} Range */
/** @typedef {import("./camera.js").Seen} Seen */
/** @typedef {import("./colours.js").Ramp} Ramp */
/** @typedef {import("./colours.js").Scale} Scale */

/** @typedef {{x: number, y: number, width: number, height: number}} Box */
/** @typedef {CanvasRenderingContext2D} Pen */

/**
 * Make a canvas as sharp as the screen, and empty; the pen then draws in CSS pixels.
 * @param {HTMLCanvasElement} canvas
 * @returns {{pen: Pen, width: number, height: number}}
 */
export function clean(canvas) {
  const ratio = globalThis.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  const [across, down] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== across || canvas.height !== down) [canvas.width, canvas.height] = [across, down];
  const pen = /** @type {Pen} */ (canvas.getContext("2d"));
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { pen, width, height };
}

/**
 * Cells as a bitmap of one pixel each: zero and unknown cells are left bare.
 * @param {Float32Array} cells
 * @param {number} across
 * @param {Scale} scale
 * @param {Ramp} ramp
 * @returns {HTMLCanvasElement}
 */
export function bitmapOf(cells, across, scale, ramp) {
  const bitmap = document.createElement("canvas");
  [bitmap.width, bitmap.height] = [Math.max(1, across), Math.max(1, cells.length / Math.max(1, across))];
  const pen = /** @type {Pen} */ (bitmap.getContext("2d"));
  const image = pen.createImageData(bitmap.width, bitmap.height);
  for (let i = 0; i < cells.length; i++) {
    if (!cells[i]) continue;
    const from = 3 * stepAt(scale.place(cells[i]));
    image.data.set(ramp.rgb.subarray(from, from + 3), 4 * i);
    image.data[4 * i + 3] = 255;
  }
  pen.putImageData(image, 0, 0);
  return bitmap;
}

/**
 * The box on the screen of some queries and keys.
 * @param {Seen} ranges
 * @param {Seen} seen
 * @param {Box} plot where what is seen is drawn
 * @returns {Box}
 */
export function boxOf(ranges, seen, plot) {
  const [wide, high] = [plot.width / span(seen.cols), plot.height / span(seen.rows)];
  return {
    x: plot.x + (ranges.cols[0] - seen.cols[0]) * wide,
    y: plot.y + (ranges.rows[0] - seen.rows[0]) * high,
    width: span(ranges.cols) * wide,
    height: span(ranges.rows) * high,
  };
}

/**
 * A bitmap of cells that covers some queries and keys, without smoothing. Only the cells that are seen are drawn: a
 * whole map of 131,072 tokens would be millions of pixels wide when four of them fill the screen.
 * @param {Pen} pen
 * @param {HTMLCanvasElement} bitmap
 * @param {Seen} ranges
 * @param {Seen} seen
 * @param {Box} plot
 */
export function drawBitmap(pen, bitmap, ranges, seen, plot) {
  const cut = (/** @type {Range} */ all, /** @type {Range} */ part, /** @type {number} */ cells) => {
    const each = span(all) / cells;
    const first = Math.max(0, Math.floor((part[0] - all[0]) / each));
    return { first, many: Math.min(cells, Math.ceil((part[1] - all[0]) / each)) - first, each };
  };
  const down = cut(ranges.rows, seen.rows, bitmap.height);
  const across = cut(ranges.cols, seen.cols, bitmap.width);
  if (down.many <= 0 || across.many <= 0) return;
  /** @type {(all: Range, of: {first: number, many: number, each: number}) => Range} */
  const part = ([start], { first, many, each }) => [start + first * each, start + (first + many) * each];
  const box = boxOf({ rows: part(ranges.rows, down), cols: part(ranges.cols, across) }, seen, plot);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(bitmap, across.first, down.first, across.many, down.many, box.x, box.y, box.width, box.height);
}

/**
 * The marks that tell exact cells from pooled ones without a colour: thin gaps between exact cells, a dot on the corner
 * of each pooled one, where cells are large enough to have them.
 * @param {Pen} pen
 * @param {"exact" | "pooled"} how
 * @param {Seen & {cells: Float32Array, down: number, across: number}} square
 * @param {Seen} seen
 * @param {Box} plot
 * @param {string} colour
 */
export function drawCellMarks(pen, how, square, seen, plot, colour) {
  const box = boxOf(square, seen, plot);
  const [wide, high] = [box.width / square.across, box.height / square.down];
  if (Math.min(wide, high) < 5) return;
  const [left, right] = within(plot.x - box.x, plot.width, wide, square.across);
  const [top, bottom] = within(plot.y - box.y, plot.height, high, square.down);
  pen.fillStyle = colour;
  for (let i = top; i < bottom; i++) {
    for (let j = left; j < right; j++) {
      if (!square.cells[i * square.across + j]) continue;
      const [x, y] = [box.x + j * wide, box.y + i * high];
      if (how === "pooled") pen.fillRect(x, y, 1.5, 1.5);
      else {
        pen.fillRect(x + wide - 0.5, y, 1, high);
        pen.fillRect(x, y + high - 0.5, wide, 1);
      }
    }
  }
}

/**
 * The cells, [first, last), that lie in a room that begins `from` pixels after the first of them.
 * @param {number} from
 * @param {number} room
 * @param {number} each
 * @param {number} many
 */
function within(from, room, each, many) {
  return [Math.max(0, Math.floor(from / each)), Math.min(many, Math.ceil((from + room) / each))];
}

/**
 * Slanted lines over a box of paper: what is left out of the colours.
 * @param {Pen} pen
 * @param {Box} box
 * @param {string} paper
 * @param {string} line
 */
export function drawHatching(pen, box, paper, line) {
  pen.save();
  pen.beginPath();
  pen.rect(box.x, box.y, box.width, box.height);
  pen.clip();
  pen.fillStyle = paper;
  pen.fillRect(box.x, box.y, box.width, box.height);
  pen.strokeStyle = line;
  pen.lineWidth = 1;
  pen.beginPath();
  for (let at = -box.width; at < box.height; at += 5) {
    pen.moveTo(box.x, box.y + at + box.width);
    pen.lineTo(box.x + box.width, box.y + at);
  }
  pen.stroke();
  pen.restore();
}

/**
 * Crossed lines over boxes of paper: numbers that are none.
 * @param {Pen} pen
 * @param {Box[]} boxes
 * @param {string} paper
 * @param {string} line
 */
export function drawCrossed(pen, boxes, paper, line) {
  const [left, top] = [Math.min(...boxes.map(({ x }) => x)), Math.min(...boxes.map(({ y }) => y))];
  const right = Math.max(...boxes.map(({ x, width }) => x + width));
  const bottom = Math.max(...boxes.map(({ y, height }) => y + height));
  if (!(right > left && bottom > top)) return;
  pen.save();
  pen.beginPath();
  for (const { x, y, width, height } of boxes) pen.rect(x, y, width, height);
  pen.clip();
  pen.fillStyle = paper;
  pen.fillRect(left, top, right - left, bottom - top);
  pen.strokeStyle = line;
  pen.lineWidth = 1;
  pen.globalAlpha = 0.5;
  pen.beginPath();
  const high = bottom - top;
  for (let x = left - high; x < right; x += 7) {
    pen.moveTo(x, bottom);
    pen.lineTo(x + high, top);
    pen.moveTo(x, top);
    pen.lineTo(x + high, bottom);
  }
  pen.stroke();
  pen.restore();
}

/**
 * One bar per bin along the top (standing) or the side (lying), of the bins that are seen.
 * @param {Pen} pen
 * @param {Float32Array} bins over all of `count` tokens
 * @param {number} count
 * @param {Range} seen
 * @param {Box} box
 * @param {{lying: boolean, colour: string, most: number, skip?: number}} how  skip: bins left out at the start
 */
export function drawBars(pen, bins, count, seen, box, how) {
  const each = count / bins.length;
  const along = (how.lying ? box.height : box.width) / (seen[1] - seen[0]);
  const room = how.lying ? box.width : box.height;
  const gap = each * along > 3 ? 1 : 0;
  pen.fillStyle = how.colour;
  const [first, last] = [Math.floor(seen[0] / each), Math.min(bins.length, Math.ceil(seen[1] / each))];
  for (let bin = Math.max(first, how.skip ?? 0); bin < last; bin++) {
    const from = Math.max(0, (bin * each - seen[0]) * along);
    const to = Math.min(how.lying ? box.height : box.width, ((bin + 1) * each - seen[0]) * along);
    const tall = Math.min(1, bins[bin] / how.most || 0) * room;
    if (how.lying) pen.fillRect(box.x, box.y + from, tall, Math.max(0.5, to - from - gap));
    else pen.fillRect(box.x + from, box.y + room - tall, Math.max(0.5, to - from - gap), tall);
  }
}

/**
 * A text that ends in "…" where it is wider than the room it has.
 * @param {Pen} pen
 * @param {string} text
 * @param {number} room
 */
export function fitted(pen, text, room) {
  if (pen.measureText(text).width <= room) return text;
  const letters = [...text];
  while (letters.length > 1 && pen.measureText(letters.join("") + "…").width > room) letters.pop();
  return letters.join("") + "…";
}

/**
 * Round numbers to write along an axis of tokens, about `many` of them.
 * @param {Range} seen
 * @param {number} many
 * @returns {number[]}
 */
export function ticks([start, stop], many) {
  const rough = Math.max(1, (stop - start) / Math.max(1, many));
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(1, power * ([1, 2, 5, 10].find((by) => by * power >= rough) ?? 10));
  const out = [];
  for (let at = Math.ceil(start / step) * step; at < stop; at += step) out.push(at);
  return out;
}

/**
 * A frame around a box, drawn outside it.
 * @param {Pen} pen
 * @param {Box} box
 * @param {string} colour
 * @param {number} [wide]
 */
export function drawFrame(pen, box, colour, wide = 1) {
  pen.strokeStyle = colour;
  pen.lineWidth = wide;
  pen.strokeRect(box.x - wide / 2, box.y - wide / 2, box.width + wide, box.height + wide);
}
