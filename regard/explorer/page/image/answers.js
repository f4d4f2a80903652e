// What an image pane needs: the session, its images, and the exact row of the chosen token. Asked for when it changes;
// answers that newer questions have overtaken are dropped.

import { Naming } from "../shared/labels.js";
import { isAbort, latest, outcome } from "../source/source.js";
import { placedTokens } from "./patches.js";

/** @typedef {import("../source/source.js").Row} Row */
/** @typedef {import("./patches.js").PlacedTokens} PlacedTokens */

/** @param {unknown} error */
const saidBy = (error) => (error instanceof Error ? error.message : String(error));

export class ImageAnswers {
  /**
   * @param {import("../state.js").Store} store
   * @param {import("../source/source.js").Source} source
   * @param {{arrived: () => void, renamed: () => void, fresh: () => void}} told  when something came, when words came,
   *   and when another session is asked for
   */
  constructor(store, source, told) {
    this.store = store;
    this.source = source;
    this.told = told;
    this.nextSession = latest();
    this.nextRow = latest();
    this.asked = { session: "", row: "" };
    /** @type {import("../source/source.js").Overview | null} */
    this.overview = null;
    /** @type {Naming | null} */
    this.naming = null;
    /** @type {Map<number, HTMLImageElement>} */
    this.images = new Map();
    /** @type {Map<number, string>} */
    this.lost = new Map(); // why an image did not come; rows come without it
    /** @type {Row | null} */
    this.row = null;
    this.error = "";
  }

  /** Ask for what is missing. */
  ask() {
    const { session } = this.store.get();
    if (session !== this.asked.session) {
      this.asked.session = session ?? "";
      void this.#askSession(session);
    }
    this.#askForRow();
  }

  /** Hear no more. */
  end() {
    this.nextRow();
    this.nextSession();
  }

  get layer() {
    return this.overview?.layers[this.store.get().layer];
  }

  get hasRows() {
    return this.layer?.rows ?? this.overview?.rows ?? false;
  }

  /**
   * The tokens of the queries (0) or the keys (1).
   * @param {0 | 1} side
   * @returns {PlacedTokens | null}
   */
  tokens(side) {
    const number = this.layer?.layout?.[side];
    const layout = number === undefined ? undefined : this.overview?.layouts?.[number];
    return layout ? placedTokens(layout) : null;
  }

  /** Are queries and keys the same tokens? */
  get same() {
    const { layout, first } = this.layer ?? {};
    return layout !== undefined && layout !== null && layout[0] === layout[1] && first !== null;
  }

  /** @param {string | null} session */
  async #askSession(session) {
    const signal = this.nextSession();
    [this.overview, this.naming, this.row, this.error] = [null, null, null, ""];
    this.images.clear();
    this.lost.clear();
    this.told.fresh();
    if (session === null) return;
    try {
      const overview = await this.source.overview(session, signal);
      if (signal.aborted) return;
      this.overview = overview;
      this.naming = new Naming(this.source, session, overview, this.told.renamed);
      this.told.arrived();
      const shown = (overview.images ?? []).flatMap((line, n) => (line.shown ? [n] : []));
      await Promise.all(shown.map((n) => this.#fetch(session, n, signal)));
    } catch (error) {
      if (isAbort(error) || signal.aborted) return;
      this.error = saidBy(error);
    }
    this.told.arrived();
  }

  /**
   * @param {string} session
   * @param {number} number
   * @param {AbortSignal} signal
   */
  async #fetch(session, number, signal) {
    const image = new Image();
    try {
      image.src = await this.source.image(session, number);
      await image.decode();
    } catch (error) {
      if (!isAbort(error) && !signal.aborted) this.lost.set(number, saidBy(error));
      return;
    }
    if (!signal.aborted) this.images.set(number, image);
  }

  #askForRow() {
    const { session, layer, head, token } = this.store.get();
    const found = this.layer;
    if (session === null || token === null || !found || token >= found.queries || !this.hasRows) return;
    const asked = [session, layer, head, token].join("/");
    if (asked === this.asked.row) return;
    this.asked.row = asked;
    void this.#askRow(session, layer, head, token, this.#span(token));
  }

  /**
   * The keys that a query sees: those of its window.
   * @param {number} token
   * @returns {[number, number]}
   */
  #span(token) {
    const { windows = 1, queries, keys } = /** @type {import("../source/source.js").Layer} */ (this.layer);
    const window = Math.floor(token / (queries / windows));
    return [(window * keys) / windows, ((window + 1) * keys) / windows];
  }

  /**
   * @param {string} session
   * @param {number} layer
   * @param {number} head
   * @param {number} token
   * @param {[number, number]} span
   */
  async #askRow(session, layer, head, token, [start, stop]) {
    const signal = this.nextRow();
    const found = await outcome(this.source.row(session, layer, head, token, start, stop, signal), signal);
    if (!found) return;
    [this.row, this.error] = found;
    this.told.arrived();
  }
}
