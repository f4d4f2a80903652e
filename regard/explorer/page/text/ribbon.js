// The ribbon over all tokens, as a code editor has its minimap: the sum (bars) and the largest (line) of the chosen
// token's weights in each bin, and a frame that is dragged to choose which words are shown.

import { clean, drawBars, drawFrame, drawHatching } from "../shared/canvas.js";
import { stepAt } from "../shared/colours.js";
import { make } from "../shared/elements.js";

/** @typedef {[number, number]} Range */
/**
 * @typedef {{length: number, window: Range, token: number | null, key: number | null, sum: Float32Array | null,
 *   max: Float32Array | null, sink: boolean, scale: import("../shared/colours.js").Scale,
 *   paper: import("../shared/colours.js").Paper, label: string, said: string}} RibbonShown
 */

const MARKS = 8;

export class Ribbon {
  /** @param {(start: number) => void} move  told where the window shall begin */
  constructor(move) {
    this.move = move;
    this.element = make("canvas", { class: "ribbon", tabindex: 0, role: "slider" });
    /** @type {RibbonShown | null} */
    this.shown = null;
    /** @type {number | null} */
    this.grip = null;
    this.element.addEventListener("pointerdown", (event) => this.#press(event));
    this.element.addEventListener("pointermove", (event) => this.#drag(event));
    this.element.addEventListener("pointerup", () => (this.grip = null));
    this.element.addEventListener("pointercancel", () => (this.grip = null));
    this.element.addEventListener("keydown", (event) => this.#key(event));
  }

  /** @param {RibbonShown} shown */
  draw(shown) {
    this.shown = shown;
    const { pen, width, height } = clean(this.element);
    const { paper, length, window } = shown;
    const box = { x: 0, y: MARKS, width, height: height - MARKS - 1 };
    const all = /** @type {Range} */ ([0, length]);
    pen.fillStyle = paper.veil;
    pen.fillRect(0, height - 1, width, 1);
    if (shown.sum) {
      const tall = shown.sum.map((value) => shown.scale.place(value));
      const skip = shown.sink ? 0 : 1;
      drawBars(pen, tall, length, all, box, { lying: false, colour: paper.ramp.css[stepAt(0.5)], most: 1, skip });
      if (skip) drawHatching(pen, { ...box, width: Math.max(4, width / tall.length) }, paper.paper, paper.muted);
    }
    if (shown.max) this.#line(pen, shown, box);
    const [from, to] = window.map((at) => (at / length) * width);
    if (to - from < width - 1) {
      pen.fillStyle = paper.veil;
      pen.fillRect(from, MARKS, to - from, height - MARKS);
      drawFrame(pen, { x: from + 1, y: MARKS + 1, width: Math.max(3, to - from - 2), height: height - MARKS - 2 }, paper.ink, 1.5);
    }
    this.#mark(pen, shown.token, paper.query, width);
    this.#mark(pen, shown.key, paper.key, width);
    this.#say(shown);
  }

  /**
   * The largest weight of each bin, which a sum over many small ones can hide.
   * @param {CanvasRenderingContext2D} pen
   * @param {RibbonShown} shown
   * @param {import("../shared/canvas.js").Box} box
   */
  #line(pen, { max, scale, paper, sink, length }, box) {
    if (!max || max.length >= length) return; // one token a bin: the sum is the largest
    const each = box.width / max.length;
    pen.fillStyle = paper.ink;
    for (let bin = sink ? 0 : 1; bin < max.length; bin++) {
      const tall = scale.place(max[bin]) * box.height;
      if (tall > 1.5) pen.fillRect(bin * each, box.y + box.height - tall, Math.max(1, each), 1.5);
    }
  }

  /**
   * @param {CanvasRenderingContext2D} pen
   * @param {number | null} at
   * @param {string} colour
   * @param {number} width
   */
  #mark(pen, at, colour, width) {
    if (at === null || !this.shown) return;
    const x = ((at + 0.5) / this.shown.length) * width;
    pen.fillStyle = colour;
    pen.beginPath();
    pen.moveTo(x - 4, 0);
    pen.lineTo(x + 4, 0);
    pen.lineTo(x, MARKS - 1);
    pen.fill();
  }

  /** @param {RibbonShown} shown */
  #say({ label, said, length, window }) {
    const give = { "aria-label": label, "aria-valuemin": 0, "aria-valuemax": length, "aria-valuenow": window[0], "aria-valuetext": said };
    for (const [name, value] of Object.entries(give))
      if (this.element.getAttribute(name) !== String(value)) this.element.setAttribute(name, String(value));
  }

  /** @param {PointerEvent} event */
  #at(event) {
    const box = this.element.getBoundingClientRect();
    return ((event.clientX - box.left) / box.width) * (this.shown?.length ?? 0);
  }

  /** @param {PointerEvent} event */
  #press(event) {
    if (!this.shown || event.button !== 0) return;
    this.element.setPointerCapture(event.pointerId);
    const [start, stop] = this.shown.window;
    const at = this.#at(event);
    // Taken where it is seized; a press beside the frame brings its middle there.
    this.grip = at >= start && at < stop ? at - start : (stop - start) / 2;
    this.#drag(event);
  }

  /** @param {PointerEvent} event */
  #drag(event) {
    if (this.grip !== null) this.move(Math.round(this.#at(event) - this.grip));
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    if (!this.shown || event.ctrlKey || event.metaKey || event.altKey) return;
    const { window, length } = this.shown;
    const wide = window[1] - window[0];
    const step = { ArrowLeft: -0.25, ArrowRight: 0.25, PageUp: -1, PageDown: 1 }[event.key];
    const to = { Home: 0, End: length }[event.key] ?? (step === undefined ? undefined : window[0] + Math.round(step * wide));
    if (to === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    this.move(to);
  }
}
