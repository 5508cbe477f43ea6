// Which times are shown: zoom from milliseconds to minutes, panning, and following what is live.

export const MIN_SECONDS = 0.004, MAX_SECONDS = 1200;
const LAG = 0.35; // seconds behind the clock: what has just happened is not told yet

export class View {
  constructor() {
    this.seconds = 10; // from the left to the right border
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

  /** Times for the axis: [time, text], at most about `count`. */
  ticks(count, zero) {
    const rough = this.seconds / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
    const digits = Math.max(0, -Math.floor(Math.log10(step)));
    const found = [];
    for (let n = Math.ceil((this.left - zero) / step); zero + n * step <= this.right; n++) {
      found.push([zero + n * step, digits > 3 ? `${(n * step * 1e3).toFixed(digits - 3)} ms` : `${(n * step).toFixed(digits)} s`]);
    }
    return found;
  }
}
