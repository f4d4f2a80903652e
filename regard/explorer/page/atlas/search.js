// The atlas's search: "induction > 0.4", "entropy < 1 and layer = 3", "label = induction or not (first > 0.5)", "L3 H1",
// "3.1", "heads that look at the previous word", "이전 단어를 보는 헤드". Reads a text into a question about one head.
//
//     either := both ("or" both)*        both := one ("and" one)*
//     one := "not" one | "(" either ")" | name ("<" | "<=" | ">" | ">=" | "=" | "!=") number
//          | "label" ("=" | "!=") pattern | pattern               a pattern alone asks for heads named by it
//          | "L" number ["H" number] | layer "." head
//
// A text that is none of this, and has no comparison in it, asks for the pattern that its words tell of.

import { message } from "../shared/messages.js";

/** rest: what a head that rests on the first token does beside that. @typedef {{numbers: Record<string, number>, label: string | null, rest?: string | null}} Asked  one head */
/**
 * What a question of one part asks for: a comparison, a pattern, or a place.
 * @typedef {{name: string, sign: string, value: number} | {pattern: string} | {layer: number, head: number | null}} Part
 */
/** part: where the whole question is one. @typedef {((head: Asked) => boolean) & {part?: Part}} Question */

/** Words for patterns and measures in English and Korean; the longest one that a text holds decides. */
/** @type {Record<string, string[]>} */
const SYNONYMS = {
  entropy: ["엔트로피"],
  effective: ["effective keys", "유효 키"],
  first: [
    ...["first token", "first word", "sink", "attention sink", "rest on", "beginning", "start of the text"],
    ...["첫 토큰", "첫 단어", "첫 번째", "싱크", "맨 앞", "문장 처음"],
  ],
  own: ["itself", "themselves", "own token", "own word", "self", "자기 자신", "자신", "스스로", "자기 토큰"],
  previous: [
    ...["previous token", "previous word", "previous", "preceding", "word before", "token before", "before", "one back"],
    ...["이전", "이전 단어", "이전 토큰", "앞 단어", "앞 토큰", "바로 앞", "직전", "앞의"],
  ],
  next: [
    ...["next token", "next word", "next", "following", "word after", "token after", "after", "one ahead"],
    ...["다음", "다음 단어", "다음 토큰", "뒤 단어", "뒤 토큰", "바로 뒤", "직후", "뒤의"],
  ],
  neighbours: [
    ...["neighbour", "neighbours", "neighbor", "neighbors", "nearby", "adjacent", "around", "close by", "local"],
    ...["이웃", "주변", "인접", "근처", "가까운", "양옆"],
  ],
  uniform: [
    ...["evenly", "uniform", "uniformly", "everywhere", "spread", "spread out", "all words", "average"],
    ...["고르게", "고루", "골고루", "균등", "균일", "전체", "퍼져", "퍼진", "분산"],
  ],
  delimiter: [
    ...["delimiter", "delimiters", "separator", "separators", "punctuation", "full stop", "period", "comma", "sep"],
    ...["구분", "구분자", "구두점", "문장 부호", "마침표", "쉼표"],
  ],
  "same token": [
    ...["same word", "same token", "same word before", "same token before", "identical", "duplicate", "duplicates", "same words"],
    ...["같은 단어", "같은 토큰", "동일한 단어", "동일한 토큰", "똑같은"],
  ],
  induction: [
    ...["induction", "induction head", "copy", "copies", "repetition", "repeated text", "what came after", "came after"],
    ...["인덕션", "귀납", "유도 헤드", "복사", "반복되는", "뒤에 왔던", "뒤에 나왔던"],
  ],
};
/** @type {Map<string, string>} */
const MEANT = new Map(Object.entries(SYNONYMS).flatMap(([name, words]) => words.map((word) => [word, name])));
const PLACE = /^(?:l|layer)(\d+)(?:h(\d+))?$/;

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
  /\s*(?:(<=|>=|!=|==|&&|\|\||[<>=≤≥≠()&|!])|("[^"]*")|(-?(?:\d+\.?\d*|\.\d+)(?![\w.]))|([\p{L}_][\p{L}\p{N}_]*)|,|(\S))/uy;

/**
 * A search as a question about one head. Raises SearchError for a text that cannot be read.
 * @param {string} text
 * @param {{numbers: string[], patterns: string[]}} names  that can be asked about; "_" stands for a space
 * @returns {Question}
 */
export function readSearch(text, names) {
  try {
    return readConditions(text, names);
  } catch (error) {
    const pattern = error instanceof SearchError ? meantPattern(text, names.patterns) : null;
    if (pattern === null) throw error;
    return asking((head) => isNamed(head, pattern), { pattern });
  }
}

/**
 * The pattern that a sentence without comparisons tells of; null where it tells of none.
 * @param {string} text
 * @param {string[]} patterns
 */
export function meantPattern(text, patterns) {
  if (/[<>=≤≥≠()!&|"]|\b(?:not|no|never|without|don't|doesn't)\b|않|아닌|없는/i.test(text)) return null;
  const words = ` ${text.toLowerCase().replace(/[\s,.?_-]+/g, " ")} `;
  const held = [...MEANT].filter(([word, name]) => patterns.includes(name) && holds(words, word));
  return held.sort(([a], [b]) => b.length - a.length)[0]?.[1] ?? null;
}

/**
 * Whole words in English; in Korean an ending may follow, as 를 does.
 * @param {string} words
 * @param {string} word
 */
function holds(words, word) {
  return words.includes(/[a-z]/.test(word) ? ` ${word} ` : ` ${word}`);
}

/**
 * @param {Asked} head
 * @param {string} pattern
 */
function isNamed({ label, rest }, pattern) {
  return label === pattern || rest === pattern;
}

/**
 * @param {(head: Asked) => boolean} question
 * @param {Part} part
 * @returns {Question}
 */
function asking(question, part) {
  return Object.assign(question, { part });
}

/**
 * @param {string} text
 * @param {{numbers: string[], patterns: string[]}} names
 * @returns {Question}
 */
function readConditions(text, names) {
  const parts = split(text, [...names.numbers, ...names.patterns, ...MEANT.keys()]);
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
    const part = SAME.get(sign) ?? sign ?? quoted?.slice(1, -1) ?? number ?? word?.toLowerCase();
    if (part !== undefined) parts.push(part); // a comma, as in "layer 3, head 1", is none
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
    if (asked.length === 1) return asked[0];
    return (head) => asked.some((question) => question(head));
  }

  /** @returns {Question} */
  both() {
    const asked = [this.one()];
    while (this.take("and")) asked.push(this.one());
    if (asked.length === 1) return asked[0];
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
    if (name === "label") return this.label();
    return this.place(name) ?? this.compared(this.meant(name));
  }

  /**
   * What a name in other words, or in Korean, means.
   * @param {string} name
   */
  meant(name) {
    const { numbers, patterns } = this.names;
    const meant = MEANT.get(name);
    return numbers.includes(name) || meant === undefined || ![...numbers, ...patterns].includes(meant) ? name : meant;
  }

  /**
   * "L3 H1", "L3H1", "layer 3 head 1", "3.1", or a whole layer, "L3"; null for anything else.
   * @param {string} name
   * @returns {Question | null}
   */
  place(name) {
    const next = () => this.parts[this.at] ?? "";
    const counted = (/** @type {string[]} */ words) => words.includes(name) && /^\d+$/.test(next());
    const dotted = /^(\d+)\.(\d+)$/.exec(name);
    const layer = counted(["layer", "레이어", "층", "l"]) ? this.parts[this.at++] : (PLACE.exec(name) ?? dotted)?.[1];
    if (layer === undefined) return null;
    let head = PLACE.exec(name)?.[2] ?? dotted?.[2];
    if (head === undefined && /^h\d+$/.test(next())) head = this.parts[this.at++].slice(1);
    else if (head === undefined && ["head", "헤드", "h"].includes(next())) {
      this.at += 1;
      if (/^\d+$/.test(next())) head = this.parts[this.at++];
    }
    const wanted = { layer: Number(layer), head: head === undefined ? null : Number(head) };
    const question = (/** @type {Asked} */ { numbers }) =>
      numbers.layer === wanted.layer && (wanted.head === null || numbers.head === wanted.head);
    return asking(question, wanted);
  }

  /** @returns {Question} */
  label() {
    const sign = this.parts[this.at++];
    if (sign !== "=" && sign !== "!=")
      throw new SearchError(message("“{word}” needs a comparison, as in {word} > 0.4."), { word: "label" });
    const wanted = this.meant(this.parts[this.at++] ?? "");
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
    if (patterns.includes(name)) return asking((head) => isNamed(head, name), { pattern: name });
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
    return asking((head) => COMPARE[sign](head.numbers[name], value), { name, sign, value });
  }

  /** @param {string} part */
  take(part) {
    if (this.parts[this.at] !== part) return false;
    this.at += 1;
    return true;
  }
}
