// Answers from the data of an exported page. What was written into the data is given as it is; rows, tiles and steps
// are computed from a head's arrays. `regard.explorer.export` documents the data.

import { inflatedJSON, numbers, unpackAll } from "./arrays.js";
import { imageSums, levelsOf, placeIn } from "./rows.js";

/** @typedef {import("./arrays.js").Compressed} Compressed */
/** @typedef {import("./arrays.js").Numbers} Numbers */
/** @typedef {import("./source.js").Source} Source */

/**
 * One head: its map, received and entropy, where the answer has null for them; every weight, (Nq, Nk), or the strongest links of each query, (Nq, links); q (Nq, D), k (Nk, D), v (Nk, Dv)
 * as attention got them, lse (Nq); hidden (Nq, Nk), 1 for masked keys, where some are. Of a layer in windows Nq counts through all of them and Nk is that of one.
 * @typedef {{weights?: Compressed, top?: {keys: number, index: Compressed, weight: Compressed}, q?: Compressed, k?: Compressed, v?: Compressed,
 *   lse?: Compressed, hidden?: Compressed, scale?: number, map?: Compressed, received?: Compressed, entropy?: Compressed}} Arrays
 */
/**
 * One session. heads: "layer.head" → the `head` answer.  sentences: language → "layer.head" → its sentence.
 * steps: "layer.head.token.key" → the steps of that pair, where a head's arrays have no vectors.
 * hover: do `arrays` hold every weight of every head?
 * effects: "token.key" → what was measured of that link.  labels: every token, compressed, where the overview holds only the first ones.  left_out: language → what is not in the data.
 * @typedef {{overview: any, heads: Record<string, any>, sentences: Record<string, Record<string, string>>,
 *   arrays: Record<string, Arrays>, steps: Record<string, any>, labels: string | null, images?: string[],
 *   thumbnails?: any, hover?: boolean, ranked?: import("./source.js").Ranked, predictions?: any,
 *   effects?: Record<string, any>, left_out: Record<string, string> | null}} Carried
 */
/** @typedef {{version: number, lang: string, sessions: Record<string, Carried>}} Data */

/** What is asked for was left out when the page was written: no failure, and to be said as what it is. */
export class NotCarried extends Error {}

const RIBBON = 1024; // bins of a row's ribbon
const TOP = 12; // largest weights of a row
const SHOWN = 64; // keys in the steps
const CELLS = 64; // of a map's side

/**
 * Answers from the page's own data.
 * @implements {Source}
 */
export class EmbeddedSource {
  /** @param {Data} data */
  constructor(data) {
    this.data = data;
    this.can = { look: false, open: false, measure: false, switch: false };
    /** @type {Map<string, any>} */
    this.decoded = new Map();
    const refuse = async () => {
      throw new Error("this page stands alone: `regard serve` reads new texts and opens files");
    };
    this.look = { start: refuse, image: refuse, poll: refuse, cancel: refuse };
    this.open = refuse;
    this.measure = refuse;
  }

  /** @type {Source["sessions"]} */
  async sessions() {
    return Object.entries(this.data.sessions).map(([id, { overview }]) => {
      const image = overview.images?.[0]?.name;
      return { id, name: overview.name, text: overview.text, length: overview.length, image };
    });
  }

  /** @type {Source["models"]} */
  async models() {
    return [];
  }

  /**
   * What of a session is not in this page, in a sentence; null where nothing is missing, and for a session that an
   * address made up.
   * @param {string} session
   * @param {string} lang
   */
  leftOut(session, lang) {
    return this.data.sessions[session]?.left_out?.[lang] ?? null;
  }

  /** @type {Source["overview"]} */
  async overview(session) {
    return this.#once(`${session}/overview`, () => this.#session(session).overview);
  }

  /** @type {Source["tokens"]} */
  async tokens(session, start, stop) {
    const { labels, overview } = this.#session(session);
    const all = labels === null ? overview.labels : await this.#later(`${session}/labels`, () => inflatedJSON(labels));
    return { start, labels: all.slice(start, stop) };
  }

  /** @type {Source["head"]} */
  async head(session, layer, head, lang) {
    const { heads, sentences } = this.#session(session);
    const name = `${layer}.${head}`;
    if (heads[name] === undefined) throw new Error(`layer ${layer}, head ${head} is not in this page`);
    const answer = this.#once(`${session}/head/${name}`, () => heads[name]);
    const { map, received, entropy } = this.#session(session).arrays[name] ?? {};
    answer.map ??= await (map ? numbers(map) : this.#pooledMap(session, layer, head));
    answer.received ??= received ? await numbers(received) : null;
    answer.entropy ??= entropy ? await numbers(entropy) : null;
    return { ...answer, sentence: sentences[lang]?.[name] ?? answer.sentence };
  }

  /** @type {Source["ranked"]} */
  async ranked(session) {
    return this.#session(session).ranked ?? { links: [], complete: true, selected: null };
  }

  /**
   * @param {string} session
   * @param {number} layer
   * @param {number} head
   */
  async #pooledMap(session, layer, head) {
    const all = await numbers(/** @type {Compressed} */ (this.#arrays(session, layer, head).weights));
    const [down, across] = all.shape.map((size) => edges([0, size], CELLS));
    return pooled(all, down, across);
  }

  /** @type {Source["row"]} */
  async row(session, layer, head, token, start, stop) {
    const { windows } = this.#layer(session, layer);
    const { weights, how, error } = await rowOf(this.#arrays(session, layer, head), token, windows);
    const known = weights.map((weight) => weight || 0); // NaN is what the page does not know
    const ribbon = { sum: bins(known, RIBBON, (a, b) => a + b), max: bins(known, RIBBON, Math.max) };
    const top = largest(known, TOP).map((key) => ({ key, weight: known[key] }));
    return { token, start, stop, weights: vector(weights.slice(start, stop)), ribbon, top, sum: sum(known), how, error };
  }

  /** @type {Source["tile"]} */
  async tile(session, layer, head, rows, cols, size = 128) {
    const { weights } = this.#session(session).arrays[`${layer}.${head}`] ?? {};
    if (weights === undefined) return this.#partOfMap(session, layer, head, rows, cols);
    const { windows, keys } = this.#layer(session, layer);
    const all = await numbers(weights);
    const [down, across] = [edges(rows, size), edges(cols, size)];
    const cells = pooled(windows > 1 ? spread(all, rows, windows, keys) : all, down, across);
    const single = cells.shape[0] === rows[1] - rows[0] && cells.shape[1] === cols[1] - cols[0];
    const error = weights.error ?? 0;
    return { rows, cols, cells, how: !single ? "pooled" : error ? "rounded" : "exact", error };
  }

  /** @type {Source["steps"]} */
  async steps(session, layer, head, token, key) {
    const name = `${layer}.${head}.${token}.${key}`;
    const carried = this.#session(session).steps[name];
    if (carried !== undefined) return this.#once(`${session}/steps/${name}`, () => carried);
    const arrays = this.#arrays(session, layer, head);
    if (!arrays.q || !arrays.k || !arrays.lse)
      throw new NotCarried("the steps of this pair are not in this page, but those of the head's strongest links may be");
    const [queries, allKeys, lses] = await Promise.all([arrays.q, arrays.k, arrays.lse].map(numbers));
    const { weights } = await rowOf(arrays, token, 1);
    const hidden = arrays.hidden ? line(await numbers(arrays.hidden), token) : new Float32Array(weights.length);
    const [q, k, keys] = [line(queries, token), line(allKeys, key), chosen(weights, key, hidden)];
    const [scale, lse] = [arrays.scale ?? 1 / Math.sqrt(q.length), lses.data[token]];
    const dots = keys.map((j) => dot(q, line(allKeys, j)));
    const shown = keys.map((j) => weights[j]);
    const scaled = dots.map((value) => value * scale);
    const scores = scoresOf(shown, scaled, keys.map((j) => hidden[j] > 0), lse);
    const values = arrays.v ? await numbers(arrays.v) : null;
    return {
      ...{ token, key, d: q.length, scale, keys, dots, lse: Number.isFinite(lse) ? lse : null, weights: shown },
      ...{ q: vector(q), k: vector(k), product: vector(q.map((value, i) => value * k[i])) },
      ...{ scaled, scores, there: weights.length, masked: hidden.reduce((a, b) => a + b, 0) },
      rest: weights.reduce((a, b) => a + b, 0) - shown.reduce((a, b) => a + b, 0),
      ...{ v: values && vector(line(values, key)), v_sum: values && vector(mixed(weights, values)) },
    };
  }

  /**
   * A tile cut out of the pooled map: whole cells, so that it may cover more than was asked for.
   * @param {string} session
   * @param {number} layer
   * @param {number} head
   * @param {number[]} rows
   * @param {number[]} cols
   */
  async #partOfMap(session, layer, head, rows, cols) {
    const { map } = await this.head(session, layer, head, "en");
    const { queries, keys } = this.#session(session).overview.layers[layer];
    const [down, across] = [covering(rows, queries, map.shape[0]), covering(cols, keys, map.shape[1])];
    const cells = pooled(map, edges(down.cells, Infinity), edges(across.cells, Infinity));
    const how = map.shape[0] === queries && map.shape[1] === keys ? "exact" : "pooled"; // a map of few tokens is exact
    return { rows: down.positions, cols: across.positions, cells, how, error: 0 };
  }

  /** @type {Source["thumbnails"]} */
  async thumbnails(session) {
    return this.#once(`${session}/thumbnails`, () => this.#session(session).thumbnails ?? { layers: [] });
  }

  /** @type {Source["rowsOfToken"]} */
  async rowsOfToken(session, token, layer, width) {
    const [{ layouts = [] }, thumbnails] = [await this.overview(session), await this.thumbnails(session)];
    const each = async (/** @type {import("./source.js").Layer} */ other, /** @type {number} */ index) => {
      const rows = await this.#rowsIn(session, token, layer, index);
      if (rows === null) return null;
      const [keys, grids] = [rows.values[0].length, thumbnails.layers[index]?.images ?? []];
      const layout = other.layout && layouts[other.layout[1]];
      const sums = layout ? grids.map((grid) => imageSums(rows.values, layout, grid)) : [];
      const rest = (/** @type {number} */ h) => sum(rows.values[h]) - sums.reduce((all, { rows: r }) => all + sum(r[h]), 0);
      return {
        ...{ layer: index, token: rows.token, cols: edges([0, keys], width), how: keys <= width ? "exact" : "pooled" },
        levels: levelsOf(rows.values.map((row) => bins(row, width, (a, b) => a + b).data), [Math.min(keys, width)]),
        images: sums.map(({ rows: values, shape }) => levelsOf(values, shape)),
        other: sums.length > 0 ? vector(Float32Array.from(rows.values.keys(), (h) => Math.max(0, rest(h)))) : null,
      };
    };
    return { token, layer, layers: await Promise.all((await this.overview(session)).layers.map(each)) };
  }

  /** @type {Source["linkInHeads"]} */
  async linkInHeads(session, token, key, layer) {
    const overview = await this.overview(session);
    const most = Math.max(...overview.layers.map(({ heads }) => heads));
    const data = new Float32Array(overview.layers.length * most).fill(NaN);
    for (const index of overview.layers.keys()) {
      const [rows, to] = [await this.#rowsIn(session, token, layer, index), placeIn(overview, layer, index, key, "keys")];
      if (to !== null) rows?.values.forEach((row, head) => (data[index * most + head] = row[to]));
    }
    const rounded = Object.values(this.#session(session).arrays).some(({ weights }) => weights?.error);
    const weights = { shape: [overview.layers.length, most], data };
    return { token, key, layer, weights, effects: null, how: rounded ? "rounded" : "exact" };
  }

  /**
   * One query's row in each head of a layer; null where the layer has no such query.
   * @param {string} session
   * @param {number} token
   * @param {number} layer  the one that counts the query so
   * @param {number} index
   */
  async #rowsIn(session, token, layer, index) {
    if (!this.#session(session).hover) throw new NotCarried("the rows of every head are not in this page");
    const overview = await this.overview(session);
    const place = placeIn(overview, layer, index, token, "queries");
    if (place === null) return null;
    const [{ heads }, { windows }] = [overview.layers[index], this.#layer(session, index)];
    const rows = Array.from({ length: heads }, (_, head) => rowOf(this.#arrays(session, index, head), place, windows));
    return { token: place, values: (await Promise.all(rows)).map(({ weights }) => weights) };
  }

  /** @type {Source["effects"]} */
  async effects(session, token, key) {
    const found = this.#session(session).effects?.[`${token}.${key}`];
    if (found === undefined) return { token, key, links: [], heads: null };
    return this.#once(`${session}/effects/${token}.${key}`, () => found);
  }

  /**
   * The links whose effects are in this page.
   * @param {string} session
   * @returns {{token: number, key: number}[]}
   */
  carried(session) {
    return Object.values(this.data.sessions[session]?.effects ?? {});
  }

  /** @type {Source["predictions"]} */
  async predictions(session) {
    return this.#session(session).predictions ?? null;
  }

  /** @type {Source["image"]} */
  async image(session, number) {
    const found = this.#session(session).images?.[number];
    if (found === undefined) throw new Error(`image ${number} is not in this page`);
    return found;
  }

  /** @type {Source["page"]} */
  async page(session, view, lang) {
    const copy = /** @type {HTMLElement} */ (document.documentElement.cloneNode(true));
    copy.lang = lang;
    copy.querySelector("#regard")?.replaceWith(Object.assign(document.createElement("div"), { id: "regard" }));
    const said = copy.querySelector("#regard-view");
    if (said) said.textContent = JSON.stringify(view).replaceAll("<", "\\u003c");
    return new Blob([`<!doctype html>\n${copy.outerHTML}\n`], { type: "text/html" });
  }

  /**
   * @param {string} session
   * @param {number} layer
   * @returns {{windows: number, keys: number}}
   */
  #layer(session, layer) {
    const { windows = 1, keys } = this.#session(session).overview.layers[layer];
    return { windows, keys };
  }

  /** @param {string} session */
  #session(session) {
    const found = this.data.sessions[session];
    if (found === undefined) throw new Error(`this page holds no session ${session}`);
    return found;
  }

  /**
   * @param {string} session
   * @param {number} layer
   * @param {number} head
   */
  #arrays(session, layer, head) {
    const found = this.#session(session).arrays[`${layer}.${head}`];
    if (found === undefined) throw new Error(`the rows of layer ${layer}, head ${head} are not in this page`);
    return found;
  }

  /**
   * @param {string} name
   * @param {() => any} packed
   */
  #once(name, packed) {
    return this.#later(name, () => unpackAll(packed()));
  }

  /**
   * @param {string} name
   * @param {() => any} make  a value, or a promise of one
   */
  #later(name, make) {
    if (!this.decoded.has(name)) this.decoded.set(name, make());
    return this.decoded.get(name);
  }
}

/**
 * One query's weights over all keys, NaN where they are not known, and what they are: "exact"; "rounded", off by at
 * most `error`; or "strongest", where the weights of the other keys are not in the page.
 * @param {Arrays} arrays
 * @param {number} token
 * @param {number} windows  that the layer is cut into: weights hold the keys of the query's own
 */
async function rowOf({ weights, top }, token, windows) {
  if (weights !== undefined) {
    const [error, all] = [weights.error ?? 0, await numbers(weights)];
    const row = windows > 1 ? inWindow(all, token, windows) : line(all, token);
    return { weights: row, how: error ? "rounded" : "exact", error };
  }
  if (top === undefined) throw new Error("the rows of this head are not in this page");
  const [index, weight] = await Promise.all([numbers(top.index), numbers(top.weight)]);
  const row = new Float32Array(top.keys).fill(NaN);
  const strength = line(weight, token);
  line(index, token).forEach((key, n) => {
    if (strength[n] > 0) row[key] = strength[n];
  });
  return { weights: row, how: "strongest", error: top.weight.error ?? 0 };
}

/**
 * A row among the keys of all windows; those of the others weigh 0.
 * @param {Numbers} all  (queries of all windows, keys of one)
 * @param {number} token
 * @param {number} windows
 */
function inWindow(all, token, windows) {
  const [queries, each] = all.shape;
  const row = new Float32Array(each * windows);
  row.set(line(all, token), Math.floor(token / (queries / windows)) * each);
  return row;
}

/**
 * The rows [a, b) among the keys of all windows, as a matrix in which only they are filled.
 * @param {Numbers} all
 * @param {number[]} rows
 * @param {number} windows
 * @param {number} keys
 * @returns {Numbers}
 */
function spread(all, [a, b], windows, keys) {
  const data = new Float32Array(all.shape[0] * keys);
  for (let i = a; i < b; i++) data.set(inWindow(all, i, windows), i * keys);
  return { shape: [all.shape[0], keys], data };
}

/**
 * @param {Numbers} matrix
 * @param {number} index
 */
function line(matrix, index) {
  const [rows, width] = matrix.shape;
  if (!(index >= 0 && index < rows)) throw new Error(`there are ${rows} positions, and no ${index}`);
  return matrix.data.slice(index * width, (index + 1) * width);
}

/**
 * @param {Float32Array} data
 * @returns {Numbers}
 */
function vector(data) {
  return { shape: [data.length], data };
}

/** @param {Float32Array} values */
function sum(values) {
  return values.reduce((a, b) => a + b, 0);
}

/**
 * Bounds of at most `size` parts of [a, b), as even as whole positions allow.
 * @param {number[]} span
 * @param {number} size
 */
function edges([a, b], size) {
  const parts = Math.max(1, Math.min(size, b - a));
  return Array.from({ length: parts + 1 }, (_, i) => a + Math.floor((i * (b - a)) / parts));
}

/**
 * The cells of a pooled side that cover [a, b), and the positions that they stand for.
 * @param {number[]} span
 * @param {number} length
 * @param {number} cells
 */
function covering([a, b], length, cells) {
  const cellOf = (/** @type {number} */ position) => Math.ceil(((position + 1) * cells) / length) - 1;
  const found = [cellOf(a), cellOf(b - 1) + 1];
  return { cells: found, positions: found.map((cell) => Math.floor((cell * length) / cells)) };
}

/**
 * Sums over the columns between two bounds, means over the rows.
 * @param {Numbers} matrix
 * @param {number[]} down
 * @param {number[]} across
 * @returns {Numbers}
 */
function pooled(matrix, down, across) {
  const shape = [down.length - 1, across.length - 1];
  const data = new Float32Array(shape[0] * shape[1]);
  for (let r = 0; r < shape[0]; r++)
    for (let c = 0; c < shape[1]; c++) {
      let sum = 0;
      for (let i = down[r]; i < down[r + 1]; i++)
        for (let j = across[c]; j < across[c + 1]; j++) sum += matrix.data[i * matrix.shape[1] + j];
      data[r * shape[1] + c] = sum / (down[r + 1] - down[r]);
    }
  return { shape, data };
}

/**
 * @param {Float32Array} values
 * @param {number} size
 * @param {(a: number, b: number) => number} join
 */
function bins(values, size, join) {
  const bounds = edges([0, values.length], size);
  const joined = bounds.slice(1).map((stop, i) => values.subarray(bounds[i], stop).reduce(join, 0));
  return vector(Float32Array.from(joined));
}

/**
 * @param {Float32Array} values
 * @param {number} count
 */
function largest(values, count) {
  const order = Array.from(values.keys()).sort((a, b) => values[b] - values[a] || a - b);
  return order.slice(0, count).filter((key) => values[key] > 0);
}

/**
 * What the softmax got, from what it made: −∞ for a masked key, and null where a weight of 0 does not tell.
 * @param {number[]} weights
 * @param {number[]} scaled
 * @param {boolean[]} masked
 * @param {number} lse
 */
function scoresOf(weights, scaled, masked, lse) {
  const told = weights.map((weight) => Math.log(weight) + lse);
  const plain = told.every((score, i) => !Number.isFinite(score) || Math.abs(score - scaled[i]) < 1e-3 * Math.max(1, Math.abs(score)));
  return told.map((score, i) => (masked[i] ? -Infinity : weights[i] === 0 ? (plain ? scaled[i] : null) : score));
}

/**
 * The keys that the steps show, in the text's order: those of the largest weights that are not masked, and the one asked
 * for.
 * @param {Float32Array} weights
 * @param {number} key
 * @param {Float32Array} hidden
 */
function chosen(weights, key, hidden) {
  const order = Array.from(weights.keys()).filter((j) => hidden[j] === 0);
  const size = (/** @type {number} */ j) => (Number.isNaN(weights[j]) ? 1 : weights[j]); // NaN is to be seen
  const found = order.sort((a, b) => size(b) - size(a) || a - b).slice(0, SHOWN);
  return (found.includes(key) ? found : [...found.slice(0, SHOWN - 1), key]).sort((a, b) => a - b);
}

/**
 * @param {Float32Array} a
 * @param {Float32Array} b
 */
function dot(a, b) {
  return a.reduce((sum, value, i) => sum + value * b[i], 0);
}

/**
 * @param {Float32Array} weights
 * @param {Numbers} values
 */
function mixed(weights, values) {
  const width = values.shape[1];
  const sum = new Float32Array(width);
  weights.forEach((weight, j) => {
    for (let i = 0; i < width; i++) sum[i] += weight * values.data[j * width + i];
  });
  return sum;
}
