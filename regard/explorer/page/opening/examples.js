// Six examples by phenomenon: what the model reads, which kind of model that takes, and how the head and the link that
// show it are found in the answers. No layer or head is written here.

import { make } from "../shared/elements.js";
import { message, translate } from "../shared/messages.js";

/** @typedef {import("../source/source.js").ModelLine} ModelLine */
/** @typedef {import("../source/source.js").Overview} Overview */
/** @typedef {import("../source/source.js").Source} Source */
/** @typedef {import("../state.js").State} State */

/**
 * find: the ranked link of a word; the highest score of a pattern, and in that head the strongest link that fits it; the
 * strongest link of a decoder to a word of the source; or what the page opens on by itself.
 * @typedef {object} Example
 * @property {string} name
 * @property {string} title
 * @property {string} about
 * @property {string} text
 * @property {"images" | "decoder"} [needs]
 * @property {string} [missing]  said where no such model is offered
 * @property {{word: string} | {pattern: string, fits: (labels: string[], query: number, key: number) => boolean} | {cross: true} | null} find
 */

/** @type {Example[]} */
export const EXAMPLES = [
  {
    ...{ name: "coreference", text: "The animal didn't cross the street because it was too tired." },
    ...{ title: message("Coreference"), about: message("Which noun does “it” look at?") },
    find: { word: "it" },
  },
  {
    ...{ name: "induction", text: "The blue train left Lyon at noon. The blue train left Lyon at noon. The blue train left" },
    ...{ title: message("Induction"), about: message("In a repeated text: what came next the last time?") },
    find: { pattern: "induction", fits: (labels, query, key) => key <= query && labels[key - 1] === labels[query] },
  },
  {
    ...{ name: "previous", text: "She opened the old wooden door and stepped into the quiet garden." },
    ...{ title: message("Previous token"), about: message("A head that looks one token back, whatever stands there.") },
    find: { pattern: "previous", fits: (_, query, key) => key === query - 1 },
  },
  {
    ...{ name: "delimiter", text: "He came, he saw the snow, and he left. Nobody spoke; the road was white." },
    ...{ title: message("Delimiter sink"), about: message("A head that rests on commas, full stops or [SEP].") },
    find: { pattern: "delimiter", fits: (labels, _, key) => key > 0 && /^\s*([.,;:!?]|\[SEP\]|<\/s>)$/.test(labels[key]) },
  },
  {
    ...{ name: "translation", text: "translate English to German: The small house stands by the river.", needs: "decoder" },
    ...{ title: message("Translation alignment"), about: message("Which source words the first translated word looks at.") },
    missing: message("needs an encoder–decoder: regard serve --model google-t5/t5-small"),
    find: { cross: true },
  },
  {
    ...{ name: "image", text: "", needs: "images" },
    ...{ title: message("An image"), about: message("Two trees: does a patch of one look at the other?") },
    missing: message("needs a model that looks at images: regard serve --model facebook/dinov2-small"),
    find: null,
  },
];

/**
 * The model that an example needs; undefined where none is offered, null where any does.
 * @param {Example} example
 * @param {ModelLine[]} models
 * @returns {ModelLine | null | undefined}
 */
export function modelFor({ needs }, models) {
  return needs === undefined ? null : models.find((model) => model[needs] === true);
}

/**
 * Buttons for the examples; those without a model say which they need.
 * @param {ModelLine[]} models
 * @param {State["lang"]} lang
 * @param {(example: Example, model: ModelLine | null) => void} choose
 */
export function drawExamples(models, lang, choose) {
  const buttons = EXAMPLES.map((example) => {
    const model = modelFor(example, models);
    const about = model === undefined && example.missing ? example.missing : example.about;
    return make(
      "li",
      {},
      make(
        "button",
        {
          ...{ type: "button", "data-role": "example", "data-example": example.name },
          ...{ disabled: model === undefined, onclick: () => model !== undefined && choose(example, model) },
        },
        make("strong", {}, translate(example.title, lang)),
        make("span", {}, translate(about, lang)),
      ),
    );
  });
  return make("ul", { class: "examples" }, ...buttons);
}

/**
 * Where a session shows its example, found in its answers; nothing where they do not tell.
 * @param {Example} example
 * @param {Source} source
 * @param {string} session
 * @returns {Promise<Partial<State>>}
 */
export async function placeOf({ find }, source, session) {
  if (find === null) return {};
  const overview = await source.overview(session);
  if ("word" in find) {
    const { links } = await source.ranked(session);
    const link = links.find(({ words }) => words[0].toLowerCase() === find.word);
    return link ? { layer: link.layer, head: link.head, token: link.query, key: link.key } : {};
  }
  if ("cross" in find) return crossPlace(overview, source, session);
  const place = highest(overview, find.pattern);
  if (place === null) return {};
  const { queries, keys, first } = overview.layers[place.layer];
  const { cells, how } = await source.tile(session, place.layer, place.head, [0, queries], [0, keys], 128);
  const fitting = Array.from(cells.data, (weight, at) => ({ weight, query: Math.floor(at / keys), key: at % keys }))
    .filter(({ query, key }) => find.fits(overview.labels, query + (first ?? 0), key))
    .sort((a, b) => b.weight - a.weight);
  const link = how === "pooled" ? undefined : fitting[0];
  return { ...place, measure: find.pattern, ...(link ? { token: link.query, key: link.key } : {}) };
}

/**
 * The head with the highest score of a pattern.
 * @param {Overview} overview
 * @param {string} pattern
 */
function highest({ measures }, pattern) {
  const scores = measures[pattern];
  if (scores === undefined) return null;
  const known = Array.from(scores.data, (score, at) => ({ score, at })).filter(({ score }) => Number.isFinite(score));
  const best = known.sort((a, b) => b.score - a.score)[0];
  return best ? { layer: Math.floor(best.at / scores.shape[1]), head: best.at % scores.shape[1] } : null;
}

/**
 * The strongest link from what a decoder writes to a word of the source.
 * @param {Overview} overview
 * @param {Source} source
 * @param {string} session
 * @returns {Promise<Partial<State>>}
 */
async function crossPlace({ layers, labels }, source, session) {
  const asked = labels.findIndex((label) => /:$/.test(label)); // the end of what the model is asked to do
  const heads = layers.flatMap(({ kind, index, heads: count }) =>
    kind === "cross" ? Array.from({ length: count }, (_, head) => source.head(session, index, head, "en")) : [],
  );
  const links = (await Promise.all(heads)).flatMap(({ layer, head, links: own }) =>
    own.filter(({ key }) => key > asked && /\p{L}/u.test(labels[key] ?? "") && !/^[<[]/.test(labels[key])).map((link) => ({ layer, head, ...link })),
  );
  const best = links.sort((a, b) => b.weight - a.weight)[0];
  return best ? { layer: best.layer, head: best.head, token: best.query, key: best.key } : {};
}

/**
 * The image of the example: a house between two trees that are alike.
 * @returns {Promise<File>}
 */
export async function exampleImage() {
  const canvas = make("canvas", { width: 336, height: 252 });
  const pen = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  const box = (/** @type {string} */ colour, /** @type {[number, number, number, number]} */ at) => {
    pen.fillStyle = colour;
    pen.fillRect(...at);
  };
  const disc = (/** @type {string} */ colour, /** @type {number} */ x, /** @type {number} */ y, /** @type {number} */ r) => {
    pen.fillStyle = colour;
    pen.beginPath();
    pen.arc(x, y, r, 0, 7);
    pen.fill();
  };
  box("#9cc9ee", [0, 0, 336, 170]);
  box("#7fae5a", [0, 170, 336, 82]);
  disc("#f6d55c", 172, 42, 22);
  for (const x of [58, 278]) {
    box("#7a5230", [x - 7, 130, 14, 66]);
    for (const [dx, dy] of [[-18, 0], [18, 0], [0, -24]]) disc("#2f6b34", x + dx, 116 + dy, 28);
  }
  box("#d9b48f", [118, 122, 108, 78]);
  box("#6b4226", [160, 156, 24, 44]);
  for (const x of [130, 194]) box("#dff1ff", [x, 138, 20, 20]);
  pen.fillStyle = "#a5402d";
  pen.beginPath();
  for (const [x, y] of [[106, 124], [172, 78], [238, 124]]) pen.lineTo(x, y);
  pen.fill();
  const bytes = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  return new File([/** @type {Blob} */ (bytes)], "trees.png", { type: "image/png" });
}
