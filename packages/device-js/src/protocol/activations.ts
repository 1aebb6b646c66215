import type { Manifest } from "../bundle/manifest.js";
import { InputError, WireError } from "../errors.js";
import { Codec as CodecNumber } from "./target_pb.js";

/** How the server encodes activations: two bytes, one byte or half a byte a number. */
export type CodecName = "fp16" | "int8" | "int4";

export const CODEC_NUMBERS: Record<CodecName, CodecNumber> = {
  fp16: CodecNumber.FP16,
  int8: CodecNumber.INT8,
  int4: CodecNumber.INT4,
};

/** Numbers that share a scale in int4. */
const GROUP = 64;
/** Largest finite fp16 number. */
const MAX_FP16 = 65504;

/**
 * Keys and values of consecutive tokens: CA's, (heads, tokens, dimensions) each, and after them
 * those of each reused target layer.
 *
 * CA is the drafter's cross-attention, which reads the encoder's output for verified tokens.
 */
export interface MemoryParts {
  readonly key: Float32Array;
  readonly value: Float32Array;
  readonly count: number;
}

/**
 * Decodes the records of tokens. A record holds key heads, then value heads, as numbers, and then
 * their scales (`moaspec_edge/protocol/codec.py`).
 */
export class ActivationCodec {
  private readonly numbers: number;
  /** Bytes of a record. */
  readonly tokenBytes: number;

  /**
   * @param name of the codec
   * @param numHeads key-value heads
   * @param headDim dimensions of a head
   * @throws InputError an unknown codec, or an odd width
   */
  constructor(
    readonly name: CodecName,
    private readonly numHeads: number,
    private readonly headDim: number,
  ) {
    if (!Object.hasOwn(CODEC_NUMBERS, name)) {
      throw new InputError(`codec must be fp16, int8 or int4, got ${String(name)}.`);
    }
    if (headDim % 2) throw new InputError(`A record needs an even head dimension, got ${headDim}.`);
    this.numbers = 2 * numHeads * headDim;
    this.tokenBytes = {
      fp16: 2 * this.numbers,
      int8: this.numbers + 4 * numHeads,
      int4: this.numbers / 2 + 4 * Math.ceil(this.numbers / GROUP),
    }[name];
  }

  /**
   * Decode the records of `count` tokens. Numbers that are not finite or too large are clamped.
   *
   * @throws WireError `data` does not have the size of `count` records
   */
  decode(data: Uint8Array, count: number): MemoryParts {
    if (data.length !== count * this.tokenBytes) {
      throw new WireError(
        `${count} tokens in ${this.name} are ${count * this.tokenBytes} bytes, got ${data.length}.`,
      );
    }
    const key = new Float32Array(count * (this.numbers / 2));
    const value = new Float32Array(key.length);
    const record = new Float32Array(this.numbers);
    for (let token = 0; token < count; token++) {
      const start = token * this.tokenBytes;
      this.decodeRecord(data.subarray(start, start + this.tokenBytes), record);
      for (let head = 0; head < 2 * this.numHeads; head++) {
        const into = head < this.numHeads ? key : value;
        const place = ((head % this.numHeads) * count + token) * this.headDim;
        into.set(record.subarray(head * this.headDim, (head + 1) * this.headDim), place);
      }
    }
    return { key, value, count };
  }

  private decodeRecord(bytes: Uint8Array, into: Float32Array): void {
    const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    const half = (index: number, from: number) => halfToNumber(view.getUint16(from + 2 * index, true));
    if (this.name === "fp16") {
      for (let i = 0; i < this.numbers; i++) into[i] = clamped(half(i, 0));
    } else if (this.name === "int8") {
      for (let i = 0; i < this.numbers; i++) {
        const scale = half(Math.floor(i / this.headDim), this.numbers);
        into[i] = clamped(Math.fround(view.getInt8(i) * scale));
      }
    } else {
      const scales = this.numbers / 2;
      const minima = scales + 2 * Math.ceil(this.numbers / GROUP);
      for (let i = 0; i < this.numbers; i++) {
        const level = (view.getUint8(i >> 1) >> (i % 2 ? 4 : 0)) & 15;
        const group = Math.floor(i / GROUP);
        // Each operation is rounded to float32, as the server's library does it.
        into[i] = clamped(Math.fround(Math.fround(level * half(group, scales)) + half(group, minima)));
      }
    }
  }
}

/** Decodes records of CA's part and, with N > 0, of the reused layers' (`activation_layout.py`). */
export class ActivationLayout {
  private readonly parts: readonly ActivationCodec[];
  /** Bytes of a record. */
  readonly tokenBytes: number;

  /**
   * @param name of the codec
   * @param manifest of the bundle
   * @throws InputError see `ActivationCodec`
   */
  constructor(name: CodecName, manifest: Manifest) {
    const { cross_attention: memory, num_target_layers, target } = manifest;
    const layers = num_target_layers * target.num_kv_heads;
    this.parts = [
      new ActivationCodec(name, memory.num_kv_heads, memory.head_dim),
      ...(layers ? [new ActivationCodec(name, layers, target.head_dim)] : []),
    ];
    this.tokenBytes = this.parts.reduce((sum, { tokenBytes }) => sum + tokenBytes, 0);
  }

  /**
   * Decode the records of `count` tokens; see `ActivationCodec`.
   *
   * @throws WireError `data` does not have the size of `count` records
   */
  decode(data: Uint8Array, count: number): MemoryParts {
    if (data.length !== count * this.tokenBytes) {
      throw new WireError(`${count} tokens are ${count * this.tokenBytes} bytes, got ${data.length}.`);
    }
    let first = 0;
    const decoded = this.parts.map((part) => {
      const records = new Uint8Array(count * part.tokenBytes);
      for (let token = 0; token < count; token++) {
        const start = token * this.tokenBytes + first;
        records.set(data.subarray(start, start + part.tokenBytes), token * part.tokenBytes);
      }
      first += part.tokenBytes;
      return part.decode(records, count);
    });
    return {
      key: concatenated(decoded.map(({ key }) => key)),
      value: concatenated(decoded.map(({ value }) => value)),
      count,
    };
  }
}

/** Arrays one after the other. */
export function concatenated(arrays: readonly Float32Array[]): Float32Array {
  const whole = new Float32Array(arrays.reduce((sum, { length }) => sum + length, 0));
  arrays.reduce((start, one) => (whole.set(one, start), start + one.length), 0);
  return whole;
}

function clamped(value: number): number {
  return Number.isNaN(value) ? 0 : Math.max(-MAX_FP16, Math.min(MAX_FP16, value));
}

/** The number of 16 bits in IEEE 754's half precision. */
export function halfToNumber(bits: number): number {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 31) return fraction ? Number.NaN : sign * Number.POSITIVE_INFINITY;
  return sign * (1024 + fraction) * 2 ** (exponent - 25);
}
