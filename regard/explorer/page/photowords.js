// The words around an image: the line of colours and shares above it, the tokens that are no patches, and the note below.
// It does not know how the image is drawn, nor who is pointed at.

import { stepAt } from "./colourmaps.js";
import { fill, make, segments } from "./elements.js";
import { digits, howWords, kindWords, wordsFor } from "./panewords.js";
import { say } from "./words.js";

/** @typedef {import("./labels.js").Piece} Piece */
/** @typedef {import("./patches.js").PlacedTokens} PlacedTokens */
/** @typedef {import("./source.js").Row} Row */
/** @typedef {import("./state.js").State} State */
/**
 * @typedef {{row: Row | null, keys: PlacedTokens | null, scale: import("./colourmaps.js").Scale,
 *   paper: import("./paper.js").Paper, image: number, images: number}} Told
 */

/** Of an image of thousands of pixels, less than one: rounding, and no crop. */
const HAIR = 1e-4;

/** Patches that lie wholly on what was padded around the photograph, as overlays call them. */
const BEYOND = "beyond the image";

export class PhotoBar {
  /** @param {(image: number) => void} choose  told which of several images is wanted */
  constructor(choose) {
    this.choose = choose;
    this.element = make("div", { class: "photo-bar" });
    this.shown = "";
  }

  /**
   * @param {State} state
   * @param {Told} told
   */
  show(state, { row, keys, scale, paper, image, images }) {
    const { lang, session, layer, head } = state;
    const shown = JSON.stringify([lang, session, layer, head, row?.token, scale.kind, scale.high, paper.dark, image]);
    if (shown === this.shown) return;
    this.shown = shown;
    const stops = Array.from({ length: 9 }, (_, i) => paper.ramp.css[stepAt(i / 8)]);
    const ramp = make("span", { class: "map-ramp", style: `background: linear-gradient(90deg, ${stops.join(", ")})` });
    const low = make("span", {}, scale.kind === "linear" ? "0" : digits(scale.low));
    const high = make("span", { class: "photo-high" }, digits(scale.high));
    const shares = sharesOf(row, keys).map(([kind, share]) => {
      const given = { class: "photo-share", "data-kind": kind, "data-share": share };
      const name = kind === BEYOND ? say(lang, "photo_beyond") : kindWords(kind, lang);
      return make("span", given, `${name} `, make("b", {}, digits(share)));
    });
    const choice = images > 1 ? this.#choice(lang, image, images) : null;
    const known = row?.weights.data.some((weight) => weight > 0);
    const part = row?.how === "strongest" && `${howWords(row.how, lang)}: ${say(lang, "photo_part")}`;
    const legend = known && make("span", { class: "photo-legend" }, low, ramp, high);
    fill(this.element, choice, legend, part && make("span", { class: "photo-part" }, part), ...shares);
  }

  /**
   * @param {string} lang
   * @param {number} image
   * @param {number} images
   */
  #choice(lang, image, images) {
    const choices = Array.from({ length: images }, (_, n) => ({ value: String(n), label: String(n) }));
    return segments(wordsFor(lang).images, "image", choices, String(image), (value) => this.choose(Number(value)));
  }
}

/**
 * What a row sums up to, by kind of key, the largest first; nothing where the page holds only a part of the row.
 * @param {Row | null} row
 * @param {PlacedTokens | null} keys
 * @returns {[string, number][]}
 */
function sharesOf(row, keys) {
  if (row === null || keys === null || row.how === "strongest") return [];
  /** @type {Map<string, number>} */
  const sums = new Map();
  row.weights.data.forEach((weight, i) => {
    const kind = keys.beyond(row.start + i) ? BEYOND : keys.kinds[row.start + i];
    sums.set(kind, (sums.get(kind) ?? 0) + weight);
  });
  return [...sums].sort(([, a], [, b]) => b - a);
}

/**
 * The tokens that are no patches: words by the word they belong to, all else one by one.
 * @param {PlacedTokens | null} tokens
 * @param {import("./naming.js").Naming | null} naming
 * @returns {{pieces: Piece[], whole: string | null}[]}
 */
export function piecesOf(tokens, naming) {
  if (tokens === null || naming === null) return [];
  const { labels, overview } = naming;
  const named = tokens.count === overview.length && overview.labels.some((label) => label !== "");
  /** @type {{pieces: Piece[], whole: string | null}[]} */
  const out = [];
  const { others } = tokens;
  for (let at = 0, end = 0; at < others.length; at = end) {
    const [index, text] = [others[at], tokens.name(others[at])];
    end = at + 1;
    if (text !== null) {
      out.push({ pieces: [{ index, text, joins: false, breaks: false, kind: "special", whole: text }], whole: null });
      continue;
    }
    while (end < others.length && others[end] === others[end - 1] + 1 && tokens.kinds[others[end]] === "text") end++;
    const stop = others[end - 1] + 1;
    out.push(...(named ? labels.words(index, stop) : labels.numbers(index, stop)));
  }
  return out;
}

/**
 * What is to be known of an image, in a line.
 * @param {import("./source.js").ImageLine | undefined} line
 * @param {import("./patches.js").Grid | undefined} grid
 * @param {{windows: number, stretched: boolean, lost: string}} how  stretched: the sides are not drawn as they are;
 *   lost: why the image did not come, "" where it did
 * @param {string} lang
 */
export function noteOf(line, grid, { windows, stretched, lost }, lang) {
  const words = wordsFor(lang);
  const [top, left, bottom, right] = line?.seen ?? [0, 0, 1, 1];
  const cropped = Math.max(top, left, 1 - bottom, 1 - right) > HAIR;
  const notes = [
    grid ? words.patchesOf({ rows: grid.rows.length, columns: grid.columns.length }) : words.noPatches,
    windows > 1 && words.inWindows({ windows }),
    cropped && words.hatched,
    stretched && words.stretched,
    line && !line.shown && words.noImage,
    lost && words.imageLost({ why: lost }),
  ];
  return notes.filter(Boolean).join(" · ");
}
