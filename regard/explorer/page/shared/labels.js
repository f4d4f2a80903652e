// Labels of tokens, fetched a page at a time, and how each is shown: which pieces belong to one word, which tokens are
// not words at all, single letters of Hangul (`Labels`); names of a layer's queries and keys, patches included
// (`Naming`).

import { placedTokens } from "../image/patches.js";

/** @typedef {import("../source/source.js").Overview} Overview */
/** @typedef {import("../source/source.js").Source} Source */

/** @typedef {"word" | "special" | "bytes" | "nothing"} PieceKind */
/**
 * text: to show.  joins: it continues the word before it.  breaks: a new line follows.
 * @typedef {{index: number, text: string, joins: boolean, breaks: boolean, kind: PieceKind, whole: string}} Piece
 */

const PAGE = 1024;
const LONGEST = 40;
const SPECIAL = /^(\[[A-Za-z0-9_]{2,16}\]|<\|?[^<>\s]{1,32}\|?>)$/;
/** What shows nothing or turns the writing around: controls, marks of direction, letters without width, ends of lines. */
const HIDDEN = /[\p{Cc}\p{Zl}\p{Zp}\p{Default_Ignorable_Code_Point}\p{Bidi_Control}\ufff9-\ufffb]/gu;
/** Of these, what shapes its neighbours: joiners between two of them, variants and tags after one. */
const JOINERS = /[\u200c\u200d]/;
const SHAPES = /[\ufe00-\ufe0f\u{e0020}-\u{e007f}]/u;
/** Parts of characters, as byte-level vocabularies and those that fall back on bytes have them. */
const BYTES = /^ ?((\\x[0-9a-f]{2})+|(<0x[0-9a-f]{2}>)+)$/i;
const SUBSCRIPTS = "₀₁₂₃₄₅₆₇₈₉";
const LEADING = "ㄱㄲㄴㄷㄸㄹㅁㅂㅃㅅㅆㅇㅈㅉㅊㅋㅌㅍㅎ";
const FINAL = "ㄱㄲㄳㄴㄵㄶㄷㄹㄺㄻㄼㄽㄾㄿㅀㅁㅂㅄㅅㅆㅇㅈㅊㅋㅌㅍㅎ";

export class Labels {
  /**
   * @param {import("../source/source.js").Source} source
   * @param {string} session
   * @param {import("../source/source.js").Overview} overview
   * @param {() => void} arrived  told when words came
   */
  constructor(source, session, overview, arrived) {
    this.source = source;
    this.session = session;
    this.length = overview.length;
    this.arrived = arrived;
    /** @type {Map<number, string[]>} */
    this.pages = new Map();
    /** @type {Set<number>} */
    this.asked = new Set();
    for (let at = 0; at < overview.labels.length; at += PAGE) {
      const labels = overview.labels.slice(at, at + PAGE);
      if (at + labels.length === this.length || labels.length === PAGE) this.pages.set(at / PAGE, labels);
    }
    this.marks = marksOf(overview.labels);
  }

  /**
   * The label of a token as the tokenizer gave it; undefined where it is not here yet.
   * @param {number} index
   * @returns {string | undefined}
   */
  raw(index) {
    return this.pages.get(Math.floor(index / PAGE))?.[index % PAGE];
  }

  /**
   * The label of a token in one line, or its number where nobody knows the word.
   * @param {number} index
   */
  short(index) {
    const label = this.raw(index);
    if (label === undefined || label === "") return `#${index}`;
    const made = this.#character(index);
    return made ? made.text + (made.at > 0 ? SUBSCRIPTS[made.at + 1] : "") : this.piece(index).text;
  }

  /**
   * The character that a token is a byte of, and which of its tokens this is; null where bytes make none.
   * @param {number} index
   */
  #character(index) {
    const parts = (/** @type {number} */ at) => bytesOf(this.raw(at) ?? "");
    const goesOn = (/** @type {number} */ at) => (parts(at)[0] & 0xc0) === 0x80 && parts(at - 1).length > 0;
    if (parts(index).length === 0) return null;
    let [start, stop] = [index, index + 1];
    while (goesOn(start)) start--;
    while (goesOn(stop)) stop++;
    if (stop - start < 2 || stop - start > 8) return null;
    const bytes = Array.from({ length: stop - start }, (_, i) => parts(start + i)).flat();
    try {
      return { text: visibly(new TextDecoder("utf-8", { fatal: true }).decode(Uint8Array.from(bytes))), at: index - start };
    } catch {
      return null;
    }
  }

  /**
   * Are the words of [start, stop) here? Those that are not are asked for, and `arrived` is told.
   * @param {number} start
   * @param {number} stop
   */
  have(start, stop) {
    let all = true;
    for (let page = Math.floor(start / PAGE); page * PAGE < Math.min(stop, this.length); page++) {
      if (this.pages.has(page)) continue;
      all = false;
      if (!this.asked.has(page)) void this.#ask(page);
    }
    return all;
  }

  /** @param {number} page */
  async #ask(page) {
    this.asked.add(page);
    try {
      const answer = await this.source.tokens(this.session, page * PAGE, Math.min((page + 1) * PAGE, this.length));
      this.pages.set(page, answer.labels);
    } catch {
      this.pages.set(page, []); // numbers stand in for words that cannot be had
    }
    this.arrived();
  }

  /**
   * @param {number} index
   * @returns {Piece}
   */
  piece(index) {
    const label = this.raw(index) ?? "";
    const made = this.#character(index);
    if (made) {
      const text = made.at === 0 ? made.text : SUBSCRIPTS[made.at + 1]; // the bytes of one emoji: 🍕₂₃₄
      return { index, text, joins: made.at > 0, breaks: false, kind: made.at === 0 ? "word" : "bytes", whole: text };
    }
    const kind = kindOf(label);
    const bare = label.replace(/^(##|[▁Ġ ]+)/, "").replace(/[\r\n]+/g, "↵").replace(/\t/g, "⇥");
    const text = kind === "nothing" ? `#${index}` : bare === "" ? "␣" : visibly(lettersOf(cut(bare)));
    const joins = index > 0 && kind === "word" && this.#continues(label, this.raw(index - 1) ?? "");
    return { index, text, joins, breaks: label.includes("\n"), kind, whole: visibly(cut(bare)) };
  }

  /**
   * @param {string} label
   * @param {string} before
   */
  #continues(label, before) {
    if (kindOf(before) === "special" || before.endsWith("\n")) return false;
    if (this.marks === "hashes") return label.startsWith("##");
    return this.marks === "spaces" && !/^[▁Ġ\s]/.test(label);
  }

  /**
   * Pieces [start, stop) that nobody knows words for: their numbers.
   * @param {number} start
   * @param {number} stop
   * @returns {{pieces: Piece[], whole: null}[]}
   */
  numbers(start, stop) {
    return Array.from({ length: stop - start }, (_, i) => {
      const text = `#${start + i}`;
      return { pieces: [{ index: start + i, text, joins: false, breaks: false, kind: "nothing", whole: text }], whole: null };
    });
  }

  /**
   * Pieces [start, stop) by the word they belong to; `whole` is the word where its pieces do not spell it by themselves.
   * @param {number} start
   * @param {number} stop
   * @returns {{pieces: Piece[], whole: string | null}[]}
   */
  words(start, stop) {
    /** @type {{pieces: Piece[], whole: string | null}[]} */
    const out = [];
    for (let index = start; index < stop; index++) {
      const piece = this.piece(index);
      if (piece.joins && out.length > 0) out[out.length - 1].pieces.push(piece);
      else out.push({ pieces: [piece], whole: null });
    }
    for (const word of out) word.whole = spelt(word.pieces);
    return out;
  }
}

/**
 * How this tokenizer marks where a word begins: "##" before pieces that continue, a space before those that begin.
 * @param {string[]} labels
 * @returns {"hashes" | "spaces" | "none"}
 */
function marksOf(labels) {
  if (labels.some((label) => /^##./.test(label))) return "hashes";
  return labels.some((label) => /^[▁Ġ ]\S/.test(label)) ? "spaces" : "none";
}

/**
 * The bytes that a label names; none where it is text.
 * @param {string} label
 * @returns {number[]}
 */
function bytesOf(label) {
  return BYTES.test(label) ? (label.match(/[0-9a-f]{2}/gi) ?? []).map((byte) => Number.parseInt(byte, 16)) : [];
}

/**
 * @param {string} label
 * @returns {PieceKind}
 */
function kindOf(label) {
  if (label === "") return "nothing";
  if (BYTES.test(label)) return "bytes";
  return SPECIAL.test(label) ? "special" : "word";
}

/**
 * A label no longer than a line has room for: a token may be a million characters long.
 * @param {string} text
 */
function cut(text) {
  if (text.length <= LONGEST) return text;
  return `${[...text.slice(0, 2 * LONGEST)].slice(0, LONGEST).join("")}…`;
}

/**
 * A text in which nothing is hidden: what has no shape, or turns what follows around, is written as its number, and so are
 * spaces that stand alone.
 * @param {string} text
 * @returns {string}
 */
export function visibly(text) {
  const named = (/** @type {string} */ letter) => `‹U+${hex(letter)}›`;
  if (/^[^\S ]+$/.test(text)) return [...text].map(named).join("");
  return text.replace(HIDDEN, (letter, at) => {
    const [before, after] = [at > 0, at + letter.length < text.length];
    return before && (SHAPES.test(letter) || (after && JOINERS.test(letter))) ? letter : named(letter);
  });
}

/** @param {string} letter */
function hex(letter) {
  return (letter.codePointAt(0) ?? 0).toString(16).toUpperCase().padStart(4, "0");
}

/**
 * Letters of Hangul that stand alone, as letters that fonts draw well; whole syllables as they are.
 * @param {string} text
 */
function lettersOf(text) {
  return text.normalize("NFC").replace(/[\u1100-\u1112\u1161-\u1175\u11a8-\u11c2]/g, (letter) => {
    const code = letter.charCodeAt(0);
    if (code < 0x1161) return LEADING[code - 0x1100];
    return code < 0x11a8 ? String.fromCharCode(0x314f + code - 0x1161) : FINAL[code - 0x11a8];
  });
}

/**
 * The word that pieces of Hangul letters or bytes make together, or null where they read well as they are.
 * @param {Piece[]} pieces
 */
function spelt(pieces) {
  if (pieces.length < 2) return null;
  const whole = pieces.map((piece) => piece.whole).join("").normalize("NFC");
  return whole.length < 40 && whole !== pieces.map((piece) => piece.text).join("") ? whole : null;
}

/**
 * A session in one line.
 * @param {SessionLine} line
 * @returns {string}
 */
export function titleOf({ id, name, text, image }) {
  const start = Array.from((text ?? "").replace(/\s+/g, " ").trim().slice(0, 200));
  const words = start.length > 60 ? `${start.slice(0, 59).join("")}…` : start.join("");
  const said = [image, words].filter(Boolean).join(", ");
  return visibly(said ? `${id}: ${said}` : `${id}: ${name}`);
}

// ---------------------------------------------------------------------------------------------------- names in a layer

export class Naming {
  /**
   * @param {Source} source
   * @param {string} session
   * @param {Overview} overview
   * @param {() => void} arrived  told when more words came
   */
  constructor(source, session, overview, arrived) {
    this.overview = overview;
    this.labels = new Labels(source, session, overview, arrived);
  }

  /**
   * @param {number} layer
   * @param {number} key
   * @returns {string}
   */
  key(layer, key) {
    const found = this.overview.layers[layer];
    if (found?.layout) return this.#placed(found.layout[1], key);
    return found?.labelled === false ? `#${key}` : this.#word(key);
  }

  /**
   * @param {number} layer
   * @param {number} query
   * @returns {string}
   */
  query(layer, query) {
    const found = this.overview.layers[layer];
    if (found?.layout) return this.#placed(found.layout[0], query);
    const first = found?.first;
    return first === null ? `#${query}` : this.key(layer, query + (first ?? 0));
  }

  /**
   * @param {number} layout
   * @param {number} token
   */
  #placed(layout, token) {
    const tokens = placedTokens(this.overview.layouts?.[layout] ?? { runs: [], grids: [] });
    const named = tokens.count === this.overview.length && this.overview.labels.some((label) => label !== "");
    return tokens.name(token) ?? (named ? this.#word(token) : `#${token}`);
  }

  /** @param {number} index */
  #word(index) {
    this.labels.have(index, index + 1);
    return this.labels.short(index);
  }
}
