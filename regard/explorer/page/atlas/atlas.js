// The atlas: every head of the model as a coloured cell (layers × heads), or as a line of a list sorted by the measure;
// a search dims what does not fit.

import { withEffects } from "../effects/effects.js";
import { onDarkPaper } from "../shared/colours.js";
import { fill, focusedAround, make, segments } from "../shared/elements.js";
import { figure, translate } from "../shared/messages.js";
import { isAbort, latest } from "../source/source.js";
import { compared } from "../state.js";
import { EFFECT, fitting, headsOf, lessBaseline, measureAbout, measureName, measureOf, PLAIN } from "./heads.js";
import { difference, drawLegend, sequence } from "./legend.js";
import { SearchError } from "./search.js";

/** @typedef {import("../source/source.js").Overview} Overview */
/** @typedef {import("../source/source.js").Source} Source */
/** @typedef {import("../state.js").State} State */
/** @typedef {import("../state.js").Store} Store */
/** @typedef {import("./heads.js").HeadLine} HeadLine */

const LISTED = 500; // lines of the list: more would be slow, and nobody reads them
const LARGEST = 44; // pixels of a cell
const SMALLEST = 5;
const NUMBERED = 20; // pixels from which a cell has room for its number

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
    /** @type {Overview | null} */
    this.overview = null;
    /** @type {HeadLine[]} */
    this.heads = [];
    /** @type {Map<string, HTMLElement>} */
    this.cells = new Map();
    this.bar = make("div", { class: "pane-bar" });
    this.found = make("p", { class: "found", role: "status" });
    this.body = make("div", { class: "atlas-body" });
    this.readout = make("p", { class: "readout" });
    this.legend = make("div", { class: "legend" });
    this.search = make("input", {
      ...{ type: "search", class: "atlas-search", spellcheck: "false", autocomplete: "off", "data-role": "search" },
      oninput: () => this.store.set({ find: this.search.value }),
    });
    fill(
      element,
      this.bar,
      make("div", { class: "search-line" }, this.search),
      this.found,
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
    if (has("measure", "lang", "theme", "view", "find")) this.draw();
    else if (has("layer", "head")) this.mark(state);
  }

  async load() {
    const { session, lang } = this.store.get();
    this.compared = compared(this.store.get());
    if (session === null) return;
    try {
      const [overview, before] = await Promise.all([this.source.overview(session, this.next()), this.baseline()]);
      this.plain = overview;
      this.before = before;
      this.#take();
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

  #take() {
    if (!this.plain) return;
    this.effects = this.measured.latest;
    this.overview = withEffects(this.plain, this.effects);
    this.heads = headsOf(this.overview);
    this.draw();
  }

  draw() {
    const { overview } = this;
    if (overview === null) return;
    const state = this.store.get();
    this.measure = measureOf(overview, state.measure);
    this.drawBar(state, overview);
    this.paint(state, overview);
    const fits = this.searched(state, overview);
    this.cells.clear();
    fill(this.body, state.view === "grid" ? this.grid(state, overview, fits) : this.list(state, fits));
    this.fit();
    this.mark(state);
  }

  /**
   * @param {State} state
   * @param {Overview} overview
   */
  drawBar({ lang, view }, overview) {
    const names = Object.keys(overview.measures);
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
    if (had === "measure") select.focus();
    else if (had !== null) /** @type {HTMLElement | null} */ (chosen.querySelector("[aria-checked=true]"))?.focus();
    this.search.setAttribute("aria-label", translate("Search heads", lang));
    this.search.placeholder = `${translate("Search heads", lang)}: induction > 0.4`;
  }

  /**
   * @param {State} state
   * @param {Overview} overview
   */
  paint({ lang }, overview) {
    const measure = this.measure ?? "";
    const dark = onDarkPaper(this.body);
    const before = measure === EFFECT ? null : this.before; // the other session's link may be another one
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
    drawLegend(this.legend, this.painting, effect || about || measureAbout(measure, lang), lang);
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
      const fits = fitting(this.heads, find, overview);
      fill(
        this.found,
        find.trim()
          ? translate("{count} of {all} {all|head|heads}", lang, { count: fits.size, all: this.heads.length })
          : "",
      );
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
   * @param {State} state
   * @param {Overview} overview
   * @param {Set<HeadLine> | null} fits
   */
  grid({ lang }, overview, fits) {
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
      const cells = this.heads.flatMap((head, i) =>
        head.layer === layer ? [this.cell(head, this.values?.[i] ?? NaN, fits)] : [],
      );
      return make("div", { class: "atlas-row", role: "row" }, axis, ...cells);
    });
    const first = make(
      "div",
      { class: "atlas-row", role: "row" },
      make("span", { class: "axis corner", role: "gridcell" }),
      ...top,
    );
    const signed = this.painting && this.painting.low < 0 ? " signed" : "";
    return make(
      "div",
      {
        class: `atlas-grid${signed}`,
        role: "grid",
        "aria-label": translate("Heads: rows are layers, columns are heads. The arrow keys move.", lang),
        "data-heads": most,
        "data-layers": lines.length,
      },
      first,
      ...lines,
    );
  }

  /**
   * @param {HeadLine} head
   * @param {number} value
   * @param {Set<HeadLine> | null} fits
   */
  cell(head, value, fits) {
    const { painting } = this;
    const known = Number.isFinite(value) && painting;
    const broken = head.broken.has(this.measure ?? "");
    const colours = known ? `background:${painting.colour(value)};color:${painting.ink(value)}` : "";
    const written = broken ? "NaN" : short(value);
    const cell = make(
      "button",
      {
        ...{
          type: "button",
          role: "gridcell",
          class: `cell${fits && !fits.has(head) ? " dim" : ""}${broken ? " broken" : known ? "" : " unknown"}`,
          tabindex: -1,
        },
        ...{
          style: colours,
          "aria-label": this.told(head, written),
          "data-layer": head.layer,
          "data-head": head.head,
        },
        onclick: () => this.store.set({ layer: head.layer, head: head.head }),
        onpointerenter: () => fill(this.readout, this.told(head, this.figure(head, value))),
        onpointerleave: () => this.mark(this.store.get()),
      },
      make("span", { "aria-hidden": "true" }, written),
    );
    this.cells.set(`${head.layer}.${head.head}`, cell);
    return cell;
  }

  /**
   * @param {State} state
   * @param {Set<HeadLine> | null} fits
   */
  list({ lang, view }, fits) {
    const { painting } = this;
    const values = this.values ?? [];
    const order = this.heads
      .map((head, i) => ({ head, value: values[i] }))
      .filter(({ head }) => !fits || fits.has(head));
    const sign = view === "rising" ? -1 : 1;
    order.sort((a, b) => (Number.isNaN(a.value) ? 1 : Number.isNaN(b.value) ? -1 : sign * (b.value - a.value)));
    const lines = order.slice(0, LISTED).map(({ head, value }) => {
      const share = painting && !painting.flat ? (value - painting.low) / (painting.high - painting.low || 1) : 0;
      const line = make(
        "button",
        {
          ...{
            type: "button",
            class: "atlas-line",
            role: "option",
            "data-layer": head.layer,
            "data-head": head.head,
            tabindex: -1,
          },
          onclick: () => this.store.set({ layer: head.layer, head: head.head }),
        },
        make("span", { class: "place" }, `${head.layer}.${head.head}`),
        make("span", { class: "bar" }, make("i", { style: `width:${(100 * Math.max(0, share || 0)).toFixed(1)}%` })),
        make("span", { class: "number" }, this.figure(head, value)),
        make("span", { class: "kind" }, head.label ? measureName(head.label, lang) : ""),
      );
      this.cells.set(`${head.layer}.${head.head}`, line);
      return line;
    });
    if (lines.length === 0) return make("p", { class: "note" }, translate("No head fits.", lang));
    const more = order.length - lines.length;
    const rest = more > 0 && make("p", { class: "note" }, translate("and {count} more", lang, { count: more }));
    return make(
      "div",
      {
        class: "atlas-list",
        role: "listbox",
        "aria-label": translate("Sorted by {measure}", lang, { measure: measureName(this.measure ?? "", lang) }),
      },
      ...lines,
      rest,
    );
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
    const at = this.heads.findIndex((one) => one.layer === layer && one.head === head);
    fill(this.readout, at < 0 ? "" : this.told(this.heads[at], this.figure(this.heads[at], this.values?.[at] ?? NaN)));
    (cell ?? this.cells.values().next().value)?.setAttribute("tabindex", "0");
    if (!cell) return;
    cell.setAttribute("aria-selected", "true");
    if (focused) cell.focus();
    else if (cell.classList.contains("atlas-line")) cell.scrollIntoView({ block: "nearest" });
  }

  /**
   * A head in words.
   * @param {HeadLine} head
   * @param {string} number  its value: a cell says what stands on it, the line below it more
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
    if (grid === null) return;
    const [heads, layers] = [Number(grid.dataset.heads), Number(grid.dataset.layers)];
    const [wide, high] = [(this.body.clientWidth - 24) / heads, (this.body.clientHeight - 18) / layers];
    const cell = Math.max(SMALLEST, Math.floor(Math.min(wide, 1.4 * Math.max(high, SMALLEST), LARGEST)));
    const height = Math.max(SMALLEST, Math.floor(Math.min(high, 1.4 * cell, LARGEST)));
    grid.style.setProperty("--cell", `${cell}px`);
    grid.style.setProperty("--cell-height", `${height}px`);
    grid.classList.toggle("numbered", cell >= NUMBERED && height >= 14);
    grid.classList.toggle("tiny", height < 12);
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
