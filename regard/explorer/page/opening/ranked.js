// The strongest links of the session over the panes: where to look first, each a button that shows its head, query and
// key.

import { effectIn, percent } from "../effects/effects.js";
import { fill, focusedAround, make } from "../shared/elements.js";
import { figure, translate } from "../shared/messages.js";
import { latest, outcome } from "../source/source.js";

/** @typedef {import("../source/source.js").RankedLink} RankedLink */
/** @typedef {import("../state.js").State} State */

/**
 * Build the list inside an element, which is hidden where there are no links.
 * @param {HTMLElement} element
 * @param {import("../state.js").Store} store
 * @param {import("../source/source.js").Source} source
 * @param {import("../effects/effects.js").Measurements} measured
 * @returns {{update: () => void, destroy: () => void}}
 */
export function mount(element, store, source, measured) {
  const list = new RankedLinks(element, store, source, measured);
  const ends = [
    store.on((_, changed) => {
      if (changed.has("session")) void list.load();
      else if (["layer", "head", "token", "key", "lang"].some((name) => changed.has(name))) list.draw();
    }),
    measured.on(() => list.draw()),
  ];
  void list.load();
  const destroy = () => {
    for (const end of ends) end();
    list.next();
    fill(element);
  };
  return { update: () => list.draw(), destroy };
}

class RankedLinks {
  /**
   * @param {HTMLElement} element
   * @param {import("../state.js").Store} store
   * @param {import("../source/source.js").Source} source
   * @param {import("../effects/effects.js").Measurements} measured
   */
  constructor(element, store, source, measured) {
    this.element = element;
    this.store = store;
    this.source = source;
    this.measured = measured;
    this.next = latest();
    /** @type {import("../source/source.js").Ranked | null} */
    this.answer = null;
    /** @type {Map<RankedLink, number>} */
    this.effects = new Map(); // measured since the answer came
    this.drawn = "";
    element.hidden = true;
  }

  async load() {
    const { session } = this.store.get();
    const signal = this.next();
    [this.answer, this.drawn] = [null, ""];
    this.effects.clear();
    if (session === null) return;
    const found = await outcome(this.source.ranked(session, signal), signal);
    if (!found) return;
    [this.answer] = found; // a capture without exact rows has none, and other panes say so
    this.draw();
  }

  draw() {
    const state = this.store.get();
    const links = this.answer?.links ?? [];
    this.element.hidden = links.length === 0;
    for (const link of links) {
      const effect = isAt(link, state) ? effectIn(this.measured.answer, link.layer, link.head) : null;
      if (effect) this.effects.set(link, effect.effect);
    }
    const at = links.findIndex((link) => isAt(link, state));
    const drawn = JSON.stringify([state.lang, at, links.map((link) => this.effects.get(link) ?? link.effect)]);
    if (drawn === this.drawn || links.length === 0) return;
    this.drawn = drawn;
    const focused = focusedAround(this.element)?.closest("[data-link]")?.getAttribute("data-link");
    const chips = links.map((link, n) => make("li", {}, this.#chip(link, n, n === at, state.lang)));
    fill(
      this.element,
      make("h2", {}, translate("Worth a look", state.lang)),
      make("ol", {}, ...chips),
      !this.answer?.complete && make("p", {}, translate("of some of its tokens, at even distances", state.lang)),
    );
    if (focused) /** @type {HTMLElement | null} */ (this.element.querySelector(`[data-link="${focused}"]`))?.focus();
  }

  /**
   * @param {RankedLink} link
   * @param {number} n
   * @param {boolean} chosen
   * @param {State["lang"]} lang
   */
  #chip(link, n, chosen, lang) {
    const { layer, head, query, key, weight, words } = link;
    const effect = this.effects.get(link) ?? link.effect;
    const alike = this.answer?.links.some((other) => other !== link && other.words.join(" ") === words.join(" "));
    const place = (/** @type {number} */ at) => alike && make("span", { class: "chip-head" }, String(at));
    return make(
      "button",
      {
        ...{ type: "button", class: "chip", "aria-pressed": chosen, "data-link": n, "data-weight": weight },
        onclick: () => this.store.set({ layer, head, token: query, key }),
      },
      make("bdi", { class: "chip-query" }, words[0]),
      place(query),
      make("span", { class: "unseen" }, ` ${translate("looks at:", lang)} `),
      make("span", { "aria-hidden": "true" }, "→"),
      make("bdi", { class: "chip-key" }, words[1]),
      place(key),
      make("b", {}, figure(weight)),
      make("span", { class: "chip-head", title: translate("layer {layer}, head {head}", lang, { layer, head }) }, `L${layer} H${head}`),
      effect !== null && make("span", { class: "chip-effect" }, translate("moves {effect}", lang, { effect: percent(effect) })),
    );
  }
}

/**
 * @param {RankedLink} link
 * @param {State} state
 */
function isAt(link, { layer, head, token, key }) {
  return link.layer === layer && link.head === head && link.query === token && link.key === key;
}
