// One session's three panes in a row, and two such rows when two sessions are compared: the same head of both, the second
// atlas coloured by its own numbers or by the difference. It does not know what the panes draw.

import { mount as mountAtlas } from "./atlas.js";
import { fill, focusedAround, make } from "./elements.js";
import { visibly } from "./labels.js";
import { mount as mountMap } from "./map.js";
import { mount as mountRight } from "./rightpane.js";
import { offerPictures } from "./saving.js";
import { compared, otherSide } from "./state.js";
import { say } from "./words.js";

/** @typedef {import("./source.js").SessionLine} SessionLine */
/** @typedef {import("./source.js").Source} Source */
/** @typedef {import("./state.js").State} State */
/** @typedef {import("./state.js").Store} Store */
/** @typedef {import("./measured.js").Measured} Measured */
/** @typedef {{first: Measured, second: Measured}} Sides */
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
      make("strong", {}, say(lang, "compare_first")),
      this.#choice(session, "compare_first", (id) => this.store.set(fresh(id))),
    );
    fill(
      second,
      make("strong", {}, say(lang, "compare_second")),
      this.#choice(compare.session, "compare_second", (id) =>
        this.store.set({ compare: { ...fresh(id), difference: compare.difference } }),
      ),
      make(
        "label",
        { class: "check" },
        make("input", { type: "checkbox", checked: compare.difference, onchange: change, "data-role": "difference" }),
        say(lang, "difference"),
      ),
      make(
        "button",
        { type: "button", class: "quiet", onclick: () => this.store.set({ compare: null }) },
        say(lang, "compare_end"),
      ),
    );
    if (role) /** @type {HTMLElement | null} */ (this.element.querySelector(`[data-role="${role}"]`))?.focus();
  }

  /**
   * @param {string | null} chosen
   * @param {"compare_first" | "compare_second"} word
   * @param {(session: string) => void} choose
   */
  #choice(chosen, word, choose) {
    const { lang } = this.store.get();
    return make(
      "select",
      {
        ...{ "aria-label": say(lang, word), "data-role": word },
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
 * @param {Measured} measured
 * @param {() => Promise<import("./source.js").Overview | null>} [baseline]
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
    const which = name === "second" ? `, ${say(lang, "compare_second")}` : "";
    atlas.setAttribute("aria-label", say(lang, "atlas") + which);
    map.setAttribute("aria-label", say(lang, "map") + which);
    text.setAttribute("aria-label", say(lang, text.classList.contains("pane-photo") ? "image" : "text") + which);
  };
  label();
  const offers = [
    offerPictures(atlas, "atlas", store),
    offerPictures(map, "map", store),
    offerPictures(text, "text", store),
  ];
  const off = store.on((_, changed) => changed.has("lang") && label());
  const destroy = () => {
    for (const end of [off, ...offers]) end();
    for (const pane of panes) pane.destroy();
    element.remove();
  };
  const update = () => panes.forEach((pane) => pane.update());
  return { element, update, destroy };
}

/**
 * A session that is newly looked at: nothing in it is chosen yet.
 * @param {string} session
 * @returns {{session: string, token: null, key: null, window: null, region: null}}
 */
export function fresh(session) {
  return { session, token: null, key: null, window: null, region: null };
}

/**
 * A second session beside the first, its drawer shut for room: the same token is chosen in it, where that is the same word.
 * @param {State} state
 * @param {import("./source.js").Overview} first
 * @param {import("./source.js").Overview} second
 * @param {string} session
 * @returns {Partial<State>}
 */
export function beside({ token, key }, first, second, session) {
  const alike = (/** @type {number | null} */ at) =>
    at !== null && at < second.length && first.labels[at] === second.labels[at];
  const both = alike(token) ? { token, key: alike(key) ? key : null } : {};
  return { compare: { ...fresh(session), ...both, difference: false }, drawer: false };
}

/**
 * A session in one line.
 * @param {SessionLine} line
 * @returns {string}
 */
export function titleOf({ id, name, text, image }) {
  const start = Array.from((text ?? "").replace(/\s+/g, " ").trim().slice(0, 200));
  const words = start.length > 60 ? `${start.slice(0, 59).join("")}…` : start.join("");
  const said = [image, words].filter(Boolean).join(", ");
  return visibly(said ? `${id}: ${said}` : `${id}: ${name}`);
}
