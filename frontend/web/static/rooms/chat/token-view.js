// An answer token by token: how likely each was, and what else could have come.
import { h, replace } from "../../parts/dom.js";
import { textWith } from "./answer.js";

const percent = (logprob) => {
  const share = 100 * Math.exp(logprob);
  return share >= 10 ? `${share.toFixed(0)} %` : share >= 0.1 ? `${share.toFixed(1)} %` : "< 0.1 %";
};
const grade = (logprob) => [0.9, 0.6, 0.3, 0.1].findIndex((least) => Math.exp(logprob) >= least);
const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length));

/** The view of a message's tokens. `branch(prefix, tokens)` is called when another token is picked. */
export function tokenView(node, branch) {
  const panel = h("div", { class: "alternatives", role: "group", "aria-label": "Alternatives", hidden: true });
  const buttons = node.tokens.map((token, i) => {
    const level = grade(token.logprob);
    return h(
      "button",
      {
        type: "button",
        class: `token p${level < 0 ? 4 : level}${token.isForced ? " forced" : ""}`,
        tabindex: i ? "-1" : "0",
        "aria-expanded": "false",
        "aria-label": `${visible(token.text)}, ${percent(token.logprob)}`,
        title: `${visible(token.text)} ${percent(token.logprob)}`,
        "data-index": i,
      },
      token.text.includes("\n") ? visible(token.text) : token.text,
    );
  });

  function open(i) {
    const token = node.tokens[i];
    buttons.forEach((button, j) => button.setAttribute("aria-expanded", String(i === j)));
    const known = token.others.some((other) => other.text === token.text) ? token.others : [token, ...token.others];
    panel.hidden = false;
    replace(
      panel,
      h("p", {}, "Instead of ", h("code", {}, visible(token.text)), ` (${percent(token.logprob)}):`),
      h("ul", {}, known.map((other) => h("li", {}, alternative(i, token, other)))),
    );
  }

  function alternative(i, token, other) {
    const isSame = other.text === token.text;
    const prefix = textWith(node, i, other);
    const meter = h("meter", { min: 0, max: 1, value: Math.exp(other.logprob), "aria-hidden": "true" });
    return h(
      "button",
      {
        type: "button",
        disabled: isSame || prefix === null,
        title: isSame ? "This one came" : prefix === null ? "Not a whole character" : "Go on from here in a new branch",
        onclick: () => branch(prefix, [...node.tokens.slice(0, i), { ...other, others: token.others, isForced: true }]),
      },
      h("code", {}, visible(other.text)), meter, percent(other.logprob),
    );
  }

  const focus = (i) => {
    const next = buttons[Math.max(0, Math.min(i, buttons.length - 1))];
    buttons.forEach((button) => button.setAttribute("tabindex", button === next ? "0" : "-1"));
    next.focus();
  };
  const text = h(
    "div",
    {
      class: "tokens",
      role: "group",
      "aria-label": "Tokens; arrow keys move, Enter shows alternatives",
      onclick: (event) => {
        const button = event.target.closest(".token");
        if (button) open(Number(button.dataset.index));
      },
      onkeydown: (event) => {
        const i = Number(event.target.dataset?.index ?? -1);
        const to = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: buttons.length - 1 }[event.key];
        if (i < 0 || to === undefined) return;
        event.preventDefault();
        focus(to);
      },
    },
    node.prefix ? h("span", { class: "muted" }, node.prefix) : null,
    buttons,
  );
  return h("div", { class: "token-view" }, text, panel);
}
