// One session's three panes in a row (atlas, map, text or image), and two such rows when two sessions are compared: the
// same head of both, the second row coloured by its own numbers or by the difference, and the heads that changed most.

import { mount as mountAtlas } from "../atlas/atlas.js";
import { mount as mountImage } from "../image/image.js";
import { mount as mountMap } from "../map/map.js";
import { mount as mountRanked } from "../opening/ranked.js";
import { fill, focusedAround, make } from "../shared/elements.js";
import { titleOf } from "../shared/labels.js";
import { digits, figure, translate } from "../shared/messages.js";
import { fresh } from "../shell/opening.js";
import { isAbort, latest } from "../source/source.js";
import { compared, otherSide } from "../state.js";
import { mount as mountText } from "../text/text.js";
import { align, subtracting } from "./difference.js";
import { offerSwap } from "./swap.js";

/** @typedef {import("../effects/effects.js").Measurements} Measurements */
/** @typedef {import("../source/source.js").Layer} Layer */
/** @typedef {import("../source/source.js").Overview} Overview */
/** @typedef {import("../source/source.js").SessionLine} SessionLine */
/** @typedef {import("../source/source.js").Source} Source */
/** @typedef {import("../state.js").State} State */
/** @typedef {import("../state.js").Store} Store */

/** @typedef {{first: Measurements, second: Measurements}} Sides */
/** @typedef {{update: () => void, destroy: () => void}} Mounted */

/**
 * Build the stage inside an element: one row of panes, or two. `sessions` gives what can be chosen.
 * @param {HTMLElement} element
 * @param {Store} store
 * @param {Source} source
 * @param {() => SessionLine[]} sessions
 * @param {Sides} measured
 * @param {() => Promise<void>} arrived  told that there is a new session
 * @returns {{update: () => void, destroy: () => void}}
 */
export function mount(element, store, source, sessions, measured, arrived) {
  const stage = new Stage(element, store, source, sessions, measured, arrived);
  const off = store.on((state, changed) => {
    const other = compared(state) !== stage.compared;
    if (other || changed.has("session")) stage.arrange(changed.has("session")); // to which the second is compared
    if (other || changed.has("session") || changed.has("lang")) stage.drawBars(state);
    else if (changed.has("layer") || changed.has("head")) stage.markChanges(state);
  });
  stage.arrange();
  stage.drawBars(store.get());
  const destroy = () => {
    off();
    stage.destroy();
  };
  return { update: () => stage.update(), destroy };
}

class Stage {
  /**
   * @param {HTMLElement} element
   * @param {Store} store
   * @param {Source} source
   * @param {() => SessionLine[]} sessions
   * @param {Sides} measured
   * @param {() => Promise<void>} arrived
   */
  constructor(element, store, source, sessions, measured, arrived) {
    this.element = element;
    this.store = store;
    this.source = source;
    this.sessions = sessions;
    this.measured = measured;
    this.bars = [make("div", { class: "side-bar" }), make("div", { class: "side-bar" })];
    this.changes = make("div", { class: "changes" });
    this.next = latest();
    this.first = side(store, source, "first", measured.first, {
      swapped: async (session) => {
        await arrived();
        await this.#compareSwapped(session);
      },
    });
    /** @type {ReturnType<typeof side> | null} */
    this.second = null;
    this.subtracted = false;
    fill(element, this.bars[0], this.first.element);
  }

  /**
   * Two rows while two are compared, else one.
   * @param {boolean} [anew]  the first is another one: differences to it are too
   */
  arrange(anew = false) {
    this.compared = compared(this.store.get());
    const comparing = this.compared !== "";
    this.element.classList.toggle("comparing", comparing);
    const subtracted = this.store.get().compare?.difference ?? false;
    if (comparing === (this.second !== null) && subtracted === this.subtracted && !(anew && subtracted)) return;
    this.subtracted = subtracted;
    this.second?.destroy();
    this.second = comparing ? this.#secondSide() : null;
    fill(this.element, this.bars[0], this.first.element, this.bars[1], this.changes, this.second?.element);
  }

  #secondSide() {
    const [first, lang] = [() => this.store.get().session, () => this.store.get().lang];
    const weights = this.subtracted ? subtracting(this.source, first, lang) : this.source;
    const baseline = () => this.#baseline();
    return side(otherSide(this.store), this.source, "second", this.measured.second, { baseline, weights });
  }

  /**
   * Both texts side by side, by their differences, at the head that changed most.
   * @param {string} session
   */
  async #compareSwapped(session) {
    const first = this.store.get().session;
    const [top] = first === null || !this.source.changes ? [] : (await this.source.changes(first, session)).heads;
    if (this.store.get().session !== first) return;
    this.store.set({ ...(top ? lookingAt(top, session) : { compare: { ...fresh(session), difference: true } }), drawer: false });
    this.element.scrollTop = 0; // on a narrow screen the list of heads is there
  }

  /** Draw everything anew: sessions came, or light changed to dark. */
  update() {
    this.first.update();
    this.second?.update();
    this.drawBars(this.store.get());
  }

  /** What the second atlas is compared with, while its colours show the difference. */
  async #baseline() {
    const { session, compare } = this.store.get();
    return compare?.difference && session !== null ? this.source.overview(session) : null;
  }

  /** The heads that changed most, and which tokens are compared. */
  async drawChanges() {
    const { lang, session, compare } = this.store.get();
    const signal = this.next();
    fill(this.changes);
    if (compare === null || session === null) return;
    try {
      const [first, second] = await Promise.all([session, compare.session].map((id) => this.source.overview(id, signal)));
      const ranked = comparable(first, second) ? await this.source.changes?.(session, compare.session, signal) : undefined;
      if (signal.aborted) return;
      fill(this.changes, ...(ranked ? this.#ranking(ranked, compare.session) : []), alignmentNote(align(first, second), lang));
      this.markChanges(this.store.get());
    } catch (error) {
      if (!isAbort(error)) fill(this.changes); // the panes say what is wrong
    }
  }

  /**
   * @param {import("../source/source.js").Changes} ranked
   * @param {string} second
   */
  #ranking({ heads, complete }, second) {
    const { lang } = this.store.get();
    const chips = heads.map((change) => {
      const { layer, head, moved, words, before, after } = change;
      const [query, key] = words.map((pair) => [...new Set(pair)].join(" / "));
      const link = translate("{query} → {key}: {before}, then {after}", lang, { query, key, before: digits(before), after: digits(after) });
      return make(
        "li",
        {},
        make(
          "button",
          {
            ...{ type: "button", class: "chip", title: link, "data-head": `${layer}.${head}`, "data-moved": moved },
            onclick: () => this.store.set(lookingAt(change, second)),
          },
          translate("L{layer} H{head}", lang, { layer, head }),
          " ",
          make("b", {}, figure(moved)),
        ),
      );
    });
    const about = translate("The share of a head's attention that goes elsewhere in the second text.", lang);
    return [
      make("span", { title: about }, translate("Heads that changed most:", lang)),
      make("ol", {}, ...chips),
      !complete && make("span", { class: "about" }, translate("of some rows: the texts are long", lang)),
    ];
  }

  /** @param {State} state */
  markChanges({ layer, head }) {
    for (const chip of this.changes.querySelectorAll("[data-head]"))
      chip.setAttribute("aria-pressed", String(chip.getAttribute("data-head") === `${layer}.${head}`));
  }

  /** @param {State} state */
  drawBars({ lang, session, compare }) {
    void this.drawChanges();
    if (compare === null) return;
    const change = () => this.store.set({ compare: { ...compare, difference: !compare.difference } });
    const [first, second] = this.bars;
    const focus = focusedAround(this.element);
    const role = this.bars.some((bar) => bar.contains(focus)) ? focus?.getAttribute("data-role") : null;
    fill(
      first,
      make("strong", {}, translate("First", lang)),
      this.#choice(session, "first", (id) => this.store.set(fresh(id))),
    );
    fill(
      second,
      make("strong", {}, translate("Second", lang)),
      this.#choice(compare.session, "second", (id) =>
        this.store.set({ compare: { ...fresh(id), difference: compare.difference } }),
      ),
      make(
        "label",
        { class: "check" },
        make("input", { type: "checkbox", checked: compare.difference, onchange: change, "data-role": "difference" }),
        translate("Colour by difference (second − first)", lang),
      ),
      make(
        "button",
        { type: "button", class: "quiet", onclick: () => this.store.set({ compare: null }) },
        translate("End comparison", lang),
      ),
    );
    if (role) /** @type {HTMLElement | null} */ (this.element.querySelector(`[data-role="${role}"]`))?.focus();
  }

  /**
   * @param {string | null} chosen
   * @param {"first" | "second"} side
   * @param {(session: string) => void} choose
   */
  #choice(chosen, side, choose) {
    const { lang } = this.store.get();
    return make(
      "select",
      {
        ...{ "aria-label": side === "first" ? translate("First", lang) : translate("Second", lang) },
        "data-role": `compare_${side}`,
        onchange: (/** @type {Event} */ event) => choose(/** @type {HTMLSelectElement} */ (event.target).value),
      },
      ...this.sessions().map((line) => make("option", { value: line.id, selected: line.id === chosen }, titleOf(line))),
    );
  }

  destroy() {
    this.next();
    this.first.destroy();
    this.second?.destroy();
    fill(this.element);
  }
}

/**
 * The state that shows a head of two sessions at the link that changed most.
 * @param {import("../source/source.js").HeadChange} change
 * @param {string} second
 * @returns {Partial<State>}
 */
function lookingAt({ layer, head, query, key }, second) {
  const compare = { ...fresh(second), difference: true, token: query[1], key: key[1] };
  return { layer, head, token: query[0], key: key[0], window: null, region: null, compare };
}

/**
 * Can the heads of two sessions be ranked by how they changed? That takes exact rows of tokens in layers that are the same.
 * @param {Overview} first
 * @param {Overview} second
 */
function comparable(first, second) {
  const own = (/** @type {Overview} */ { length }, /** @type {Layer | undefined} */ layer) =>
    layer?.rows && (layer.windows ?? 1) === 1 && layer.first === 0 && layer.queries === length && layer.keys === length;
  return first.layers.some((layer, n) => {
    const other = second.layers[n];
    return own(first, layer) && own(second, other) && layer.path === other.path && layer.heads === other.heads;
  });
}

/**
 * Which tokens are compared, where not all are.
 * @param {import("./difference.js").Alignment | null} alignment
 * @param {State["lang"]} lang
 */
function alignmentNote(alignment, lang) {
  if (alignment === null)
    return make("span", { class: "about" }, translate("The texts are long and of different lengths: differences cannot be shown word by word.", lang));
  const { counts: [first, second], before, after } = alignment;
  if (first === second) return null;
  const said = translate("{first} and {second} tokens: the first {before} and the last {after} are compared; those between are left out.", lang, { first, second, before, after });
  return make("span", { class: "about" }, said);
}

/**
 * The three panes of one session.
 * @param {Store} store
 * @param {Source} source
 * @param {"first" | "second"} name
 * @param {Measurements} measured
 * @param {{baseline?: () => Promise<Overview | null>, weights?: Source, swapped?: (session: string) => Promise<void>}} options
 *   weights: where map and words come from, if not from the source.  swapped: told when a word was swapped
 */
function side(store, source, name, measured, { baseline, weights = source, swapped }) {
  const [atlas, map, text] = ["atlas", "map", "text"].map((kind) =>
    make("section", { class: `pane ${kind}`, "data-pane": kind }),
  );
  const ranked = make("section", { class: "ranked" });
  const element = make("div", { class: "side", "data-side": name }, ranked, atlas, map, text);
  /** @type {Mounted[]} */
  const panes = [
    mountRanked(ranked, store, source, measured),
    mountAtlas(atlas, store, source, measured, { baseline }),
    mountMap(map, store, weights),
    mountRight(text, store, source, weights, () => label()),
  ];
  const label = () => {
    const { lang } = store.get();
    const which = name === "second" ? `, ${translate("Second", lang)}` : "";
    ranked.setAttribute("aria-label", translate("Worth a look", lang) + which);
    atlas.setAttribute("aria-label", translate("Heads", lang) + which);
    map.setAttribute("aria-label", translate("Map", lang) + which);
    const right = text.classList.contains("pane-image") ? translate("Image", lang) : translate("Text", lang);
    text.setAttribute("aria-label", right + which);
  };
  label();
  const offers = swapped ? [offerSwap(text, store, source, swapped)] : [];
  const off = store.on((_, changed) => changed.has("lang") && label());
  const destroy = () => {
    for (const end of [off, ...offers]) end();
    for (const pane of panes) pane.destroy();
    element.remove();
  };
  const update = () => panes.forEach((pane) => pane.update());
  return { element, update, destroy };
}

// ------------------------------------------------ the pane at the right: words, or the image of a session that has one

/**
 * Build the pane inside an element.
 * @param {HTMLElement} element
 * @param {import("../state.js").Store} store
 * @param {import("../source/source.js").Source} source
 * @param {import("../source/source.js").Source} weights  of words
 * @param {() => void} changed  told when the one took the other's place
 * @returns {{update: () => void, destroy: () => void}}
 */
function mountRight(element, store, source, weights, changed) {
  const next = latest();
  /** @type {{kind: string, pane: {update: () => void, destroy: () => void}} | null} */
  let shown = null;
  const show = (/** @type {"text" | "image"} */ kind) => {
    if (shown?.kind === kind) return;
    const menus = [...element.children].filter((child) => child.matches("[data-saving=skip]"));
    shown?.pane.destroy();
    shown = { kind, pane: kind === "image" ? mountImage(element, store, source) : mountText(element, store, weights) };
    element.append(...menus);
    changed();
  };
  const choose = async () => {
    const { session } = store.get();
    const signal = next();
    if (session === null) return show("text");
    try {
      const overview = await source.overview(session, signal);
      if (!signal.aborted) show((overview.images ?? []).length > 0 ? "image" : "text");
    } catch (error) {
      if (!isAbort(error)) show("text"); // which says what is wrong
    }
  };
  const off = store.on((_, changed) => changed.has("session") && void choose());
  void choose();
  const destroy = () => {
    off();
    next();
    shown?.pane.destroy();
  };
  return { update: () => shown?.pane.update(), destroy };
}
