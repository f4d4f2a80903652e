// The bar at the top: the session, its facts, new session, comparison, language, theme and help.

import { fill, focusedAround, make, segments } from "../shared/elements.js";
import { titleOf, visibly } from "../shared/labels.js";
import { translate, translateParts } from "../shared/messages.js";

/** @typedef {import("../source/source.js").Overview} Overview */
/** @typedef {import("../source/source.js").SessionLine} SessionLine */
/** @typedef {import("../state.js").State} State */
/** @typedef {import("../state.js").Store} Store */

/**
 * @typedef {object} Shown  what the bar tells and what it can do
 * @property {SessionLine[]} sessions
 * @property {Overview | null} overview
 * @property {boolean} canLook
 * @property {(session: string) => void} choose
 * @property {() => void} newText
 * @property {() => void} compare
 * @property {() => void} help
 * @property {(text: string) => void} readKorean  with the model that knows Korean
 * @property {HTMLElement} share
 */

/**
 * Draw the bar; what had the focus keeps it.
 * @param {HTMLElement} element
 * @param {Store} store
 * @param {Shown} shown
 */
export function drawHeader(element, store, shown) {
  const state = store.get();
  const { lang } = state;
  const focus = focusedAround(element);
  const had = element.contains(focus) ? focus : null;
  const [role, choice] = [had?.getAttribute("data-role"), had?.closest("[data-choice]")?.getAttribute("data-choice")];
  fill(
    element,
    make("h1", {}, eye(), "regard"),
    shown.sessions.length > 0 && state.compare === null && sessionChoice(state, shown),
    shown.overview && state.compare === null && make("span", { class: "facts", title: facts(state, shown.overview) }, facts(state, shown.overview)),
    make("span", { class: "space" }),
    shown.overview &&
      shown.canLook &&
      make(
        "button",
        { type: "button", class: "primary", "data-role": "new", onclick: shown.newText },
        translate("Read new", lang),
      ),
    shown.overview &&
      (shown.canLook || shown.sessions.length > 1) &&
      make(
        "button",
        { type: "button", "data-role": "compare", "aria-pressed": state.compare !== null, onclick: shown.compare },
        translate("Compare", lang),
      ),
    shown.overview && shown.share,
    segments(
      translate("Language", lang),
      "lang",
      [
        { value: "en", label: "EN", title: "English" },
        { value: "ko", label: "한", title: "한국어" },
      ],
      lang,
      (value) => store.set({ lang: value === "ko" ? "ko" : "en" }),
    ),
    segments(translate("Appearance", lang), "theme", themes(lang), state.theme, (value) =>
      store.set({ theme: /** @type {State["theme"]} */ (value) }),
    ),
    make(
      "button",
      {
        type: "button",
        class: "round",
        "data-role": "help",
        "aria-label": translate("Help", lang),
        title: translate("Help", lang),
        onclick: shown.help,
      },
      "?",
    ),
  );
  const suggestion = shown.overview?.suggestion;
  if (suggestion && state.compare === null) element.append(koreanNote(suggestion, lang, shown));
  const again = choice ? `[data-choice="${choice}"] [aria-checked=true]` : role ? `[data-role="${role}"]` : null;
  if (again) /** @type {HTMLElement | null} */ (element.querySelector(again))?.focus();
}

/**
 * A Korean text that a model without Korean read: which one knows it, and how to have it.
 * @param {import("../source/source.js").Suggestion} suggestion
 * @param {State["lang"]} lang
 * @param {Shown} shown
 */
function koreanNote({ name, fetched, command, size }, lang, { canLook, overview, readKorean }) {
  const text = overview?.text;
  const known = translate("This model does not know Korean; {name} does.", lang, { name });
  const how = translateParts("This model does not know Korean: {command} downloads one that does ({size} MB).", lang, {
    command: make("code", {}, command),
    size,
  });
  const read = () => text && readKorean(text);
  return make(
    "p",
    { class: "suggestion", role: "note" },
    ...(fetched ? [known] : how),
    fetched && canLook && text && make("button", { type: "button", "data-role": "korean", onclick: read }, translate("Read it with {name}", lang, { name })),
  );
}

/**
 * @param {State} state
 * @param {Shown} shown
 */
function sessionChoice({ lang, session }, { sessions, choose }) {
  const lines = sessions.map((line) =>
    make("option", { value: line.id, selected: line.id === session }, titleOf(line)),
  );
  const changed = (/** @type {Event} */ event) => choose(/** @type {HTMLSelectElement} */ (event.target).value);
  return make(
    "select",
    { class: "session", "aria-label": translate("What is looked at", lang), "data-role": "session", onchange: changed },
    ...lines,
  );
}

/**
 * @param {State} state
 * @param {Overview} overview
 */
function facts({ lang }, { name, length, layers, images = [] }) {
  const heads = Math.max(0, ...layers.map((layer) => layer.heads));
  const [image] = images;
  return [
    visibly(name),
    image
      ? translate("{height} × {width} pixels (h × w)", lang, { width: image.width, height: image.height })
      : translate("{count} {count|token|tokens}", lang, { count: length.toLocaleString(lang) }),
    translate("{layers} {layers|layer|layers} × {heads} {heads|head|heads}", lang, { layers: layers.length, heads }),
  ].join(" · ");
}

/** @param {State["lang"]} lang */
function themes(lang) {
  return [
    { value: "auto", label: "◐", title: translate("As the system", lang) },
    { value: "light", label: "○", title: translate("Light", lang) },
    { value: "dark", label: "●", title: translate("Dark", lang) },
  ];
}

function eye() {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 16 16");
  svg.setAttribute("aria-hidden", "true");
  for (const [r, fillIn] of [
    ["5.4", "none"],
    ["2", "currentColor"],
  ]) {
    const circle = document.createElementNS("http://www.w3.org/2000/svg", "circle");
    for (const [name, value] of Object.entries({
      cx: "8",
      cy: "8",
      r,
      fill: fillIn,
      stroke: "currentColor",
      "stroke-width": "1.6",
    }))
      circle.setAttribute(name, value);
    svg.append(circle);
  }
  return svg;
}
