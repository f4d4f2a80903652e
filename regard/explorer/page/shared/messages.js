// Text for people: messages in the page's language, numbers in few digits.
//
//     translate("{count} of {all} {all|head|heads}", lang, { count: 3, all: 72 })      // "3 of 72 heads"
//     const HINT = message("click to hold");                       // translated later: translate(HINT, lang)
//
// The English text is the key. Korean is in regard/locale/ko/page.json, which the server, an exported file and a notebook
// hand to `addCatalogues`. tests/test_locale.py finds texts by `translate…("…"` and `message("…"`: write them there as one
// literal, and fields as {name}; {name|one|many} is "one" where the value is 1.

/** @typedef {"en" | "ko"} Lang */

/** @type {Record<string, Record<string, string>>} */
const CATALOGUES = { en: {}, ko: {} };

/**
 * Take catalogues: language → English text → translation.
 * @param {Record<string, Record<string, string>>} catalogues
 */
export function addCatalogues(catalogues) {
  for (const [lang, texts] of Object.entries(catalogues)) Object.assign((CATALOGUES[lang] ??= {}), texts);
}

/**
 * Marks an English text that is translated elsewhere; returns it as it is.
 * @param {string} text
 */
export function message(text) {
  return text;
}

/**
 * A text in a language, with its fields filled in.
 * @param {string} text  in English
 * @param {string} lang
 * @param {Record<string, string | number>} [values]
 * @returns {string}
 */
export function translate(text, lang, values = {}) {
  return translateParts(text, lang, values).join("");
}

/**
 * The same in parts, so that what fills a field may be an element, as a label in a direction of its own is.
 * @template Part
 * @param {string} text
 * @param {string} lang
 * @param {Record<string, Part | number>} values
 * @returns {(Part | string)[]}
 */
export function translateParts(text, lang, values) {
  return (CATALOGUES[lang]?.[text] ?? text).split(/(\{[^}]+\})/).map((part) => {
    const [, name, one, many] = /^\{(\w+)(?:\|([^|]*)\|([^|]*))?\}$/.exec(part) ?? [];
    if (name === undefined || !(name in values)) return part;
    if (one !== undefined) return String(values[name]) === "1" ? one : many;
    const value = values[name];
    return typeof value === "number" ? String(value) : value;
  });
}

/**
 * The language that a browser asks for.
 * @returns {Lang}
 */
export function browserLanguage() {
  const asked = globalThis.navigator?.languages ?? [];
  const known = asked.map((tag) => tag.slice(0, 2)).find((tag) => tag in CATALOGUES);
  return known === "ko" ? "ko" : "en";
}

/** @type {Record<string, string>} */
const HOW = {
  exact: message("exact"),
  pooled: message("pooled"),
  rounded: message("rounded"),
  strongest: message("strongest only"),
};

/**
 * How an answer's numbers were made: exact, pooled, rounded, strongest only.
 * @param {string} how
 * @param {string} lang
 */
export function howText(how, lang) {
  return translate(HOW[how] ?? how, lang);
}

/** @type {Record<string, string>} */
const KINDS = {
  text: message("text"),
  patch: message("patches"),
  cls: "cls",
  distillation: message("distillation"),
  register: message("registers"),
  latent: message("latents"),
  padding: message("padding"),
};

/**
 * A kind of token.
 * @param {string} kind
 * @param {string} lang
 */
export function kindText(kind, lang) {
  return translate(KINDS[kind] ?? kind, lang);
}

/**
 * A number for people: few digits, no needless zeros, never "0.00" for what is not zero; "–" where it is not known.
 * @param {number | null | undefined} value
 * @returns {string}
 */
export function figure(value) {
  if (value === null || value === undefined) return "–";
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  const digits = size >= 1e7 ? -1 : size === 0 || size >= 100 ? 0 : size >= 10 ? 1 : size >= 0.01 ? 2 : size >= 0.0001 ? 4 : -1;
  const text = digits < 0 ? value.toExponential(0) : digits < 4 ? value.toFixed(digits) : value.toPrecision(1);
  return text.replaceAll("-", "−");
}

/**
 * A change of a weight, with its sign.
 * @param {number | null | undefined} change
 */
export function signedDigits(change) {
  if (!change) return digits(change);
  return `${change > 0 ? "+" : "−"}${digits(Math.abs(change))}`;
}

/**
 * A weight in four digits; "–" where it is not known.
 * @param {number | null | undefined} weight
 */
export function digits(weight) {
  if (weight === null || weight === undefined) return "–";
  if (Number.isNaN(weight)) return "NaN";
  if (weight === 0) return "0";
  return weight >= 0.001 ? weight.toFixed(4) : weight.toExponential(2).replace("-", "−");
}
