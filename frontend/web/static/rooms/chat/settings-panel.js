// What a conversation's requests carry: system prompt, fields, tools, the form of the answer.
import { h, replace } from "../../parts/dom.js";
import { server } from "../../parts/server-state.js";
import { EXAMPLE_TOOL, FORMS, GROUPS, formFields, parsed, toolsOf, valueOf } from "./fields.js";

/**
 * Settings are {system, fields: {name: text}, form, formText, tools}: texts as they were typed, also wrong ones.
 * "change" is sent when they change.
 */
export class SettingsPanel extends HTMLElement {
  /** Show these settings; they are changed in place. */
  show(settings) {
    this.settings = settings;
    settings.fields ??= {};
    replace(
      this,
      h("h2", { id: "settings-title" }, "Settings of this chat"),
      this.#area("system", "System prompt", 4),
      GROUPS.map(([title, fields]) => this.#group(title, fields)),
      this.#form(),
      this.#tools(),
      h("p", { class: "buttons" }, h("button", { type: "button", onclick: () => this.#reset() }, "Reset all")),
    );
  }

  #changed() {
    this.dispatchEvent(new Event("settings"));
  }

  #reset() {
    for (const name of Object.keys(this.settings)) delete this.settings[name];
    this.show(this.settings);
    this.#changed();
  }

  #group(title, fields) {
    const isUsed = fields.some(({ name }) => this.settings.fields[name]);
    return h("details", { open: isUsed || title === "Choice of tokens" }, h("summary", {}, title), h("div", { class: "fields" }, fields.map((field) => this.#field(field))));
  }

  #field(field) {
    const id = `field-${field.name}`;
    const value = this.settings.fields[field.name] ?? "";
    const usual = server.card?.sampling_defaults?.[field.name];
    const common = { id, value, "aria-describedby": `${id}-about` };
    let input;
    if (field.kind === "choice") {
      input = h("select", common, ["", ...field.values].map((each) => h("option", { value: each }, each || "not set")));
      input.value = value;
    } else if (field.kind === "list" || field.kind === "json") {
      input = h("textarea", { ...common, rows: 2, spellcheck: "false", class: "mono" });
    } else {
      const isNumber = field.kind !== "text";
      input = h("input", { ...common, inputmode: isNumber ? "decimal" : null, placeholder: usual ?? (field.name === "top_logprobs" ? "5" : "not set"), autocomplete: "off" });
    }
    const said = h("small", { id: `${id}-about`, class: "muted" });
    const check = () => {
      const error = problem(() => valueOf(field, input.value));
      mark(input, said, error, field.about);
    };
    input.addEventListener("input", () => {
      this.settings.fields[field.name] = input.value;
      if (!input.value.trim()) delete this.settings.fields[field.name];
      check();
      this.#changed();
    });
    check();
    return h("div", { class: "field" }, h("label", { for: id }, field.name), input, said);
  }

  #area(name, label, rows, more = {}) {
    const input = h("textarea", { id: `setting-${name}`, rows, value: this.settings[name] ?? "", ...more });
    input.addEventListener("input", () => {
      this.settings[name] = input.value;
      this.#changed();
    });
    return h("div", { class: "field" }, h("label", { for: input.id }, label), input);
  }

  #form() {
    const select = h("select", { id: "setting-form" }, Object.entries(FORMS).map(([value, words]) => h("option", { value }, words)));
    select.value = this.settings.form ?? "";
    const editor = this.#area("formText", "Schema, expression, lines or grammar", 8, { class: "mono", spellcheck: "false" });
    const input = editor.querySelector("textarea");
    const said = h("small", { role: "status" });
    const tidy = h("button", { type: "button", onclick: () => this.#tidy(input) }, "Tidy");
    const check = () => {
      const form = select.value;
      editor.hidden = !form || form === "json_object";
      tidy.hidden = form !== "json_schema";
      mark(input, said, editor.hidden ? "" : problem(() => formFields(form, input.value)), editor.hidden ? "" : "can be sent");
    };
    select.addEventListener("change", () => {
      this.settings.form = select.value;
      check();
      this.#changed();
    });
    input.addEventListener("input", check);
    check();
    const chosen = h("div", { class: "field" }, h("label", { for: "setting-form" }, "The answer is"), select);
    return h("details", { open: Boolean(this.settings.form) }, h("summary", {}, "Form of the answer"), chosen, editor, said, tidy);
  }

  #tools() {
    const editor = this.#area("tools", "Tools, as a JSON array", 8, { class: "mono", spellcheck: "false" });
    const input = editor.querySelector("textarea");
    const said = h("small", { role: "status" });
    const check = () => {
      let words = "none";
      const error = problem(() => {
        words = toolsOf(input.value)?.map((tool) => tool.function.name).join(", ") ?? "none";
      });
      mark(input, said, error, `tools: ${words}`);
    };
    const add = () => {
      let tools = [];
      if (!problem(() => toolsOf(input.value))) tools = toolsOf(input.value) ?? [];
      else if (input.value.trim()) return; // what is there is not to be lost
      const example = structuredClone(EXAMPLE_TOOL);
      if (tools.length) example.function.name = `tool_${tools.length + 1}`;
      input.value = JSON.stringify([...tools, example], null, 2);
      input.dispatchEvent(new Event("input"));
    };
    input.addEventListener("input", check);
    check();
    const buttons = h("p", { class: "buttons" }, h("button", { type: "button", onclick: add }, "Add a tool"), h("button", { type: "button", onclick: () => this.#tidy(input) }, "Tidy"));
    return h("details", { open: Boolean(this.settings.tools) }, h("summary", {}, "Tools"), editor, said, buttons);
  }

  #tidy(input) {
    if (problem(() => parsed(input.value))) return;
    input.value = JSON.stringify(parsed(input.value), null, 2);
    input.dispatchEvent(new Event("input"));
  }
}

/** The message of the error that this throws, if any. */
function problem(act) {
  try {
    act();
    return "";
  } catch (error) {
    return error.message;
  }
}

function mark(input, said, error, otherwise) {
  if (error) input.setAttribute("aria-invalid", "true");
  else input.removeAttribute("aria-invalid");
  said.classList.toggle("error", Boolean(error));
  said.textContent = error || otherwise;
}

customElements.define("chat-settings", SettingsPanel);
