/** The page's worker: loads the bundle, drafts, and speaks with the server. */
import * as ort from "onnxruntime-web/wasm";
import { MANIFEST_FILE } from "../bundle/manifest.js";
import { loadDevice } from "../device.js";
import type { LoadedDevice } from "../device.js";
import { BundleError, LinkError, UnknownClientError } from "../errors.js";
import { Vault } from "../privacy/vault.js";
import { WebSocketTransport } from "../protocol/websocket.js";
import { RemoteSession } from "../session/remote_session.js";
import { BundleCache } from "./bundle_cache.js";
import { ChunkWriter } from "./chunks.js";
import { CuttableTransport } from "./cuttable.js";
import type { Failure, FromWorker, Link, Question, ToWorker } from "./messages.js";
import { PREFIX_CACHE, keepPrefix, keptPrefix } from "./prefix_cache.js";
import { ChunkRestorer } from "./private_chunks.js";
import { forgetVersion, keepVersion, keptVersion } from "./version_cache.js";

const MAX_THREADS = 4;
/** Time between two reports of the link. */
const REPORT_MS = 500;
/** Interval at which the server is asked for a new version of the drafter. */
const UPDATE_EVERY_MS = 60_000;
const BASE = new URL("/", self.location.href);

let device: LoadedDevice | undefined;
/** Source of new versions of the drafter; undefined if it does not learn. */
let updates: WebSocketTransport | undefined;
let isUpdating = false;
/** Whether a loaded version waits for the next answer: another one would take memory beside it. */
let isPrepared = false;
let transport: CuttableTransport | undefined;
let session: RemoteSession | undefined;
/** Ends the answer that is being written. */
let stopping: AbortController | undefined;
/** Settles when the latest session has begun. */
let renewed: Promise<void> = Promise.resolve();
/** How often all conversations were deleted. */
let numForgotten = 0;

function post(message: FromWorker): void {
  self.postMessage(message);
}

function failure(error: unknown): Failure {
  const message = error instanceof Error ? error.message : String(error);
  return { message, status: error instanceof UnknownClientError ? 401 : 0 };
}

/** Threads exist only in an isolated page; more than these would slow each other down. */
function numThreads(): number {
  if (!self.crossOriginIsolated) return 1;
  return Math.max(1, Math.min(MAX_THREADS, Math.floor(navigator.hardwareConcurrency / 2)));
}

async function loadBundle(learns: boolean): Promise<number> {
  let isLoading = true; // a version of the drafter is made from the cached graph later
  const cache = new BundleCache(new URL("bundle/", BASE).href, (loaded, total) => {
    if (isLoading) post({ kind: "progress", loaded, total });
  });
  let manifest = new Uint8Array();
  device = await loadDevice(async (name, maxBytes) => {
    const data = await cache.read(name, maxBytes);
    if (name === MANIFEST_FILE) manifest = data as Uint8Array<ArrayBuffer>;
    return data;
  }, ort, {}, learns ? keptVersion : undefined);
  if (device.version === device.manifest.fingerprint) await forgetVersion();
  await cache.keep(manifest);
  isLoading = false;
  return cache.bytes;
}

/** Load the bundle; one that was damaged in the cache is downloaded again. */
async function loadTwice(learns: boolean): Promise<number> {
  try {
    return await loadBundle(learns);
  } catch (error) {
    if (!(error instanceof BundleError) || !navigator.onLine) throw error;
    await BundleCache.forget();
    return loadBundle(learns);
  }
}

async function load(token: string): Promise<void> {
  ort.env.wasm.wasmPaths = BASE.href;
  ort.env.wasm.numThreads = numThreads();
  const response = await fetch(new URL("device.json", BASE));
  const { model, learns } = (await response.json()) as { model: string; learns: boolean };
  const bytes = device ? 0 : await loadTwice(learns);
  const address = BASE.href.replace(/^http/, "ws");
  const cut = transport?.cut ?? false;
  const server = new WebSocketTransport(address, token ? { token } : {});
  updates = learns ? server : undefined;
  transport = new CuttableTransport(server);
  transport.cut = cut;
  await renew();
  const context = device!.manifest.max_positions;
  post({ kind: "ready", info: { model, context, bytes, threads: ort.env.wasm.numThreads } });
  void update();
}

/** Take a new version of the drafter, unless an answer is being written. */
async function update(): Promise<void> {
  const server = updates;
  if (!server || stopping || isUpdating || isPrepared || transport!.cut) return;
  if (link().state === "down") return; // each connection that fails holds back those of the session
  isUpdating = true;
  const { manifest } = device!;
  try {
    const found = await device!.update(server);
    isPrepared = found !== undefined;
    if (found) await keepVersion(manifest, found);
  } catch (error) {
    if (!(error instanceof LinkError)) {
      if (updates === server) updates = undefined; // it would fail again
      console.warn(`The drafter is not updated: ${failure(error).message}`);
    }
  } finally {
    isUpdating = false;
  }
}

/** Begin another session: the first one, or after a refusal. */
function renew(): Promise<void> {
  renewed = renewed.then(begin, begin);
  return renewed;
}

async function begin(): Promise<void> {
  await session?.close();
  const next = new RemoteSession(device!, transport!, { minHeldShare: 0 });
  const prefix = await keptPrefix(device!.manifest).catch(() => undefined);
  if (prefix) next.remember(prefix);
  next.connect();
  session = next;
}

function link(): Link {
  const { stats, draftGain, draftMs, provisional } = session!;
  const isDown = stats.state === "down" || (stats.state === "connecting" && stats.failures > 0);
  const isUp = stats.state === "up" && !provisional.length;
  return {
    state: isDown ? "down" : isUp ? "up" : "syncing",
    round_trip_s: stats.rttMs === undefined ? null : stats.rttMs / 1000,
    bytes_sent: stats.bytesUp,
    bytes_received: stats.bytesDown,
    cut: transport!.cut,
    can_cut: true,
    draft_gain: draftGain ?? null,
    draft_ms: draftMs ?? null,
  };
}

async function ask(id: number, question: Question): Promise<void> {
  const stop = (stopping = new AbortController());
  const before = numForgotten;
  isPrepared = false;
  try {
    await renewed;
    if (stop.signal.aborted) return post({ kind: "end", id });
    const running = session!;
    const { tokenizer } = device!;
    const vault = new Vault(); // a question has all messages, so placeholders stay the same
    const messages = vault.hideMessages(question.messages);
    const prompt = tokenizer.chat(messages, { continueFinal: question.continueFinal });
    const { temperature, topP, seed, maxNewTokens } = question;
    const sampling = { temperature, seed, maxNewTokens, ...(topP === undefined ? {} : { topP }) };
    const draft = question.speculation ? {} : { draft: 0 };
    const writer = new ChunkWriter(tokenizer, running, prompt);
    const restorer = new ChunkRestorer(vault);
    const events = running.stream(prompt, { ...sampling, ...draft });
    stop.signal.addEventListener("abort", () => running.stop());
    for await (const event of events) {
      if (stop.signal.aborted) break;
      post({ kind: "chunk", id, chunk: restorer.chunk(writer.chunk(event, link())) });
    }
    post({ kind: "end", id });
    if (before === numForgotten) await keepPrefix(device!.manifest, running.prefix());
  } catch (error) {
    post({ kind: "end", id, failure: failure(error) });
    // A refused session stays refused.
    await renew();
  } finally {
    if (stopping === stop) stopping = undefined;
  }
}

self.addEventListener("message", ({ data }: MessageEvent<ToWorker>) => {
  if (data.kind === "load") {
    load(data.token).catch((error) => post({ kind: "failed", failure: failure(error) }));
  } else if (data.kind === "ask") {
    void ask(data.id, data.question);
  } else if (data.kind === "stop") {
    stopping?.abort();
  } else if (data.kind === "forget") {
    numForgotten += 1;
    void caches.delete(PREFIX_CACHE);
  } else if (data.kind === "network") {
    session?.reconnect();
  } else if (transport) {
    transport.cut = data.cut;
    if (!data.cut) session?.reconnect();
    if (session) post({ kind: "link", link: link() });
  }
});

setInterval(() => void update(), UPDATE_EVERY_MS);
setInterval(() => session && post({ kind: "link", link: link() }), REPORT_MS);
