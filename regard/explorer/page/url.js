// The state as the address's hash and back: "#session=1&layer=3&head=1&token=8". What is as at first is left out; what a
// hash says wrongly is ignored, field by field. It does not know the store or the address bar.

import { FIRST } from "./state.js";

/** @typedef {import("./state.js").State} State */
/** @typedef {import("./state.js").Other} Other */

const NAME = /^[\w.:-]{1,200}$/;

/** @type {(text: string) => number | undefined} */
const count = (text) => (/^\d{1,9}$/.test(text) ? Number(text) : undefined);
/** @type {(text: string) => string | undefined} */
const name = (text) => (NAME.test(text) ? text : undefined);
/** @type {(text: string) => boolean | undefined} */
const flag = (text) => (text === "1" ? true : text === "0" ? false : undefined);
/** @type {(text: string) => string | undefined} */
const words = (text) => (text.length <= 300 ? text : undefined);
/** @type {(...allowed: string[]) => (text: string) => string | undefined} */
const oneOf =
  (...allowed) =>
  (text) =>
    allowed.includes(text) ? text : undefined;

/** @param {string} text "3-16" */
function span(text) {
  const [a, b, ...more] = text.split("-").map(count);
  return a === undefined || b === undefined || more.length > 0 || a >= b ? undefined : [a, b];
}

/** @param {string} text "0-64x3-16" */
function region(text) {
  const [rows, cols, ...more] = text.split("x").map(span);
  return rows && cols && more.length === 0 ? { rows, cols } : undefined;
}

/** @type {Record<string, (text: string) => any>} */
const OWN = { session: name, token: count, key: count, window: span, region };
/** @type {Record<string, (text: string) => any>} */
const FIELDS = {
  ...OWN,
  layer: count,
  head: count,
  measure: words,
  scale: oneOf("linear", "log", "rank"),
  sink: flag,
  lang: oneOf("en", "ko"),
  theme: oneOf("auto", "light", "dark"),
  view: oneOf("grid", "list", "rising"),
  find: words,
  drawer: flag,
};

/** @param {unknown} value */
function written(value) {
  if (typeof value === "boolean") return value ? "1" : "0";
  if (Array.isArray(value)) return value.join("-");
  if (value !== null && typeof value === "object") {
    const { rows, cols } = /** @type {{rows: number[], cols: number[]}} */ (value);
    return `${rows.join("-")}x${cols.join("-")}`;
  }
  return String(value);
}

/**
 * The hash of a state, without "#".
 * @param {State} state
 * @returns {string}
 */
export function toHash(state) {
  const hash = new URLSearchParams();
  const now = /** @type {Record<string, unknown>} */ (/** @type {unknown} */ (state));
  const first = /** @type {Record<string, unknown>} */ (/** @type {unknown} */ (FIRST));
  for (const field of Object.keys(FIELDS)) {
    if (now[field] !== null && now[field] !== first[field]) hash.set(field, written(now[field]));
  }
  if (state.compare) {
    for (const [field, value] of Object.entries(state.compare)) {
      if (value !== null && value !== false) hash.set(`with.${field}`, written(value));
    }
  }
  return hash.toString();
}

/**
 * The parts of a state that a hash tells, with or without "#".
 * @param {string} hash
 * @returns {Partial<State>}
 */
export function fromHash(hash) {
  const said = new URLSearchParams(hash.replace(/^#/, ""));
  const found = read(said, FIELDS, "");
  const other = read(said, { ...OWN, difference: flag }, "with.");
  if (other.session === undefined) return found;
  const nothing = { difference: false, token: null, key: null, window: null, region: null };
  return { ...found, compare: /** @type {Other} */ ({ ...nothing, ...other }) };
}

/**
 * Does what a hash tells say where to look, and not only how?
 * @param {Partial<State>} said
 */
export function saysPlace(said) {
  return ["layer", "head", "token", "key", "window", "region"].some((field) => field in said);
}

/**
 * @param {URLSearchParams} said
 * @param {Record<string, (text: string) => any>} fields
 * @param {string} prefix
 * @returns {Record<string, any>}
 */
function read(said, fields, prefix) {
  /** @type {Record<string, any>} */
  const found = {};
  for (const [field, reader] of Object.entries(fields)) {
    const text = said.get(prefix + field);
    const value = text === null ? undefined : reader(text);
    if (value !== undefined) found[field] = value;
  }
  return found;
}
