// A line chart on a canvas, with its figures as a table for those who do not see it.
import { h, replace } from "../../parts/dom.js";

const COLOURS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6"];
const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3]]; // lines are told apart also without colours
const LEFT = 56;
const BOTTOM = 20;
const ROWS = 10;

/** `format` turns a value into text; `series` are its lines' names; `least` is the least top of the scale. */
export class Chart {
  constructor({ title, about, series, format, least = 0 }) {
    Object.assign(this, { title, series, format, least });
    this.canvas = h("canvas", { role: "img", "aria-label": title });
    this.legend = h("p", { class: "legend" });
    this.table = h("table");
    const label = `${title}: figures`;
    const figures = h("details", {}, h("summary", {}, "Figures"), h("div", { class: "figures-table", tabindex: "0", role: "region", "aria-label": label }, this.table));
    this.element = h("section", { class: "chart", "aria-label": title }, h("h2", {}, title), h("p", { class: "muted about" }, about), this.legend, this.canvas, figures);
    this.figures = figures;
    figures.addEventListener("toggle", () => this.#fill());
  }

  /** Show these points, [{at, values}], `at` in milliseconds; null values are gaps. */
  show(points, from, to) {
    Object.assign(this, { points, from, to });
    const last = points.at(-1);
    replace(this.legend, this.series.map((name, i) => h("span", {}, h("span", { class: `key key${i}`, "aria-hidden": "true" }), `${name} `, h("strong", {}, this.#text(last?.values[i])))));
    this.canvas.setAttribute("aria-label", `${this.title}, now: ${this.series.map((name, i) => `${name} ${this.#text(last?.values[i])}`).join(", ")}`);
    this.#draw();
    if (this.figures.open) this.#fill();
  }

  #text(value) {
    return value == null ? "–" : this.format(value);
  }

  #draw() {
    const { canvas } = this;
    const scale = devicePixelRatio;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    if (!width) return;
    canvas.width = width * scale;
    canvas.height = height * scale;
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    const style = getComputedStyle(canvas);
    const colour = (name) => style.getPropertyValue(name);
    const highest = Math.max(this.least, ...this.points.flatMap(({ values }) => values.filter((value) => value != null)));
    const top = niceTop(highest || 1);
    const x = (at) => LEFT + ((at - this.from) / (this.to - this.from)) * (width - LEFT - 4);
    const y = (value) => 6 + (1 - value / top) * (height - BOTTOM - 6);
    context.font = `12px ${style.fontFamily}`;
    context.textBaseline = "middle";
    for (const share of [0, 0.5, 1]) {
      context.strokeStyle = colour("--line");
      context.lineWidth = 1;
      line(context, [[LEFT, y(share * top)], [width, y(share * top)]]);
      context.fillStyle = colour("--muted");
      context.textAlign = "right";
      context.fillText(this.format(share * top), LEFT - 6, y(share * top));
    }
    context.textBaseline = "bottom";
    context.textAlign = "left";
    context.fillText(new Date(this.from).toLocaleTimeString(), LEFT, height);
    context.textAlign = "right";
    context.fillText(new Date(this.to).toLocaleTimeString(), width - 4, height);
    this.series.forEach((_, i) => {
      context.strokeStyle = colour(COLOURS[i % COLOURS.length]);
      context.lineWidth = 2;
      context.setLineDash(DASHES[i % DASHES.length]);
      let run = [];
      for (const { at, values } of [...this.points, { at: 0, values: [] }]) {
        if (values[i] != null) run.push([x(at), y(values[i])]);
        else if (run.length) {
          line(context, run.length > 1 ? run : [[run[0][0] - 1, run[0][1]], run[0]]);
          run = [];
        }
      }
    });
  }

  #fill() {
    if (!this.figures.open || !this.points) return;
    const rows = this.points.slice(-ROWS).reverse();
    replace(
      this.table,
      h("caption", { class: "visually-hidden" }, this.title),
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Time"), this.series.map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, rows.map(({ at, values }) => h("tr", {}, h("th", { scope: "row" }, new Date(at).toLocaleTimeString()), this.series.map((_, i) => h("td", { class: "number" }, this.#text(values[i])))))),
    );
  }
}

function line(context, points) {
  context.beginPath();
  for (const [x, y] of points) context.lineTo(x, y);
  context.stroke();
}

/** The next number above that is 1, 2 or 5 times a power of ten. */
function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((times) => times * power).find((top) => top >= value * 0.999) ?? 10 * power;
}
