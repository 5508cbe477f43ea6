// One tool loop with the AI SDK: node loop.mjs '{"url", "provider", "stream", "strict", "form", "questions", "weather", "time"}'
// Prints a list of {"text", "object", "called"}, one for each question; a failing call ends it with its error.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false; // they would go to stdout
const given = JSON.parse(process.argv[2]);
const where = { baseURL: `${given.url}/v1`, apiKey: "none", name: "penstock" };
const models = {
  compatible: () =>
    createOpenAICompatible({ ...where, supportsStructuredOutputs: true }).chatModel("scripted"),
  chat: () => createOpenAI(where).chat("scripted"),
  responses: () => createOpenAI(where).responses("scripted"),
};
const called = [];
const look = (name, table) =>
  tool({
    description: `The ${name} of a city.`,
    inputSchema: z.object({ city: z.string() }),
    strict: given.strict,
    execute: async ({ city }) => {
      called.push(name);
      return table[city];
    },
  });
const report = z.object({ city: z.string(), degrees: z.number().int(), notes: z.array(z.string()) });
const options = {
  model: models[given.provider](),
  system: "Be brief.",
  tools: { get_weather: look("get_weather", given.weather), get_time: look("get_time", given.time) },
  stopWhen: stepCountIs(6),
  maxRetries: 0,
  providerOptions: { penstock: { reasoningEffort: "low" }, openai: { store: false } },
  ...(given.form ? { output: Output.object({ schema: report }) } : {}),
};

async function ask(messages) {
  if (!given.stream) return generateText({ ...options, messages });
  const result = streamText({ ...options, messages, onError: ({ error }) => { throw error; } });
  let pieces = 0;
  for await (const part of result.fullStream) {
    if (part.type === "error") throw part.error;
    if (part.type === "text-delta") pieces += 1;
  }
  if (pieces < 2) throw new Error(`only ${pieces} pieces`);
  return { text: await result.text, output: given.form ? await result.output : null, response: await result.response };
}

const turns = [];
let messages = [];
for (const content of given.questions) {
  messages = [...messages, { role: "user", content }];
  called.length = 0;
  const result = await ask(messages);
  messages = [...messages, ...result.response.messages];
  turns.push({ text: result.text, object: given.form ? result.output : null, called: [...called] });
}
console.log(JSON.stringify(turns));
