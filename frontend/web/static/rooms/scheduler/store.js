// What the timeline draws, in typed arrays that are filled like rings: the oldest goes when there is no room.
//
//   step  s   sent, returned, ... and its cells [cellFrom, cellTo)
//   cell      rows [first, last] that did the same thing in a step
//   span      a sequence in a row, from its admission until it left
//   mark      something that happened at one moment

export const DECODE = 0, PREFILL = 1, ACCEPTED = 2;
export const PREEMPTED = 0, SWAPPED = 1, FIRST_TOKEN = 2, FINISHED = 3, ADMITTED = 4;

const MARK_OF = { "first token": FIRST_TOKEN, finished: FINISHED, admitted: ADMITTED };
const MAX_DONE = 2000; // requests whose times are kept for percentiles
const REPEATED = 60; // seconds
const MAX_TOPS = 6000; // messages of which the highest row is kept: those of twenty minutes

export class Store {
  constructor({ steps = 1 << 16, cells = 1 << 19, spans = 1 << 14, marks = 1 << 14 } = {}) {
    this.maxSteps = steps;
    this.maxCells = cells;
    this.maxSpans = spans;
    this.maxMarks = marks;
    this.sent = new Float64Array(steps);
    this.returned = new Float64Array(steps);
    this.until = new Float64Array(steps); // of what is drawn: steps that are not told looked alike
    this.forward = new Float32Array(steps); // milliseconds
    this.idle = new Float32Array(steps);
    this.leftOut = new Uint32Array(steps);
    this.busy = new Float64Array(steps); // seconds of the device until `until`
    this.tokens = new Uint32Array(steps);
    this.ids = new Uint32Array(steps);
    this.cellFrom = new Float64Array(steps);
    this.cellTo = new Float64Array(steps);
    this.first = new Uint16Array(cells);
    this.last = new Uint16Array(cells);
    this.kind = new Uint8Array(cells);
    this.amount = new Uint16Array(cells);
    this.spanRow = new Int32Array(spans);
    this.spanFrom = new Float64Array(spans);
    this.spanTo = new Float64Array(spans);
    this.spanKey = new Array(spans);
    this.markAt = new Float64Array(marks);
    this.markRow = new Int32Array(marks);
    this.markKind = new Uint8Array(marks);
    this.clear();
  }

  clear() {
    this.numSteps = this.numCells = this.numSpans = this.numMarks = 0;
    this.rows = 0;
    this.pages = this.pageSize = 0;
    this.now = 0;
    this.since = 0; // what was before is not known; 0: nothing is
    this.tops = []; // {from, to, row}: the highest row that somebody had, or -1
    this.top = -1;
    this.clockAt = 0; // performance.now() of `now`
    this.unixTime = 0;
    this.queue = [];
    this.numWaiting = 0;
    this.reasons = {};
    this.totals = {};
    this.rates = [];
    this.live = new Map(); // name -> {key, index, row, span, arrived, admitted, first, prompt, output}
    this.byRow = new Map(); // row -> name
    this.done = []; // {at, queue, ttft, tpot, e2e} in seconds
    this.lostBatches = this.lastNumber = 0;
    this.changedFrom = -Infinity; // what was drawn of times from here on is not right any more
    this.freePages = this.cachedPages = 0;
    this.hostPages = [0, 0];
  }

  // --- reading -------------------------------------------------------------------------------

  get firstStep() {
    return Math.max(0, this.numSteps - this.maxSteps);
  }

  /** The scheduler's time at this moment, as far as it can be known here. */
  clock() {
    return this.clockAt ? this.now + (performance.now() - this.clockAt) / 1000 : 0;
  }

  /** The first step that is drawn until after `time`. */
  stepAt(time) {
    let low = this.firstStep, high = this.numSteps;
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (this.until[middle % this.maxSteps] < time) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  /** The place of the span that has a row at a time, or -1. */
  spanAt(row, time) {
    for (let s = this.numSpans - 1, end = Math.max(0, this.numSpans - this.maxSpans); s >= end; s--) {
      const i = s % this.maxSpans;
      if (this.spanRow[i] === row && this.spanFrom[i] <= time && time <= this.spanTo[i]) return i;
    }
    return -1;
  }

  /** The highest row that somebody had between these times; -1: nobody had any. */
  highestRow(from, to) {
    let row = -1;
    for (let place = this.tops.length - 1; place >= 0 && this.tops[place].to >= from; place--) {
      if (this.tops[place].from <= to) row = Math.max(row, this.tops[place].row);
    }
    return row;
  }

  /** When somebody had a row last; 0: never, as far as is known. */
  lastActive() {
    return this.tops.findLast(({ row }) => row >= 0)?.to ?? 0;
  }

  /** Seconds since 1970 at a time of the scheduler's clock. */
  unixAt(time) {
    return time + this.unixTime - this.now;
  }

  // --- filling -------------------------------------------------------------------------------

  /** One message of /debug/steps. */
  add(batch) {
    const isKnown = batch.number <= this.lastNumber && batch.now <= this.now && batch.now > this.now - REPEATED;
    if (isKnown) return; // a stream that was taken up again begins with its last seconds
    if (this.now && batch.now < this.now - 1) this.clear(); // another scheduler, with another clock
    if (this.lastNumber && batch.number > this.lastNumber + 1) this.lostBatches += batch.number - this.lastNumber - 1;
    this.lastNumber = batch.number;
    this.changed(this.now);
    const from = this.now || Math.min(batch.now, batch.steps[0]?.sent ?? batch.now);
    this.since ||= from;
    this.top = -1;
    this.now = batch.now;
    this.clockAt = performance.now();
    this.unixTime = batch.unix_time;
    this.queue = batch.queue;
    this.numWaiting = batch.num_waiting;
    this.reasons = batch.reasons;
    this.totals = batch.totals;
    this.rates.push({ at: batch.now, totals: batch.totals });
    while (this.rates.length > 2 && this.rates[0].at < batch.now - 10) this.rates.shift();
    for (const event of batch.events) this.addEvent(event);
    for (const step of batch.steps) this.addStep(step);
    if (batch.picture) this.addPicture(batch.picture);
    for (const row of this.byRow.keys()) this.top = Math.max(this.top, row);
    this.tops.push({ from, to: batch.now, row: this.top });
    if (this.tops.length > MAX_TOPS) this.tops.splice(0, MAX_TOPS / 2);
  }

  /** Something is known of this time that was not. */
  changed(time) {
    this.changedFrom = Math.min(this.changedFrom, time);
  }

  addStep(step) {
    const i = this.numSteps % this.maxSteps, before = (this.numSteps - 1 + this.maxSteps) % this.maxSteps;
    this.changed(this.numSteps ? Math.min(step.sent, this.returned[before]) : step.sent);
    if (this.numSteps && step.left_out) {
      this.until[before] = Math.max(this.until[before], step.sent - step.idle_us / 1e6); // then the device had nothing
      const room = this.until[before] - this.sent[before], took = this.forward[before] / 1000;
      this.busy[before] = Math.min(room, (1 + step.left_out) * took);
    }
    this.sent[i] = step.sent;
    this.returned[i] = this.until[i] = step.returned;
    this.forward[i] = step.forward_us / 1000;
    this.idle[i] = step.idle_us / 1000;
    this.busy[i] = Math.min(step.forward_us / 1e6, step.returned - step.sent);
    this.leftOut[i] = step.left_out;
    this.ids[i] = step.id;
    this.cellFrom[i] = this.numCells;
    let tokens = 0;
    for (const [first, last] of step.decodes) {
      this.addCell(first, last, DECODE, 1);
      tokens += last - first + 1;
    }
    for (const [row, guessed, came] of step.guesses) {
      if (came > 1) this.addCell(row, row, ACCEPTED, came);
      tokens += Math.max(0, came - 1);
    }
    for (const [row, count] of step.chunks) {
      this.addCell(row, row, PREFILL, count);
      tokens += count;
    }
    this.tokens[i] = tokens;
    this.cellTo[i] = this.numCells;
    this.freePages = step.free_pages;
    this.cachedPages = step.cached_pages;
    this.hostPages = step.host_pages;
    this.numSteps++;
  }

  addCell(first, last, kind, amount) {
    const c = this.numCells++ % this.maxCells;
    this.first[c] = first;
    this.last[c] = last;
    this.kind[c] = kind;
    this.amount[c] = Math.min(amount, 65535);
    this.rows = Math.max(this.rows, last + 1);
    this.top = Math.max(this.top, last);
  }

  addEvent(event) {
    if (event.kind !== "arrived" && event.kind !== "waited") this.changed(event.at);
    if (event.kind === "worker lost") {
      for (const seq of this.live.values()) this.leave(seq, event.at);
      return;
    }
    const name = `${event.key}/${event.index}`;
    if (event.kind === "arrived") {
      for (let index = 0; index < Math.max(1, event.more); index++) {
        this.live.set(`${event.key}/${index}`, this.newcomer(event.key, index, event.at, event.tokens));
      }
      return;
    }
    const seq = this.live.get(name);
    if (!seq) return;
    switch (event.kind) {
      case "admitted":
        if (!seq.admitted) seq.admitted = event.at;
        this.enter(seq, event.row, event.at);
        this.addMark(ADMITTED, event.row, event.at);
        break;
      case "first token":
        seq.first = event.at;
        this.addMark(FIRST_TOKEN, seq.row, event.at);
        break;
      case "preempted":
        this.addMark(event.text.startsWith("swapped") ? SWAPPED : PREEMPTED, seq.row, event.at);
        this.leave(seq, event.at);
        break;
      case "paused":
        this.leave(seq, event.at);
        break;
      case "finished":
        this.addMark(FINISHED, seq.row, event.at);
        this.leave(seq, event.at);
        this.live.delete(name);
        this.note(seq, event);
    }
  }

  newcomer(key, index, arrived, prompt) {
    return { key, index, row: -1, span: -1, arrived, admitted: 0, first: 0, prompt, output: 0 };
  }

  note(seq, event) {
    if (!seq.first || event.text.startsWith("error") || event.text === "abort") return;
    this.done.push({
      at: event.at,
      queue: seq.admitted - seq.arrived,
      ttft: seq.first - seq.arrived,
      tpot: event.tokens > 1 ? (event.at - seq.first) / (event.tokens - 1) : NaN,
      e2e: event.at - seq.arrived,
    });
    if (this.done.length > MAX_DONE) this.done.splice(0, MAX_DONE / 2);
  }

  addPicture(picture) {
    this.rows = picture.rows;
    this.pages = picture.pages;
    this.pageSize = picture.page_size;
    const there = new Set();
    for (const row of picture.running) {
      const name = `${row.key}/${row.index}`;
      there.add(name);
      let seq = this.live.get(name);
      if (!seq) {
        seq = this.newcomer(row.key, row.index, row.arrived, row.prompt_tokens);
        this.live.set(name, seq);
      }
      seq.output = row.output_tokens;
      seq.computed = row.computed_tokens;
      if (seq.row !== row.row) this.enter(seq, row.row, this.now);
    }
    if (picture.running.length === picture.num_running) {
      for (const [name, seq] of this.live) {
        if (seq.row >= 0 && !there.has(name)) {
          this.leave(seq, this.now);
          this.live.delete(name);
        }
      }
    }
  }

  enter(seq, row, at) {
    this.leave(seq, at);
    const before = this.live.get(this.byRow.get(row));
    if (before && before !== seq) this.leave(before, at);
    const i = this.numSpans++ % this.maxSpans;
    this.spanRow[i] = row;
    this.spanFrom[i] = at;
    this.spanTo[i] = Infinity;
    this.spanKey[i] = `${seq.key}/${seq.index}`;
    seq.row = row;
    seq.span = i;
    this.byRow.set(row, this.spanKey[i]);
    this.rows = Math.max(this.rows, row + 1);
    this.top = Math.max(this.top, row);
  }

  leave(seq, at) {
    if (seq.row < 0) return;
    if (this.spanKey[seq.span] === `${seq.key}/${seq.index}`) this.spanTo[seq.span] = at;
    this.byRow.delete(seq.row);
    seq.row = seq.span = -1;
  }

  addMark(kind, row, at) {
    const i = this.numMarks++ % this.maxMarks;
    this.markAt[i] = at;
    this.markRow[i] = row;
    this.markKind[i] = kind;
  }
}
