// Effects of links: numbers of an answer as a measure of the atlas, as points of a plot and as text (pure functions),
// and `Measurements`, which asks for those of the chosen link, measures new ones, and tells panes of changes.

import { EFFECT } from "../atlas/heads.js";
import { make } from "../shared/elements.js";
import { Naming } from "../shared/labels.js";
import { figure, message, translateParts } from "../shared/messages.js";
import { isAbort, latest } from "../source/source.js";

/** @typedef {import("../source/source.js").Effects} Effects */
/** @typedef {import("../source/source.js").LinkEffect} LinkEffect */
/** @typedef {import("../source/source.js").Overview} Overview */
/** @typedef {import("../source/source.js").Source} Source */
/** @typedef {import("../state.js").Store} Store */

/** A head of which weight and effect of a link are known. @typedef {{layer: number, head: number, weight: number, effect: number}} Point */

const MUCH = 0.25; // of the largest weight: what counts as a large one
const LITTLE = 0.5; // of the median effect per weight of the heads with large weights: what counts as a small effect

/**
 * An overview with the effect of a link, in per cent, among its measures.
 * @param {Overview} overview
 * @param {Effects | null} effects
 * @returns {Overview}
 */
export function withEffects(overview, effects) {
  if (!effects?.heads) return overview;
  const { shape, data } = effects.heads.effects;
  return { ...overview, measures: { ...overview.measures, [EFFECT]: { shape, data: data.map((value) => 100 * value) } } };
}

/**
 * What was measured of a link in one head: with random other keys, or as one of all heads; null where nothing was.
 * @param {Effects | null} effects
 * @param {number} layer
 * @param {number} head
 * @returns {(Point & {controls: number[], p_value: number | null}) | null}
 */
export function effectIn(effects, layer, head) {
  const link = effects?.links.find((one) => one.layer === layer && one.head === head);
  if (link) return link;
  const point = pointsOf(effects).find((one) => one.layer === layer && one.head === head && one.weight > 0);
  return point ? { ...point, controls: [], p_value: null } : null;
}

/**
 * The heads of which weight and effect are known.
 * @param {Effects | null} effects
 * @returns {Point[]}
 */
export function pointsOf(effects) {
  if (!effects?.heads) return [];
  const { weights, effects: moved } = effects.heads;
  const most = weights.shape[1];
  return Array.from(weights.data, (weight, i) => ({
    ...{ layer: Math.floor(i / most), head: i % most },
    ...{ weight, effect: moved.data[i] },
  })).filter(({ weight, effect }) => Number.isFinite(weight) && Number.isFinite(effect));
}

/**
 * The heads with much weight and little effect: a weight of at least a quarter of the largest, and less than half of the
 * effect per weight that is the median of such heads.
 * @param {Point[]} points
 * @returns {Point[]}
 */
export function idle(points) {
  const largest = Math.max(0, ...points.map(({ weight }) => weight));
  const heavy = points.filter(({ weight }) => weight > 0 && weight >= MUCH * largest);
  const ratios = heavy.map(({ weight, effect }) => effect / weight).sort((a, b) => a - b);
  const median = (ratios[Math.floor((ratios.length - 1) / 2)] + ratios[Math.floor(ratios.length / 2)]) / 2;
  return heavy.filter(({ weight, effect }) => effect / weight < LITTLE * median);
}

/**
 * The mean size of the controls.
 * @param {number[]} controls
 */
export function meanSize(controls) {
  return controls.reduce((sum, value) => sum + Math.abs(value), 0) / controls.length;
}

/**
 * A share in per cent, in three digits that count: 10.0%, 0.350%.
 * @param {number} value
 */
export function percent(value) {
  const share = 100 * value;
  if (share === 0) return "0%";
  if (Math.abs(share) < 1e-4) return "< 0.0001%";
  const digits = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(share))));
  return `${share.toFixed(Math.min(digits, 6)).replace("-", "−")}%`;
}

/**
 * A p-value in three digits that count, without needless zeros: 0.0625, 0.5.
 * @param {number} value
 */
export function pValue(value) {
  return String(Number(value.toPrecision(3)));
}

/**
 * Round numbers from 0 up to at most `most`, about four of them.
 * @param {number} most
 * @returns {number[]}
 */
export function ticks(most) {
  if (!(most > 0)) return [0];
  const rough = 10 ** Math.floor(Math.log10(most / 4));
  const step = rough * ([1, 2, 5, 10].find((times) => most / (times * rough) <= 4) ?? 10);
  return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, i) => Number((i * step).toPrecision(12)));
}

// ----------------------------------------------------------------------------------------------------------- measuring

const SENTENCE = message(
  "Layer {layer}, head {head} gives {token} → {key} a weight of {weight}; without this link the vector of {token} moves by {effect}{against}.",
);
const REST_MS = 90; // a pointer that runs over words asks only where it rests

export class Measurements {
  /**
   * @param {Store} store
   * @param {Source} source
   */
  constructor(store, source) {
    this.store = store;
    this.source = source;
    this.next = latest();
    /** @type {Effects | null} what was measured of the chosen link; null without one, and while it is asked for */
    this.answer = null;
    /** @type {Effects | null} of the link whose heads were measured last */
    this.latest = null;
    /** @type {AbortController | null} while a link is measured */
    this.busy = null;
    this.progress = "";
    this.error = "";
    /** @type {Naming | null} */
    this.naming = null;
    /** @type {Set<() => void>} */
    this.listeners = new Set();
    this.off = store.on((_, changed) => {
      if (!["session", "token", "key"].some((name) => changed.has(name))) return;
      if (changed.has("session")) [this.latest, this.naming] = [null, null];
      [this.answer, this.error] = [null, ""];
      this.#tell();
      clearTimeout(this.timer);
      this.timer = setTimeout(() => void this.load(), REST_MS);
    });
  }

  end() {
    this.off();
    this.next();
    this.busy?.abort();
    clearTimeout(this.timer);
    this.listeners.clear();
  }

  /**
   * Hear of changes; the function that comes back ends that.
   * @param {() => void} listener
   */
  on(listener) {
    this.listeners.add(listener);
    return () => void this.listeners.delete(listener);
  }

  #tell() {
    for (const listener of [...this.listeners]) listener();
  }

  /** Ask what was measured of the chosen link. */
  async load() {
    const { session, token, key } = this.store.get();
    const signal = this.next();
    if (session === null || token === null || key === null) return;
    try {
      const overview = await this.source.overview(session);
      if (this.naming?.overview !== overview)
        this.naming = new Naming(this.source, session, overview, () => this.#tell());
      const answer = await this.source.effects(session, token, key, signal);
      if (!signal.aborted) this.#take(answer);
    } catch (error) {
      if (!isAbort(error) && !signal.aborted) this.#fail(error);
    }
  }

  /**
   * Measure the chosen link, in the chosen head or in all.
   * @param {boolean} all
   */
  async measure(all) {
    const { session, token, key, layer, head } = this.store.get();
    if (session === null || token === null || key === null || this.busy) return;
    const link = { token, key, layer: all ? null : layer, head: all ? null : head };
    const mine = (this.busy = new AbortController());
    [this.progress, this.error] = ["", ""];
    this.#tell();
    const tell = (/** @type {string} */ progress) => {
      if (progress === this.progress) return;
      this.progress = progress;
      this.#tell();
    };
    try {
      const answer = await this.source.measure(session, link, tell, mine.signal);
      this.busy = null;
      const now = this.store.get();
      if (now.session === session && now.token === token && now.key === key) this.#take(answer);
      else this.#tell();
    } catch (error) {
      this.busy = null;
      this.#fail(error);
    }
  }

  cancel() {
    this.busy?.abort();
  }

  /** @param {Effects} answer */
  #take(answer) {
    this.answer = answer;
    if (answer.heads) this.latest = answer;
    this.#tell();
  }

  /** @param {unknown} error */
  #fail(error) {
    this.error = isAbort(error) ? "" : error instanceof Error ? error.message : String(error);
    this.#tell();
  }

  /**
   * The words of a link; by default of the chosen one.
   * @param {{token: number | null, key: number | null} | null} [link]
   * @returns {{token: string, key: string}}
   */
  names(link = this.store.get()) {
    const { layer } = this.store.get();
    const [token, key] = [link?.token ?? 0, link?.key ?? 0];
    return { token: `“${this.naming?.query(layer, token) ?? token}”`, key: `“${this.naming?.key(layer, key) ?? key}”` };
  }

  /** What the chosen link does in the chosen head, in a sentence; null where that was not measured. */
  sentence() {
    const { lang, layer, head } = this.store.get();
    const found = effectIn(this.answer, layer, head);
    if (found === null) return null;
    const { weight, effect, controls, p_value } = found;
    const against =
      p_value === null
        ? ""
        : translateParts(" ({count} random other {count|key|keys}: {control} on average, p = {p})", lang, {
            count: controls.length,
            ...{ control: percent(meanSize(controls)), p: pValue(p_value) },
          }).join("");
    return translateLink(SENTENCE, lang, this.names(), {
      ...{ layer, head, weight: figure(weight), effect: percent(effect), against },
    });
  }
}

/**
 * A text about a link, its two labels in the direction of their own letters.
 * @param {string} text
 * @param {import("../shared/messages.js").Lang} lang
 * @param {{token: string, key: string}} names
 * @param {Record<string, string | number>} [values]
 * @returns {(string | HTMLElement)[]}
 */
export function translateLink(text, lang, { token, key }, values = {}) {
  const parts = translateParts(text, lang, { ...values, token: { name: token }, key: { name: key } });
  return parts.map((part) => (typeof part === "object" ? make("bdi", {}, part.name) : part));
}
