// A pane as an SVG or PNG file with its caption. Words stay words and boxes boxes; what stands in a canvas goes in as it
// is. No fonts are loaded: those of the page are named.
//
//     await save(element, "svg", { title: "layer 3, head 1", legend: ["it → animal 0.6830"], name: "map" });
//
// An element with data-saving="skip" is left out, and so are fields, menus and choices; what CSS alone writes before or
// after an element (`content`) is not drawn.

import { boxAsSvg, place, round, visible } from "./boxes.js";

/** @typedef {{title?: string, legend?: string[], name?: string, scale?: number}} Words */
/** @typedef {{left: number, top: number}} Corner */

const CONTROLS = "input, select, textarea, dialog, [role=group], [role=radiogroup], label:has(> input)";
const SKIPPED = `[data-saving=skip], .said-hint, script, style, ${CONTROLS}`;
const MARGIN = 16;
const LINE = 18; // height of a line of the title or the legend
const MOST_LINES = 4; // of a text in the caption
const SHAPE_STYLES = (
  "fill fill-opacity stroke stroke-width stroke-opacity stroke-dasharray stroke-linecap stroke-linejoin opacity " +
  "paint-order font-family font-size font-weight text-anchor dominant-baseline display visibility"
).split(" ");

/**
 * Hand a pane to the reader, as a file.
 * @param {Element} pane
 * @param {"png" | "svg"} kind
 * @param {Words} [words]  name: of the file, without its ending.  scale: dots of a PNG per pixel of the page
 */
export async function save(pane, kind, words = {}) {
  if (kind !== "png" && kind !== "svg") throw new Error(`a pane is saved as "png" or "svg", not ${JSON.stringify(kind)}`);
  const svg = draw(pane, words);
  const drawn = new Blob([svg], { type: "image/svg+xml" });
  download(kind === "png" ? await painted(svg, words.scale ?? 2) : drawn, `${words.name ?? "regard"}.${kind}`);
}

/**
 * Hand a file to the reader.
 * @param {Blob} file
 * @param {string} name
 */
export function download(file, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(file);
  link.download = name.replace(/[^\p{L}\p{N}._-]+/gu, "-");
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000); // the browser reads it after the click
}

/**
 * A pane as the text of an SVG file: the title above it, the legend below.
 * @param {Element} pane
 * @param {Words} [words]
 * @returns {string}
 */
function draw(pane, { title = "", legend = [] } = {}) {
  const box = pane.getBoundingClientRect();
  const style = getComputedStyle(pane);
  const heading = title ? broken(title, box.width, `600 14px ${style.fontFamily}`) : [];
  const lines = legend.flatMap((words) => broken(words, box.width, `12px ${style.fontFamily}`));
  const above = MARGIN + (title ? LINE * heading.length + 6 : 0);
  const [width, height] = [box.width + 2 * MARGIN, above + box.height + MARGIN + LINE * lines.length];
  const line = (/** @type {string} */ words, /** @type {number} */ y, /** @type {string} */ font) =>
    `<text x="${MARGIN}" y="${round(y)}" font-family="${escaped(style.fontFamily)}" ${font} fill="${style.color}">` +
    `${escaped(words)}</text>`;
  const ink = new Ink({ left: box.left - MARGIN, top: box.top - above });
  const size = place({ x: 0, y: 0, width, height });
  return [
    `<svg xmlns="http://www.w3.org/2000/svg" ${size} viewBox="0 0 ${round(width)} ${round(height)}">`,
    `<rect width="100%" height="100%" fill="${paperOf(pane)}"/>`,
    ...heading.map((words, n) => line(words, MARGIN + 12 + LINE * n, 'font-size="14" font-weight="600"')),
    ink.pane(pane, box),
    ...lines.map((words, n) => line(words, above + box.height + LINE * (n + 1), 'font-size="12"')),
    "</svg>",
  ].join("\n");
}

/**
 * A text in lines of a width, at most MOST_LINES: between words, or within one that is too long.
 * @param {string} text
 * @param {number} width
 * @param {string} font
 * @returns {string[]}
 */
function broken(text, width, font) {
  const pen = document.createElement("canvas").getContext("2d");
  if (pen === null) return [text];
  pen.font = font;
  const fits = (/** @type {string} */ words) => pen.measureText(words).width <= width;
  const lines = [""];
  for (const word of text.split(/(?<=\s)/u)) {
    for (const part of fits(word) ? [word] : Array.from(word)) {
      if (fits((lines.at(-1) + part).trimEnd())) lines[lines.length - 1] += part;
      else if (lines.push(part) > MOST_LINES) return [...lines.slice(0, MOST_LINES - 1), `${lines[MOST_LINES - 1].trimEnd()} …`];
    }
  }
  return lines.map((words) => words.trimEnd());
}

/**
 * An SVG as a PNG.
 * @param {string} svg
 * @param {number} scale
 * @returns {Promise<Blob>}
 */
async function painted(svg, scale) {
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [Math.ceil(image.width * scale), Math.ceil(image.height * scale)];
  const pen = canvas.getContext("2d");
  if (pen === null) throw new Error("this browser has no canvas to paint on");
  pen.drawImage(image, 0, 0, canvas.width, canvas.height);
  const file = await new Promise((done) => canvas.toBlob(done, "image/png"));
  if (file === null) throw new Error(`${canvas.width} × ${canvas.height} dots are too many: save it as SVG`);
  return file;
}

/** Writes elements as SVG, measured from a corner of the page. */
class Ink {
  /** @param {Corner} corner */
  constructor(corner) {
    this.corner = corner;
    this.named = 0;
    /** @type {DOMRect[]} */
    this.clips = []; // the boxes outside of which nothing is seen just now
    /** @type {string[]} */
    this.above = []; // what lies above the rest, such as the chosen cell with its ring
    this.letters = document.createElement("canvas").getContext("2d");
  }

  /**
   * A pane, and nothing that reaches out of it.
   * @param {Element} pane
   * @param {DOMRect} box
   */
  pane(pane, box) {
    const below = this.#element(pane);
    return this.#clipped(below + this.above.join(""), box);
  }

  /**
   * An element and all that is in it.
   * @param {Element} element
   * @returns {string}
   */
  #element(element) {
    const style = getComputedStyle(element);
    if (element.matches(SKIPPED) || style.display === "none" || Number(style.opacity) === 0) return "";
    const box = element.getBoundingClientRect();
    if (element instanceof SVGSVGElement) return this.#drawing(element, box);
    if (element instanceof HTMLCanvasElement) return this.#canvas(element, box);
    const seen = style.visibility === "visible" && box.width > 0 && box.height > 0;
    const cut = style.overflow !== "visible" && style.display !== "inline";
    if (cut) this.clips.push(box);
    const inside = Array.from(element.childNodes, (child) => this.#child(child, style)).join("");
    if (cut) this.clips.pop();
    const own = seen ? boxAsSvg(style, this.#at(box), `made${(this.named += 1)}`) : "";
    const faded = Number(style.opacity) < 1 ? `<g opacity="${style.opacity}">${own}${inside}</g>` : own + inside;
    const whole = inside && cut ? this.#clipped(faded, box) : faded;
    if (!(style.position !== "static" && Number(style.zIndex) > 0)) return whole;
    this.above.push(this.clips.reduce((part, clip) => this.#clipped(part, clip), whole));
    return "";
  }

  /**
   * @param {Node} child
   * @param {CSSStyleDeclaration} style  of its parent
   */
  #child(child, style) {
    if (child instanceof Element) return this.#element(child);
    return child instanceof Text && style.visibility === "visible" ? this.#words(child, style) : "";
  }

  /**
   * Where a box of the page stands in the SVG.
   * @param {DOMRect} box
   */
  #at({ left, top, width, height }) {
    return { x: left - this.corner.left, y: top - this.corner.top, width, height };
  }

  /**
   * A text node, one <text> for each of its lines.
   * @param {Text} text
   * @param {CSSStyleDeclaration} style
   */
  #words(text, style) {
    if (!text.data.trim() || !visible(style.color)) return "";
    return linesOf(text)
      .map(({ words, box }) => {
        const [x, y] = [box.left - this.corner.left, this.#baseline(style, box) - this.corner.top];
        const weight = style.fontWeight === "400" ? "" : ` font-weight="${style.fontWeight}"`;
        const slant = style.fontStyle === "normal" ? "" : ` font-style="${style.fontStyle}"`;
        const font = `font-family="${escaped(style.fontFamily)}" font-size="${parseFloat(style.fontSize)}"`;
        const where = `x="${round(x)}" y="${round(y)}"`;
        return `<text ${where} ${font}${weight}${slant} fill="${style.color}">${escaped(words)}</text>`;
      })
      .join("");
  }

  /**
   * @param {CSSStyleDeclaration} style
   * @param {DOMRect} box
   */
  #baseline(style, box) {
    if (this.letters === null) return box.bottom - 0.2 * box.height;
    this.letters.font = `${style.fontStyle} ${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
    const { fontBoundingBoxAscent: up, fontBoundingBoxDescent: down } = this.letters.measureText("x");
    return box.top + (box.height - up - down) / 2 + up;
  }

  /**
   * @param {HTMLCanvasElement} canvas
   * @param {DOMRect} box
   */
  #canvas(canvas, box) {
    if (canvas.width === 0 || canvas.height === 0 || box.width === 0) return "";
    return `<image ${place(this.#at(box))} preserveAspectRatio="none" href="${canvas.toDataURL("image/png")}"/>`;
  }

  /**
   * A drawing that is SVG already, with the styles that the page gave it.
   * @param {SVGSVGElement} drawing
   * @param {DOMRect} box
   */
  #drawing(drawing, box) {
    const copy = /** @type {SVGSVGElement} */ (drawing.cloneNode(true));
    const originals = [drawing, ...drawing.querySelectorAll("*")];
    [copy, ...copy.querySelectorAll("*")].forEach((shape, n) => {
      const style = getComputedStyle(originals[n]);
      for (const name of SHAPE_STYLES) {
        const value = style.getPropertyValue(name);
        if (value) shape.setAttribute(name, value);
      }
      for (const name of ["class", "style", "id"]) shape.removeAttribute(name);
    });
    for (const [name, value] of Object.entries(this.#at(box))) copy.setAttribute(name, String(round(value)));
    return new XMLSerializer().serializeToString(copy);
  }

  /**
   * Something of which only what lies in a box is seen.
   * @param {string} inside
   * @param {DOMRect} box
   */
  #clipped(inside, box) {
    const name = `made${(this.named += 1)}`;
    const shape = `<clipPath id="${name}"><rect ${place(this.#at(box))}/></clipPath>`;
    return `${shape}<g clip-path="url(#${name})">${inside}</g>`;
  }
}

/**
 * The lines that a text node is broken into, each with its box.
 * @param {Text} text
 * @returns {{words: string, box: DOMRect}[]}
 */
function linesOf(text) {
  const range = document.createRange();
  range.selectNodeContents(text);
  const whole = range.getBoundingClientRect();
  const rows = new Set(Array.from(range.getClientRects(), (box) => Math.round(box.top)));
  if (rows.size <= 1) return whole.width > 0 ? [{ words: text.data.replace(/\s+/g, " ").trim(), box: whole }] : [];
  /** @type {{words: string, box: DOMRect}[]} */
  const lines = [];
  let at = 0;
  for (const letter of text.data) {
    range.setStart(text, at);
    range.setEnd(text, (at += letter.length));
    const [box] = range.getClientRects();
    if (box === undefined || box.width === 0) continue;
    const last = lines.at(-1);
    if (last !== undefined && Math.abs(last.box.top - box.top) < 2) last.words += letter;
    else lines.push({ words: letter, box });
  }
  return lines.filter(({ words }) => words.trim());
}

/**
 * The colour of the nearest paper behind a pane.
 * @param {Element | null} element
 * @returns {string}
 */
function paperOf(element) {
  if (element === null) return "white";
  const { backgroundColor } = getComputedStyle(element);
  return visible(backgroundColor) ? backgroundColor : paperOf(element.parentElement);
}

/** @param {string} words */
function escaped(words) {
  const signs = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
  const allowed = words.replace(/[\0-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]/g, "\ufffd"); // XML has no sign for these
  return allowed.replace(/[&<>"]/g, (sign) => signs[/** @type {keyof typeof signs} */ (sign)]);
}
