// The image pane: the image under the heat of the chosen token's exact row, and beside it the tokens that are no
// patches (cls, registers, words). Point at a patch or a token: its row; a click holds it, and pointing then reads
// single weights.

import { paperUnder, scaleOf } from "../shared/colours.js";
import { fill, make, watchSurroundings } from "../shared/elements.js";
import { message, translate } from "../shared/messages.js";
import { hasNaN, NO_ROWS, sayLink } from "../text/links.js";
import { WordView } from "../text/wordview.js";
import { ImageAnswers } from "./answers.js";
import { ImageBar, noteOf, piecesOf } from "./bar.js";
import { ImageOverlay } from "./overlay.js";

/** @typedef {import("../source/source.js").Row} Row */
/** @typedef {import("../state.js").State} State */
/** @typedef {import("./patches.js").PlacedTokens} PlacedTokens */

/** A patch becomes the query when it was pointed at this long. */
const CHOOSE = message("Point at a patch or a token to see what it looks at; click to hold it.");
const IMAGE_LABEL = message(
  "Image{name} in {rows} × {columns} patches, coloured by their weight for the chosen query. The arrow keys move from patch to patch; Enter holds one.",
);
const POINT_MS = 35;

/**
 * Build the pane inside an element.
 * @param {HTMLElement} element
 * @param {import("../state.js").Store} store
 * @param {import("../source/source.js").Source} source
 * @returns {{update: () => void, destroy: () => void}}
 */
export function mount(element, store, source) {
  const pane = new ImagePane(element, store, source);
  return { update: () => pane.update(), destroy: () => pane.destroy() };
}

class ImagePane {
  /**
   * @param {HTMLElement} element
   * @param {import("../state.js").Store} store
   * @param {import("../source/source.js").Source} source
   */
  constructor(element, store, source) {
    this.element = element;
    this.store = store;
    this.readout = make("p", { class: "text-readout", role: "status" });
    this.bar = new ImageBar((image) => {
      this.image = image;
      this.update();
    });
    this.asking = this.#words("query");
    this.asked = this.#words("key");
    this.chips = make("div", { class: "image-chips" });
    this.canvas = make("canvas", { class: "image-canvas", tabindex: 0, role: "application" });
    this.note = make("p", { class: "image-note" });
    this.stage = make("div", { class: "image-stage" }, this.canvas);
    element.classList.add("pane-image");
    element.replaceChildren(this.readout, this.bar.element, this.chips, this.stage, this.note);
    this.drawing = new ImageOverlay(this.canvas);
    this.answers = new ImageAnswers(store, source, {
      arrived: () => this.update(),
      renamed: () => {
        this.written = "";
        this.update();
      },
      fresh: () => (this.held = false),
    });
    this.image = 0;
    this.stretched = false;
    /** @type {number | null} */
    this.token = null; // whose image is in sight
    this.written = "";
    this.held = false;
    this.ended = false;
    this.frame = 0;
    this.timer = 0;
    this.pointer = "";
    this.#listen();
    this.ends = [store.on(() => this.update()), watchSurroundings(this.stage, () => this.update())];
    this.update();
  }

  /** @param {"query" | "key"} side */
  #words(side) {
    return new WordView({
      point: (index) => this.#point(side, index),
      press: (index) => this.#press(side, index),
      step: (by) => this.#step(by),
      release: () => this.#hold(false),
    });
  }

  #listen() {
    const at = (/** @type {MouseEvent} */ event) => {
      const box = this.canvas.getBoundingClientRect();
      return this.drawing.place(event.clientX - box.left, event.clientY - box.top);
    };
    this.canvas.addEventListener("pointermove", (event) => {
      const pointer = `${event.clientX} ${event.clientY}`;
      if (pointer !== this.pointer) this.#over(at(event), false);
      this.pointer = pointer;
    });
    for (const element of [this.canvas, this.chips])
      element.addEventListener("pointerleave", () => this.store.set({ hover: null }));
    this.canvas.addEventListener("click", (event) => this.#over(at(event), true));
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
  }

  /** Ask for what is missing, and draw before the next frame. */
  update() {
    if (this.ended) return;
    this.answers.ask();
    this.#follow();
    if (this.frame === 0) this.frame = requestAnimationFrame(() => this.#draw());
  }

  destroy() {
    this.ended = true;
    for (const end of this.ends) end();
    cancelAnimationFrame(this.frame);
    clearTimeout(this.timer);
    this.answers.end();
    this.element.replaceChildren();
    this.element.classList.remove("pane-image");
  }

  /** The image of the token that is chosen elsewhere comes to sight. */
  #follow() {
    const { token } = this.store.get();
    const count = this.answers.overview?.images?.length ?? 0;
    if (this.answers.overview !== null && this.image >= count) this.image = 0;
    if (token === this.token || this.answers.overview === null) return;
    this.token = token;
    const image = token === null ? null : (this.answers.tokens(0)?.images[token] ?? null);
    if (image !== null) this.image = image;
  }

  #draw() {
    this.frame = 0;
    const state = this.store.get();
    const paper = paperUnder(this.element);
    const line = this.answers.overview?.images?.[this.image];
    if (!line) return this.#read(state);
    const row = this.#shownRow(state);
    const [queries, keys] = [this.answers.tokens(0), this.answers.tokens(1)];
    const [patches, grid] = [keys?.of(this.image) ?? [], this.#grid()];
    const weight = (/** @type {number} */ key) =>
      row && key >= row.start && key < row.stop ? row.weights.data[key - row.start] : 0;
    const scale = scaleOf(state.scale, this.#patchWeights(row, keys));
    this.stretched = this.drawing.draw({
      ...{ image: this.answers.images.get(this.image) ?? null, height: line.height, width: line.width, seen: line.seen },
      ...{ patches, weight: ({ token }) => weight(token), broken: row !== null && hasNaN(row), scale, paper, held: this.held },
      ...{ across: grid?.columns.length ?? 1, down: grid?.rows.length ?? 1 },
      query: this.#boxOf(queries, state.token),
      key: this.#boxOf(keys, state.key),
    });
    this.#write(state);
    const colours = {
      ...{ start: row?.start ?? 0, weights: row?.weights.data ?? null, broken: row !== null && hasNaN(row) },
      ...{ held: this.held, sink: true, scale, paper },
    };
    const known = this.answers.same ? colours : { ...colours, weights: null };
    this.asking.colour({ ...known, token: state.token, key: this.answers.same ? state.key : null, lang: state.lang });
    this.asked.colour({ ...colours, token: null, key: state.key, lang: state.lang });
    this.bar.show(state, { row, keys, scale, paper, image: this.image, images: this.answers.overview?.images?.length ?? 0 });
    this.#describe(state);
    this.#read(state);
  }

  /** @param {State} state */
  #shownRow(state) {
    return this.answers.row !== null && state.token !== null && this.answers.layer?.layout ? this.answers.row : null;
  }

  /**
   * Colours run to the largest weight of a patch, so that a cls which takes most does not make the image pale.
   * @param {Row | null} row
   * @param {PlacedTokens | null} keys
   */
  #patchWeights(row, keys) {
    if (row === null || keys === null) return [];
    const all = Array.from(row.weights.data);
    const own = all.filter((_, i) => keys.kinds[row.start + i] === "patch");
    return own.length > 0 ? own : all;
  }

  /**
   * @param {PlacedTokens | null} tokens
   * @param {number | null} token
   */
  #boxOf(tokens, token) {
    const patch = token === null ? undefined : tokens?.patches.get(token);
    return patch && tokens?.images[patch.token] === this.image ? patch.box : null;
  }

  /**
   * The tokens that are no patches.
   * @param {State} state
   */
  #write(state) {
    const [queries, keys] = [this.answers.tokens(0), this.answers.tokens(1)];
    const written = [state.session, state.lang, this.answers.layer?.layout, this.answers.same].join("/");
    if (written === this.written) return;
    this.written = written;
    this.asking.write(piecesOf(queries, this.answers.naming), state.lang);
    this.asked.write(this.answers.same ? [] : piecesOf(keys, this.answers.naming), state.lang);
    this.asking.element.setAttribute(
      "aria-label",
      translate("Tokens that are no patches; the colour of each is its weight for the chosen query", state.lang),
    );
    this.asked.element.setAttribute(
      "aria-label",
      translate("Keys that are no patches; the colour of each is its weight for the chosen query", state.lang),
    );
    const lines = [
      { view: this.asking, count: queries?.others.length ?? 0, name: this.answers.same ? "" : translate("queries", state.lang) },
      { view: this.asked, count: this.answers.same ? 0 : (keys?.others.length ?? 0), name: translate("keys", state.lang) },
    ].filter(({ count }) => count > 0);
    fill(this.chips, ...lines.map(({ view, name }) =>
      make("div", { class: "image-line" }, name && make("span", { class: "image-side" }, name), view.element)));
    this.chips.hidden = lines.length === 0;
  }

  /** @param {State} state */
  #describe(state) {
    const [line, grid] = [this.answers.overview?.images?.[this.image], this.#grid()];
    const size = { rows: grid?.rows.length ?? 0, columns: grid?.columns.length ?? 0 };
    const said = translate(IMAGE_LABEL, state.lang, { name: line?.name ? ` ${line.name}` : "", ...size });
    if (this.canvas.getAttribute("aria-label") !== said) this.canvas.setAttribute("aria-label", said);
    const windows = this.answers.layer?.windows ?? 1;
    const cut = windows > 1 && windows !== this.answers.overview?.images?.length; // several images are windows, too
    const lost = this.answers.lost.get(this.image) ?? "";
    const text = noteOf(line, grid, { windows: cut ? windows : 1, stretched: this.stretched, lost }, state.lang);
    if (this.note.textContent !== text) this.note.textContent = text;
  }

  /** The grid of the shown image among the keys, else among the queries. */
  #grid() {
    const layouts = this.answers.overview?.layouts ?? [];
    const [queries, keys] = this.answers.layer?.layout ?? [];
    for (const number of [keys, queries]) {
      const found = number === undefined ? undefined : layouts[number]?.grids.find(({ image }) => image === this.image);
      if (found) return found;
    }
    return undefined;
  }

  /** @param {State} state */
  #read(state) {
    const { row, naming } = this.answers;
    if (this.answers.error || !this.answers.overview || !naming) return fill(this.readout, this.answers.error);
    if (!this.answers.hasRows) return fill(this.readout, translate(NO_ROWS, state.lang));
    if (state.token === null || row === null) return fill(this.readout, translate(CHOOSE, state.lang));
    const key = state.key ?? row.top[0]?.key ?? null;
    fill(this.readout, ...sayLink({
      ...{ row, key, lang: state.lang, queryName: naming.query(state.layer, row.token), place: row.token },
      keyName: key === null ? "–" : naming.key(state.layer, key),
      hint: this.held
        ? translate("held: click again to let go", state.lang)
        : translate("click to hold", state.lang),
    }));
  }

  /**
   * The pointer is over the image: at a query, or, where one is held or patches ask nothing, at a key.
   * @param {{x: number, y: number} | null} place
   * @param {boolean} press
   */
  #over(place, press) {
    if (place === null) return;
    const query = this.answers.tokens(0)?.at(this.image, place.y, place.x);
    const key = this.answers.tokens(1)?.at(this.image, place.y, place.x);
    if (query && (press || !this.held)) return press ? this.#press("query", query.token) : this.#point("query", query.token);
    if (key) press ? this.store.set({ key: key.token }) : this.#point("key", key.token);
  }

  /**
   * @param {"query" | "key"} side
   * @param {number} index
   */
  #point(side, index) {
    clearTimeout(this.timer);
    const { session } = this.store.get();
    if (side === "query" && !this.held) this.store.set({ hover: { session, token: index } });
    this.timer = setTimeout(() => this.#look(side, index), POINT_MS);
  }

  /**
   * @param {"query" | "key"} side
   * @param {number} index
   */
  #look(side, index) {
    const asks = side === "query" && !this.held;
    if (!asks && (side === "key" || this.answers.same)) return this.store.set({ key: index });
    if (!asks || index === this.store.get().token) return;
    this.token = index; // it is in sight already
    this.store.set({ token: index, key: null });
  }

  /**
   * @param {"query" | "key"} side
   * @param {number} index
   */
  #press(side, index) {
    clearTimeout(this.timer);
    if (side === "key") return this.store.set({ key: index });
    const again = this.held && this.store.get().token === index;
    this.#hold(!again);
    this.token = index;
    if (this.store.get().token !== index) this.store.set({ token: index, key: null });
  }

  /** @param {boolean} held */
  #hold(held) {
    this.held = held;
    this.store.set({ pinned: held, hover: null });
    this.update();
  }

  /** @param {number} by */
  #step(by) {
    const { token } = this.store.get();
    const others = this.answers.tokens(0)?.others ?? [];
    const at = token === null ? -1 : others.indexOf(token);
    const to = others[Math.max(0, Math.min(others.length - 1, at + by))];
    if (to === undefined) return;
    this.#look("query", to);
    this.asking.focus(to);
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (step) this.#walk(step[0], step[1]);
    else if (event.key === "Enter" || event.key === " ") this.#hold(!this.held && this.store.get().token !== null);
    else if (event.key === "Escape" && this.held) this.#hold(false);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  /**
   * To the patch beside the one that is chosen: of the keys, where a query is held or patches ask nothing.
   * @param {number} down
   * @param {number} across
   */
  #walk(down, across) {
    const state = this.store.get();
    const asks = !this.held && (this.answers.tokens(0)?.of(this.image).length ?? 0) > 0;
    const tokens = this.answers.tokens(asks ? 0 : 1);
    const grid = this.#grid();
    if (tokens === null || grid === undefined) return;
    const token = asks ? state.token : (state.key ?? state.token);
    const here = token === null || tokens.images[token] !== this.image ? undefined : tokens.patches.get(token);
    const limit = (/** @type {number} */ at, /** @type {number} */ count) => Math.max(0, Math.min(count - 1, at));
    const patch = here
      ? tokens.in(this.image, limit(here.row + down, grid.rows.length), limit(here.column + across, grid.columns.length))
      : tokens.in(this.image, grid.rows.length >> 1, grid.columns.length >> 1);
    if (patch) this.#look(asks ? "query" : "key", patch.token);
  }
}
