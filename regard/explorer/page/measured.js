// What was measured of the chosen link, and the measuring of it: one at a time, by the source. Panes hear of changes.

import { effectIn, meanSize, pValue, percent } from "./effects.js";
import { make } from "./elements.js";
import { Naming } from "./naming.js";
import { isAbort, latest } from "./source.js";
import { figure, sayAround } from "./words.js";

/** @typedef {import("./source.js").Effects} Effects */
/** @typedef {import("./source.js").Source} Source */
/** @typedef {import("./state.js").Store} Store */

const REST_MS = 90; // a pointer that runs over words asks only where it rests

export class Measured {
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
        : sayAround(lang, "effect_against", {
            count: controls.length,
            ...{ control: percent(meanSize(controls)), p: pValue(p_value) },
          }).join("");
    return sayOfLink(lang, "effect_sentence", this.names(), {
      ...{ layer, head, weight: figure(weight), effect: percent(effect), against },
    });
  }
}

/**
 * Words about a link, its two labels in the direction of their own letters.
 * @param {import("./words.js").Lang} lang
 * @param {import("./words.js").Word} word
 * @param {{token: string, key: string}} names
 * @param {Record<string, string | number>} [given]
 * @returns {(string | HTMLElement)[]}
 */
export function sayOfLink(lang, word, { token, key }, given = {}) {
  const parts = sayAround(lang, word, { ...given, token: { name: token }, key: { name: key } });
  return parts.map((part) => (typeof part === "object" ? make("bdi", {}, part.name) : part));
}
