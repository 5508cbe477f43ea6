// Which figures the room shows, and how they come from two readings of /metrics.
import { duration, short } from "../../parts/dom.js";
import { growth, quantile, total } from "./exposition.js";

const percent = (share) => `${Number((share * 100).toPrecision(3))} %`;
const P = [0.5, 0.9, 0.99];
const percentiles = (name) => (before, after) => P.map((q) => quantile(before, after, name, q));
const rate = (before, after, seconds, name) => {
  const [was, is] = [total(before, name), total(after, name)];
  return is === null || seconds <= 0 ? null : Math.max(is >= (was ?? 0) ? is - (was ?? 0) : is, 0) / seconds;
};

/** `read(before, after, seconds)` gives the values of the series, null where there is none. */
export const CHARTS = [
  {
    title: "Requests", about: "Sequences that have a row of the batch, and those that wait for one.",
    series: ["running", "waiting", "paused"], format: short, least: 4,
    read: (_, after) => ["running", "waiting", "paused"].map((name) => total(after, `penstock_num_requests_${name}`)),
  },
  {
    title: "Tokens per second", about: "Generated, and of prompts that were admitted (from the prefix cache too).",
    series: ["generated", "prompt"], format: short, least: 10,
    read: (...readings) => ["generation", "prompt"].map((name) => rate(...readings, `penstock_engine_${name}_tokens_total`)),
  },
  {
    title: "Time to first token", about: "From a request's arrival; percentiles of those whose answers ended.",
    series: ["p50", "p90", "p99"], format: duration, read: percentiles("penstock_time_to_first_token_seconds"),
  },
  {
    title: "Time between tokens", about: "Of each sequence.",
    series: ["p50", "p90", "p99"], format: duration, read: percentiles("penstock_inter_token_latency_seconds"),
  },
  {
    title: "Whole answers", about: "From a request's arrival to the end of its answer.",
    series: ["p50", "p90", "p99"], format: duration, read: percentiles("penstock_e2e_request_latency_seconds"),
  },
  {
    title: "KV pool", about: "Share of the pages that running sequences use, and that only the prefix cache holds.",
    series: ["in use", "cached"], format: percent, least: 1,
    read(_, after) {
      const pages = total(after, "penstock_num_pages");
      return ["used", "cached"].map((name) => (pages ? total(after, `penstock_num_${name}_pages`) / pages : null));
    },
  },
  {
    title: "Prefix cache", about: "Share of the prompts' tokens that were found in it.",
    series: ["hits"], format: percent, least: 1,
    read(...readings) {
      const all = rate(...readings, "penstock_engine_prompt_tokens_total");
      return [all ? rate(...readings, "penstock_prefix_cache_hits_total") / all : null];
    },
  },
  {
    title: "Preemptions per second", about: "Sequences that lost their pages; should hardly happen.",
    series: ["preemptions"], format: short, least: 1,
    read: (...readings) => [rate(...readings, "penstock_num_preemptions_total")],
  },
];

/** Answers to requests between two readings, by status, and the errors by endpoint: [endpoint, status, count]. */
export function statuses(before, after) {
  const key = (samples) =>
    new Map([["all", (samples?.get("penstock_requests_total") ?? []).map(({ labels, value }) => ({ labels: { key: `${labels.endpoint}\n${labels.status}` }, value }))]]);
  return [...growth(key(before), key(after), "all", "key")]
    .map(([name, count]) => [...name.split("\n"), count])
    .filter(([endpoint, , count]) => count > 0 && endpoint.startsWith("/"))
    .sort((one, other) => other[2] - one[2]);
}
