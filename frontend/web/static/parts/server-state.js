// One line: the model, and whether its server would answer now. Also asks for the API key where one is needed.
import { ApiError, api, key } from "./api.js";
import { h, replace } from "./dom.js";

const PERIOD = 3000;

/** What is known of the server, for all rooms; "penstock-server" is sent to the window when it changes. */
export const server = { model: "", card: null, isReady: false, why: "connecting…" };

/** At the port for administrators there is no model: a card without anything. */
function nobodyAnswers(error) {
  if (error.status === 404) return {};
  throw error;
}

class ServerState extends HTMLElement {
  connectedCallback() {
    this.light = h("span", { class: "light", "aria-hidden": "true" });
    this.words = h("span", { role: "status" });
    this.dialog = this.askForKey();
    this.append(this.light, this.words, this.dialog);
    this.stop = new AbortController();
    const { signal } = this.stop;
    addEventListener("penstock-key-needed", () => this.dialog.open || this.dialog.showModal(), { signal });
    addEventListener("penstock-key", () => this.look(), { signal });
    this.watch();
  }

  disconnectedCallback() {
    this.stop.abort();
    clearTimeout(this.timer);
  }

  async watch() {
    await this.look();
    if (!this.stop.signal.aborted) this.timer = setTimeout(() => this.watch(), PERIOD);
  }

  async look() {
    const { signal } = this.stop;
    const before = JSON.stringify(server);
    try {
      if (!server.card) {
        const card = await api.get("/v1/models", { signal }).then(({ data }) => data[0], nobodyAnswers);
        Object.assign(server, { card, model: card.id ?? "" });
      }
      await api.get("/ready", { signal });
      Object.assign(server, { isReady: true, why: "" });
    } catch (error) {
      if (signal.aborted) return;
      const isGone = error instanceof ApiError && !error.status;
      Object.assign(server, { isReady: false, why: isGone ? "reconnecting…" : error.message });
      if (isGone) server.card = null; // the next server may have another model
    }
    this.light.dataset.state = server.isReady ? "ready" : "waiting";
    const words = [server.model, server.why].filter(Boolean).join(": ") || "ready";
    if (this.words.textContent !== words) this.words.textContent = this.title = words;
    if (JSON.stringify(server) !== before) dispatchEvent(new Event("penstock-server"));
  }

  askForKey() {
    const input = h("input", { type: "password", id: "api-key", autocomplete: "off", required: true });
    const dialog = h("dialog", { "aria-labelledby": "api-key-title" });
    replace(
      dialog,
      h(
        "form",
        {
          method: "dialog",
          onsubmit: () => {
            key.set(input.value.trim());
            input.value = "";
          },
        },
        h("h2", { id: "api-key-title" }, "API key"),
        h("p", {}, "This server answers only with a key. It stays in this tab, and goes nowhere else."),
        h("label", { for: "api-key" }, "Key"),
        input,
        h("p", { class: "buttons" }, h("button", { type: "submit", class: "primary" }, "Use it")),
      ),
    );
    return dialog;
  }
}

customElements.define("server-state", ServerState);
