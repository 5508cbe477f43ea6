// One message as it is shown. It is made once, and brought up to date while its answer comes.
import { MarkdownView, codeBlock, copy } from "../../parts/markdown.js";
import { duration, h, replace, short } from "../../parts/dom.js";
import { tokenView } from "./token-view.js";

const WHO = { user: "You", assistant: "Model", tool: "Tool result" };
const ENDS = { length: "It was cut at the limit of tokens.", stopped: "It was stopped.", content_filter: "It was filtered." };

/** `acts` are what the buttons do: edit, regenerate, goOn, branch, remove, turn, answerCalls. */
export class MessageView {
  constructor(node, acts) {
    Object.assign(this, { node, acts, showsTokens: false });
    this.markdown = new MarkdownView();
    this.reasoning = h("details", { class: "reasoning", hidden: true }, h("summary", {}, "Reasoning"), h("div", {}));
    this.thoughts = new MarkdownView();
    this.reasoning.lastChild.append(this.thoughts.element);
    this.body = h("div", { class: "body" });
    this.images = h("div", { class: "images" }, (node.images ?? []).map((src) => h("img", { src, alt: "An image of this message" })));
    this.calls = h("div", { class: "calls" });
    this.note = h("p", { class: "note", hidden: true });
    this.figures = h("p", { class: "figures", hidden: true });
    this.tools = h("div", { class: "message-tools" });
    this.element = h(
      "article",
      { class: `message ${node.role}`, "data-id": node.id, "aria-label": WHO[node.role] },
      h("header", {}, h("span", { class: "who" }, WHO[node.role])),
      ...[this.reasoning, this.images, this.body, this.calls, this.note, this.figures, this.tools],
    );
  }

  /** Bring it up to date. `place` says which of how many siblings it is: {index, siblings}; `isLast`: of the path. */
  show(place, isLast, openCalls) {
    const { node } = this;
    this.element.setAttribute("aria-busy", String(Boolean(node.isLive)));
    this.#text();
    this.#calls(openCalls);
    this.#note();
    this.#figures();
    const state = JSON.stringify([place.index, place.siblings.length, isLast, node.isLive, node.finish, Boolean(node.tokens?.length), this.showsTokens, this.isEdited]);
    if (state !== this.state) this.#tools(place, isLast);
    this.state = state;
  }

  #text() {
    const { node } = this;
    if (this.isEdited) return;
    this.reasoning.hidden = !node.reasoning;
    if (node.reasoning) {
      this.reasoning.firstChild.textContent = node.isLive && !node.content ? "Reasoning…" : "Reasoning";
      this.thoughts.show(node.reasoning);
    }
    if (this.showsTokens && node.tokens?.length) {
      if (this.shownTokens !== node.tokens.length) replace(this.body, tokenView(node, (prefix, tokens) => this.acts.branch(node, prefix, tokens)));
      this.shownTokens = node.tokens.length;
      return;
    }
    this.shownTokens = -1;
    if (node.role !== "assistant") {
      if (this.body.textContent !== node.content) replace(this.body, h("div", { class: "plain" }, node.content));
      return;
    }
    if (!this.markdown.element.isConnected || this.body.firstChild !== this.markdown.element) replace(this.body, this.markdown.element);
    this.markdown.show(node.content);
  }

  #calls(openCalls) {
    const { node } = this;
    const isOpen = !node.isLive && openCalls.length > 0 && openCalls.every((call) => node.tool_calls?.includes(call));
    const state = JSON.stringify([node.tool_calls, isOpen]);
    if (!node.tool_calls || state === this.shownCalls) return;
    this.shownCalls = state;
    const shown = node.tool_calls.filter(Boolean).map((call) => h("details", { open: true }, h("summary", {}, "Calls ", h("code", {}, call.function.name)), codeBlock(tidy(call.function.arguments), "json")));
    replace(this.calls, shown, isOpen && this.#answerForm(openCalls));
  }

  #answerForm(calls) {
    const inputs = calls.map((call) => h("textarea", { id: `result-${call.id}`, rows: 2, class: "mono", required: true }));
    const fields = calls.map((call, i) => h("div", { class: "field" }, h("label", { for: `result-${call.id}` }, `Result of ${call.function.name}`), inputs[i]));
    const send = (event) => {
      event.preventDefault();
      this.acts.answerCalls(this.node, calls.map((call, i) => ({ tool_call_id: call.id, content: inputs[i].value })));
    };
    return h("form", { class: "results", onsubmit: send }, fields, h("button", { type: "submit", class: "primary" }, "Send results"));
  }

  #note() {
    const { node } = this;
    const words = node.waiting ?? (node.error || ENDS[node.finish] || "");
    this.note.hidden = !words;
    this.note.classList.toggle("error", Boolean(node.error) && !node.waiting);
    if (this.note.textContent !== words) this.note.textContent = words;
  }

  #figures() {
    const found = this.node.figures;
    this.figures.hidden = !found;
    if (!found) return;
    const rate = (found.completion_tokens - 1) / (found.output_ms / 1000);
    const parts = [
      ["First token", found.ttft_ms != null && duration(found.ttft_ms / 1000), "TTFT: from the request to its first token"],
      ["Speed", found.output_ms > 0 && rate > 0 && `${short(rate)} tokens/s`, "Tokens after the first, by the time they took"],
      ["Tokens", found.completion_tokens != null && short(found.completion_tokens), "Of the answer"],
      ["Prompt", found.prompt_tokens != null && `${short(found.prompt_tokens)} tokens, ${short(found.cached_tokens ?? 0)} cached`, "Cached tokens were not computed again"],
      ["Device", found.device_seconds != null && duration(found.device_seconds), "Its part of the steps' times"],
      ["Cost", found.price != null && String(Number(found.price.toPrecision(3))), "With --price-per-hour"],
    ].filter(([, value]) => value);
    const words = parts.map(([name, value]) => `${name} ${value}`).join("");
    if (this.shownFigures === words) return;
    this.shownFigures = words;
    replace(this.figures, parts.map(([name, value, about]) => h("span", { title: about }, h("span", { class: "muted" }, `${name} `), value)));
  }

  #tools({ index, siblings }, isLast) {
    const { node, acts } = this;
    const focused = this.tools.contains(document.activeElement) ? document.activeElement.dataset.act : null;
    const button = (act, label, onclick, more = {}) => h("button", { type: "button", class: "quiet", "data-act": act, onclick, ...more }, label);
    const isAnswer = node.role === "assistant";
    const goOn = isAnswer && isLast && node.content && !node.tool_calls && ["length", "stopped", "error"].includes(node.finish);
    const copying = button("copy", "Copy", () => copy(node.content, copying));
    const turn = siblings.length > 1 && h(
      "span",
      { class: "siblings", role: "group", "aria-label": "Branches" },
      button("before", "‹", () => acts.turn(siblings[index - 1].id), { disabled: index === 0, "aria-label": "Previous branch" }),
      h("span", {}, `${index + 1} / ${siblings.length}`),
      button("after", "›", () => acts.turn(siblings[index + 1].id), { disabled: index === siblings.length - 1, "aria-label": "Next branch" }),
    );
    replace(
      this.tools,
      turn,
      !node.isLive && !this.isEdited && [
        copying,
        button("edit", "Edit", () => this.#edit()),
        isAnswer && button("regenerate", "Regenerate", () => acts.regenerate(node)),
        goOn && button("continue", "Continue", () => acts.goOn(node)),
        isAnswer && node.tokens?.length > 0 && button("tokens", "Tokens", () => this.#turnTokens(), { "aria-pressed": String(this.showsTokens) }),
        button("remove", "Delete", () => acts.remove(node)),
      ],
    );
    if (focused) (this.tools.querySelector(`[data-act="${focused}"]:not(:disabled)`) ?? this.tools.querySelector("button"))?.focus();
  }

  #turnTokens() {
    this.showsTokens = !this.showsTokens;
    this.acts.refresh();
  }

  #edit() {
    const { node } = this;
    this.isEdited = true;
    const input = h("textarea", { "aria-label": "The message", rows: Math.min(20, node.content.split("\n").length + 2), value: node.content });
    const end = () => {
      this.isEdited = false;
      replace(this.body);
      this.shownTokens = -1;
      this.acts.refresh();
      this.tools.querySelector('[data-act="edit"]')?.focus();
    };
    const save = (event) => {
      event.preventDefault();
      end();
      if (input.value !== node.content || node.role === "user") this.acts.edit(node, input.value);
    };
    const keys = (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        end();
      }
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save(event);
    };
    const submit = h("button", { type: "submit", class: "primary" }, node.role === "assistant" ? "Save as a branch" : "Send");
    const buttons = h("p", { class: "buttons" }, submit, h("button", { type: "button", onclick: end }, "Cancel"));
    replace(this.body, h("form", { onsubmit: save, onkeydown: keys }, input, buttons));
    this.acts.refresh();
    input.focus({ preventScroll: true });
    this.#bringIntoView();
  }

  /** The whole message; of one that is taller than the room, its beginning. */
  #bringIntoView() {
    const room = this.element.parentElement;
    this.element.scrollIntoView({ block: this.element.offsetHeight > room.clientHeight ? "start" : "nearest" });
  }
}

function tidy(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}
