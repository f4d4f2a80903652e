// One session's three panes in a row (atlas, map, text or image), and two such rows when two sessions are compared: the
// same head of both, the second atlas coloured by its own numbers or by the difference.

import { mount as mountAtlas } from "../atlas/atlas.js";
import { mount as mountImage } from "../image/image.js";
import { mount as mountMap } from "../map/map.js";
import { fill, focusedAround, make } from "../shared/elements.js";
import { titleOf } from "../shared/labels.js";
import { translate } from "../shared/messages.js";
import { fresh } from "../shell/opening.js";
import { isAbort, latest } from "../source/source.js";
import { compared, otherSide } from "../state.js";
import { mount as mountText } from "../text/text.js";

/** @typedef {import("../effects/effects.js").Measurements} Measurements */
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
 * @returns {{update: () => void, destroy: () => void}}
 */
export function mount(element, store, source, sessions, measured) {
  const stage = new Stage(element, store, source, sessions, measured);
  const off = store.on((state, changed) => {
    const other = compared(state) !== stage.compared;
    if (other) stage.arrange();
    if (changed.has("session")) stage.second?.update(); // its colours may show the difference to the first
    if (other || changed.has("session") || changed.has("lang")) stage.drawBars(state);
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
   */
  constructor(element, store, source, sessions, measured) {
    this.element = element;
    this.store = store;
    this.source = source;
    this.sessions = sessions;
    this.measured = measured;
    this.bars = [make("div", { class: "side-bar" }), make("div", { class: "side-bar" })];
    this.first = side(store, source, "first", measured.first);
    /** @type {ReturnType<typeof side> | null} */
    this.second = null;
    fill(element, this.bars[0], this.first.element);
  }

  /** Two rows while two are compared, else one. */
  arrange() {
    this.compared = compared(this.store.get());
    const comparing = this.compared !== "";
    this.element.classList.toggle("comparing", comparing);
    if (comparing === (this.second !== null)) return;
    this.second?.destroy();
    this.second = comparing ? this.#secondSide() : null;
    fill(this.element, this.bars[0], this.first.element, this.bars[1], this.second?.element);
  }

  #secondSide() {
    return side(otherSide(this.store), this.source, "second", this.measured.second, () => this.#baseline());
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

  /** @param {State} state */
  drawBars({ lang, session, compare }) {
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
    this.first.destroy();
    this.second?.destroy();
    fill(this.element);
  }
}

/**
 * The three panes of one session.
 * @param {Store} store
 * @param {Source} source
 * @param {"first" | "second"} name
 * @param {Measurements} measured
 * @param {() => Promise<import("../source/source.js").Overview | null>} [baseline]
 */
function side(store, source, name, measured, baseline) {
  const [atlas, map, text] = ["atlas", "map", "text"].map((kind) =>
    make("section", { class: `pane ${kind}`, "data-pane": kind }),
  );
  const element = make("div", { class: "side", "data-side": name }, atlas, map, text);
  /** @type {Mounted[]} */
  const panes = [
    mountAtlas(atlas, store, source, measured, { baseline }),
    mountMap(map, store, source),
    mountRight(text, store, source, () => label()),
  ];
  const label = () => {
    const { lang } = store.get();
    const which = name === "second" ? `, ${translate("Second", lang)}` : "";
    atlas.setAttribute("aria-label", translate("Heads", lang) + which);
    map.setAttribute("aria-label", translate("Map", lang) + which);
    const right = text.classList.contains("pane-image") ? translate("Image", lang) : translate("Text", lang);
    text.setAttribute("aria-label", right + which);
  };
  label();
  const off = store.on((_, changed) => changed.has("lang") && label());
  const destroy = () => {
    off();
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
 * @param {() => void} changed  told when the one took the other's place
 * @returns {{update: () => void, destroy: () => void}}
 */
function mountRight(element, store, source, changed) {
  const next = latest();
  /** @type {{kind: string, pane: {update: () => void, destroy: () => void}} | null} */
  let shown = null;
  const show = (/** @type {"text" | "image"} */ kind) => {
    if (shown?.kind === kind) return;
    shown?.pane.destroy();
    shown = { kind, pane: (kind === "image" ? mountImage : mountText)(element, store, source) };
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
