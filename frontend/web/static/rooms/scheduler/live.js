// The engine's own steps, and answers to what is asked about it.

import { api } from "../../parts/api.js";

const RETRY_SECONDS = 2;
const LAST_SECONDS = 30; // of before the room was opened: see ../../parts/background.js

export class LiveSource {
  constructor(engine, onState) {
    this.query = engine ? `?engine=${encodeURIComponent(engine)}` : "";
    this.steps = `/debug/steps?last=${LAST_SECONDS}${engine && `&engine=${encodeURIComponent(engine)}`}`;
    this.onState = onState; // told "connected", or why not
  }

  async start(onBatch) {
    this.stopping = new AbortController();
    const { signal } = this.stopping;
    while (!signal.aborted) {
      try {
        for await (const event of api.events(this.steps, { signal })) {
          this.onState("");
          if (event.event === "steps") onBatch(typeof event.data === "string" ? JSON.parse(event.data) : event.data);
        }
        if (!signal.aborted) this.onState("the server has ended the stream");
      } catch (error) {
        if (signal.aborted) return;
        this.onState(error.message || String(error));
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_SECONDS * 1000));
    }
  }

  stop() {
    this.stopping?.abort();
  }

  life(key) {
    const id = encodeURIComponent(key);
    return api.get(`/debug/requests/${id}${this.query}`);
  }

  pages() {
    return api.get(`/debug/kv${this.query}`);
  }

  prefixes() {
    return api.get(`/debug/prefix_tree${this.query}`);
  }

  async engines() {
    return (await api.get("/engines")).data.map((engine) => engine.id);
  }
}
