// Requests to the server that sent this page. An API key, if one is needed, lives as long as the tab.
import { events as parse } from "./sse.js";

const KEY = "penstock-api-key";

/** An answer that is none: the server's message, its code and the status. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = "", param = null } = {}) {
    super(message);
    Object.assign(this, { status, code, param });
  }
}

const url = (path) => new URL(path.replace(/^\//, ""), document.baseURI);

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set(value) {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
    dispatchEvent(new Event("penstock-key"));
  },
};

async function send(path, { method = "GET", body, signal, headers = {} } = {}) {
  if (key.get()) headers = { ...headers, Authorization: `Bearer ${key.get()}` };
  if (body !== undefined) headers = { ...headers, "Content-Type": "application/json" };
  let response;
  try {
    response = await fetch(url(path), {
      method,
      headers,
      signal,
      cache: "no-store",
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError("the server does not answer");
  }
  if (!response.ok) {
    const told = (await response.json().catch(() => null))?.error;
    if (response.status === 401) dispatchEvent(new Event("penstock-key-needed"));
    const isElsewhere = told?.code === "not_found";
    const words = isElsewhere ? "this address does not answer that (with --admin-port, the other port does)" : told?.message;
    throw new ApiError(words ?? `the server answered ${response.status}`, { ...told, status: response.status });
  }
  return response;
}

/** The server's interface. Each call throws `ApiError`, or an `AbortError` if `signal` says so. */
export const api = {
  get: async (path, options) => (await send(path, options)).json(),
  text: async (path, options) => (await send(path, options)).text(),
  post: async (path, body = {}, options = {}) => (await send(path, { ...options, method: "POST", body })).json(),
  /** Server-sent events, as {id, event, data}: an async iterator that ends with the stream. */
  async *events(path, options = {}) {
    const response = await send(path, options);
    try {
      yield* parse(response.body);
    } catch (error) {
      if (options.signal?.aborted) throw error;
      throw error instanceof ApiError ? error : new ApiError("the stream broke off");
    }
  },
};
