// What tokens are called in a head: keys by the session's tokens where these name them, queries by the key they stand on.
// It does not know how names are shown.

import { Labels } from "./labels.js";

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
    return this.overview.layers[layer]?.labelled === false ? `#${key}` : this.#word(key);
  }

  /**
   * @param {number} layer
   * @param {number} query
   * @returns {string}
   */
  query(layer, query) {
    const first = this.overview.layers[layer]?.first;
    return first === null ? `#${query}` : this.key(layer, query + (first ?? 0));
  }

  /** @param {number} index */
  #word(index) {
    this.labels.have(index, index + 1);
    return this.labels.short(index);
  }
}
