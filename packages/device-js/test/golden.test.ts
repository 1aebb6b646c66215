/** Equality with the Python device: noise, activations, drafts, the number of drafts, messages. */
import { readFileSync } from "node:fs";
import { create, fromBinary } from "@bufbuild/protobuf";
import { expect, test } from "vitest";
import { GenerationDefaults } from "../src/bundle/generation_defaults.js";
import { InputError, WireError } from "../src/errors.js";
import { ActivationCodec, ActivationLayout, halfToNumber } from "../src/protocol/activations.js";
import { Fleet, fleetKey } from "../src/protocol/fleet.js";
import { SamplingSchema } from "../src/protocol/target_pb.js";
import { samplingMessage } from "../src/protocol/wire.js";
import { gumbel, philox, uniform } from "../src/sampling/noise.js";
import { samplingParams } from "../src/sampling/params.js";
import { chooseDraft } from "../src/sampling/ranking.js";
import { LinkPolicy } from "../src/session/link_policy.js";
import { FakeServer, MANIFEST } from "./fake_target.js";

/** Made by packages/moaspec-edge/tests/write_golden.py. */
const golden = JSON.parse(readFileSync(new URL("golden.json", import.meta.url), "utf8"));

/** Python's names of options as ours. */
function options(given: Record<string, any>) {
  const named = Object.entries(given).map(([name, value]) => [
    name.replace(/_(.)/g, (_, letter: string) => letter.toUpperCase()),
    name === "seed" ? (value === "" ? undefined : BigInt(value)) : name === "logit_bias" ? new Map(value) : value,
  ]);
  return Object.fromEntries(named);
}

test("blocks of Philox", () => {
  for (const { counter, key, words } of golden.words) expect(philox(counter, key)).toEqual(words);
});

test("noise, bit for bit", () => {
  for (const { seed, choice, position, tokenId, value } of golden.noise) {
    const key = { seed: BigInt(seed), choice };
    expect(uniform(key, position, tokenId)).toBe(value);
    expect(gumbel(key, position, tokenId)).toBe(-Math.log(-Math.log(value)));
  }
});

test("activations, bit for bit, also of hostile bytes", () => {
  for (const { codec, heads, dim, data, key, value } of golden.activations) {
    const found = new ActivationCodec(codec, heads, dim).decode(Buffer.from(data, "base64"), 3);
    expect(found.key).toEqual(Float32Array.from(key));
    expect(found.value).toEqual(Float32Array.from(value));
  }
});

test("activations of reused layers follow CA's", () => {
  const manifest = {
    ...MANIFEST,
    cross_attention: { num_kv_heads: 2, head_dim: 6 },
    num_target_layers: 2,
    target: { ...MANIFEST.target, num_kv_heads: 3, head_dim: 4 },
  };
  for (const { codec, data, key, value } of golden.layered_activations) {
    const layout = new ActivationLayout(codec, manifest);
    const found = layout.decode(Buffer.from(data, "base64"), 5);
    expect(found.key).toEqual(Float32Array.from(key));
    expect(found.value).toEqual(Float32Array.from(value));
    expect(() => layout.decode(new Uint8Array(layout.tokenBytes + 1), 1)).toThrow(WireError);
  }
});

test("activations of another size, odd widths and unknown codecs", () => {
  expect(() => new ActivationCodec("fp16", 1, 2).decode(new Uint8Array(15), 2)).toThrow(WireError);
  expect(() => new ActivationCodec("fp16", 1, 3)).toThrow(InputError);
  expect(() => new ActivationCodec("toString" as "fp16", 1, 2)).toThrow(InputError);
});

test("half precision", () => {
  const known = { 0x3c00: 1, 0xc000: -2, 0x0001: 2 ** -24, 0x03ff: 1023 * 2 ** -24, 0x7bff: 65504, 0xfc00: -Infinity };
  for (const [bits, value] of Object.entries(known)) expect(halfToNumber(Number(bits))).toBe(value);
  expect(halfToNumber(0x7e00)).toBeNaN();
});

test("drafts, greedy and with noise", () => {
  for (const { settings, position, tokenIds, logQ, chosen } of golden.drafts) {
    const sampling = samplingParams(options(settings));
    expect(chooseDraft({ tokenIds, logQ }, sampling, position), JSON.stringify(settings)).toBe(chosen);
  }
});

test("expected speeds of chains", () => {
  for (const { ahead, rounds, speeds } of golden.speeds) {
    const policy = new LinkPolicy(() => 80, () => 6, ahead);
    for (const [drafted, accepted] of rounds) policy.record(drafted, accepted);
    policy.speeds().forEach((speed, i) => expect(speed).toBeCloseTo(speeds[i], 9));
    expect(policy.numDrafts()).toBe(speeds.indexOf(Math.max(...speeds)) + 1);
  }
});

test("numbers of drafts, round by round", () => {
  for (const { ahead, stepMs, plainMs, drafts } of golden.lengths) {
    const policy = new LinkPolicy(() => 80, () => stepMs ?? undefined, ahead, () => plainMs ?? undefined);
    const chosen = drafts.map((expected: number, turn: number) => {
      const found = policy.numDrafts();
      policy.observe(Math.floor(turn / 50) % 2 === 0);
      const drafted = turn % 3 ? expected : 0; // the server drops some
      if (expected) policy.record(drafted, drafted >> 1);
      return found;
    });
    expect(chosen).toEqual(drafts);
  }
});

test("the servers of a fleet, in the order in which a text tries them", () => {
  for (const { servers, text, ranked } of golden.fleets) {
    const fleet = new Fleet(new Map(servers.map((one: string) => [one, new FakeServer()])));
    expect(fleet.ranked(fleetKey(text))).toEqual(ranked);
  }
});

test("messages of sampling options with a model's defaults", () => {
  for (const { config, options: given, message } of golden.messages) {
    const defaults = new GenerationDefaults(config).settings(given.temperature > 0);
    const sampling = samplingParams(options(given), defaults);
    const made = create(SamplingSchema, samplingMessage(sampling, [9, 2], 33));
    expect(made).toEqual(fromBinary(SamplingSchema, Buffer.from(message, "base64")));
  }
});

test("a model's settings that are not supported", () => {
  for (const config of [{ num_beams: 4 }, { stop_strings: ["x"] }, { sequence_bias: [[[1, 2], 1]] }]) {
    expect(() => new GenerationDefaults(config).settings(false)).toThrow(InputError);
  }
  expect(new GenerationDefaults({ typical_p: 0.5, num_beams: 1, dola_layers: null }).settings(false)).toBeTruthy();
  expect(() => new GenerationDefaults({ typical_p: 0.5 }).settings(true)).toThrow(InputError);
});

test("the gain of drafts is known once both times are measured", () => {
  const gain = (waitMs: number, stepMs: number | undefined, plainMs: number | undefined) =>
    new LinkPolicy(() => waitMs, () => stepMs, true, () => plainMs).gain;
  expect(gain(160, 5, 150)).toBeGreaterThan(1);
  expect(gain(40, 5, 8)).toBeLessThan(1);
  expect(gain(160, undefined, 150)).toBeUndefined();
  expect(gain(160, 5, undefined)).toBeUndefined();
});
