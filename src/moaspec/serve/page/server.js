// Requests to the server that this page comes from, and its errors in words.

import { read } from "./events.js";

const UNREACHABLE = "The server cannot be reached. Is it still running?";
const BROKEN = "The connection to the server broke, so this answer is not whole.";

/** What went wrong, for people. `status` is HTTP's, or 0. */
export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export class Server {
  /** The API key, where the server wants one. */
  key = "";

  #known = null;

  /** What the server says of itself. */
  async about() {
    this.#known = await (await this.#ask("v1/moaspec")).json();
    return this.#known;
  }

  /** The same as it was last heard. */
  async known() {
    return this.#known ?? this.about();
  }

  /** Cut the emulated link, or restore it; the new link. */
  async cut(cut) {
    return (await this.#ask("v1/moaspec/link", { cut })).json();
  }

  /** Chunks of an answer. Ends early, without an error, when `signal` says so. */
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
