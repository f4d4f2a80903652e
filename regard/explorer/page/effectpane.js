// What the chosen link does: its weight, how far the query's vector moves without it, random other keys beside that, and
// the same in all heads. Nothing is measured until somebody asks.

import { effectIn, meanSize, pValue, percent, pointsOf } from "./effects.js";
import { fill, focusedAround, make } from "./elements.js";
import { sayOfLink } from "./measured.js";
import { scatter } from "./scatter.js";
import { figure, say } from "./words.js";

/** @typedef {import("./measured.js").Measured} Measured */
/** @typedef {import("./source.js").Source} Source */
/** @typedef {import("./state.js").Store} Store */

/**
 * Build the pane inside an element.
 * @param {HTMLElement} element
 * @param {Store} store
 * @param {Source} source
 * @param {Measured} measured
 * @returns {{destroy: () => void}}
 */
export function mount(element, store, source, measured) {
  const pane = new EffectPane(element, store, source, measured);
  const off = store.on((_, changed) => {
    if (["session", "layer", "head", "token", "key", "lang", "theme"].some((name) => changed.has(name))) pane.draw();
  });
  const deaf = measured.on(() => pane.draw());
  pane.draw();
  void measured.load();
  const destroy = () => {
    off();
    deaf();
    fill(element);
  };
  return { destroy };
}

class EffectPane {
  /**
   * @param {HTMLElement} element
   * @param {Store} store
   * @param {Source} source
   * @param {Measured} measured
   */
  constructor(element, store, source, measured) {
    this.element = element;
    this.store = store;
    this.source = source;
    this.measured = measured;
  }

  draw() {
    const { lang, token, key, layer, head } = this.store.get();
    const { answer, naming } = this.measured;
    if (token === null || key === null || naming === null)
      return fill(
        this.element,
        make("h2", {}, say(lang, "effect_title")),
        (token === null || key === null) && make("p", { class: "note" }, say(lang, "effect_choose")),
      );
    const focus = /** @type {HTMLElement | null} */ (focusedAround(this.element));
    const role = focus && this.element.contains(focus) ? focus.dataset.role : undefined;
    const names = this.measured.names();
    const found = effectIn(answer, layer, head);
    const points = pointsOf(answer);
    const reason = this.source.can.measure ? (naming.overview.layers[layer]?.no_effects ?? null) : null;
    fill(
      this.element,
      make("h2", {}, ...sayOfLink(lang, "effect_of", names)),
      found && this.numbers(found),
      !found && this.source.can.measure && !reason && make("p", { class: "about" }, ...sayOfLink(lang, "effect_ask", names)),
      !found && reason && make("p", { class: "note" }, say(lang, `no_effects_${reason}`)),
      !found && !this.source.can.measure && answer && this.carried(),
      this.source.can.measure && !reason && answer && this.buttons(found?.p_value === undefined || found.p_value === null),
      points.length > 0 && scatter(points, { layer, head }, lang, (chosen) => this.store.set(chosen)),
      (found || points.length > 0) && make("p", { class: "about" }, say(lang, "effect_caveat")),
    );
    if (role) /** @type {HTMLElement | null} */ (this.element.querySelector(`[data-role="${role}"]`))?.focus();
  }

  /** @param {NonNullable<ReturnType<typeof effectIn>>} found */
  numbers({ weight, effect, controls, p_value }) {
    const { lang } = this.store.get();
    const control = { count: controls.length };
    const lines = [
      [say(lang, "effect_weight"), figure(weight), ""],
      [say(lang, "effect_moves"), percent(effect), say(lang, "effect_moves_about")],
      ...(p_value === null
        ? []
        : [
            [say(lang, "effect_control", control), percent(meanSize(controls)), say(lang, "effect_control_about")],
            [say(lang, "effect_p"), pValue(p_value), say(lang, "effect_p_about")],
          ]),
    ];
    const pairs = lines.map(([name, number, about]) =>
      make("div", { title: about }, make("dt", {}, name), make("dd", {}, number)),
    );
    return make("dl", { class: "numbers" }, ...pairs);
  }

  /**
   * What can be measured, or how far that is.
   * @param {boolean} missing  whether the chosen head was not measured beside random other keys
   */
  buttons(missing) {
    const { lang } = this.store.get();
    const { busy, progress, error, answer, naming } = this.measured;
    if (busy)
      return make(
        "div",
        { class: "progress", role: "status" },
        make("span", { class: "spinner", "aria-hidden": "true" }),
        make("span", {}, say(lang, "effect_running")),
        make("span", { class: "seconds" }, progress),
        make("button", { type: "button", "data-role": "effect-cancel", onclick: () => this.measured.cancel() }, say(lang, "cancel")),
      );
    const count = naming?.overview.layers.reduce((sum, { heads, no_effects }) => sum + (no_effects ? 0 : heads), 0) ?? 0;
    const button = (/** @type {string} */ role, /** @type {boolean} */ all, /** @type {string} */ words) =>
      make("button", { type: "button", "data-role": role, onclick: () => void this.measured.measure(all) }, words);
    return make(
      "div",
      { class: "line" },
      missing && button("effect-link", false, say(lang, "effect_link")),
      !answer?.heads && button("effect-heads", true, say(lang, "effect_heads", { count })),
      error && make("span", { class: "error", role: "alert" }, say(lang, "failed", { error })),
    );
  }

  /** What an exported page knows instead: the links that were measured before it was written. */
  carried() {
    const { lang, session } = this.store.get();
    const links = this.source.carried?.(session ?? "") ?? [];
    return make(
      "div",
      {},
      make("p", { class: "note" }, say(lang, "effect_none")),
      links.length > 0 && make("p", { class: "note" }, say(lang, "effect_carried")),
      make(
        "div",
        { class: "line" },
        ...links.map((link) => {
          const { token, key } = this.measured.names(link);
          const choose = () => this.store.set({ token: link.token, key: link.key });
          return make("button", { type: "button", onclick: choose }, make("bdi", {}, token), " → ", make("bdi", {}, key));
        }),
      ),
    );
  }
}
