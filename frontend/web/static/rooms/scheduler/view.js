// Which times are shown: zoom from milliseconds to minutes, panning, and following what is live.

export const MIN_SECONDS = 0.004, MAX_SECONDS = 1200;
const LAG = 0.35; // seconds behind the clock: what has just happened is not told yet
const WHOLE = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600]; // seconds between two times of the axis
const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

export class View {
  constructor() {
    this.seconds = 30; // as much as is kept while another room is open; from the left to the right border
    this.right = 0; // time of the right border
    this.isLive = true;
  }

  get left() {
    return this.right - this.seconds;
  }

  /** Go with the clock, if it is live. */
  follow(clock) {
    if (this.isLive) this.right = clock - LAG;
  }

  /** Zoom by a factor so that the time at `share` of the width stays where it is. */
  zoom(factor, share) {
    const time = this.left + share * this.seconds;
    this.seconds = Math.min(MAX_SECONDS, Math.max(MIN_SECONDS, this.seconds * factor));
    if (!this.isLive) this.right = time + (1 - share) * this.seconds;
  }

  /** Move by so many seconds: later is positive. Ends following. */
  pan(seconds) {
    this.isLive = false;
    this.right += seconds;
  }

  /** Times for the axis: [time, text], at most about `count`. `unix`: seconds since 1970 at the scheduler's zero. */
  ticks(count, unix) {
    const rough = this.seconds / count, power = 10 ** Math.floor(Math.log10(rough));
    const nice = rough < 1 ? [1, 2, 5, 10].map((each) => each * power) : WHOLE;
    const step = nice.find((each) => each >= rough) ?? WHOLE.at(-1);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const found = [];
    for (let n = Math.ceil((this.left + unix) / step); n * step <= this.right + unix; n++) {
      found.push([n * step - unix, clockText(n * step, digits)]);
    }
    return found;
  }
}

/** A time of day, with so many digits of a second's parts. */
export function clockText(unix, digits = 0) {
  const scale = 10 ** digits, scaled = Math.round(unix * scale), seconds = Math.floor(scaled / scale);
  const parts = digits ? `.${String(scaled - seconds * scale).padStart(digits, "0")}` : "";
  return CLOCK.format(seconds * 1000) + parts;
}
