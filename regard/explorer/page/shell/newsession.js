// The form for a new session: a text or an image and the model that reads it, or a .regard file, typed, chosen or
// dropped anywhere on the page. Shows how far the work is, and cancels it.

import { drawExamples, exampleImage } from "../opening/examples.js";
import { fill, make } from "../shared/elements.js";
import { message, translate } from "../shared/messages.js";

/** @typedef {import("../source/source.js").Source} Source */
/** @typedef {import("../state.js").Store} Store */

/** @typedef {import("../opening/examples.js").Example} Example */
/** @typedef {(session: string, example?: Example | null) => void} Done */

const LOADING = message("Loading the model …");
const EVERY_MS = 250; // between two questions about a job
const MEGA = 1 << 20;
const MOST_TEXT = 1 * MEGA; // as the server takes
const MOST_FILE = 64 * MEGA;
const MOST_IMAGE = 32 * MEGA;
const FILES = ".regard,.txt,.md,text/plain"; // and images, where the chosen model looks at them
const IMAGE = /\.(jpe?g|png|gif|bmp|webp|tiff?|ppm|pgm|jp2|avif|heic)$/i;

/**
 * Build the form inside an element. `take` is for files and texts that are dropped elsewhere.
 * @param {HTMLElement} element
 * @param {Store} store
 * @param {Source} source
 * @param {Done} done
 * @returns {{update: () => void, destroy: () => void, take: (given: DataTransfer) => void, focus: () => void,
 *   read: (text: string, model: string) => Promise<void>}}  read: a text with a model, by its id
 */
export function mount(element, store, source, done) {
  const form = new Choosing(element, store, source, done);
  const off = store.on((_, changed) => changed.has("lang") && form.draw());
  form.draw();
  void form.askModels();
  const destroy = () => {
    off();
    form.stop();
    fill(element);
  };
  const read = async (/** @type {string} */ text, /** @type {string} */ model) => {
    form.text.value = text;
    await form.look(text, model);
  };
  const take = (/** @type {DataTransfer} */ given) => void form.take(given);
  return { update: () => form.draw(), destroy, take, focus: () => form.text.focus(), read };
}

class Choosing {
  /**
   * @param {HTMLElement} element
   * @param {Store} store
   * @param {Source} source
   * @param {Done} done
   */
  constructor(element, store, source, done) {
    this.element = element;
    this.store = store;
    this.source = source;
    this.done = done;
    this.phase = LOADING;
    this.work = 0; // the number of the work that is waited for: what ends later is stale
    /** @type {string | null} */
    this.job = null;
    /** @type {import("../source/source.js").ModelLine[]} */
    this.models = [];
    this.text = make("textarea", {
      rows: 4,
      spellcheck: "false",
      "data-role": "text",
      onkeydown: (/** @type {KeyboardEvent} */ event) => this.#key(event),
    });
    this.model = make("select", { "data-role": "model", onchange: () => this.#drawFiles() });
    this.where = make("input", {
      ...{ type: "text", "data-role": "where", spellcheck: "false", autocomplete: "off", autocapitalize: "off" },
      onkeydown: (/** @type {KeyboardEvent} */ event) => event.key === "Enter" && !event.isComposing && void this.openModel(),
    });
    this.cut = make("input", { type: "checkbox", "data-role": "cut" });
    this.file = make("input", {
      type: "file",
      accept: FILES,
      class: "unseen",
      tabindex: "-1",
      onchange: () => void this.#chosenFile(),
    });
    this.open = make("button", { type: "button", "data-role": "file", onclick: () => this.file.click() });
    this.hint = make("span", { class: "hint" });
    /** @type {File | null} */
    this.image = null;
    this.chosen = make("div", { class: "line chosen-image" });
    this.examples = make("div", { class: "files" });
    /** @type {Example | null} */
    this.example = null; // that is read
    this.said = make("div", { class: "progress", role: "status", "aria-live": "polite" });
  }

  get lang() {
    return this.store.get().lang;
  }

  async askModels() {
    this.models = await this.source.models().catch(() => []);
    this.#drawModels(); // not the rest: somebody may be typing already
  }

  /** @param {string} [chosen]  an id; "" for the one that the server picks by the text */
  #drawModels(chosen = this.model.value) {
    const { lang } = this;
    const automatic = { id: "", name: translate("automatic", lang), images: false };
    fill(
      this.model,
      ...[automatic, ...this.models].map(({ id, name, images }) =>
        make(
          "option",
          { value: id, selected: id === chosen },
          images ? translate("{name} (images)", lang, { name }) : name,
        ),
      ),
    );
    this.#drawFiles();
    fill(
      this.examples,
      make("h3", {}, translate("Examples", lang)),
      drawExamples(this.models, lang, (example, model) => void this.#readExample(example, model)),
    );
  }

  /** Whether the chosen model may look at images: only one that is known not to does not. */
  get #seeing() {
    const { value } = this.model;
    return this.models.find(({ id, default: first }) => (value === "" ? first : id === value))?.images !== false;
  }

  /** The button that opens files, of images only where the chosen model looks at them. */
  #drawFiles() {
    const { lang } = this;
    const words = translate(
      this.#seeing ? message("Open an image or a .regard file") : message("Open a text or a .regard file"),
      lang,
    );
    this.file.accept = this.#seeing ? `${FILES},image/*` : FILES;
    this.file.setAttribute("aria-label", words);
    fill(this.open, words);
    fill(
      this.hint,
      translate(
        this.#seeing
          ? message("or drop a text, an image or a .regard file anywhere on this page")
          : message("or drop a text or a .regard file anywhere on this page; images need a model that looks at them"),
        lang,
      ),
    );
  }

  draw() {
    const { lang } = this;
    this.#drawModels();
    this.where.placeholder = translate("a directory, or a hub id: owner/name", lang);
    fill(
      this.element,
      make(
        "p",
        { class: "intro" },
        translate("Type or drop a text or an image, and see what each head of a model looks at.", lang),
      ),
      make("label", { class: "field" }, make("span", {}, translate("Text", lang)), this.text),
      this.chosen,
      make(
        "div",
        { class: "line" },
        make("label", { class: "field inline" }, make("span", {}, translate("Model", lang)), this.model),
        make(
          "button",
          { type: "button", class: "primary", "data-role": "start", onclick: () => void this.start() },
          translate("Look", lang),
        ),
      ),
      this.source.openModel && make(
        "div",
        { class: "line" },
        make("label", { class: "field inline" }, make("span", {}, translate("Another model", lang)), this.where),
        make("button", { type: "button", "data-role": "open-model", onclick: () => void this.openModel() }, translate("Open", lang)),
      ),
      make("label", { class: "check" }, this.cut, translate("Cut a text that is longer than the model takes", lang)),
      make("div", { class: "line" }, this.open, this.file, this.hint),
      this.said,
      this.examples,
    );
    this.#drawImage();
  }

  /** The image that was chosen, until it is left out. */
  #drawImage() {
    const { lang, image } = this;
    const away = () => {
      this.image = null;
      this.#drawImage();
    };
    const label = translate("Leave the image out", lang);
    this.chosen.hidden = image === null;
    fill(
      this.chosen,
      image && make("span", { class: "chosen-name" }, translate("Image: {name}", lang, { name: image.name })),
      image &&
        make(
          "button",
          { type: "button", class: "quiet", "aria-label": label, title: label, onclick: away },
          "✕",
        ),
      image && make(
        "span",
        { class: "hint" },
        translate("The text above is read beside it, by a model that reads both.", lang),
      ),
    );
  }

  /**
   * Begin with what was given: the image, or else the text.
   * @param {Example | null} [example]  that this is
   */
  async start(example = null) {
    const { image } = this;
    this.example = example;
    if (image === null) return this.look(this.text.value);
    await this.#job(
      message("Looking at the image …"),
      () => this.source.look.image(image, this.text.value.trim(), this.model.value || null),
    );
  }

  /**
   * @param {Example} example
   * @param {import("../source/source.js").ModelLine | null} model  that it needs; null where any does
   */
  async #readExample(example, model) {
    if (model) this.model.value = model.id;
    this.#drawFiles();
    this.image = example.needs === "images" ? await exampleImage() : null;
    this.#drawImage();
    this.text.value = example.text;
    await this.start(example);
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    void this.start();
  }

  async #chosenFile() {
    const [file] = this.file.files ?? [];
    this.file.value = "";
    if (file) await this.#takeFile(file);
  }

  /** @param {DataTransfer} given */
  async take(given) {
    const [file] = given.files;
    if (file) return this.#takeFile(file);
    const text = given.getData("text/plain");
    this.text.value = text;
    await this.look(text);
  }

  /** @param {File} file */
  async #takeFile(file) {
    const capture = file.name.endsWith(".regard");
    const image = !capture && (file.type.startsWith("image/") || IMAGE.test(file.name));
    const most = capture ? MOST_FILE : image ? MOST_IMAGE : MOST_TEXT;
    if (file.size > most) return this.#fail(
      translate("“{name}” is too large: at most {most} MB.", this.lang, { name: file.name, most: most / MEGA }),
    );
    if (capture) return this.#open(file);
    this.image = image ? file : null;
    this.#drawImage();
    if (image) return this.start();
    const text = await file.text();
    if (text.includes("\0") || text.includes("\ufffd"))
      return this.#fail(
        translate("“{name}” is neither a text nor an image nor a .regard file.", this.lang, { name: file.name }),
      );
    this.text.value = text;
    await this.look(text);
  }

  /** @param {File} file */
  async #open(file) {
    const mine = this.#begin(message("Opening the file …"));
    try {
      const session = await this.source.open(file);
      if (this.#end(mine)) this.done(session);
    } catch (error) {
      if (this.#end(mine)) this.#fail(translate("That did not work: {error}", this.lang, { error: messageOf(error) }));
    }
  }

  /**
   * Let the model read a text, and wait for it.
   * @param {string} text
   * @param {string} [model]  its id; default the chosen one
   */
  async look(text, model = this.model.value) {
    if (text !== this.example?.text) this.example = null;
    if (!text.trim()) return this.#fail(translate("Type a text first.", this.lang));
    await this.#job(
      message("Reading the text …"),
      () => this.source.look.start(text, model || null, this.cut.checked),
    );
  }

  /** Open a model by its directory or hub id, and choose it. */
  async openModel() {
    const where = this.where.value.trim();
    if (!where) return this.#fail(translate("Type the directory or the hub id of a model first.", this.lang));
    await this.#job(LOADING, () => /** @type {Promise<string>} */ (this.source.openModel?.(where)));
  }

  /** @param {string} model  the id of one that was opened */
  async #opened(model) {
    this.models = await this.source.models().catch(() => this.models);
    this.where.value = "";
    this.#drawModels(model);
    const { name = "" } = this.models.find(({ id }) => id === model) ?? {};
    fill(this.said, translate("{name} is open, and chosen.", this.lang, { name }));
    this.text.focus();
  }

  /**
   * Start a job, and wait for it.
   * @param {string} reading  said while the model reads, in English
   * @param {() => Promise<string>} start
   */
  async #job(reading, start) {
    this.stop();
    const mine = this.#begin(LOADING);
    try {
      const job = await start();
      if (mine !== this.work) return void this.source.look.cancel(job);
      this.job = job;
      await this.#wait(job, mine, reading);
    } catch (error) {
      if (this.#end(mine)) this.#fail(translate("That did not work: {error}", this.lang, { error: messageOf(error) }));
    }
  }

  /**
   * @param {string} job
   * @param {number} mine
   * @param {string} reading
   */
  async #wait(job, mine, reading) {
    for (;;) {
      const { state, progress, session, model, error } = await this.source.look.poll(job);
      if (mine !== this.work) return;
      if (state === "done" && model) return void (this.#end(mine) && (await this.#opened(model)));
      if (state === "done" && session) return void (this.#end(mine) && this.done(session, this.example));
      if (state === "failed") throw new Error(error ?? state);
      if (state === "cancelled") return void (this.#end(mine) && fill(this.said, translate("Cancelled.", this.lang)));
      const fetching = progress === "downloading" ? message("Downloading the model …") : LOADING;
      this.#tell(state === "reading" ? reading : fetching, / MB$/.test(progress ?? "") ? progress : "");
      await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
    }
  }

  /** Cancel what is under way. */
  stop() {
    this.work += 1;
    clearInterval(this.clock);
    if (this.job !== null) void this.source.look.cancel(this.job).catch(() => undefined); // it may have ended meanwhile
    this.job = null;
    fill(this.said);
  }

  /** @param {string} text  in English */
  #begin(text) {
    this.since = performance.now();
    clearInterval(this.clock);
    this.clock = setInterval(() => this.#tick(), 1000);
    this.phase = text;
    const cancel = make(
      "button",
      {
        type: "button",
        "data-role": "cancel",
        onclick: () => (this.stop(), fill(this.said, translate("Cancelled.", this.lang))),
      },
      translate("Cancel", this.lang),
    );
    this.phaseWords = make("span", {}, translate(text, this.lang));
    this.seconds = make("span", { class: "seconds", "aria-hidden": "true" });
    fill(this.said, make("span", { class: "spinner", "aria-hidden": "true" }), this.phaseWords, this.seconds, cancel);
    return ++this.work;
  }

  /**
   * @param {string} text  in English
   * @param {string} [amount]  how much of it, "12 of 90 MB"
   */
  #tell(text, amount = "") {
    if (this.phase === text + amount || !this.phaseWords) return;
    this.phase = text + amount;
    const [, done, all] = /^(\d+) of (\d+) MB$/.exec(amount) ?? [];
    const parts = done === undefined ? "" : ` ${translate("{done} of {all} MB", this.lang, { done, all })}`;
    fill(this.phaseWords, translate(text, this.lang) + parts);
  }

  #tick() {
    const seconds = Math.floor((performance.now() - (this.since ?? 0)) / 1000);
    if (this.seconds && seconds > 1) fill(this.seconds, translate("{seconds} s", this.lang, { seconds }));
  }

  /**
   * The work has ended; was it the one that is waited for?
   * @param {number} mine
   */
  #end(mine) {
    if (mine !== this.work) return false;
    clearInterval(this.clock);
    this.job = null;
    fill(this.said);
    return true;
  }

  /** @param {string} words */
  #fail(words) {
    fill(this.said, make("span", { class: "error", role: "alert" }, words));
  }
}

/** @param {unknown} error */
function messageOf(error) {
  return error instanceof Error ? error.message : String(error);
}

// --------------------------------------------------------------------------------------------------------------- drops

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
