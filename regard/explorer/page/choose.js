// Choosing what is looked at: a text or an image and the model that reads it, or a .regard file. Shows how far the
// work is, and cancels it. It does not know what is done with the new session: `done` is told its id.

import { fill, make } from "./elements.js";
import { EXAMPLE, say } from "./words.js";

/** @typedef {import("./source.js").Source} Source */
/** @typedef {import("./state.js").Store} Store */
/** @typedef {(session: string) => void} Done */

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
 * @returns {{update: () => void, destroy: () => void, take: (given: DataTransfer) => void, focus: () => void}}
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
  return { update: () => form.draw(), destroy, take: (given) => void form.take(given), focus: () => form.text.focus() };
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
    /** @type {import("./words.js").Word} */
    this.phase = "state_loading";
    this.work = 0; // the number of the work that is waited for: what ends later is stale
    /** @type {string | null} */
    this.job = null;
    /** @type {import("./source.js").ModelLine[]} */
    this.models = [];
    this.text = make("textarea", {
      rows: 4,
      spellcheck: "false",
      "data-role": "text",
      onkeydown: (/** @type {KeyboardEvent} */ event) => this.#key(event),
    });
    this.model = make("select", { "data-role": "model", onchange: () => this.#drawFiles() });
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
    this.said = make("div", { class: "progress", role: "status", "aria-live": "polite" });
  }

  get lang() {
    return this.store.get().lang;
  }

  async askModels() {
    this.models = await this.source.models().catch(() => []);
    this.#drawModels(); // not the rest: somebody may be typing already
  }

  #drawModels() {
    const { lang } = this;
    const chosen = this.model.value;
    fill(
      this.model,
      ...(this.models.length ? this.models : [{ id: "", name: say(lang, "choose_model_default") }]).map(
        ({ id, name, ...more }) =>
          make(
            "option",
            { value: id, selected: chosen ? id === chosen : more.default },
            more.images ? say(lang, "choose_model_images", { name }) : name,
          ),
      ),
    );
    this.#drawFiles();
  }

  /** Whether the chosen model may look at images: only one that is known not to does not. */
  get #seeing() {
    return this.models.find(({ id }) => id === this.model.value)?.images !== false;
  }

  /** The button that opens files, of images only where the chosen model looks at them. */
  #drawFiles() {
    const { lang } = this;
    const words = say(lang, this.#seeing ? "choose_file" : "choose_capture");
    this.file.accept = this.#seeing ? `${FILES},image/*` : FILES;
    this.file.setAttribute("aria-label", words);
    fill(this.open, words);
    fill(this.hint, say(lang, this.#seeing ? "choose_drop" : "choose_drop_text"));
  }

  draw() {
    const { lang } = this;
    this.#drawModels();
    fill(
      this.element,
      make("p", { class: "intro" }, say(lang, "choose_intro")),
      make("label", { class: "field" }, make("span", {}, say(lang, "choose_text")), this.text),
      this.chosen,
      make(
        "div",
        { class: "line" },
        make("label", { class: "field inline" }, make("span", {}, say(lang, "choose_model")), this.model),
        make(
          "button",
          { type: "button", class: "primary", "data-role": "start", onclick: () => void this.start() },
          say(lang, "choose_start"),
        ),
      ),
      make("label", { class: "check" }, this.cut, say(lang, "choose_cut")),
      make(
        "div",
        { class: "line files" },
        make(
          "button",
          { type: "button", "data-role": "example", onclick: () => this.#example() },
          say(lang, "choose_example"),
        ),
        make("span", { class: "example" }, EXAMPLE),
      ),
      make("div", { class: "line" }, this.open, this.file, this.hint),
      this.said,
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
    this.chosen.hidden = image === null;
    fill(
      this.chosen,
      image && make("span", { class: "chosen-name" }, say(lang, "choose_image", { name: image.name })),
      image &&
        make(
          "button",
          { type: "button", class: "quiet", "aria-label": say(lang, "choose_image_away"), title: say(lang, "choose_image_away"), onclick: away },
          "✕",
        ),
      image && make("span", { class: "hint" }, say(lang, "choose_image_beside")),
    );
  }

  /** Begin with what was given: the image, or else the text. */
  async start() {
    const { image } = this;
    if (image === null) return this.look(this.text.value);
    await this.#job("state_looking", () => this.source.look.image(image, this.text.value.trim(), this.model.value || null));
  }

  #example() {
    this.image = null;
    this.#drawImage();
    this.text.value = EXAMPLE;
    void this.look(EXAMPLE);
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
    if (file.size > most) return this.#fail(say(this.lang, "choose_large", { name: file.name, most: most / MEGA }));
    if (capture) return this.#open(file);
    this.image = image ? file : null;
    this.#drawImage();
    if (image) return this.start();
    const text = await file.text();
    if (text.includes("\0") || text.includes("\ufffd"))
      return this.#fail(say(this.lang, "choose_kind", { name: file.name }));
    this.text.value = text;
    await this.look(text);
  }

  /** @param {File} file */
  async #open(file) {
    const mine = this.#begin("state_opening");
    try {
      const session = await this.source.open(file);
      if (this.#end(mine)) this.done(session);
    } catch (error) {
      if (this.#end(mine)) this.#fail(say(this.lang, "failed", { error: messageOf(error) }));
    }
  }

  /**
   * Let the model read a text, and wait for it.
   * @param {string} text
   */
  async look(text) {
    if (!text.trim()) return this.#fail(say(this.lang, "choose_empty"));
    await this.#job("state_reading", () => this.source.look.start(text, this.model.value || null, this.cut.checked));
  }

  /**
   * Start a job, and wait for it.
   * @param {import("./words.js").Word} reading  said while the model reads
   * @param {() => Promise<string>} start
   */
  async #job(reading, start) {
    this.stop();
    const mine = this.#begin("state_loading");
    try {
      const job = await start();
      if (mine !== this.work) return void this.source.look.cancel(job);
      this.job = job;
      await this.#wait(job, mine, reading);
    } catch (error) {
      if (this.#end(mine)) this.#fail(say(this.lang, "failed", { error: messageOf(error) }));
    }
  }

  /**
   * @param {string} job
   * @param {number} mine
   * @param {import("./words.js").Word} reading
   */
  async #wait(job, mine, reading) {
    for (;;) {
      const { state, session, error } = await this.source.look.poll(job);
      if (mine !== this.work) return;
      if (state === "done" && session) return void (this.#end(mine) && this.done(session));
      if (state === "failed") throw new Error(error ?? state);
      if (state === "cancelled") return void (this.#end(mine) && fill(this.said, say(this.lang, "cancelled")));
      this.#tell(state === "reading" ? reading : "state_loading");
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

  /** @param {import("./words.js").Word} word */
  #begin(word) {
    this.since = performance.now();
    clearInterval(this.clock);
    this.clock = setInterval(() => this.#tick(), 1000);
    this.phase = word;
    const cancel = make(
      "button",
      {
        type: "button",
        "data-role": "cancel",
        onclick: () => (this.stop(), fill(this.said, say(this.lang, "cancelled"))),
      },
      say(this.lang, "cancel"),
    );
    this.phaseWords = make("span", {}, say(this.lang, word));
    this.seconds = make("span", { class: "seconds", "aria-hidden": "true" });
    fill(this.said, make("span", { class: "spinner", "aria-hidden": "true" }), this.phaseWords, this.seconds, cancel);
    return ++this.work;
  }

  /** @param {import("./words.js").Word} word */
  #tell(word) {
    if (this.phase === word || !this.phaseWords) return;
    this.phase = word;
    fill(this.phaseWords, say(this.lang, word));
  }

  #tick() {
    const seconds = Math.floor((performance.now() - (this.since ?? 0)) / 1000);
    if (this.seconds && seconds > 1) fill(this.seconds, say(this.lang, "state_seconds", { seconds }));
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
