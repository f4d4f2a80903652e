// The drawer: the card of the chosen head (a sentence, numbers, patterns, strongest links), what the model predicts,
// what the chosen link does, and the steps of one query.

import { measureAbout, measureName } from "../atlas/heads.js";
import { mount as mountEffect } from "../effects/pane.js";
import { brokenOf } from "../map/plot.js";
import { mount as mountPredictions } from "../predictions/predictions.js";
import { fill, focusedAround, make } from "../shared/elements.js";
import { Naming, visibly } from "../shared/labels.js";
import { figure, message, translate } from "../shared/messages.js";
import { isAbort, latest } from "../source/source.js";
import { mount as mountSteps } from "../steps/steps.js";

/** @typedef {import("../source/source.js").HeadAnswer} HeadAnswer */
/** @typedef {import("../source/source.js").Source} Source */
/** @typedef {import("../state.js").State} State */
/** @typedef {import("../state.js").Store} Store */

const ALL_NAN = message(
  "Weights are NaN, all of this head: regard doctor says where NaN came from.",
);
const SOME_NAN = message(
  "Some weights of this head are NaN: regard doctor says where NaN came from.",
);
const NUMBERS = ["entropy", "effective", "max_weight", "received_max"];

/**
 * Build the drawer inside an element.
 * @param {HTMLElement} element
 * @param {Store} store
 * @param {Source} source
 * @param {import("../effects/effects.js").Measurements} measured
 * @returns {{update: () => void, destroy: () => void}}
 */
export function mount(element, store, source, measured) {
  const names = ["card", "predictions", "effect", "steps"];
  // All scroll by keyboard: two of them may hold nothing else that takes the focus.
  const focus = (/** @type {string} */ name) => (name === "card" || name === "effect" ? { tabindex: 0 } : {});
  const [left, predicted, middle, right] = names.map((name) => make("section", { class: name, ...focus(name) }));
  fill(element, left, predicted, middle, right);
  const card = new Card(left, store, source);
  const off = store.on((_, changed) => {
    if (changed.has("session")) card.clear(); // the words and numbers of another one
    if (["session", "layer", "head", "lang"].some((name) => changed.has(name))) void card.load();
    else if (changed.has("token") || changed.has("key")) card.draw();
  });
  const effect = mountEffect(middle, store, source, measured);
  const steps = mountSteps(right, store, source);
  const predictions = mountPredictions(predicted, store, source);
  void card.load();
  const destroy = () => {
    off();
    for (const pane of [effect, steps, predictions]) pane.destroy();
    fill(element);
  };
  return { update: () => void card.load(), destroy };
}

class Card {
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
    /** @type {HeadAnswer | null} */
    this.answer = null;
    /** @type {Naming | null} */
    this.naming = null;
  }

  /** Take away what stands there. */
  clear() {
    this.answer = null;
    fill(this.element, make("p", { class: "note" }, translate("Loading …", this.store.get().lang)));
  }

  async load() {
    const { session, layer, head, lang } = this.store.get();
    if (session === null) return;
    const signal = this.next();
    try {
      const overview = await this.source.overview(session);
      if (signal.aborted) return;
      if (this.naming?.overview !== overview)
        this.naming = new Naming(this.source, session, overview, () => this.draw());
      const answer = await this.source.head(session, layer, head, lang, signal);
      if (signal.aborted) return;
      this.answer = answer;
      this.draw();
    } catch (error) {
      if (isAbort(error) || signal.aborted) return;
      this.answer = null;
      const words = translate(
        "That did not work: {error}",
        lang,
        { error: String(/** @type {Error} */ (error).message) },
      );
      fill(this.element, make("p", { class: "note error", role: "alert" }, words));
    }
  }

  draw() {
    const { answer } = this;
    if (answer === null) return;
    const state = this.store.get();
    const focused = /** @type {HTMLElement | null} */ (focusedAround(this.element)?.closest(".links button"))?.dataset.link;
    const broken = brokenOf(answer.map.data);
    const label = answer.label ? measureName(answer.label, state.lang) : translate("no single pattern", state.lang);
    fill(
      this.element,
      make(
        "h2",
        {},
        translate("layer {layer}, head {head}", state.lang, { layer: answer.layer, head: answer.head }),
        " ",
        make("span", { class: broken ? "tag broken" : "tag" }, broken && !answer.label ? "NaN" : label),
      ),
      broken
        ? make("p", { class: "sentence error", role: "alert" }, translate(broken === "all" ? ALL_NAN : SOME_NAN, state.lang))
        : make("p", { class: "sentence" }, ...unbroken(visibly(answer.sentence))),
      this.numbers(state, answer),
      broken !== "all" && make("div", { class: "two" }, this.patterns(state, answer), this.links(state, answer)),
      make("p", { class: "path", title: answer.path }, answer.path),
    );
    if (focused !== undefined)
      /** @type {HTMLElement | null} */ (this.element.querySelector(`[data-link="${focused}"]`))?.focus();
  }

  /**
   * @param {State} state
   * @param {HeadAnswer} answer
   */
  numbers({ lang }, { numbers }) {
    const pairs = NUMBERS.filter((name) => typeof numbers[name] === "number").map((name) => {
      return make(
        "div",
        { title: measureAbout(name, lang) },
        make("dt", {}, measureName(name, lang)),
        make("dd", {}, figure(numbers[name])),
      );
    });
    return make("dl", { class: "numbers" }, ...pairs);
  }

  /**
   * @param {State} state
   * @param {HeadAnswer} answer
   */
  patterns({ lang }, { patterns, label }) {
    if (Object.keys(patterns).length === 0) return null;
    const order = Object.entries(patterns).sort(([, a], [, b]) => b - a);
    const lines = order.map(([name, score]) =>
      make(
        "li",
        { class: name === label ? "chosen" : "", title: measureAbout(name, lang) },
        make("span", { class: "name" }, measureName(name, lang)),
        make(
          "span",
          { class: "bar", "aria-hidden": "true" },
          make("i", { style: `width:${(100 * Math.min(1, score)).toFixed(1)}%` }),
        ),
        make("span", { class: "number" }, figure(score)),
      ),
    );
    return make("div", {}, make("h3", {}, translate("Patterns", lang)), make("ul", { class: "patterns" }, ...lines));
  }

  /**
   * @param {State} state
   * @param {HeadAnswer} answer
   */
  links({ lang, token, key }, { links, layer }) {
    const lines = links.map((link) => {
      const [query, looked] = [this.naming?.query(layer, link.query) ?? "", this.naming?.key(layer, link.key) ?? ""];
      const chosen = link.query === token && link.key === key;
      return make(
        "li",
        {},
        make(
          "button",
          {
            ...{ type: "button", "aria-pressed": chosen, "data-link": `${link.query}-${link.key}` },
            onclick: () => this.store.set({ token: link.query, key: link.key }),
          },
          make("bdi", { class: "called" }, query),
          make("span", { class: "unseen" }, ` ${translate("looks at:", lang)} `),
          make("span", { class: "to", "aria-hidden": "true" }, "→"),
          make("bdi", { class: "called" }, looked),
          make("span", { class: "number" }, figure(link.weight)),
        ),
      );
    });
    const body = lines.length
      ? make("ul", { class: "links" }, ...lines)
      : make("p", { class: "note" }, translate("No links are known.", lang));
    return make("div", {}, make("h3", {}, translate("Strongest links", lang)), body);
  }
}

/**
 * A sentence in which no line ends inside a formula.
 * @param {string} words
 */
function unbroken(words) {
  return words.split(/(\(1\/Σw²\))/).map((part, n) => (n % 2 ? make("span", { class: "formula" }, part) : part));
}
