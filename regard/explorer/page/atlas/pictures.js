// The pictures in the atlas's cells, all on one canvas: each head's small map, or the row of one query in every head.

import { clean } from "../shared/canvas.js";
import { make } from "../shared/elements.js";
import { howText, message, translate, translateParts } from "../shared/messages.js";
import { NotCarried } from "../source/embedded.js";
import { isAbort, latest } from "../source/source.js";

/** @typedef {import("../source/arrays.js").Levels} Levels */
/** @typedef {import("../source/source.js").Overview} Overview */
/** @typedef {import("../source/source.js").Source} Source */
/** @typedef {import("../state.js").State} State */

/** levels: (H, r, c).  image: whether these are the cells of one.  @typedef {{levels: Levels, image: boolean, how: string}} Picture */
/** Why there are no rows of a query in every head. @typedef {"carried" | "long" | "unknown"} Reason */
/**
 * What the cells show. token: whose rows, null for maps.  reason: why the rows that were asked for are not shown; an error
 * of another kind is its text.
 * @typedef {{token: number | null, layers: (Picture | null)[], reason: Reason | null, error: string}} Shown
 */
/** In CSS pixels; strip: the part of a cell below its picture. @typedef {{cell: number, height: number, strip: number, heads: number}} Sizes */

const MOST_ROWS = 2 ** 24; // weights of a row in all heads that the server takes
const LONG = 4096; // tokens from which a pointer must rest before rows are asked for
const REST_MS = 80;
const DIM = 0.16; // of a head that does not fit the search

/** @type {Record<Reason, string>} */
const REASONS = {
  carried: message("This file does not carry the rows of every head: the maps stay. `regard serve` has all rows."),
  long: message("The text is too long for the row of a word in every head: the maps stay."),
  unknown: message("Exact rows are not known here: the maps stay."),
};

/**
 * What is shown, in words.
 * @param {Shown} shown
 * @param {string} name  of the token
 * @param {string} lang
 * @returns {(string | HTMLElement)[]}
 */
export function captionOf({ token, layers, reason, error }, name, lang) {
  if (reason) return [translate(REASONS[reason], lang)];
  if (error) return [translate("That did not work: {error}", lang, { error })];
  const known = layers.filter((one) => one !== null);
  const how = howText(known.every((one) => one.how === "exact") ? "exact" : "pooled", lang);
  if (token !== null) {
    const word = make("bdi", { class: "atlas-token" }, name);
    return [...translateParts("What {token} looks at, in every head", lang, { token: word }), ` · ${how}`];
  }
  if (known.some(({ image }) => image)) return [translate("What each patch receives from all queries", lang)];
  return [`${translate("Maps: looks from ↓, looks at →", lang)} · ${how}`];
}

export class Pictures {
  /**
   * @param {Source} source
   * @param {() => void} changed  told when other pictures are there
   */
  constructor(source, changed) {
    this.source = source;
    this.changed = changed;
    this.canvas = document.createElement("canvas");
    this.canvas.className = "atlas-pictures";
    this.canvas.setAttribute("role", "img");
    this.sheet = document.createElement("canvas");
    this.next = latest();
    /** @type {(Picture | null)[]} */
    this.maps = [];
    /** @type {Shown} */
    this.shown = { token: null, layers: [], reason: null, error: "" };
    this.asked = "";
  }

  /**
   * Take the maps of a session.
   * @param {string} session
   * @param {Overview} overview
   * @param {AbortSignal} signal
   */
  async load(session, overview, signal) {
    this.overview = overview;
    const { layers } = await this.source.thumbnails(session, signal).catch((error) => {
      if (isAbort(error)) throw error;
      return { layers: [] };
    });
    this.asked = "";
    const mapOf = (/** @type {import("../source/source.js").LayerThumbnails} */ { levels, images, how }) =>
      picture(levels, images.map((one) => one.levels), how);
    this.maps = layers.map((layer) => layer && mapOf(layer));
    this.#show(null);
  }

  /** Forget the pictures of another session. */
  clear() {
    [this.maps, this.asked] = [[], ""];
    this.shown = { token: null, layers: [], reason: null, error: "" };
  }

  end() {
    clearTimeout(this.timer);
    this.next();
  }

  get any() {
    return this.maps.some((map) => map !== null);
  }

  /** Height of the tallest image by its width; without images pictures fill their cells. */
  get tallest() {
    const known = this.maps.filter((map) => map !== null);
    return Math.max(0, ...known.map(({ image, levels: { shape } }) => (image ? shape[1] / shape[2] : Infinity)));
  }

  /**
   * Ask for the rows of the query that is pointed at, else of the pinned one; without either, show the maps.
   * @param {State} state
   * @param {number} width  cells that a row has room for
   */
  ask({ session, layer, token: chosen, hover, pinned }, width) {
    const pointed = hover !== null && hover.session === session ? hover.token : null;
    const token = pointed ?? (pinned ? chosen : null);
    const asked = token === null ? "" : [session, layer, token, width].join("/");
    if (asked === this.asked || session === null || !this.overview || this.maps.length === 0) return;
    this.asked = asked;
    clearTimeout(this.timer);
    const signal = this.next();
    const { layers } = this.overview;
    if (token === null) return this.#show(null);
    if (token >= layers[layer].queries) return;
    if (layers.reduce((sum, { heads, keys }) => sum + heads * keys, 0) > MOST_ROWS) return this.#show(null, "long");
    const ask = () => void this.#ask(session, token, layer, width, signal);
    if (layers[layer].keys > LONG) this.timer = setTimeout(ask, REST_MS);
    else ask();
  }

  /**
   * @param {string} session
   * @param {number} token
   * @param {number} layer
   * @param {number} width
   * @param {AbortSignal} signal
   */
  async #ask(session, token, layer, width, signal) {
    try {
      const { layers } = await this.source.rowsOfToken(session, token, layer, width, signal);
      if (signal.aborted) return;
      const rows = layers.map((one) => one && picture(one.levels, one.images, one.how));
      if (rows.every((row) => row === null)) this.#show(null, "unknown");
      else this.#show(token, null, "", rows);
    } catch (error) {
      if (isAbort(error) || signal.aborted) return;
      if (error instanceof NotCarried) this.#show(null, "carried");
      else this.#show(null, null, error instanceof Error ? error.message : String(error));
    }
  }

  /**
   * @param {number | null} token
   * @param {Reason | null} [reason]
   * @param {string} [error]
   * @param {(Picture | null)[]} [layers]
   */
  #show(token, reason = null, error = "", layers = this.maps) {
    this.shown = { token, layers, reason, error };
    this.changed();
  }

  /**
   * Draw what is shown: one bitmap of all heads, then a part of it into each cell.
   * @param {Sizes} sizes
   * @param {import("../shared/colours.js").Ramp} ramp
   * @param {boolean} sink  whether the first key has a part in the colours
   * @param {(place: string) => boolean} fits  "layer.head"
   */
  draw({ cell, height, strip, heads }, ramp, sink, fits) {
    const { layers, token } = this.shown;
    if (layers.length === 0) return; // those of another session are gone, its own not yet there
    this.canvas.style.width = `${heads * cell}px`;
    this.canvas.style.height = `${layers.length * height}px`;
    this.canvas.dataset.token = token === null ? "" : String(token);
    const { pen } = clean(this.canvas);
    const across = Math.max(1, ...layers.map((layer) => layer?.levels.shape[2] ?? 1));
    const down = Math.max(1, ...layers.map((layer) => layer?.levels.shape[1] ?? 1));
    [this.sheet.width, this.sheet.height] = [heads * across, layers.length * down];
    const image = new ImageData(this.sheet.width, this.sheet.height);
    const pixels = new Uint32Array(image.data.buffer);
    const colours = paletteOf(ramp);
    layers.forEach((layer, l) => {
      const place = { left: across, top: l * down, wide: image.width };
      if (layer) write(pixels, layer, colours, place, sink || layer.image);
    });
    /** @type {CanvasRenderingContext2D} */ (this.sheet.getContext("2d")).putImageData(image, 0, 0);
    const ratio = globalThis.devicePixelRatio || 1;
    layers.forEach((layer, l) => {
      if (!layer) return;
      const [count, rows, columns] = layer.levels.shape;
      const box = roomFor(layer, cell - 2, height - strip - 3);
      pen.imageSmoothingEnabled = columns > box.width * ratio || rows > box.height * ratio; // else cells would be lost
      for (let h = 0; h < count; h++) {
        if (Number.isNaN(layer.levels.scale[h])) continue;
        pen.globalAlpha = fits(`${l}.${h}`) ? 1 : DIM;
        const [x, y] = [h * cell + 1 + box.x, l * height + 1 + box.y];
        pen.drawImage(this.sheet, h * across, l * down, columns, rows, x, y, box.width, box.height);
      }
    });
  }
}

/**
 * A layer's levels as (H, r, c): those of its image where it has one.
 * @param {Levels} levels  (H, r, c) or (H, c)
 * @param {Levels[]} images
 * @param {string} how
 * @returns {Picture}
 */
function picture(levels, images, how) {
  const [heads, ...rest] = (images[0] ?? levels).shape;
  const shape = [heads, rest.length === 1 ? 1 : rest[0], rest[rest.length - 1]];
  return { levels: { ...(images[0] ?? levels), shape }, image: images.length > 0, how };
}

/**
 * The part of a cell that a picture fills: all of it, or of an image as much as keeps its sides.
 * @param {Picture} picture
 * @param {number} width
 * @param {number} height
 */
function roomFor({ image, levels }, width, height) {
  if (!image) return { x: 0, y: 0, width, height };
  const [, rows, columns] = levels.shape;
  const each = Math.min(width / columns, height / rows);
  const [wide, high] = [columns * each, rows * each];
  return { x: (width - wide) / 2, y: (height - high) / 2, width: wide, height: high };
}

/**
 * The colours of a ramp as 32-bit pixels.
 * @param {import("../shared/colours.js").Ramp} ramp
 */
function paletteOf({ rgb }) {
  const bytes = new Uint8ClampedArray(1024).fill(255);
  for (let step = 0; step < 256; step++) bytes.set(rgb.subarray(3 * step, 3 * step + 3), 4 * step);
  return new Uint32Array(bytes.buffer);
}

/**
 * The heads of a layer beside each other, each coloured up to its own maximum. Without the sink, the cell of the first key
 * is left bare, and the maximum is that of the others.
 * @param {Uint32Array} pixels
 * @param {Picture} picture
 * @param {Uint32Array} colours
 * @param {{left: number, top: number, wide: number}} place  left: from one head to the next
 * @param {boolean} sink
 */
function write(pixels, { levels: { shape, data } }, colours, { left, top, wide }, sink) {
  const [heads, rows, columns] = shape;
  for (let h = 0; h < heads; h++) {
    let most = 255;
    if (!sink) {
      most = 1;
      for (let i = 0; i < rows * columns; i++)
        if (i % columns > 0) most = Math.max(most, data[h * rows * columns + i]);
    }
    for (let r = 0; r < rows; r++)
      for (let c = sink ? 0 : 1; c < columns; c++) {
        const level = data[(h * rows + r) * columns + c];
        pixels[(top + r) * wide + h * left + c] = colours[Math.round((255 * level) / most)];
      }
  }
}
