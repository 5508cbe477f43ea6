// Conversations in the browser (IndexedDB). They never leave it: the server is only sent what a request needs.

const NAME = "penstock-chats";
const HEADS = "heads"; // {id, title, created, updated}: enough for the list
const BODIES = "bodies"; // whole conversations

const asPromise = (request) =>
  new Promise((resolve, reject) => {
    request.addEventListener("success", () => resolve(request.result));
    request.addEventListener("error", () => reject(request.error));
  });

/** All conversations of this browser. Without IndexedDB (some private windows) they last as long as the page. */
export class Store {
  static async open() {
    const store = new Store();
    store.memory = new Map();
    store.lasts = true;
    try {
      const request = indexedDB.open(NAME, 1);
      request.addEventListener("upgradeneeded", () => {
        request.result.createObjectStore(HEADS, { keyPath: "id" });
        request.result.createObjectStore(BODIES, { keyPath: "id" });
      });
      store.db = await asPromise(request);
      store.db.addEventListener("versionchange", () => store.db.close());
    } catch {
      store.lasts = false;
    }
    return store;
  }

  #transact(mode, stores) {
    return this.db.transaction(stores, mode);
  }

  /** Heads of all conversations, the latest first. */
  async heads() {
    const all = this.lasts
      ? await asPromise(this.#transact("readonly", HEADS).objectStore(HEADS).getAll())
      : [...this.memory.values()];
    return all.sort((one, other) => other.updated - one.updated);
  }

  async get(id) {
    if (!this.lasts) return this.memory.get(id);
    return asPromise(this.#transact("readonly", BODIES).objectStore(BODIES).get(id));
  }

  /** Keep a conversation as it is now. */
  async put(conversation) {
    if (!this.lasts) {
      this.memory.set(conversation.id, conversation);
      return;
    }
    const { id, title, created, updated } = conversation;
    const transaction = this.#transact("readwrite", [HEADS, BODIES]);
    transaction.objectStore(HEADS).put({ id, title, created, updated });
    transaction.objectStore(BODIES).put(conversation);
    await new Promise((resolve, reject) => {
      transaction.addEventListener("complete", resolve);
      transaction.addEventListener("abort", () => reject(transaction.error));
    });
  }

  async remove(id) {
    if (!this.lasts) {
      this.memory.delete(id);
      return;
    }
    const transaction = this.#transact("readwrite", [HEADS, BODIES]);
    await Promise.all([HEADS, BODIES].map((name) => asPromise(transaction.objectStore(name).delete(id))));
  }

  /** The conversations whose title or messages have this text: their ids. */
  async search(words) {
    const wanted = words.toLowerCase();
    const has = (text) => text?.toLowerCase().includes(wanted);
    const found = new Set();
    for (const { id, title } of await this.heads()) {
      if (has(title)) {
        found.add(id);
        continue;
      }
      const body = await this.get(id);
      if (Object.values(body?.nodes ?? {}).some((node) => has(node.content))) found.add(id);
    }
    return found;
  }
}
