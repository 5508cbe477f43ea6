// Steps of an engine that is not there: for a look at the room, for tests, and for measuring frames a second.

const STEPS_PER_SECOND = 100, HISTORY = 120;

/** Numbers in [0, 1) that are the same in each run (mulberry32). */
function random(seed) {
  return () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let mixed = Math.imul(seed ^ (seed >>> 15), 1 | seed);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296;
  };
}

const ranges = (rows) => {
  const found = [];
  for (const row of rows) {
    const last = found[found.length - 1];
    if (last && last[1] === row - 1) last[1] = row;
    else found.push([row, row]);
  }
  return found;
};

export class SyntheticSource {
  constructor(rows) {
    this.numRows = rows;
    this.random = random(7);
    this.seqs = new Map(); // row -> {key, left, prompt}
    this.lives = new Map(); // key -> events
    this.queue = [];
    this.number = this.step = this.numKeys = 0;
    this.totals = { steps: 0, admitted: 0, completed: 0, preemptions: 0, prompt_tokens: 0, cached_tokens: 0,
      output_tokens: 0, device_us: 0 };
    this.time = 1000;
  }

  start(onBatch) {
    onBatch(this.batch(HISTORY, true));
    const origin = performance.now(), began = this.time;
    this.timer = setInterval(() => {
      onBatch(this.batch(began + (performance.now() - origin) / 1000 - this.time, this.number % 15 === 0));
    }, 200);
  }

  stop() {
    clearInterval(this.timer);
  }

  batch(seconds, isWhole) {
    const steps = [], events = [], until = this.time + seconds;
    while (this.time < until) steps.push(this.oneStep(events));
    const running = [...this.seqs].map(([row, seq]) => ({ row, key: seq.key, index: 0, arrived: seq.arrived,
      prompt_tokens: seq.prompt, computed_tokens: seq.prompt, output_tokens: seq.output }));
    const queue = this.queue.slice(0, 64).map((seq, place) => ({ key: seq.key, index: 0, arrived: seq.arrived,
      prompt_tokens: seq.prompt, reason: place ? `behind the first: its turn comes after ${place} others`
        : `no free row: ${this.numRows} of ${this.numRows} in use, the next one ends in at most about 240 ms` }));
    const reasons = this.queue.length ? { "no free row": 1, "behind the first": this.queue.length - 1 } : {};
    return { engine: "0", number: ++this.number, now: this.time, unix_time: Date.now() / 1000, steps, left_out: 0, events,
      events_left_out: 0, queue, num_waiting: this.queue.length, reasons, totals: { ...this.totals },
      picture: isWhole ? { rows: this.numRows, pages: this.numRows * 32, page_size: 16, host_pages: 512, disk_places: 0,
        running, num_running: running.length } : null };
  }

  tell(events, event) {
    const whole = { index: 0, row: -1, tokens: 0, more: 0, text: "", until: 0, ...event };
    events.push(whole);
    if (!this.lives.has(event.key)) this.lives.set(event.key, []);
    this.lives.get(event.key).push(whole);
    if (this.lives.size > 2000) this.lives.delete(this.lives.keys().next().value);
  }

  oneStep(events) {
    const chance = this.random, at = this.time, chunks = [];
    while (this.queue.length < this.numRows / 8) {
      const key = `${++this.numKeys}:synthetic-${this.numKeys}`, prompt = 20 + Math.floor(chance() * 2000);
      this.queue.push({ key, prompt, left: 20 + Math.floor(chance() * 400), arrived: at, computed: 0, output: 0 });
      this.tell(events, { at, kind: "arrived", key, tokens: prompt, more: 1 });
    }
    for (let row = 0; row < this.numRows && chunks.length < 4; row++) {
      if (this.seqs.has(row)) continue;
      if (chance() < 0.5) continue;
      const seq = this.queue.shift();
      if (!seq) break;
      this.seqs.set(row, seq);
      seq.computed = 0;
      this.totals.admitted++;
      this.totals.prompt_tokens += seq.prompt;
      this.tell(events, { at: seq.waits ?? seq.arrived, kind: "waited", key: seq.key, until: at,
        text: `no free row: ${this.numRows} of ${this.numRows} in use` });
      this.tell(events, { at, kind: "admitted", key: seq.key, row, tokens: seq.prompt });
    }
    const decodes = [], guesses = [];
    const took = 0.004 + 0.002 * chance();
    for (const [row, seq] of [...this.seqs].sort((a, b) => a[0] - b[0])) {
      if (seq.computed < seq.prompt) {
        const count = Math.min(512, seq.prompt - seq.computed);
        seq.computed += count;
        chunks.push([row, count]);
        if (seq.computed === seq.prompt) {
          this.tell(events, { at: at + took, kind: "first token", key: seq.key, tokens: 1 });
          seq.output = 1;
        }
        continue;
      }
      decodes.push(row);
      const came = row % 16 === 3 && chance() < 0.3 ? 3 : 1;
      if (came > 1) guesses.push([row, 3, came]);
      seq.output += came;
      this.totals.output_tokens += came;
      if (seq.output >= seq.left) {
        this.tell(events, { at: at + took, kind: "finished", key: seq.key, tokens: seq.output, text: "length" });
        this.seqs.delete(row);
        this.totals.completed++;
      } else if (chance() < 0.00004) {
        this.tell(events, { at: at + took, kind: "preempted", key: seq.key, tokens: seq.output,
          text: `${chance() < 0.5 ? "swapped: " : ""}no free pages` });
        this.seqs.delete(row);
        this.queue.unshift({ ...seq, waits: at + took });
        this.totals.preemptions++;
      }
    }
    const pause = chance() < 0.02 ? 0.03 : 1 / STEPS_PER_SECOND - 0.005;
    this.time += Math.max(took, pause);
    this.totals.steps++;
    this.totals.device_us += took * 1e6;
    const used = this.seqs.size * 30;
    return { id: this.step++, left_out: 0, sent: at, returned: at + took, plan_us: 90, forward_us: took * 1e6,
      idle_us: (pause - took) * 1e6, decodes: ranges(decodes), chunks, guesses, waiting: this.queue.length,
      free_pages: Math.max(0, this.numRows * 32 - used - 500), cached_pages: 500, host_pages: [300, 200], to_host: 0,
      from_host: 0 };
  }

  async life(key) {
    const events = this.lives.get(key) ?? [];
    const isLive = !events.some((event) => event.kind === "finished");
    return { engine: "0", id: key.split(":")[1], key, now: this.time, unix_time: Date.now() / 1000, is_live: isLive,
      is_watched: true, events, events_left_out: 0 };
  }

  async pages() {
    const owners = [...this.seqs.values()].map((seq) => ({ key: seq.key, index: 0, pages: 30 }));
    const runs = owners.map((_, owner) => ["owned", owner, 0, 28]);
    runs.splice(3, 0, ["shared", -1, 0, 40]);
    runs.push(["cached", -1, 0, 500]);
    const pages = this.numRows * 32, used = runs.reduce((sum, run) => sum + run[3], 0);
    runs.push(["free", -1, -1, Math.max(0, pages - used)]);
    const counts = { free: pages - used, cached: 500, shared: 40, held: 0, owned: owners.length * 28 };
    return { engine: "0", page_size: 16, owners, disk: {}, tiers: [
      { tier: "device", pages, cell: 1, runs, counts },
      { tier: "host", pages: 512, cell: 1, runs: [["cached", -1, -1, 200], ["free", -1, -1, 312]],
        counts: { free: 312, cached: 200, shared: 0, held: 0, owned: 0 } },
    ] };
  }

  async prefixes() {
    const node = (parent, tokens, below, users, hits, text, children, namespace = "") => ({ parent, tokens,
      tokens_below: below, users, hits, last_used_seconds: users ? 0 : 12.5, text, children, namespace });
    return { engine: "0", page_size: 16, pages: 500, namespaces: 1, is_whole: true, nodes: [
      node(-1, 0, 8000, 3, 120, "", 2), node(0, 2048, 4000, 3, 90, "You are a helpful assistant. Answer briefly.", 2),
      node(0, 1952, 0, 0, 30, "Translate the following text into French:", 0),
      node(1, 1600, 0, 2, 40, "User: what is a page table?", 0), node(1, 2400, 0, 1, 20, "User: sort this list.", 0),
    ] };
  }

  async engines() {
    return ["0"];
  }
}
