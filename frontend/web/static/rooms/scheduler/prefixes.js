// The prefix cache's tree: runs of tokens that prompts share, the largest first.

import { duration, h } from "../../parts/dom.js";


const OPEN_DEPTH = 2;

export class PrefixPanel {
  constructor(onRefresh) {
    this.told = h("p", {}, "Not asked yet.");
    this.tree = h("div", { class: "prefixes" });
    this.element = h("section", { class: "panel", "aria-labelledby": "prefix-title" },
      h("h3", { id: "prefix-title" }, "Prefix tree"),
      h("button", { type: "button", onclick: onRefresh }, "Refresh"), this.told, this.tree);
  }

  show(tree) {
    const left = tree.is_whole ? "" : " The largest parts are shown.";
    this.told.textContent = `${tree.pages.toLocaleString("en")} pages in ${tree.namespaces} ` +
      `${tree.namespaces === 1 ? "namespace" : "namespaces"}, ${(tree.pages * tree.page_size).toLocaleString("en")} tokens.${left}`;
    const below = new Map();
    tree.nodes.forEach((node, place) => {
      if (!below.has(node.parent)) below.set(node.parent, []);
      below.get(node.parent).push(place);
    });
    const list = (parent, depth) => h("ul", {}, ...(below.get(parent) ?? []).map((place) => {
      const node = tree.nodes[place], text = h("span", { class: "prefix-text" }, shownText(node));
      const facts = h("span", { class: "prefix-facts" }, factsOf(node));
      if (!below.has(place)) return h("li", {}, h("div", { class: "leaf" }, text, facts));
      return h("li", {}, h("details", { open: depth < OPEN_DEPTH }, h("summary", {}, text, facts), list(place, depth + 1)));
    }));
    this.tree.replaceChildren(list(-1, 0));
  }
}

function shownText(node) {
  if (node.parent < 0) return node.namespace ? `namespace ${node.namespace}` : "all prompts";
  return node.text.replace(/\s+/g, " ") || "(tokens without text)";
}

function factsOf(node) {
  const used = node.users ? `${node.users} running` : node.last_used_seconds === null ? "used before anybody watched" : `used ${duration(node.last_used_seconds)} ago`;
  const below = node.tokens_below ? ` + ${node.tokens_below.toLocaleString("en")} below` : "";
  return `${node.tokens.toLocaleString("en")} tokens${below}, ${node.hits} ${node.hits === 1 ? "hit" : "hits"}, ${used}`;
}
