// The Compare room: a recorded load under other options, side by side. The simulator runs on the server.

import { api } from "../../parts/api.js";
import { h, replace, short } from "../../parts/dom.js";
import { fillTable } from "../../parts/table.js";
import { drawBars, drawCurves, drawTimeline } from "./plots.js";

const MOST = 8;
const START = [["defaults", ""], ["few rows", "--max-num-seqs 8"]];
const EXAMPLES = [
  ["Policy", "--scheduling-policy sjf"], ["Batching", "--batching static --max-num-seqs 16"],
  ["Budget", "--max-num-batched-tokens 512"], ["Rows", "--max-num-seqs 16"], ["Prefill pace", "--max-prefill-ms 50"],
];
const ms = (value) => (value === undefined ? "–" : `${short(value)} ms`);
const FIGURES = [
  ["First token, p50", (f) => ms(f.ttft_ms.p50)], ["First token, p99", (f) => ms(f.ttft_ms.p99)],
  ["Between tokens, p50", (f) => ms(f.tpot_ms.p50)], ["Between tokens, p99", (f) => ms(f.tpot_ms.p99)],
  ["Whole answer, p50", (f) => ms(f.e2e_ms.p50)], ["Whole answer, p99", (f) => ms(f.e2e_ms.p99)],
  ["Requests a second", (f) => short(f.requests_per_s)], ["Output tokens a second", (f) => short(f.output_tokens_per_s)],
  ["Goodput", (f) => `${(100 * f.goodput).toFixed(1)} %`], ["Refused or failed", (f) => f.num_failed],
  ["Preemptions", (f) => f.num_preemptions], ["Prefix hits", (f) => `${(100 * f.hit_rate).toFixed(1)} %`],
  ["Pages used, most", (f) => short(f.pages_used.max)], ["Device busy", (f) => `${(100 * f.busy).toFixed(0)} %`],
];

class CompareRoom extends HTMLElement {
  connectedCallback() {
    this.text = "";
    this.isRefused = false; // this address or key may not simulate
    this.build();
    for (const [name, options] of START) this.addConfig(name, options);
    this.askRecordings();
    this.theme = matchMedia("(prefers-color-scheme: dark)");
    this.onTheme = () => this.told && this.show(this.told);
    this.theme.addEventListener("change", this.onTheme);
  }

  disconnectedCallback() {
    this.running?.abort();
    this.theme.removeEventListener("change", this.onTheme);
    replace(this);
  }

  build() {
    this.picked = h("select", { id: "compare-picked", onchange: () => this.choose() }, h("option", { value: "" }, "a file of yours"));
    this.pickedBox = h("div", { class: "field", hidden: true }, h("label", { for: "compare-picked" }, "Recording"), this.picked);
    this.file = h("input", { id: "compare-file", type: "file", accept: ".jsonl,.json,.txt", onchange: () => this.readFile() });
    this.fileBox = h("div", { class: "field" }, h("label", { for: "compare-file" }, "File"), this.file);
    this.configs = h("ol", { class: "configs" });
    this.add = h("button", { type: "button", onclick: () => this.addConfig(`options ${this.configs.children.length + 1}`, "") }, "Add options");
    const number = (id, name, value, step) => h("div", { class: "field small" }, h("label", { for: id }, name),
      h("input", { id, type: "number", min: "0", step, value }));
    this.hint = h("div", { class: "hint", hidden: true },
      h("p", {}, "There is nothing to simulate yet: this server writes no recording. Start it with"),
      h("pre", { tabindex: "0", role: "region", "aria-label": "Command" }, h("code", {}, "penstock serve MODEL --record run.jsonl")),
      h("p", {}, "and use it for a while: its recording is then offered here. Or choose a file that was written before:"));
    this.go = h("button", { type: "submit", class: "primary" }, "Simulate");
    this.cancel = h("button", { type: "button", hidden: true, onclick: () => this.running?.abort() }, "Cancel");
    this.state = h("p", { role: "status" });
    this.results = h("section", { "aria-label": "Results" });
    this.rest = h("div", { hidden: true },
      h("div", { class: "fields" }, number("compare-speed", "Times as fast", "1", "any"),
        number("compare-ttft", "Target of first token, ms", "", "any"), number("compare-tpot", "Target between tokens, ms", "", "any")),
      h("fieldset", {}, h("legend", {}, "Options to compare"), this.configs,
        h("p", { class: "muted" }, "As on the command line of penstock serve; what is not said is as by default. Examples: ",
          EXAMPLES.map(([name, text], place) => [place ? ", " : "", `${name.toLowerCase()} `, h("code", {}, text)]), "."),
        this.add),
      h("div", { class: "buttons" }, this.go, this.cancel));
    replace(this,
      h("h1", {}, "Compare"),
      h("p", {}, "What the same requests would have felt under other options: the server's own scheduler in virtual time, over a recording (",
        h("code", {}, "--record"), ") or a step trace (", h("code", {}, "--step-trace"), ")."),
      h("form", { onsubmit: (event) => { event.preventDefault(); this.run(); } },
        this.hint, h("div", { class: "fields" }, this.pickedBox, this.fileBox), this.rest, this.state),
      this.results);
  }

  addConfig(name, options) {
    const place = (this.numAdded = (this.numAdded ?? 0) + 1);
    const item = h("li", {},
      h("label", { for: `compare-name-${place}` }, "Name"), h("input", { id: `compare-name-${place}`, class: "name", value: name, maxlength: "40" }),
      h("label", { for: `compare-options-${place}` }, "Options"),
      h("input", { id: `compare-options-${place}`, class: "options", value: options, maxlength: "2000", spellcheck: "false", autocomplete: "off" }),
      h("button", { type: "button", "aria-label": `Remove options ${place}`, onclick: () => { item.remove(); this.count(); } }, "Remove"));
    this.configs.append(item);
    this.count();
  }

  count() {
    this.add.disabled = this.configs.children.length >= MOST;
  }

  async askRecordings() {
    try {
      const { data } = await api.get("/debug/recordings");
      this.picked.prepend(...data.map((each) => h("option", { value: each.name }, `${each.name} of this server (${short(each.bytes)}B)`)));
      this.picked.selectedIndex = 0;
      this.pickedBox.hidden = !data.length;
    } catch (error) {
      this.isRefused = true;
      this.refuse(error.message);
    }
    this.choose();
  }

  /** Without a recording there is nothing to simulate: what to do is said instead. */
  choose() {
    this.fileBox.hidden = this.picked.value !== "" || this.isRefused;
    const isThere = Boolean(this.picked.value || this.text);
    this.rest.hidden = !isThere;
    this.hint.hidden = isThere || !this.pickedBox.hidden || this.isRefused;
  }

  async readFile() {
    const [file] = this.file.files;
    this.text = file ? await file.text() : "";
    this.choose();
  }

  async run() {
    if (this.running) return;
    const configs = {};
    for (const item of this.configs.children) {
      const name = item.querySelector(".name").value.trim();
      if (name in configs) {
        this.refuse(`Two are called ${name}: each needs a name of its own.`);
        return;
      }
      configs[name] = item.querySelector(".options").value;
    }
    const number = (id) => Number(this.querySelector(`#${id}`).value || 0);
    const body = { configs, speed: number("compare-speed") || 1, ttft_ms: number("compare-ttft"), tpot_ms: number("compare-tpot") };
    if (this.picked.value) body.picked = this.picked.value;
    else body.recording = this.text;
    this.running = new AbortController();
    this.go.disabled = true;
    this.cancel.hidden = false;
    this.state.className = "";
    this.state.textContent = "Simulating…";
    try {
      this.show(await api.post("/debug/simulate", body, { signal: this.running.signal }));
      this.state.textContent = "Done.";
    } catch (error) {
      this.refuse(error.name === "AbortError" ? "Cancelled." : error.message);
    } finally {
      this.running = null;
      this.go.disabled = false;
      this.cancel.hidden = true;
    }
  }

  refuse(why) {
    this.state.className = "error";
    this.state.textContent = why;
  }

  show(told) {
    this.told = told;
    const names = Object.keys(told.configs), table = h("table", {});
    const plot = (title, words) => {
      const canvas = h("canvas", { role: "img", "aria-label": `${title}. ${words}` });
      return [canvas, h("figure", {}, h("figcaption", {}, title), canvas)];
    };
    const each = "The table has the figures.";
    const [ttft, ttftBox] = plot("First token: share of answers within a time", each);
    const [tpot, tpotBox] = plot("Between tokens: share of answers within a time", each);
    const [rate, rateBox] = plot("Output tokens a second", each);
    const thumbs = names.map((name) => plot(name, "Running and waiting sequences, and pages in use, over time"));
    const { load } = told;
    replace(this.results,
      h("h2", {}, "Results"),
      h("p", {}, `${load.num_requests.toLocaleString("en")} requests in ${short(load.seconds)} s, ${short(load.num_prompt_tokens)} prompt tokens, ${short(load.num_output_tokens)} output tokens, on ${told.machine.name}.`),
      h("ul", { class: "key", "aria-label": "Colours of the plots" }, names.map((name, place) => h("li", {}, h("span", { class: `series s${place % 6}`, "aria-hidden": "true" }), name))),
      h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Figures" }, table),
      h("div", { class: "plots" }, ttftBox, tpotBox, rateBox),
      h("h2", {}, "Over time"),
      h("p", { class: "muted" }, "Running (filled) and waiting (line) sequences above, pages in use below; all with the same scales."),
      h("div", { class: "plots" }, thumbs.map(([, box]) => box)));
    fillTable(table, ["Figure", ...names], FIGURES.map(([title, of]) => [title, ...names.map((name) => of(told.configs[name]))]));
    drawCurves(ttft, names.map((name) => told.curves[name].quantiles.ttft_ms));
    drawCurves(tpot, names.map((name) => told.curves[name].quantiles.tpot_ms));
    drawBars(rate, names.map((name) => told.configs[name].output_tokens_per_s), names);
    const all = names.flatMap((name) => told.curves[name].timeline);
    const most = { seconds: 1e-9, rows: 1, pages: 1 };
    for (const [at, used, , running, waiting] of all) {
      most.seconds = Math.max(most.seconds, at);
      most.rows = Math.max(most.rows, running, waiting);
      most.pages = Math.max(most.pages, used);
    }
    thumbs.forEach(([canvas], place) => drawTimeline(canvas, told.curves[names[place]].timeline, most));
  }
}

customElements.define("compare-room", CompareRoom);
