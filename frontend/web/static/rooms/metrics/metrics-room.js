// The main figures of /metrics as charts, computed in the browser. They are kept until the page is closed.
import { h, replace, short } from "../../parts/dom.js";
import { Chart } from "./chart.js";
import { CHARTS, statuses } from "./figures.js";
import { MOST_MINUTES, history } from "./history.js";

const PERIOD = 2000;
const LEAST_SPAN = 30_000; // of the axis, while the page has not been open for longer
const SPANS = [[2, "2 minutes"], [10, "10 minutes"], [MOST_MINUTES, "1 hour"]];

class MetricsRoom extends HTMLElement {
  connectedCallback() {
    this.stopper = new AbortController();
    this.charts = CHARTS.map((chart) => new Chart(chart));
    this.span = h("select", { id: "metrics-span", onchange: () => this.#show() }, SPANS.map(([minutes, words]) => h("option", { value: minutes }, words)));
    this.said = h("p", { class: "muted", role: "status" });
    this.engines = h("table");
    this.answers = h("table");
    replace(
      this,
      h("div", { class: "metrics-bar" }, h("label", { for: "metrics-span" }, "Show the last"), this.span, this.said),
      h("div", { class: "charts" }, this.charts.map((chart) => chart.element)),
      h("div", { class: "tables" }, section("Engines", this.engines), section("Answers since the page was opened", this.answers)),
    );
    this.resizing = new ResizeObserver(() => this.#show());
    this.resizing.observe(this);
    this.#tables();
    this.#watch();
  }

  disconnectedCallback() {
    this.stopper.abort();
    this.resizing.disconnect();
    clearTimeout(this.timer);
  }

  async #watch() {
    if (!document.hidden || !history.last) await this.#read();
    if (!this.stopper.signal.aborted) this.timer = setTimeout(() => this.#watch(), PERIOD);
  }

  async #read() {
    const { signal } = this.stopper;
    try {
      await history.read(signal);
      this.said.textContent = "";
      this.#tables();
    } catch (error) {
      if (signal.aborted) return;
      this.said.textContent = `No figures: ${error.message}`;
    }
    this.#show();
  }

  #tables() {
    const { first, last } = history;
    if (!last) return;
    this.#engines(last.samples);
    const rows = first === last ? [] : statuses(first.samples, last.samples);
    fill(this.answers, ["Route", "Status", "Number"], rows.map(([route, status, count]) => [route, status, short(count)]));
  }

  #engines(samples) {
    const names = new Set((samples.get("penstock_engine_ready") ?? []).map(({ labels }) => labels.engine ?? ""));
    const of = (name, engine) => samples.get(name)?.find(({ labels }) => (labels.engine ?? "") === engine)?.value;
    const state = (engine) => (of("penstock_engine_draining", engine) ? "draining" : of("penstock_engine_ready", engine) ? "ready" : "not ready");
    fill(
      this.engines,
      ["Engine", "State", "Running", "Waiting", "Rows", "Pages in use", "Steps"],
      [...names].map((engine) => [
        engine || "the only one",
        state(engine),
        ...["penstock_num_requests_running", "penstock_num_requests_waiting", "penstock_num_rows"].map((name) => short(of(name, engine))),
        `${short(of("penstock_num_used_pages", engine))} of ${short(of("penstock_num_pages", engine))}`,
        short(of("penstock_engine_steps_total", engine)),
      ]),
    );
  }

  #show() {
    const to = Date.now();
    const began = Math.min(history.first?.at ?? to, to - LEAST_SPAN);
    const from = Math.max(to - Number(this.span.value) * 60_000, began);
    this.charts.forEach((chart, i) => chart.show(history.points[i].filter(({ at }) => at >= from), from, to));
  }
}

function section(title, table) {
  return h("section", { "aria-label": title }, h("h2", {}, title), h("div", { class: "figures-table", tabindex: "0", role: "region", "aria-label": `${title}: table` }, table));
}

function fill(table, heads, rows) {
  replace(
    table,
    h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))),
    h("tbody", {}, rows.map((cells) => h("tr", {}, cells.map((cell, i) => h(i ? "td" : "th", i ? { class: "number" } : { scope: "row" }, cell))))),
  );
}

customElements.define("metrics-room", MetricsRoom);
