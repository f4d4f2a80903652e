// What state a session opens in: where to look first, and what of a choice is still there in another session. Pure.

import { placedTokens } from "../image/patches.js";

/** @typedef {import("../source/source.js").Link} Link */
/** @typedef {import("../source/source.js").Overview} Overview */
/** @typedef {import("../state.js").State} State */

/**
 * Layer, head and token, as far as they are there.
 * @param {State} state
 * @param {Overview} overview
 * @returns {Partial<State>}
 */
export function within({ layer, head, token, key }, overview) {
  const at = Math.max(0, Math.min(layer, overview.layers.length - 1));
  const { heads, queries, keys } = overview.layers[at] ?? { heads: 1, queries: 0, keys: 0 };
  return {
    layer: at,
    head: Math.max(0, Math.min(head, heads - 1)),
    token: token !== null && token >= queries ? null : token,
    key: key !== null && key >= keys ? null : key,
  };
}

/**
 * A link to begin with: the strongest between two words, else from a word, else the strongest; none without exact rows.
 * Of an image, all that cls looks at, or the last word; no single key.
 * @param {Overview} overview
 * @param {number} layer
 * @param {Link[]} links
 * @returns {{query: number, key: number | null} | null}
 */
export function suggested({ labels, layers, rows, layouts = [] }, layer, links) {
  const { first, rows: own, layout } = layers[layer];
  if (!(own ?? rows)) return null;
  if (layout) {
    const { kinds } = placedTokens(layouts[layout[0]]);
    const query = kinds.includes("cls") ? kinds.indexOf("cls") : kinds.lastIndexOf("text");
    if (query >= 0 || links.length > 0) return { query: query >= 0 ? query : links[0].query, key: null };
  }
  const word = (/** @type {number} */ at) => /^[^[<]*\p{L}{2}/u.test(labels[at] ?? "");
  const spoken = links.filter(({ query, key }) => query !== key && word(query + (first ?? 0)));
  return spoken.find(({ key }) => word(key)) ?? spoken[0] ?? links[0] ?? null;
}

/**
 * The patch with the largest of a row's weights; null where no key is a patch, or nothing is known of them.
 * @param {Overview} overview
 * @param {number} layer
 * @param {ArrayLike<number>} weights
 * @returns {number | null}
 */
export function strongestPatch({ layers, layouts = [] }, layer, weights) {
  const { kinds } = placedTokens(layouts[layers[layer].layout?.[1] ?? -1] ?? { runs: [], grids: [] });
  return kinds.reduce((/** @type {number | null} */ best, kind, key) =>
    kind === "patch" && weights[key] > (best === null ? 0 : weights[best]) ? key : best, null);
}

/**
 * A session that is newly looked at: nothing in it is chosen yet.
 * @param {string} session
 * @returns {{session: string, token: null, key: null, window: null, region: null}}
 */
export function fresh(session) {
  return { session, token: null, key: null, window: null, region: null };
}

/**
 * A second session beside the first, its drawer shut for room: the same token is chosen in it, where that is the same word.
 * @param {State} state
 * @param {import("../source/source.js").Overview} first
 * @param {import("../source/source.js").Overview} second
 * @param {string} session
 * @returns {Partial<State>}
 */
export function beside({ token, key }, first, second, session) {
  const alike = (/** @type {number | null} */ at) =>
    at !== null && at < second.length && first.labels[at] === second.labels[at];
  const both = alike(token) ? { token, key: alike(key) ? key : null } : {};
  return { compare: { ...fresh(session), ...both, difference: false }, drawer: false };
}
