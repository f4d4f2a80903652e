// Elements of the page, made from words and never from HTML: what a text contains is shown as text.
// It does not know the state or the answers.

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
