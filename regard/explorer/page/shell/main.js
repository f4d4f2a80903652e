// The whole page inside one element: the bar, the panes, the drawer, the windows; the state, its address and the keys.

import { mount as mountStage } from "../compare/stage.js";
import { Measurements } from "../effects/effects.js";
import { placeOf } from "../opening/examples.js";
import { mount as mountShare } from "../share/menu.js";
import { fill, focusedAround, make, segments } from "../shared/elements.js";
import { browserLanguage, message, translate } from "../shared/messages.js";
import { isKnown, remember, startTour } from "../tour/tour.js";
import { compared, createStore, FIRST, fromHash, otherSide, saysPlace, toHash } from "../state.js";
import { mount as mountCard } from "./card.js";
import { drawHeader } from "./header.js";
import { drawHelp, listenToKeys } from "./help.js";
import { listenToDrops, mount as mountChoose } from "./newsession.js";
import { beside, fresh, strongestPatch, suggested, within } from "./opening.js";

/** @typedef {import("../source/source.js").Overview} Overview */
/** @typedef {import("../source/source.js").SessionLine} SessionLine */
/** @typedef {import("../source/source.js").Source} Source */
/** @typedef {import("../state.js").State} State */

const HASH_MS = 150; // a browser refuses an address that changes hundreds of times a minute
/**
 * Build the page inside an element. Returns a function that ends it.
 * @param {HTMLElement} element
 * @param {Source} source
 * @param {{hash?: boolean, lang?: string, view?: string}} [options]  hash: the page owns the address and the document's
 *   language.  view: the state to begin with where the address tells none, in the form of an address
 * @returns {() => void}
 */
export function start(element, source, options = {}) {
  const page = new Page(element, source, options);
  void page.begin();
  return () => page.end();
}

/** Is it dark around the page: by the notebook that shows it, JupyterLab or VS Code, else by the system? */
function darkAround() {
  const light = document.body.dataset.jpThemeLight;
  if (light !== undefined) return light === "false";
  if (document.body.matches(".vscode-dark, .vscode-light")) return document.body.matches(".vscode-dark");
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

class Page {
  /**
   * @param {HTMLElement} element
   * @param {Source} source
   * @param {{hash?: boolean, lang?: string, view?: string}} options
   */
  constructor(element, source, options) {
    this.element = element;
    this.source = source;
    this.owner = options.hash ?? false;
    const firstLang = options.lang === "ko" || options.lang === "en" ? options.lang : browserLanguage();
    const said = fromHash((this.owner && location.hash.slice(1)) || (options.view ?? ""));
    this.placed = saysPlace(said);
    /** What the page opens with: on narrow screens the drawer would cover the text. */
    this.opened = { lang: firstLang, drawer: !matchMedia("(max-width: 979px)").matches };
    this.store = createStore({ ...this.opened, ...said });
    this.measured = { first: new Measurements(this.store, source), second: new Measurements(otherSide(this.store), source) };
    /** @type {SessionLine[]} */
    this.sessions = [];
    /** @type {Overview | null} */
    this.overview = null;
    this.skip = make("button", { type: "button", class: "skip", onclick: () => this.#toHeads() });
    this.bar = make("header", { class: "top" });
    this.stage = make("main", { class: "stage", tabindex: -1 });
    this.drawer = make("div", { class: "drawer-body" });
    this.handle = make("button", {
      type: "button",
      class: "handle",
      "data-role": "drawer",
      onclick: () => this.store.set({ drawer: !this.store.get().drawer }),
    });
    this.sides = make("span", { class: "sides" });
    this.aside = make(
      "aside",
      { class: "drawer" },
      make("div", { class: "drawer-bar" }, this.handle, this.sides),
      this.drawer,
    );
    this.foot = make("footer", { class: "foot" });
    this.help = make("dialog", { class: "window help" });
    this.share = mountShare(element, this.store, source, this.owner);
    this.window = make("dialog", { class: "window choose" });
    /** @type {{destroy: () => void}[]} */
    this.panes = [];
    /** @type {{destroy: () => void} | undefined} */
    this.card = undefined;
    /** @type {(() => void)[]} */
    this.ends = [];
    /** @type {(() => void) | undefined} */
    this.endTour = undefined;
    element.classList.add("regard");
    fill(element, this.skip, this.bar, this.stage, this.aside, this.foot, this.help, this.window);
  }

  async begin() {
    this.ends.push(this.#watchTheme());
    this.ends.push(this.store.on((state, changed) => this.changed(state, changed)));
    this.ends.push(listenToKeys(this.owner ? document : this.element, this.#deeds()));
    for (const measured of Object.values(this.measured)) this.ends.push(measured.on(() => this.dressFoot()), () => measured.end());
    if (this.owner) this.ends.push(this.#watchAddress());
    if (this.source.can.look) this.ends.push(this.#watchDrops());
    this.dress();
    fill(this.stage, make("p", { class: "note" }, translate("Loading …", this.lang)));
    await this.find(this.store.get().session);
  }

  end() {
    this.clear();
    this.share.destroy();
    for (const end of this.ends) end();
    clearTimeout(this.timer);
    this.element.classList.remove("regard");
    fill(this.element);
  }

  get lang() {
    return this.store.get().lang;
  }

  /**
   * Ask what there is, and show one of it: the asked session, else the newest. An address that says where to look and
   * names no session means the newest; what it says of a session that is gone means nothing in another one. Where it does
   * not say where to look, the session's opening does.
   * @param {string | null} wanted
   * @param {Partial<State>} [also]  chosen with it
   */
  async find(wanted, also = {}) {
    try {
      this.sessions = await this.source.sessions();
      const known = this.sessions.some(({ id }) => id === wanted);
      const { compare } = this.store.get();
      if (compare && !this.sessions.some(({ id }) => id === compare.session)) this.store.set({ compare: null });
      if (this.sessions.length === 0) return this.showEmpty();
      const session = known ? wanted : this.sessions[this.sessions.length - 1].id;
      const meant = this.placed && (known || wanted === null);
      await this.show(/** @type {string} */ (session), !meant, also);
      if (meant) await this.suggest();
    } catch (error) {
      this.showError(error);
    }
  }

  /**
   * Show a session, with everything else as it was chosen as far as it is there.
   * @param {string} session
   * @param {boolean} anew
   * @param {Partial<State>} [also]
   */
  async show(session, anew, also = {}) {
    const overview = await this.source.overview(session);
    this.overview = overview;
    const state = { ...this.store.get(), ...also };
    const patch = anew ? { off: "", ...also, ...fresh(session), ...overview.opening } : { ...also, session };
    this.store.set({ ...patch, ...within({ ...state, ...patch }, overview) });
    if (this.panes.length === 0) this.build();
    this.dress();
    if (anew) await this.suggest();
    if (anew) await this.suggestPatch();
  }

  /** Choose a token where none is, so that nobody begins with nothing: that of the head's strongest link of words. */
  async suggest() {
    const { overview } = this;
    const { session, layer, head, token, lang } = this.store.get();
    if (overview === null || session === null || token !== null) return;
    const { links } = await this.source.head(session, layer, head, lang);
    const best = suggested(overview, layer, links);
    const now = this.store.get();
    if (best && now.session === session && now.token === null) this.store.set({ token: best.query, key: best.key });
  }

  /** Of an image, choose the patch that the token looks at most, where no key is chosen. */
  async suggestPatch() {
    const { overview } = this;
    const { session, layer, head, token, key } = this.store.get();
    const shown = overview?.layers[layer];
    if (!overview || session === null || token === null || key !== null || !shown?.layout || !shown.rows) return;
    const row = await this.source.row(session, layer, head, token, 0, shown.keys);
    const patch = strongestPatch(overview, layer, row.weights.data);
    const now = this.store.get();
    if (now.session === session && now.token === token && now.key === null) this.store.set({ key: patch });
  }

  build() {
    this.clear();
    this.element.dataset.state = "ready";
    const arrived = async () => void (this.sessions = await this.source.sessions());
    const stage = mountStage(this.stage, this.store, this.source, () => this.sessions, this.measured, arrived);
    this.redrawStage = stage.update;
    this.panes = [stage, { destroy: () => this.card?.destroy() }];
    this.mountCard("first");
  }

  /**
   * The drawer tells of one of two sessions.
   * @param {string} side
   */
  mountCard(side) {
    this.card?.destroy();
    this.side = side;
    const [store, measured] =
      side === "second" ? [otherSide(this.store), this.measured.second] : [this.store, this.measured.first];
    this.card = mountCard(this.drawer, store, this.source, measured);
  }

  clear() {
    this.endTour?.();
    for (const pane of this.panes) pane.destroy();
    this.panes = [];
    this.choosing = undefined;
    fill(this.stage);
    fill(this.drawer);
  }

  showEmpty() {
    this.clear();
    this.element.dataset.state = "empty";
    const place = make("div", { class: "choose-form" });
    fill(
      this.stage,
      make("section", { class: "welcome" }, make("h2", {}, translate("What shall be read?", this.lang)), place),
    );
    const alone = translate("This page carries its own data and reads no new texts. Run regard serve for that.", this.lang);
    if (!this.source.can.look) return fill(place, make("p", { class: "note" }, alone));
    this.choosing = mountChoose(place, this.store, this.source, (session, example) => void this.arrived(session, example));
    this.panes = [this.choosing];
    this.dress();
  }

  /** @param {unknown} error */
  showError(error) {
    this.clear();
    this.element.dataset.state = "error";
    const words = translate(
      "That did not work: {error}",
      this.lang,
      { error: error instanceof Error ? error.message : String(error) },
    );
    const again = make(
      "button",
      { type: "button", onclick: () => void this.find(this.store.get().session) },
      translate("Try again", this.lang),
    );
    fill(this.stage, make("section", { class: "welcome" }, make("p", { class: "error", role: "alert" }, words), again));
  }

  /**
   * A new session is there: as the first, or as the second while one is compared with it.
   * @param {string} session
   * @param {import("../opening/examples.js").Example | null} [example]  that it reads, to be shown in the state that shows it
   */
  async arrived(session, example = null) {
    const second = this.wantSecond === true;
    this.wantSecond = false;
    this.window.close();
    if (this.element.dataset.state !== "ready") this.clear();
    try {
      this.sessions = await this.source.sessions();
      if (second) await this.put(session);
      else await this.show(session, true);
      if (example && !second) this.store.set(await placeOf(example, this.source, session));
      this.redrawStage?.();
      this.dress();
    } catch (error) {
      this.showError(error);
    }
  }

  /** @param {boolean} second */
  openWindow(second) {
    if (!this.source.can.look) return;
    this.wantSecond = second;
    if (this.element.dataset.state === "empty") return this.choosing?.focus();
    const place = make("div", { class: "choose-form" });
    const close = make(
      "button",
      { type: "button", class: "quiet", onclick: () => this.window.close() },
      translate("Close", this.lang),
    );
    const title = make(
      "h2",
      { id: "choose-title" },
      translate(second ? message("Compare with") : message("What shall be read?"), this.lang),
    );
    fill(
      this.window,
      make("header", {}, title, close),
      second && this.sessions.length < 2 && make(
        "p",
        { class: "note" },
        translate("There is nothing to compare with yet: read a second text first.", this.lang),
      ),
      place,
    );
    this.window.setAttribute("aria-labelledby", "choose-title");
    const form = mountChoose(place, this.store, this.source, (session, example) => void this.arrived(session, example));
    this.choosing = form;
    this.window.addEventListener("close", () => (form.destroy(), (this.choosing = undefined)), { once: true });
    this.window.showModal();
    form.focus();
  }

  /** Compare with another session, or end that. */
  compare() {
    const { session, compare } = this.store.get();
    if (this.overview === null) return;
    if (compare !== null) return this.store.set({ compare: null });
    const other = [...this.sessions].reverse().find(({ id }) => id !== session);
    if (other) void this.put(other.id).catch((error) => this.showError(error));
    else this.openWindow(true);
  }

  /**
   * Put a session beside the one that is shown.
   * @param {string} session
   */
  async put(session) {
    const second = await this.source.overview(session);
    if (this.overview !== null) this.store.set(beside(this.store.get(), this.overview, second, session));
  }

  /**
   * @param {State} state
   * @param {Set<string>} changed
   */
  changed(state, changed) {
    const has = (/** @type {string[]} */ ...names) => names.some((name) => changed.has(name));
    if (has("session", "lang", "theme", "drawer") || compared(state) !== this.compared) this.dress();
    else if (has("layer", "head")) this.dressFoot();
    if (has("lang") && this.element.dataset.state === "empty") this.showEmpty();
    if (!this.owner) return;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => history.replaceState(null, "", `#${toHash(this.store.get(), this.opened)}`), HASH_MS);
  }

  /** What of the page follows the state: theme, words, bars. */
  dress() {
    const state = this.store.get();
    const { lang } = state;
    this.compared = compared(state);
    const dark = state.theme === "dark" || (state.theme === "auto" && darkAround());
    this.element.dataset.theme = dark ? "dark" : "light";
    this.element.setAttribute("lang", lang);
    this.element.classList.toggle("drawn", state.drawer && this.panes.length > 1);
    if (this.owner) {
      document.documentElement.lang = lang;
      document.title = translate("regard: what each head looks at", lang);
    }
    const [newText, compare, help] = [() => this.openWindow(false), () => this.compare(), () => this.openHelp()];
    const choose = (/** @type {string} */ session) =>
      void this.show(session, true).catch((error) => this.showError(error));
    drawHeader(this.bar, this.store, {
      sessions: this.sessions,
      overview: this.overview,
      canLook: this.source.can.look,
      choose,
      newText,
      compare,
      help,
      readKorean: (text) => (this.openWindow(false), void this.choosing?.read(text, "korean")),
      share: this.share.element,
    });
    this.handle.setAttribute("aria-expanded", String(state.drawer));
    fill(
      this.handle,
      make("span", { "aria-hidden": "true" }, state.drawer ? "▾" : "▴"),
      ` ${translate(state.drawer ? message("Hide head and steps") : message("Show head and steps"), lang)}`,
    );
    this.dressDrawer(state);
    fill(this.skip, translate("Skip to the heads", lang));
    this.dressFoot();
    if (this.help.open) this.openHelp();
  }

  /** What weights do not say; of a link that was measured, what it does. */
  dressFoot() {
    const { session, lang } = this.store.get();
    const missing = session === null ? null : (this.source.leftOut?.(session, lang) ?? null);
    const warning = translate("Weights say where a head reads from, not why the model answers as it does.", lang);
    const said = this.measured.first.sentence() ?? [warning];
    fill(
      this.foot,
      make("span", { class: "warning" }, ...said),
      missing && make("span", { class: "missing" }, missing),
      this.owner && this.source.can.look && this.panes.length > 0 && !isKnown() && this.#tourOffer(lang),
    );
  }

  /**
   * Offered on the page of a server until it was taken or declined; the help window has it at any time.
   * @param {State["lang"]} lang
   */
  #tourOffer(lang) {
    const decline = () => (remember(), this.dressFoot());
    const label = translate("Do not offer the tour again", lang);
    return make(
      "span",
      { class: "tour-offer" },
      make(
        "button",
        { type: "button", class: "quiet", "data-role": "tour", onclick: () => this.tour() },
        translate("New here? A tour in five steps", lang),
      ),
      make("button", { type: "button", class: "quiet", "aria-label": label, title: label, onclick: decline }, "✕"),
    );
  }

  /** Begin the tour; afterwards the focus is where it was. */
  tour() {
    if (this.panes.length === 0) return;
    this.help.close();
    this.endTour?.();
    const before = /** @type {HTMLElement | null} */ (focusedAround(this.element));
    remember();
    this.dressFoot();
    this.endTour = startTour(this.element, this.store, this.source, () => {
      this.endTour = undefined;
      (before?.isConnected ? before : this.stage).focus();
    });
  }

  /** @param {State} state */
  dressDrawer({ lang, compare }) {
    if (compare === null && this.side === "second") this.mountCard("first");
    const choices = [
      { value: "first", label: translate("First", lang) },
      { value: "second", label: translate("Second", lang) },
    ];
    const choose = (/** @type {string} */ side) => (this.mountCard(side), this.dress());
    fill(
      this.sides,
      compare !== null && segments(translate("Head and steps", lang), "side", choices, this.side ?? "first", choose),
    );
  }

  openHelp() {
    drawHelp(this.help, this.lang, this.panes.length > 0 ? () => this.tour() : null);
    if (!this.help.open) this.help.showModal();
  }

  /** @returns {import("./help.js").Deeds} */
  #deeds() {
    return {
      moveHead: (layers, heads) => this.#moveHead(layers, heads),
      moveToken: (tokens) => this.#moveToken(tokens),
      search: () => /** @type {HTMLElement | null} */ (this.element.querySelector("[data-role=search]"))?.focus(),
      newText: () => this.openWindow(false),
      compare: () => this.compare(),
      drawer: () => this.store.set({ drawer: !this.store.get().drawer }),
      help: () => this.openHelp(),
    };
  }

  /**
   * @param {number} layers
   * @param {number} heads
   */
  #moveHead(layers, heads) {
    if (this.overview === null) return;
    const { layer, head } = this.store.get();
    this.store.set(within({ ...this.store.get(), layer: layer + layers, head: head + heads }, this.overview));
  }

  /** @param {number} tokens */
  #moveToken(tokens) {
    const { layer, token } = this.store.get();
    const queries = this.overview?.layers[layer]?.queries ?? 0;
    if (queries === 0) return;
    this.store.set({ token: token === null ? 0 : Math.max(0, Math.min(queries - 1, token + tokens)), key: null });
  }

  #toHeads() {
    const cell = /** @type {HTMLElement | null} */ (this.element.querySelector(".atlas-body [tabindex='0']"));
    (cell ?? this.stage).focus();
  }

  #watchTheme() {
    const system = matchMedia("(prefers-color-scheme: dark)");
    const changed = () => {
      this.dress();
      this.redrawStage?.();
    };
    system.addEventListener("change", changed);
    const notebook = new MutationObserver(changed);
    if (!this.owner) notebook.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "class"] });
    return () => {
      system.removeEventListener("change", changed);
      notebook.disconnect();
    };
  }

  #watchAddress() {
    const changed = () => {
      const { lang, theme, session: now } = this.store.get();
      const said = fromHash(location.hash);
      this.placed = saysPlace(said);
      const { session, ...rest } = { ...FIRST, ...this.opened, lang, theme, session: now, ...said };
      if (session !== now || this.overview === null) return void this.find(session, rest);
      this.store.set({ ...rest, ...within({ ...rest, session }, this.overview) });
    };
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }

  #watchDrops() {
    const words = () => translate("Drop it to look at it", this.lang);
    return listenToDrops(this.element, words, (given) => {
      if (this.choosing === undefined) this.openWindow(false);
      this.choosing?.take(given);
    });
  }
}
