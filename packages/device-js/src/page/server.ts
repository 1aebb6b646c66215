/**
 * Takes the place of `server.js` in the page of `moaspec serve`: answers in this browser's worker,
 * together with the server that the page came from.
 */
import { DeviceFigures, DownloadBar } from "./device_elements.js";
import { PREFIX_CACHE } from "./prefix_cache.js";
import type { Chunk, ModelInfo, Failure, FromWorker, Link, ToWorker } from "./messages.js";

/** A readable error. `status` is 401 if the server wants a token, else 0. */
export class ServerError extends Error {
  constructor(message: string, readonly status = 0) {
    super(message);
  }
}

/** The description of the server; see `/v1/moaspec` in docs/serve.md. */
interface About {
  readonly model: string;
  readonly mode: "edge";
  readonly speculation: true;
  readonly context: number;
  readonly link: Link;
}

/** Receives the worker's messages about one answer. */
type Listener = (message: Extract<FromWorker, { kind: "chunk" | "end" }>) => void;

const NOT_YET: Link = {
  state: "syncing",
  round_trip_s: null,
  bytes_sent: 0,
  bytes_received: 0,
  cut: false,
  can_cut: true,
  draft_gain: null,
  draft_ms: null,
};

/** Scripts may only come from addresses that this policy has made. */
const policy = (globalThis as any).trustedTypes?.createPolicy("moaspec", {
  createScriptURL: (url: string) => url,
}) as { createScriptURL(url: string): string } | undefined;
const scriptUrl = (url: string) => policy?.createScriptURL(url) ?? url;

export class Server {
  /** The token, if the server wants one. */
  key = "";
  private usedKey: string | undefined;
  private worker: Worker | undefined;
  private info: Promise<ModelInfo> | undefined;
  private settle: { resolve(info: ModelInfo): void; reject(error: Error): void } | undefined;
  private link = NOT_YET;
  private lastId = 0;
  private readonly listeners = new Map<number, Listener>();
  private readonly bar = new DownloadBar();
  private readonly figures = new DeviceFigures();

  constructor() {
    document.addEventListener("moaspec-cleared", () => {
      this.send({ kind: "forget" });
      void caches.delete(PREFIX_CACHE);
    });
    // A change of the network is noticed at once; a cut without one is noticed by silence.
    for (const change of ["online", "offline"]) {
      window.addEventListener(change, () => this.send({ kind: "network" }));
    }
  }

  /** Describe the server; the first time this loads the bundle. */
  async about(): Promise<About> {
    if (!this.info || this.usedKey !== this.key) this.info = this.load();
    const { model, context } = await this.info;
    return { model, mode: "edge", speculation: true, context, link: this.link };
  }

  /** The last description. */
  async known(): Promise<About> {
    return this.about();
  }

  /** Cut or restore the link, to see what happens then. */
  async cut(cut: boolean): Promise<Link> {
    this.send({ kind: "cut", cut });
    this.link = { ...this.link, cut };
    return this.link;
  }

  /** Yield the chunks of an answer. Ends without an error when `signal` aborts. */
  async *chat(body: any, signal: AbortSignal): AsyncGenerator<Chunk> {
    const id = (this.lastId += 1);
    const queue: Chunk[] = [];
    let ended = false;
    let failed: Failure | undefined;
    let wake = () => {};
    this.listeners.set(id, (message) => {
      if (message.kind === "chunk") queue.push(message.chunk);
      else [ended, failed] = [true, message.failure];
      wake();
    });
    const stop = () => this.send({ kind: "stop" });
    signal.addEventListener("abort", stop);
    const { messages, temperature, seed, top_p: topP } = body;
    const question = {
      messages,
      temperature,
      topP,
      seed,
      continueFinal: Boolean(body.continue_final_message),
      maxNewTokens: body.max_completion_tokens,
      speculation: body.moaspec?.speculation !== false,
    };
    this.send({ kind: "ask", id, question });
    try {
      while (!ended || queue.length) {
        while (queue.length) {
          const chunk = queue.shift()!;
          this.figures.show(chunk.moaspec.stats, chunk.moaspec.link);
          yield chunk;
        }
        if (!ended) await new Promise<void>((resolve) => { wake = resolve; });
      }
      if (failed && !signal.aborted) throw new ServerError(failed.message, failed.status);
    } finally {
      signal.removeEventListener("abort", stop);
      this.listeners.delete(id);
      if (!ended) stop();
    }
  }

  private load(): Promise<ModelInfo> {
    this.usedKey = this.key;
    this.worker ??= this.start();
    const loading = new Promise<ModelInfo>((resolve, reject) => {
      this.settle = { resolve, reject };
    });
    this.send({ kind: "load", token: this.key });
    return loading.finally(() => this.bar.hide());
  }

  private start(): Worker {
    const worker = new Worker(scriptUrl("/worker.js"), { type: "module" });
    worker.addEventListener("message", ({ data }: MessageEvent<FromWorker>) => this.take(data));
    worker.addEventListener("error", () => {
      const failure = { message: "The page's worker failed.", status: 0 };
      worker.terminate();
      this.worker = undefined;
      for (const [id, told] of this.listeners) told({ kind: "end", id, failure });
      this.fail(failure);
    });
    return worker;
  }

  private take(message: FromWorker): void {
    if (message.kind === "progress") this.bar.show(message.loaded, message.total);
    else if (message.kind === "ready") this.ready(message.info);
    else if (message.kind === "failed") this.fail(message.failure);
    else if (message.kind === "link") this.link = message.link;
    else this.listeners.get(message.id)?.(message);
  }

  private ready(info: ModelInfo): void {
    this.settle?.resolve(info);
    // Keeps the page itself, after the bundle, so that they do not share the line.
    navigator.serviceWorker?.register(scriptUrl("/sw.js")).catch(() => {});
  }

  private fail({ message, status }: Failure): void {
    this.info = undefined;
    this.settle?.reject(new ServerError(message, status));
  }

  private send(message: ToWorker): void {
    this.worker?.postMessage(message);
  }
}
