// The text pane: a ribbon over all tokens, the words of a window with the heat of the chosen token's exact row, and its
// strongest links as arcs (short texts) and as a list.

import { paperUnder, scaleOf, signedScale } from "../shared/colours.js";
import { fill, make, watchSurroundings } from "../shared/elements.js";
import { Labels } from "../shared/labels.js";
import { translate } from "../shared/messages.js";
import { isAbort, latest, outcome } from "../source/source.js";
import { arcsLayer, drawArcs, hasNaN, LinkList, NO_ROWS, sayLink } from "./links.js";
import { Ribbon } from "./ribbon.js";
import { WordView } from "./wordview.js";

/** @typedef {import("../source/source.js").Row} Row */
/** @typedef {import("../state.js").State} State */

/** @typedef {[number, number]} Range */

/** Words shown at once, and the longest text that has arcs. */
const WINDOW = 600;
const ARCS = 120;
/** A word becomes the query when it was pointed at this long. */
const POINT_MS = 35;

/**
 * Build the pane inside an element.
 * @param {HTMLElement} element
 * @param {import("../state.js").Store} store
 * @param {import("../source/source.js").Source} source
 * @returns {{update: () => void, destroy: () => void}}
 */
export function mount(element, store, source) {
  const pane = new TextPane(element, store, source);
  return { update: () => pane.update(), destroy: () => pane.destroy() };
}

class TextPane {
  /**
   * @param {HTMLElement} element
   * @param {import("../state.js").Store} store
   * @param {import("../source/source.js").Source} source
   */
  constructor(element, store, source) {
    this.element = element;
    this.store = store;
    this.source = source;
    this.nextText = latest();
    this.nextRow = latest();
    this.readout = make("p", { class: "text-readout", role: "status" });
    this.place = make("p", { class: "text-place" });
    this.ribbon = new Ribbon((start) => this.#moveWindow(start));
    this.words = new WordView({
      point: (index) => this.#point(index),
      press: (index) => this.#press(index),
      step: (by) => this.#step(by),
      release: () => this.#hold(false),
    });
    this.arcs = arcsLayer();
    this.page = make("div", { class: "text-page" }, this.words.element, this.arcs);
    this.links = new LinkList((key) => this.#go(key));
    this.scroll = make("div", { class: "text-scroll" }, this.page);
    element.classList.add("pane-text");
    element.replaceChildren(this.readout, this.ribbon.element, this.place, this.scroll, this.links.element);
    /** @type {import("../source/source.js").Overview | null} */
    this.overview = null;
    /** @type {Labels | null} */
    this.labels = null;
    /** @type {Row | null} */
    this.row = null;
    this.asked = { text: "", row: "" };
    this.written = "";
    this.held = false;
    /** @type {number | null} */
    this.token = store.get().window === null ? null : store.get().token; // a window that is given stays
    /** @type {number | null} */
    this.key = null; // the key that was brought into sight
    /** @type {number | null} */
    this.sought = null; // the word to scroll to
    /** @type {number | null} */
    this.shown = null; // the word that was scrolled to, until somebody scrolls
    this.error = "";
    this.ended = false;
    this.frame = 0;
    this.timer = 0;
    for (const kind of ["pointerleave", "focusout"])
      this.words.element.addEventListener(kind, () => this.store.set({ hover: null }));
    for (const kind of ["wheel", "touchmove", "pointerdown", "keydown"])
      this.scroll.addEventListener(kind, () => (this.shown = null), { passive: true });
    this.ends = [
      store.on(() => this.update()),
      watchSurroundings(element, () => this.update()),
      // What is drawn later beside the words, or moves them, may take them out of sight.
      ...[this.scroll, this.page].map((part) =>
        watchSurroundings(part, () => this.words.bringIntoSight(this.shown, this.scroll)),
      ),
    ];
    this.update();
  }

  /** Ask for what is missing, and draw before the next frame. */
  update() {
    if (this.ended) return;
    const { session } = this.store.get();
    if (session !== this.asked.text) {
      this.asked.text = session ?? "";
      void this.#askText(session);
    }
    this.#keepInSight();
    this.#askForRow();
    if (this.frame === 0) this.frame = requestAnimationFrame(() => this.#draw());
  }

  destroy() {
    this.ended = true;
    for (const end of this.ends) end();
    cancelAnimationFrame(this.frame);
    clearTimeout(this.timer);
    this.nextRow();
    this.nextText();
    this.element.replaceChildren();
    this.element.classList.remove("pane-text");
  }

  /** @param {string | null} session */
  async #askText(session) {
    const signal = this.nextText();
    [this.overview, this.labels, this.row, this.held, this.error] = [null, null, null, false, ""];
    if (session === null) return;
    try {
      const overview = await this.source.overview(session, signal);
      if (signal.aborted) return;
      this.overview = overview;
      this.labels = new Labels(this.source, session, overview, () => {
        this.written = "";
        this.update();
      });
    } catch (error) {
      if (isAbort(error)) return;
      this.error = error instanceof Error ? error.message : String(error);
    }
    this.update();
  }

  #askForRow() {
    const { session, layer, head, token } = this.store.get();
    const queries = this.#layer?.queries ?? 0;
    if (session === null || token === null || token >= queries || !this.#hasRows) return;
    const asked = [session, layer, head, token, ...this.#window()].join("/");
    if (asked === this.asked.row) return;
    this.asked.row = asked;
    void this.#askRow(session, layer, head, token, this.#window());
  }

  /**
   * The row of a query. An answer that a newer question has overtaken is dropped, so answers are shown in order.
   * @param {string} session
   * @param {number} layer
   * @param {number} head
   * @param {number} token
   * @param {Range} window
   */
  async #askRow(session, layer, head, token, [start, stop]) {
    const signal = this.nextRow();
    const found = await outcome(this.source.row(session, layer, head, token, start, stop, signal), signal);
    if (!found) return;
    [this.row, this.error] = found;
    this.update();
  }

  get #layer() {
    return this.overview?.layers[this.store.get().layer];
  }

  get #length() {
    return this.#layer?.keys ?? 0;
  }

  get #hasRows() {
    return this.#layer?.rows ?? this.overview?.rows ?? false;
  }

  /** Are words queries too, or only keys? */
  get #asks() {
    return this.#layer !== undefined && this.#layer.first !== null;
  }

  /**
   * The word that a query stands on; null in cross-attention.
   * @param {number | null} token
   */
  #wordOf(token) {
    return token === null || !this.#asks ? null : token + (this.#layer?.first ?? 0);
  }

  /**
   * The query that stands on a word; null where there is none.
   * @param {number} index
   */
  #queryOf(index) {
    const token = index - (this.#layer?.first ?? 0);
    return this.#asks && token >= 0 && token < (this.#layer?.queries ?? 0) ? token : null;
  }

  /** @param {number} key */
  #name(key) {
    return this.#layer?.labelled === false ? `#${key}` : (this.labels?.short(key) ?? "");
  }

  /** @returns {Range} */
  #window() {
    const { window } = this.store.get();
    const length = this.#length;
    if (length <= WINDOW) return [0, length]; // a short text is always shown whole
    const [start, stop] = window ?? [0, WINDOW];
    const wide = Math.min(Math.max(1, stop - start), WINDOW);
    const from = Math.max(0, Math.min(start, length - wide));
    return [from, from + wide];
  }

  /** @param {number} start */
  #moveWindow(start) {
    const [from, to] = this.#window();
    const at = Math.max(0, Math.min(Math.round(start), this.#length - (to - from)));
    if (at !== from) this.store.set({ window: [at, at + to - from] });
  }

  /** When another word is chosen from elsewhere, the window goes to it. */
  #keepInSight() {
    const { token, key, window } = this.store.get();
    const [[from, to], word] = [this.#window(), this.#wordOf(token)];
    if (this.overview && key !== this.key) {
      this.key = key;
      if (token === this.token && this.#inWindow(key)) this.sought = key;
    }
    const inSight = word === null || (word >= from && word < to);
    if (!this.overview || (token === this.token && (inSight || window !== null))) return; // an address may name no window
    this.token = token;
    this.sought = word;
    if (inSight) return;
    const wide = to - from;
    // One step beyond an end turns the page by half; a jump brings the word to the middle.
    const [on, back] = [word === to, word === from - 1];
    this.#moveWindow(on ? from + wide / 2 : back ? from - wide / 2 : word - wide / 2);
  }

  #draw() {
    this.frame = 0;
    const state = this.store.get();
    const paper = paperUnder(this.element);
    const { labels, overview } = this;
    if (!labels || !overview) return this.#read(this.error, state);
    const window = this.#window();
    const row = this.row !== null && state.token !== null ? this.row : null;
    const scale = this.#scale(state, row);
    this.#write(state, window);
    this.words.colour({
      ...{ start: row?.start ?? 0, weights: row?.weights.data ?? null, broken: row !== null && hasNaN(row) },
      ...{ token: this.#wordOf(state.token), key: state.key },
      ...{ held: this.held, sink: state.sink, scale, paper, lang: state.lang },
    });
    const [from, to] = window;
    const said = translate("words {from}–{to} of {all}", state.lang, { from, to: to - 1, all: this.#length });
    [this.place.textContent, this.place.hidden] = [said, to - from === this.#length];
    this.ribbon.draw({
      ...{ length: this.#length, window, token: this.#wordOf(state.token), key: state.key, sink: state.sink, paper },
      ...{ sum: row?.ribbon.sum.data ?? null, max: row?.ribbon.max.data ?? null, said },
      label: translate("All words; the frame is the part that is shown below", state.lang),
      scale: row ? scaleOf(state.scale, row.ribbon.sum.data.subarray(state.sink ? 0 : 1)) : scale,
    });
    this.#drawArcs(state, row, scale, paper);
    const top = this.#top(state, row);
    for (const { key } of top) labels.have(key, key + 1);
    this.links.show(top, { key: state.key, lang: state.lang, scale, paper, name: (key) => this.#name(key) });
    this.#read(this.error, state);
    // Last, since the readout and the list of links take room from the words; until the row is there, the list is empty.
    const settled = row?.token === state.token || !this.#hasRows;
    if (this.words.bringIntoSight(this.sought, this.scroll) && settled) [this.shown, this.sought] = [this.sought, null];
  }

  /**
   * The same scale for every window of a row: its largest weights are always part of it.
   * @param {State} state
   * @param {Row | null} row
   */
  #scale(state, row) {
    if (row === null) return scaleOf(state.scale, []);
    const shown = Array.from(row.weights.data, (weight, i) => ({ key: row.start + i, weight })).concat(row.top);
    const weights = shown.filter(({ key }) => state.sink || key !== 0).map(({ weight }) => weight);
    return row.signed ? signedScale(weights) : scaleOf(state.scale, weights);
  }

  /**
   * @param {State} state
   * @param {Range} window
   */
  #write(state, window) {
    const { labels } = this;
    const named = this.#layer?.labelled !== false;
    const written = [state.session, state.lang, named, this.#asks, ...window].join("/");
    if (written === this.written || !labels || (named && !labels.have(window[0], window[1]))) return;
    this.written = written;
    this.words.element.setAttribute(
      "aria-label",
      translate("Words; the colour of each is its weight for the chosen query word", state.lang),
    );
    this.element.classList.toggle("with-arcs", this.#asks && this.#length <= ARCS);
    const focused = this.words.focused;
    this.words.write(named ? labels.words(...window) : labels.numbers(...window), state.lang);
    this.scroll.scrollTop = 0;
    this.sought = [this.#wordOf(state.token), state.key].find((index) => this.#inWindow(index)) ?? null;
    if (focused && this.sought !== null) this.words.focus(this.sought);
  }

  /**
   * The strongest links that are shown: without the first key where it is left out.
   * @param {State} state
   * @param {Row | null} row
   */
  #top(state, row) {
    return (row?.top ?? []).filter(({ key, weight }) => Math.abs(weight) > 0 && (state.sink || key !== 0));
  }

  /**
   * @param {State} state
   * @param {Row | null} row
   * @param {import("../shared/colours.js").Scale} scale
   * @param {import("../shared/colours.js").Paper} paper
   */
  #drawArcs(state, row, scale, paper) {
    const from = row && !row.signed && this.#length <= ARCS ? this.words.spans.get(this.#wordOf(row.token) ?? -1) : undefined;
    const arcs = this.#top(state, row).flatMap(({ key, weight }) => {
      const to = this.words.spans.get(key);
      return from && to && weight > 0.01 ? [{ from, to, weight, place: scale.place(weight) }] : [];
    });
    drawArcs(this.arcs, arcs, this.words.spans.values(), paper);
  }

  /**
   * Look at a key, and bring it into the window.
   * @param {number} key
   */
  #go(key) {
    const [from, to] = this.#window();
    this.#hold(true);
    this.store.set({ key });
    if (key < from || key >= to) this.#moveWindow(key - (to - from) / 2);
  }

  /**
   * @param {string} error
   * @param {State} state
   */
  #read(error, state) {
    const { row } = this;
    if (error || !this.overview) return fill(this.readout, error);
    const { lang } = state;
    const unasked = translate("The words are keys only here: choose a query in the map.", lang);
    if (!this.#hasRows) return fill(this.readout, translate(NO_ROWS, lang));
    if (state.token === null || row === null)
      return fill(
        this.readout,
        this.#asks ? translate("Point at a word to see what it looks at; click to hold it.", lang) : unasked,
      );
    const hint = this.held
      ? translate("held: click again to let go", lang)
      : translate("click to hold this word", lang);
    const key = state.key ?? this.#top(state, row)[0]?.key ?? null;
    const word = this.#wordOf(row.token);
    fill(this.readout, ...sayLink({
      ...{ row, key, lang, queryName: word === null ? `#${row.token}` : this.#name(word) },
      ...{ keyName: key === null ? "–" : this.#name(key), place: word ?? row.token },
      hint: this.#asks ? hint : unasked,
    }));
  }

  /**
   * A word is pointed at: it becomes the query, or, where one is held, the key.
   * @param {number} index
   */
  #point(index) {
    clearTimeout(this.timer);
    const token = this.#queryOf(index);
    if (!this.held && token !== null) this.store.set({ hover: { session: this.store.get().session, token } });
    this.timer = setTimeout(() => {
      if (!this.held) this.token = this.#queryOf(index); // it is in sight already
      this.#look(index);
    }, POINT_MS);
  }

  /** @param {number} index */
  #look(index) {
    const token = this.held ? null : this.#queryOf(index);
    if (token === null) this.store.set({ key: index });
    else if (token !== this.store.get().token) this.store.set({ token, key: null });
  }

  /** @param {number} index */
  #press(index) {
    clearTimeout(this.timer);
    const token = this.#queryOf(index);
    if (token === null) return this.store.set({ key: index });
    this.#hold(!this.held || this.store.get().token !== token);
    this.store.set({ token });
  }

  /** @param {boolean} held */
  #hold(held) {
    this.held = held && this.#asks;
    this.store.set({ pinned: this.held, hover: null });
    this.update();
  }

  /** @param {number} by */
  #step(by) {
    const state = this.store.get();
    const [word, last] = [this.#wordOf(state.token), this.#length - 1];
    const at = (this.held ? (state.key ?? word) : (word ?? state.key)) ?? -1;
    const to = Math.max(0, Math.min(last, at + by));
    this.#look(to);
    this.words.focus(to);
  }

  /** @param {number | null} index */
  #inWindow(index) {
    const [from, to] = this.#window();
    return index !== null && index >= from && index < to;
  }
}
