// Where answers come from: their types, a server (`HttpSource`), and what the sources share. `EmbeddedSource` (exported
// page) and `NotebookSource` have the same methods. Arrays are Float32Array.
//
//     const head = await source.head("1", 3, 1, "en");          // head.map.shape, head.map.data
//     const next = latest();                                     // aborts what the pane asked for before
//     const row = await source.row("1", 3, 1, 8, 0, 16, next());

import { message, translate } from "../shared/messages.js";
import { unpackAll } from "./arrays.js";

/** @typedef {import("./arrays.js").Levels} Levels */
/** @typedef {import("./arrays.js").Numbers} Numbers */

/** Why what links do cannot be measured. @typedef {"no_model" | "repeated" | "windows" | "other_tokens"} NoEffects */
/**
 * One attention. first: the position of query 0 among the keys, null in cross-attention.  labelled: do the session's
 * tokens name its keys?  rows: can exact rows be asked for?  windows: sequences that its tokens count through, each of
 * which sees itself alone.  layout: of its queries and keys, by their numbers among the overview's layouts.
 * @typedef {{index: number, path: string, call?: number | null, heads: number, queries: number, keys: number,
 *   kind: string, first?: number | null, labelled?: boolean, rows?: boolean, windows?: number,
 *   layout?: number[] | null, no_effects?: NoEffects | null}} Layer
 */
/**
 * What a session is, and one number per head and measure: arrays (L, Hmax), NaN where a layer has fewer heads.
 * @typedef {{version: number, name: string, text: string | null, length: number, labels: string[], rows: boolean,
 *   layers: Layer[], measures: Record<string, Numbers>, labels_of_heads: (string | null)[][], opening?: Opening | null,
 *   suggestion?: Suggestion | null, images?: ImageLine[], layouts?: import("../image/patches.js").TokenLayout[], warning: string}} Overview
 */
/** A model that reads the text better, and the command that fetches it. @typedef {{name: string, fetched: boolean, command: string, size: number}} Suggestion */
/** Where to look first. @typedef {{layer: number, head: number, token: number | null, key: number | null}} Opening */
/**
 * An image that the model looked at. seen: top, left, bottom, right of what it saw, as fractions of the sides.
 * @typedef {{height: number, width: number, name: string | null, shown: boolean, seen: number[]}} ImageLine
 */
/** @typedef {{query: number, key: number, weight: number}} Link */
/**
 * A strong link in the head where it ranks highest. words: of the query and the key.  effect: measured, or null.
 * @typedef {Link & {layer: number, head: number, words: string[], effect: number | null}} RankedLink
 */
/** complete: were all links searched?  selected: the one that the page opens on. @typedef {{links: RankedLink[], complete: boolean, selected: number | null}} Ranked */
/**
 * @typedef {{layer: number, head: number, path: string, map: Numbers, how: string, received: Numbers | null,
 *   entropy: Numbers | null, numbers: Record<string, number | null>, patterns: Record<string, number>,
 *   label: string | null, sentence: string, links: Link[],
 *   links_how?: string, signed?: boolean, alignment?: import("../compare/difference.js").Alignment}} HeadAnswer
 */
/**
 * how: "exact"; "rounded", off by at most error; "strongest", where weights that are not known are NaN.
 * signed: the weights are changes, second − first, NaN where a key has no counterpart.
 * @typedef {{token: number, start: number, stop: number, weights: Numbers, ribbon: {sum: Numbers, max: Numbers},
 *   top: {key: number, weight: number}[], sum: number | null, how: string, error?: number, signed?: boolean}} Row
 */
/** @typedef {{rows: number[], cols: number[], cells: Numbers, how: string, error?: number}} Tile */
/**
 * Of each of `keys`: dots q·k, scaled dots · scale, scores what the softmax gets, −∞ for a masked key, weights
 * e^(score − lse).  there: how many keys the query had, masked: how many of them are masked for it.
 * rest: the weight on all other keys.  v_sum: Σ weight·value over all keys, null where values are not known.
 * @typedef {{token: number, key: number, d: number, scale: number, q: Numbers | number[], k: Numbers | number[],
 *   product: Numbers | number[], dots: Numbers | number[], scaled: Numbers | number[], weights: Numbers | number[],
 *   keys: number[], there?: number, masked?: number, scores: Numbers | (number | null)[], rest: number | null, lse: number | null, v: Numbers | number[] | null,
 *   v_sum: Numbers | number[] | null}} Steps
 */
/**
 * What a link does in one head: how far the query's vector moves without it, and without random other keys.
 * @typedef {{layer: number, head: number, weight: number, effect: number, controls: number[], p_value: number | null,
 *   method: string}} LinkEffect
 */
/**
 * What was measured of a link: in single heads, and in each of all heads, arrays (L, Hmax), or null.
 * @typedef {{token: number, key: number, links: LinkEffect[],
 *   heads: {weights: Numbers, effects: Numbers, method: string} | null}} Effects
 */
/**
 * The small maps of a layer's heads, (H, ≤ 24, ≤ 24), between edges in queries and keys; images: what the patches of each
 * image receive, (H, r, c), between fractions of its sides.
 * @typedef {{layer: number, levels: Levels, rows: number[], cols: number[], how: string,
 *   images: {image: number, rows: number[][], columns: number[][], levels: Levels}[]}} LayerThumbnails
 */
/** By layer; null for one without a map. @typedef {{layers: (LayerThumbnails | null)[]}} Thumbnails */
/**
 * One query's row in the heads of a layer, (H, ≤ width) sums between edges in keys; images: (H, r, c) as in `Thumbnails`;
 * other: (H) the weight on keys that are no patches.
 * @typedef {{layer: number, token: number, levels: Levels, cols: number[], how: string, images: Levels[],
 *   other: Numbers | null}} LayerRows
 */
/** By layer; null for one that has no such query. @typedef {{token: number, layer: number, layers: (LayerRows | null)[]}} TokenRows */
/**
 * One link in every head, (L, Hmax), NaN where there is none; effects: of what was measured, or null.
 * @typedef {{token: number, key: number, layer: number, weights: Numbers, effects: Numbers | null,
 *   how?: string}} LinkInHeads
 */
/** A token or label. before: its logit with all heads on. @typedef {{id: number, label: string, logit: number, probability: number | null, before: number | null}} Prediction */
/** The likeliest at one place. lse: by temperature; null where there is no softmax. @typedef {{token: number | null, lse: number[] | null, top: Prediction[]}} Predicted */
/**
 * What the model predicts, with the heads [layer, head] of `without` switched off.
 * @typedef {{kind: "next_token" | "fill_mask" | "labels" | "none", reason: "no_model" | "no_head" | "no_mask" | null,
 *   without: number[][], temperatures: number[], places: Predicted[]}} Predictions
 */
/**
 * The heads whose attention differs most between two sessions; query, key, words, before and after are of the link that
 * changed most. before, after: tokens that are alike at the beginning and at the end.
 * @typedef {{layer: number, head: number, moved: number, query: number[], key: number[], words: string[][],
 *   before: number, after: number}} HeadChange
 * @typedef {{counts: number[], before: number, after: number, heads: HeadChange[], complete: boolean}} Changes
 */
/** In one head, or in every head where layer and head are null. @typedef {{token: number, key: number, layer: number | null, head: number | null}} LinkQuestion */
/** @typedef {{id: string, name: string, text?: string | null, length?: number, image?: string | null}} SessionLine */
/**
 * images: does it look at them; null while nobody can tell.  decoder: is it an encoder–decoder?
 * @typedef {{id: string, name: string, default?: boolean, images?: boolean | null, decoder?: boolean | null}} ModelLine
 */
/**
 * @typedef {{state: "loading" | "reading" | "measuring" | "done" | "failed" | "cancelled", progress?: string,
 *   session?: string | null, error?: string | null, model?: string}} Job
 */
/**
 * @typedef {object} Source
 * @property {{look: boolean, open: boolean, measure: boolean, switch: boolean}} can  whether new texts can be read,
 *   files be opened, links be measured, and heads be switched off
 * @property {(signal?: AbortSignal) => Promise<SessionLine[]>} sessions
 * @property {(signal?: AbortSignal) => Promise<ModelLine[]>} models
 * @property {(session: string, signal?: AbortSignal) => Promise<Overview>} overview
 * @property {(session: string, start: number, stop: number, signal?: AbortSignal) =>
 *   Promise<{start: number, labels: string[]}>} tokens
 * @property {(session: string, layer: number, head: number, lang: string, signal?: AbortSignal) =>
 *   Promise<HeadAnswer>} head
 * @property {(session: string, signal?: AbortSignal) => Promise<Ranked>} ranked
 * @property {(session: string, layer: number, head: number, token: number, start: number, stop: number,
 *   signal?: AbortSignal) => Promise<Row>} row
 * @property {(session: string, layer: number, head: number, rows: number[], cols: number[], size?: number,
 *   signal?: AbortSignal) => Promise<Tile>} tile
 * @property {(session: string, layer: number, head: number, token: number, key: number, signal?: AbortSignal) =>
 *   Promise<Steps>} steps
 * @property {(session: string, signal?: AbortSignal) => Promise<Thumbnails>} thumbnails
 * @property {(session: string, token: number, layer: number, width: number, signal?: AbortSignal) =>
 *   Promise<TokenRows>} rowsOfToken  layer: the one that counts the query so
 * @property {(session: string, token: number, key: number, layer: number, signal?: AbortSignal) =>
 *   Promise<LinkInHeads>} linkInHeads
 * @property {(session: string, token: number, key: number, signal?: AbortSignal) => Promise<Effects>} effects  measured
 *   so far
 * @property {(session: string, link: LinkQuestion, tell: (progress: string) => void, signal: AbortSignal) =>
 *   Promise<Effects>} measure
 * @property {(session: string, without: [number, number][], signal?: AbortSignal) => Promise<Predictions | null>}
 *   predictions  null where an exported page has none
 * @property {(session: string, other: string, signal?: AbortSignal) => Promise<Changes>} [changes]
 * @property {(session: string, token: number, word: string) => Promise<string>} [swap]  the job that reads the text with
 *   another word in a token's place
 * @property {(where: string) => Promise<string>} [openModel]  the job that opens a model by its directory or hub id
 * @property {(session: string) => {token: number, key: number}[]} [carried]  links whose effects a page carries
 * @property {(session: string, number: number) => Promise<string>} image  an address of its bytes
 * @property {{start: (text: string, model: string | null, truncate: boolean) => Promise<string>,
 *   image: (file: Blob & {name?: string}, text: string, model: string | null) => Promise<string>,
 *   poll: (job: string) => Promise<Job>,
 *   cancel: (job: string) => Promise<void>}} look
 * @property {(session: string, lang: string) => string | null} [leftOut]  what of a session cannot be asked for, in words
 * @property {(file: Blob & {name?: string}) => Promise<string>} open  gives the new session's id
 * @property {(session: string, view: string, lang: string) => Promise<Blob>} [page]  one HTML file that opens in a view
 * @property {(session: string) => Promise<Blob>} [capture]  a .regard file
 */

export { EmbeddedSource } from "./embedded.js";

const EVERY_MS = 200; // between two questions about a job

/**
 * Signals of which each aborts the one before: what a pane passes with a question whose older answers are stale.
 * @returns {() => AbortSignal}
 */
export function latest() {
  /** @type {AbortController | undefined} */
  let controller;
  return () => {
    controller?.abort();
    controller = new AbortController();
    return controller.signal;
  };
}

/**
 * Was this error only a question that nobody waits for any more?
 * @param {unknown} error
 */
export function isAbort(error) {
  return error instanceof DOMException && error.name === "AbortError";
}

/**
 * What came of a question: its answer, or null and what went wrong; nothing where a newer question has overtaken it.
 * @template T
 * @param {Promise<T>} asked
 * @param {AbortSignal} signal of `latest`
 * @returns {Promise<[T, ""] | [null, string] | undefined>}
 */
export async function outcome(asked, signal) {
  try {
    const found = await asked;
    return signal.aborted ? undefined : [found, ""];
  } catch (error) {
    return isAbort(error) ? undefined : [null, error instanceof Error ? error.message : String(error)];
  }
}

/** Take the server's token, which is a cookie by now, out of the address; the state behind "#" stays. */
export function hideToken() {
  if (location.search !== "") history.replaceState(history.state, "", location.pathname + location.hash);
}

const NO_SERVER = message("the server does not answer: is `regard serve` still running?");
const NO_TOKEN = message(
  "the server was restarted, or this address has no token: open the URL that its terminal shows.",
);

/** @param {string} text */
const problem = (text) => new Error(translate(text, document.documentElement.lang === "ko" ? "ko" : "en"));

/** The language in which a server says what went wrong: the page's, which need not be the browser's. */
const inOwnLanguage = () => ({ "accept-language": document.documentElement.lang });

/** @param {Response} response */
async function answer(response) {
  if (response.status === 403 && response.headers.has("www-authenticate")) throw problem(NO_TOKEN);
  const body = await response.json().catch(() => null);
  if (response.ok && body !== null) return body;
  const said = body?.error ?? body?.detail;
  throw new Error(typeof said === "string" ? said : `${response.status} ${response.statusText}`);
}

/**
 * Answers asked of the server that `regard serve` runs.
 * @implements {Source}
 */
export class HttpSource {
  /** @param {string} base  the address under which /api lies, without a slash at its end: "" for the page's own */
  constructor(base) {
    this.base = base;
    this.can = { look: true, open: true, measure: true, switch: true };
    this.kept = new AnswerCache(256);
    this.look = {
      /** @type {Source["look"]["start"]} */
      start: async (text, model, truncate) =>
        (await this.#send("POST", "look", JSON.stringify({ text, model, truncate }))).job,
      /** @type {Source["look"]["image"]} */
      image: async (file, text, model) => {
        const given = new URLSearchParams({ name: file.name ?? "", text, ...(model === null ? {} : { model }) });
        return (await this.#send("POST", `look_at_image?${given}`, file)).job;
      },
      /** @type {Source["look"]["poll"]} */
      poll: (job) => this.#send("GET", `job/${encodeURIComponent(job)}`),
      /** @type {Source["look"]["cancel"]} */
      cancel: async (job) => void (await this.#send("DELETE", `job/${encodeURIComponent(job)}`)),
    };
  }

  /** @type {Source["sessions"]} */
  async sessions(signal) {
    const found = await this.#send("GET", "sessions", undefined, signal);
    return found.sessions ?? found;
  }

  /** @type {Source["models"]} */
  async models(signal) {
    const found = await this.#send("GET", "models", undefined, signal);
    return found.models ?? found;
  }

  /** @type {Source["overview"]} */
  overview(session, signal) {
    return this.#ask(session, "overview", {}, signal);
  }

  /** @type {Source["tokens"]} */
  tokens(session, start, stop, signal) {
    return this.#ask(session, "tokens", { start, stop }, signal);
  }

  /** @type {Source["head"]} */
  head(session, layer, head, lang, signal) {
    return this.#ask(session, "head", { layer, head, lang }, signal);
  }

  /** @type {Source["ranked"]} */
  ranked(session, signal) {
    return this.#ask(session, "ranked", {}, signal);
  }

  /** @type {Source["row"]} */
  row(session, layer, head, token, start, stop, signal) {
    return this.#ask(session, "row", { layer, head, token, start, stop }, signal);
  }

  /** @type {Source["tile"]} */
  tile(session, layer, head, rows, cols, size = 128, signal) {
    return this.#ask(session, "tile", { layer, head, rows: rows.join(","), cols: cols.join(","), size }, signal);
  }

  /** @type {Source["steps"]} */
  steps(session, layer, head, token, key, signal) {
    return this.#ask(session, "steps", { layer, head, token, key }, signal);
  }

  /** @type {Source["thumbnails"]} */
  thumbnails(session, signal) {
    return this.#ask(session, "thumbnails", {}, signal);
  }

  /** @type {Source["rowsOfToken"]} */
  rowsOfToken(session, token, layer, width, signal) {
    return this.#ask(session, "rows_of_token", { token, layer, width }, signal);
  }

  /** @type {Source["linkInHeads"]} */
  linkInHeads(session, token, key, layer, signal) {
    return this.#ask(session, "link_in_heads", { token, key, layer }, signal);
  }

  /** @type {Source["effects"]} */
  async effects(session, token, key, signal) {
    const path = `session/${encodeURIComponent(session)}/effects?token=${token}&key=${key}`; // not kept: more may come
    return unpackAll(await this.#send("GET", path, undefined, signal));
  }

  /** @type {Source["measure"]} */
  async measure(session, link, tell, signal) {
    const path = `session/${encodeURIComponent(session)}/effects`;
    const { job } = await this.#send("POST", path, JSON.stringify(link));
    for (;;) {
      if (signal.aborted) await this.look.cancel(job);
      const { state, progress, error } = await this.look.poll(job);
      if (state === "done") return this.effects(session, link.token, link.key);
      if (state === "failed") throw new Error(error ?? state);
      if (state === "cancelled") throw new DOMException("the measurement was cancelled", "AbortError");
      tell(progress ?? "");
      await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
    }
  }

  /** @type {Source["predictions"]} */
  predictions(session, without, signal) {
    return this.#ask(session, "predictions", { without: without.map((place) => place.join(".")).join(",") }, signal);
  }

  /** @type {NonNullable<Source["changes"]>} */
  changes(session, other, signal) {
    return this.#ask(session, "changes", { other }, signal);
  }

  /** @type {NonNullable<Source["swap"]>} */
  async swap(session, token, word) {
    const path = `session/${encodeURIComponent(session)}/swap`;
    return (await this.#send("POST", path, JSON.stringify({ token, word }))).job;
  }

  /** @type {NonNullable<Source["openModel"]>} */
  async openModel(where) {
    return (await this.#send("POST", "models", JSON.stringify({ where }))).job;
  }

  /** @type {Source["image"]} */
  async image(session, number) {
    return `${this.base}/api/session/${encodeURIComponent(session)}/image/${number}`;
  }

  /** @type {Source["open"]} */
  async open(file) {
    const name = encodeURIComponent(file.name ?? "");
    return (await this.#send("POST", `open?name=${name}`, file)).session;
  }

  /** @type {Source["page"]} */
  page(session, view, lang) {
    return this.#file(`session/${encodeURIComponent(session)}/page?${new URLSearchParams({ lang, view })}`);
  }

  /** @type {Source["capture"]} */
  capture(session) {
    return this.#file(`session/${encodeURIComponent(session)}/capture`);
  }

  /** @param {string} path */
  async #file(path) {
    const response = await fetch(`${this.base}/api/${path}`, { headers: inOwnLanguage() }).catch(() => {
      throw problem(NO_SERVER);
    });
    return response.ok ? response.blob() : answer(response);
  }

  /**
   * @param {string} session
   * @param {string} what
   * @param {Record<string, string | number>} given
   * @param {AbortSignal} [signal]
   * @returns {Promise<any>}
   */
  #ask(session, what, given, signal) {
    const words = new URLSearchParams(Object.entries(given).map(([name, value]) => [name, String(value)]));
    const path = `session/${encodeURIComponent(session)}/${what}?${words}`;
    return this.kept.ask(path, async (own) => unpackAll(await this.#send("GET", path, undefined, own)), signal);
  }

  /**
   * @param {string} method
   * @param {string} path
   * @param {BodyInit} [body]
   * @param {AbortSignal} [signal]
   * @returns {Promise<any>}
   */
  async #send(method, path, body, signal) {
    const kind = typeof body === "string" ? "application/json" : body instanceof Blob ? "application/octet-stream" : null;
    const headers = { ...inOwnLanguage(), ...(kind && { "content-type": kind }) };
    const response = await fetch(`${this.base}/api/${path}`, { method, body, signal, headers }).catch((error) => {
      throw isAbort(error) ? error : problem(NO_SERVER);
    });
    return answer(response);
  }
}

// ------------------------------------------------------------------------------------------------------ cached answers

/** @typedef {{promise: Promise<any>, controller: AbortController, waiting: number, done: boolean}} Entry */

export class AnswerCache {
  /** @param {number} most  answers kept */
  constructor(most) {
    this.most = most;
    /** @type {Map<string, Entry>} */
    this.entries = new Map(); // in order of use, the oldest first
  }

  /**
   * The answer to a question, from memory where it is there.
   * @template T
   * @param {string} question
   * @param {(signal: AbortSignal) => Promise<T>} ask
   * @param {AbortSignal} [signal]  of the one who waits; others who wait for the same answer are not disturbed
   * @returns {Promise<T>}
   */
  ask(question, ask, signal) {
    if (signal?.aborted) return Promise.reject(aborted());
    const entry = this.entries.get(question) ?? this.#begin(question, ask);
    this.entries.delete(question);
    this.entries.set(question, entry);
    this.#forgetOldest();
    return entry.done ? entry.promise : this.#wait(question, entry, signal);
  }

  /**
   * @param {string} question
   * @param {(signal: AbortSignal) => Promise<any>} ask
   * @returns {Entry}
   */
  #begin(question, ask) {
    const controller = new AbortController();
    /** @type {Entry} */
    const entry = { promise: ask(controller.signal), controller, waiting: 0, done: false };
    entry.promise.then(
      () => (entry.done = true),
      () => this.#forget(question, entry), // an error may pass: the next one asks again
    );
    return entry;
  }

  /**
   * @param {string} question
   * @param {Entry} entry
   * @param {AbortSignal} [signal]
   * @returns {Promise<any>}
   */
  #wait(question, entry, signal) {
    entry.waiting += 1;
    return new Promise((resolve, reject) => {
      const leave = () => {
        reject(aborted());
        entry.waiting -= 1;
        if (entry.waiting > 0 || entry.done) return;
        this.#forget(question, entry);
        entry.controller.abort();
      };
      signal?.addEventListener("abort", leave, { once: true });
      entry.promise.then(resolve, reject).finally(() => signal?.removeEventListener("abort", leave));
    });
  }

  /**
   * @param {string} question
   * @param {Entry} entry
   */
  #forget(question, entry) {
    if (this.entries.get(question) === entry) this.entries.delete(question);
  }

  #forgetOldest() {
    for (const [question, entry] of this.entries) {
      if (this.entries.size <= this.most) return;
      if (entry.done) this.entries.delete(question);
    }
  }
}

function aborted() {
  return new DOMException("nobody waits for this answer any more", "AbortError");
}
