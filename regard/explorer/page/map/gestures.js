// Gestures on a canvas: drag, shift-drag, wheel, two fingers, click, hover, and keys, as calls with places in CSS
// pixels.

/**
 * @typedef {object} Answers
 * @property {(dx: number, dy: number) => void} pan
 * @property {(factor: number, x: number, y: number) => boolean} zoom  false where nothing changed
 * @property {(x: number, y: number) => void} enter  one step closer
 * @property {(from: {x: number, y: number}, to: {x: number, y: number}, done: boolean) => void} brush
 * @property {(x: number, y: number) => void} click
 * @property {(x: number, y: number) => void} hover
 * @property {() => void} leave
 * @property {(event: KeyboardEvent) => boolean} key  true where the key was used
 */

/** A press that moves less than this is a click. */
const STILL = 4;

/**
 * Listen on a canvas; the function that comes back ends it.
 * @param {HTMLCanvasElement} canvas
 * @param {Answers} answers
 * @returns {() => void}
 */
export function listen(canvas, answers) {
  const ended = new AbortController();
  const on = (/** @type {string} */ name, /** @type {(event: any) => void} */ fn, options = {}) =>
    canvas.addEventListener(name, fn, { signal: ended.signal, ...options });
  /** @type {Map<number, {x: number, y: number}>} */
  const down = new Map();
  /** @type {{from: {x: number, y: number}, brushes: boolean, moves: boolean} | null} */
  let press = null;
  const place = (/** @type {MouseEvent} */ event) => {
    const box = canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };

  on("pointerdown", (/** @type {PointerEvent} */ event) => {
    if (event.button !== 0) return;
    canvas.setPointerCapture(event.pointerId);
    down.set(event.pointerId, place(event));
    press = { from: place(event), brushes: event.shiftKey, moves: down.size > 1 };
  });
  on("pointermove", (/** @type {PointerEvent} */ event) => {
    const [now, before] = [place(event), down.get(event.pointerId)];
    if (!before || !press) return answers.hover(now.x, now.y);
    down.set(event.pointerId, now);
    if (down.size > 1) return pinch(down, event.pointerId, before, answers);
    press.moves ||= Math.hypot(now.x - press.from.x, now.y - press.from.y) > STILL;
    if (!press.moves) return;
    if (press.brushes) answers.brush(press.from, now, false);
    else answers.pan(now.x - before.x, now.y - before.y);
  });
  on("pointerup", (/** @type {PointerEvent} */ event) => {
    const was = press;
    down.delete(event.pointerId);
    if (down.size > 0 || was === null) return;
    press = null;
    const now = place(event);
    if (!was.moves) answers.click(now.x, now.y);
    else if (was.brushes) answers.brush(was.from, now, true);
  });
  on("pointercancel", (/** @type {PointerEvent} */ event) => {
    down.delete(event.pointerId);
    press = null;
  });
  on("pointerleave", () => answers.leave());
  on("dblclick", (/** @type {MouseEvent} */ event) => answers.enter(place(event).x, place(event).y));
  on("wheel", (/** @type {WheelEvent} */ event) => wheel(event, place(event), answers), { passive: false });
  on("keydown", (/** @type {KeyboardEvent} */ event) => {
    if (!answers.key(event)) return;
    event.preventDefault();
    event.stopPropagation();
  });
  return () => ended.abort();
}

/**
 * @param {WheelEvent} event
 * @param {{x: number, y: number}} at
 * @param {Answers} answers
 */
function wheel(event, at, answers) {
  const lines = event.deltaMode === 1 ? 24 : event.deltaMode === 2 ? 240 : 1;
  // A pinch on a touchpad arrives as a wheel with the control key, in smaller steps.
  const by = Math.max(-120, Math.min(120, event.deltaY * lines)) * (event.ctrlKey ? 0.01 : 0.0025);
  // Where nothing changes, the wheel is left to the page, so that one can scroll past a map in a notebook.
  if (answers.zoom(Math.exp(-by), at.x, at.y)) event.preventDefault();
}

/**
 * @param {Map<number, {x: number, y: number}>} down
 * @param {number} moved
 * @param {{x: number, y: number}} before
 * @param {Answers} answers
 */
function pinch(down, moved, before, answers) {
  const other = [...down].find(([id]) => id !== moved)?.[1];
  const now = down.get(moved);
  if (!other || !now) return;
  const apart = (/** @type {{x: number, y: number}} */ point) => Math.hypot(point.x - other.x, point.y - other.y) || 1;
  answers.zoom(apart(now) / apart(before), (now.x + other.x) / 2, (now.y + other.y) / 2);
  answers.pan((now.x - before.x) / 2, (now.y - before.y) / 2);
}
