// The steps of one query token with real numbers: q·k for each key, ÷√d, softmax, Σ w·v, and q⊙k for one pair.
// It does not know how the token was chosen.

import { list } from "./arrays.js";
import { bars } from "./bars.js";
import { fill, focusedAround, make } from "./elements.js";
import { NotCarried } from "./embedded.js";
import { Naming } from "./naming.js";
import { isAbort, latest } from "./source.js";
import { figure, say, sayAround } from "./words.js";

/** @typedef {import("./source.js").Source} Source */
/** @typedef {import("./source.js").Steps} Steps */
/** @typedef {import("./state.js").State} State */
/** @typedef {import("./state.js").Store} Store */

const FEW = 8; // keys that are shown at first
const REST_MS = 90; // a pointer that runs over words asks only where it rests

/**
 * Build the steps inside an element.
 * @param {HTMLElement} element
 * @param {Store} store
 * @param {Source} source
 * @returns {{update: () => void, destroy: () => void}}
 */
export function mount(element, store, source) {
  const pane = new StepsPane(element, store, source);
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let timer;
  const off = store.on((_, changed) => {
    if (!["session", "layer", "head", "token", "key", "lang"].some((name) => changed.has(name))) return;
    if (changed.has("session")) pane.clear(); // the words and numbers of another one
    clearTimeout(timer);
    timer = setTimeout(() => void pane.load(), REST_MS);
  });
  void pane.load();
  const destroy = () => {
    off();
    clearTimeout(timer);
    fill(element);
  };
  return { update: () => void pane.load(), destroy };
}

class StepsPane {
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
    this.all = false;
    /** @type {Steps | null} */
    this.answer = null;
    this.drawn = false;
    /** @type {Naming | null} */
    this.naming = null;
  }

  /** Take away what stands there, and hear no answer to what was asked before. */
  clear() {
    this.next();
    this.answer = null;
    this.note(say(this.store.get().lang, "loading"));
  }

  async load() {
    const { session, layer, head, token, lang } = this.store.get();
    if (session === null) return;
    const signal = this.next();
    try {
      const overview = await this.source.overview(session);
      if (signal.aborted) return;
      if (this.naming?.overview !== overview)
        this.naming = new Naming(this.source, session, overview, () => this.draw());
      const found = overview.layers[layer];
      this.answer = null;
      if (!(found?.rows ?? overview.rows)) return this.note(say(lang, "no_rows"));
      if (token === null || token >= found.queries)
        return this.note(say(lang, overview.images?.length ? "choose_patch" : "choose_token"));
      if (this.drawn) this.element.setAttribute("aria-busy", "true"); // of the pair before, until the answer comes
      else this.note(say(lang, "computing"));
      const key = await this.key(signal);
      const answer = await this.source.steps(session, layer, head, token, key, signal);
      if (signal.aborted) return;
      this.answer = answer;
      this.draw();
    } catch (error) {
      if (isAbort(error) || signal.aborted) return;
      if (error instanceof NotCarried) return this.note(say(lang, "steps_left_out"));
      this.note(say(lang, "failed", { error: String(/** @type {Error} */ (error).message) }), "error");
    }
  }

  /**
   * The key that was chosen, or the one with the largest weight.
   * @param {AbortSignal} signal
   */
  async key(signal) {
    const { session, layer, head, token, key } = this.store.get();
    if (key !== null) return key;
    const row = await this.source.row(session ?? "", layer, head, token ?? 0, 0, 1, signal);
    return row.top[0]?.key ?? 0;
  }

  /**
   * @param {string} words
   * @param {string} [kind]
   */
  note(words, kind = "") {
    const { lang } = this.store.get();
    this.drawn = false;
    this.element.removeAttribute("aria-busy");
    fill(
      this.element,
      make("h2", {}, say(lang, "steps")),
      make("p", { class: `note ${kind}`, role: kind ? "alert" : null }, words),
    );
  }

  draw() {
    const { answer, naming } = this;
    if (answer === null || naming === null) return;
    const { lang, layer } = this.store.get();
    this.drawn = true;
    this.element.removeAttribute("aria-busy");
    const token = quoted(naming.query(layer, answer.token));
    const focused = /** @type {HTMLElement | null} */ (focusedAround(this.element)?.closest(".steps [data-focus]"))?.dataset
      .focus;
    fill(
      this.element,
      make("h2", {}, ...sayAround(lang, "steps_of", { token: isolated(token) })),
      this.words(answer, token),
      make(
        "div",
        { class: "steps-body" },
        this.table(answer),
        make("div", { class: "vectors" }, this.pair(answer, token), this.result(answer)),
      ),
    );
    if (focused) /** @type {HTMLElement | null} */ (this.element.querySelector(`[data-focus="${focused}"]`))?.focus();
  }

  /**
   * @param {Steps} answer
   * @param {string} token
   */
  words(answer, token) {
    const { lang } = this.store.get();
    const [d, lse] = [answer.d, figure(answer.lse)];
    const root = Math.sqrt(d);
    const second = isRoot(answer)
      ? say(lang, "step_2", { d, root: figure(root) })
      : say(lang, answer.scale === 1 ? "step_2_one" : "step_2_other", { d, scale: factor(answer) });
    const broken = list(answer.weights).some(Number.isNaN);
    const masked = answer.masked ?? 0;
    const blind = masked > 0 && masked === answer.there;
    const also = [isBiased(answer) && say(lang, "step_bias"), masked > 0 && say(lang, "step_mask", { masked })];
    const third = broken
      ? say(lang, "step_3_nan")
      : [blind ? say(lang, "step_3_blind") : say(lang, "step_3", { lse }), ...(blind ? [] : also)].filter(Boolean).join(" ");
    const fourth = say(lang, answer.v_sum ? "step_4" : "step_4_missing");
    const all = [sayAround(lang, "step_1", { token: isolated(token), d }), [second], [third], [fourth]];
    return make("ol", { class: "explained" }, ...all.map((words) => make("li", {}, ...words)));
  }

  /** @param {Steps} answer */
  table(answer) {
    const { lang, layer } = this.store.get();
    const [dots, scaled, scores, weights] = [answer.dots, answer.scaled, answer.scores, answer.weights].map(list);
    const order = answer.keys.map((_, i) => i).sort((a, b) => weights[b] - weights[a] || a - b);
    const few = order.slice(0, FEW);
    const asked = answer.keys.indexOf(answer.key);
    const seen = this.all || few.includes(asked) || asked < 0 ? few : [...few.slice(0, FEW - 1), asked];
    const [biased, asksMasked] = [isBiased(answer), scores[asked] === -Infinity];
    /** @type {import("./words.js").Word[]} */
    const heads = [
      "step_key",
      "step_dot",
      isRoot(answer) ? "step_scaled" : "step_scaled_other",
      ...(biased || asksMasked ? /** @type {const} */ ([biased ? "step_score" : "step_masked"]) : []),
      "step_softmax",
    ];
    const lines = (this.all ? order : seen).map((i) =>
      this.line(i, answer, [dots[i], scaled[i], ...(biased || asksMasked ? [scores[i]] : [])], weights[i]),
    );
    const more =
      order.length > FEW &&
      make(
        "button",
        { type: "button", class: "quiet", "data-focus": "all", onclick: () => this.toggle() },
        this.all ? say(lang, "show_fewer") : say(lang, "show_all", { count: order.length }),
      );
    const { keys: every = order.length, windows = 1 } = this.naming?.overview.layers[layer] ?? {};
    const { there = every / windows, masked = 0 } = answer;
    const shown = lines.length - (asksMasked ? 1 : 0);
    const caption = say(lang, masked ? "keys_seen" : "keys_shown", { count: shown, all: there - masked, masked });
    return make(
      "div",
      { class: "keys" },
      make(
        "table",
        {},
        make("caption", {}, caption),
        make(
          "thead",
          {},
          make(
            "tr",
            {},
            ...heads.map((word) =>
              make("th", { scope: "col" }, say(lang, word, { scale: factor(answer) })),
            ),
          ),
        ),
        make("tbody", {}, ...lines),
      ),
      more,
    );
  }

  toggle() {
    this.all = !this.all;
    this.draw();
  }

  /**
   * @param {number} i
   * @param {Steps} answer
   * @param {(number | null)[]} scores
   * @param {number} weight
   */
  line(i, answer, scores, weight) {
    const { layer } = this.store.get();
    const key = answer.keys[i];
    const name = this.naming?.key(layer, key) ?? "";
    const choose = () => this.store.set({ key });
    return make(
      "tr",
      { class: key === answer.key ? "chosen" : "", onclick: choose, "data-key": key },
      make(
        "th",
        { scope: "row" },
        make(
          "button",
          { type: "button", class: "called", "aria-pressed": key === answer.key, "data-focus": `key${key}` },
          isolated(name),
        ),
        make("small", {}, String(key)),
      ),
      ...scores.map((value) => make("td", {}, figure(value))),
      make(
        "td",
        { class: "weight" },
        make(
          "span",
          { class: "bar", "aria-hidden": "true" },
          make("i", { style: `width:${(100 * (weight || 0)).toFixed(2)}%` }),
        ),
        make("span", { class: "number" }, figure(weight)),
      ),
    );
  }

  /**
   * @param {Steps} answer
   * @param {string} token
   */
  pair(answer, token) {
    const { lang, layer } = this.store.get();
    const key = quoted(this.naming?.key(layer, answer.key) ?? "");
    const [q, k, product] = [answer.q, answer.k, answer.product].map(list);
    const at = answer.keys.indexOf(answer.key);
    const [dot, weight] = [answer.dots, answer.weights].map((values) => figure(list(values)[at]));
    const titles = (/** @type {number} */ index) =>
      say(lang, "dimension", { index, q: figure(q[index]), k: figure(k[index]), product: figure(product[index]) });
    // Each by its own largest number: beside a long query a short key would be a flat line.
    const strip = (/** @type {import("./elements.js").Child[]} */ said, /** @type {number[]} */ values) => {
      const name = make("span", {}, ...said);
      return make("div", { class: "strip" }, name, bars(values, { label: name.textContent ?? "", titles }));
    };
    return make(
      "div",
      { class: "pair" },
      make("h3", {}, ...sayAround(lang, "pair", { token: isolated(token), key: isolated(key) })),
      strip(sayAround(lang, "query_vector", { token: isolated(token) }), q),
      strip(sayAround(lang, "key_vector", { key: isolated(key) }), k),
      strip([say(lang, "product_vector")], product),
      make("p", { class: "sum" }, say(lang, "pair_sum", { d: answer.d, dot, scaled: this.scaled(answer, at), weight })),
    );
  }

  /**
   * What becomes of q·k before the softmax, in words: nothing where the scale is 1 and nothing is added.
   * @param {Steps} answer
   * @param {number} at
   */
  scaled(answer, at) {
    const { lang } = this.store.get();
    const [scaled, score] = [answer.scaled, answer.scores].map((values) => figure(list(values)[at]));
    const times = answer.scale === 1 ? "" : say(lang, "pair_times", { scale: factor(answer), scaled });
    const first = isRoot(answer) ? say(lang, "pair_divided", { scaled }) : times;
    if (list(answer.scores)[at] === -Infinity) return first + say(lang, "pair_masked");
    return first + (isBiased(answer) ? say(lang, "pair_score", { score }) : "");
  }

  /** @param {Steps} answer */
  result(answer) {
    const { lang } = this.store.get();
    const values = list(answer.v_sum);
    if (values.length === 0) return null;
    const label = say(lang, "result", { d: values.length });
    return make(
      "div",
      { class: "pair" },
      make("h3", {}, label),
      make(
        "div",
        { class: "strip" },
        make("span", {}, "Σ w·v"),
        bars(values, { label, titles: (i) => figure(values[i]) }),
      ),
    );
  }
}

/** @param {string} label */
function quoted(label) {
  return `“${label}”`;
}

/**
 * A label in the direction of its own letters, whatever stands around it.
 * @param {string} label
 */
function isolated(label) {
  return make("bdi", {}, label);
}

/**
 * What q·k is multiplied by, in few digits.
 * @param {Steps} answer
 */
function factor({ scale }) {
  return String(Number(scale.toPrecision(3))).replaceAll("-", "−");
}

/** @param {Steps} answer */
function isRoot({ scale, d }) {
  return Math.abs(scale * Math.sqrt(d) - 1) < 1e-4;
}

/**
 * Does the model change the scores before the softmax, by a bias or a cap? A mask is told by −∞.
 * @param {Steps} answer
 */
function isBiased(answer) {
  const [scaled, scores] = [list(answer.scaled), list(answer.scores)];
  return scores.some(
    (score, i) => score !== null && Number.isFinite(score) && Math.abs(score - scaled[i]) > 1e-3 * Math.max(1, Math.abs(score)),
  );
}
