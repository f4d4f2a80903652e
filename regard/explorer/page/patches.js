// What the tokens of an attention are and where they lie in a picture, spread out from the overview's short form: a kind,
// a picture and a box for each token. Boxes are fractions of the picture's sides. It does not know what is drawn.

/** @typedef {{kind: string, picture: number | null, count: number}} Run */
/** @typedef {{picture: number, rows: number[][], columns: number[][], cells: number[] | null}} Grid */
/** @typedef {{runs: Run[], grids: Grid[]}} TokenLayout */
/** @typedef {{top: number, left: number, bottom: number, right: number}} Box */
/** @typedef {{token: number, row: number, column: number, box: Box}} Patch */

/** Of a picture's sides: rounding, and no part of a patch. */
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
    this.pictures = [];
    for (const { kind, picture, count } of layout.runs)
      for (let i = 0; i < count; i++) {
        this.kinds.push(kind);
        this.pictures.push(picture);
      }
    this.count = this.kinds.length;
    /** @type {Map<string, Map<number | null, number>>} */
    this.counts = new Map(); // kind → picture → how many tokens
    this.numbers = this.kinds.map((kind, token) => this.#number(kind, this.pictures[token]));
    /** @type {Map<number, Patch>} */
    this.patches = new Map(); // by token
    for (const grid of layout.grids) this.#place(grid);
    /** @type {Map<number, Patch[]>} */
    this.byPicture = new Map();
    for (const patch of this.patches.values()) {
      const picture = this.pictures[patch.token] ?? 0;
      const own = this.byPicture.get(picture);
      if (own) own.push(patch);
      else this.byPicture.set(picture, [patch]);
    }
  }

  /**
   * Which token of its kind and picture this one is, counted as it comes.
   * @param {string} kind
   * @param {number | null} picture
   */
  #number(kind, picture) {
    const own = this.counts.get(kind) ?? new Map();
    const number = own.get(picture) ?? 0;
    this.counts.set(kind, own.set(picture, number + 1));
    return number;
  }

  /** @param {Grid} grid */
  #place({ picture, rows, columns, cells }) {
    let n = 0;
    for (let token = 0; token < this.count; token++) {
      if (this.kinds[token] !== "patch" || this.pictures[token] !== picture) continue;
      const cell = cells === null ? n : cells[n];
      const [row, column] = [Math.floor(cell / columns.length), cell % columns.length];
      const [[top, bottom], [left, right]] = [rows[row], columns[column]];
      this.patches.set(token, { token, row, column, box: { top, left, bottom, right } });
      n++;
    }
  }

  /**
   * The patches of one picture, in the order of the tokens.
   * @param {number} picture
   * @returns {Patch[]}
   */
  of(picture) {
    return this.byPicture.get(picture) ?? [];
  }

  /**
   * The patch of a picture at a place, fractions of its sides; undefined where the model saw nothing.
   * @param {number} picture
   * @param {number} y
   * @param {number} x
   */
  at(picture, y, x) {
    return this.of(picture).find(({ box }) => y >= box.top && y < box.bottom && x >= box.left && x < box.right);
  }

  /**
   * The patch of a picture in a row and a column.
   * @param {number} picture
   * @param {number} row
   * @param {number} column
   */
  in(picture, row, column) {
    return this.of(picture).find((patch) => patch.row === row && patch.column === column);
  }

  /**
   * Is a token a patch that lies wholly beyond its picture, on what was padded around it?
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
   * counted among those of its kind in its picture.
   * @param {number} token
   * @returns {string | null}
   */
  name(token) {
    const kind = this.kinds[token];
    if (kind === undefined || kind === "text") return null;
    const patch = this.patches.get(token);
    if (patch) return `(${patch.row}, ${patch.column})`;
    const [picture, counts] = [this.pictures[token], this.counts.get(kind)];
    const name = counts?.get(picture) === 1 ? kind : `${kind} ${this.numbers[token]}`;
    return (counts?.size ?? 1) > 1 && picture !== null ? `${name} of picture ${picture}` : name;
  }
}
