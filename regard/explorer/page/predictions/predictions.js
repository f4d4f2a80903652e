// What the model predicts: the next token, words at mask tokens, or labels, as bars with a temperature; and how that
// changes when heads are switched off.

import { fill, focusedAround, make, segments } from "../shared/elements.js";
import { visibly } from "../shared/labels.js";
import { digits, message, translate } from "../shared/messages.js";
import { latest, outcome } from "../source/source.js";

/** @typedef {import("../source/source.js").Overview} Overview */
/** @typedef {import("../source/source.js").Predicted} Predicted */
/** @typedef {import("../source/source.js").Prediction} Prediction */
/** @typedef {import("../source/source.js").Predictions} Predictions */
/** @typedef {import("../source/source.js").Source} Source */
/** @typedef {import("../state.js").State} State */
/** @typedef {import("../state.js").Store} Store */

const TOP = 10;
/** @type {Record<string, string>} */
const REASONS = {
  no_model: message("What the model predicts is not known here: a capture alone has no model to run."),
  no_head: message("This model has no head that predicts words or labels."),
  no_mask: message("This model fills in masked words: put [MASK] into the text to see its predictions."),
  too_long: message("The prediction is not in this file: the text is too long."),
};

/**
 * Build the pane inside an element.
 * @param {HTMLElement} element
 * @param {Store} store
 * @param {Source} source
 * @returns {{update: () => void, destroy: () => void}}
 */
export function mount(element, store, source) {
  const pane = new PredictionsPane(element, store, source);
  const off = store.on((_, changed) => {
    if (["session", "off", "drawer"].some((name) => changed.has(name))) void pane.load();
    else if (["layer", "head", "lang", "token"].some((name) => changed.has(name))) pane.draw();
  });
  void pane.load();
  const destroy = () => {
    off();
    pane.next();
    fill(element);
  };
  return { update: () => void pane.load(), destroy };
}

/**
 * The heads that a state switches off, those that a session has.
 * @param {string} off  "3.1,5.11"
 * @param {Overview} overview
 * @returns {[number, number][]}
 */
export function headsOff(off, { layers }) {
  const pairs = off.split(",").filter(Boolean).map((place) => /** @type {[number, number]} */ (place.split(".").map(Number)));
  return pairs.filter(([layer, head]) => head < (layers[layer]?.heads ?? 0));
}

/**
 * The exact probability of a logit at one of the answer's temperatures; null for a regression.
 * @param {number} logit
 * @param {Prediction} one
 * @param {Predicted} place
 * @param {number[]} temperatures
 * @param {number} n  which of them
 */
export function probability(logit, { probability: known }, { lse }, temperatures, n) {
  if (known === null) return null;
  return lse === null ? 1 / (1 + Math.exp(-logit)) : Math.exp(logit / temperatures[n] - lse[n]);
}

class PredictionsPane {
  /**
   * @param {HTMLElement} element
   * @param {Store} store
   * @param {Source} source
   */
  constructor(element, store, source) {
    this.element = element;
    this.store = store;
    this.source = source;
    this.next = latest();
    /** @type {Overview | null} */
    this.overview = null;
    /** @type {Predictions | null} */
    this.before = null; // with all heads on
    /** @type {Predictions | null} */
    this.answer = null;
    this.error = "";
    this.temperature = 1;
    this.place = 0;
  }

  async load() {
    const { session, off, lang, drawer } = this.store.get();
    if (session === null || !drawer) return; // a prediction runs the model
    const signal = this.next();
    if (session !== this.session) {
      [this.session, this.overview, this.before, this.answer, this.place] = [session, null, null, null, 0];
      fill(this.element, make("p", { class: "note" }, translate("Loading …", lang)));
    }
    this.element.setAttribute("aria-busy", "true");
    const found = await outcome(this.#ask(session, off, signal), signal);
    if (!found) return;
    const [answers, error] = found;
    this.error = error;
    if (answers) ({ overview: this.overview, before: this.before, answer: this.answer } = answers);
    this.element.setAttribute("aria-busy", "false");
    this.draw();
  }

  /**
   * @param {string} session
   * @param {string} off
   * @param {AbortSignal} signal
   */
  async #ask(session, off, signal) {
    const overview = await this.source.overview(session, signal);
    const before = await this.source.predictions(session, [], signal);
    const heads = this.source.can.switch ? headsOff(off, overview) : [];
    const answer = heads.length > 0 && before?.places.length ? await this.source.predictions(session, heads, signal) : before;
    return { overview, before, answer };
  }

  draw() {
    const { overview, answer, before, error } = this;
    const { lang } = this.store.get();
    const places = answer?.places ?? [];
    const focus = focusedAround(this.element);
    const role = this.element.contains(focus) ? focus?.getAttribute("data-role") : null;
    this.element.classList.toggle("none", places.length === 0 && !error);
    if (error) {
      const words = translate("That did not work: {error}", lang, { error });
      fill(this.element, this.#title(lang), this.#heads(), make("p", { class: "error", role: "alert" }, words));
    } else if (places.length === 0 || overview === null || answer === null || before === null) {
      fill(this.element, make("p", { class: "note" }, translate(REASONS[before === null ? "too_long" : (answer?.reason ?? "no_head")], lang)));
    } else {
      const at = Math.min(this.place, places.length - 1);
      fill(
        this.element,
        this.#title(lang),
        this.#places(answer, at),
        this.#heads(),
        places[at].lse && this.#slider(answer.temperatures),
        this.#bars(answer, at, before.places[at]),
        answer !== before && make("p", { class: "about" }, translate("The tick on a bar, and the first number, are with all heads on, as in the other panes.", lang)),
      );
    }
    if (role) /** @type {HTMLElement | null} */ (this.element.querySelector(`[data-role="${role}"]`))?.focus();
  }

  /** @param {State["lang"]} lang */
  #title(lang) {
    return make("h2", {}, translate("What it predicts", lang));
  }

  /**
   * What is predicted, and a choice where several places are.
   * @param {Predictions} answer
   * @param {number} at
   */
  #places({ kind, places }, at) {
    const { lang } = this.store.get();
    const [{ token }] = places;
    if (kind === "labels") return make("p", { class: "about" }, translate("Labels of the whole input", lang));
    if (kind === "next_token")
      return make("p", { class: "about" }, token === null
        ? translate("The first token that the model writes", lang)
        : translate("The token after the last one of the text", lang));
    const one = translate("Words for the mask at token {token}", lang, { token: places[at].token ?? 0 });
    if (places.length === 1) return make("p", { class: "about" }, one);
    const choices = places.map((place, n) => ({ value: String(n), label: String(place.token) }));
    const choose = (/** @type {string} */ value) => {
      this.place = Number(value);
      this.draw();
    };
    return make("div", { class: "about" }, one, " ", segments(translate("Mask", lang), "mask", choices, String(at), choose));
  }

  /** @param {number[]} temperatures  the exact ones: the slider has no others */
  #slider(temperatures) {
    const { lang } = this.store.get();
    const n = this.#temperature(temperatures);
    const value = make("output", {}, temperatures[n].toFixed(1));
    const slider = make("input", {
      ...{ type: "range", min: 0, max: temperatures.length - 1, step: 1, value: n, "data-role": "temperature" },
      "aria-valuetext": temperatures[n].toFixed(1),
      oninput: () => {
        this.temperature = temperatures[Number(slider.value)];
        const place = this.answer?.places[this.place];
        if (!this.answer || !place) return;
        value.textContent = this.temperature.toFixed(1);
        slider.setAttribute("aria-valuetext", this.temperature.toFixed(1));
        const list = this.element.querySelector(".predicted");
        list?.replaceWith(this.#bars(this.answer, this.place, this.before?.places[this.place] ?? place));
      },
    });
    return make("label", { class: "temperature" }, translate("temperature", lang), slider, value);
  }

  /** @param {number[]} temperatures */
  #temperature(temperatures) {
    const n = temperatures.indexOf(this.temperature);
    return n < 0 ? temperatures.indexOf(1) : n;
  }

  /**
   * @param {Predictions} answer
   * @param {number} at
   * @param {Predicted} old  the same place with all heads on
   */
  #bars({ places, temperatures }, at, old) {
    const { lang } = this.store.get();
    const place = places[at];
    const n = this.#temperature(temperatures);
    const chances = place.top.map((one) => ({
      now: probability(one.logit, one, place, temperatures, n),
      then: one.before === null ? null : probability(one.before, one, old, temperatures, n),
    }));
    const most = Math.max(1e-12, ...chances.flatMap(({ now, then }) => [now ?? 0, then ?? 0])); // a full bar
    const lines = place.top.map((one, order) => {
      const { now, then } = chances[order];
      const bar = make("span", { class: "bar", "aria-hidden": "true" }, make("i", { style: `width:${(100 * (now ?? 0)) / most}%` }));
      if (then !== null) bar.append(make("b", { style: `left:${(100 * then) / most}%` }));
      const values = { "data-id": one.id, "data-probability": now ?? one.logit, "data-before": then ?? one.before };
      return make(
        "li",
        { class: order === TOP ? "lost" : "", ...values },
        make("bdi", { class: "called", title: one.label }, shownLabel(one.label)),
        now !== null && bar,
        make("span", { class: "number" }, ...this.#change(now ?? one.logit, then ?? one.before, lang)),
      );
    });
    return make("ol", { class: place.top.some(({ before }) => before !== null) ? "predicted changed" : "predicted" }, ...lines);
  }

  /**
   * @param {number} now
   * @param {number | null} then
   * @param {State["lang"]} lang
   */
  #change(now, then, lang) {
    if (then === null) return [chance(now)];
    const arrow = make("span", { class: now > then ? "rise" : "fall", "aria-hidden": "true" }, now > then ? "▲" : "▼");
    return [
      make("span", { class: "was" }, chance(then)),
      make("span", { class: "unseen" }, ` ${translate("then", lang)} `),
      make("span", { "aria-hidden": "true" }, " → "),
      chance(now),
      Math.abs(now - then) >= 0.0005 ? arrow : make("span", { class: "same" }),
    ];
  }

  /** The switch of the chosen head, and the heads that are off. */
  #heads() {
    const { layer, head, off, lang } = this.store.get();
    if (!this.overview) return null;
    if (!this.source.can.switch)
      return make("p", { class: "about" }, translate("Heads can be switched off where the model runs: open the text with regard serve.", lang));
    if (this.overview.layers.some(({ call }) => call !== null && call !== undefined))
      return make("p", { class: "about" }, translate("Its heads cannot be switched off one by one: the model runs one layer several times.", lang));
    const heads = headsOff(off, this.overview);
    const set = (/** @type {[number, number][]} */ next) => this.store.set({ off: next.map((place) => place.join(".")).join(",") });
    const without = (/** @type {[number, number]} */ [l, h]) => heads.filter((place) => place[0] !== l || place[1] !== h);
    const name = translate("L{layer} H{head}", lang, { layer, head });
    const isOff = without([layer, head]).length < heads.length;
    const chips = heads.map(([l, h]) => {
      const called = translate("L{layer} H{head}", lang, { layer: l, head: h });
      const label = translate("Switch {head} on again", lang, { head: called });
      return make(
        "li",
        {},
        make("button", { type: "button", class: "chip", "data-off": `${l}.${h}`, "aria-label": label, title: label, onclick: () => set(without([l, h])) }, called, " ✕"),
      );
    });
    return make(
      "div",
      { class: "switches" },
      make(
        "button",
        {
          ...{ type: "button", "data-role": "switch", "aria-pressed": isOff },
          onclick: () => set(isOff ? without([layer, head]) : [...heads, [layer, head]]),
        },
        translate(isOff ? message("Switch {head} on again") : message("Switch {head} off"), lang, { head: name }),
      ),
      chips.length > 0 && make("span", { class: "off-title" }, translate("off:", lang)),
      chips.length > 0 && make("ul", { class: "chips" }, ...chips),
    );
  }
}

/**
 * A probability in three digits after the point.
 * @param {number} value
 */
function chance(value) {
  return value >= 0.0005 || value < 0 ? value.toFixed(3).replace("-", "−") : digits(value);
}

/**
 * A token as it is, with a mark for the space before it.
 * @param {string} label
 */
function shownLabel(label) {
  return visibly(label.replace(/^[▁Ġ ]+/, "␣").replace(/[\r\n]/g, "↵").replace(/\t/g, "⇥"));
}
