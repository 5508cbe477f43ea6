// Prometheus' text format, read; and what can be computed from two readings of it.

const LINE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"/g;

/** Samples by name: [{labels, value}]. */
export function parse(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    const found = line[0] === "#" ? null : LINE.exec(line);
    if (!found) continue;
    const [, name, labels = "", value] = found;
    if (!samples.has(name)) samples.set(name, []);
    samples.get(name).push({
      labels: Object.fromEntries([...labels.matchAll(LABEL)].map(([, key, text]) => [key, text.replace(/\\(.)/g, (_, it) => (it === "n" ? "\n" : it))])),
      value: value === "+Inf" ? Infinity : Number(value),
    });
  }
  return samples;
}

/** The sum of a metric over all engines and labels; null if there is none. */
export function total(samples, name) {
  return samples.get(name)?.reduce((sum, { value }) => sum + value, 0) ?? null;
}

/** A metric's growth by a label, between two readings; what was started anew counts from 0. */
export function growth(before, after, name, label) {
  const found = new Map();
  const was = new Map();
  for (const { labels, value } of before?.get(name) ?? []) was.set(labels[label], (was.get(labels[label]) ?? 0) + value);
  for (const { labels, value } of after.get(name) ?? []) found.set(labels[label], (found.get(labels[label]) ?? 0) + value);
  for (const [key, value] of found) {
    const past = was.get(key) ?? 0;
    found.set(key, value >= past ? value - past : value);
  }
  return found;
}

/**
 * A quantile of a histogram's values between two readings, in the metric's unit, as Prometheus' histogram_quantile
 * estimates it: linearly within a bucket. Null if nothing was counted.
 */
export function quantile(before, after, name, q) {
  const grown = [...growth(before, after, `${name}_bucket`, "le")].map(([le, count]) => [le === "+Inf" ? Infinity : Number(le), count]);
  grown.sort(([one], [other]) => one - other);
  const all = grown.at(-1)?.[1] ?? 0;
  if (!(all > 0)) return null;
  const rank = q * all;
  let [low, below] = [0, 0];
  for (const [high, count] of grown) {
    if (count >= rank) return high === Infinity ? low : low + ((high - low) * (rank - below)) / Math.max(count - below, 1e-9);
    [low, below] = [high, count];
  }
  return low;
}
