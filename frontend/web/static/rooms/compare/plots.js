// Plots on canvas, in the page's colours.
import { short } from "../../parts/dom.js";

const HEIGHT = 180, PAD = { left: 44, right: 10, top: 8, bottom: 22 };

/** A canvas ready to draw on: its context, its size in CSS pixels, its colours. */
function open(canvas, height = HEIGHT) {
  const density = Math.min(2, devicePixelRatio || 1), width = Math.max(200, canvas.parentElement.clientWidth || 320);
  canvas.width = width * density;
  canvas.height = height * density;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  context.scale(density, density);
  context.font = "12px system-ui, sans-serif";
  const color = (name) => style.getPropertyValue(name).trim();
  return { context, width, height, text: color("--text"), line: color("--line"), series: [1, 2, 3, 4, 5, 6].map((n) => color(`--c${n}`)) };
}

const dashes = [[], [6, 3], [2, 3], [8, 3, 2, 3], [3, 6], [1, 2]];

/** Quantiles as curves: the share of answers (up) within a time (right, milliseconds). Lines differ also by dashes. */
export function drawCurves(canvas, quantiles) {
  const { context, width, height, text, line, series } = open(canvas);
  const most = Math.max(1e-9, ...quantiles.map((each) => each[each.length - 1] ?? 0));
  const right = width - PAD.right, bottom = height - PAD.bottom;
  const x = (value) => PAD.left + (value / most) * (right - PAD.left), y = (share) => bottom - share * (bottom - PAD.top);
  context.fillStyle = text;
  context.strokeStyle = line;
  for (const share of [0, 0.5, 0.99]) {
    context.beginPath();
    context.moveTo(PAD.left, y(share));
    context.lineTo(right, y(share));
    context.stroke();
    context.fillText(`${Math.round(share * 100)} %`, 4, y(share) + 4);
  }
  for (const part of [0, 0.5, 1]) {
    context.textAlign = part === 1 ? "right" : part ? "center" : "left";
    context.fillText(`${short(part * most)} ms`, x(part * most), height - 5);
  }
  context.lineWidth = 2;
  quantiles.forEach((values, place) => {
    context.strokeStyle = series[place % series.length];
    context.setLineDash(dashes[place % dashes.length]);
    context.beginPath();
    values.forEach((value, step) => context.lineTo(x(value), y(step / Math.max(1, values.length - 1))));
    context.stroke();
  });
}

/** A bar for each value, with its name. */
export function drawBars(canvas, values, names) {
  const { context, width, height, text, series } = open(canvas);
  const most = Math.max(1e-9, ...values), each = (height - 8) / values.length;
  values.forEach((value, place) => {
    const top = 4 + place * each, size = Math.min(28, each - 4);
    context.fillStyle = series[place % series.length];
    context.fillRect(4, top + size / 2, Math.max(1, (value / most) * (width - 70)), size / 2);
    context.fillStyle = text;
    context.fillText(names[place], 4, top + size / 2 - 3, width - 80);
    context.fillText(short(value), 8 + (value / most) * (width - 70), top + size - 1);
  });
}

/** The scheduler over time: [seconds, pages in tables, cached pages, running, waiting]. */
export function drawTimeline(canvas, timeline, most) {
  const height = 120, { context, width, text, series } = open(canvas, height), middle = 70;
  const x = (at) => (at / most.seconds) * width;
  const shape = (column, from, size, scale, isFilled) => {
    context.beginPath();
    context.moveTo(0, from);
    timeline.forEach((sample) => context.lineTo(x(sample[0]), from - (sample[column] / scale) * size));
    if (!isFilled) return context.stroke();
    context.lineTo(x(timeline.length ? timeline[timeline.length - 1][0] : 0), from);
    return context.fill();
  };
  context.fillStyle = series[2];
  shape(3, middle, middle - 14, most.rows, true);
  context.strokeStyle = series[1];
  context.lineWidth = 1.5;
  shape(4, middle, middle - 14, most.rows, false);
  context.fillStyle = series[0];
  shape(1, height - 2, height - middle - 8, most.pages, true);
  context.fillStyle = text;
  context.fillText(`${most.rows} sequences`, 2, 11);
  context.fillText(`${most.pages} pages`, 2, middle + 14);
  context.textAlign = "right";
  context.fillText(`${short(most.seconds)} s`, width - 2, 11);
}
