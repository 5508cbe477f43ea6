// The list of conversations: new, search, delete, export and import.
import { h, replace } from "../../parts/dom.js";

const SEARCH_PAUSE = 200;

/** `acts`: create, open(id), remove(id), exportOne, exportAll, importFile. */
export class Sidebar {
  constructor(store, acts) {
    Object.assign(this, { store, acts, current: "" });
    this.search = h("input", { type: "search", id: "chat-search", placeholder: "Search chats", "aria-label": "Search chats", autocomplete: "off" });
    this.search.addEventListener("input", () => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.show(), SEARCH_PAUSE);
    });
    this.list = h("ul", { class: "chats" });
    this.empty = h("p", { class: "muted", role: "status" });
    this.element = h(
      "nav",
      { class: "side", "aria-label": "Chats", id: "chats" },
      h("button", { type: "button", class: "primary", onclick: acts.create }, "New chat"),
      this.search,
      this.list,
      this.empty,
      h(
        "p",
        { class: "buttons" },
        h("button", { type: "button", onclick: acts.importFile }, "Import"),
        h("button", { type: "button", title: "Export the chat that is open", onclick: acts.exportOne }, "Export"),
        h("button", { type: "button", onclick: acts.exportAll }, "Export all"),
      ),
    );
  }

  /** Bring the list up to date; `current` is the conversation that is open. */
  async show(current = this.current) {
    this.current = current;
    const words = this.search.value.trim();
    const turn = (this.turn = (this.turn ?? 0) + 1);
    const [heads, found] = await Promise.all([this.store.heads(), words ? this.store.search(words) : null]);
    if (turn !== this.turn) return; // a later call is under way
    const shown = heads.filter(({ id }) => !found || found.has(id));
    replace(this.list, shown.map((head) => this.#item(head)));
    const hint = this.store.lasts ? "Chats stay in this browser." : "This window keeps no data: chats end with the page.";
    this.empty.textContent = words && !shown.length ? "No chat has that." : heads.length ? "" : hint;
  }

  #item({ id, title, updated }) {
    const name = title || "New chat";
    return h(
      "li",
      {},
      h(
        "button",
        {
          type: "button",
          class: "chat",
          "aria-current": id === this.current ? "true" : null,
          title: new Date(updated).toLocaleString(),
          onclick: () => this.acts.open(id),
        },
        name,
      ),
      h("button", { type: "button", class: "quiet", "aria-label": `Delete ${name}`, onclick: () => this.acts.remove(id) }, "×"),
    );
  }
}
