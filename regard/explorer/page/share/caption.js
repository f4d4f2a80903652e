// The caption of a pane that is saved as an image: model, layer, head, text, and the numbers of what is chosen.

import { measureName } from "../atlas/heads.js";
import { Naming, visibly } from "../shared/labels.js";
import { digits, figure, howText, translate } from "../shared/messages.js";

/** @typedef {import("../source/source.js").Overview} Overview */
/** @typedef {import("../source/source.js").Source} Source */
/** @typedef {import("../state.js").State} State */

const STRONGEST = 3; // keys of a row that are named

/**
 * @param {HTMLElement} pane
 * @param {State} state  of the pane's session
 * @param {Source} source
 * @returns {Promise<import("./saving.js").Words>}
 */
export async function captionOf(pane, state, source) {
  const { session, layer, head, lang, measure } = state;
  if (session === null) return {};
  const overview = await source.overview(session);
  const isAtlas = pane.dataset.pane === "atlas";
  const place = translate("layer {layer}, head {head}", lang, { layer, head });
  const kind = pane.classList.contains("pane-image") ? "image" : (pane.dataset.pane ?? "pane");
  const how = /** @type {HTMLElement | null} */ (pane.querySelector("[data-how]"))?.dataset.how;
  const chosen = isAtlas ? measured(state, overview) : await weights(state, overview, source).catch(() => null);
  return {
    title: `${visibly(overview.name)} · ${pane.getAttribute("aria-label")}: ${isAtlas ? measureName(measure, lang) : place}`,
    legend: [
      visibly(overview.text ?? overview.images?.[0]?.name ?? ""),
      chosen ?? "",
      how ? translate("cells: {how}", lang, { how: howText(how, lang) }) : "",
    ].filter(Boolean),
    name: isAtlas ? "regard-heads" : `regard-${kind}-${layer}.${head}`,
  };
}

/**
 * The number of the chosen head, by the measure that colours the heads.
 * @param {State} state
 * @param {Overview} overview
 */
function measured({ layer, head, lang, measure }, { measures }) {
  const values = measures[measure];
  const value = values?.data[layer * values.shape[1] + head];
  if (value === undefined) return null;
  const place = translate("layer {layer}, head {head}", lang, { layer, head });
  return translate("{place}: {value}", lang, { place, value: figure(value) });
}

/**
 * The weight of the chosen link, or the strongest of the chosen query, and how they were made.
 * @param {State} state
 * @param {Overview} overview
 * @param {Source} source
 * @returns {Promise<string | null>}
 */
async function weights({ session, layer, head, token, key, lang }, overview, source) {
  if (session === null || token === null) return null;
  const naming = new Naming(source, session, overview, () => {});
  const [start, stop] = key === null ? [0, 1] : [key, key + 1];
  const row = await source.row(session, layer, head, token, start, stop);
  const keys = key === null ? row.top.slice(0, STRONGEST) : [{ key, weight: row.weights.data[0] }];
  const links = keys.map(({ key: at, weight }) => `“${naming.key(layer, at)}” ${digits(weight)}`);
  const how = row.error ? `${howText(row.how, lang)}, ± ${figure(row.error)}` : howText(row.how, lang);
  const values = { query: `“${naming.query(layer, token)}”`, keys: links.join(", "), how };
  return translate("{query} looks at {keys} ({how})", lang, values);
}
