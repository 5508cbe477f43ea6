// Where messages are written: Enter sends, Shift+Enter begins a line.
import { h, replace } from "../../parts/dom.js";
import { server } from "../../parts/server-state.js";

const MAX_IMAGES = 8;

/** Make a field as tall as its text, of at most a part of the window. */
export function grow(field) {
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight + 2, innerHeight * 0.4)}px`;
}

/** `acts`: send(text, images), stop(). */
export class Composer {
  constructor(acts) {
    this.acts = acts;
    this.images = [];
    this.input = h("textarea", { id: "prompt", rows: 1, placeholder: "Write a message", "aria-label": "Message", "aria-describedby": "prompt-keys" });
    this.input.addEventListener("input", () => grow(this.input));
    this.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.isLive) this.#submit(); // who writes ahead does not stop the answer
    });
    this.input.addEventListener("paste", (event) => {
      const images = [...event.clipboardData.files].filter((file) => file.type.startsWith("image/"));
      if (images.length && this.takesImages) this.#add(images);
    });
    this.file = h("input", { type: "file", accept: "image/*", multiple: true, hidden: true, onchange: () => this.#add(this.file.files) });
    this.attach = h("button", { type: "button", class: "quiet", "aria-label": "Add images", onclick: () => this.file.click() }, "+");
    this.shown = h("div", { class: "images" });
    this.button = h("button", { type: "submit", class: "primary" }, "Send");
    this.element = h(
      "form",
      { class: "composer", onsubmit: (event) => (event.preventDefault(), this.#submit()) },
      this.shown,
      h("div", { class: "composer-line" }, this.attach, this.file, this.input, this.button),
      h("small", { id: "prompt-keys", class: "muted" }, "Enter sends, Shift+Enter begins a line, Escape stops the answer."),
    );
    this.show(false);
  }

  get takesImages() {
    return server.card?.input_modalities?.includes("image") ?? false;
  }

  /** Whether an answer is coming: then the button stops it. */
  show(isLive) {
    this.isLive = isLive;
    this.button.textContent = isLive ? "Stop" : "Send";
    this.attach.disabled = !this.takesImages;
    this.attach.title = this.takesImages ? "Add images" : "This model takes no images";
  }

  #submit() {
    if (this.isLive) {
      this.acts.stop();
      return;
    }
    const text = this.input.value;
    if (!text.trim() && !this.images.length) return;
    this.input.value = "";
    grow(this.input);
    this.acts.send(text, this.images.splice(0));
    this.#showImages();
  }

  async #add(files) {
    for (const file of [...files].slice(0, MAX_IMAGES - this.images.length)) {
      const reader = new FileReader();
      const read = new Promise((resolve) => reader.addEventListener("load", () => resolve(reader.result)));
      reader.readAsDataURL(file);
      this.images.push(await read);
    }
    this.file.value = "";
    this.#showImages();
  }

  #showImages() {
    replace(this.shown, this.images.map((src, i) => h(
      "button",
      { type: "button", "aria-label": `Remove image ${i + 1}`, onclick: () => (this.images.splice(i, 1), this.#showImages()) },
      h("img", { src, alt: "" }),
    )));
  }
}
