// What tokens are called in a head: patches by row and column, words by the session's tokens where these name them, and
// queries by the key they stand on. It does not know how names are shown.

import { Labels } from "./labels.js";
import { placedTokens } from "./patches.js";

/** @typedef {import("./source.js").Overview} Overview */
/** @typedef {import("./source.js").Source} Source */

export class Naming {
  /**
   * @param {Source} source
   * @param {string} session
   * @param {Overview} overview
   * @param {() => void} arrived  told when more words came
   */
  constructor(source, session, overview, arrived) {
    this.overview = overview;
    this.labels = new Labels(source, session, overview, arrived);
  }

  /**
   * @param {number} layer
   * @param {number} key
   * @returns {string}
   */
  key(layer, key) {
    const found = this.overview.layers[layer];
    if (found?.layout) return this.#placed(found.layout[1], key);
    return found?.labelled === false ? `#${key}` : this.#word(key);
  }

  /**
   * @param {number} layer
   * @param {number} query
   * @returns {string}
   */
  query(layer, query) {
    const found = this.overview.layers[layer];
    if (found?.layout) return this.#placed(found.layout[0], query);
    const first = found?.first;
    return first === null ? `#${query}` : this.key(layer, query + (first ?? 0));
  }

  /**
   * @param {number} layout
   * @param {number} token
   */
  #placed(layout, token) {
    const tokens = placedTokens(this.overview.layouts?.[layout] ?? { runs: [], grids: [] });
    const named = tokens.count === this.overview.length && this.overview.labels.some((label) => label !== "");
    return tokens.name(token) ?? (named ? this.#word(token) : `#${token}`);
  }

  /** @param {number} index */
  #word(index) {
    this.labels.have(index, index + 1);
    return this.labels.short(index);
  }
}
