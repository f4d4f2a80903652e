// The keys of the page, and the window that lists them. `main.js` gives the deeds.

import { fill, make } from "../shared/elements.js";
import { message, translate, translateParts } from "../shared/messages.js";

/** @typedef {import("../shared/messages.js").Lang} Lang */

/** @type {[string[], string][]} */
const KEYS = [
  [["←", "→", "↑", "↓"], message("move from head to head")],
  [["j", "k"], message("next and previous token")],
  [["←", "→", "↑", "↓"], message("on the image: next patch")],
  [["e"], message("on a word: swap it for another")],
  [["/"], message("search heads")],
  [["n"], message("read a new text")],
  [["c"], message("compare with a second session")],
  [["d"], message("show or hide head and steps")],
  [["?"], message("this help")],
  [["Esc"], message("close")],
];

/**
 * The help window, in a language.
 * @param {HTMLDialogElement} dialog
 * @param {Lang} lang
 * @param {(() => void) | null} tour  begins it; null where there is nothing to be shown around
 */
export function drawHelp(dialog, lang, tour) {
  const lines = KEYS.flatMap(([keys, text]) => [
    make("dt", {}, ...keys.map((key) => make("kbd", {}, key))),
    make("dd", {}, translate(text, lang)),
  ]);
  fill(
    dialog,
    make(
      "header",
      {},
      make("h2", { id: "help-title" }, translate("Keys", lang)),
      make("button", { type: "button", class: "quiet", onclick: () => dialog.close() }, translate("Close", lang)),
    ),
    tour && make(
      "p",
      { class: "line" },
      make("button", { type: "button", "data-role": "tour", onclick: tour }, translate("Tour", lang)),
      translate("five steps on what is open, from tokens to one weight", lang),
    ),
    make("dl", { class: "keys-help" }, ...lines),
    make(
      "p",
      {},
      translate(
        "A head is coloured by one number; the map shows how its queries (rows) look at keys (columns); the text shows the chosen token's exact row. The address keeps what you see: copy it to come back.",
        lang,
      ),
    ),
    make("p", {}, translate("Weights say where a head reads from, not why the model answers as it does.", lang)),
    make("p", { "data-role": "learn" }, ...translateParts("Learn step by step: {lessons}", lang, { lessons: lessons(lang) })),
  );
  dialog.setAttribute("aria-labelledby", "help-title");
}

/**
 * The lessons: those of the site that the page is in, else the command that holds them.
 * @param {Lang} lang
 */
function lessons(lang) {
  const inSite = location.protocol.startsWith("http") && /\/gallery\/\w+\.html$/.test(location.pathname);
  if (!inSite) return make("code", {}, lang === "ko" ? "regard learn --lang ko" : "regard learn");
  return make("a", { href: lang === "ko" ? "../ko/lessons/" : "../lessons/" }, translate("the lessons", lang));
}

/**
 * @typedef {object} Deeds  what the keys do
 * @property {(layers: number, heads: number) => void} moveHead
 * @property {(tokens: number) => void} moveToken
 * @property {() => void} search
 * @property {() => void} newText
 * @property {() => void} compare
 * @property {() => void} drawer
 * @property {() => void} help
 */

/**
 * Listen to the page's keys; what is typed into a field, or was used by a pane, is left alone.
 * @param {EventTarget} target
 * @param {Deeds} deeds
 * @returns {() => void}
 */
export function listenToKeys(target, deeds) {
  /** @type {Record<string, () => void>} */
  const table = {
    ArrowLeft: () => deeds.moveHead(0, -1),
    ArrowRight: () => deeds.moveHead(0, 1),
    ArrowUp: () => deeds.moveHead(-1, 0),
    ArrowDown: () => deeds.moveHead(1, 0),
    j: () => deeds.moveToken(1),
    k: () => deeds.moveToken(-1),
    "/": deeds.search,
    n: deeds.newText,
    c: deeds.compare,
    d: deeds.drawer,
    "?": deeds.help,
  };
  const pressed = (/** @type {Event} */ event) => {
    const { key, ctrlKey, metaKey, altKey, defaultPrevented, target: at } = /** @type {KeyboardEvent} */ (event);
    if (defaultPrevented || ctrlKey || metaKey || altKey || !Object.hasOwn(table, key) || isField(at)) return;
    event.preventDefault();
    table[key]();
  };
  target.addEventListener("keydown", pressed);
  return () => target.removeEventListener("keydown", pressed);
}

/** @param {EventTarget | null} at */
function isField(at) {
  return (
    at instanceof Element &&
    at.closest("input:not([type=checkbox]), select, textarea, dialog, [contenteditable]") !== null
  );
}
