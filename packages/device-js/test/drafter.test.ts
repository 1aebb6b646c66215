/** The drafter's caches with made-up runtimes, reading of bundles, position sets, stop strings. */
import { once } from "node:events";
import { readdirSync, readFileSync } from "node:fs";
import { createServer } from "node:http";
import type { AddressInfo } from "node:net";
import { expect, test } from "vitest";
import { fromUrl } from "../src/bundle/bundle.js";
import type { Bundle } from "../src/bundle/bundle.js";
import { GenerationDefaults } from "../src/bundle/generation_defaults.js";
import { OnnxDrafter } from "../src/bundle/onnx_drafter.js";
import type { DeviceTokenizer } from "../src/bundle/tokenizer.js";
import { BundleError, InputError } from "../src/errors.js";
import { PositionSet } from "../src/protocol/position_set.js";
import { StopStrings } from "../src/session/stop_strings.js";
import { MANIFEST } from "./fake_target.js";

class Tensor {
  constructor(
    readonly type: string,
    readonly data: any,
    readonly dims: number[],
  ) {}
}

/** Runs a made-up graph: slot s of the text cache gets token + s; the draft is a sum over all caches. */
function runtime({ inPlace = false, draft = (sum: number) => sum % 97, logQ = -1 } = {}) {
  const seen: any[] = [];
  const run = async (feeds: any, given: any = {}) => {
    const numSlots = feeds.text_key.dims[1];
    seen.push({ numSlots, mask: Array.from(feeds.memory_mask.data as Uint8Array) });
    const into = (name: string) => {
      const cache = feeds[name];
      const output = inPlace && given[`new_${name}`] ? cache : new Tensor("float32", cache.data.slice(), cache.dims);
      const start = Number(feeds.start.data[0]);
      feeds.token_ids.data.forEach((token: bigint, i: number) => output.data.fill(Number(token) + start + i + 1, 2 * (start + i), 2 * (start + i) + 2));
      return output;
    };
    const new_text_key = into("text_key");
    const new_text_value = into("text_value");
    const all = [new_text_key, feeds.memory_key].flatMap(({ data }) => Array.from(data as Float32Array));
    const sum = all.reduce((total, value) => total + value, 0);
    const top_token_ids = new Tensor("int64", BigInt64Array.of(BigInt(draft(sum))), [1]);
    return { new_text_key, new_text_value, top_token_ids, top_log_q: new Tensor("float32", Float32Array.of(logQ), [1]) };
  };
  const released = { count: 0 };
  const release = async () => void (released.count += 1);
  return { seen, released, module: { Tensor, InferenceSession: { create: async () => ({ run, release }) } } as any };
}

const manifest = { ...MANIFEST, max_positions: 1100 };
const bundle: Bundle = {
  manifest,
  files: new Map([["drafter.onnx", new Uint8Array(1)]]),
  generationDefaults: new GenerationDefaults({}),
};

test.each([false, true])("caches are kept and grow, written in place: %s", async (inPlace) => {
  const { module, seen } = runtime({ inPlace });
  const drafter = await OnnxDrafter.load(bundle, module);
  expect((await drafter.run([5, 6], 0)).tokenIds).toEqual([2 * (6 + 8)]);
  drafter.place(1, { key: Float32Array.of(1, 2), value: Float32Array.of(3, 4), count: 1 });
  expect((await drafter.run([7], 2)).tokenIds).toEqual([2 * (6 + 8 + 10) + 3]);
  expect(seen.at(-1)!.mask.slice(0, 3)).toEqual([0, 1, 0]);
  drafter.place(600, { key: Float32Array.of(0, 0), value: Float32Array.of(0, 0), count: 1 });
  expect((await drafter.run([8], 3)).tokenIds).toEqual([(2 * (6 + 8 + 10 + 12) + 3) % 97]);
  expect(seen.map(({ numSlots }) => numSlots)).toEqual([512, 512, 512, 1024]);
  expect(seen.at(-1)!.mask[600]).toBe(1);
  const held = drafter.memory(2);
  expect([held.count, held.key.length, held.value.length]).toEqual([2, 4, 4]);
  drafter.cut(1);
  await drafter.run([9], 1099);
  expect(seen.at(-1)!.numSlots).toBe(1100);
  expect(seen.at(-1)!.mask).toEqual(new Array(1100).fill(0));
});

test("a version is tried out, and drafts from `renew` on, with the activations that are there", async () => {
  const { module, released } = runtime();
  const drafter = await OnnxDrafter.load(bundle, module);
  drafter.place(0, { key: Float32Array.of(1, 2), value: Float32Array.of(3, 4), count: 1 });
  const old = (await drafter.run([5], 1)).tokenIds;
  expect(drafter.renew()).toBe(false);
  const { InferenceSession } = module;
  const other = runtime({ draft: (sum) => (sum + 1) % 97 });
  module.InferenceSession = other.module.InferenceSession;
  await drafter.prepare(new Uint8Array(2));
  expect((await drafter.run([5], 1)).tokenIds).toEqual(old);
  await drafter.prepare(new Uint8Array(2)); // a newer one, before the first was taken
  expect([released.count, other.released.count]).toEqual([0, 1]);
  expect([drafter.renew(), drafter.renew()]).toEqual([true, false]);
  expect(released.count).toBe(1);
  expect((await drafter.run([5], 1)).tokenIds).toEqual([old[0]! + 1]);
  for (const bad of [runtime({ draft: () => 97 }), runtime({ logQ: Number.NaN }), runtime({ logQ: -Infinity })]) {
    module.InferenceSession = bad.module.InferenceSession;
    await expect(drafter.prepare(new Uint8Array(2))).rejects.toThrow(BundleError);
    expect(bad.released.count).toBe(1);
  }
  module.InferenceSession = InferenceSession;
  expect(drafter.renew()).toBe(false);
  expect((await drafter.run([5], 1)).tokenIds).toEqual([old[0]! + 1]);
});

test("positions that do not exist, and tokens outside the vocabulary", async () => {
  const drafter = await OnnxDrafter.load(bundle, runtime().module);
  for (const [ids, start] of [[[1], 1100], [[], 0], [[1], -1], [[1], 2 ** 32]] as const) {
    await expect(drafter.run(ids, start)).rejects.toThrow(InputError);
  }
  for (const wrong of [97, -1]) {
    await expect(OnnxDrafter.load(bundle, runtime({ draft: () => wrong }).module)).rejects.toThrow(BundleError);
  }
});

test("files below an address: sizes are limited, errors are told", async () => {
  const server = createServer((request, response) => {
    response.statusCode = request.url === "/b/file" ? 200 : 404;
    response.end(Buffer.alloc(1 << 20));
  }).listen(0, "127.0.0.1");
  await once(server, "listening");
  const url = `http://127.0.0.1:${(server.address() as AddressInfo).port}/b`;
  let bytes = 0;
  const read = fromUrl(url, (count) => (bytes += count));
  expect((await read("file", 1 << 20)).length).toBe(1 << 20);
  expect(bytes).toBe(1 << 20);
  expect((await read("file", 10)).length).toBeLessThan(1 << 20);
  await expect(read("none", 10)).rejects.toThrow(BundleError);
  server.closeAllConnections();
  server.close();
});

test("nothing but node.ts needs Node", () => {
  const folder = new URL("../src/", import.meta.url);
  for (const name of readdirSync(folder, { recursive: true }) as string[]) {
    if (!name.endsWith(".ts") || name === "node.ts") continue;
    expect(readFileSync(new URL(name, folder), "utf8"), name).not.toMatch(/from "node:|\bprocess\.|\bBuffer\b/);
  }
});

test("sets of positions", () => {
  const set = new PositionSet([[2, 4], [6, 7]]);
  expect([set.size, set.ranges(), set.gaps(9)]).toEqual([3, [[2, 4], [6, 7]], [[0, 2], [4, 6], [7, 9]]]);
  set.add(3, 6);
  set.cut(5);
  expect([set.ranges(), set.gaps(2), set.gaps(5)]).toEqual([[[2, 5]], [[0, 2]], [[0, 2]]]);
});

/** Decodes bytes: one token is one byte. */
const decode = (ids: readonly number[]) => new TextDecoder().decode(Uint8Array.from(ids));
const bytes = (text: string) => [...new TextEncoder().encode(text)];

test("stop strings are found where they end, also over several tokens and characters", () => {
  const found = (strings: string[], text: string, prompt = "") => {
    const watcher = new StopStrings(strings, { decode } as unknown as DeviceTokenizer, bytes(prompt));
    for (const [i, token] of bytes(text).entries()) {
      const stop = watcher.fork().push(token);
      expect(watcher.push(token)).toBe(stop);
      if (stop) return [stop, i + 1];
    }
    return undefined;
  };
  expect(found(["lo w"], "hello world")).toEqual(["lo w", 7]);
  expect(found(["world", "o w"], "hello world")).toEqual(["o w", 7]);
  expect(found(["é!"], "café!")).toEqual(["é!", 6]);
  expect(found(["ab"], "b", "a")).toBeUndefined();
  expect(found(["x"], "hello")).toBeUndefined();
  expect(found(["b"], "\u00ffb", "a\u00ff")).toEqual(["b", 3]);
});
