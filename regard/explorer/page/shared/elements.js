// Elements of the page, made from text and never from HTML; small SVG elements and bars; resizes and the system's
// theme.

/** @typedef {Node | string | null | false | undefined} Child */

/**
 * An element. Names beginning with "on" are listeners; true writes an empty attribute, false and null
 * none, but aria-… is written as "true" or "false".
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Record<string, unknown>} [given]
 * @param {...Child} children
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export function make(tag, given = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), /** @type {EventListener} */ (value));
    else if (name.startsWith("aria-") && typeof value === "boolean") element.setAttribute(name, String(value));
    else if (name === "style") element.style.cssText = String(value ?? ""); // the policy forbids the attribute, not this
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, String(value));
  }
  fill(element, ...children);
  return element;
}

/**
 * Put these children, and no others, into an element.
 * @param {Element} element
 * @param {...Child} children
 */
export function fill(element, ...children) {
  element.replaceChildren(.../** @type {(Node | string)[]} */ (children.filter((child) => child || child === "")));
}

/**
 * What has the focus in the tree that an element stands in; in a notebook that is a shadow tree.
 * @param {Element} element
 * @returns {Element | null}
 */
export function focusedAround(element) {
  const root = element.getRootNode();
  return root instanceof Document || root instanceof ShadowRoot ? root.activeElement : null;
}

/**
 * A choice of one among several, as a row of small buttons that works as radio buttons do.
 * @param {string} label
 * @param {string} name  a word for the test of this choice
 * @param {{value: string, label: string, title?: string}[]} choices
 * @param {string} chosen
 * @param {(value: string) => void} choose
 * @returns {HTMLElement}
 */
export function segments(label, name, choices, chosen, choose) {
  const buttons = choices.map(({ value, label: words, title }) =>
    make(
      "button",
      {
        ...{
          type: "button",
          role: "radio",
          "aria-checked": value === chosen,
          title,
          "aria-label": title,
          "data-value": value,
        },
        ...{ tabindex: value === chosen ? 0 : -1, onclick: () => choose(value) },
      },
      words,
    ),
  );
  const move = (/** @type {KeyboardEvent} */ event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const at = choices.findIndex(({ value }) => value === chosen);
    choose(choices[(at + step + choices.length) % choices.length].value);
  };
  return make(
    "div",
    { class: "segments", role: "radiogroup", "aria-label": label, "data-choice": name, onkeydown: move },
    ...buttons,
  );
}

// ----------------------------------------------------------------------------------------------------------------- SVG

// ----------------------------------------------------------------------------------------------------------------- SVG

const SVG = "http://www.w3.org/2000/svg";

/**
 * A strip of bars as SVG.
 * @param {number[]} values
 * @param {{label: string, titles?: (index: number) => string}} how  the largest number is a full bar
 * @returns {SVGSVGElement}
 */
export function bars(values, { label, titles }) {
  const most = Math.max(1e-12, ...values.map(Math.abs).filter(Number.isFinite));
  const svg = svgElement("svg", {
    class: "bars",
    viewBox: `0 0 ${values.length} 2`,
    preserveAspectRatio: "none",
    role: "img",
    "aria-label": label,
  });
  svg.append(
    svgElement("line", { x1: 0, x2: values.length, y1: 1, y2: 1, class: "zero", "vector-effect": "non-scaling-stroke" }),
  );
  values.forEach((value, i) => {
    const height = Math.min(1, Math.abs(value) / most) || 0;
    const group = svgElement("g", {});
    const bar = Number.isNaN(value)
      ? { x: i + 0.1, width: 0.8, y: 0.4, height: 1.2, class: "broken" }
      : { x: i + 0.1, width: 0.8, y: value > 0 ? 1 - height : 1, height, class: value < 0 ? "less" : "more" };
    group.append(svgElement("rect", { x: i, width: 1, y: 0, height: 2, class: "place" }), svgElement("rect", bar));
    if (titles) group.append(svgText("title", titles(i)));
    svg.append(group);
  });
  return /** @type {SVGSVGElement} */ (svg);
}

/**
 * An element of SVG.
 * @param {string} tag
 * @param {Record<string, string | number>} given
 */
export function svgElement(tag, given) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(given)) made.setAttribute(name, String(value));
  return made;
}

/**
 * An element of SVG with words in it.
 * @param {string} tag
 * @param {string} words
 * @param {Record<string, string | number>} [given]
 */
export function svgText(tag, words, given = {}) {
  const made = svgElement(tag, given);
  made.textContent = words;
  return made;
}

/**
 * Tell of each change; the function that comes back ends it.
 * @param {Element} element
 * @param {() => void} changed
 * @returns {() => void}
 */
export function watchSurroundings(element, changed) {
  const observer = new ResizeObserver(() => changed());
  observer.observe(element);
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  scheme.addEventListener("change", changed);
  return () => {
    observer.disconnect();
    scheme.removeEventListener("change", changed);
  };
}
