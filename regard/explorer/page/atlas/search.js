// The atlas's search: "induction > 0.4", "entropy < 1 and layer = 3", "label = induction or not (first > 0.5)". Reads a
// text into a question about one head.
//
//     either := both ("or" both)*        both := one ("and" one)*
//     one := "not" one | "(" either ")" | name ("<" | "<=" | ">" | ">=" | "=" | "!=") number
//          | "label" ("=" | "!=") pattern | pattern               a pattern alone asks for heads named by it

import { message } from "../shared/messages.js";

/** @typedef {{numbers: Record<string, number>, label: string | null}} Asked  one head */
/** @typedef {(head: Asked) => boolean} Question */

/** What is wrong with a search: an English text of the catalogue, and what fills its fields. */
export class SearchError extends Error {
  /**
   * @param {string} text
   * @param {Record<string, string>} [values]
   */
  constructor(text, values = {}) {
    super(text);
    this.values = values;
  }
}

/** @type {Record<string, (a: number, b: number) => boolean>} */
const COMPARE = {
  "<": (a, b) => a < b,
  "<=": (a, b) => a <= b,
  ">": (a, b) => a > b,
  ">=": (a, b) => a >= b,
  "=": (a, b) => a === b || Math.abs(a - b) < 0.005, // as numbers are shown: two digits
  "!=": (a, b) => Math.abs(a - b) >= 0.005,
};
const ALIKE = {
  "==": "=",
  "≤": "<=",
  "≥": ">=",
  "≠": "!=",
  "&&": "and",
  "&": "and",
  "||": "or",
  "|": "or",
  "!": "not",
};
const SAME = new Map(Object.entries(ALIKE));
const PART =
  /\s*(?:(<=|>=|!=|==|&&|\|\||[<>=≤≥≠()&|!])|("[^"]*")|(-?(?:\d+\.?\d*|\.\d+)(?![\w.]))|([\p{L}_][\p{L}\p{N}_]*)|(\S))/uy;

/**
 * A search as a question about one head. Raises SearchError for a text that cannot be read.
 * @param {string} text
 * @param {{numbers: string[], patterns: string[]}} names  that can be asked about; "_" stands for a space
 * @returns {Question}
 */
export function readSearch(text, names) {
  const parts = split(text, [...names.numbers, ...names.patterns]);
  if (parts.length === 0) return () => true;
  const reader = new Reader(parts, names);
  const question = reader.either();
  if (reader.at < parts.length)
    throw new SearchError(message("“{word}” was not expected here. Join conditions by and, or."), { word: parts[reader.at] });
  return question;
}

/**
 * @param {string} text
 * @param {string[]} names
 * @returns {string[]}
 */
function split(text, names) {
  const parts = [];
  PART.lastIndex = 0;
  for (let found = PART.exec(text); found; found = PART.exec(text)) {
    const [, sign, quoted, number, word, other] = found;
    if (other) throw new SearchError(message("“{word}” cannot stand in a search."), { word: other });
    parts.push(SAME.get(sign) ?? sign ?? quoted?.slice(1, -1) ?? number ?? word.toLowerCase());
  }
  return joined(
    parts,
    names.map((name) => name.toLowerCase()),
  );
}

/**
 * Names of two words, such as "same token", are written with a space, "_" or in quotes.
 * @param {string[]} parts
 * @param {string[]} names
 */
function joined(parts, names) {
  const whole = [];
  for (let i = 0; i < parts.length; i++) {
    const two = `${parts[i]} ${parts[i + 1]}`;
    const plain = parts[i].replaceAll("_", " ");
    if (names.includes(two)) whole.push(two) && i++;
    else whole.push(!names.includes(parts[i]) && names.includes(plain) ? plain : parts[i]);
  }
  return whole;
}

class Reader {
  /**
   * @param {string[]} parts
   * @param {{numbers: string[], patterns: string[]}} names
   */
  constructor(parts, names) {
    this.parts = parts;
    this.names = names;
    this.at = 0;
  }

  /** @returns {Question} */
  either() {
    const asked = [this.both()];
    while (this.take("or")) asked.push(this.both());
    return (head) => asked.some((question) => question(head));
  }

  /** @returns {Question} */
  both() {
    const asked = [this.one()];
    while (this.take("and")) asked.push(this.one());
    return (head) => asked.every((question) => question(head));
  }

  /** @returns {Question} */
  one() {
    if (this.take("not")) {
      const question = this.one();
      return (head) => !question(head);
    }
    if (this.take("(")) {
      const question = this.either();
      if (!this.take(")")) throw new SearchError(message("A bracket is open: “)” is missing."));
      return question;
    }
    const name = this.parts[this.at++];
    if (name === undefined) throw new SearchError(message("The condition ends too early: a measure is missing."));
    return name === "label" ? this.label() : this.compared(name);
  }

  /** @returns {Question} */
  label() {
    const sign = this.parts[this.at++];
    if (sign !== "=" && sign !== "!=")
      throw new SearchError(message("“{word}” needs a comparison, as in {word} > 0.4."), { word: "label" });
    const wanted = this.parts[this.at++] ?? "";
    const { patterns } = this.names;
    if (!patterns.includes(wanted))
      throw new SearchError(message("“{word}” is no pattern. There are: {names}."), { word: wanted, names: patterns.join(", ") });
    return (head) => (head.label === wanted) === (sign === "=");
  }

  /**
   * @param {string} name
   * @returns {Question}
   */
  compared(name) {
    const { numbers, patterns } = this.names;
    if (!numbers.includes(name))
      throw new SearchError(message("“{word}” is no measure. There are: {names}."), { word: name, names: [...numbers, "label"].join(", ") });
    const sign = this.parts[this.at];
    if (sign in COMPARE) return this.number(name, sign);
    if (patterns.includes(name)) return (head) => head.label === name;
    throw new SearchError(message("“{word}” needs a comparison, as in {word} > 0.4."), { word: name });
  }

  /**
   * @param {string} name
   * @param {string} sign
   * @returns {Question}
   */
  number(name, sign) {
    this.at += 1;
    const text = this.parts[this.at++] ?? "";
    const value = Number(text);
    const example = `${name} ${sign} 0.4`;
    if (text === "" || Number.isNaN(value))
      throw new SearchError(message("A number must come after “{word}”, as in {example}."), { word: `${name} ${sign}`, example });
    return (head) => COMPARE[sign](head.numbers[name], value);
  }

  /** @param {string} part */
  take(part) {
    if (this.parts[this.at] !== part) return false;
    this.at += 1;
    return true;
  }
}
