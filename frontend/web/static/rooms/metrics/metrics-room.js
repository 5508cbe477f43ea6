// The main figures of /metrics as charts, computed in the browser while the room is open. Nothing is kept.
import { api } from "../../parts/api.js";
import { h, replace, short } from "../../parts/dom.js";
import { Chart } from "./chart.js";
import { parse } from "./exposition.js";
import { CHARTS, statuses } from "./figures.js";

const PERIOD = 2000;
const SPANS = [[2, "2 minutes"], [10, "10 minutes"], [60, "1 hour"]];
const WINDOW = 30_000; // percentiles and rates are of so many milliseconds

class MetricsRoom extends HTMLElement {
  connectedCallback() {
    this.stopper = new AbortController();
    this.readings = [];
    this.points = CHARTS.map(() => []);
    this.charts = CHARTS.map((chart) => new Chart(chart));
    this.span = h("select", { id: "metrics-span", onchange: () => this.#show() }, SPANS.map(([minutes, words]) => h("option", { value: minutes }, words)));
    this.said = h("p", { class: "muted", role: "status" });
    this.engines = h("table");
    this.answers = h("table");
    replace(
      this,
      h("div", { class: "metrics-bar" }, h("label", { for: "metrics-span" }, "Show the last"), this.span, this.said),
      h("div", { class: "charts" }, this.charts.map((chart) => chart.element)),
      h("div", { class: "tables" }, section("Engines", this.engines), section("Answers since the room was opened", this.answers)),
    );
    this.resizing = new ResizeObserver(() => this.#show());
    this.resizing.observe(this);
    this.#watch();
  }

  disconnectedCallback() {
    this.stopper.abort();
    this.resizing.disconnect();
    clearTimeout(this.timer);
  }

  async #watch() {
    if (!document.hidden || !this.readings.length) await this.#read();
    if (!this.stopper.signal.aborted) this.timer = setTimeout(() => this.#watch(), PERIOD);
  }

  async #read() {
    const { signal } = this.stopper;
    const at = Date.now();
    try {
      const samples = parse(await api.text("/metrics", { signal }));
      this.#take({ at, samples });
      this.said.textContent = "";
      this.#engines(samples);
    } catch (error) {
      if (signal.aborted) return;
      this.said.textContent = `No figures: ${error.message}`;
      this.points.forEach((points) => points.push({ at, values: [] }));
    }
    this.#show();
  }

  #take(reading) {
    this.first ??= reading;
    this.readings.push(reading);
    while (this.readings.length > 2 && this.readings[1].at <= reading.at - WINDOW) this.readings.shift();
    const before = this.readings.length > 1 ? this.readings[0] : reading;
    const seconds = (reading.at - before.at) / 1000;
    const oldest = reading.at - SPANS.at(-1)[0] * 60_000;
    CHARTS.forEach(({ read }, i) => {
      this.points[i].push({ at: reading.at, values: read(before.samples, reading.samples, seconds) });
      while (this.points[i][0].at < oldest) this.points[i].shift();
    });
    const rows = statuses(this.first === reading ? null : this.first.samples, reading.samples);
    fill(this.answers, ["Route", "Status", "Number"], this.first === reading ? [] : rows.map(([route, status, count]) => [route, status, short(count)]));
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
    const from = to - Number(this.span.value) * 60_000;
    this.charts.forEach((chart, i) => chart.show(this.points[i].filter(({ at }) => at >= from), from, to));
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
