// What the chosen link does: its weight, how far the query's vector moves without it, random other keys beside that,
// and the same in all heads as a scatter plot of weight against effect. Nothing is measured until somebody asks.

import { fill, focusedAround, make, svgElement, svgText } from "../shared/elements.js";
import { figure, message, translate } from "../shared/messages.js";
import { effectIn, idle, meanSize, percent, pointsOf, pValue, ticks, translateLink } from "./effects.js";

/** @typedef {import("../source/source.js").Source} Source */
/** @typedef {import("../state.js").Store} Store */
/** @typedef {import("./effects.js").Measurements} Measurements */
/** @typedef {import("./effects.js").Point} Point */

const CHOOSE = message("Choose a link: click a cell of the map, or one of the strongest links.");
const QUESTION = message("Hide {key} from {token} and run the model again: how far does the vector of {token} move?");
const CAVEAT = message("Exact. It says that the model uses the link as it is, not what it would have learnt without it.");
const MOVES = message(
  "How far the query's vector moves: ‖h − h₀‖ ÷ ‖h₀‖ of its last hidden state, without the link and with it.",
);
const CONTROL = message("The mean effect of hiding another key from the same query, in the same head.");
const P_VALUE = message("Share of these keys, the chosen one counted, whose effect is as large.");

/** Why what a link does cannot be measured. @type {Record<import("../source/source.js").NoEffects, string>} */
const NO_EFFECTS = {
  no_model: message(
    "What the link does cannot be measured: a capture file does not hold the model. Read the text here to measure it.",
  ),
  repeated: message(
    "What the link does cannot be measured: this model runs one layer several times, and an edit would change every run.",
  ),
  windows: message(
    "What the link does cannot be measured: this layer reads in windows, so its queries are not the vectors that the model returns.",
  ),
  other_tokens: message(
    "What the link does cannot be measured: the queries and keys of this layer are not the tokens of the text.",
  ),
};

// ---------------------------------------------------------------------------------------------------- the scatter plot

/**
 * Build the pane inside an element.
 * @param {HTMLElement} element
 * @param {Store} store
 * @param {Source} source
 * @param {Measurements} measured
 * @returns {{destroy: () => void}}
 */
export function mount(element, store, source, measured) {
  const pane = new EffectPane(element, store, source, measured);
  const off = store.on((_, changed) => {
    if (["session", "layer", "head", "token", "key", "lang", "theme"].some((name) => changed.has(name))) pane.draw();
  });
  const deaf = measured.on(() => pane.draw());
  pane.draw();
  void measured.load();
  const destroy = () => {
    off();
    deaf();
    fill(element);
  };
  return { destroy };
}

class EffectPane {
  /**
   * @param {HTMLElement} element
   * @param {Store} store
   * @param {Source} source
   * @param {Measurements} measured
   */
  constructor(element, store, source, measured) {
    this.element = element;
    this.store = store;
    this.source = source;
    this.measured = measured;
  }

  draw() {
    const { lang, token, key, layer, head } = this.store.get();
    const { answer, naming } = this.measured;
    if (token === null || key === null || naming === null)
      return fill(
        this.element,
        make("h2", {}, translate("What a link does", lang)),
        (token === null || key === null) && make("p", { class: "note" }, translate(CHOOSE, lang)),
      );
    const focus = /** @type {HTMLElement | null} */ (focusedAround(this.element));
    const role = focus && this.element.contains(focus) ? focus.dataset.role : undefined;
    const names = this.measured.names();
    const found = effectIn(answer, layer, head);
    const points = pointsOf(answer);
    const reason = this.source.can.measure ? (naming.overview.layers[layer]?.no_effects ?? null) : null;
    fill(
      this.element,
      make("h2", {}, ...translateLink("What {token} → {key} does", lang, names)),
      found && this.numbers(found),
      !found && this.source.can.measure && !reason && make("p", { class: "about" }, ...translateLink(QUESTION, lang, names)),
      !found && reason && make("p", { class: "note" }, translate(NO_EFFECTS[reason], lang)),
      !found && !this.source.can.measure && answer && this.carried(),
      this.source.can.measure && !reason && answer && this.buttons(found?.p_value === undefined || found.p_value === null),
      points.length > 0 && scatter(points, { layer, head }, lang, (chosen) => this.store.set(chosen)),
      (found || points.length > 0) && make("p", { class: "about" }, translate(CAVEAT, lang)),
    );
    if (role) /** @type {HTMLElement | null} */ (this.element.querySelector(`[data-role="${role}"]`))?.focus();
  }

  /** @param {NonNullable<ReturnType<typeof effectIn>>} found */
  numbers({ weight, effect, controls, p_value }) {
    const { lang } = this.store.get();
    const control = { count: controls.length };
    const lines = [
      [translate("weight", lang), figure(weight), ""],
      [translate("effect", lang), percent(effect), translate(MOVES, lang)],
      ...(p_value === null
        ? []
        : [
            [translate("{count} random {count|key|keys}", lang, control), percent(meanSize(controls)), translate(CONTROL, lang)],
            ["p", pValue(p_value), translate(P_VALUE, lang)],
          ]),
    ];
    const pairs = lines.map(([name, number, about]) =>
      make("div", { title: about }, make("dt", {}, name), make("dd", {}, number)),
    );
    return make("dl", { class: "numbers" }, ...pairs);
  }

  /**
   * What can be measured, or how far that is.
   * @param {boolean} missing  whether the chosen head was not measured beside random other keys
   */
  buttons(missing) {
    const { lang } = this.store.get();
    const { busy, progress, error, answer, naming } = this.measured;
    if (busy)
      return make(
        "div",
        { class: "progress", role: "status" },
        make("span", { class: "spinner", "aria-hidden": "true" }),
        make("span", {}, translate("Measuring …", lang)),
        make("span", { class: "seconds" }, progress),
        make(
          "button",
          { type: "button", "data-role": "effect-cancel", onclick: () => this.measured.cancel() },
          translate("Cancel", lang),
        ),
      );
    const count = naming?.overview.layers.reduce((sum, { heads, no_effects }) => sum + (no_effects ? 0 : heads), 0) ?? 0;
    const button = (/** @type {string} */ role, /** @type {boolean} */ all, /** @type {string} */ words) =>
      make("button", { type: "button", "data-role": role, onclick: () => void this.measured.measure(all) }, words);
    return make(
      "div",
      { class: "line" },
      missing && button("effect-link", false, translate("Measure in this head", lang)),
      !answer?.heads && button("effect-heads", true, translate("In all {count} heads", lang, { count })),
      error && make(
        "span",
        { class: "error", role: "alert" },
        translate("That did not work: {error}", lang, { error }),
      ),
    );
  }

  /** What an exported page knows instead: the links that were measured before it was written. */
  carried() {
    const { lang, session } = this.store.get();
    const links = this.source.carried?.(session ?? "") ?? [];
    return make(
      "div",
      {},
      make(
        "p",
        { class: "note" },
        translate("No effect of this link was measured before this file was written.", lang),
      ),
      links.length > 0 && make("p", { class: "note" }, translate("This file holds what was measured of:", lang)),
      make(
        "div",
        { class: "line" },
        ...links.map((link) => {
          const { token, key } = this.measured.names(link);
          const choose = () => this.store.set({ token: link.token, key: link.key });
          return make("button", { type: "button", onclick: choose }, make("bdi", {}, token), " → ", make("bdi", {}, key));
        }),
      ),
    );
  }
}

/** @typedef {Point & {x: number, y: number}} Dot */

const [WIDE, HIGH] = [330, 176];
const [LEFT, RIGHT, TOP, BOTTOM] = [34, 12, 18, 30]; // margins
const NEAR = 14; // how far from a dot the pointer still means it
const LETTER = 6.4; // pixels that a letter of a name takes
const LABELLED = 2; // of the largest weights and of the largest effects, how many are named at most

/**
 * The plot.
 * @param {Point[]} points
 * @param {{layer: number, head: number}} chosen
 * @param {import("../shared/messages.js").Lang} lang
 * @param {(head: {layer: number, head: number}) => void} choose
 * @returns {HTMLElement}
 */
function scatter(points, chosen, lang, choose) {
  const [right, top] = [Math.max(...points.map(({ weight }) => weight)) || 1, Math.max(...points.map(({ effect }) => effect)) || 1];
  const x = (/** @type {number} */ weight) => LEFT + (weight / right) * (WIDE - LEFT - RIGHT);
  const y = (/** @type {number} */ effect) => HIGH - BOTTOM - (effect / top) * (HIGH - TOP - BOTTOM);
  const dots = points.map((point) => ({ ...point, x: x(point.weight), y: y(point.effect) }));
  const hollow = new Set(idle(points).map(named));
  const label = translate(
    "Weight against effect of the link in {count} {count|head|heads}",
    lang,
    { count: points.length },
  );
  const svg = /** @type {SVGSVGElement} */ (
    svgElement("svg", { class: "scatter", viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", "aria-label": label })
  );
  svg.append(
    ...ticks(right).flatMap((at) => [
      svgElement("line", { class: "grid", x1: x(at), x2: x(at), y1: TOP, y2: HIGH - BOTTOM }),
      svgText("text", figure(at), { x: x(at), y: HIGH - BOTTOM + 12, class: "tick middle" }),
    ]),
    ...ticks(100 * top).flatMap((at) => [
      svgElement("line", { class: "grid", x1: LEFT, x2: WIDE - RIGHT, y1: y(at / 100), y2: y(at / 100) }),
      svgText("text", String(at), { x: LEFT - 5, y: y(at / 100) + 3, class: "tick end" }),
    ]),
    svgText("text", translate("weight", lang), { x: WIDE - RIGHT, y: HIGH - 4, class: "axis-name end" }),
    svgText("text", translate("effect, %", lang), { x: 2, y: 9, class: "axis-name" }),
    ...dots.map((dot) => {
      const kind = `${hollow.has(named(dot)) ? " hollow" : ""}${named(dot) === named(chosen) ? " chosen" : ""}`;
      const place = { cx: dot.x, cy: dot.y, r: kind.includes("chosen") ? 5 : 3.5 };
      return svgElement("circle", { class: `dot${kind}`, ...place, "data-layer": dot.layer, "data-head": dot.head });
    }),
    ...labels(dots, chosen, hollow).map(({ name, x, y, anchor }) => svgText("text", name, { x, y, class: `name ${anchor}` })),
  );
  const explained = hollow.size > 0 ? ` ${translate("Hollow: much weight, little effect.", lang)}` : "";
  const hint = translate("One dot per head; click one to choose it.", lang) + explained;
  const readout = make("p", { class: "about" }, hint);
  const near = (/** @type {MouseEvent} */ event) => nearest(dots, at(svg, event));
  svg.addEventListener("pointermove", (event) => {
    const dot = near(event);
    svg.classList.toggle("pointing", dot !== null);
    const place = dot && { ...dot, weight: figure(dot.weight), effect: percent(dot.effect) };
    fill(
      readout,
      place ? translate("layer {layer}, head {head}: weight {weight}, effect {effect}", lang, place) : hint,
    );
  });
  svg.addEventListener("pointerleave", () => fill(readout, hint));
  svg.addEventListener("click", (event) => {
    const dot = near(event);
    if (dot) choose({ layer: dot.layer, head: dot.head });
  });
  return make("div", { class: "scatter-plot" }, svg, readout);
}

/** @param {{layer: number, head: number}} head */
function named({ layer, head }) {
  return `L${layer} H${head}`; // as papers write it: 5.11 would read as a number beside the axes
}

/**
 * The names of dots and where they stand: of the chosen one, of the hollow ones, and of those with the largest effects and
 * weights. A name stands where it meets no other name and no dot; without such a place it is left out.
 * @param {Dot[]} dots
 * @param {{layer: number, head: number}} chosen
 * @param {Set<string>} hollow
 * @returns {{name: string, x: number, y: number, anchor: "start" | "middle" | "end"}[]}
 */
export function labels(dots, chosen, hollow) {
  const most = (/** @type {"weight" | "effect"} */ what) =>
    [...dots].sort((a, b) => b[what] - a[what]).slice(0, LABELLED).filter((dot) => dot[what] > 0);
  const wanted = new Set([
    ...dots.filter((dot) => named(dot) === named(chosen)),
    ...dots.filter((dot) => hollow.has(named(dot))),
    ...most("effect"),
    ...most("weight"),
  ]);
  /** @type {{left: number, right: number, middle: number}[]} */
  const boxes = [];
  return [...wanted].flatMap((dot) => {
    const [name, wide] = [named(dot), LETTER * named(dot).length];
    const places = /** @type {const} */ ([
      { x: dot.x + 7, y: dot.y + 3.5, anchor: "start", left: dot.x + 7 },
      { x: dot.x - 7, y: dot.y + 3.5, anchor: "end", left: dot.x - 7 - wide },
      { x: dot.x, y: dot.y - 8, anchor: "middle", left: dot.x - wide / 2 },
    ]);
    for (const { left, ...place } of places) {
      const box = { left, right: left + wide, middle: place.y - 3.5 };
      const meets = (/** @type {typeof box} */ other, /** @type {number} */ high) =>
        box.left < other.right && other.left < box.right && Math.abs(box.middle - other.middle) < high;
      const free =
        (box.left > LEFT && box.right < WIDE && box.middle > TOP - 8) &&
        !boxes.some((other) => meets(other, 11)) &&
        !dots.some((one) => one !== dot && meets({ left: one.x - 4, right: one.x + 4, middle: one.y }, 8));
      if (!free) continue;
      boxes.push(box);
      return [{ name, ...place }];
    }
    return [];
  });
}

/**
 * The dot nearest to a place; null where none is near.
 * @param {Dot[]} dots
 * @param {{x: number, y: number}} place
 * @returns {Dot | null}
 */
export function nearest(dots, { x, y }) {
  const far = (/** @type {Dot} */ dot) => Math.hypot(dot.x - x, dot.y - y);
  const first = dots.reduce((/** @type {Dot | null} */ best, dot) => (best && far(best) <= far(dot) ? best : dot), null);
  return first && far(first) <= NEAR ? first : null;
}

/**
 * Where a pointer is, in the plot's own units.
 * @param {SVGSVGElement} svg
 * @param {MouseEvent} event
 */
function at(svg, event) {
  const box = svg.getBoundingClientRect();
  return { x: ((event.clientX - box.left) / box.width) * WIDE, y: ((event.clientY - box.top) / box.height) * HIGH };
}
