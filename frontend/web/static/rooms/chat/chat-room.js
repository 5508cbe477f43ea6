// The room where one talks with the model: chats at one side, messages, settings at the other.
import { choose as chooseFile, download, h, replace } from "../../parts/dom.js";
import { server } from "../../parts/server-state.js";
import { Composer, grow } from "./composer.js";
import { families, fromFile, newConversation, openCalls, pathTo, toFile } from "./conversation.js";
import { MessageView } from "./message-view.js";
import { examplesFor } from "./examples.js";
import { find, placeOf, sessionOf, theStore } from "./session.js";
import "./settings-panel.js";
import { Sidebar } from "./sidebar.js";

const LAST_SETTINGS = "chat-settings";
const LAST_OPEN = "chat-open";
const NEAR_END = 80; // pixels: so near the end, the view follows what comes
const UNDO_SECONDS = 10;

class ChatRoom extends HTMLElement {
  async connectedCallback() {
    this.stopper = new AbortController();
    const { signal } = this.stopper;
    this.views = new Map();
    this.store = await theStore();
    if (signal.aborted) return;
    this.#build();
    addEventListener("keydown", (event) => this.#keys(event), { signal });
    addEventListener("hashchange", () => this.#follow(), { signal });
    addEventListener("penstock-server", () => this.#showServer(), { signal });
    document.addEventListener("visibilitychange", () => this.session?.save(true), { signal });
    const last = sessionStorage.getItem(LAST_OPEN);
    if (last && !location.hash.includes("?") && (await find(last))) history.replaceState(null, "", `#/chat?c=${last}`);
    await this.#follow();
  }

  disconnectedCallback() {
    this.stopper.abort();
    this.listening?.abort();
  }

  #build() {
    const acts = {
      create: () => this.#create(),
      open: (id) => this.#go(id),
      remove: (id) => this.#removeChat(id),
      exportOne: () => this.#export(),
      exportAll: () => this.#exportAll(),
      importFile: () => this.#import(),
    };
    this.sidebar = new Sidebar(this.store, acts);
    this.composer = new Composer({ send: (text, images) => this.#send(text, images), stop: () => this.session.stop() });
    this.heading = h("textarea", { class: "title", rows: 1, "aria-label": "Title of this chat", placeholder: "New chat", maxlength: 200, onchange: () => this.#rename() });
    this.heading.addEventListener("keydown", (event) => {
      if (event.key !== "Enter") return;
      event.preventDefault();
      this.heading.blur();
    });
    this.heading.addEventListener("input", () => grow(this.heading));
    this.thread = h("div", { class: "thread", tabindex: "0", role: "region", "aria-label": "Messages" });
    this.thread.addEventListener("scroll", () => (this.follows = this.#isAtEnd()), { passive: true });
    this.said = h("p", { class: "visually-hidden", role: "status" });
    this.alert = h("div", { class: "notice", role: "alert", hidden: true });
    this.settings = h("chat-settings", { class: "side", id: "settings", role: "region", "aria-label": "Settings" });
    this.settings.addEventListener("settings", () => this.#keepSettings());
    const opener = (id, label, sign) => h(
      "button",
      { type: "button", class: "opener", "aria-label": label, title: label, "aria-controls": id, "aria-expanded": "false", onclick: () => this.#turnSide(id) },
      h("span", { class: "sign", "aria-hidden": "true" }, sign), h("span", { class: "word" }, label),
    );
    this.openers = { chats: opener("chats", "Chats", "☰"), settings: opener("settings", "Settings", "⚙") };
    replace(
      this,
      this.sidebar.element,
      h(
        "section",
        { class: "talk", "aria-label": "Chat" },
        h("div", { class: "talk-bar" }, this.openers.chats, this.heading, this.openers.settings),
        this.thread,
        this.alert,
        this.said,
        this.composer.element,
      ),
      this.settings,
    );
    this.#turnSide("settings", localStorage.getItem("chat-side") === "open" && innerWidth > 1000);
  }

  // --- which chat is open ---------------------------------------------------------------------

  #go(id) {
    this.#turnSide("chats", false);
    location.hash = id ? `#/chat?c=${id}` : "#/chat";
  }

  async #follow() {
    if (location.hash && !/^#\/?chat/.test(location.hash)) return;
    const id = new URLSearchParams(location.hash.split("?")[1] ?? "").get("c");
    if (this.session && id === this.session.conversation.id) return;
    const found = id ? await find(id) : null;
    if (this.stopper.signal.aborted) return;
    if (id && !found) this.#tell("That chat is not in this browser.");
    this.#open(found ?? newConversation(lastSettings()));
  }

  #create() {
    if (location.hash.includes("?c=")) this.#go("");
    else this.#open(newConversation(lastSettings()));
    this.composer.input.focus();
  }

  #open(conversation) {
    this.listening?.abort();
    this.listening = new AbortController();
    const { signal } = this.listening;
    this.session = sessionOf(conversation);
    if (conversation.leaf) sessionStorage.setItem(LAST_OPEN, conversation.id);
    else sessionStorage.removeItem(LAST_OPEN);
    this.session.addEventListener("change", () => this.#refreshSoon(), { signal });
    this.session.addEventListener("kept", () => this.#kept(), { signal });
    this.session.addEventListener("problem", ({ detail }) => this.#tell(detail, "error"), { signal });
    this.session.addEventListener("end", ({ detail }) => this.#ended(detail), { signal });
    this.views.clear();
    replace(this.thread);
    this.settings.show(conversation.settings);
    this.follows = true;
    this.sidebar.show(conversation.id);
    this.#refresh();
  }

  #kept() {
    const { id, title } = this.session.conversation;
    if (!location.hash.includes(id)) history.replaceState(null, "", `#/chat?c=${id}`);
    sessionStorage.setItem(LAST_OPEN, id);
    const known = `${id} ${title}`;
    if (this.known !== known) this.sidebar.show(id);
    this.known = known;
  }

  // --- what is shown --------------------------------------------------------------------------

  #refreshSoon() {
    this.frame ||= requestAnimationFrame(() => this.#refresh());
  }

  #refresh() {
    this.frame = 0;
    if (this.stopper.signal.aborted) return;
    const { conversation } = this.session;
    const path = pathTo(conversation);
    const below = families(conversation);
    const calls = openCalls(conversation);
    const views = path.map((node) => this.#viewOf(node));
    path.forEach((node, i) => views[i].show(placeOf(conversation, node, below), i === path.length - 1, calls));
    const elements = views.map((view) => view.element);
    if (!elements.length) replace(this.thread, this.#welcome());
    else if (elements.length !== this.thread.children.length || elements.some((element, i) => element !== this.thread.children[i])) replace(this.thread, elements);
    if (document.activeElement !== this.heading && this.heading.value !== conversation.title) {
      this.heading.value = conversation.title;
      grow(this.heading);
    }
    this.composer.show(this.session.isLive);
    if (this.session.isLive && !this.wasLive) this.said.textContent = "The model is answering.";
    this.wasLive = this.session.isLive;
    if (this.follows) this.thread.scrollTop = this.thread.scrollHeight;
  }

  #viewOf(node) {
    if (!this.views.has(node.id)) {
      const { session } = this;
      const acts = {
        edit: (...args) => session.edit(...args),
        regenerate: (...args) => session.regenerate(...args),
        goOn: (...args) => session.goOn(...args),
        branch: (...args) => session.branch(...args),
        answerCalls: (...args) => session.answerCalls(...args),
        turn: (id) => session.turn(id),
        remove: (at) => this.#removeMessage(at),
        refresh: () => this.#refresh(),
      };
      this.views.set(node.id, new MessageView(node, acts));
    }
    return this.views.get(node.id);
  }

  #welcome() {
    const model = h("p", { class: "welcome-model muted" });
    const questions = h("div", { class: "questions", role: "group", "aria-label": "Examples" });
    const welcome = h("div", { class: "welcome" }, h("h2", {}, "What shall the model answer?"), model, questions);
    this.#fillWelcome(welcome);
    return welcome;
  }

  /** The model's name, and questions that it can answer: pressing one sends it. */
  #fillWelcome(welcome) {
    welcome.querySelector(".welcome-model").textContent = server.model || "…";
    const examples = server.model ? examplesFor(server.card) : [];
    replace(welcome.querySelector(".questions"), examples.map((text) => h("button", { type: "button", onclick: () => this.#send(text, []) }, text)));
  }

  #showServer() {
    const shown = this.thread.querySelector(".welcome");
    if (shown) this.#fillWelcome(shown);
    this.composer.show(this.session?.isLive ?? false);
    if (this.session && !this.settings.contains(document.activeElement)) this.settings.show(this.session.conversation.settings);
  }

  #ended(node) {
    this.said.textContent = node.error ? `The answer failed: ${node.error}` : `The model has answered: ${node.content.slice(0, 500)}`;
  }

  #isAtEnd() {
    return this.thread.scrollHeight - this.thread.scrollTop - this.thread.clientHeight < NEAR_END;
  }

  #tell(words, kind = "", undo = null) {
    clearTimeout(this.alertTimer);
    const button = undo && h("button", { type: "button", onclick: () => ((this.alert.hidden = true), undo()) }, "Undo");
    replace(this.alert, h("span", { class: kind }, words), " ", button, h("button", { type: "button", class: "quiet", "aria-label": "Close", onclick: () => (this.alert.hidden = true) }, "×"));
    this.alert.hidden = false;
    if (undo) this.alertTimer = setTimeout(() => (this.alert.hidden = true), UNDO_SECONDS * 1000);
  }

  #turnSide(id, isOpen = this.dataset[id] !== "open") {
    if (isOpen) this.dataset[id] = "open";
    else delete this.dataset[id];
    this.openers[id].setAttribute("aria-expanded", String(isOpen));
    if (id === "settings") localStorage.setItem("chat-side", isOpen ? "open" : "");
    const other = id === "chats" ? "settings" : "chats";
    if (isOpen && innerWidth < 1000 && this.dataset[other]) this.#turnSide(other, false);
  }

  #keys(event) {
    if (event.key === "Escape" && !event.defaultPrevented) {
      if (this.session?.isLive) this.session.stop();
      else if (this.dataset.chats) this.#turnSide("chats", false);
      else if (this.dataset.settings && innerWidth < 1000) this.#turnSide("settings", false);
    } else if (event.key.toLowerCase() === "o" && event.shiftKey && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      this.#create();
    }
  }

  // --- what is done ---------------------------------------------------------------------------

  #send(text, images) {
    this.alert.hidden = true;
    this.follows = true;
    const before = this.session.conversation.leaf;
    this.session.send(text, images);
    if (this.session.conversation.leaf !== before) return;
    this.composer.input.value = text; // the settings are wrong: nothing is lost
    this.#turnSide("settings", true);
  }

  #keepSettings() {
    localStorage.setItem(LAST_SETTINGS, JSON.stringify(this.session.conversation.settings));
    if (this.session.conversation.leaf) this.session.save();
  }

  #rename() {
    this.session.conversation.title = this.heading.value.trim();
    if (this.session.conversation.leaf) this.session.save(true);
  }

  #removeMessage(node) {
    if (this.session.isLive) return;
    const { conversation } = this.session;
    const before = structuredClone({ nodes: conversation.nodes, leaf: conversation.leaf });
    this.session.remove(node);
    this.#tell("The message, and what followed it, is deleted.", "", () => {
      Object.assign(conversation, before);
      this.views.clear();
      this.session.save();
      this.#refresh();
    });
  }

  async #removeChat(id) {
    const isOpen = id === this.session.conversation.id;
    const kept = await find(id);
    if (isOpen) this.session.drop();
    await this.store.remove(id);
    if (isOpen) this.#create();
    else await this.sidebar.show();
    this.#tell("The chat is deleted.", "", async () => {
      await this.store.put(kept);
      this.#go(id);
      await this.sidebar.show();
    });
  }

  #export() {
    const { conversation } = this.session;
    const name = conversation.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "chat";
    download(`${name}.json`, toFile([conversation]));
  }

  async #exportAll() {
    const heads = await this.store.heads();
    download("penstock-chats.json", toFile(await Promise.all(heads.map(({ id }) => find(id)))));
  }

  async #import() {
    const text = await chooseFile(".json,application/json");
    if (text === null) return;
    try {
      const found = fromFile(text);
      for (const conversation of found) await this.store.put(conversation);
      await this.sidebar.show();
      this.#tell(found.length === 1 ? "One chat was imported." : `${found.length} chats were imported.`);
      if (found.length === 1) this.#go(found[0].id);
    } catch (error) {
      this.#tell(error.message, "error");
    }
  }
}

function lastSettings() {
  try {
    return JSON.parse(localStorage.getItem(LAST_SETTINGS)) ?? {};
  } catch {
    return {};
  }
}

customElements.define("chat-room", ChatRoom);
