// A pane as an SVG or PNG file, and the menu in its corner that offers it. Words stay words and boxes boxes; what
// stands in a canvas goes in as it is. No fonts are loaded: those of the page are named.
//
//     await save(element, "svg", { title: "layer 3, head 1", legend: ["weights, linear"], name: "map" });
//
// An element with data-saving="skip" is left out, and so are fields, menus and choices; what CSS alone writes before or
// after an element (`content`) is not drawn.

import { measureName } from "../atlas/heads.js";
import { fill, make } from "../shared/elements.js";
import { message, translate } from "../shared/messages.js";
import { boxAsSvg, place, round, visible } from "./boxes.js";

/** @typedef {import("../state.js").Store} Store */

/** @typedef {{title?: string, legend?: string[], name?: string, scale?: number}} Words */
/** @typedef {{left: number, top: number}} Corner */

const CONTROLS = "input, select, textarea, dialog, [role=group], [role=radiogroup], label:has(> input)";
const SKIPPED = `[data-saving=skip], script, style, ${CONTROLS}`;
const MARGIN = 16;
const LINE = 18; // height of a line of the title or the legend
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
async function save(pane, kind, words = {}) {
  if (kind !== "png" && kind !== "svg") throw new Error(`a pane is saved as "png" or "svg", not ${JSON.stringify(kind)}`);
  const svg = draw(pane, words);
  const drawn = new Blob([svg], { type: "image/svg+xml" });
  const file = kind === "png" ? await painted(svg, words.scale ?? 2) : drawn;
  const link = document.createElement("a");
  link.href = URL.createObjectURL(file);
  link.download = `${(words.name ?? "regard").replace(/[^\p{L}\p{N}._-]+/gu, "-")}.${kind}`;
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
  const above = MARGIN + (title ? LINE + 6 : 0);
  const [width, height] = [box.width + 2 * MARGIN, above + box.height + MARGIN + LINE * legend.length];
  const style = getComputedStyle(pane);
  const line = (/** @type {string} */ words, /** @type {number} */ y, /** @type {string} */ font) =>
    `<text x="${MARGIN}" y="${round(y)}" font-family="${escaped(style.fontFamily)}" ${font} fill="${style.color}">` +
    `${escaped(words)}</text>`;
  const ink = new Ink({ left: box.left - MARGIN, top: box.top - above });
  const size = place({ x: 0, y: 0, width, height });
  return [
    `<svg xmlns="http://www.w3.org/2000/svg" ${size} viewBox="0 0 ${round(width)} ${round(height)}">`,
    `<rect width="100%" height="100%" fill="${paperOf(pane)}"/>`,
    ...(title ? [line(title, MARGIN + 12, 'font-size="14" font-weight="600"')] : []),
    ink.pane(pane, box),
    ...legend.map((words, n) => line(words, above + box.height + LINE * (n + 1), 'font-size="12"')),
    "</svg>",
  ].join("\n");
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

// ------------------------------------------------------------------------------------------------------------ the menu

const TITLES = { atlas: message("Heads"), map: message("Map"), text: message("Text"), image: message("Image") };

/**
 * Put the menu into a pane. Returns a function that ends it.
 * @param {HTMLElement} pane
 * @param {"atlas" | "map" | "text"} name
 * @param {Store} store
 * @returns {() => void}
 */
export function offerSaving(pane, name, store) {
  const menu = make("details", { class: "save", "data-saving": "skip" });
  const leave = (/** @type {FocusEvent} */ event) => {
    if (!menu.contains(/** @type {Node | null} */ (event.relatedTarget))) menu.open = false;
  };
  menu.addEventListener("focusout", leave);
  const draw = () => {
    const { lang } = store.get();
    const label = `${translate("Save as an image", lang)}: ${translate(TITLES[name], lang)}`;
    const choices = /** @type {const} */ (["png", "svg"]).map((kind) =>
      make(
        "button",
        { type: "button", "data-save": kind, onclick: () => void write(menu, pane, name, kind, store) },
        kind.toUpperCase(),
      ),
    );
    fill(
      menu,
      make("summary", { "aria-label": label, title: label }, "⤓"),
      make("div", { class: "save-choices" }, ...choices),
    );
  };
  draw();
  const off = store.on((_, changed) => changed.has("lang") && draw());
  pane.append(menu);
  return () => {
    off();
    menu.remove();
  };
}

/**
 * @param {HTMLDetailsElement} menu
 * @param {HTMLElement} pane
 * @param {"atlas" | "map" | "text"} name
 * @param {"png" | "svg"} kind
 * @param {Store} store
 */
async function write(menu, pane, name, kind, store) {
  const { layer, head, lang } = store.get();
  menu.open = false;
  const place = translate("layer {layer}, head {head}", lang, { layer, head });
  const what = name === "atlas" ? measureName(pane.dataset.measure ?? "", lang) : place;
  const shown = pane.classList.contains("pane-image") ? "image" : name;
  try {
    await save(pane, kind, {
      title: `${translate(TITLES[shown], lang)}: ${what}`,
      name: name === "atlas" ? "regard-heads" : `regard-${shown}-${layer}.${head}`,
    });
  } catch (error) {
    const words = translate(
      "That did not work: {error}",
      lang,
      { error: error instanceof Error ? error.message : String(error) },
    );
    menu.append(make("p", { class: "error", role: "alert" }, words));
  }
}
