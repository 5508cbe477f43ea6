// Rates of the last seconds, and percentiles of the requests that have ended in the last minute.

const WINDOW = 60;

/** The value below which `share` of sorted values lies; NaN if there are none. */
export function percentile(sorted, share) {
  if (!sorted.length) return NaN;
  const place = share * (sorted.length - 1), low = Math.floor(place), high = Math.min(low + 1, sorted.length - 1);
  return sorted[low] + (sorted[high] - sorted[low]) * (place - low);
}

/** What a store's totals and ended requests say: rates a second, and seconds as {p50, p90, p99}. */
export function figures(store) {
  const first = store.rates[0], last = store.rates[store.rates.length - 1];
  const seconds = first && last ? last.at - first.at : 0;
  const rate = (name) => (seconds > 0 ? (last.totals[name] - first.totals[name]) / seconds : 0);
  const since = store.now - WINDOW, recent = store.done.filter((each) => each.at >= since);
  const spread = (name) => {
    const sorted = recent.map((each) => each[name]).filter(Number.isFinite).sort((a, b) => a - b);
    return { p50: percentile(sorted, 0.5), p90: percentile(sorted, 0.9), p99: percentile(sorted, 0.99) };
  };
  let running = 0;
  for (const seq of store.live.values()) running += seq.row >= 0;
  return {
    steps: rate("steps"),
    output: rate("output_tokens"),
    prompt: rate("prompt_tokens"),
    cached: rate("cached_tokens"),
    ended: rate("completed"),
    preemptions: rate("preemptions"),
    busy: rate("device_us") / 1e6,
    running,
    waiting: store.numWaiting,
    numEnded: recent.length,
    queue: spread("queue"),
    ttft: spread("ttft"),
    tpot: spread("tpot"),
    e2e: spread("e2e"),
  };
}
