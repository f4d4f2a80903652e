// The words of a window as wrapped text: pieces joined to words, heat by weight, the query and the key marked. One stop
// of the tab key for all of them; j, k, Home and End move between words. The image pane shows its other tokens with it.

import { stepAt } from "../shared/colours.js";
import { fill, focusedAround, make } from "../shared/elements.js";
import { digits, signedDigits, translate } from "../shared/messages.js";

/**
 * @typedef {object} Hands
 * @property {(index: number) => void} point  a word was pointed at, or has the focus
 * @property {(index: number) => void} press  a word was clicked, or Enter was pressed on it
 * @property {(by: number) => void} step  to the next word, or the one before
 * @property {() => void} release
 */
/**
 * broken: NaN is a weight, and not one that is not known.
 * @typedef {{start: number, weights: Float32Array | null, broken: boolean, token: number | null, key: number | null, held: boolean,
 *   sink: boolean, scale: import("../shared/colours.js").Scale, paper: import("../shared/colours.js").Paper, lang: string}} Heat
 */

export class WordView {
  /** @param {Hands} hands */
  constructor(hands) {
    this.hands = hands;
    this.element = make("div", { class: "text-words", role: "listbox", "aria-orientation": "horizontal" });
    /** @type {Map<number, HTMLElement>} */
    this.spans = new Map();
    /** @type {Map<number, string>} */
    this.looks = new Map(); // how each word was last coloured
    this.pointer = "";
    this.stop = -1;
    this.element.addEventListener("pointermove", (event) => this.#over(event));
    this.element.addEventListener("focusin", (event) => this.#with(event, this.hands.point));
    this.element.addEventListener("click", (event) => this.#with(event, this.hands.press));
    this.element.addEventListener("keydown", (event) => this.#key(event));
  }

  /**
   * Put these words into the pane.
   * @param {{pieces: import("../shared/labels.js").Piece[], whole: string | null}[]} words
   * @param {string} lang
   */
  write(words, lang) {
    const focused = this.#index(focusedAround(this.element));
    this.spans.clear();
    this.looks.clear();
    this.stop = -1;
    const special = translate("special token", lang);
    const groups = words.flatMap(({ pieces, whole }) => {
      const spans = pieces.map((piece, i) => this.#span(piece, special, i > 0, i < pieces.length - 1));
      const group = make("bdi", { class: "text-word", "data-whole": whole }, ...spans);
      return pieces[pieces.length - 1].breaks ? [group, make("br")] : [group, " "];
    });
    this.element.classList.toggle("spelt", words.some(({ whole }) => whole !== null));
    fill(this.element, ...groups);
    if (focused !== null) this.focus(focused);
  }

  /**
   * @param {import("../shared/labels.js").Piece} piece
   * @param {string} special
   * @param {boolean} before  a piece of the same word stands before it
   * @param {boolean} after
   */
  #span(piece, special, before, after) {
    const seams = (before ? " seam-before" : "") + (after ? " seam-after" : "");
    const span = make("span", {
      ...{ class: `text-piece kind-${piece.kind}${seams}`, role: "option", tabindex: -1, "data-index": piece.index, lang: "" },
      title: piece.kind === "special" ? special : null,
    }, piece.text);
    this.spans.set(piece.index, span);
    return span;
  }

  /**
   * Colour the words.
   * @param {Heat} heat
   */
  colour({ start, weights, broken, token, key, held, sink, scale, paper, lang }) {
    for (const [index, span] of this.spans) {
      const weight = weights?.[index - start] ?? null;
      const none = broken && Number.isNaN(weight);
      const hidden = !sink && index === 0;
      const [ramp, seen] = scale.signed ? [paper.signed, weight !== null && Math.abs(weight) > 0] : [paper.ramp, (weight ?? 0) > 0];
      const step = weight !== null && seen && !hidden ? stepAt(scale.place(weight)) : -1;
      const marks = { "left-out": hidden, broken: none, query: index === token, held: index === token && held, key: index === key };
      // Most words stay as they are from one hover to the next; touching them all would cost a layout of the whole text.
      const look = `${scale.signed} ${weight} ${step} ${paper.dark} ${lang} ${Object.values(marks)}`;
      if (look === this.looks.get(index)) continue;
      this.looks.set(index, look);
      span.style.backgroundColor = step < 0 ? "" : ramp.css[step];
      span.style.color = step < 0 ? "" : ramp.ink[step];
      for (const [name, on] of Object.entries(marks)) span.classList.toggle(name, on);
      this.#name(span, index, none || !Number.isNaN(weight) ? weight : null, index === token, lang, scale.signed);
    }
    this.#stopAt(token !== null && this.spans.has(token) ? token : (this.spans.keys().next().value ?? -1));
  }

  /**
   * @param {HTMLElement} span
   * @param {number} index
   * @param {number | null} weight  null where it is not known
   * @param {boolean} selected
   * @param {string} lang
   * @param {boolean} [signed]  the weight is a change
   */
  #name(span, index, weight, selected, lang, signed) {
    const word = span.textContent ?? "";
    const label =
      weight === null
        ? translate("{word}, token {index}", lang, { word, index })
        : signed
          ? translate("{word}, token {index}, change {weight}", lang, { word, index, weight: signedDigits(weight) })
          : translate("{word}, token {index}, weight {weight}", lang, { word, index, weight: digits(weight) });
    span.dataset.weight = weight === null ? "" : String(weight);
    span.setAttribute("aria-selected", String(selected));
    span.setAttribute("aria-label", label);
  }

  /**
   * Give a word the focus, if it is here.
   * @param {number} index
   */
  focus(index) {
    this.spans.get(index)?.focus({ preventScroll: false });
  }

  /**
   * Bring a word to the middle of what scrolls, unless it is in sight; false where the word is not here. Unlike
   * scrollIntoView, this moves nothing around the pane.
   * @param {number | null} index
   * @param {HTMLElement} scrolling
   */
  bringIntoSight(index, scrolling) {
    const span = this.spans.get(index ?? -1);
    if (!span) return false;
    const [word, room] = [span.getBoundingClientRect(), scrolling.getBoundingClientRect()];
    if (word.top < room.top || word.bottom > room.bottom)
      scrolling.scrollTop += (word.top + word.bottom) / 2 - (room.top + room.bottom) / 2;
    return true;
  }

  /** Has one of the words the focus? */
  get focused() {
    return this.element.contains(focusedAround(this.element));
  }

  /**
   * The tab key comes to this word.
   * @param {number} index
   */
  #stopAt(index) {
    if (index === this.stop) return;
    this.spans.get(this.stop)?.setAttribute("tabindex", "-1");
    this.spans.get(index)?.setAttribute("tabindex", "0");
    this.stop = index;
  }

  /** @param {EventTarget | null} target */
  #index(target) {
    const span = target instanceof Element && this.element.contains(target) ? target.closest(".text-piece") : null;
    return span instanceof HTMLElement ? Number(span.dataset.index) : null;
  }

  /**
   * @param {Event} event
   * @param {(index: number) => void} then
   */
  #with(event, then) {
    const index = this.#index(event.target);
    if (index !== null) then(index);
  }

  /**
   * Words that move under a resting pointer are not pointed at.
   * @param {PointerEvent} event
   */
  #over(event) {
    const pointer = `${event.clientX} ${event.clientY}`;
    if (pointer !== this.pointer && event.buttons === 0) this.#with(event, this.hands.point);
    this.pointer = pointer;
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    const index = this.#index(event.target);
    if (index === null || event.ctrlKey || event.metaKey || event.altKey) return;
    const all = [...this.spans.keys()];
    if (event.key === "j" || event.key === "k") this.hands.step(event.key === "j" ? 1 : -1);
    else if (event.key === "Home") this.focus(all[0]);
    else if (event.key === "End") this.focus(all[all.length - 1]);
    else if (event.key === "Enter" || event.key === " ") this.hands.press(index);
    else if (event.key === "Escape") this.hands.release();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}
