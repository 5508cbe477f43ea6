// One answer while it comes: reads the stream into messages, and goes on after the server was away.
import { ApiError, api } from "../../parts/api.js";
import { newId } from "./conversation.js";
import { requestOf } from "./request.js";

const LONGEST_WAIT = 5000;

const sleep = (milliseconds, signal) =>
  new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => (clearTimeout(timer), reject(signal.reason)), { once: true });
  });

/** Fill a message, `node`, with the answer to `path`. `nodeFor(i)` gives the message of choice i, `changed` is called often. */
export class Answer {
  constructor({ settings, path, node, model, nodeFor, changed }) {
    Object.assign(this, { settings, path, node, model, nodeFor, changed });
    this.stopper = new AbortController();
    this.start = { content: node.content, tokens: [...(node.tokens ?? [])] };
  }

  stop() {
    this.stopper.abort();
    const { stream } = this; // it outlives its connection: the server is told
    if (stream && (stream.last || !this.first)) api.get(`/v1/streams/${stream.id}`, { method: "DELETE" }).catch(() => {});
  }

  /** Until the answer has ended, was stopped, or has failed: nothing is thrown, the message tells. */
  async run() {
    const { node } = this;
    node.isLive = true;
    try {
      for (;;) {
        try {
          await this.#stream();
          break;
        } catch (error) {
          const isAway = error instanceof ApiError && (error.status === 0 || error.status === 503);
          if (!isAway) throw error;
          await this.#wait(error);
        }
      }
    } catch (error) {
      if (this.stopper.signal.aborted) node.finish = "stopped";
      else Object.assign(node, { finish: "error", error: error.message });
    }
    for (const each of this.nodes ?? [node]) {
      delete each.isLive;
      delete each.waiting;
      if (this.stopper.signal.aborted) each.finish ||= "stopped";
    }
    this.#measure();
    this.changed();
  }

  /** Until the server is ready again. What it has said so far is continued, where that can be. */
  async #wait(error) {
    const { node, stopper } = this;
    node.waiting = `${error.message}; waiting for the server`;
    this.changed();
    for (let wait = 500; ; wait = Math.min(wait * 2, LONGEST_WAIT)) {
      await sleep(wait, stopper.signal);
      try {
        await api.get("/ready", { signal: stopper.signal });
        break;
      } catch {
        if (stopper.signal.aborted) throw error;
      }
    }
    delete node.waiting;
    if (!this.stream?.last) this.#startAgain();
    this.changed();
  }

  /** The stream is gone: what has come is continued where that can be, else forgotten. */
  #startAgain() {
    const { node } = this;
    this.stream = null;
    const isPlain = node.content && !node.reasoning && !node.tool_calls && !this.settings.form && (this.nodes?.length ?? 1) === 1;
    if (!isPlain) {
      for (const each of this.nodes ?? [node]) {
        Object.assign(each, { content: "", reasoning: "", tokens: [], finish: "" });
        delete each.tool_calls;
      }
      Object.assign(node, this.start, { tokens: [...this.start.tokens] });
    }
  }

  async #stream() {
    if (this.stream) {
      const { id, last } = this.stream;
      try {
        await this.#read(`/v1/streams/${id}`, { headers: { "Last-Event-ID": last } });
        return;
      } catch (error) {
        if (![404, 410].includes(error.status)) throw error;
        this.#startAgain();
      }
    }
    const { node, settings, path, model } = this;
    const body = requestOf(settings, path, { model, prefix: node.content, reasoning: node.reasoning });
    const spent = (node.tokens?.length ?? 0) - this.start.tokens.length;
    if (body.max_tokens > 0 && spent > 0) body.max_tokens = Math.max(body.max_tokens - spent, 1);
    this.nodes = [node];
    this.began = performance.now();
    this.first = this.last = null;
    this.chunks = 0;
    this.stream = { id: newId(), last: "" };
    await this.#read("/v1/chat/completions", { method: "POST", body, headers: { "X-Resumable": "true", "X-Request-Id": this.stream.id } });
  }

  async #read(address, options) {
    let isDone = false;
    for await (const { id, data } of api.events(address, { ...options, signal: this.stopper.signal })) {
      if (data === "[DONE]") {
        isDone = true;
        break;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message, { ...chunk.error, status: statusOf(chunk.error) });
      this.#take(chunk);
      if (this.stream) this.stream.last = id;
    }
    if (!isDone) throw new ApiError("the stream broke off");
  }

  #take(chunk) {
    this.node.model = chunk.model;
    for (const choice of chunk.choices ?? []) {
      const node = (this.nodes[choice.index] ??= this.nodeFor(choice.index));
      node.isLive = true;
      const { content, reasoning, reasoning_content: older, tool_calls: calls } = choice.delta ?? {};
      if (content) node.content += content;
      if (reasoning ?? older) node.reasoning = (node.reasoning ?? "") + (reasoning ?? older);
      for (const call of calls ?? []) addCall(node, call);
      if (choice.logprobs?.content) (node.tokens ??= []).push(...choice.logprobs.content.map(tokenOf));
      if (content || reasoning || older || calls) {
        this.last = performance.now();
        this.first ??= this.last;
        this.chunks++;
      }
      if (choice.finish_reason) node.finish = choice.finish_reason;
    }
    if (chunk.usage) this.usage = chunk.usage;
    this.changed();
  }

  /** What the answer took: as the server says, or, for one that was stopped, as it was seen here. */
  #measure() {
    const { usage, node, first, last } = this;
    const seen = { ttft_ms: first && first - this.began, output_ms: first && last - first, completion_tokens: this.chunks };
    const { timings, bill } = usage ?? {};
    const found = usage
      ? {
          ttft_ms: timings?.ttft_ms,
          output_ms: timings?.output_ms,
          completion_tokens: usage.completion_tokens,
          prompt_tokens: usage.prompt_tokens,
          cached_tokens: usage.prompt_tokens_details?.cached_tokens,
          ...bill,
        }
      : first && seen;
    if (!found) return;
    node.figures = Object.fromEntries(Object.entries(found).filter(([, value]) => typeof value === "number"));
  }
}

// An error within a stream has no status of its own: those that pass are told by their type.
const statusOf = ({ type, code }) => (type === "service_unavailable_error" || ["unavailable", "shutting_down"].includes(code) ? 503 : 500);

function addCall(node, { index, id, function: part }) {
  const call = ((node.tool_calls ??= [])[index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
  if (id) call.id = id;
  call.function.name += part?.name ?? "";
  call.function.arguments += part?.arguments ?? "";
}

const tokenOf = ({ token, logprob, bytes, top_logprobs: best = [] }) => ({
  ...{ text: token, logprob, bytes },
  others: best.map((other) => ({ text: other.token, logprob: other.logprob, bytes: other.bytes })),
});

/** The text up to token `index`, with `other` in its place; null where that is not whole characters. */
export function textWith(node, index, other) {
  const bytes = [...node.tokens.slice(0, index), other].map((token) => token.bytes);
  if (bytes.includes(null) || bytes.includes(undefined)) return null;
  const before = node.prefix ?? "";
  try {
    return before + new TextDecoder("utf-8", { fatal: true }).decode(new Uint8Array(bytes.flat()));
  } catch {
    return null;
  }
}
