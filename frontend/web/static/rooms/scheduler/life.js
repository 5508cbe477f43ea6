// One request: its whole life, and why it waited at each moment.

import { duration, h } from "../../parts/dom.js";
import { copy } from "../../parts/markdown.js";
import { fillTable } from "../../parts/table.js";


const NAMES = { arrived: "Arrived", waited: "Waited", admitted: "Got a row", chunk: "Prompt computed", "first token": "First token",
  preempted: "Lost its row", paused: "Paused: its client does not read", resumed: "Resumed", finished: "Ended" };

const details = (event) => {
  switch (event.kind) {
    case "arrived": return `${event.tokens.toLocaleString("en")} prompt tokens${event.more > 1 ? `, ${event.more} sequences` : ""}`;
    case "waited": return `${duration(event.until - event.at)}: ${event.text || "nobody watched, so the reason is unknown"}`;
    case "admitted": return `row ${event.row}${event.more ? `, ${event.more.toLocaleString("en")} of ${event.tokens.toLocaleString("en")} tokens from a cache` : ""}${event.text ? ` (${event.text})` : ""}`;
    case "chunk": return `${event.tokens.toLocaleString("en")} tokens after ${event.more.toLocaleString("en")}`;
    case "preempted": return `${event.text}, after ${event.tokens.toLocaleString("en")} tokens of output`;
    case "finished": return `${event.text}${event.tokens ? `, ${event.tokens.toLocaleString("en")} tokens of output` : ""}`;
    default: return event.text;
  }
};

/** Join chunks that follow each other: a long prompt has hundreds. */
export function joined(events) {
  const found = [];
  for (const event of events) {
    const last = found[found.length - 1];
    if (event.kind === "chunk" && last?.kind === "chunk" && last.index === event.index) {
      last.tokens += event.tokens;
      last.chunks = (last.chunks ?? 1) + 1;
      last.until = event.at;
    } else found.push({ ...event });
  }
  return found;
}

export class LifePanel {
  constructor(onClose) {
    this.title = h("h3", { id: "life-title", tabindex: -1 }, "No request is selected");
    this.hint = h("p", {}, "Select a row of the timeline, or a request of the queue.");
    this.bar = h("div", { class: "life-bar", "aria-hidden": "true" });
    this.table = h("table", {});
    this.close = h("button", { type: "button", hidden: true, onclick: onClose }, "Clear selection");
    this.copyId = h("button", { type: "button", hidden: true, onclick: () => copy(this.id, this.copyId) }, "Copy id");
    this.element = h("section", { class: "panel life", "aria-labelledby": "life-title" },
      this.title, this.hint, h("div", { class: "buttons" }, this.copyId, this.close), this.bar, h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Events of the request" }, this.table));
  }

  clear(text = "Select a row of the timeline, or a request of the queue.") {
    this.title.textContent = "No request is selected";
    this.hint.textContent = text;
    this.close.hidden = this.copyId.hidden = true;
    this.bar.replaceChildren();
    this.table.replaceChildren();
    delete this.element.dataset.key;
  }

  show(life) {
    const events = joined(life.events);
    const began = events[0]?.at ?? life.now;
    const ended = life.is_live ? life.now : events[events.length - 1].at;
    this.element.dataset.key = life.key;
    this.close.hidden = this.copyId.hidden = false;
    this.id = life.id;
    this.title.textContent = `Request ${life.id}`;
    const waited = events.filter((each) => each.kind === "waited").reduce((sum, each) => sum + each.until - each.at, 0);
    const left = life.events_left_out ? ` ${life.events_left_out} events in the middle are not kept.` : "";
    const known = life.is_watched ? "" : " It came before anybody watched: its earlier events are unknown.";
    this.hint.textContent = `${life.is_live ? "Lives" : "Lived"} for ${duration(ended - began)}, waited ${duration(waited)}.${known}${left}`;
    this.bar.replaceChildren(...spansOf(events, began, ended));
    fillTable(this.table, ["After", "Event", "Details"], events.map((event) => [
      duration(event.at - began),
      (NAMES[event.kind] ?? event.kind) + (event.index ? ` (sequence ${event.index})` : ""),
      details(event) + (event.chunks ? `, in ${event.chunks} chunks over ${duration(event.until - event.at)}` : ""),
    ]));
  }
}

/** Parts of the bar: waiting, prompt, output. */
function spansOf(events, began, ended) {
  const total = Math.max(1e-9, ended - began), found = [];
  const add = (kind, from, to) => {
    if (to <= from) return;
    const part = h("span", { class: `life-${kind}` });
    part.style.left = `${((from - began) / total) * 100}%`;
    part.style.width = `${Math.max(0.3, ((to - from) / total) * 100)}%`;
    found.push(part);
  };
  let from = null, kind = "";
  for (const event of events.filter((each) => !each.index)) {
    if (event.kind === "waited") add("waited", event.at, event.until);
    if (from !== null && ["first token", "preempted", "paused", "finished"].includes(event.kind)) {
      add(kind, from, event.at);
      from = null;
    }
    if (event.kind === "admitted") [from, kind] = [event.at, "prefill"];
    if (event.kind === "first token") [from, kind] = [event.at, "decode"];
  }
  if (from !== null) add(kind, from, ended);
  return found;
}
