// What changes around a pane without the state: its size, and the system's light or dark. It does not know what is drawn.

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
