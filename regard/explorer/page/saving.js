// The small menu in the corner of a pane that saves it as an image. It does not know how a picture is drawn.

import { fill, make } from "./elements.js";
import { save } from "./picture.js";
import { nameOf, say } from "./words.js";

/** @typedef {import("./state.js").Store} Store */

/**
 * Put the menu into a pane. Returns a function that ends it.
 * @param {HTMLElement} pane
 * @param {"atlas" | "map" | "text"} name
 * @param {Store} store
 * @returns {() => void}
 */
export function offerPictures(pane, name, store) {
  const menu = make("details", { class: "save", "data-picture": "skip" });
  const leave = (/** @type {FocusEvent} */ event) => {
    if (!menu.contains(/** @type {Node | null} */ (event.relatedTarget))) menu.open = false;
  };
  menu.addEventListener("focusout", leave);
  const draw = () => {
    const { lang } = store.get();
    const label = `${say(lang, "save")}: ${say(lang, name)}`;
    const choices = /** @type {const} */ (["png", "svg"]).map((kind) =>
      make(
        "button",
        { type: "button", "data-save": kind, onclick: () => void write(menu, pane, name, kind, store) },
        kind.toUpperCase(),
      ),
    );
    fill(
      menu,
      make("summary", { "aria-label": label, title: label }, "⤓"),
      make("div", { class: "save-choices" }, ...choices),
    );
  };
  draw();
  const off = store.on((_, changed) => changed.has("lang") && draw());
  pane.append(menu);
  return () => {
    off();
    menu.remove();
  };
}

/**
 * @param {HTMLDetailsElement} menu
 * @param {HTMLElement} pane
 * @param {"atlas" | "map" | "text"} name
 * @param {"png" | "svg"} kind
 * @param {Store} store
 */
async function write(menu, pane, name, kind, store) {
  const { layer, head, lang, measure } = store.get();
  menu.open = false;
  const what = name === "atlas" ? nameOf(lang, measure) : say(lang, "head_at", { layer, head });
  const shown = pane.classList.contains("pane-photo") ? "image" : name;
  try {
    await save(pane, kind, {
      title: `${say(lang, shown)}: ${what}`,
      name: name === "atlas" ? "regard-heads" : `regard-${shown}-${layer}.${head}`,
    });
  } catch (error) {
    const words = say(lang, "failed", { error: error instanceof Error ? error.message : String(error) });
    menu.append(make("p", { class: "error", role: "alert" }, words));
  }
}
