// What the tokens of an attention are and where they lie in an image, spread out from the overview's short form: a
// kind, an image and a box for each token. Boxes are fractions of the image's sides.

/** @typedef {{kind: string, image: number | null, count: number}} Run */
/** @typedef {{image: number, rows: number[][], columns: number[][], cells: number[] | null}} Grid */
/** @typedef {{runs: Run[], grids: Grid[]}} TokenLayout */
/** @typedef {{top: number, left: number, bottom: number, right: number}} Box */
/** @typedef {{token: number, row: number, column: number, box: Box}} Patch */

/** Of an image's sides: rounding, and no part of a patch. */
const HAIR = 1e-6;

/** @type {WeakMap<TokenLayout, PlacedTokens>} */
const made = new WeakMap();

/**
 * The tokens of a layout, spread out once.
 * @param {TokenLayout} layout
 * @returns {PlacedTokens}
 */
export function placedTokens(layout) {
  const known = made.get(layout) ?? new PlacedTokens(layout);
  made.set(layout, known);
  return known;
}

export class PlacedTokens {
  /** @param {TokenLayout} layout */
  constructor(layout) {
    /** @type {string[]} */
    this.kinds = [];
    /** @type {(number | null)[]} */
    this.images = [];
    for (const { kind, image, count } of layout.runs)
      for (let i = 0; i < count; i++) {
        this.kinds.push(kind);
        this.images.push(image);
      }
    this.count = this.kinds.length;
    /** @type {Map<string, Map<number | null, number>>} */
    this.counts = new Map(); // kind → image → how many tokens
    this.numbers = this.kinds.map((kind, token) => this.#number(kind, this.images[token]));
    /** @type {Map<number, Patch>} */
    this.patches = new Map(); // by token
    for (const grid of layout.grids) this.#place(grid);
    /** @type {Map<number, Patch[]>} */
    this.byImage = new Map();
    for (const patch of this.patches.values()) {
      const image = this.images[patch.token] ?? 0;
      const own = this.byImage.get(image);
      if (own) own.push(patch);
      else this.byImage.set(image, [patch]);
    }
  }

  /**
   * Which token of its kind and image this one is, counted as it comes.
   * @param {string} kind
   * @param {number | null} image
   */
  #number(kind, image) {
    const own = this.counts.get(kind) ?? new Map();
    const number = own.get(image) ?? 0;
    this.counts.set(kind, own.set(image, number + 1));
    return number;
  }

  /** @param {Grid} grid */
  #place({ image, rows, columns, cells }) {
    let n = 0;
    for (let token = 0; token < this.count; token++) {
      if (this.kinds[token] !== "patch" || this.images[token] !== image) continue;
      const cell = cells === null ? n : cells[n];
      const [row, column] = [Math.floor(cell / columns.length), cell % columns.length];
      const [[top, bottom], [left, right]] = [rows[row], columns[column]];
      this.patches.set(token, { token, row, column, box: { top, left, bottom, right } });
      n++;
    }
  }

  /**
   * The patches of one image, in the order of the tokens.
   * @param {number} image
   * @returns {Patch[]}
   */
  of(image) {
    return this.byImage.get(image) ?? [];
  }

  /**
   * The patch of an image at a place, fractions of its sides; undefined where the model saw nothing.
   * @param {number} image
   * @param {number} y
   * @param {number} x
   */
  at(image, y, x) {
    return this.of(image).find(({ box }) => y >= box.top && y < box.bottom && x >= box.left && x < box.right);
  }

  /**
   * The patch of an image in a row and a column.
   * @param {number} image
   * @param {number} row
   * @param {number} column
   */
  in(image, row, column) {
    return this.of(image).find((patch) => patch.row === row && patch.column === column);
  }

  /**
   * Is a token a patch that lies wholly beyond its image, on what was padded around it?
   * @param {number} token
   */
  beyond(token) {
    const box = this.patches.get(token)?.box;
    return box !== undefined && (Math.min(box.bottom, box.right) <= HAIR || Math.max(box.top, box.left) >= 1 - HAIR);
  }

  /** Tokens that are neither patches nor padding: cls, registers, words. */
  get others() {
    return this.kinds.flatMap((kind, token) => (kind === "patch" || kind === "padding" ? [] : [token]));
  }

  /**
   * What a token is called, whatever it is but a word, which is null: a patch by row and column, any other by its kind,
   * counted among those of its kind in its image.
   * @param {number} token
   * @returns {string | null}
   */
  name(token) {
    const kind = this.kinds[token];
    if (kind === undefined || kind === "text") return null;
    const patch = this.patches.get(token);
    if (patch) return `(${patch.row}, ${patch.column})`;
    const [image, counts] = [this.images[token], this.counts.get(kind)];
    const name = counts?.get(image) === 1 ? kind : `${kind} ${this.numbers[token]}`;
    return (counts?.size ?? 1) > 1 && image !== null ? `${name} of image ${image}` : name;
  }
}
