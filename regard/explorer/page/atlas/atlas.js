// The atlas: every head of the model as a cell (layers × heads) with its picture and a strip in the colour of the measure,
// or as a line of a list sorted by the measure; a search dims what does not fit.

import { withEffects } from "../effects/effects.js";
import { onDarkPaper, rampFor } from "../shared/colours.js";
import { fill, focusedAround, make, segments } from "../shared/elements.js";
import { Naming } from "../shared/labels.js";
import { figure, howText, translate, translateParts } from "../shared/messages.js";
import { isAbort, latest } from "../source/source.js";
import { compared } from "../state.js";
import {
  closest,
  EFFECT,
  fitting,
  headName,
  headsOf,
  lessBaseline,
  LINK,
  measureAbout,
  measureName,
  measureOf,
  PLAIN,
  withLink,
} from "./heads.js";
import { difference, drawLegend, sequence } from "./legend.js";
import { sorted, writeList } from "./list.js";
import { captionOf, Pictures } from "./pictures.js";
import { SearchError } from "./search.js";

/** @typedef {import("../source/source.js").Overview} Overview */
/** @typedef {import("../source/source.js").Source} Source */
/** @typedef {import("../state.js").State} State */
/** @typedef {import("../state.js").Store} Store */
/** @typedef {import("./heads.js").HeadLine} HeadLine */

const LARGEST = 44; // pixels of a cell
const PICTURE = { wide: 24, high: 18 }; // pixels of a cell from which a picture in it can be read
const LARGEST_PICTURE = 80;
const SMALLEST = 5;
const NUMBERED = 20; // pixels from which a cell has room for its number
const STRIP = { number: 13, bare: 4, from: 34 }; // pixels below a picture: with a number from cells of this size
const WIDTH = [8, 64]; // cells of a row, at least and at most

/**
 * Build the pane inside an element.
 * @param {HTMLElement} element
 * @param {Store} store
 * @param {Source} source
 * @param {import("../effects/effects.js").Measurements} measured
 * @param {{baseline?: () => Promise<Overview | null>}} [options]  baseline: what the colours show the difference to, if any
 * @returns {{update: () => void, destroy: () => void}}
 */
export function mount(element, store, source, measured, options = {}) {
  const atlas = new Atlas(element, store, source, measured, options.baseline ?? (async () => null));
  const off = store.on((state, changed) => atlas.changed(state, changed));
  const deaf = measured.on(() => atlas.measuredMore());
  const resized = new ResizeObserver(() => atlas.fit());
  resized.observe(atlas.body);
  void atlas.load();
  const destroy = () => {
    off();
    deaf();
    atlas.pictures.end();
    atlas.nextLink();
    resized.disconnect();
    fill(element);
  };
  return { update: () => void atlas.load(), destroy };
}

class Atlas {
  /**
   * @param {HTMLElement} element
   * @param {Store} store
   * @param {Source} source
   * @param {import("../effects/effects.js").Measurements} measured
   * @param {() => Promise<Overview | null>} baseline
   */
  constructor(element, store, source, measured, baseline) {
    this.store = store;
    this.source = source;
    this.measured = measured;
    this.baseline = baseline;
    this.next = latest();
    this.nextLink = latest();
    this.pictures = new Pictures(source, () => this.drawPictures());
    /** @type {import("../source/source.js").LinkInHeads | null} */
    this.link = null;
    /** @type {import("./pictures.js").Sizes | null} */
    this.sizes = null;
    /** @type {Set<HeadLine> | null} */
    this.fits = null;
    /** @type {import("./search.js").Part | undefined} */
    this.part = undefined; // what the search asks for, where that is one thing
    /** @type {Overview | null} */
    this.overview = null;
    /** @type {HeadLine[]} */
    this.heads = [];
    /** @type {Map<string, HTMLElement>} */
    this.cells = new Map();
    /** @type {((one: import("./list.js").Valued | undefined) => void) | undefined} */
    this.pin = undefined;
    this.bar = make("div", { class: "pane-bar" });
    this.found = make("p", { class: "found", role: "status" });
    this.caption = make("p", { class: "atlas-caption" });
    this.choice = make("div", { class: "atlas-choice", "data-saving": "skip" });
    this.body = make("div", { class: "atlas-body" });
    this.readout = make("p", { class: "readout" });
    this.legend = make("div", { class: "legend" });
    this.search = make("input", {
      ...{ type: "search", class: "atlas-search", spellcheck: "false", autocomplete: "off", "data-role": "search" },
      oninput: () => this.store.set({ find: this.search.value }),
      onkeydown: (/** @type {KeyboardEvent} */ event) => event.key === "Enter" && this.chooseBest(),
    });
    fill(
      element,
      this.bar,
      make("div", { class: "search-line" }, this.search),
      this.found,
      make("div", { class: "atlas-line-above" }, this.caption, this.choice),
      this.body,
      this.legend,
      this.readout,
    );
  }

  /**
   * @param {State} state
   * @param {Set<string>} changed
   */
  changed(state, changed) {
    const has = (/** @type {string[]} */ ...names) => names.some((name) => changed.has(name));
    if (has("session") || compared(state) !== this.compared) return void this.load();
    if (has("measure", "lang", "theme", "view", "find", "cells")) this.draw();
    else if (has("layer", "head")) this.mark(state);
    if (has("token", "key", "layer")) void this.askLink();
    if (has("token", "layer", "hover", "pinned")) this.askRows();
    if (has("sink")) this.drawPictures();
  }

  async load() {
    const { session, lang } = this.store.get();
    this.compared = compared(this.store.get());
    if (session === null) return;
    try {
      const signal = this.next();
      const [overview, before] = await Promise.all([this.source.overview(session, signal), this.baseline()]);
      if (this.plain !== overview) {
        this.link = null;
        this.pictures.clear();
      }
      this.plain = overview;
      this.before = before;
      this.naming = new Naming(this.source, session, overview, () => this.refresh());
      this.#take();
      void this.askLink();
      await this.pictures.load(session, overview, signal); // without them the cells have colours
      this.fit();
      this.askRows();
    } catch (error) {
      if (isAbort(error)) return;
      fill(
        this.body,
        make(
          "p",
          { class: "note error", role: "alert" },
          translate("That did not work: {error}", lang, { error: String(/** @type {Error} */ (error).message) }),
        ),
      );
    }
  }

  /** The link that the effects are of has changed, or was measured. */
  measuredMore() {
    if (this.plain && this.effects !== this.measured.latest) this.#take();
  }

  /** Ask for the weight of the chosen link in every head. */
  async askLink() {
    const { session, token, key, layer } = this.store.get();
    const signal = this.nextLink();
    const chosen = session !== null && token !== null && key !== null;
    const link = chosen ? this.source.linkInHeads(session, token, key, layer, signal) : Promise.resolve(null);
    const answer = await link.catch((error) => (isAbort(error) ? undefined : null)); // null: not known in every head
    if (signal.aborted || answer === undefined || answer === this.link) return;
    this.link = answer;
    this.#take();
  }

  #take() {
    if (!this.plain) return;
    const first = this.overview === null;
    this.effects = this.measured.latest;
    this.overview = withEffects(withLink(this.plain, this.link), this.effects);
    this.heads = headsOf(this.overview);
    if (first || this.drawn !== this.plain) this.draw();
    else this.refresh();
  }

  /** The measures of the chosen link that are there, the best first. */
  #ofLink() {
    const { token, key } = this.store.get();
    if (this.before) return []; // the other session's link may be another one
    const measured = this.effects?.heads && this.effects.token === token && this.effects.key === key;
    return [...(measured ? [EFFECT] : []), ...(this.link ? [LINK] : [])];
  }

  draw() {
    const { overview } = this;
    if (overview === null) return;
    this.drawn = this.plain;
    [this.cells, this.pin] = [new Map(), undefined];
    const state = this.store.get();
    fill(this.body, state.view === "grid" ? this.grid(state, overview) : make("div", { class: "atlas-lines" }));
    this.refresh();
    this.fit();
  }

  /** Values, colours and words of what is drawn. */
  refresh() {
    const { overview } = this;
    if (overview === null) return;
    const state = this.store.get();
    this.measure = measureOf(overview, state.measure, this.#ofLink());
    if (this.body.parentElement) this.body.parentElement.dataset.measure = this.measure;
    this.drawBar(state, overview);
    this.paint(state, overview);
    this.fits = this.searched(state, overview);
    const lines = this.body.querySelector(".atlas-lines");
    if (lines) this.list(state, lines);
    else this.heads.forEach((head, i) => this.dressCell(head, this.values?.[i] ?? NaN));
    this.body.querySelector(".atlas-grid")?.classList.toggle("signed", Boolean(this.painting && this.painting.low < 0));
    this.mark(state);
    this.drawPictures();
  }

  /** Ask for what the cells show: rows as wide as there is room for. */
  askRows() {
    const { sizes } = this;
    if (sizes === null) return;
    const room = Math.round((sizes.cell - 2) * (globalThis.devicePixelRatio || 1));
    this.pictures.ask(this.store.get(), Math.max(WIDTH[0], Math.min(WIDTH[1], room)));
  }

  drawPictures() {
    this.describe();
    this.pictures.canvas.setAttribute("aria-label", this.caption.textContent ?? "");
    if (this.sizes === null) return;
    const { fits } = this;
    const bright = fits && new Set([...fits].map(({ layer, head }) => `${layer}.${head}`));
    const ramp = rampFor(onDarkPaper(this.body));
    this.pictures.draw(this.sizes, ramp, this.store.get().sink, (place) => bright?.has(place) ?? true);
  }

  /** What the cells show, in words. */
  describe() {
    const state = this.store.get();
    const { lang, layer, view } = state;
    const measure = measureName(this.measure ?? "", lang);
    if (view !== "grid") return fill(this.caption, translate("Sorted by {measure}", lang, { measure }));
    if (this.sizes === null) return fill(this.caption, translate("Layers ↓, heads →", lang));
    const { shown } = this.pictures;
    const back = translate("Back to the maps", lang);
    const release = () => this.store.set({ pinned: false, hover: null });
    fill(
      this.caption,
      ...captionOf(shown, shown.token === null ? "" : (this.naming?.query(layer, shown.token) ?? ""), lang),
      shown.token !== null &&
        state.hover === null &&
        make("button", { type: "button", class: "quiet", title: back, "aria-label": back, onclick: release }, "×"),
    );
  }

  /**
   * @param {State} state
   * @param {Overview} overview
   */
  drawBar({ lang, view }, overview) {
    const names = Object.keys(overview.measures);
    const key = [lang, view, this.measure, ...names, this.sizes !== null, this.pictures.any].join("/");
    if (key === this.barred) return;
    this.barred = key;
    const select = make(
      "select",
      {
        ...{
          "aria-label": translate("Coloured by", lang),
          title: measureAbout(this.measure ?? "", lang),
          "data-role": "measure",
        },
        onchange: (/** @type {Event} */ event) =>
          this.store.set({ measure: /** @type {HTMLSelectElement} */ (event.target).value }),
      },
      ...names.map((name) => make("option", { value: name, selected: name === this.measure }, measureName(name, lang))),
      !(EFFECT in overview.measures) &&
        this.source.can.measure &&
        overview.layers.some((layer) => layer.no_effects === null) &&
        make("option", { value: EFFECT, disabled: true }, translate("effect of a link: measure one below", lang)),
    );
    const focus = focusedAround(this.bar);
    const had = this.bar.contains(focus) ? focus?.getAttribute("data-role") : null;
    const choices = [
      { value: "grid", label: translate("Grid", lang), title: translate("Grid of layers and heads", lang) },
      { value: "list", label: "≡↓", title: translate("List, highest first", lang) },
      { value: "rising", label: "≡↑", title: translate("List, lowest first", lang) },
    ];
    const chosen = segments(translate("Layout", lang), "view", choices, view, (value) =>
      this.store.set({ view: /** @type {State["view"]} */ (value) }),
    );
    fill(this.bar, make("h2", { "data-saving": "skip" }, translate("Heads", lang)), select, chosen);
    this.drawChoice();
    if (had === "measure") select.focus();
    else if (had !== null) /** @type {HTMLElement | null} */ (chosen.querySelector("[aria-checked=true]"))?.focus();
    this.search.setAttribute("aria-label", translate("Search heads", lang));
    this.search.placeholder = translate("previous word · induction > 0.4 · L3 H1", lang);
  }

  /** What a cell shows. */
  drawChoice() {
    const { lang, view } = this.store.get();
    const choices = [
      { value: "thumbnails", label: "▦", title: translate("A picture in each cell", lang) },
      { value: "colour", label: "■", title: translate("The measure as colour of each cell", lang) },
    ];
    const had = this.choice.contains(focusedAround(this.choice));
    const shown = this.sizes ? "thumbnails" : "colour";
    const chosen = segments(translate("What a cell shows", lang), "cells", choices, shown, (value) =>
      this.store.set({ cells: /** @type {State["cells"]} */ (value) }),
    );
    fill(this.choice, view === "grid" && this.pictures.any && chosen);
    if (had) /** @type {HTMLElement | null} */ (chosen.querySelector("[aria-checked=true]"))?.focus();
  }

  /**
   * @param {State} state
   * @param {Overview} overview
   */
  paint({ lang }, overview) {
    const measure = this.measure ?? "";
    const dark = onDarkPaper(this.body);
    const ofLink = measure === EFFECT || measure === LINK;
    const before = ofLink ? null : this.before; // the other session's link may be another one
    const less = before ? lessBaseline(this.heads, overview, before, measure) : null;
    this.impossible = Boolean(before) && less === null;
    this.values = less ?? this.heads.map(({ numbers }) => numbers[measure]);
    this.painting = less ? difference(less, dark) : sequence(this.values, !PLAIN.includes(measure), dark);
    const about = this.impossible
      ? translate("The two have different layers or heads, so there is no difference to colour.", lang)
      : less ? translate("Colour by difference (second − first)", lang) : "";
    const effect = measure === EFFECT && translate(
      "How far the vector of {token} moves without {token} → {key}, in each head by itself, in %. Exact: the model ran again.",
      lang,
      this.measured.names(this.effects),
    );
    const weight =
      measure === LINK &&
      this.link &&
      `${translate("Weight of {token} → {key} in each head", lang, this.names(this.link))} · ${howText(this.link.how ?? "exact", lang)}.`;
    drawLegend(this.legend, this.painting, effect || weight || about || measureAbout(measure, lang), lang);
    const own = translate("Pictures: from 0 to each head's own maximum.", lang);
    this.legend.querySelector(".about")?.append(make("span", { class: "pictured-only" }, ` ${own}`));
  }

  /**
   * The words of a link.
   * @param {{token: number, key: number, layer: number}} link
   */
  names({ token, key, layer }) {
    return { token: `“${this.naming?.query(layer, token) ?? token}”`, key: `“${this.naming?.key(layer, key) ?? key}”` };
  }

  /** Of the heads that fit the search, choose the best by its pattern, else by the measure; where none fits, the closest. */
  chooseBest() {
    const { fits, part, values } = this;
    if (!fits) return;
    const pattern = part && "pattern" in part ? part.pattern : null;
    const value = (/** @type {HeadLine} */ head) =>
      pattern ? head.numbers[pattern] : (values?.[this.heads.indexOf(head)] ?? NaN);
    const [first, ...rest] = fits;
    const best = first ? rest.reduce((top, one) => (value(one) > value(top) ? one : top), first) : closest(this.heads, part)?.head;
    if (best) this.store.set({ layer: best.layer, head: best.head });
  }

  /**
   * The heads that fit the search, or null where there is none to fit.
   * @param {State} state
   * @param {Overview} overview
   * @returns {Set<HeadLine> | null}
   */
  searched({ find, lang }, overview) {
    if (this.search.value !== find) this.search.value = find;
    this.found.classList.remove("error");
    this.search.removeAttribute("aria-invalid");
    try {
      const { fits, part } = fitting(this.heads, find, overview);
      this.part = part;
      fill(this.found, ...(find.trim() ? this.foundWords(fits, part) : [""]));
      return find.trim() ? fits : null;
    } catch (error) {
      if (!(error instanceof SearchError)) throw error;
      this.found.classList.add("error");
      this.search.setAttribute("aria-invalid", "true");
      fill(this.found, translate(error.message, lang, error.values));
      return null;
    }
  }

  /**
   * What a search found; where it found nothing, what comes closest.
   * @param {Set<HeadLine>} fits
   * @param {import("./search.js").Part | undefined} part
   */
  foundWords(fits, part) {
    const { lang } = this.store.get();
    if (fits.size > 0) {
      const count = translate("{count} of {all} {all|head|heads}", lang, { count: fits.size, all: this.heads.length });
      return [part && "pattern" in part ? `${count} · ${measureName(part.pattern, lang)}` : count];
    }
    const last = this.heads[this.heads.length - 1];
    if (part && "layer" in part && last) {
      const place = part.head === null ? `L${part.layer}` : headName(part.layer, part.head);
      const values = { place, last: headName(last.layer, last.head) };
      return [translate("There is no {place}; the last head is {last}.", lang, values)];
    }
    const best = closest(this.heads, part);
    if (best === null || part === undefined) return [translate("No head fits.", lang)];
    const { layer, head } = best.head;
    const go = () => this.store.set({ layer, head });
    const place = make("button", { type: "button", class: "quiet", onclick: go }, headName(layer, head));
    const values = { value: figure(best.value), place };
    if ("pattern" in part) {
      return translateParts(
        "No head gives “{pattern}” half of its attention; the highest mean weight is {value} in {place}.",
        lang,
        { ...values, pattern: measureName(part.pattern, lang) },
      );
    }
    const asked = { ...values, condition: "sign" in part ? `${part.name} ${part.sign} ${part.value}` : "" };
    return best.lowest
      ? translateParts("No head has {condition}; the lowest is {value} in {place}.", lang, asked)
      : translateParts("No head has {condition}; the highest is {value} in {place}.", lang, asked);
  }

  /**
   * @param {State} state
   * @param {Overview} overview
   */
  grid({ lang }, overview) {
    const most = Math.max(1, ...overview.layers.map(({ heads }) => heads));
    const every = (/** @type {number} */ count) => (count > 16 ? 4 : 1); // numbers that fit beside each other
    const number = (/** @type {number} */ i, /** @type {number} */ count) => (i % every(count) ? "" : String(i));
    const top = Array.from({ length: most }, (_, i) =>
      make(
        "span",
        { class: "axis", role: "columnheader", "aria-label": `${translate("head", lang)} ${i}` },
        number(i, most),
      ),
    );
    const lines = overview.layers.map(({ path }, layer) => {
      const axis = make(
        "span",
        { class: "axis", role: "rowheader", title: path, "aria-label": `${translate("layer", lang)} ${layer}` },
        number(layer, overview.layers.length),
      );
      const cells = this.heads.flatMap((head) => (head.layer === layer ? [this.cell(head)] : []));
      return make("div", { class: "atlas-row", role: "row" }, axis, ...cells);
    });
    const first = make(
      "div",
      { class: "atlas-row", role: "row" },
      make("span", { class: "axis corner", role: "gridcell" }),
      ...top,
    );
    const label = translate("Heads: rows are layers, columns are heads. The arrow keys move.", lang);
    const given = { class: "atlas-grid", role: "grid", "aria-label": label, "data-heads": most, "data-layers": lines.length };
    return make("div", { class: "atlas-plane" }, this.pictures.canvas, make("div", given, first, ...lines));
  }

  /** @param {HeadLine} head */
  cell({ layer, head }) {
    const at = this.heads.findIndex((one) => one.layer === layer && one.head === head);
    const cell = make(
      "button",
      {
        ...{ type: "button", role: "gridcell", class: "cell", tabindex: -1, "data-layer": layer, "data-head": head },
        onclick: () => this.store.set({ layer, head }),
        onpointerenter: () => this.read(at),
        onpointerleave: () => this.mark(this.store.get()),
      },
      make("span", { "aria-hidden": "true" }),
    );
    this.cells.set(`${layer}.${head}`, cell);
    return cell;
  }

  /**
   * A cell's colour, number and name.
   * @param {HeadLine} head
   * @param {number} value
   */
  dressCell(head, value) {
    const cell = this.cells.get(`${head.layer}.${head.head}`);
    const { painting, fits } = this;
    if (!cell) return;
    const known = Number.isFinite(value) && painting;
    const broken = head.broken.has(this.measure ?? "");
    const written = broken ? "NaN" : short(value);
    const name = this.told(head, this.figure(head, value));
    cell.className = `cell${fits && !fits.has(head) ? " dim" : ""}${broken ? " broken" : known ? "" : " unknown"}`;
    cell.style.setProperty("--tint", known ? painting.colour(value) : "");
    cell.style.setProperty("--tint-ink", known ? painting.ink(value) : "");
    if (cell.title !== name) cell.title = name; // its accessible name: the number in it is hidden, and rounded
    if (cell.firstElementChild) cell.firstElementChild.textContent = written;
  }

  /**
   * @param {State} state
   * @param {Element} element
   */
  list({ lang, view }, element) {
    const { fits, painting } = this;
    if (!painting) return;
    const order = sorted(this.heads.filter((head) => !fits || fits.has(head)).map((head) => this.#valued(head)), view === "rising");
    const choose = (/** @type {HeadLine} */ { layer, head }) => this.store.set({ layer, head });
    const { lines, pin } = writeList(element, order, { measure: this.measure ?? "", painting, lang, choose });
    [this.cells, this.pin] = [lines, pin];
  }

  /** @param {HeadLine} head */
  #valued(head) {
    const value = this.values?.[this.heads.indexOf(head)] ?? NaN;
    return { head, value, written: this.figure(head, value) };
  }

  /** Where the chosen head stands among all. */
  #selected() {
    const { layer, head } = this.store.get();
    return this.heads.findIndex((one) => one.layer === layer && one.head === head);
  }

  /**
   * A head's numbers, below the cells.
   * @param {number} at
   */
  read(at) {
    const { lang } = this.store.get();
    const head = this.heads[at];
    if (head === undefined) return fill(this.readout);
    const kind = head.label ? ` · ${measureName(head.label, lang)}` : "";
    const number = this.figure(head, this.values?.[at] ?? NaN);
    fill(this.readout, `${headName(head.layer, head.head)} · ${measureName(this.measure ?? "", lang)} ${number}${kind}`);
  }

  /**
   * Show which head is chosen, and its numbers.
   * @param {State} state
   */
  mark({ layer, head }) {
    const focused = this.body.contains(focusedAround(this.body));
    for (const cell of this.body.querySelectorAll("[aria-selected=true]")) {
      cell.removeAttribute("aria-selected");
      cell.setAttribute("tabindex", "-1");
    }
    const cell = this.cells.get(`${layer}.${head}`);
    this.read(this.#selected());
    this.pin?.(this.#selected() < 0 ? undefined : this.#valued(this.heads[this.#selected()]));
    (cell ?? this.cells.values().next().value)?.setAttribute("tabindex", "0");
    if (!cell) return;
    cell.setAttribute("aria-selected", "true");
    if (focused) cell.focus();
    else if (cell.classList.contains("atlas-line")) cell.scrollIntoView({ block: "nearest" });
  }

  /**
   * A head in words.
   * @param {HeadLine} head
   * @param {string} number  its value
   */
  told({ layer, head, label }, number) {
    const { lang } = this.store.get();
    const kind = label ? ` · ${measureName(label, lang)}` : "";
    return `${translate("layer {layer}, head {head}", lang, { layer, head })} · ${measureName(this.measure ?? "", lang)} ${number}${kind}`;
  }

  /**
   * A head's number: NaN where it was measured and is, "–" where it was not.
   * @param {HeadLine} head
   * @param {number} value
   */
  figure({ broken }, value) {
    return figure(Number.isNaN(value) && !broken.has(this.measure ?? "") ? null : value);
  }

  /** Make cells as large as the pane allows. */
  fit() {
    const grid = /** @type {HTMLElement | null} */ (this.body.querySelector(".atlas-grid"));
    if (grid === null) {
      this.sizes = null;
      this.body.parentElement?.classList.remove("pictured");
      return this.drawChoice();
    }
    const [heads, layers] = [Number(grid.dataset.heads), Number(grid.dataset.layers)];
    const [wide, high] = [(this.body.clientWidth - 24) / heads, (this.body.clientHeight - 18) / layers];
    const size = (/** @type {number} */ most, /** @type {number} */ least, /** @type {number} */ longer) => {
      const cell = Math.max(least, Math.floor(Math.min(wide, longer * Math.max(high, least), most)));
      return [cell, Math.max(least, Math.floor(Math.min(high, longer * cell, most)))];
    };
    const { cells } = this.store.get();
    const large = size(LARGEST_PICTURE, cells === "thumbnails" ? PICTURE.wide : SMALLEST, 1.25);
    const pictured = this.pictures.any && cells !== "colour" && large[0] >= PICTURE.wide && large[1] >= PICTURE.high;
    const [cell, room] = pictured ? large : size(LARGEST, SMALLEST, 1.4);
    const strip = Math.min(cell, room) >= STRIP.from ? STRIP.number : STRIP.bare;
    const height = pictured ? Math.min(room, Math.ceil((cell - 2) * this.pictures.tallest) + strip + 3) : room;
    this.sizes = pictured ? { cell, height, strip, heads } : null;
    grid.style.setProperty("--cell", `${cell}px`);
    grid.style.setProperty("--cell-height", `${height}px`);
    grid.style.setProperty("--strip", `${strip}px`);
    grid.classList.toggle("numbered", pictured ? strip === STRIP.number : cell >= NUMBERED && height >= 14);
    grid.classList.toggle("tiny", height < 12);
    this.body.parentElement?.classList.toggle("pictured", pictured);
    this.drawChoice();
    this.askRows();
    this.drawPictures();
  }
}

/**
 * A number in the room of a cell: two figures.
 * @param {number} value
 */
function short(value) {
  if (!Number.isFinite(value)) return "";
  const size = Math.abs(value);
  const text = size >= 9.95 ? size.toFixed(0) : size >= 0.995 ? size.toFixed(1) : size.toFixed(2).slice(1);
  return `${value <= -0.005 ? "−" : ""}${text === ".00" ? "0" : text}`;
}
