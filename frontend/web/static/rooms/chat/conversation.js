// A conversation: a tree of messages, of which one path is shown. Editing and regenerating add branches.

const FORMAT = "penstock-chats";
const LONGEST_TITLE = 48; // characters of one that was not written by hand
const ROLES = new Set(["user", "assistant", "tool"]);

export const newId = () => crypto.randomUUID?.() ?? Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");

/** A new conversation with these settings (see settings-panel.js). */
export function newConversation(settings = {}) {
  const now = Date.now();
  return { id: newId(), title: "", created: now, updated: now, leaf: null, nodes: {}, settings: structuredClone(settings) };
}

/** Add a message below `parent` (null: at the root), and show it. */
export function addNode(conversation, parent, fields) {
  const node = { id: newId(), parent, created: Date.now(), role: "user", content: "", ...fields };
  conversation.nodes[node.id] = node;
  conversation.leaf = node.id;
  conversation.title ||= node.role === "user" ? titleOf(node.content) : "";
  return node;
}

/** A message's first words. */
function titleOf(content) {
  const line = content.trim().split("\n")[0];
  if (line.length <= LONGEST_TITLE) return line;
  const cut = line.slice(0, LONGEST_TITLE), end = cut.lastIndexOf(" ");
  return `${end > 0 ? cut.slice(0, end) : cut}…`;
}

/** The messages from the root to `leaf`. */
export function pathTo(conversation, leaf = conversation.leaf) {
  const path = [];
  for (let node = conversation.nodes[leaf]; node; node = conversation.nodes[node.parent]) path.push(node);
  return path.reverse();
}

/** The messages below `parent`, oldest first. */
export const childrenOf = ({ nodes }, parent) => Object.values(nodes).filter((node) => node.parent === parent);

/** The children of every message, in one pass. */
export function families({ nodes }) {
  const found = new Map();
  for (const node of Object.values(nodes)) {
    if (!found.has(node.parent)) found.set(node.parent, []);
    found.get(node.parent).push(node);
  }
  return found;
}

/** Show the branch that this message is in: down to the newest message below it. */
export function choose(conversation, id) {
  const below = families(conversation);
  while (below.has(id)) id = below.get(id).at(-1).id;
  conversation.leaf = id;
}

/** Remove a message and all below it. */
export function removeNode(conversation, id) {
  const below = families(conversation);
  const { parent } = conversation.nodes[id];
  const gone = [id];
  while (gone.length) {
    const next = gone.pop();
    delete conversation.nodes[next];
    gone.push(...(below.get(next) ?? []).map((node) => node.id));
  }
  const left = childrenOf(conversation, parent);
  if (left.length) choose(conversation, left.at(-1).id);
  else conversation.leaf = parent;
}

/** The calls of an assistant's message that have no result yet on the path that is shown. */
export function openCalls(conversation) {
  const path = pathTo(conversation);
  const last = path.findLastIndex((node) => node.role === "assistant");
  const answered = new Set(path.slice(last + 1).map((node) => node.tool_call_id));
  if (last < 0 || path.slice(last + 1).some((node) => node.role !== "tool")) return [];
  return (path[last].tool_calls ?? []).filter((call) => !answered.has(call.id));
}

// --- files --------------------------------------------------------------------------------------

/** A file with these conversations. */
export function toFile(conversations) {
  return JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);
}

const text = (value) => (typeof value === "string" ? value : "");
const plain = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

/**
 * The conversations of a file, under new names. Throws an `Error` for people if it is none.
 * Whoever made the file may have put anything into it: only what is known is taken.
 */
export function fromFile(content) {
  let file;
  try {
    file = JSON.parse(content);
  } catch (error) {
    throw new Error(`This is not JSON: ${error.message}`);
  }
  if (file?.format !== FORMAT || !Array.isArray(file.conversations)) throw new Error("This is not a file of chats that were exported here.");
  if (file.version !== 1) throw new Error(`This file has version ${file.version}; version 1 is understood.`);
  return file.conversations.filter((each) => plain(each) && plain(each.nodes)).map(imported);
}

function imported(from) {
  const made = newConversation(plain(from.settings) ? from.settings : {});
  const ids = new Map();
  for (const [id, node] of Object.entries(from.nodes)) if (ROLES.has(node?.role)) ids.set(id, newId());
  for (const [id, name] of ids) {
    const node = from.nodes[id];
    const images = Array.isArray(node.images) ? node.images.filter((url) => text(url).startsWith("data:image/")) : [];
    made.nodes[name] = {
      ...{ id: name, parent: ids.get(node.parent) ?? null, role: node.role, created: Number(node.created) || Date.now() },
      ...{ content: text(node.content), reasoning: text(node.reasoning), finish: text(node.finish), model: text(node.model) },
      ...(images.length && { images }),
      ...(text(node.tool_call_id) && { tool_call_id: node.tool_call_id }),
      ...(Array.isArray(node.tool_calls) && { tool_calls: node.tool_calls.filter(plain).map(callOf) }),
      ...(Array.isArray(node.tokens) && { tokens: node.tokens.map(tokenOf).filter(Boolean) }),
      ...(plain(node.figures) && { figures: figuresOf(node.figures) }),
    };
  }
  for (const node of Object.values(made.nodes)) breakCircle(made, node);
  made.title = text(from.title).slice(0, 200);
  made.created = Number(from.created) || made.created;
  if (ids.has(from.leaf)) made.leaf = ids.get(from.leaf);
  else if (ids.size) choose(made, childrenOf(made, null)[0].id);
  return made;
}

function callOf({ id, function: called }) {
  return { id: text(id) || newId(), type: "function", function: { name: text(called?.name), arguments: text(called?.arguments) } };
}

const bytesOf = (bytes) => (Array.isArray(bytes) && bytes.every((each) => Number.isInteger(each) && each >= 0 && each < 256) ? bytes : null);

function tokenOf(token) {
  if (!plain(token)) return null;
  const others = Array.isArray(token.others) ? token.others.map((other) => tokenOf({ ...other, others: [] })).filter(Boolean) : [];
  return { text: text(token.text), logprob: Number(token.logprob) || 0, bytes: bytesOf(token.bytes), others, isForced: token.isForced === true };
}

const figuresOf = (figures) => Object.fromEntries(Object.entries(figures).filter(([, value]) => typeof value === "number"));

function breakCircle(conversation, node) {
  const seen = new Set();
  for (let at = node; at; at = conversation.nodes[at.parent]) {
    if (seen.has(at.id)) {
      at.parent = null;
      return;
    }
    seen.add(at.id);
  }
}
