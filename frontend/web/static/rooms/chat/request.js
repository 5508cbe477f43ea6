// What is sent for an answer: the messages of a path, and the fields that are set.
import { FIELDS, formFields, toolsOf, valueOf } from "./fields.js";

const DEFAULT_BEST = 5;

/** The settings as fields of a request. Throws an `Error` that names the field. */
export function settingFields(settings) {
  const fields = {};
  const named = (name, read) => {
    try {
      return read();
    } catch (error) {
      throw new Error(`${name}: ${error.message}`);
    }
  };
  for (const field of FIELDS) {
    const value = named(field.name, () => valueOf(field, settings.fields?.[field.name] ?? ""));
    if (value !== undefined) fields[field.name] = value;
  }
  const best = fields.top_logprobs ?? DEFAULT_BEST;
  delete fields.top_logprobs;
  if (best >= 0) Object.assign(fields, { logprobs: true, top_logprobs: best });
  Object.assign(fields, named("form of the answer", () => formFields(settings.form, settings.formText ?? "")));
  const tools = named("tools", () => toolsOf(settings.tools ?? ""));
  if (tools) fields.tools = tools;
  const wanted = fields.tool_choice;
  if (wanted && !["auto", "none", "required"].includes(wanted)) fields.tool_choice = { type: "function", function: { name: wanted } };
  return fields;
}

/** A request for what follows `path`. With `prefix`, the answer goes on from this text. */
export function requestOf(settings, path, { model, prefix = "", reasoning = "" }) {
  const messages = path.map(messageOf);
  if (settings.system?.trim()) messages.unshift({ role: "system", content: settings.system });
  const body = {
    ...(model && { model }),
    messages,
    stream: true,
    stream_options: { include_usage: true },
    ...{ return_timings: true, return_bill: true },
    ...settingFields(settings),
  };
  if (prefix) {
    messages.push({ role: "assistant", content: prefix, ...(reasoning && { reasoning_content: reasoning }) });
    Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
    delete body.n; // one branch goes on
    delete body.best_of;
  }
  return body;
}

function messageOf(node) {
  const images = node.images?.map((url) => ({ type: "image_url", image_url: { url } }));
  const content = images?.length ? [{ type: "text", text: node.content }, ...images] : node.content;
  const message = { role: node.role, content };
  if (node.tool_calls?.length) Object.assign(message, { tool_calls: node.tool_calls, content: node.content || null });
  if (node.tool_call_id) message.tool_call_id = node.tool_call_id;
  return message;
}
