// Texts and files that are dropped anywhere on the page. It does not know what is done with them.

/**
 * Listen to drops on an element, which says so (data-dropping) while something is held over it.
 * @param {HTMLElement} element
 * @param {() => string} words  said meanwhile
 * @param {(given: DataTransfer) => void} take
 * @returns {() => void}
 */
export function listenToDrops(element, words, take) {
  const over = (/** @type {DragEvent} */ event) => {
    event.preventDefault();
    element.dataset.dropping = words();
  };
  const leave = (/** @type {DragEvent} */ event) => {
    if (!element.contains(/** @type {Node | null} */ (event.relatedTarget))) delete element.dataset.dropping;
  };
  const drop = (/** @type {DragEvent} */ event) => {
    event.preventDefault();
    delete element.dataset.dropping;
    if (event.dataTransfer !== null) take(event.dataTransfer);
  };
  const ends = new AbortController();
  const { signal } = ends;
  element.addEventListener("dragover", over, { signal });
  element.addEventListener("dragleave", leave, { signal });
  element.addEventListener("drop", drop, { signal });
  return () => ends.abort();
}
