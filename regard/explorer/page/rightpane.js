// The pane at the right: the words of a text, or the image of a session that has one. It follows the session, and does
// not know what either draws.

import { mount as mountPhoto } from "./photo.js";
import { isAbort, latest } from "./source.js";
import { mount as mountText } from "./text.js";

/**
 * Build the pane inside an element.
 * @param {HTMLElement} element
 * @param {import("./state.js").Store} store
 * @param {import("./source.js").Source} source
 * @param {() => void} changed  told when the one took the other's place
 * @returns {{update: () => void, destroy: () => void}}
 */
export function mount(element, store, source, changed) {
  const next = latest();
  /** @type {{kind: string, pane: {update: () => void, destroy: () => void}} | null} */
  let shown = null;
  const show = (/** @type {"text" | "photo"} */ kind) => {
    if (shown?.kind === kind) return;
    const menus = [...element.children].filter((child) => child.matches("details.save"));
    shown?.pane.destroy();
    shown = { kind, pane: (kind === "photo" ? mountPhoto : mountText)(element, store, source) };
    element.append(...menus);
    changed();
  };
  const choose = async () => {
    const { session } = store.get();
    const signal = next();
    if (session === null) return show("text");
    try {
      const overview = await source.overview(session, signal);
      if (!signal.aborted) show((overview.images ?? []).length > 0 ? "photo" : "text");
    } catch (error) {
      if (!isAbort(error)) show("text"); // which says what is wrong
    }
  };
  const off = store.on((_, changed) => changed.has("session") && void choose());
  void choose();
  const destroy = () => {
    off();
    next();
    shown?.pane.destroy();
  };
  return { update: () => shown?.pane.update(), destroy };
}
