/** The page's parts without a browser: sessions that are renewed, texts that are forgotten, a full cache. */
import { afterEach, beforeEach, expect, test, vi } from "vitest";
import type { loadDevice } from "../src/device.js";
import { BundleError } from "../src/errors.js";
import { BundleCache } from "../src/page/bundle_cache.js";
import { download } from "../src/page/download.js";
import type { FromWorker, ToWorker } from "../src/page/messages.js";
import type { DrafterVersion } from "../src/session/server_calls.js";

const KEPT = "http://here/prefix/print";
const FACTS = JSON.stringify({
  fingerprint: "print", cross_attention: { num_kv_heads: 1, head_dim: 1 }, max_positions: 9,
  files: { "drafter.onnx": { bytes: 5, sha256: "00" } },
});
const PREFIX = { tokenIds: [1], key: new Float32Array(1), value: new Float32Array(1) };
const QUESTION = {
  messages: [], continueFinal: false, temperature: 0, topP: undefined, seed: 0, maxNewTokens: 1, speculation: true,
};

/** Caches of a browser, which may have no room. */
class FakeCaches {
  readonly stored = new Map<string, Map<string, Response>>();
  full = false;

  async open(name: string) {
    const cache = this.stored.get(name) ?? new Map<string, Response>();
    this.stored.set(name, cache);
    return {
      match: async (url: string) => cache.get(url)?.clone(),
      keys: async () => [...cache.keys()].map((url) => ({ url })),
      delete: async (url: string) => cache.delete(url),
      put: async (url: string, response: Response) => {
        if (this.full) throw new DOMException("no room", "QuotaExceededError");
        cache.set(url, response);
      },
    };
  }

  async delete(name: string) {
    return this.stored.delete(name);
  }
}

function promise() {
  let resolve = () => {};
  let reject = (_: Error) => {};
  const result = new Promise<void>((...both) => { [resolve, reject] = both; });
  return { result, resolve, reject };
}

/** A session whose answers and end the tests decide. */
class FakeSession {
  static readonly made: FakeSession[] = [];
  readonly stats = {};
  readonly provisional = [];
  readonly answer = promise();
  readonly closed = promise();

  constructor() {
    FakeSession.made.push(this);
  }

  async *stream() {
    await this.answer.result;
  }

  prefix = () => PREFIX;
  close = () => this.closed.result;
  remember() {}
  connect() {}
  stop() {}
}

/** What servers have of a version, and what became of it. */
const versions = { learns: true, newest: undefined as DrafterVersion | Error | undefined, asked: 0, loaded: [] as unknown[] };

vi.mock("onnxruntime-web/wasm", () => ({ env: { wasm: {} } }));
vi.mock("../src/session/remote_session.js", () => ({ RemoteSession: FakeSession }));
vi.mock("../src/page/device_elements.js", () => ({ DeviceFigures: class {}, DownloadBar: class { hide() {} } }));
vi.mock("../src/bundle/manifest.js", () => ({
  GRAPH_FILE: "drafter.onnx",
  MANIFEST_FILE: "manifest.json",
  activationSizes: () => [{ num_kv_heads: 1, head_dim: 1 }],
  parseManifest: (data: Uint8Array) => JSON.parse(new TextDecoder().decode(data)),
}));
vi.mock("../src/device.js", () => ({
  loadDevice: async (...[read, , , kept]: Parameters<typeof loadDevice>) => {
    const manifest = JSON.parse(new TextDecoder().decode(await read("manifest.json", 1 << 20)));
    const version = await kept?.(manifest);
    if (version) versions.loaded.push(version);
    return {
      ...{ manifest, version: version?.version ?? manifest.fingerprint },
      tokenizer: { chat: () => [1], decode: () => "" },
      update: async () => {
        versions.asked += 1;
        if (versions.newest instanceof Error) throw versions.newest;
        return versions.newest;
      },
    };
  },
}));
let storage: FakeCaches;

/** Wait until this does not throw, on any machine. */
const soon = (check: () => void) => vi.waitFor(check, { timeout: 60_000 });

beforeEach(() => {
  storage = new FakeCaches();
  FakeSession.made.length = 0;
  Object.assign(versions, { learns: true, newest: undefined, asked: 0, loaded: [] });
  vi.resetModules();
  vi.stubGlobal("caches", storage);
  vi.stubGlobal("navigator", { hardwareConcurrency: 2, onLine: true });
  vi.stubGlobal("fetch", async ({ href }: URL) => {
    if (href.endsWith("/device.json")) return Response.json({ model: "tiny", learns: versions.learns });
    return new Response(href.endsWith(".json") ? FACTS : "graph");
  });
});
afterEach(() => vi.unstubAllGlobals());

/** The worker's script with its bundle loaded. */
async function worker() {
  const said: FromWorker[] = [];
  let tell = (_: { data: ToWorker }) => {};
  vi.stubGlobal("self", {
    location: { href: "http://here/worker.js" },
    addEventListener: (_: string, listener: typeof tell) => { tell = listener; },
    postMessage: (message: FromWorker) => said.push(message),
  });
  const repeated: (() => void)[] = [];
  vi.stubGlobal("setInterval", (run: () => void) => repeated.push(run));
  vi.stubGlobal("WebSocket", class {});
  await import("../src/page/worker.js");
  tell({ data: { kind: "load", token: "" } });
  await soon(() => expect(said.map(({ kind }) => kind)).toContain("ready"));
  const ends = () => said.filter((one) => one.kind === "end");
  return { tell: (data: ToWorker) => tell({ data }), ends, update: repeated[0]! };
}

test("a question while the session is renewed waits for the next session", async () => {
  const { tell, ends } = await worker();
  const [first] = FakeSession.made;
  tell({ kind: "ask", id: 1, question: QUESTION });
  first!.answer.reject(new Error("refused"));
  await soon(() => expect(ends()).toEqual([{ kind: "end", id: 1, failure: { message: "refused", status: 0 } }]));
  tell({ kind: "ask", id: 2, question: QUESTION });
  tell({ kind: "ask", id: 3, question: QUESTION });
  tell({ kind: "stop" });
  first!.closed.resolve();
  await soon(() => expect(FakeSession.made).toHaveLength(2));
  FakeSession.made[1]!.answer.resolve();
  await soon(() => expect(ends()).toHaveLength(3));
  expect(ends().slice(1)).toEqual(expect.arrayContaining([{ kind: "end", id: 2 }, { kind: "end", id: 3 }]));
  expect(FakeSession.made).toHaveLength(2);
});

test.each([false, true])("a text is kept unless all are forgotten meanwhile (%s)", async (forgotten) => {
  const { tell, ends } = await worker();
  const cache = await storage.open("moaspec-prefix");
  await cache.put("http://here/prefix/older", new Response(""));
  tell({ kind: "ask", id: 1, question: QUESTION });
  if (forgotten) tell({ kind: "forget" });
  FakeSession.made[0]!.answer.resolve();
  await soon(() => expect(ends()).toHaveLength(1));
  const urls = () => [...(storage.stored.get("moaspec-prefix")?.keys() ?? [])];
  if (forgotten) await new Promise((resolve) => setTimeout(resolve, 10));
  await soon(() => expect(urls()).toEqual(forgotten ? [] : [KEPT]));
});

test("a version is kept for the next visit, and not asked for while an answer is written", async () => {
  const version = { version: "new", data: Uint8Array.of(1, 2) };
  versions.newest = version;
  const { tell, ends, update } = await worker();
  const kept = () => storage.stored.get("moaspec-version")?.has("http://here/version/00");
  await soon(() => expect(kept()).toBe(true));
  versions.newest = undefined;
  tell({ kind: "ask", id: 1, question: QUESTION });
  update();
  FakeSession.made[0]!.answer.resolve();
  await soon(() => expect(ends()).toHaveLength(1));
  expect(versions.asked).toBe(1);
  await soon(() => {
    update();
    expect(versions.asked).toBeGreaterThan(1);
  });
  expect(versions.loaded).toEqual([]);
  vi.resetModules();
  await worker();
  expect(versions.loaded).toEqual([version]);
});

test("a server whose drafter does not learn is never asked for a version", async () => {
  versions.learns = false;
  await (await storage.open("moaspec-version")).put("http://here/version/00", new Response("of an earlier server"));
  const { update } = await worker();
  update();
  expect([versions.asked, versions.loaded]).toEqual([0, []]);
  expect(storage.stored.has("moaspec-version")).toBe(false);
});

test("a server whose version is of no use is not asked again", async () => {
  const warn = vi.spyOn(console, "warn").mockImplementation(() => {});
  versions.newest = new Error("not of this drafter");
  const { update } = await worker();
  await soon(() => expect(warn).toHaveBeenCalledWith("The drafter is not updated: not of this drafter"));
  update();
  expect(versions.asked).toBe(1);
  warn.mockRestore();
});

test("a worker that failed is replaced", async () => {
  const made: { failed(): void; terminate(): void; ended: boolean; sent: ToWorker[] }[] = [];
  const document = new EventTarget();
  vi.stubGlobal("document", document);
  vi.stubGlobal("window", new EventTarget());
  vi.stubGlobal("Worker", class extends EventTarget {
    ended = false;
    readonly sent: ToWorker[] = [];
    constructor() {
      super();
      made.push(this);
    }
    failed() {
      this.dispatchEvent(new Event("error"));
    }
    terminate() {
      this.ended = true;
    }
    postMessage(message: ToWorker) {
      this.sent.push(message);
    }
  });
  const { Server } = await import("../src/page/server.js");
  const server = new Server();
  const about = server.about();
  const answer = server.chat({ messages: [] }, new AbortController().signal).next();
  made[0]!.failed();
  await expect(about).rejects.toThrow("worker failed");
  await expect(answer).rejects.toThrow("worker failed");
  void server.about();
  expect(made.map(({ ended }) => ended)).toEqual([true, false]);
  document.dispatchEvent(new Event("moaspec-cleared"));
  expect(made[1]!.sent.map(({ kind }) => kind)).toEqual(["load", "forget"]);
});

test.each([false, true])("a bundle is read with and without room for it (%s)", async (full) => {
  const cache = new BundleCache("http://here/bundle/", () => {});
  storage.full = full;
  const manifest = await cache.read("manifest.json", 1 << 20);
  expect(new TextDecoder().decode(await cache.read("drafter.onnx", 5))).toBe("graph");
  storage.full = false;
  await cache.keep(manifest);
  expect(storage.stored.get("moaspec-bundle")!.size).toBe(full ? 0 : 2);
});

/** A response that ends before all bytes have come. */
function broken(...bytes: number[]): Response {
  const source = { pull: (to: ReadableStreamDefaultController) => bytes.length
    ? to.enqueue(Uint8Array.of(bytes.shift()!)) : to.error(new TypeError("network error")) };
  return new Response(new ReadableStream(source));
}

test.each([[206, [3, 4], [1, 1, 1, 1]], [200, [1, 2, 3, 4], [1, 1, -2, 1, 1, 1, 1]]])(
  "a broken download goes on (status %i)", async (status, rest, progress) => {
    const [asked, counts]: [unknown[], number[]] = [[], []];
    const answers = [() => broken(1, 2), () => { throw new TypeError("no network"); }, () => {
      const pieces = new ReadableStream({ start: (to) => {
        for (const one of rest) to.enqueue(Uint8Array.of(one));
        to.close();
      } });
      return new Response(pieces, { status });
    }];
    vi.useFakeTimers();
    vi.stubGlobal("fetch", async (_: string, init: RequestInit) => (asked.push(init), answers.shift()!()));
    const found = download(new URL("http://here/bundle/drafter.onnx"), 4, (count) => counts.push(count));
    await vi.runAllTimersAsync();
    expect([...await found]).toEqual([1, 2, 3, 4]);
    expect(counts).toEqual(progress);
    const range = { headers: { Range: "bytes=2-" } };
    expect(asked).toEqual([{}, range, range]);
    vi.useRealTimers();
  },
);

test("a download ends: by a refusal, a longer file, or a minute without a byte", async () => {
  vi.stubGlobal("fetch", async () => new Response("", { status: 404 }));
  await expect(download(new URL("http://here/a"), 4, () => {})).rejects.toThrow("HTTP status 404");
  vi.stubGlobal("fetch", async () => new Response("too long"));
  expect((await download(new URL("http://here/a"), 4, () => {})).length).toBe(5);
  vi.useFakeTimers();
  vi.stubGlobal("fetch", async () => { throw new TypeError("no network"); });
  const lost = expect(download(new URL("http://here/a"), 4, () => {})).rejects.toThrow("no network");
  await vi.runAllTimersAsync();
  await lost;
  vi.useRealTimers();
});

test("a download ends where each connection sends the same first bytes and breaks", async () => {
  let [connections, here, most] = [0, 0, 0];
  vi.useFakeTimers();
  vi.stubGlobal("fetch", async () => {
    // Without an end, the download would succeed at last.
    return ++connections > 1000 ? new Response("abcd") : broken(1, 2);
  });
  const count = (bytes: number) => { most = Math.max(most, here += bytes); };
  const lost = expect(download(new URL("http://here/a"), 4, count)).rejects.toThrow("network error");
  await vi.runAllTimersAsync();
  await lost;
  expect([connections < 100, most]).toEqual([true, 2]);
  vi.useRealTimers();
});

test.each([[4, 1], [9, 2]])("a connection that breaks after the last byte has brought the file (%i bytes expected)", async (expected, connections) => {
  const answers = [broken(1, 2, 3, 4), new Response("", { status: 416 })];
  vi.useFakeTimers();
  vi.stubGlobal("fetch", async () => answers.shift()!);
  const found = download(new URL("http://here/a"), expected, () => {});
  await vi.runAllTimersAsync();
  expect([...await found]).toEqual([1, 2, 3, 4]);
  expect(answers).toHaveLength(2 - connections);
  vi.useRealTimers();
});

/** Let no larger array of bytes be made. */
function limitArrays(most: number): void {
  const construct = (Made: Uint8ArrayConstructor, [length, ...more]: any[]) => {
    if (typeof length === "number" && length > most) throw new RangeError("Array buffer allocation failed");
    return new Made(length, ...more);
  };
  vi.stubGlobal("Uint8Array", new Proxy(Uint8Array, { construct }));
}

test("a download takes memory for the bytes that come, not for those that are announced", async () => {
  const size = 5 << 20;
  const whole = new Uint8Array(size).map((_, i) => i % 251);
  vi.stubGlobal("fetch", async () => new Response(whole));
  const found = () => download(new URL("http://here/a"), 2 ** 31, () => {});
  limitArrays(2 * size);
  expect(Buffer.compare(await found(), whole)).toBe(0);
  limitArrays(size - 1);
  await expect(found()).rejects.toThrow(new BundleError("http://here/a does not fit in memory: Array buffer allocation failed"));
});
