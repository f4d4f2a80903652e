// How a box of the page looks, as SVG: its paper, a linear gradient, its lines, and rings around it or just inside.
// Other gradients, images and blurred shadows are not drawn.

/** @typedef {{x: number, y: number, width: number, height: number}} Box  in the SVG */

/**
 * The box of an element, from its computed style.
 * @param {CSSStyleDeclaration} style
 * @param {Box} box
 * @param {string} name  for a gradient, that nothing else in the SVG has
 * @returns {string}
 */
export function boxAsSvg(style, box, name) {
  const radius = Math.min(parseFloat(style.borderTopLeftRadius) || 0, box.width / 2, box.height / 2);
  const paper = visible(style.backgroundColor) ? rect(box, radius, `fill="${style.backgroundColor}"`) : "";
  const bar = style.backgroundSize === "auto" ? gradient(style.backgroundImage, box, radius, name) : "";
  return paper + bar + borders(style, box, radius) + rings(style, box, radius);
}

/**
 * Is anything to be seen of a colour?
 * @param {string} colour  as computed styles give it
 */
export function visible(colour) {
  return colour !== "transparent" && !/^rgba\(.*,\s*0\)$|\/\s*0\s*\)$/.test(colour);
}

/**
 * Where a shape stands, as attributes.
 * @param {Box} box
 */
export function place({ x, y, width, height }) {
  return `x="${round(x)}" y="${round(y)}" width="${round(width)}" height="${round(height)}"`;
}

/** @param {number} value */
export function round(value) {
  return Math.round(value * 100) / 100;
}

/**
 * @param {Box} box
 * @param {number} radius
 * @param {string} ink
 */
function rect(box, radius, ink) {
  return `<rect ${place(box)}${radius ? ` rx="${round(radius)}"` : ""} ${ink}/>`;
}

/**
 * A colour bar: a gradient from left to right, from top to bottom, or the other way.
 * @param {string} image  as computed styles give it
 * @param {Box} box
 * @param {number} radius
 * @param {string} name
 */
function gradient(image, box, radius, name) {
  const found = /^linear-gradient\((?:(-?[\d.]+)deg|to (right|left|top|bottom))?,?\s*(.*)\)$/.exec(image);
  if (found === null || found[3].includes("gradient")) return ""; // several of them are a pattern
  const angle = found[1] ? Number(found[1]) : { right: 90, left: 270, top: 0, bottom: 180 }[found[2] ?? "bottom"];
  const ends = { 0: [0, 1, 0, 0], 90: [0, 0, 1, 0], 180: [0, 0, 0, 1], 270: [1, 0, 0, 0] }[angle ?? -1];
  const colours = [...found[3].matchAll(/([a-z]+\([^)]*\)|#\w+|transparent)(?:\s+([\d.]+)%)?/g)];
  if (ends === undefined || colours.length < 2) return "";
  const stops = colours.map(([, colour, at], n) => {
    const offset = at === undefined ? n / (colours.length - 1) : Number(at) / 100;
    return `<stop offset="${offset.toFixed(4)}" stop-color="${colour}"/>`;
  });
  const along = ["x1", "y1", "x2", "y2"].map((end, n) => `${end}="${ends[n]}"`).join(" ");
  const bar = `<linearGradient id="${name}" ${along}>${stops.join("")}</linearGradient>`;
  return bar + rect(box, radius, `fill="url(#${name})"`);
}

/**
 * The lines around a box, those sides that have one.
 * @param {CSSStyleDeclaration} style
 * @param {Box} box
 * @param {number} radius
 */
function borders(style, box, radius) {
  const sides = ["top", "right", "bottom", "left"].map((side) => {
    const [kind, width, colour] = ["style", "width", "color"].map((n) => style.getPropertyValue(`border-${side}-${n}`));
    const shown = kind !== "none" && kind !== "hidden" && visible(colour);
    return { width: shown ? parseFloat(width) : 0, colour, kind };
  });
  const [first] = sides;
  if (sides.every(({ width }) => width === 0)) return "";
  if (sides.every(({ width, colour }) => width === first.width && colour === first.colour)) {
    const dashes = first.kind === "dashed" || first.kind === "dotted" ? ` stroke-dasharray="${3 * first.width}"` : "";
    return ring(box, radius, first.width, -first.width / 2, first.colour, dashes);
  }
  const { x, y, width, height } = box;
  const strips = [
    { x, y, width, height: sides[0].width },
    { x: x + width - sides[1].width, y, width: sides[1].width, height },
    { x, y: y + height - sides[2].width, width, height: sides[2].width },
    { x, y, width: sides[3].width, height },
  ];
  return strips.map((strip, n) => (sides[n].width > 0 ? rect(strip, 0, `fill="${sides[n].colour}"`) : "")).join("");
}

/**
 * Outlines, and shadows that are rings: without offset and blur. The first shadow lies above the others.
 * @param {CSSStyleDeclaration} style
 * @param {Box} box
 * @param {number} radius
 */
function rings(style, box, radius) {
  const shadows = [...style.boxShadow.matchAll(/([a-z]+\([^)]*\)) 0px 0px 0px (-?[\d.]+)px( inset)?/g)].reverse();
  const drawn = shadows.map(([, colour, wide, inset]) => {
    const width = Number(wide);
    return width > 0 && visible(colour) ? ring(box, radius, width, inset ? -width / 2 : width / 2, colour) : "";
  });
  const [kind, colour] = [style.outlineStyle, style.outlineColor];
  const width = parseFloat(style.outlineWidth);
  if (kind === "none" || kind === "auto" || !(width > 0) || !visible(colour)) return drawn.join("");
  return drawn.join("") + ring(box, radius, width, (parseFloat(style.outlineOffset) || 0) + width / 2, colour);
}

/**
 * @param {Box} box
 * @param {number} radius
 * @param {number} width
 * @param {number} out  how far outside the box its middle runs
 * @param {string} colour
 * @param {string} [more]
 */
function ring({ x, y, width: wide, height: high }, radius, width, out, colour, more = "") {
  const box = { x: x - out, y: y - out, width: Math.max(0, wide + 2 * out), height: Math.max(0, high + 2 * out) };
  const line = `fill="none" stroke="${colour}" stroke-width="${round(width)}"${more}`;
  return rect(box, radius ? Math.max(0, radius + out) : 0, line);
}
