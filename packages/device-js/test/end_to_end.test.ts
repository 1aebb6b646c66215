/**
 * A device in Node against a real `moaspec target-server`, on a tiny model.
 *
 * Needs Python with moaspec and onnx: $MOASPEC_PYTHON, or the repository's .venv. The models are made once, in
 * $MOASPEC_TEST_MODELS or a new directory.
 */
import { execFileSync, spawn, spawnSync } from "node:child_process";
import type { ChildProcess } from "node:child_process";
import { randomInt } from "node:crypto";
import { existsSync, mkdtempSync, readFileSync, rmSync } from "node:fs";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { delimiter, join } from "node:path";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";
import { fromBinary } from "@bufbuild/protobuf";
import * as ort from "onnxruntime-web";
import { afterAll, afterEach, beforeAll, describe, expect, test } from "vitest";
import WebSocket from "ws";
import { loadDevice } from "../src/device.js";
import type { LoadedDevice } from "../src/device.js";
import { BundleError, RefusedError } from "../src/errors.js";
import { fromDirectory } from "../src/node.js";
import { Vault } from "../src/privacy/vault.js";
import { ActivationLayout } from "../src/protocol/activations.js";
import { Fleet } from "../src/protocol/fleet.js";
import { ClientMessageSchema } from "../src/protocol/target_pb.js";
import type { Open } from "../src/protocol/target_pb.js";
import { WebSocketTransport } from "../src/protocol/websocket.js";
import type { WebSocketOptions } from "../src/protocol/websocket.js";
import type { DrafterVersion } from "../src/session/server_calls.js";
import type { SessionOptions, TurnOptions } from "../src/session/options.js";
import { RemoteSession } from "../src/session/remote_session.js";
import { RemoteText } from "../src/session/server_text.js";
import { draftInTurn, FaultyTransport } from "./fake_target.js";
import type { Faults } from "./fake_target.js";

const repository = fileURLToPath(new URL("../../..", import.meta.url));
const python = process.env["MOASPEC_PYTHON"] ?? join(repository, ".venv/bin/python");
const tests = ["tests", "packages/moaspec-edge/tests"].map((name) => join(repository, name));
const PYTHONPATH = [...tests, process.env["PYTHONPATH"] ?? ""].filter(Boolean).join(delimiter);
const environment = { ...process.env, PYTHONPATH };
/** Bundles are exported here, which needs the package onnx. */
const hasPython = spawnSync(python, ["-c", "import onnx"], { env: environment }).status === 0;

ort.env.wasm.numThreads = 1;

interface Answer {
  prompt: number[];
  settings: Record<string, any>;
  tokenIds: number[];
  stopReason: string;
}

let directory = "";
let server: ChildProcess | undefined;
let port = 0;
let session: RemoteSession | undefined;
let expected: {
  conversations: any[][];
  prompts: number[][];
  continued: number[][];
  tools: Record<string, unknown>[];
  withTools: number[];
  private: { messages: any[]; hidden: any[]; answer: Answer };
  answers: Answer[];
  shaped: Answer[];
  chains: { text: number[]; count: number; data: string; drafts: number[] }[];
  texts: [number[], string][];
};

/** A port that nobody listens on, below those that the system gives to others meanwhile. */
async function freePort(): Promise<number> {
  for (;;) {
    const found = randomInt(20_000, 32_000);
    const listener = createServer().listen(found, "127.0.0.1");
    const isFree = await new Promise((resolve) => {
      listener.once("listening", () => resolve(true)).once("error", () => resolve(false));
    });
    if (!isFree) continue;
    await new Promise((resolve) => listener.close(resolve));
    return found;
  }
}

/** Start a server; it always listens on the same port. */
async function start(): Promise<void> {
  const at = (name: string) => join(directory, name);
  const places = ["--port", `${port}`];
  const models = ["--model", at("target"), "--drafter", at("drafter"), "--dtype", "float32", "--threads", "1"];
  server = spawn(python, ["-m", "moaspec", "target-server", ...places, ...models], { env: environment });
  let errors = "";
  server.stderr!.on("data", (piece) => (errors += piece));
  const line = await new Promise<string>((resolve, reject) => {
    createInterface(server!.stdout!).once("line", resolve);
    server!.once("exit", (code) => reject(new Error(`the server ended with ${code}: ${errors}`)));
  });
  expect(JSON.parse(line)).toBeTruthy();
}

/** A server whose drafter changes on demand; `at`: its port. */
async function serveVersions(): Promise<{ at: number; adopt(name: string): Promise<void>; end(): void }> {
  const script = join(repository, "packages/moaspec-edge/tests/remote/device_js/serve_versions.py");
  const process = spawn(python, [script, directory], { env: environment, stdio: ["pipe", "pipe", "inherit"] });
  const lines = createInterface(process.stdout!)[Symbol.asyncIterator]();
  const answer = async () => (await lines.next()).value as string;
  const at = Number(await answer());
  const adopt = async (name: string) => {
    process.stdin!.write(`${name}\n`);
    expect(await answer()).toBe(name);
  };
  return { at, adopt, end: () => void process.kill("SIGKILL") };
}

function stop(): Promise<void> {
  const ended = new Promise<void>((resolve) => server!.once("exit", () => resolve()));
  server!.kill("SIGKILL");
  return ended;
}

function transport(options: WebSocketOptions = {}): WebSocketTransport {
  return new WebSocketTransport(`ws://127.0.0.1:${port}`, { WebSocket: WebSocket as any, ...options });
}

async function made(options: SessionOptions = {}, faults: Faults = {}, bundle = "bundle") {
  const device = await loadDevice(fromDirectory(join(directory, bundle)), ort);
  const link = new FaultyTransport(transport(), faults);
  session = new RemoteSession(device, link, options);
  return { session, link };
}

function turnOptions(settings: Record<string, any>): TurnOptions {
  const named = Object.entries(settings).map(([name, value]) => [
    name.replace(/_(.)/g, (_, letter: string) => letter.toUpperCase()),
    name === "seed" ? BigInt(value) : value,
  ]);
  return { maxNewTokens: 32, ...Object.fromEntries(named) };
}

describe.skipIf(!hasPython)("a real server", () => {
  beforeAll(async () => {
    directory = process.env["MOASPEC_TEST_MODELS"] ?? mkdtempSync(join(tmpdir(), "moaspec-device-"));
    if (!existsSync(join(directory, "expected.json"))) {
      const script = join(repository, "packages/moaspec-edge/tests/remote/device_js/make_models.py");
      execFileSync(python, [script, directory], { env: environment, stdio: ["ignore", "ignore", "inherit"] });
    }
    expected = JSON.parse(readFileSync(join(directory, "expected.json"), "utf8"));
    port = await freePort();
    await start();
  }, 600_000);

  afterEach(() => session?.close());

  afterAll(async () => {
    if (server) await stop();
    if (!process.env["MOASPEC_TEST_MODELS"]) rmSync(directory, { recursive: true, force: true });
  });

  test("token ids and texts are those of Python", async () => {
    const { tokenizer } = await loadDevice(fromDirectory(join(directory, "bundle")), ort);
    expected.conversations.forEach((messages, i) => {
      expect(tokenizer.chat(messages as any)).toEqual(expected.prompts[i]);
    });
    expected.conversations.forEach((messages, i) => {
      expect(tokenizer.chat(messages as any, { continueFinal: true })).toEqual(expected.continued[i]);
    });
    const { tools, conversations } = expected;
    expect(tokenizer.chat(conversations[0] as any, { tools })).toEqual(expected.withTools);
    for (const [ids, text] of expected.texts) expect(tokenizer.decode(ids)).toBe(text);
  });

  test("texts are those of moaspec.generate, greedy and sampled", async () => {
    const found = await made({ draft: 3 });
    let accepted = 0;
    for (const { prompt, settings, tokenIds, stopReason } of expected.answers) {
      const result = await found.session.generate(prompt, turnOptions(settings));
      expect([result.tokenIds, result.stopReason]).toEqual([tokenIds, stopReason]);
      accepted += result.sources.filter((source) => source === "draft").length;
    }
    expect(accepted).toBeGreaterThan(50);
  }, 300_000);

  test("a fleet of which one server is gone", async () => {
    const device = await loadDevice(fromDirectory(join(directory, "bundle")), ort);
    const addresses = [await freePort(), port].map((at) => `ws://127.0.0.1:${at}`);
    const fleet = Fleet.at(addresses, { WebSocket: WebSocket as any });
    for (const { prompt, settings, tokenIds } of expected.answers.slice(0, 4)) {
      session = new RemoteSession(device, fleet, { draft: 3 });
      expect((await session.generate(prompt, turnOptions(settings))).tokenIds).toEqual(tokenIds);
      await session.close();
    }
  }, 300_000);

  test("private spans: the server reads the same placeholders as from Python", async () => {
    const { messages, hidden, answer } = expected.private;
    const vault = new Vault();
    expect(vault.hideMessages(messages)).toEqual(hidden);
    const found = await made({ draft: 3 });
    const { tokenizer } = await loadDevice(fromDirectory(join(directory, "bundle")), ort);
    const prompt = tokenizer.chat(hidden);
    expect(prompt).toEqual(answer.prompt);
    expect((await found.session.generate(prompt, turnOptions({}))).tokenIds).toEqual(answer.tokenIds);
    const kinds = found.link.sent.map((frame) => fromBinary(ClientMessageSchema, frame).kind);
    const { tokenIds } = kinds.find((kind) => kind.case === "open")!.value as Open;
    expect(tokenIds).toEqual(answer.prompt);
    expect(tokenizer.decode(tokenIds)).not.toMatch(/Ada|Lovelace|example/);
    expect(vault.restore(tokenizer.decode(tokenIds))).toContain("I am Ada Lovelace, ada@example.org. [EMAIL_1]?");
  });

  test.each(["fp16", "int4"] as const)("activations in %s, as many drafts as pay", async (codec) => {
    const found = await made({ codec });
    for (const { prompt, settings, tokenIds } of expected.answers.slice(0, 4)) {
      expect((await found.session.generate(prompt, turnOptions(settings))).tokenIds).toEqual(tokenIds);
    }
  }, 300_000);

  test.each(["int8", "int4"])("a bundle in %s", async (bits) => {
    const found = await made({ draft: 3 }, {}, `bundle-${bits}`);
    const { prompt, settings, tokenIds } = expected.answers[0]!;
    const result = await found.session.generate(prompt, turnOptions(settings));
    expect(result.tokenIds).toEqual(tokenIds);
    expect(result.sources).toContain("draft");
  });

  test("a bundle that reuses two target layers drafts as Python's device, and texts stay", async () => {
    const { drafter, manifest } = await loadDevice(fromDirectory(join(directory, "bundle-n2")), ort);
    const layout = new ActivationLayout("int8", manifest);
    for (const { text, count, data, drafts } of expected.chains) {
      drafter.cut(0);
      if (count) drafter.place(0, layout.decode(Buffer.from(data, "base64"), count));
      const chain: number[] = [];
      for (let start = 0; chain.length < drafts.length; start = text.length + chain.length - 1) {
        chain.push((await drafter.run([...text, ...chain].slice(start), start)).tokenIds[0]!);
      }
      expect(chain).toEqual(drafts);
    }
    const found = await made({ draft: 3 }, {}, "bundle-n2");
    for (const { prompt, settings, tokenIds } of expected.answers.slice(0, 2)) {
      expect((await found.session.generate(prompt, turnOptions(settings))).tokenIds).toEqual(tokenIds);
    }
  }, 300_000);

  test("versions of a drafter that learns are taken between turns, and a roll-back", async () => {
    const { at, adopt, end } = await serveVersions();
    const link = new WebSocketTransport(`ws://127.0.0.1:${at}`, { WebSocket: WebSocket as any });
    const load = (name: string) => loadDevice(fromDirectory(join(directory, name)), ort);
    const drafts = async ({ drafter }: LoadedDevice) => {
      drafter.renew!();
      return drafter.run(expected.prompts[0]!, 0);
    };
    try {
      const device = await load("bundle");
      session = new RemoteSession(device, link, { draft: 3 });
      expect(await device.update(link)).toBeUndefined();
      for (const [number, name] of ["drafter", "version", "drafter"].entries()) {
        const { prompt, settings, tokenIds } = expected.answers[number]!;
        const text: number[] = [];
        for await (const event of session.stream(prompt, turnOptions(settings))) {
          if (!text.length && number < 2) {
            await adopt(["version", "drafter"][number]!);
            expect(await device.update(link)).toBeDefined();
            expect(await device.update(link)).toBeUndefined();
          }
          text.splice(event.start, Infinity, ...event.tokenIds);
        }
        expect([text, name]).toEqual([tokenIds, name]);
      }
      await session.close();
      expect(device.version).toBe(device.manifest.fingerprint);
      await adopt("version");
      for (const bundle of ["bundle", "bundle-int8", "bundle-int4", "bundle-n2"]) {
        const changed = await load(bundle);
        const before = await drafts(changed);
        const given = (await changed.update(link))!;
        const later = await load(`${bundle}-later`);
        expect(changed.version).toBe(later.manifest.fingerprint);
        const found = await drafts(changed);
        expect(found).toEqual(await drafts(later));
        expect(found).not.toEqual(before);
        for (const data of [given.data.subarray(1), given.data.slice().fill(255)]) {
          await expect(changed.take({ version: "damaged", data })).rejects.toThrow(RefusedError);
        }
        expect([await drafts(changed), changed.version]).toEqual([found, given.version]);
        let sessions = 0;
        const create: any = (...args: [any]) => (sessions++, ort.InferenceSession.create(...args));
        const runtime = { ...ort, InferenceSession: { create } };
        const again = (kept: DrafterVersion) =>
          loadDevice(fromDirectory(join(directory, bundle)), runtime, {}, async () => kept);
        const kept = await again(given);
        expect([sessions, kept.version, await drafts(kept)]).toEqual([1, given.version, found]);
        const own = await again({ version: "damaged", data: given.data.slice(1) });
        expect([sessions, own.version, await drafts(own)]).toEqual([2, own.manifest.fingerprint, before]);
      }
    } finally {
      end();
    }
  }, 300_000);

  test("40 prompts over a link whose frames are lost, doubled, late and overtaken", async () => {
    const found = await made({ draft: 3, retryMs: 100 }, { loss: 0.1, twice: 0.2, delayMs: 20 });
    expect(expected.shaped).toHaveLength(40);
    for (const { prompt, settings, tokenIds } of expected.shaped) {
      const options = { ...turnOptions(settings), maxNewTokens: tokenIds.length };
      expect((await found.session.generate(prompt, options)).tokenIds).toEqual(tokenIds);
    }
  }, 300_000);

  test("streamed tokens and drafts in turn, over such a link and a clean one", async () => {
    for (const faults of [{}, { loss: 0.1, twice: 0.2, delayMs: 20 }]) {
      const found = await made({ retryMs: 100 }, faults);
      draftInTurn(found.session);
      for (const { prompt, settings, tokenIds } of expected.shaped.slice(0, 12)) {
        const options = { ...turnOptions(settings), maxNewTokens: tokenIds.length };
        expect((await found.session.generate(prompt, options)).tokenIds).toEqual(tokenIds);
      }
      const kinds = found.link.sent.map((frame) => fromBinary(ClientMessageSchema, frame).kind);
      const drafts = kinds.flatMap((kind) => (kind.case === "draft" ? [kind.value] : []));
      expect(drafts.some(({ further }) => further > 0)).toBe(true);
      expect(drafts.some(({ tokens }) => tokens.length > 0)).toBe(true);
      await found.session.close();
    }
  }, 300_000);

  test("cuts: text goes on and is corrected", async () => {
    const found = await made({ draft: 3 });
    for (const { prompt, settings, tokenIds } of expected.answers.slice(0, 10)) {
      const text: number[] = [];
      let hasCut = false;
      for await (const event of found.session.stream(prompt, turnOptions(settings))) {
        text.splice(event.start, Infinity, ...event.tokenIds);
        if (!hasCut && text.length > 6) hasCut = found.link.hole = true;
        if (found.session.provisional.length >= 5) found.link.hole = false;
      }
      expect(text).toEqual(tokenIds);
      found.link.hole = false;
    }
    const { cuts, provisional } = found.session.stats;
    expect(cuts).toBeGreaterThanOrEqual(10);
    expect(provisional).toBeGreaterThanOrEqual(50);
  }, 300_000);

  test("a killed server: text goes on, and the next server corrects it", async () => {
    const found = await made({ draft: 3 });
    const { prompt, settings, tokenIds } = expected.answers[1]!;
    const text: number[] = [];
    let restarted: Promise<void> | undefined;
    for await (const event of found.session.stream(prompt, turnOptions(settings))) {
      text.splice(event.start, Infinity, ...event.tokenIds);
      if (!restarted && text.length > 6) restarted = stop().then(start);
    }
    await restarted;
    expect(text).toEqual(tokenIds);
    expect(found.session.stats.provisional).toBeGreaterThan(0);
    expect(found.session.stats.reopened).toBeGreaterThan(0);
  }, 600_000);

  test("a server decodes alone", async () => {
    const texts = new RemoteText(await loadDevice(fromDirectory(join(directory, "bundle")), ort), transport());
    for (const { prompt, settings, tokenIds, stopReason } of [...expected.answers.slice(0, 4), expected.answers.at(-1)!]) {
      const text: number[] = [];
      let end: string | undefined;
      for await (const event of texts.stream(prompt, { ...turnOptions(settings), speculate: true })) {
        text.push(...event.tokenIds);
        end = event.stopReason;
      }
      expect([text, end]).toEqual([tokenIds, stopReason]);
    }
  }, 300_000);

  test("a server describes itself", async () => {
    const { manifest } = await loadDevice(fromDirectory(join(directory, "bundle")), ort);
    const description = await transport().describe(30_000);
    expect(description).toMatchObject({ protocol: manifest.protocol, samplingVersion: manifest.sampling_version, engine: "torch" });
    expect(description.drafter).toBe(manifest.fingerprint);
  });

  test("a server with another drafter refuses", async () => {
    const device = await loadDevice(fromDirectory(join(directory, "bundle")), ort);
    const manifest = { ...device.manifest, fingerprint: "another" };
    session = new RemoteSession({ ...device, manifest }, transport());
    await expect(session.generate([1, 2])).rejects.toThrow(RefusedError);
  });

  test("damaged bundles", async () => {
    const read = fromDirectory(join(directory, "bundle"));
    const changed = (name: string, change: (data: Uint8Array) => Uint8Array) =>
      loadDevice(async (asked, most) => {
        const data = await read(asked, most);
        return asked === name ? change(data) : data;
      }, ort);
    const edit = (changes: object) =>
      changed("manifest.json", (data) => {
        const values = JSON.parse(new TextDecoder().decode(data));
        return new TextEncoder().encode(JSON.stringify({ ...values, ...changes }));
      });
    const flip = (data: Uint8Array) => data.map((byte, i) => (i === data.length >> 1 ? byte ^ 1 : byte));
    await expect(changed("drafter.onnx", flip)).rejects.toThrow(/drafter.onnx/);
    await expect(changed("tokenizer.json", (data) => data.slice(1))).rejects.toThrow(/tokenizer.json/);
    const numbers = { num_kv_heads: 1.5, head_dim: 8 };
    for (const changes of [
      { format: "other" },
      { format_version: 99 },
      { files: {} },
      { max_positions: 2 ** 25 },
      { self_attention: numbers },
      { cross_attention: [] },
      { target: null },
      { stop_token_ids: "all" },
      { rope_growth: -1 },
      { num_target_layers: 1.5 },
      { num_target_layers: 2 ** 20 },
      { files: { "drafter.onnx": { bytes: 1, sha256: "x" }, "../x": { bytes: 1, sha256: "x" } } },
    ]) {
      await expect(edit(changes), JSON.stringify(changes)).rejects.toThrow(BundleError);
    }
    await expect(loadDevice(fromDirectory(join(directory, "none")), ort)).rejects.toThrow(BundleError);
  });
});
