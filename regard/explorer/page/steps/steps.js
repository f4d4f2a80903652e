// The steps of one query token with real numbers: q·k for each key, ÷√d, softmax, Σ w·v, and q⊙k for one pair.

import { bars, fill, focusedAround, make } from "../shared/elements.js";
import { Naming } from "../shared/labels.js";
import { figure, message, translate, translateParts } from "../shared/messages.js";
import { list } from "../source/arrays.js";
import { NotCarried } from "../source/embedded.js";
import { isAbort, latest } from "../source/source.js";

/** @typedef {import("../source/source.js").Source} Source */
/** @typedef {import("../source/source.js").Steps} Steps */
/** @typedef {import("../state.js").State} State */
/** @typedef {import("../state.js").Store} Store */

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
    this.note(translate("Loading …", this.store.get().lang));
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
      if (!(found?.rows ?? overview.rows)) return this.note(
        translate(
          "This capture was made without queries and keys: it has no exact rows, so no steps.",
          lang,
        ),
      );
      if (token === null || token >= found.queries)
        return this.note(
          translate(
            overview.images?.length
              ? message(
                "Choose a patch or a token beside the image (or press j and k) to see how its weights come about.",
              )
              : message("Choose a token in the text (or press j and k) to see how its weights come about."),
            lang,
          ),
        );
      if (this.drawn) this.element.setAttribute("aria-busy", "true"); // of the pair before, until the answer comes
      else this.note(translate("Computing the steps …", lang));
      const key = await this.key(signal);
      const answer = await this.source.steps(session, layer, head, token, key, signal);
      if (signal.aborted) return;
      this.answer = answer;
      this.draw();
    } catch (error) {
      if (isAbort(error) || signal.aborted) return;
      if (error instanceof NotCarried) return this.note(
        translate(
          "This file does not hold the steps of this pair. It holds those of the head's strongest links: choose one of them on the left.",
          lang,
        ),
      );
      this.note(
        translate("That did not work: {error}", lang, { error: String(/** @type {Error} */ (error).message) }),
        "error",
      );
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
      make("h2", {}, translate("Steps of one query", lang)),
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
      make("h2", {}, ...translateParts("How {token} comes to look where it looks", lang, { token: isolated(token) })),
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
    const { d } = answer;
    const root = Math.sqrt(d);
    const first = translateParts("q of {token} has {d} numbers. Times the {d} numbers of each token's k, summed: q·k.", lang, {
      ...{ token: isolated(token), d },
    });
    const unscaled = answer.scale === 1;
    const second = isRoot(answer)
      ? translate("Divided by √{d} = {root}, so that scores do not grow with the vectors' length.", lang, {
          ...{ d, root: figure(root) },
        })
      : unscaled
        ? translate("This model does not divide by √{d}: its scale is 1.", lang, { d })
        : translate("Multiplied by this model's scale, {scale}.", lang, { scale: factor(answer) });
    const fourth = answer.v_sum
      ? translate("The result: every token's value vector v times its weight, summed: Σ w·v.", lang)
      : translate("The result is Σ w·v; this capture does not hold the values v.", lang);
    const all = [first, [second], [this.softmax(answer)], [fourth]];
    return make("ol", { class: "explained" }, ...all.map((words) => make("li", {}, ...words)));
  }

  /**
   * The step from scores to weights.
   * @param {Steps} answer
   */
  softmax(answer) {
    const { lang } = this.store.get();
    const masked = answer.masked ?? 0;
    if (list(answer.weights).some(Number.isNaN))
      return translate(
        "Softmax divides by the sum over all keys: one NaN among the scores makes every weight of the query NaN.",
        lang,
      );
    if (masked > 0 && masked === answer.there)
      return translate("Every key is masked for this token: all scores are −∞, and all weights are 0.", lang);
    const lines = [
      translate(
        "Softmax makes weights that add up to 1: e^(score − {lse}); {lse} is the log of Σ e^score over all keys.",
        lang,
        { lse: figure(answer.lse) },
      ),
      isBiased(answer) &&
        translate("The score is what the softmax gets: this model also adds a position bias or caps it.", lang),
      masked > 0 &&
        translate("{masked} {masked|key is|keys are} masked for this token: score −∞, weight 0.", lang, { masked }),
    ];
    return lines.filter(Boolean).join(" ");
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
    const heads = [
      translate("key", lang),
      "q·k",
      isRoot(answer) ? "÷ √d" : `× ${factor(answer)}`,
      ...(biased || asksMasked ? [biased ? translate("score", lang) : translate("masked", lang)] : []),
      "softmax",
    ];
    const lines = (this.all ? order : seen).map((i) =>
      this.line(i, answer, [dots[i], scaled[i], ...(biased || asksMasked ? [scores[i]] : [])], weights[i]),
    );
    const more =
      order.length > FEW &&
      make(
        "button",
        { type: "button", class: "quiet", "data-focus": "all", onclick: () => this.toggle() },
        this.all ? translate("Show fewer", lang) : translate("Show all {count}", lang, { count: order.length }),
      );
    const { keys: every = order.length, windows = 1 } = this.naming?.overview.layers[layer] ?? {};
    const { there = every / windows, masked = 0 } = answer;
    const shown = lines.length - (asksMasked ? 1 : 0);
    const caption = translate(
      masked
        ? message("{count} of {all} {all|key|keys} that the token sees, the largest weights first; {masked} masked")
        : message("{count} of {all} {all|key|keys}, the largest weights first"),
      lang,
      { count: shown, all: there - masked, masked },
    );
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
            ...heads.map((name) => make("th", { scope: "col" }, name)),
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
      translate(
        "dimension {index}: q {q} × k {k} = {product}",
        lang,
        { index, q: figure(q[index]), k: figure(k[index]), product: figure(product[index]) },
      );
    // Each by its own largest number: beside a long query a short key would be a flat line.
    const strip = (/** @type {import("../shared/elements.js").Child[]} */ said, /** @type {number[]} */ values) => {
      const name = make("span", {}, ...said);
      return make("div", { class: "strip" }, name, bars(values, { label: name.textContent ?? "", titles }));
    };
    return make(
      "div",
      { class: "pair" },
      make(
        "h3",
        {},
        ...translateParts(
          "Why this one? q ⊙ k of {token} and {key}",
          lang,
          { token: isolated(token), key: isolated(key) },
        ),
      ),
      strip(translateParts("q of {token}", lang, { token: isolated(token) }), q),
      strip(translateParts("k of {key}", lang, { key: isolated(key) }), k),
      strip(["q ⊙ k"], product),
      make(
        "p",
        { class: "sum" },
        translate(
          "The {d} products add up to q·k = {dot}; {scaled}weight {weight}.",
          lang,
          { d: answer.d, dot, scaled: this.scaled(answer, at), weight },
        ),
      ),
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
    const times = answer.scale === 1 ? "" : translate(
      "times {scale}: {scaled}; ",
      lang,
      { scale: factor(answer), scaled },
    );
    const first = isRoot(answer) ? translate("divided: {scaled}; ", lang, { scaled }) : times;
    if (list(answer.scores)[at] === -Infinity) return first + translate("masked, so the score is −∞; ", lang);
    return first + (isBiased(answer) ? translate("score with what the model adds: {score}; ", lang, { score }) : "");
  }

  /** @param {Steps} answer */
  result(answer) {
    const { lang } = this.store.get();
    const values = list(answer.v_sum);
    if (values.length === 0) return null;
    const label = translate("Σ w·v, {d} numbers", lang, { d: values.length });
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
