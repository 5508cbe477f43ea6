// Readings of /metrics and what was computed from them, for as long as the page is open: often while the room is, else
// as often as Prometheus would ask.
import { api } from "../../parts/api.js";
import { regularly } from "../../parts/background.js";
import { parse } from "./exposition.js";
import { CHARTS } from "./figures.js";

const PERIOD = 15_000;
const WINDOW = 30_000; // percentiles and rates are of so many milliseconds
const GAP = 3 * WINDOW; // after a longer pause, lines begin anew

/** The longest time that can be shown, in minutes. */
export const MOST_MINUTES = 60;

export const history = {
  points: CHARTS.map(() => []), // of each chart: [{at, values}]
  first: null, // reading: {at, samples}
  last: null,

  /** Read /metrics once more. Throws what `api` throws. */
  async read(signal) {
    const at = Date.now();
    try {
      take({ at, samples: parse(await api.text("/metrics", { signal })) });
    } catch (error) {
      if (!signal?.aborted) pause(at);
      throw error;
    }
  },
};

let readings = []; // of the last `WINDOW`, and one before

function take(reading) {
  if (history.last && reading.at - history.last.at > GAP) pause(reading.at - 1);
  history.first ??= reading;
  history.last = reading;
  readings.push(reading);
  while (readings.length > 2 && readings[1].at <= reading.at - WINDOW) readings.shift();
  const before = readings.length > 1 ? readings[0] : reading;
  const seconds = (reading.at - before.at) / 1000;
  const oldest = reading.at - MOST_MINUTES * 60_000;
  CHARTS.forEach(({ read }, i) => {
    const points = history.points[i];
    points.push({ at: reading.at, values: read(before.samples, reading.samples, seconds) });
    while (points[0].at < oldest) points.shift();
  });
}

/** Nothing is known of this time. */
function pause(at) {
  readings = [];
  for (const points of history.points) points.push({ at, values: [] });
}

/** Read now and then, whichever room is open. */
export function keepHistory() {
  regularly(async () => {
    if (!history.last || Date.now() - history.last.at > PERIOD / 2) await history.read();
  }, PERIOD);
}
