// The page inside a notebook: answers are asked of the Python that shows it, by messages, one number for each question.
// `regard.explorer.widget` is the other end.
//
//     → {"id": 7, "session": "1", "ask": "row", "given": {"layer": 3, "head": 1, "token": 8, "start": 0, "stop": 16}}
//     ← {"id": 7, "answer": {…}}   or   {"id": 7, "error": "what went wrong"}

import { addCatalogues } from "../shared/messages.js";
import { unpackAll } from "../source/arrays.js";
import { AnswerCache } from "../source/source.js";
import { start } from "./main.js";

/** @typedef {import("../source/source.js").Source} Source */

/**
 * The notebook's end of the widget, as anywidget gives it.
 * @typedef {{get: (name: string) => any, send: (content: object) => void,
 *   on: (event: string, listener: (content: any) => void) => void,
 *   off: (event: string, listener: (content: any) => void) => void}} Model
 */

const FIRST = "1"; // the session that Python gave; each swapped word makes another one

/**
 * Answers asked of the notebook's Python.
 * @implements {Source}
 */
export class NotebookSource {
  /** @param {Model} model */
  constructor(model) {
    this.model = model;
    this.can = { look: false, open: false, measure: true, switch: true };
    this.kept = new AnswerCache(256);
    this.known = [FIRST];
    this.asked = 0;
    /** @type {Map<number, {resolve: (answer: any) => void, reject: (error: Error) => void}>} */
    this.waiting = new Map();
    /** @param {{id: number, answer?: any, error?: string}} content */
    this.listener = (content) => {
      const one = this.waiting.get(content.id); // another view of the same widget has numbers of its own
      if (one === undefined) return;
      this.waiting.delete(content.id);
      if (content.error === undefined) one.resolve(unpackAll(content.answer));
      else one.reject(new Error(content.error));
    };
    model.on("msg:custom", this.listener);
    const refuse = async () => {
      throw new Error("a notebook shows what Python gave it: call look_at there for another text");
    };
    /** @type {Source["look"]["poll"]} */
    const poll = async (session) => ({ state: "done", progress: 1, session, error: null }); // Python answers when it is done
    this.look = { start: refuse, image: refuse, poll, cancel: async () => undefined };
    this.open = refuse;
  }

  /** @returns {string | null} */
  leftOut() {
    return null; // Python has everything
  }

  /** Hear no more answers. */
  close() {
    this.model.off("msg:custom", this.listener);
    for (const { reject } of this.waiting.values()) reject(new Error("the widget was closed"));
    this.waiting.clear();
  }

  /** @type {Source["sessions"]} */
  async sessions() {
    return Promise.all(
      this.known.map(async (id) => {
        const { name, text, length, images } = await this.overview(id);
        return { id, name, text, length, image: images?.[0]?.name };
      }),
    );
  }

  /** @type {Source["models"]} */
  async models() {
    return [];
  }

  /** @type {Source["overview"]} */
  overview(session, signal) {
    return this.#ask(session, "overview", {}, signal);
  }

  /** @type {Source["tokens"]} */
  tokens(session, start, stop, signal) {
    return this.#ask(session, "tokens", { start, stop }, signal);
  }

  /** @type {Source["head"]} */
  head(session, layer, head, lang, signal) {
    return this.#ask(session, "head", { layer, head, lang }, signal);
  }

  /** @type {Source["ranked"]} */
  ranked(session, signal) {
    return this.#ask(session, "ranked", { count: 8 }, signal);
  }

  /** @type {Source["row"]} */
  row(session, layer, head, token, start, stop, signal) {
    return this.#ask(session, "row", { layer, head, token, start, stop }, signal);
  }

  /** @type {Source["tile"]} */
  tile(session, layer, head, rows, cols, size = 128, signal) {
    return this.#ask(session, "tile", { layer, head, rows, cols, size }, signal);
  }

  /** @type {Source["steps"]} */
  steps(session, layer, head, token, key, signal) {
    return this.#ask(session, "steps", { layer, head, token, key }, signal);
  }

  /** @type {Source["thumbnails"]} */
  thumbnails(session, signal) {
    return this.#ask(session, "thumbnails", {}, signal);
  }

  /** @type {Source["rowsOfToken"]} */
  rowsOfToken(session, token, layer, width, signal) {
    return this.#ask(session, "rows_of_token", { token, layer, width }, signal);
  }

  /** @type {Source["linkInHeads"]} */
  linkInHeads(session, token, key, layer, signal) {
    return this.#ask(session, "link_in_heads", { token, key, layer }, signal);
  }

  /** @type {Source["effects"]} */
  effects(session, token, key) {
    return this.#send(session, "effects", { token, key }); // not kept: more may come
  }

  /** @type {Source["measure"]} */
  measure(session, { token, key, layer, head }) {
    return this.#send(session, "measure", { token, key, layer, head });
  }

  /** @type {Source["predictions"]} */
  predictions(session, without, signal) {
    return this.#ask(session, "predictions", { without }, signal);
  }

  /** @type {NonNullable<Source["swap"]>} */
  async swap(session, token, word) {
    const other = (await this.#send(session, "swap", { token, word })).session;
    this.known.push(other);
    return other;
  }

  /** @type {NonNullable<Source["changes"]>} */
  changes(session, other, signal) {
    return this.#ask(session, "changes", { other }, signal);
  }

  /** @type {Source["image"]} */
  async image(session, number) {
    const { kind, base64 } = await this.#ask(session, "image", { number });
    return `data:${kind};base64,${base64}`;
  }

  /** @type {Source["page"]} */
  async page(session, view, lang) {
    const { html } = await this.#send(session, "page", { lang, view });
    return new Blob([html], { type: "text/html" });
  }

  /**
   * @param {string} session
   * @param {string} ask
   * @param {Record<string, unknown>} given
   * @param {AbortSignal} [signal]
   * @returns {Promise<any>}
   */
  #ask(session, ask, given, signal) {
    const key = `${session} ${ask} ${JSON.stringify(given)}`;
    return this.kept.ask(key, () => this.#send(session, ask, given), signal);
  }

  /**
   * @param {string} session
   * @param {string} ask
   * @param {Record<string, unknown>} given
   * @returns {Promise<any>}
   */
  #send(session, ask, given) {
    const id = (this.asked += 1) + Math.floor(Math.random() * 2 ** 31) * 2 ** 20;
    return new Promise((resolve, reject) => {
      this.waiting.set(id, { resolve, reject });
      this.model.send({ id, session, ask, given });
    });
  }
}

/**
 * What a notebook calls when it shows the widget; the function that it gets back is called when the view goes away. The
 * page stands in a shadow tree with its own styles: those of notebooks for lists and tables would change it.
 * @param {{model: Model, el: HTMLElement}} place
 * @param {string} styles
 * @param {Record<string, Record<string, string>>} catalogues  of the texts in other languages
 */
function render({ model, el }, styles, catalogues) {
  addCatalogues(catalogues);
  const source = new NotebookSource(model);
  const [host, sheet, page] = ["div", "style", "div"].map((tag) => document.createElement(tag));
  host.setAttribute("data-lm-suppress-shortcuts", "true"); // else JupyterLab deletes a cell where "dd" is typed
  // Fonts and spacing are inherited even there; inside, !important is stronger than the notebook's own.
  sheet.textContent = `:host { all: initial !important; display: block !important }\n${styles}`;
  page.style.height = `${model.get("height")}px`;
  page.style.setProperty("--tall", page.style.height); // of the page, which is not the window's here
  page.style.gridTemplateColumns = "minmax(0, 1fr)"; // as wide as the cell, however narrow that is
  host.attachShadow({ mode: "open" }).append(sheet, page);
  el.append(host);
  const stop = start(page, source, { hash: false, lang: model.get("lang") });
  return () => {
    stop();
    source.close();
    host.remove();
  };
}

export default { render };
