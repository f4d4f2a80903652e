// The atlas as a list: heads sorted by their value, the chosen one also on top.

import { fill, make } from "../shared/elements.js";
import { translate } from "../shared/messages.js";
import { headName, measureName } from "./heads.js";

/** @typedef {import("./heads.js").HeadLine} HeadLine */
/** written: the value in digits.  @typedef {{head: HeadLine, value: number, written: string}} Valued */

const LISTED = 500; // lines of the list: more would be slow, and nobody reads them

/**
 * Heads that fit, the best first or the worst; those without a value last.
 * @param {Valued[]} heads
 * @param {boolean} rising
 */
export function sorted(heads, rising) {
  const sign = rising ? -1 : 1;
  return [...heads].sort((a, b) =>
    Number.isNaN(a.value) ? 1 : Number.isNaN(b.value) ? -1 : sign * (b.value - a.value),
  );
}

/**
 * Write the list into an element. Returns its lines by "layer.head", and a function that puts a head on top.
 * @param {Element} element
 * @param {Valued[]} order
 * @param {{measure: string, painting: import("./legend.js").Painting, lang: string, choose: (head: HeadLine) => void}} how
 * @returns {{lines: Map<string, HTMLElement>, pin: (one: Valued | undefined) => void}}
 */
export function writeList(element, order, { measure, painting, lang, choose }) {
  const lines = new Map(
    order.slice(0, LISTED).map((one) => {
      const { layer, head } = one.head;
      const given = { type: "button", class: "atlas-line", role: "option", tabindex: -1, "data-layer": layer, "data-head": head };
      const line = make("button", { ...given, onclick: () => choose(one.head) }, ...partsOf(one, painting, lang));
      return [`${layer}.${head}`, line];
    }),
  );
  const more = order.length - lines.size;
  const rest = more > 0 && make("p", { class: "note" }, translate("and {count} more", lang, { count: more }));
  const label = translate("Sorted by {measure}", lang, { measure: measureName(measure, lang) });
  const list =
    lines.size > 0
      ? make("div", { class: "atlas-list", role: "listbox", "aria-label": label }, ...lines.values(), rest)
      : make("p", { class: "note" }, translate("No head fits.", lang));
  const top = make("div", { class: "pinned-line", title: translate("The chosen head", lang) });
  fill(element, top, list);
  return { lines, pin: (one) => fill(top, ...(one ? partsOf(one, painting, lang) : [])) };
}

/**
 * @param {Valued} one
 * @param {import("./legend.js").Painting} painting
 * @param {string} lang
 */
function partsOf({ head, value, written }, { flat, low, high }, lang) {
  const share = flat ? 0 : (value - low) / (high - low || 1);
  return [
    make("span", { class: "place" }, headName(head.layer, head.head)),
    make("span", { class: "bar" }, make("i", { style: `width:${(100 * Math.max(0, share || 0)).toFixed(1)}%` })),
    make("span", { class: "number" }, written),
    make("span", { class: "kind" }, head.label ? measureName(head.label, lang) : ""),
  ];
}
