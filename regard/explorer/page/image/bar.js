// The text around an image: the line of colours and shares above it, the tokens that are no patches, and the note
// below.

import { stepAt } from "../shared/colours.js";
import { fill, make, segments } from "../shared/elements.js";
import { digits, howText, kindText, translate } from "../shared/messages.js";

/** @typedef {import("../shared/labels.js").Piece} Piece */
/** @typedef {import("../source/source.js").Row} Row */
/** @typedef {import("../state.js").State} State */
/** @typedef {import("./patches.js").PlacedTokens} PlacedTokens */

/**
 * @typedef {{row: Row | null, keys: PlacedTokens | null, scale: import("../shared/colours.js").Scale,
 *   paper: import("../shared/colours.js").Paper, image: number, images: number}} Told
 */

/** Of an image of thousands of pixels, less than one: rounding, and no crop. */
const HAIR = 1e-4;

/** Patches that lie wholly on what was padded around the image, as overlays call them. */
const BEYOND = "beyond the image";

export class ImageBar {
  /** @param {(image: number) => void} choose  told which of several images is wanted */
  constructor(choose) {
    this.choose = choose;
    this.element = make("div", { class: "image-bar" });
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
    const high = make("span", { class: "image-high" }, digits(scale.high));
    const shares = sharesOf(row, keys).map(([kind, share]) => {
      const given = { class: "image-share", "data-kind": kind, "data-share": share };
      const name = kind === BEYOND ? translate("beyond the image", lang) : kindText(kind, lang);
      return make("span", given, `${name} `, make("b", {}, digits(share)));
    });
    const choice = images > 1 ? this.#choice(lang, image, images) : null;
    const known = row?.weights.data.some((weight) => weight > 0);
    const part = row?.how === "strongest" && `${howText(row.how, lang)}: ${translate("of bare patches this file does not hold the weight", lang)}`;
    const legend = known && make("span", { class: "image-legend" }, low, ramp, high);
    fill(this.element, choice, legend, part && make("span", { class: "image-part" }, part), ...shares);
  }

  /**
   * @param {string} lang
   * @param {number} image
   * @param {number} images
   */
  #choice(lang, image, images) {
    const choices = Array.from({ length: images }, (_, n) => ({ value: String(n), label: String(n) }));
    return segments(translate("Image", lang), "image", choices, String(image), (value) => this.choose(Number(value)));
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
 * @param {import("../shared/labels.js").Naming | null} naming
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
 * @param {import("../source/source.js").ImageLine | undefined} line
 * @param {import("./patches.js").Grid | undefined} grid
 * @param {{windows: number, stretched: boolean, lost: string}} how  stretched: the sides are not drawn as they are;
 *   lost: why the image did not come, "" where it did
 * @param {string} lang
 */
export function noteOf(line, grid, { windows, stretched, lost }, lang) {
  const [top, left, bottom, right] = line?.seen ?? [0, 0, 1, 1];
  const cropped = Math.max(top, left, 1 - bottom, 1 - right) > HAIR;
  const notes = [
    grid
      ? translate("{rows} × {columns} patches", lang, { rows: grid.rows.length, columns: grid.columns.length })
      : translate("no token of this layer is a patch", lang),
    windows > 1 && translate("{windows} windows: a patch sees its own window alone", lang, { windows }),
    cropped && translate("hatched: the model did not see it", lang),
    stretched && translate("drawn broader than it is, so that patches can be hit", lang),
    line && !line.shown && translate("the image itself is not in this capture", lang),
    lost && translate("the image did not come: {why}", lang, { why: lost }),
  ];
  return notes.filter(Boolean).join(" · ");
}
