// The fields of a request that the settings offer, by group. A field that is empty is not sent.

const number = (name, about, more = {}) => ({ name, about, kind: "number", step: "any", ...more });
const whole = (name, about, more = {}) => ({ name, about, kind: "whole", step: 1, ...more });
const choice = (name, about, values) => ({ name, about, kind: "choice", values });
const yes = (name, about) => choice(name, about, ["true", "false"]);
const list = (name, about, of = "text") => ({ name, about, kind: "list", of });
const json = (name, about) => ({ name, about, kind: "json" });
const line = (name, about) => ({ name, about, kind: "text" });

export const GROUPS = [
  ["Length and end", [
    whole("max_tokens", "at most this many tokens", { min: -1 }),
    whole("min_tokens", "at least this many tokens", { min: 0 }),
    list("stop", "texts that end the answer, one on a line"),
    list("stop_token_ids", "tokens that end it, one on a line", "whole"),
    yes("include_stop_str_in_output", "show what ended it"),
    yes("ignore_eos", "go on at the model's end token"),
    yes("skip_special_tokens", "leave the model's special tokens out of the text"),
  ]],
  ["Choice of tokens", [
    number("temperature", "0 takes the most likely token", { min: 0, max: 100 }),
    number("top_p", "keep the most likely tokens that have this probability together", { min: 0, max: 1 }),
    whole("top_k", "keep this many; 0 keeps all", { min: -1 }),
    number("min_p", "keep those at least this likely, relative to the best", { min: 0, max: 1 }),
    number("repetition_penalty", "above 1: what occurred is less likely", { min: 0, max: 100 }),
    number("presence_penalty", "for what occurred in the answer", { min: -2, max: 2 }),
    number("frequency_penalty", "for how often it did", { min: -2, max: 2 }),
    whole("seed", "the same seed gives the same answer"),
    json("logit_bias", "JSON object: token id to a number from -100 to 100"),
    list("bad_words", "words that are forbidden, one on a line"),
    list("allowed_token_ids", "only these tokens, one on a line", "whole"),
  ]],
  ["Answers", [
    whole("n", "how many answers; they become branches", { min: 1 }),
    whole("best_of", "must equal n where it is set", { min: 1 }),
    whole("top_logprobs", "alternatives kept for each token; -1 keeps no probabilities", { min: -1, max: 20 }),
  ]],
  ["Reasoning and tools", [
    choice("reasoning_effort", "for templates that use it", ["none", "minimal", "low", "medium", "high"]),
    choice("verbosity", "for templates that use it", ["low", "medium", "high"]),
    yes("include_reasoning", "send the reasoning"),
    json("chat_template_kwargs", "JSON object: variables of the chat template"),
    line("tool_choice", "auto, none, required, or a tool's name"),
    yes("parallel_tool_calls", "several calls in one answer"),
  ]],
  ["Serving", [
    whole("truncate_prompt_tokens", "keep only this many tokens of the prompt", { min: -1 }),
    choice("truncation_side", "which side is dropped", ["left", "right"]),
    json("speculative", "JSON: false, true, or {\"num_speculative_tokens\": 2}"),
    whole("priority", "lower goes first, with --scheduling-policy priority"),
    number("slo_ttft_ms", "first token wanted after, ms", { min: 0 }),
    number("slo_tpot_ms", "each later token wanted after, ms", { min: 0 }),
    line("cache_salt", "share cached prompts only among equal salts"),
    line("user", "on whose behalf"),
  ]],
];

export const FIELDS = GROUPS.flatMap(([, fields]) => fields);
const WHOLE = /^-?\d+$/;

/** A field's value from what was typed; `undefined` if nothing was. Throws an `Error` for people. */
export function valueOf(field, typed) {
  const text = typed.trim();
  if (!text) return undefined;
  if (field.kind === "json") return parsed(text);
  if (field.kind === "choice") return field.values[0] === "true" ? text === "true" : text;
  if (field.kind === "list") {
    const lines = typed.split("\n").filter(Boolean);
    if (field.of === "text") return lines;
    if (!lines.every((each) => WHOLE.test(each.trim()))) throw new Error("whole numbers, one on a line");
    return lines.map(Number);
  }
  if (field.kind === "text") return text;
  const value = Number(text);
  if (!Number.isFinite(value) || (field.kind === "whole" && !WHOLE.test(text))) {
    throw new Error(field.kind === "whole" ? "a whole number" : "a number");
  }
  if (value < (field.min ?? -Infinity) || value > (field.max ?? Infinity)) {
    throw new Error(field.max === undefined ? `at least ${field.min}` : `from ${field.min} to ${field.max}`);
  }
  return value;
}

/** JSON, with an error that says where it is wrong. */
export function parsed(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    const at = /position (\d+)/.exec(error.message);
    const line = at ? ` (line ${text.slice(0, Number(at[1])).split("\n").length})` : "";
    throw new Error(`not JSON: ${error.message.replace(/ in JSON at position.*/, "")}${line}`);
  }
}

// --- forms of answers, and tools ---------------------------------------------------------------

export const FORMS = {
  "": "free text",
  json_object: "any JSON object",
  json_schema: "JSON of a schema",
  regex: "a regular expression",
  choice: "one of these lines",
  grammar: "a grammar (Lark or GBNF)",
};

/** The fields of a request for a form. Throws an `Error` for people. */
export function formFields(form, text) {
  if (!form) return {};
  if (form === "json_object") return { response_format: { type: "json_object" } };
  if (!text.trim()) throw new Error("empty");
  if (form === "json_schema") {
    const schema = parsed(text);
    if (schema === null || typeof schema !== "object" || Array.isArray(schema)) throw new Error("a schema is a JSON object");
    return { response_format: { type: "json_schema", json_schema: { name: "answer", schema } } };
  }
  if (form === "choice") return { structured_outputs: { choice: text.split("\n").filter(Boolean) } };
  return { structured_outputs: { [form]: form === "regex" ? text.trim() : text } };
}

/** The tools that a text defines. Throws an `Error` for people. */
export function toolsOf(text) {
  if (!text.trim()) return undefined;
  const tools = parsed(text);
  if (!Array.isArray(tools)) throw new Error("tools are a JSON array");
  tools.forEach((tool, i) => {
    if (tool?.type !== "function") throw new Error(`tool ${i + 1}: its "type" must be "function"`);
    if (!/^[\w-]{1,64}$/.test(tool.function?.name ?? "")) throw new Error(`tool ${i + 1}: "function" needs a "name" of letters, digits, _ and -`);
  });
  return tools.length ? tools : undefined;
}

export const EXAMPLE_TOOL = {
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather of a city",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
};
