// The "Share" menu of the header: the page or the capture as a file, the address, and each pane as a captioned image.

import { fill, make } from "../shared/elements.js";
import { message, translate } from "../shared/messages.js";
import { otherSide, toHash } from "../state.js";
import { captionOf } from "./caption.js";
import { download, save } from "./saving.js";

/** @typedef {import("../source/source.js").Source} Source */
/** @typedef {import("../state.js").State} State */
/** @typedef {import("../state.js").Store} Store */

/**
 * Build the menu. Its element is for the header to place.
 * @param {HTMLElement} page  whose panes are offered
 * @param {Store} store
 * @param {Source} source
 * @param {boolean} address  whether the page has an address of its own
 * @returns {{element: HTMLElement, destroy: () => void}}
 */
export function mount(page, store, source, address) {
  const menu = make("details", { class: "share" });
  const summary = make("summary", { "data-role": "share" });
  const list = make("div", { class: "share-list" });
  const status = make("p", { class: "share-status", role: "status" });
  fill(menu, summary, make("div", { class: "share-panel" }, list, status));

  const say = (/** @type {string} */ words, failed = false) => {
    status.classList.toggle("error", failed);
    fill(status, words);
  };
  /** @param {string} doing  @param {() => Promise<string>} work  which returns what to say at the end */
  const run = async (doing, work) => {
    say(doing);
    try {
      say(await work());
    } catch (error) {
      const why = error instanceof Error ? error.message : String(error);
      say(translate("That did not work: {error}", store.get().lang, { error: why }), true);
    }
  };
  const item = (/** @type {string} */ name, /** @type {string} */ label, /** @type {string} */ hint, /** @type {() => void} */ act) =>
    make("button", { type: "button", "data-share": name, onclick: act }, make("strong", {}, label), make("span", {}, hint));

  const draw = () => {
    const { lang, session } = store.get();
    fill(summary, translate("Share", lang));
    say("");
    if (!menu.open || session === null) return fill(list);
    const { page: asPage, capture } = source;
    fill(
      list,
      asPage &&
        item("html", translate("Web page", lang), translate(".html: this view, offline", lang), () =>
          void run(translate("Writing the page …", lang), async () => {
            download(await asPage.call(source, session, viewOf(store.get()), lang), `${await nameOf(session)}.html`);
            return translate("The page is among your downloads.", lang);
          }),
        ),
      capture &&
        item("regard", translate("Capture", lang), translate(".regard: for regard look, serve and Python", lang), () =>
          void run(translate("Writing the capture …", lang), async () => {
            download(await capture.call(source, session), `${await nameOf(session)}.regard`);
            return translate("The capture is among your downloads.", lang);
          }),
        ),
      address &&
        item("link", translate("Copy link", lang), translate("the address of this view", lang), () => void copy()),
      make("h2", {}, translate("Image with caption", lang)),
      ...[...page.querySelectorAll("[data-pane]")].map((pane) => paneLine(/** @type {HTMLElement} */ (pane), lang)),
    );
  };
  const nameOf = async (/** @type {string} */ session) => `regard-${(await source.overview(session)).name}`;

  const copy = async () => {
    const { lang } = store.get();
    const link = `${location.href.split("#")[0]}#${placed(store.get())}`;
    try {
      await navigator.clipboard.writeText(link);
      say(translate("The link is copied.", lang));
    } catch {
      const field = make("input", { class: "share-link", readonly: true, "aria-label": translate("Link", lang) });
      field.value = link;
      fill(status, translate("The browser does not let a page copy: press Ctrl+C here.", lang), field);
      field.select();
    }
  };
  /** @param {HTMLElement} pane  @param {State["lang"]} lang */
  const paneLine = (pane, lang) => {
    const label = pane.getAttribute("aria-label") ?? "";
    const choices = /** @type {const} */ (["png", "svg"]).map((kind) =>
      make(
        "button",
        {
          ...{ type: "button", "data-save": kind, "data-of": pane.dataset.pane, "aria-label": `${label}: ${kind.toUpperCase()}` },
          onclick: () =>
            void run(translate("Drawing …", lang), async () => {
              const side = pane.closest("[data-side=second]") ? otherSide(store) : store;
              await save(pane, kind, await captionOf(pane, side.get(), source));
              return translate("The image is among your downloads.", lang);
            }),
        },
        kind.toUpperCase(),
      ),
    );
    return make("div", { class: "share-pane" }, make("span", {}, label), ...choices);
  };

  menu.addEventListener("toggle", draw);
  menu.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !menu.open) return;
    event.preventDefault();
    menu.open = false;
    summary.focus();
  });
  const outside = (/** @type {Event} */ event) => {
    if (!event.composedPath().includes(menu)) menu.open = false;
  };
  document.addEventListener("pointerdown", outside);
  draw();
  const off = store.on((_, changed) => (changed.has("lang") || changed.has("session")) && draw());
  const destroy = () => {
    off();
    document.removeEventListener("pointerdown", outside);
    menu.remove();
  };
  return { element: menu, destroy };
}

/**
 * The state as an address says it, with its place in full: an address without one opens on the strongest link.
 * @param {State} state
 */
function placed(state) {
  const hash = new URLSearchParams(toHash(state, { lang: state.lang === "ko" ? "en" : "ko" }));
  hash.set("layer", String(state.layer));
  hash.set("head", String(state.head));
  return hash;
}

/**
 * The same for a page that holds this session alone.
 * @param {State} state
 */
function viewOf(state) {
  const hash = placed({ ...state, compare: null });
  hash.delete("session");
  return hash.toString();
}
