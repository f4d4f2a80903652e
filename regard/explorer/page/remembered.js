// Answers remembered by question: the least recently used leave first, a question under way is asked once however many
// wait for it, and it is aborted when nobody waits any more. It does not know how a question is asked.

/** @typedef {{promise: Promise<any>, controller: AbortController, waiting: number, done: boolean}} Entry */

export class Remembered {
  /** @param {number} most  answers kept */
  constructor(most) {
    this.most = most;
    /** @type {Map<string, Entry>} */
    this.entries = new Map(); // in order of use, the oldest first
  }

  /**
   * The answer to a question, from memory where it is there.
   * @template T
   * @param {string} question
   * @param {(signal: AbortSignal) => Promise<T>} ask
   * @param {AbortSignal} [signal]  of the one who waits; others who wait for the same answer are not disturbed
   * @returns {Promise<T>}
   */
  ask(question, ask, signal) {
    if (signal?.aborted) return Promise.reject(aborted());
    const entry = this.entries.get(question) ?? this.#begin(question, ask);
    this.entries.delete(question);
    this.entries.set(question, entry);
    this.#forgetOldest();
    return entry.done ? entry.promise : this.#wait(question, entry, signal);
  }

  /**
   * @param {string} question
   * @param {(signal: AbortSignal) => Promise<any>} ask
   * @returns {Entry}
   */
  #begin(question, ask) {
    const controller = new AbortController();
    /** @type {Entry} */
    const entry = { promise: ask(controller.signal), controller, waiting: 0, done: false };
    entry.promise.then(
      () => (entry.done = true),
      () => this.#forget(question, entry), // an error may pass: the next one asks again
    );
    return entry;
  }

  /**
   * @param {string} question
   * @param {Entry} entry
   * @param {AbortSignal} [signal]
   * @returns {Promise<any>}
   */
  #wait(question, entry, signal) {
    entry.waiting += 1;
    return new Promise((resolve, reject) => {
      const leave = () => {
        reject(aborted());
        entry.waiting -= 1;
        if (entry.waiting > 0 || entry.done) return;
        this.#forget(question, entry);
        entry.controller.abort();
      };
      signal?.addEventListener("abort", leave, { once: true });
      entry.promise.then(resolve, reject).finally(() => signal?.removeEventListener("abort", leave));
    });
  }

  /**
   * @param {string} question
   * @param {Entry} entry
   */
  #forget(question, entry) {
    if (this.entries.get(question) === entry) this.entries.delete(question);
  }

  #forgetOldest() {
    for (const [question, entry] of this.entries) {
      if (this.entries.size <= this.most) return;
      if (entry.done) this.entries.delete(question);
    }
  }
}

function aborted() {
  return new DOMException("nobody waits for this answer any more", "AbortError");
}
