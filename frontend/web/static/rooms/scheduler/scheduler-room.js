// The Scheduler room: what an engine does, as it happens.
//
//   #/scheduler                   the server's first engine; ?engine=1 another one
//   #/scheduler?synthetic=256     an engine that is not there, with so many rows

import { watched } from "../../parts/background.js";
import { duration, h, replace, short, shortId } from "../../parts/dom.js";
import { fillTable } from "../../parts/table.js";
import { figures } from "./figures.js";
import { LifePanel } from "./life.js";
import { LiveSource } from "./live.js";
import { PagesPanel } from "./pages.js";
import { PrefixPanel } from "./prefixes.js";
import { ACCEPTED, PREEMPTED, SWAPPED, Store } from "./store.js";
import { SyntheticSource } from "./synthetic.js";
import { Timeline } from "./timeline.js";
import { View, clockText } from "./view.js";

const LEGEND = [["prefill", "prompt is computed"], ["decode", "tokens are generated"],
  ["accepted", "with accepted drafts"], ["decode-dim", "steps that are not told"], ["row", "has a row, waits"],
  ["busy", "device computes"], ["idle", "device idle"], ["preempted", "preempted"],
  ["swapped", "preempted, swapped to the host"], ["selected", "selected"]];
const RARE = new Set(["accepted", "decode-dim", "preempted", "swapped", "selected"]); // told once they have been seen
const ABOUT = "A line is a row of the batch, a bar in it is a request. Select one to see its life.";
const HELP = "Wheel or pinch zooms, dragging pans. Keys: plus and minus zoom, left and right pan, up and down choose a row, " +
  "Enter shows its request, F follows what is live, Space pauses.";
const TALLEST = 0.5, LEAST_HEIGHT = 140, MOST_HEIGHT = 560; // of the timeline: part of the window, and pixels
const KEPT_SECONDS = 29; // of which something is known, if somebody watched all the time
const SHRINK_MS = 4000; // so long must fewer lanes do before the timeline gets smaller
const SLOW_MS = 1000, PAGES_MS = 2000;

class SchedulerRoom extends HTMLElement {
  connectedCallback() {
    this.store = new Store();
    this.view = new View();
    this.paused = false;
    this.pending = []; // what has come during the pause
    this.selectedKey = "";
    this.query = new URLSearchParams(location.hash.split("?")[1] ?? "");
    this.build();
    this.begin();
  }

  disconnectedCallback() {
    this.source?.stop();
    cancelAnimationFrame(this.frame);
    clearInterval(this.slow);
    clearInterval(this.pagesTimer);
    this.observer?.disconnect();
    this.marks?.disconnect();
    this.theme?.removeEventListener("change", this.onTheme);
    this.source = null;
    this.replaceChildren();
  }

  // --- its parts -----------------------------------------------------------------------------

  build() {
    const button = (text, onclick, fields = {}) => h("button", { type: "button", onclick, ...fields }, text);
    this.pauseButton = button("Pause", () => this.setPaused(!this.paused), { "aria-pressed": "false" });
    this.liveButton = button("Follow live", () => this.setLive(this.paused || !this.view.isLive), { "aria-pressed": "true" });
    this.span = h("span", { class: "span", title: "Time from the left border to the right one" });
    this.engines = h("select", { "aria-label": "Engine", onchange: () => this.changeEngine() });
    this.state = h("p", { role: "status", class: "state" }, "Connecting…");
    this.figures = h("dl", { class: "figures" });
    this.canvas = h("canvas", { tabindex: 0, role: "application", class: "timeline",
      "aria-label": "Timeline of steps: rows over time", "aria-describedby": "timeline-help" });
    this.empty = h("div", { class: "empty", hidden: true });
    this.box = h("div", { class: "canvas-box" }, this.canvas, this.empty);
    this.where = h("p", { class: "where" }, ABOUT);
    this.legend = h("ul", { class: "legend", "aria-label": "Legend" });
    this.seen = new Set();
    this.rowsTable = h("table", {});
    this.rowsDetails = h("details", {}, h("summary", {}, "The timeline as a table"),
      h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Rows and what they do" }, this.rowsTable));
    this.rowsDetails.addEventListener("toggle", () => this.tellSlow());
    this.life = new LifePanel(() => this.select("", 0));
    this.queueTable = h("table", {});
    this.queueTold = h("p", {});
    const queue = h("section", { class: "panel queue", "aria-labelledby": "queue-title" }, h("h3", { id: "queue-title" }, "Queue"),
      this.queueTold, h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Waiting requests" }, this.queueTable));
    this.pages = new PagesPanel((key, index) => this.select(key, index));
    this.prefixes = new PrefixPanel(() => this.askPrefixes());
    this.replaceChildren(
      h("h2", {}, "Scheduler"),
      h("div", { class: "tools" }, this.pauseButton, this.liveButton,
        h("div", { class: "zoom", role: "group", "aria-label": "Zoom" },
          button("−", () => this.zoom(2), { "aria-label": "Zoom out", title: "Zoom out" }), this.span,
          button("+", () => this.zoom(0.5), { "aria-label": "Zoom in", title: "Zoom in" })),
        this.engines, this.state),
      this.figures,
      this.where, this.box, this.legend,
      h("details", {}, h("summary", {}, "Keys and gestures"), h("p", { id: "timeline-help", class: "help" }, HELP)),
      this.rowsDetails,
      h("div", { class: "panels" }, this.life.element, queue, this.pages.element, this.prefixes.element),
    );
  }

  begin() {
    this.timeline = new Timeline(this.canvas, this.store, this.view);
    this.readColors();
    this.listen();
    this.connect(this.query.get("engine") ?? "");
    this.source.engines().then((names) => {
      this.engines.replaceChildren(...names.map((name) => h("option", { value: name }, `Engine ${name}`)));
      this.engines.hidden = names.length < 2;
    }).catch(() => { this.engines.hidden = true; });
    this.slow = setInterval(() => this.tellSlow(), SLOW_MS);
    this.pagesTimer = setInterval(() => this.askPages(), PAGES_MS);
    this.askPages();
    this.askPrefixes();
    this.frames = [];
    this.frame = requestAnimationFrame((at) => this.onFrame(at));
  }

  connect(engine) {
    this.source?.stop();
    this.store.clear();
    watched.engine = engine;
    const rows = Number(this.query.get("synthetic"));
    this.source = rows ? new SyntheticSource(Math.min(4096, Math.max(1, Math.floor(rows)))) : new LiveSource(engine, (why) => this.setState(why));
    this.source.start((batch) => this.onBatch(batch));
    if (rows) this.state.textContent = "An engine that is not there, to look around.";
  }

  changeEngine() {
    this.select("", 0);
    this.connect(this.engines.value);
  }

  readColors() {
    this.timeline.readColors();
    const colors = this.timeline.colors;
    this.pageColors = { free: colors.row, cached: colors["decode-dim"], shared: colors.accepted, held: colors.idle, owned: colors.decode };
  }

  // --- what comes ----------------------------------------------------------------------------

  onBatch(batch) {
    if (this.paused) {
      this.pending.push(batch);
      if (this.pending.length > 600) this.pending.shift();
      return;
    }
    const isFirst = !this.store.now;
    this.store.add(batch);
    this.toggleAttribute("data-has-steps", this.store.numSteps > 0);
    if (isFirst) this.tellSlow();
  }

  setState(why) {
    this.why = why;
    const left = this.store.lostBatches ? ` ${this.store.lostBatches} messages were lost.` : "";
    const text = why ? `Not connected: ${why}` : `Connected.${left}`;
    if (this.state.textContent !== text) this.state.textContent = text;
    this.toggleAttribute("data-connected", !why);
  }

  setPaused(isPaused) {
    this.paused = isPaused;
    this.pauseButton.setAttribute("aria-pressed", String(isPaused));
    this.pauseButton.textContent = isPaused ? "Go on" : "Pause";
    this.timeline.isPaused = isPaused;
    if (isPaused) {
      this.stoppedAt = this.store.clock();
      return;
    }
    for (const batch of this.pending.splice(0)) this.store.add(batch);
  }

  setLive(isLive) {
    this.view.isLive = isLive;
    if (isLive && this.paused) this.setPaused(false);
  }

  zoom(factor, share = this.view.isLive ? 1 : 0.5) {
    this.view.zoom(factor, share);
  }

  // --- drawing -------------------------------------------------------------------------------

  onFrame(at) {
    this.frame = requestAnimationFrame((next) => this.onFrame(next));
    this.frames.push(at);
    while (this.frames[0] < at - 1000) this.frames.shift();
    if (!this.paused) this.view.follow(this.store.clock());
    this.fitBox(at);
    this.timeline.draw();
    this.tellEmpty();
    const span = duration(this.view.seconds);
    if (this.span.textContent !== span) this.span.textContent = span;
    const isFollowing = String(this.view.isLive && !this.paused);
    if (this.liveButton.getAttribute("aria-pressed") !== isFollowing) this.liveButton.setAttribute("aria-pressed", isFollowing);
  }

  /** As tall as the rows in view need. It grows at once, and shrinks when they have been few for a while. */
  fitBox(at) {
    const before = this.timeline.lanes, most = Math.min(MOST_HEIGHT, Math.max(LEAST_HEIGHT, innerHeight * TALLEST));
    const height = Math.max(LEAST_HEIGHT, this.timeline.fit(most));
    if (this.timeline.lanes >= before) this.fewSince = at;
    if (this.timeline.lanes < before && at - this.fewSince < SHRINK_MS) this.timeline.lanes = before;
    else if (height !== this.boxHeight) {
      this.boxHeight = height;
      this.box.style.height = `${height}px`;
    }
  }

  /** Say so where nothing is to be seen, and what to do about it. */
  tellEmpty() {
    const { store, view } = this;
    const isEmpty = store.now > 0 && store.highestRow(view.left, view.right) < 0;
    const fresh = store.now - store.since < KEPT_SECONDS ? "fresh" : "new";
    const away = !store.now && this.why ? "away" : "";
    const kind = !isEmpty ? away : !view.isLive ? "past" : store.lastActive() ? "idle" : fresh;
    if (kind === this.emptyKind) return;
    this.emptyKind = kind;
    this.empty.hidden = !kind;
    const chat = h("a", { href: "#/chat" }, "Chat");
    const act = (text, onclick) => h("button", { type: "button", onclick }, text);
    if (kind === "away") replace(this.empty, h("p", {}, `There is nothing to show: ${this.why}.`));
    if (kind === "past") replace(this.empty, h("p", {}, "Nothing ran in this time."), act("Go to now", () => this.setLive(true)));
    if (kind === "idle") replace(this.empty, h("p", {}, "Nothing runs now."), act("Show what ran last", () => this.goTo(store.lastActive())));
    if (kind === "new" || kind === "fresh") {
      const since = kind === "new" ? "in the last 30 seconds" : `since ${clockText(store.unixAt(store.since))}; nobody watched before`;
      replace(this.empty, h("p", {}, `Nothing has run ${since}. Ask something in `, chat,
        ", or send a request to the server: its steps appear here as they happen."));
    }
    this.timeline.isEmpty = Boolean(kind);
  }

  /** Show a time near the right border. */
  goTo(time) {
    this.view.isLive = false;
    this.view.right = time + this.view.seconds / 10;
  }

  /** Frames of the last second. */
  get framesPerSecond() {
    return this.frames.length;
  }

  /** What need not be told at each frame. */
  tellSlow() {
    if (!this.timeline || this.paused) return;
    const found = figures(this.store), spread = (each) => `${duration(each.p50)} / ${duration(each.p99)}`;
    const told = [
      ["Running", found.running], ["Waiting", found.waiting], ["Steps/s", short(found.steps)],
      ["Output tokens/s", short(found.output)], ["Prompt tokens/s", short(found.prompt)],
      ["Device busy", `${Math.min(100, found.busy * 100).toFixed(0)} %`],
    ];
    if (this.seen.has("preempted") || this.seen.has("swapped")) told.push(["Preemptions/s", short(found.preemptions)]);
    if (found.numEnded) {
      told.push(["Queue p50 / p99", spread(found.queue)], ["First token p50 / p99", spread(found.ttft)],
        ["Token gap p50 / p99", spread(found.tpot)], ["Whole p50 / p99", spread(found.e2e)]);
    }
    this.figures.replaceChildren(...told.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(value)))));
    this.tellLegend();
    this.tellQueue();
    if (this.rowsDetails.open) this.tellRows();
    if (this.selectedKey && !this.isAsking) this.askLife();
  }

  /** Only of what there has been. */
  tellLegend() {
    const { store, seen, timeline } = this;
    if (timeline.selected) seen.add("selected");
    for (const [kind, name] of [[PREEMPTED, "preempted"], [SWAPPED, "swapped"]]) {
      if (!seen.has(name) && store.markKind.subarray(0, store.numMarks).includes(kind)) seen.add(name);
    }
    if (!seen.has("accepted") && store.kind.subarray(0, store.numCells).includes(ACCEPTED)) seen.add("accepted");
    if (!seen.has("decode-dim") && store.leftOut.subarray(0, store.numSteps).some(Boolean)) seen.add("decode-dim");
    if (this.legend.dataset.seen === String(seen.size)) return;
    this.legend.dataset.seen = seen.size;
    const shown = LEGEND.filter(([name]) => !RARE.has(name) || seen.has(name));
    replace(this.legend, shown.map(([name, text]) => h("li", {}, h("span", { class: `swatch tl-${name}`, "aria-hidden": "true" }), text)));
  }

  tellQueue() {
    const store = this.store, kinds = Object.entries(store.reasons).map(([reason, count]) => `${count} × ${reason}`).join(", ");
    this.queueTold.textContent = store.numWaiting ? `${store.numWaiting.toLocaleString("en")} wait: ${kinds}.` : "Nobody waits.";
    this.queueTable.hidden = !store.queue.length;
    if (this.queueTable.contains(document.activeElement)) return; // a button must not vanish under somebody's finger
    const shown = store.queue; // the next batch brings another one, before the table is filled again
    fillTable(this.queueTable, ["Request", "Waits", "Prompt", "Why"], shown.map((each) => [
      shortId(each.key + (each.index ? `/${each.index}` : "")), each.arrived ? duration(store.now - each.arrived) : "–",
      `${each.prompt_tokens.toLocaleString("en")} tokens`, each.reason,
    ]), (place) => this.select(shown[place].key, shown[place].index));
  }

  tellRows() {
    const store = this.store, rows = [...store.byRow].sort((a, b) => a[0] - b[0]);
    const last = store.numSteps ? (store.numSteps - 1) % store.maxSteps : -1, does = new Map();
    if (last >= 0) {
      for (let c = store.cellFrom[last]; c < store.cellTo[last]; c++) {
        const cell = c % store.maxCells;
        const text = ["decodes", `computes ${store.amount[cell]} prompt tokens`, `decodes, ${store.amount[cell]} tokens came`][store.kind[cell]];
        for (let row = store.first[cell]; row <= store.last[cell]; row++) does.set(row, text);
      }
    }
    if (this.rowsTable.contains(document.activeElement)) return;
    fillTable(this.rowsTable, ["Request", "Row", "Since", "In the last step"], rows.map(([row, name]) => {
      const seq = store.live.get(name);
      return [shortId(name), row, seq?.admitted ? duration(store.now - seq.admitted) : "–", does.get(row) ?? "nothing"];
    }), (place) => {
      const seq = store.live.get(rows[place][1]);
      if (seq) this.select(seq.key, seq.index);
    });
  }

  // --- choosing ------------------------------------------------------------------------------

  select(key, index) {
    this.selectedKey = key;
    this.timeline.selected = key ? `${key}/${index}` : "";
    if (!key) this.life.clear();
    else this.askLife(true);
  }

  async askLife(isNew = false) {
    const key = this.selectedKey, source = this.source;
    this.isAsking = true;
    try {
      const life = await source.life(key);
      if (this.selectedKey !== key || this.source !== source) return;
      if (!isNew && this.life.element.contains(document.activeElement) && !life.is_live) return;
      this.life.show(life);
      if (!life.is_live) this.selectedKey = ""; // nothing more will happen to it
    } catch (error) {
      if (this.selectedKey === key) {
        this.life.clear(error.message || String(error));
        this.selectedKey = "";
      }
    } finally {
      this.isAsking = false;
    }
  }

  async askPages() {
    if (this.paused || document.hidden) return;
    try {
      const map = await this.source.pages();
      if (this.isConnected) this.pages.show(map, this.pageColors);
    } catch (error) {
      this.pages.told.textContent = error.message || String(error);
    }
  }

  async askPrefixes() {
    try {
      const tree = await this.source.prefixes();
      if (this.isConnected) this.prefixes.show(tree);
    } catch (error) {
      this.prefixes.told.textContent = error.message || String(error);
    }
  }

  pick(row, time) {
    const place = this.timeline.store.spanAt(row, time);
    if (place < 0) return;
    const name = this.store.spanKey[place], cut = name.lastIndexOf("/");
    this.select(name.slice(0, cut), Number(name.slice(cut + 1)));
  }

  // --- hands ---------------------------------------------------------------------------------

  listen() {
    this.observer = new ResizeObserver(() => this.timeline.resize());
    this.observer.observe(this.canvas);
    this.onTheme = () => this.readColors();
    this.theme = matchMedia("(prefers-color-scheme: dark)");
    this.theme.addEventListener("change", this.onTheme);
    this.marks = new MutationObserver(this.onTheme); // the page's own choice of colours
    this.marks.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
    const pointers = new Map();
    let moved = 0;
    const at = (event) => {
      const box = this.canvas.getBoundingClientRect();
      return [event.clientX - box.left - this.timeline.gutter, event.clientY - box.top];
    };
    this.canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const width = this.timeline.width;
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        this.view.pan(((event.deltaX || event.deltaY) / width) * this.view.seconds);
      } else this.zoom(Math.exp(event.deltaY / 400), this.view.isLive ? 1 : at(event)[0] / width);
    }, { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => {
      this.canvas.setPointerCapture(event.pointerId);
      pointers.set(event.pointerId, at(event));
      moved = 0;
    });
    this.canvas.addEventListener("pointermove", (event) => {
      const [x, y] = at(event), before = pointers.get(event.pointerId), width = this.timeline.width;
      if (!before) {
        this.tellWhere(this.timeline.rowAt(y), this.timeline.timeAt(x));
        return;
      }
      const others = [...pointers].filter(([id]) => id !== event.pointerId);
      if (others.length) {
        const other = others[0][1][0], was = Math.abs(before[0] - other), is = Math.abs(x - other);
        if (was > 5 && is > 5) this.zoom(was / is, this.view.isLive ? 1 : (x + other) / 2 / width);
        moved = 10;
      } else {
        moved += Math.abs(x - before[0]) + Math.abs(y - before[1]);
        if (moved > 4) this.view.pan(((before[0] - x) / width) * this.view.seconds);
      }
      pointers.set(event.pointerId, [x, y]);
    });
    const up = (event) => {
      const [x, y] = at(event);
      if (pointers.delete(event.pointerId) && moved <= 4 && event.type === "pointerup") {
        const row = this.timeline.rowAt(y);
        if (row >= 0) this.pick(row, this.timeline.timeAt(x));
      }
    };
    this.canvas.addEventListener("pointerup", up);
    this.canvas.addEventListener("pointercancel", up);
    this.canvas.addEventListener("pointerleave", () => this.tellWhere(-1, 0));
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
    this.canvas.addEventListener("blur", () => { this.timeline.cursor = null; });
  }

  onKey(event) {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const view = this.view, rows = this.timeline.lanes;
    const move = (by) => {
      const row = this.timeline.cursor ? this.timeline.cursor.row + by : 0;
      this.timeline.cursor = { row: Math.min(rows - 1, Math.max(0, row)) };
      this.tellWhere(this.timeline.cursor.row, view.right);
    };
    const keys = {
      "+": () => this.zoom(0.7), "=": () => this.zoom(0.7), "-": () => this.zoom(1 / 0.7),
      ArrowLeft: () => view.pan(-view.seconds / 8), ArrowRight: () => view.pan(view.seconds / 8),
      ArrowUp: () => move(-1), ArrowDown: () => move(1), PageUp: () => move(-16), PageDown: () => move(16),
      End: () => this.setLive(true), f: () => this.setLive(!view.isLive), F: () => this.setLive(!view.isLive),
      " ": () => this.setPaused(!this.paused),
      Enter: () => this.timeline.cursor && this.pickLatest(this.timeline.cursor.row),
    };
    const act = keys[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  /** The request that had a row last, of what is shown. */
  pickLatest(row) {
    const store = this.store;
    for (let s = store.numSpans - 1, end = Math.max(0, store.numSpans - store.maxSpans); s >= end; s--) {
      const i = s % store.maxSpans;
      if (store.spanRow[i] === row && store.spanFrom[i] <= this.view.right) {
        this.pick(row, Math.min(store.spanTo[i], this.view.right));
        return;
      }
    }
  }

  tellWhere(row, time) {
    const place = row < 0 ? -1 : this.store.spanAt(row, time);
    const who = place < 0 ? "nobody" : this.store.spanKey[place];
    this.where.textContent = row < 0 ? ABOUT : `Row ${row}, ${clockText(this.store.unixAt(time), 3)}: ${who}`;
  }
}

customElements.define("scheduler-room", SchedulerRoom);
