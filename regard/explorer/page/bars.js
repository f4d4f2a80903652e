// A vector as a strip of bars, up for positive and down for negative numbers, a box for NaN. It does not know what the numbers mean.

const SVG = "http://www.w3.org/2000/svg";

/**
 * A strip of bars as SVG.
 * @param {number[]} values
 * @param {{label: string, titles?: (index: number) => string}} how  the largest number is a full bar
 * @returns {SVGSVGElement}
 */
export function bars(values, { label, titles }) {
  const most = Math.max(1e-12, ...values.map(Math.abs).filter(Number.isFinite));
  const svg = element("svg", {
    class: "bars",
    viewBox: `0 0 ${values.length} 2`,
    preserveAspectRatio: "none",
    role: "img",
    "aria-label": label,
  });
  svg.append(
    element("line", { x1: 0, x2: values.length, y1: 1, y2: 1, class: "zero", "vector-effect": "non-scaling-stroke" }),
  );
  values.forEach((value, i) => {
    const height = Math.min(1, Math.abs(value) / most) || 0;
    const group = element("g", {});
    const bar = Number.isNaN(value)
      ? { x: i + 0.1, width: 0.8, y: 0.4, height: 1.2, class: "broken" }
      : { x: i + 0.1, width: 0.8, y: value > 0 ? 1 - height : 1, height, class: value < 0 ? "less" : "more" };
    group.append(element("rect", { x: i, width: 1, y: 0, height: 2, class: "place" }), element("rect", bar));
    if (titles) group.append(text("title", titles(i)));
    svg.append(group);
  });
  return /** @type {SVGSVGElement} */ (svg);
}

/**
 * An element of SVG.
 * @param {string} tag
 * @param {Record<string, string | number>} given
 */
export function element(tag, given) {
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
export function text(tag, words, given = {}) {
  const made = element(tag, given);
  made.textContent = words;
  return made;
}
