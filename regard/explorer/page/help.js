// The keys of the page, and the window that tells them. It does not know what the keys change: `main.js` gives the deeds.

import { fill, make } from "./elements.js";
import { say } from "./words.js";

/** @typedef {import("./words.js").Lang} Lang */
/** @typedef {import("./words.js").Word} Word */

/** @type {[string[], Word][]} */
const KEYS = [
  [["←", "→", "↑", "↓"], "help_arrows"],
  [["j", "k"], "help_jk"],
  [["←", "→", "↑", "↓"], "help_patch"],
  [["/"], "help_search"],
  [["n"], "help_new"],
  [["c"], "help_compare"],
  [["d"], "help_drawer"],
  [["?"], "help_help"],
  [["Esc"], "help_escape"],
];

/**
 * The help window, in a language.
 * @param {HTMLDialogElement} dialog
 * @param {Lang} lang
 */
export function drawHelp(dialog, lang) {
  const lines = KEYS.flatMap(([keys, word]) => [
    make("dt", {}, ...keys.map((key) => make("kbd", {}, key))),
    make("dd", {}, say(lang, word)),
  ]);
  fill(
    dialog,
    make(
      "header",
      {},
      make("h2", { id: "help-title" }, say(lang, "help_title")),
      make("button", { type: "button", class: "quiet", onclick: () => dialog.close() }, say(lang, "close")),
    ),
    make("dl", { class: "keys-help" }, ...lines),
    make("p", {}, say(lang, "help_about")),
    make("p", {}, say(lang, "warning")),
  );
  dialog.setAttribute("aria-labelledby", "help-title");
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
