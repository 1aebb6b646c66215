// Requests to this page's server, with readable errors.

import { read } from "./events.js";

const UNREACHABLE = "The server cannot be reached. Is it still running?";
const BROKEN = "The connection to the server broke, so this answer is not whole.";

/** A readable error. `status` is the HTTP status, or 0. */
export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export class Server {
  /** The API key, if the server requires one. */
  key = "";

  #known = null;

  /** Fetch the description of the server. */
  async about() {
    this.#known = await (await this.#ask("v1/moaspec")).json();
    return this.#known;
  }

  /** The last description, fetched if there is none. */
  async known() {
    return this.#known ?? this.about();
  }

  /** Cut or restore the emulated link. Returns its new state. */
  async cut(cut) {
    return (await this.#ask("v1/moaspec/link", { cut })).json();
  }

  /** Yield the chunks of an answer. Ends without an error when `signal` aborts. */
  async *chat(body, signal) {
    try {
      const asked = { ...body, stream: true };
      const response = await this.#ask("v1/chat/completions", asked, signal);
      for await (const chunk of read(response.body)) {
        if (chunk.error) throw new ServerError(chunk.error.message);
        yield chunk;
      }
    } catch (error) {
      if (signal.aborted) return;
      throw error instanceof ServerError ? error : new ServerError(BROKEN);
    }
  }

  async #ask(path, body, signal) {
    const headers = { "Content-Type": "application/json" };
    if (this.key) headers.Authorization = `Bearer ${this.key}`;
    const method = body ? "POST" : "GET";
    const response = await fetch(path, {
      method, headers, signal, body: body && JSON.stringify(body),
    }).catch(() => {
      throw new ServerError(UNREACHABLE);
    });
    if (!response.ok) throw await refusal(response);
    return response;
  }
}

async function refusal(response) {
  const { status } = response;
  if (status === 401) return new ServerError("This server wants an API key.", status);
  if (status === 429) return new ServerError("The server is busy. Try again in a moment.", status);
  const body = await response.json().catch(() => null);
  return new ServerError(body?.error?.message ?? `The server answered ${status}.`, status);
}
