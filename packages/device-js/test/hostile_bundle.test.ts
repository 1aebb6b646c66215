/** Bundles that lie: each lie is an error of this package, and no file outside the bundle is asked for. */
import { createHash } from "node:crypto";
import { expect, test } from "vitest";
import { readBundle } from "../src/bundle/bundle.js";
import { OnnxDrafter } from "../src/bundle/onnx_drafter.js";
import { DeviceTokenizer } from "../src/bundle/tokenizer.js";
import { loadDevice } from "../src/device.js";
import { BundleError, InputError, MoaSpecError } from "../src/errors.js";
import { RemoteSession } from "../src/session/remote_session.js";
import { FakeServer, MANIFEST, device } from "./fake_target.js";
import { GenerationDefaults } from "../src/bundle/generation_defaults.js";

const TOKENIZER = {
  model: { type: "BPE", vocab: { a: 0, b: 1, ab: 2 }, merges: [["a", "b"]] },
  added_tokens: [] as unknown,
  normalizer: null,
  pre_tokenizer: null,
  post_processor: null,
  decoder: null,
};
type Files = Record<string, unknown>;

function files(changes: Files = {}): Map<string, Uint8Array> {
  const all = { "tokenizer.json": TOKENIZER, "tokenizer_config.json": {}, "drafter.onnx": "graph", ...changes };
  const bytes = (value: unknown) => new TextEncoder().encode(typeof value === "string" ? value : JSON.stringify(value));
  return new Map(Object.entries(all).map(([name, value]) => [name, bytes(value)]));
}

function facts(of: Map<string, Uint8Array>) {
  const described = [...of].map(([name, data]) => [
    name,
    { bytes: data.length, sha256: createHash("sha256").update(data).digest("hex") },
  ]);
  const versions = { format_version: 1, law: MANIFEST.sampling_version };
  return { ...MANIFEST, ...versions, format: "moaspec-device-onnx", files: Object.fromEntries(described) };
}

/** Reads a bundle with this manifest; notes the names that are asked for. */
function reading(manifest: unknown, of = files(), asked: string[] = []) {
  return async (name: string) => {
    asked.push(name);
    if (name !== "manifest.json") return of.get(name) ?? new Uint8Array();
    return manifest instanceof Uint8Array ? manifest : new TextEncoder().encode(JSON.stringify(manifest));
  };
}

const good = facts(files());
const graph = good.files["drafter.onnx"]!;

test("a bundle that is none of these", async () => {
  const bundle = await readBundle(reading(good));
  expect(new DeviceTokenizer(bundle).encode("ab")).toEqual([2]);
});

test.each([
  7, {}, { packing: "onnx" }, { packing: 1, ranges: [[0, 1]] },
  ...["all", [], [[1]], [[0, 1, 2]], [[0.5, 1]], [[-1, 1]], [[0, 0]], [[0, 6]], [[2, 1], [2, 1]], [[0, 2 ** 60]], [null]].map((ranges) => ({ packing: "onnx", ranges })),
])("a manifest with versions %j", async (versions) => {
  await expect(readBundle(reading({ ...good, versions }))).rejects.toThrow(BundleError);
});

test("a manifest with versions, or without as in earlier releases", async () => {
  const versions = { packing: "onnx", ranges: [[0, 1], [1, 2], [4, 1]] };
  for (const given of [versions, null]) {
    expect((await readBundle(reading({ ...good, versions: given }))).manifest.versions).toEqual(given ?? undefined);
  }
});

test("a manifest of an earlier release", async () => {
  const { self_attention_layers, ...earlier } = good;
  expect((await readBundle(reading(earlier))).manifest.self_attention_layers).toBe(self_attention_layers);
});

test("a manifest with the largest caches: as many numbers as two keys may have", async () => {
  const sizes = { num_kv_heads: 512, head_dim: 128 };
  const large = (changes: object) => readBundle(reading({ ...good, self_attention: sizes, cross_attention: sizes, ...changes }));
  expect((await large({})).manifest.self_attention).toEqual(sizes);
  await expect(large({ num_target_layers: 1 })).rejects.toThrow("the keys of a token have 131074 numbers; at most 131072");
});

const text = (value: string) => new TextEncoder().encode(value);
const named = (name: string) => ({ ...good, files: { ...good.files, [name]: graph } });
const graphIs = (changes: object) => ({ ...good, files: { ...good.files, "drafter.onnx": { ...graph, ...changes } } });

const MANIFESTS: Record<string, unknown> = {
  "noise": new Uint8Array(100).fill(0xff),
  "nothing": new Uint8Array(),
  "a list": [],
  "a hundred thousand lists": text("[".repeat(100_000)),
  "a page of HTML": text("<!doctype html><script>alert(1)</script>"),
  "markup as the format": { ...good, format: "<img src=x onerror=alert(1)>" },
  "another version": { ...good, format_version: 2 },
  "a version as text": { ...good, format_version: "1" },
  "another protocol": { ...good, protocol: 2 },
  "another version of sampling": { ...good, law: 3 },
  "versions as markup": { ...good, protocol: "<script>".repeat(100), law: null },
  "no files": { ...good, files: {} },
  "files as a list": { ...good, files: [graph] },
  "too many files": { ...good, files: { ...good.files, ...Object.fromEntries(Array.from({ length: 99 }, (_, i) => [`f${i}`, graph])) } },
  ...Object.fromEntries(
    [
      "../drafter.onnx", "/etc/passwd", "a/b", "..", ".", "", "http://evil.example/x", "//evil.example/x", "x?y=1", "x#y",
      "%2e%2e%2fx", "C:\\x", "a\\b", "a\nb", "a\0b", "<img src=x onerror=alert(1)>", "javascript:alert(1)", "\u202egpj.exe",
    ].map((name) => [`a file named ${JSON.stringify(name)}`, named(name)]),
  ),
  "a size below zero": graphIs({ bytes: -1 }),
  "half a byte": graphIs({ bytes: 0.5 }),
  "a size of 2^53": graphIs({ bytes: 2 ** 53 }),
  "another size": graphIs({ bytes: 4 }),
  "another hash": graphIs({ sha256: "0".repeat(64) }),
  "half a hash": graphIs({ sha256: graph.sha256.slice(0, 32) }),
  "a hash as a list": graphIs({ sha256: [graph.sha256] }),
  "keys without heads": { ...good, cross_attention: { num_kv_heads: 0, head_dim: 2 } },
  "keys of 2^40 numbers": { ...good, self_attention: { num_kv_heads: 2 ** 20, head_dim: 2 ** 20 } },
  "a vocabulary below zero": { ...good, target: { ...good.target, vocab_size: -97 } },
  "positions as text": { ...good, max_positions: "400" },
  "no layer of SA": { ...good, self_attention_layers: 0 },
  "2^30 layers of SA": { ...good, self_attention_layers: 2 ** 30 },
  "1024 wide layers of SA": {
    ...good, self_attention_layers: 1024, self_attention: { num_kv_heads: 512, head_dim: 128 },
  },
  "2^30 reused layers": { ...good, num_target_layers: 2 ** 30 },
  "more reused layers than the target has": { ...good, num_target_layers: 2 },
  "a target of 2^20 layers": { ...good, target: { ...good.target, num_layers: 2 ** 20 } },
  "keys of 2^26 numbers in all layers": {
    ...good, num_target_layers: 1024, target: { ...good.target, num_layers: 1024, num_kv_heads: 512, head_dim: 128 },
  },
  "stop tokens below zero": { ...good, stop_token_ids: [-1] },
  "no fingerprint": { ...good, fingerprint: null },
  "a prototype": text(`{"__proto__": ${JSON.stringify(good)}}`),
};

test.each(Object.keys(MANIFESTS))("a manifest with %s", async (name) => {
  const asked: string[] = [];
  const error: unknown = await readBundle(reading(MANIFESTS[name], files(), asked)).catch((thrown: unknown) => thrown);
  expect(error).toBeInstanceOf(BundleError);
  expect((error as Error).message.length).toBeLessThan(400);
  expect((error as Error).message).not.toContain("\n");
  expect(asked.every((one) => one === "manifest.json" || files().has(one))).toBe(true);
});

const FILES: Record<string, Files> = {
  "a tokenizer that is a list": { "tokenizer.json": [] },
  "a tokenizer of nothing": { "tokenizer.json": {} },
  "an unknown model": { "tokenizer.json": { model: { type: "<script>" } } },
  "added tokens that are none": { "tokenizer.json": { ...TOKENIZER, added_tokens: [null] } },
  "added tokens as text": { "tokenizer.json": { ...TOKENIZER, added_tokens: "all" } },
  "a template that ends in the middle": { "tokenizer_config.json": { chat_template: "{% for m in" } },
  "a template that is a number": { "tokenizer_config.json": { chat_template: 7 } },
  "a generation config that is a list": { "generation_config.json": "[]" },
  "a graph of noise": {},
};
const runtime = {
  Tensor: class {},
  InferenceSession: { create: async () => { throw new Error("no graph"); } },
} as any;

test.each(Object.keys(FILES))("a bundle with %s", async (name) => {
  const of = files(FILES[name]);
  await expect(loadDevice(reading(facts(of), of), runtime)).rejects.toThrow(BundleError);
});

test.each([
  { "chat_template": "{{ raise_exception('no') }}" },
  { "chat_template": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}" },
  { "chat_template": "{{ nothing() }}" },
])("a chat template that fails: %j", async (config) => {
  const of = files({ "tokenizer_config.json": config });
  const tokenizer = new DeviceTokenizer(await readBundle(reading(facts(of), of)));
  expect(() => tokenizer.chat([{ role: "user", content: "a" }])).toThrow(InputError);
});

test.each([
  { min_length: -1 }, { min_new_tokens: "many" }, { no_repeat_ngram_size: 2 ** 40 }, { bad_words_ids: "all" }, { bad_words_ids: [null] },
  { suppress_tokens: [null] }, { begin_suppress_tokens: {} }, { forced_bos_token_id: 0.5 }, { exponential_decay_length_penalty: [1] },
  { sequence_bias: [null] }, { sequence_bias: [[[1], "x"]] }, { repetition_penalty: "x" }, { repetition_penalty: -1 },
])("a generation config with %j", async (config) => {
  const generationDefaults = new GenerationDefaults(config);
  const session = new RemoteSession({ ...device(), generationDefaults }, new FakeServer());
  await expect(session.generate([1, 2], { maxNewTokens: 4 })).rejects.toThrow(InputError);
  await session.close();
});

test.each([
  ["no tokens", []],
  ["a token below zero", [-1n]],
  ["a token beyond the vocabulary", [97n]],
])("a graph that drafts %s", async (_, ids) => {
  const outputs = {
    new_text_key: { data: new Float32Array(1024) },
    new_text_value: { data: new Float32Array(1024) },
    top_token_ids: { data: BigInt64Array.from(ids as bigint[]) },
    top_log_q: { data: Float32Array.of(Number.NaN) },
  };
  const lying = { Tensor: class {}, InferenceSession: { create: async () => ({ run: async () => outputs, release: async () => {} }) } } as any;
  await expect(OnnxDrafter.load(await readBundle(reading(good)), lying)).rejects.toThrow(MoaSpecError);
});
