// The inks of the map and the text pane: the page's own variables (colours.css), the ramp of weights for the paper they
// stand on, and thin marks that show on any colour of that ramp. It does not know what is drawn.

import { onDarkPaper, rampFor } from "./colourmaps.js";

/**
 * @typedef {{dark: boolean, ramp: import("./colourmaps.js").Ramp, paper: string, ink: string, muted: string,
 *   line: string, gap: string, dot: string, bar: string, veil: string, query: string, key: string, alarm: string}} Paper
 */

const LIGHT = { gap: "rgb(255 255 255 / 0.75)", dot: "rgb(27 31 38 / 0.3)", veil: "rgb(27 31 38 / 0.12)" };
const DARK = { gap: "rgb(20 23 28 / 0.8)", dot: "rgb(232 235 240 / 0.28)", veil: "rgb(232 235 240 / 0.16)" };

/**
 * The inks for the paper under an element.
 * @param {HTMLElement} element
 * @returns {Paper}
 */
export function paperUnder(element) {
  const dark = onDarkPaper(element);
  const style = getComputedStyle(element);
  const own = (/** @type {string} */ name) => style.getPropertyValue(`--${name}`).trim();
  return {
    ...{ dark, ramp: rampFor(dark), paper: own("paper"), ink: own("ink"), muted: own("muted"), line: own("strong-line") },
    ...{ bar: own("bar"), query: own("query"), key: own("key"), alarm: own("error"), ...(dark ? DARK : LIGHT) },
  };
}
