// Swap a word: double-click on it (or e, or the pencil), type another, and the model reads the text again; both texts
// are then compared.

import { fill, make } from "../shared/elements.js";
import { message, translate } from "../shared/messages.js";

/** @typedef {import("../source/source.js").Source} Source */
/** @typedef {import("../state.js").Store} Store */

const EVERY_MS = 200; // between two questions about a job
const LONGEST = 200; // characters of a word, as the server takes

/**
 * Let words of a text pane be swapped. Returns a function that ends it.
 * @param {HTMLElement} pane
 * @param {Store} store
 * @param {Source} source
 * @param {(session: string) => Promise<void>} swapped  told of the new session
 * @returns {() => void}
 */
export function offerSwap(pane, store, source, swapped) {
  if (!source.swap) return () => undefined;
  const swap = new Swap(pane, store, source, swapped);
  const ends = new AbortController();
  const { signal } = ends;
  pane.addEventListener("dblclick", (event) => swap.open(pieceAt(event.target)), { signal });
  pane.addEventListener(
    "keydown",
    (event) => {
      const piece = pieceAt(event.target);
      if (piece === null || event.key !== "e" || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      swap.open(piece);
    },
    { signal },
  );
  const off = store.on((_, changed) => {
    if (changed.has("lang")) swap.label();
    if (changed.has("session")) swap.close(), void swap.learn();
  });
  swap.label();
  void swap.learn();
  return () => {
    ends.abort();
    off();
    swap.close();
    swap.pencil.remove();
  };
}

/**
 * The word of the text that an event came from.
 * @param {EventTarget | null} target
 * @returns {HTMLElement | null}
 */
function pieceAt(target) {
  return target instanceof Element ? target.closest(".text-piece:not(.kind-special, .kind-nothing)") : null;
}

class Swap {
  /**
   * @param {HTMLElement} pane
   * @param {Store} store
   * @param {Source} source
   * @param {(session: string) => Promise<void>} swapped
   */
  constructor(pane, store, source, swapped) {
    this.pane = pane;
    this.store = store;
    this.source = source;
    this.swapped = swapped;
    this.able = false;
    this.work = 0; // the number of the swap that is waited for
    /** @type {HTMLElement | null} */
    this.form = null;
    this.pencil = make("button", {
      ...{ type: "button", class: "pencil", "data-role": "swap", "data-saving": "skip", hidden: true },
      onclick: () => this.open(this.#chosen()),
    }, "✎");
    pane.append(this.pencil);
  }

  label() {
    const words = translate("Swap the chosen word for another: double-click on a word, or press e on it", this.store.get().lang);
    this.pencil.title = words;
    this.pencil.setAttribute("aria-label", words);
  }

  /** Can the words of this session be swapped? That needs its text and a model. */
  async learn() {
    const { session } = this.store.get();
    const overview = session === null ? null : await this.source.overview(session).catch(() => null);
    if (session !== this.store.get().session) return;
    const { text = null, images = [], layers = [] } = overview ?? {};
    this.able = text !== null && images.length === 0 && layers.some(({ no_effects: why }) => why !== "no_model");
    this.pencil.hidden = !this.able;
  }

  /** The query word, else the key, else the first word. */
  #chosen() {
    const words = [".query", ".key", ""].map((mark) => this.pane.querySelector(`.text-piece${mark}:not(.kind-special, .kind-nothing)`));
    return /** @type {HTMLElement | null} */ (words.find(Boolean) ?? null);
  }

  /** @param {HTMLElement | null} piece */
  open(piece) {
    const word = piece?.closest(".text-word");
    if (!piece || !word || !this.able) return;
    this.close();
    const { lang } = this.store.get();
    const [box, room] = [word.getBoundingClientRect(), this.pane.getBoundingClientRect()];
    const before = word.textContent ?? "";
    const wide = Math.min(room.width - 16, Math.max(150, box.width + 60));
    const input = make("input", {
      ...{ type: "text", maxlength: LONGEST, value: before, spellcheck: "false", autocomplete: "off" },
      "aria-label": translate("Another word for “{word}”", lang, { word: before }),
    });
    const status = make("div", { class: "swap-status", role: "status" }, translate("Enter: read the text with this word", lang));
    const leave = (/** @type {FocusEvent} */ event) => {
      const inside = this.form?.contains(/** @type {Node | null} */ (event.relatedTarget)) ?? true;
      if (!inside && !input.disabled && document.hasFocus()) this.close();
    };
    const keys = (/** @type {KeyboardEvent} */ event) => {
      event.stopPropagation();
      if (event.key === "Escape") this.close(piece);
      if (event.key !== "Enter" || event.isComposing || input.disabled) return;
      event.preventDefault(); // the button that gets the focus would be pressed
      void this.#start(piece, before, input, status);
    };
    this.form = make("div", { class: "swap", "data-saving": "skip", onfocusout: leave, onkeydown: keys }, input, status);
    const left = Math.max(8, Math.min(box.left - room.left - 4, room.width - wide - 8));
    this.form.style.cssText = `left: ${left}px; top: ${Math.max(4, box.top - room.top - 3)}px; width: ${wide}px`;
    this.pane.append(this.form);
    input.select();
    input.focus();
  }

  /**
   * Close the field, and stop waiting for what it started.
   * @param {HTMLElement} [piece]  which gets the focus back
   */
  close(piece) {
    this.work += 1;
    const { form } = this;
    this.form = null; // what has the focus in it loses it, which would close it again
    form?.remove();
    piece?.focus();
  }

  /**
   * @param {HTMLElement} piece
   * @param {string} before
   * @param {HTMLInputElement} input
   * @param {HTMLElement} status
   */
  async #start(piece, before, input, status) {
    const { session, lang } = this.store.get();
    const word = input.value.trim();
    if (word === before || session === null || !this.source.swap) return this.close(piece);
    if (word === "") return fill(status, make("span", { class: "error", role: "alert" }, translate("Type a word first.", lang)));
    const mine = ++this.work;
    const cancel = make("button", { type: "button", class: "quiet", onclick: () => this.close(piece) }, translate("Cancel", lang));
    fill(status, make("span", { class: "spinner", "aria-hidden": "true" }), translate(message("Reading the text …"), lang), cancel);
    input.disabled = true;
    cancel.focus();
    try {
      const job = await this.source.swap(session, Number(piece.dataset.index), word);
      const found = await this.#wait(job, mine);
      if (found === null) return;
      this.close();
      await this.swapped(found);
    } catch (error) {
      if (mine !== this.work) return;
      input.disabled = false;
      input.focus();
      const words = translate("That did not work: {error}", lang, { error: error instanceof Error ? error.message : String(error) });
      fill(status, make("span", { class: "error", role: "alert" }, words));
    }
  }

  /**
   * The new session; null where nobody waits for it any more.
   * @param {string} job
   * @param {number} mine
   */
  async #wait(job, mine) {
    for (;;) {
      if (mine !== this.work) {
        await this.source.look.cancel(job).catch(() => undefined);
        return null;
      }
      const { state, session, error } = await this.source.look.poll(job);
      if (state === "done" && session) return mine === this.work ? session : null;
      if (state === "failed") throw new Error(error ?? state);
      if (state === "cancelled") return null;
      await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
    }
  }
}
