// Conversations that are open or being answered. Answers go on while another chat or another room is looked at.
import { server } from "../../parts/server-state.js";
import { Answer } from "./answer.js";
import { addNode, childrenOf, choose, openCalls, pathTo, removeNode } from "./conversation.js";
import { settingFields } from "./request.js";
import { Store } from "./store.js";

const SAVE_PAUSE = 500;
const live = new Map();
let opened;

/** The browser's store. */
export const theStore = () => (opened ??= Store.open());

/** The session of a conversation: the one that is being answered, or a new one. */
export function sessionOf(conversation) {
  return live.get(conversation.id) ?? new Session(conversation);
}

/** The conversation of this name, as it is now. */
export async function find(id) {
  const found = live.get(id)?.conversation ?? (await (await theStore()).get(id));
  if (found && !live.has(id)) {
    for (const node of Object.values(found.nodes)) {
      if (node.isLive) node.finish ||= "stopped"; // its page was closed
      delete node.isLive;
      delete node.waiting;
    }
  }
  return found;
}

export class Session extends EventTarget {
  constructor(conversation) {
    super();
    this.conversation = conversation;
    this.answer = null;
  }

  get isLive() {
    return this.answer !== null;
  }

  #changed() {
    this.dispatchEvent(new Event("change"));
    this.save();
  }

  /** Keep the conversation, soon; `now`: resolves when it is kept. */
  async save(now = false) {
    clearTimeout(this.timer);
    this.timer = 0;
    if (this.isGone) return;
    if (!now) {
      this.timer = setTimeout(() => this.save(true), SAVE_PAUSE);
      return;
    }
    this.conversation.updated = Date.now();
    try {
      await (await theStore()).put(this.conversation);
      this.dispatchEvent(new Event("kept"));
    } catch (error) {
      this.dispatchEvent(new CustomEvent("problem", { detail: `The browser could not keep this chat: ${error.message}` }));
    }
  }

  /** It has been deleted: nothing is kept any more. */
  drop() {
    this.stop();
    clearTimeout(this.timer);
    this.isGone = true;
  }

  send(text, images = []) {
    this.#say(this.conversation.leaf, { role: "user", content: text, ...(images.length && { images }) });
  }

  /** Another branch with this text in a message's place. A user's is answered. */
  edit(node, content) {
    if (node.role === "user") {
      this.#say(node.parent, { role: "user", content, ...(node.images && { images: node.images }) });
      return;
    }
    const { role, tool_call_id: call, tool_calls: calls } = node;
    addNode(this.conversation, node.parent, { role, content, ...(call && { tool_call_id: call }), ...(calls && { tool_calls: calls }) });
    this.#changed();
  }

  #say(parent, fields) {
    if (this.isLive || !this.#areSettingsRight()) return;
    addNode(this.conversation, parent, fields);
    this.#answer(this.conversation.leaf, {});
  }

  /** Results of an assistant's calls, which the model then sees. */
  answerCalls(node, results) {
    if (this.isLive || !this.#areSettingsRight()) return;
    for (const result of results) addNode(this.conversation, this.conversation.leaf, { role: "tool", ...result });
    if (!openCalls(this.conversation).length) this.#answer(this.conversation.leaf, {});
  }

  regenerate(node) {
    if (!this.isLive && this.#areSettingsRight()) this.#answer(node.parent, {});
  }

  /** Another branch of an answer, which begins with this text. */
  branch(node, content, tokens) {
    if (this.isLive || !this.#areSettingsRight()) return;
    const more = { ...(node.reasoning && { reasoning: node.reasoning }), ...(node.prefix && { prefix: node.prefix }) };
    this.#answer(node.parent, { content, tokens, ...more });
  }

  /** Go on with an answer that was stopped, or cut at a limit. */
  goOn(node) {
    if (this.isLive || !this.#areSettingsRight()) return;
    if (!node.tokens?.length) node.prefix = node.content;
    Object.assign(node, { finish: "", error: "" });
    this.#run(node);
  }

  turn(id) {
    choose(this.conversation, id);
    this.#changed();
  }

  remove(node) {
    if (this.isLive) return;
    removeNode(this.conversation, node.id);
    this.#changed();
  }

  stop() {
    this.answer?.stop();
  }

  #areSettingsRight() {
    try {
      settingFields(this.conversation.settings);
      return true;
    } catch (error) {
      this.dispatchEvent(new CustomEvent("problem", { detail: `Settings: ${error.message}` }));
      return false;
    }
  }

  #answer(parent, fields) {
    this.#run(addNode(this.conversation, parent, { role: "assistant", ...fields }));
  }

  async #run(node) {
    const { conversation } = this;
    const nodeFor = () => {
      const shown = conversation.leaf;
      const made = addNode(conversation, node.parent, { role: "assistant" });
      conversation.leaf = shown;
      return made;
    };
    const path = node.parent ? pathTo(conversation, node.parent) : [];
    this.answer = new Answer({ settings: conversation.settings, path, node, model: server.model, nodeFor, changed: () => this.#changed() });
    live.set(conversation.id, this);
    this.#changed();
    await this.answer.run();
    this.answer = null;
    await this.save(true);
    live.delete(conversation.id);
    this.dispatchEvent(new Event("change"));
    this.dispatchEvent(new CustomEvent("end", { detail: node }));
  }
}

/** Which of its siblings a message is. */
export function placeOf(conversation, node, below) {
  const siblings = below.get(node.parent) ?? childrenOf(conversation, node.parent);
  return { index: siblings.indexOf(node), siblings };
}
