// An image on its canvas: in its colours, softened towards the paper, under the colours of patches; what the model did
// not see is hatched; the query and the key are framed.

import { clean, drawCrossed, drawFrame, drawHatching } from "../shared/canvas.js";
import { stepAt } from "../shared/colours.js";

/** @typedef {import("../shared/canvas.js").Box} Box */
/** @typedef {import("../shared/canvas.js").Pen} Pen */
/** @typedef {import("../shared/colours.js").Paper} Paper */
/** @typedef {import("./patches.js").Patch} Patch */

/**
 * @typedef {object} Shown
 * @property {HTMLImageElement | null} image  null: bare paper
 * @property {number} height  of the image, in its own pixels
 * @property {number} width
 * @property {number[]} seen  top, left, bottom, right of what the model saw, fractions
 * @property {Patch[]} patches  of the keys
 * @property {number} across  patches beside each other
 * @property {number} down  patches below each other
 * @property {(patch: Patch) => number} weight
 * @property {boolean} broken  NaN is a weight, and not one that is not known
 * @property {import("../shared/colours.js").Scale} scale
 * @property {import("./patches.js").Box | null} query
 * @property {import("./patches.js").Box | null} key
 * @property {boolean} held
 * @property {Paper} paper
 */

/** How much is seen of the image where it is bare, and of the colour of the largest weight. */
const SOFT = 0.72;
const COVER = 0.92;
const MARGIN = 6; // around the image, for the frames of patches at its edge
/** The shorter side is no shorter than 0.3 inches, as in the figures; where it would be, patches become as large as this. */
const LEAST = 29;
const PATCH = 6;

export class ImageOverlay {
  /** @param {HTMLCanvasElement} canvas */
  constructor(canvas) {
    this.canvas = canvas;
    /** @type {Box} */
    this.plot = { x: 0, y: 0, width: 1, height: 1 };
    /** @type {{of: string, bitmap: HTMLCanvasElement, image: HTMLImageElement} | null} */
    this.soft = null;
  }

  /**
   * @param {Shown} shown
   * @returns {boolean} whether the image is stretched, its sides not drawn as they are
   */
  draw(shown) {
    const { pen, width, height } = clean(this.canvas);
    const { paper } = shown;
    this.plot = fitting(shown, width, height);
    this.canvas.dataset.plot = Object.values(this.plot).map((n) => n.toFixed(2)).join(" ");
    pen.save();
    pen.beginPath();
    pen.rect(this.plot.x, this.plot.y, this.plot.width, this.plot.height);
    pen.clip();
    this.#image(pen, shown);
    this.#unseen(pen, shown);
    for (const patch of shown.patches) this.#colour(pen, shown, patch);
    this.#cross(pen, shown);
    pen.restore();
    drawFrame(pen, this.plot, paper.line);
    if (shown.query) this.#frame(pen, shown.query, paper, paper.query, shown.held ? 3.5 : 2.5, []);
    if (shown.key) this.#frame(pen, shown.key, paper, paper.key, 2, [4, 3]);
    return Math.abs((this.plot.width * shown.height) / (this.plot.height * shown.width) - 1) > 0.01;
  }

  /**
   * Patches whose weight is NaN, crossed.
   * @param {Pen} pen
   * @param {Shown} shown
   */
  #cross(pen, { patches, weight, broken, paper }) {
    const boxes = broken ? patches.filter((patch) => Number.isNaN(weight(patch))).map(({ box }) => this.#box(box)) : [];
    if (boxes.length > 0) drawCrossed(pen, boxes, paper.veil, paper.alarm);
  }

  /**
   * @param {Pen} pen
   * @param {Shown} shown
   */
  #image(pen, { image, paper }) {
    if (image === null) return;
    const { x, y, width, height } = this.plot;
    const size = [Math.max(1, Math.round(width * devicePixelRatio)), Math.max(1, Math.round(height * devicePixelRatio))];
    const of = `${size} ${paper.paper}`;
    if (this.soft?.of !== of || this.soft.image !== image)
      this.soft = { of, image, bitmap: softened(image, size[0], size[1], paper.paper) };
    pen.drawImage(this.soft.bitmap, x, y, width, height);
  }

  /**
   * What was cropped away, hatched.
   * @param {Pen} pen
   * @param {Shown} shown
   */
  #unseen(pen, { seen: [top, left, bottom, right], paper }) {
    const [veil, line] = paper.dark
      ? ["rgb(20 23 28 / 0.66)", "rgb(162 171 184 / 0.3)"]
      : ["rgb(255 255 255 / 0.66)", "rgb(91 99 112 / 0.3)"];
    const [t, l, b, r] = [top, left, bottom, right].map((edge) => Math.min(1, Math.max(0, edge)));
    const parts = [
      { top: 0, left: 0, bottom: t, right: 1 },
      { top: b, left: 0, bottom: 1, right: 1 },
      { top: t, left: 0, bottom: b, right: l },
      { top: t, left: r, bottom: b, right: 1 },
    ];
    for (const part of parts)
      if (part.bottom > part.top && part.right > part.left) drawHatching(pen, this.#box(part), veil, line);
  }

  /**
   * @param {Pen} pen
   * @param {Shown} shown
   * @param {Patch} patch
   */
  #colour(pen, { weight, scale, paper }, patch) {
    const value = weight(patch);
    if (!(value > 0)) return;
    const place = scale.place(value);
    const { x, y, width, height } = this.#box(patch.box);
    pen.globalAlpha = COVER * Math.sqrt(place);
    pen.fillStyle = paper.ramp.css[stepAt(place)];
    pen.fillRect(x, y, width, height);
    pen.globalAlpha = 1;
  }

  /**
   * A frame beside a patch, whose colour counts, with paper around it so that it shows on any image.
   * @param {Pen} pen
   * @param {import("./patches.js").Box} box
   * @param {Paper} paper
   * @param {string} colour
   * @param {number} wide
   * @param {number[]} dashes
   */
  #frame(pen, box, paper, colour, wide, dashes) {
    const at = this.#box(box);
    drawFrame(pen, { x: at.x - 1, y: at.y - 1, width: at.width + 2, height: at.height + 2 }, paper.paper, wide + 1.5);
    pen.setLineDash(dashes);
    drawFrame(pen, at, colour, wide);
    pen.setLineDash([]);
  }

  /**
   * @param {import("./patches.js").Box} box
   * @returns {Box}
   */
  #box({ top, left, bottom, right }) {
    const { x, y, width, height } = this.plot;
    return { x: x + left * width, y: y + top * height, width: (right - left) * width, height: (bottom - top) * height };
  }

  /**
   * A place of the canvas as fractions of the image's sides; null beside it.
   * @param {number} x
   * @param {number} y
   */
  place(x, y) {
    const { plot } = this;
    const [across, down] = [(x - plot.x) / plot.width, (y - plot.y) / plot.height];
    return across < 0 || across >= 1 || down < 0 || down >= 1 ? null : { x: across, y: down };
  }
}

/**
 * As large as there is room for, in its own shape; of an image that is a mere line so, the shorter side is stretched until
 * its patches can be pointed at.
 * @param {Shown} shown
 * @param {number} width
 * @param {number} height
 * @returns {Box}
 */
function fitting(shown, width, height) {
  const room = { width: Math.max(1, width - 2 * MARGIN), height: Math.max(1, height - 2 * MARGIN) };
  const scale = Math.min(room.width / shown.width, room.height / shown.height);
  const side = (/** @type {number} */ length, /** @type {number} */ patches, /** @type {number} */ most) =>
    length >= LEAST ? length : Math.min(most, Math.max(LEAST, PATCH * patches));
  const wide = side(shown.width * scale, shown.across, room.width);
  const high = side(shown.height * scale, shown.down, room.height);
  return { x: MARGIN + (room.width - wide) / 2, y: MARGIN + (room.height - high) / 2, width: wide, height: high };
}

/**
 * The image, softened towards the paper, so that the colours of weights stand out on it.
 * @param {HTMLImageElement} image
 * @param {number} width
 * @param {number} height
 * @param {string} paper
 */
function softened(image, width, height, paper) {
  const bitmap = document.createElement("canvas");
  [bitmap.width, bitmap.height] = [width, height];
  const pen = /** @type {Pen} */ (bitmap.getContext("2d"));
  pen.imageSmoothingQuality = "high";
  pen.fillStyle = paper;
  pen.fillRect(0, 0, width, height);
  pen.globalAlpha = SOFT;
  pen.drawImage(image, 0, 0, width, height);
  return bitmap;
}
