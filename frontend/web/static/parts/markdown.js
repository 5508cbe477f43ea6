// Markdown as models write it, made into elements: no text is ever read as HTML. Linear in the text's length.
import { h, replace } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t](.*))?$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +|$)/;
const DELIMITERS = /^ *(?:\| *)?:?-+:? *(?:\| *:?-+:? *)*(?:\| *)?$/;
const MAX_DEPTH = 12; // of quotes, lists and emphasis: beyond it, text stays text

// A heading's text without the marks that may close it.
function unclosed(text) {
  let end = text.length;
  while (text[end - 1] === "#") end--;
  return end === 0 || " \t".includes(text[end - 1]) ? text.slice(0, end).trimEnd() : text;
}

const isTable = (lines, i) => lines[i].includes("|") && lines[i + 1]?.includes("-") && DELIMITERS.test(lines[i + 1]);
const isNumbered = (line) => /^ *\d/.test(line);

function startsBlock(lines, i) {
  const line = lines[i];
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line) || isTable(lines, i);
}

/** Split lines into blocks: {kind, lines}. What comes later only changes the last one. */
function blocksOf(lines) {
  const blocks = [];
  let i = 0;
  const take = (kind, end) => {
    blocks.push({ kind, lines: lines.slice(i, end) });
    i = end;
  };
  while (i < lines.length) {
    const line = lines[i];
    const fence = FENCE.exec(line);
    let end = i + 1;
    if (!line.trim()) {
      i++;
    } else if (fence) {
      const closes = new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}[ \\t]*$`);
      while (end < lines.length && !closes.test(lines[end])) end++;
      take("code", Math.min(end + 1, lines.length));
    } else if (HEADING.test(line)) {
      take("heading", end);
    } else if (RULE.test(line)) {
      take("rule", end);
    } else if (QUOTE.test(line)) {
      while (end < lines.length && lines[end].trim() && (QUOTE.test(lines[end]) || !startsBlock(lines, end))) end++;
      take("quote", end);
    } else if (ITEM.test(line)) {
      take("list", endOfList(lines, i));
    } else if (isTable(lines, i)) {
      end = i + 2;
      while (end < lines.length && lines[end].includes("|")) end++;
      take("table", end);
    } else {
      while (end < lines.length && lines[end].trim() && !startsBlock(lines, end)) end++;
      take("paragraph", end);
    }
  }
  return blocks;
}

function endOfList(lines, start) {
  const indent = ITEM.exec(lines[start])[1].length;
  const numbered = isNumbered(lines[start]);
  let end = start + 1;
  for (; end < lines.length; end++) {
    const line = lines[end];
    if (!line.trim()) {
      const next = lines[end + 1] ?? "";
      const goesOn = /^ {2,}\S/.test(next) || (ITEM.test(next) && isNumbered(next) === numbered && !RULE.test(next));
      if (!goesOn) break;
      continue;
    }
    const item = ITEM.exec(line);
    if (item ? item[1].length <= indent && isNumbered(line) !== numbered : startsBlock(lines, end) && !/^ {2}/.test(line)) break;
    if (RULE.test(line)) break;
  }
  return end;
}

const BUILD = {
  code(lines) {
    const [first, ...rest] = lines;
    const [, mark, info] = FENCE.exec(first);
    if (rest.length && rest.at(-1).trim().startsWith(mark)) rest.pop();
    return codeBlock(rest.join("\n"), info.trim().split(/\s+/)[0]);
  },
  heading(lines, depth) {
    const [, marks, rest = ""] = HEADING.exec(lines[0]);
    return h(`h${Math.min(marks.length + 2, 6)}`, {}, inline(unclosed(rest.trim()), depth)); // the page has its own h1 and h2
  },
  rule: () => h("hr"),
  quote: (lines, depth) => h("blockquote", {}, build(lines.map((line) => line.replace(QUOTE, "")), depth + 1)),
  paragraph: (lines, depth) => h("p", {}, inline(lines.join("\n"), depth)),
  list(lines, depth) {
    const indent = ITEM.exec(lines[0])[1].length;
    const items = [];
    let width = 0;
    for (const line of lines) {
      const item = ITEM.exec(line);
      if (item && item[1].length <= indent + 1) {
        width = item[0].length;
        items.push([line.slice(width)]);
      } else items.at(-1).push(line.slice(Math.min(width, line.length - line.trimStart().length)));
    }
    const number = Number.parseInt(lines[0], 10);
    const tag = isNumbered(lines[0]) ? "ol" : "ul";
    return h(tag, { start: tag === "ol" && number !== 1 ? number : null }, items.map((item) => itemOf(item, depth)));
  },
  table(lines, depth) {
    const marks = cells(lines[1]);
    const sides = marks.map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : null));
    const row = (line, tag) => {
      const found = cells(line);
      return h("tr", {}, marks.map((_, i) => h(tag, { class: sides[i] }, inline(found[i] ?? "", depth))));
    };
    const body = lines.slice(2).map((line) => row(line, "td"));
    const table = h("table", {}, h("thead", {}, row(lines[0], "th")), h("tbody", {}, body));
    return h("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" }, table);
  },
};

function itemOf(lines, depth) {
  const task = /^\[([ xX])\] /.exec(lines[0]);
  if (task) lines = [lines[0].slice(4), ...lines.slice(1)];
  const sign = task && (task[1] === " " ? "☐ " : "☑ ");
  const found = blocksOf(lines);
  const isTight = found[0]?.kind === "paragraph" && !lines.some((line) => !line.trim());
  if (!isTight) return h("li", {}, sign, build(lines, depth + 1));
  return h("li", {}, sign, inline(found[0].lines.join("\n"), depth), found.slice(1).map((each) => element(each, depth + 1)));
}

function cells(line) {
  const found = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "").split(/(?<!\\)\|/);
  return found.map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function element(block, depth) {
  if (depth > MAX_DEPTH) return h("p", {}, block.lines.join("\n"));
  return BUILD[block.kind](block.lines, depth);
}

const build = (lines, depth) => blocksOf(lines).map((block) => element(block, depth));

/** Code with a button that copies it. */
export function codeBlock(text, language = "") {
  const button = h("button", { type: "button", class: "quiet", onclick: () => copy(text, button) }, "Copy");
  return h(
    "figure",
    { class: "code" },
    h("figcaption", {}, h("span", {}, language || "text"), button),
    h("pre", { tabindex: "0", role: "region", "aria-label": `Code: ${language || "text"}` }, h("code", {}, text)),
  );
}

/** Copy a text; the button says that it has been done. */
export async function copy(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
  setTimeout(() => (button.textContent = before), 1500);
}

// --- within a block -----------------------------------------------------------------------------

const MARK = /\\[!-/:-@[-`{-~]|`+|\*\*\*|\*\*|\*|__|_|~~|!?\[|<?https?:\/\/|\n/g;
const EMPHASIS = { "***": ["strong", "em"], "**": ["strong"], __: ["strong"], "*": ["em"], _: ["em"], "~~": ["s"] };

/** Nodes of a paragraph's text. */
function inline(text, depth = 0) {
  const nodes = [];
  const missing = new Set(); // marks that have no end further on: each is looked for in vain once
  let done = 0;
  MARK.lastIndex = 0;
  const mark = new RegExp(MARK);
  for (let found; (found = mark.exec(text)); ) {
    const made = depth <= MAX_DEPTH && read(text, found.index, found[0], depth, missing);
    if (!made) continue;
    if (found.index > done) nodes.push(text.slice(done, found.index));
    nodes.push(...made.nodes);
    mark.lastIndex = done = made.end;
  }
  if (done < text.length) nodes.push(text.slice(done));
  return nodes;
}

/** What a mark at `at` begins: its nodes, and where it ends; nothing if the mark is text. */
function read(text, at, mark, depth, missing) {
  const after = at + mark.length;
  const find = (wanted, from) => {
    if (missing.has(wanted)) return -1;
    const end = text.indexOf(wanted, from);
    if (end < 0) missing.add(wanted);
    return end;
  };
  if (mark === "\n") return { nodes: [h("br")], end: after };
  if (mark[0] === "\\") return { nodes: [mark[1]], end: after };
  if (mark[0] === "`") {
    const end = find(mark, after);
    if (end < 0) return null;
    return { nodes: [h("code", {}, text.slice(after, end).replace(/^ (.*) $/s, "$1"))], end: end + mark.length };
  }
  if (mark.startsWith("http") || mark.startsWith("<http")) {
    const [address] = /^[^\s<>"'`]*/.exec(text.slice(mark[0] === "<" ? at + 1 : at, at + 2048));
    const shown = mark[0] === "<" ? address : address.replace(/[.,;:!?)\]}*_]+$/, "");
    const made = link(shown, [shown]);
    return made && { nodes: [made], end: at + shown.length + (mark[0] === "<" ? 2 : 0) };
  }
  if (mark.endsWith("[")) {
    const found = /^([^\]\n]{0,1000})\]\(\s*<?([^\s)>]{1,2048})>?(?:\s+"[^"\n]{0,200}")?\s*\)/.exec(text.slice(after, after + 3500));
    const made = found && link(found[2], inline(found[1], depth + 1));
    return made && { nodes: [made], end: after + found[0].length };
  }
  const isWithinWord = mark[0] === "_" && /\w/.test(text[at - 1] ?? "");
  if (isWithinWord || /^\s?$/.test(text[after] ?? "")) return null;
  const end = find(mark, after + 1);
  if (end < 0 || /\s/.test(text[end - 1])) return null;
  const [tag, inner] = EMPHASIS[mark];
  const nodes = inline(text.slice(after, end), depth + 1);
  return { nodes: [h(tag, {}, inner ? h(inner, {}, nodes) : nodes)], end: end + mark.length };
}

/** A link to another site, which learns nothing of this page; null for anything but http and https. */
function link(address, children) {
  if (!URL.canParse(address) || !/^https?:$/.test(new URL(address).protocol)) return null;
  return h("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow" }, children);
}

/** Shows a text that grows: only blocks that have changed are made anew. */
export class MarkdownView {
  constructor() {
    this.element = h("div", { class: "markdown" });
    this.keys = [];
  }

  show(text) {
    const blocks = blocksOf(text.replaceAll("\r\n", "\n").replaceAll("\t", "    ").split("\n"));
    const keys = blocks.map(({ kind, lines }) => `${kind}\n${lines.join("\n")}`);
    let same = 0;
    while (same < keys.length && keys[same] === this.keys[same]) same++;
    replace(this.element, [...this.element.children].slice(0, same), blocks.slice(same).map((block) => element(block, 0)));
    this.keys = keys;
  }
}
