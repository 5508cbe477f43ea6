// Draws a store on a canvas: rows of the batch over time.
//
//   gutter     axis: times of day, and "now"
//   device     when it computes
//   row 0      a bar for each request that has the row
//
// Steps go into an image with a pixel for each column of the screen and each lane, a row that is shown, which is then
// stretched to the lanes' height. A column takes few steps, however many there are in it: a frame costs about the same
// at any zoom.

import { middle } from "../../parts/dom.js";
import { ACCEPTED, ADMITTED, DECODE, FINISHED, FIRST_TOKEN, PREEMPTED, PREFILL, SWAPPED } from "./store.js";

const AXIS = 22, DEVICE = 14, GAP = 6;
const WIDE_GUTTER = 58, NARROW_GUTTER = 46, NARROW = 600; // pixels
const FEWEST_LANES = 4, TALLEST_LANE = 26, SHORTEST_NAMED = 15;
const FONT = "12px system-ui, sans-serif";
const STEPS_IN_COLUMN = 2;
const NAMES = [
  "text", "line", "paper", "decode", "prefill", "accepted", "decode-dim", "prefill-dim", "accepted-dim", "row", "busy",
  "idle", "preempted", "swapped", "selected",
];

const clamp = (x, width) => Math.min(width, Math.max(0, Math.floor(x)));

export class Timeline {
  constructor(canvas, store, view) {
    this.canvas = canvas;
    this.store = store;
    this.view = view;
    this.context = canvas.getContext("2d", { alpha: false });
    this.image = null;
    this.buffer = document.createElement("canvas");
    this.lane = document.createElement("canvas"); // of the device: busy, or idle between two steps
    this.selected = ""; // key/index
    this.cursor = null; // {row, time} of the keyboard
    this.isEmpty = this.isPaused = false; // the room says so
    this.lanes = FEWEST_LANES; // rows that are shown, from the first one on
    this.colors = {};
    this.resize();
  }

  /** Read the colours of the style sheet: they depend on the theme. */
  readColors() {
    const probe = document.createElement("span");
    this.canvas.parentElement.append(probe);
    const words = (name) => {
      probe.className = `tl-${name}`;
      return getComputedStyle(probe).color;
    };
    for (const name of NAMES) this.colors[name] = words(name);
    probe.remove();
    const dot = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    const packed = (name) => {
      dot.clearRect(0, 0, 1, 1);
      dot.fillStyle = this.colors[name];
      dot.fillRect(0, 0, 1, 1);
      return new Uint32Array(dot.getImageData(0, 0, 1, 1).data.buffer)[0];
    };
    this.ofKind = new Uint32Array(3);
    this.ofKindDim = new Uint32Array(3);
    for (const [kind, name] of [[DECODE, "decode"], [PREFILL, "prefill"], [ACCEPTED, "accepted"]]) {
      this.ofKind[kind] = packed(name);
      this.ofKindDim[kind] = packed(`${name}-dim`);
    }
    this.ofBusy = packed("busy");
    this.ofIdle = packed("idle");
    this.ofRow = packed("row");
    this.ofPaper = packed("paper");
    this.numRight = 0;
  }

  /** The canvas has another size, or the screen another density. */
  resize() {
    const box = this.canvas.getBoundingClientRect();
    const whole = Math.max(1, Math.round(box.width));
    this.gutter = whole < NARROW ? NARROW_GUTTER : WIDE_GUTTER;
    this.width = Math.max(1, whole - this.gutter); // of what shows times; places are counted from its left border
    this.height = Math.max(1, Math.round(box.height));
    const density = Math.min(2, window.devicePixelRatio || 1);
    this.canvas.width = whole * density;
    this.canvas.height = this.height * density;
    this.context.setTransform(density, 0, 0, density, this.gutter * density, 0);
    this.image = null;
  }

  /** Show as many lanes as the rows in view need; returns the height in pixels that suits them, of at most `most`. */
  fit(most) {
    const { store, view } = this, needed = store.highestRow(view.left, view.right) + 1;
    let lanes = FEWEST_LANES;
    while (lanes < needed) lanes *= 2;
    if (store.rows) lanes = Math.min(lanes, Math.max(store.rows, needed));
    this.lanes = lanes;
    return this.top + Math.min(most - this.top, lanes * TALLEST_LANE);
  }

  get top() {
    return AXIS + DEVICE + GAP;
  }

  xOf(time) {
    return ((time - this.view.left) / this.view.seconds) * this.width;
  }

  timeAt(x) {
    return this.view.left + (x / this.width) * this.view.seconds;
  }

  rowAt(y) {
    const row = Math.floor(((y - this.top) / (this.height - this.top)) * this.lanes);
    return row < 0 || row >= this.lanes ? -1 : row;
  }

  yOf(row) {
    return this.top + (row / this.lanes) * (this.height - this.top);
  }

  draw() {
    const { context, store, width, height, colors } = this;
    context.fillStyle = colors.paper;
    context.fillRect(-this.gutter, 0, width + this.gutter, height);
    context.font = FONT;
    context.textBaseline = "middle";
    if (store.rows) {
      this.drawSteps();
      this.drawLanes();
      this.drawNames();
      this.drawSpans();
      this.drawMarks();
    }
    this.drawUnknown();
    this.drawGutter();
    this.drawAxis();
    if (this.cursor && store.rows) {
      context.strokeStyle = colors.selected;
      context.lineWidth = 1;
      context.strokeRect(0.5, this.yOf(this.cursor.row), width - 1, Math.max(2, this.yOf(1) - this.yOf(0)));
    }
  }

  drawSteps() {
    const { store, view, width, context } = this, rows = this.lanes;
    if (!this.image || this.image.width !== width || this.image.height !== rows) this.makeImage(width, rows);
    this.fillImage(width / view.seconds);
    this.laneBusy.fill(0);
    const perSecond = width / view.seconds;
    for (let s = store.stepAt(view.left); s < store.numSteps; s++) {
      const i = s % store.maxSteps, until = store.until[i];
      if (store.sent[i] > view.right) break;
      this.addBusy((until - store.busy[i] - view.left) * perSecond, (until - view.left) * perSecond);
    }
    this.fillLane(width);
    this.inLane.putImageData(this.laneImage, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.buffer, 0, 0, width, rows, 0, this.top, width, this.height - this.top);
    context.drawImage(this.lane, 0, 0, width, DEVICE, 0, AXIS, width, DEVICE);
  }

  /** The image of the steps. Its columns are moved with the time: only those are painted of which more is known. */
  fillImage(perSecond) {
    const { store, view } = this, { width, height: rows } = this.image;
    const leftmost = Math.floor(view.left * perSecond), left = leftmost / perSecond, moved = leftmost - this.leftmost;
    if (perSecond !== this.perSecond || !(moved >= 0 && moved < width)) this.numRight = 0;
    else if (moved) {
      this.inBuffer.globalCompositeOperation = "copy";
      this.inBuffer.drawImage(this.buffer, -moved, 0);
      this.numRight = Math.max(0, this.numRight - moved);
    }
    [this.perSecond, this.leftmost] = [perSecond, leftmost];
    this.numRight = Math.min(this.numRight, clamp((store.changedFrom - left) * perSecond, width));
    store.changedFrom = Infinity;
    const begin = this.numRight;
    if (begin >= width) return;
    this.numRight = width;
    for (let row = 0; row < rows; row++) this.pixels.fill(this.ofPaper, row * width + begin, (row + 1) * width);
    this.taken.fill(0, begin);
    this.fillSpans(left, perSecond, begin);
    let column = -1, inColumn = 0;
    for (let s = store.stepAt(left + begin / perSecond); s < store.numSteps; s++) {
      const i = s % store.maxSteps, x0 = clamp((store.sent[i] - left) * perSecond, width);
      if (x0 >= width) break;
      if (x0 === column && ++inColumn > STEPS_IN_COLUMN) continue;
      if (x0 !== column) [column, inColumn] = [x0, 1];
      // A pixel between steps, where there is room for one: each step is to be seen.
      let x1 = clamp(Math.ceil((store.returned[i] - left) * perSecond), width);
      if (x1 - x0 > 3) x1--;
      x1 = Math.min(width, Math.max(x0 + 1, x1));
      const x2 = clamp(Math.ceil((store.until[i] - left) * perSecond), width);
      this.paint(i, Math.max(begin, x0), x1, this.ofKind);
      this.paint(i, Math.max(begin, x1), x2, this.ofKindDim);
    }
    this.turn(rows, width, begin);
    this.inBuffer.globalCompositeOperation = "source-over";
    this.inBuffer.putImageData(this.image, 0, 0, begin, 0, width - begin, rows);
  }

  /** The device computed between these places, in pixels. */
  addBusy(from, to) {
    const busy = this.laneBusy, end = Math.min(busy.length, to);
    for (let x = Math.max(0, Math.floor(from)); x < end; x++) busy[x] += Math.min(x + 1, to) - Math.max(x, from);
  }

  /** The lane of the device: of each column, the part that it was busy, from below. */
  fillLane(width) {
    const { store, lanePixels, laneBusy } = this;
    const begin = store.numSteps ? clamp(this.xOf(store.sent[store.firstStep % store.maxSteps]), width) : width;
    const end = clamp(this.xOf(store.now), width);
    for (let y = 0; y < DEVICE; y++) {
      const share = 1 - (y + 0.5) / DEVICE;
      for (let x = 0, to = y * width; x < width; x++) {
        lanePixels[to + x] = x < begin || x >= end ? this.ofPaper : laneBusy[x] > share ? this.ofBusy : this.ofIdle;
      }
    }
  }

  makeImage(width, rows) {
    this.buffer.width = this.lane.width = width;
    this.buffer.height = rows;
    this.lane.height = DEVICE;
    this.inBuffer = this.buffer.getContext("2d");
    this.inLane = this.lane.getContext("2d");
    this.image = this.inBuffer.createImageData(width, rows);
    this.laneImage = this.inLane.createImageData(width, DEVICE);
    this.pixels = new Uint32Array(this.image.data.buffer);
    this.lanePixels = new Uint32Array(this.laneImage.data.buffer);
    this.columns = new Uint32Array(width * rows); // column by column: the rows of a step are neighbours
    this.laneBusy = new Float32Array(width);
    this.numRight = 0; // columns of the image, from the left, that need not be painted again
    this.leftmost = this.perSecond = NaN; // where the image is
    this.taken = new Uint8Array(width); // columns that have steps
  }

  /** A step into these columns. */
  paint(i, from, to, colors) {
    if (from >= to) return;
    const { store, columns } = this, rows = this.lanes;
    // A column may have other steps already; those after it are this step's alone.
    const ends = this.taken[from] && to - from > 1 ? from + 2 : from + 1;
    for (let x = from; x < ends; x++) {
      const base = x * rows;
      if (!this.taken[x]) columns.fill(0, base, base + rows);
      this.taken[x] = 1;
      for (let c = store.cellFrom[i]; c < store.cellTo[i]; c++) {
        const cell = c % store.maxCells;
        columns.fill(colors[store.kind[cell]], base + store.first[cell], base + Math.min(rows, store.last[cell] + 1));
      }
    }
    for (let x = ends; x < to; x++) {
      columns.copyWithin(x * rows, (ends - 1) * rows, ends * rows);
      this.taken[x] = 1;
    }
  }

  /** Columns into the image, whose rows are neighbours; in blocks that fit a processor's cache. */
  turn(rows, width, first) {
    const { columns, pixels, taken } = this, block = 16;
    for (let begin = first; begin < width; begin += block) {
      const end = Math.min(width, begin + block);
      for (let row = 0; row < rows; row++) {
        for (let x = begin, to = row * width; x < end; x++) {
          const color = taken[x] ? columns[x * rows + row] : 0;
          if (color) pixels[to + x] = color;
        }
      }
    }
  }

  /** Rows that somebody has, also while nothing is computed for them. */
  fillSpans(left, perSecond, begin) {
    const { store, pixels } = this, { width, height: rows } = this.image;
    for (let s = Math.max(0, store.numSpans - store.maxSpans); s < store.numSpans; s++) {
      const i = s % store.maxSpans, row = store.spanRow[i];
      if (row >= rows) continue;
      const x0 = Math.max(begin, clamp((store.spanFrom[i] - left) * perSecond, width));
      const x1 = clamp(Math.ceil((Math.min(store.spanTo[i], store.now) - left) * perSecond), width);
      if (x1 > x0) pixels.fill(this.ofRow, row * width + x0, row * width + x1);
    }
  }

  /** Gaps between the lanes, where they are tall enough for that. */
  drawLanes() {
    const { context, width } = this, height = this.yOf(1) - this.yOf(0);
    if (height < 6) return;
    context.fillStyle = this.colors.paper;
    for (let lane = 1; lane <= this.lanes; lane++) context.fillRect(0, this.yOf(lane) - 2, width, 2);
  }

  /** Which request a bar is. */
  drawNames() {
    const { store, context, width } = this, height = this.yOf(1) - this.yOf(0);
    if (height < SHORTEST_NAMED) return;
    for (let s = Math.max(0, store.numSpans - store.maxSpans); s < store.numSpans; s++) {
      const i = s % store.maxSpans;
      const x0 = Math.max(0, this.xOf(store.spanFrom[i])), x1 = Math.min(width, this.xOf(Math.min(store.spanTo[i], store.now)));
      if (x1 - x0 < 48) continue;
      const name = nameOf(store.spanKey[i]), size = context.measureText(name).width + 8, y = this.yOf(store.spanRow[i]);
      if (size > x1 - x0 - 8) continue;
      context.globalAlpha = 0.85;
      context.fillStyle = this.colors.paper;
      context.fillRect(x0 + 4, y + (height - 2) / 2 - 7, size, 14);
      context.globalAlpha = 1;
      context.fillStyle = this.colors.text;
      context.fillText(name, x0 + 8, y + (height - 2) / 2);
    }
  }

  drawSpans() {
    const { store, context, width } = this, height = this.yOf(1) - this.yOf(0);
    if (!this.selected) return;
    context.strokeStyle = this.colors.selected;
    context.lineWidth = 2;
    for (let s = Math.max(0, store.numSpans - store.maxSpans); s < store.numSpans; s++) {
      const i = s % store.maxSpans;
      if (store.spanKey[i] !== this.selected) continue;
      const x0 = Math.max(-4, this.xOf(store.spanFrom[i]));
      const x1 = Math.min(width + 4, this.xOf(Math.min(store.spanTo[i], store.now)));
      if (x1 > x0) context.strokeRect(x0, this.yOf(store.spanRow[i]) - 1, x1 - x0, Math.max(4, height + 2));
    }
  }

  drawMarks() {
    const { store, context, view } = this, height = Math.max(3, this.yOf(1) - this.yOf(0));
    const isClose = height >= 5 && view.seconds < 20;
    const kinds = [
      [PREEMPTED, this.colors.preempted, 5], [SWAPPED, this.colors.swapped, 5], [ADMITTED, this.colors.text, 1],
      [FINISHED, this.colors.text, 1], [FIRST_TOKEN, this.colors.text, 3],
    ];
    for (const [kind, color, size] of kinds) {
      if (size < 5 && !isClose) continue;
      context.fillStyle = color;
      for (let m = Math.max(0, store.numMarks - store.maxMarks); m < store.numMarks; m++) {
        const i = m % store.maxMarks;
        if (store.markKind[i] !== kind || store.markAt[i] < view.left || store.markAt[i] > view.right) continue;
        if (store.markRow[i] < 0 || store.markRow[i] >= this.lanes) continue;
        const tall = kind === FIRST_TOKEN ? size : Math.max(size, height);
        context.fillRect(this.xOf(store.markAt[i]) - size / 2, this.yOf(store.markRow[i]), size, tall);
      }
    }
  }

  /** Of the time before the first message nothing is known: that is not the same as nothing having run. */
  drawUnknown() {
    const { context, store, colors, width, height } = this, end = Math.min(width, this.xOf(store.since));
    if (!store.since || end <= 0) return;
    context.fillStyle = colors.row;
    context.fillRect(0, AXIS, end, height - AXIS);
    const words = "not watched yet", size = context.measureText(words).width;
    if (this.isEmpty || end < size + 16) return;
    context.fillStyle = colors.text;
    context.fillText(words, (end - size) / 2, (AXIS + height) / 2);
  }

  drawGutter() {
    const { context, colors, gutter, height } = this, each = this.yOf(1) - this.yOf(0);
    context.fillStyle = colors.paper;
    context.fillRect(-gutter, 0, gutter, height);
    context.fillStyle = colors.text;
    context.textAlign = "right";
    context.fillText("device", -6, AXIS + DEVICE / 2);
    const every = 2 ** Math.max(0, Math.ceil(Math.log2(14 / each)));
    for (let row = 0; row < this.lanes; row += every) context.fillText(`row ${row}`, -6, this.yOf(row) + Math.max(6, each / 2));
    context.textAlign = "left";
    context.fillStyle = colors.line;
    context.fillRect(-1, AXIS, 1, height - AXIS);
  }

  drawAxis() {
    const { context, colors, width, height, store, view } = this;
    const now = view.isLive ? width : this.xOf(store.now), isShown = store.now > 0 && now >= 0 && now <= width;
    const words = this.isPaused ? "paused" : "now";
    let reserved = 0;
    context.fillStyle = colors.text;
    if (isShown) {
      context.font = `bold ${FONT}`;
      reserved = context.measureText(words).width + 12;
      context.fillText(words, Math.min(now + 4, width + 8 - reserved), AXIS / 2);
      context.fillRect(Math.min(width - 2, now), AXIS - 5, 2, height);
      context.font = FONT;
    }
    if (!store.unixTime) return;
    for (const [time, text] of view.ticks(Math.max(2, width / 90), store.unixAt(0))) {
      const x = this.xOf(time), size = context.measureText(text).width + 8;
      if (isShown && x + size > Math.min(now, width - reserved) && x < now + reserved) continue;
      context.fillRect(x, AXIS - 5, 1, 5);
      context.fillText(text, x + 4, AXIS / 2);
    }
  }
}

/** A request's name as people gave it, short enough for a bar: from a span's key, number:id/sequence. */
function nameOf(key) {
  const id = key.slice(key.indexOf(":") + 1).replace(/\/0$/, "");
  return middle(id, 16);
}
