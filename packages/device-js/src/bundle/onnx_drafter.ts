import type { InferenceSession, InferenceSessionFactory, Tensor, TensorConstructor } from "onnxruntime-common";
import { BundleError, InputError } from "../errors.js";
import type { MemoryParts } from "../protocol/activations.js";
import type { Drafts } from "../sampling/ranking.js";
import type { Bundle } from "./bundle.js";
import { GRAPH_FILE } from "./manifest.js";
import type { Manifest } from "./manifest.js";

/** onnxruntime-web, or another package with the interface of onnxruntime-common. */
export interface OnnxRuntime {
  readonly InferenceSession: InferenceSessionFactory;
  readonly Tensor: TensorConstructor;
}

/** Drafts tokens one at a time; holds the caches of one text. */
export interface Drafter {
  /**
   * Store the tokens of a text from position `start` on, and draft the token after them. Tokens
   * before `start` must have been stored; later ones are not attended to.
   */
  run(tokenIds: readonly number[], start: number): Promise<Drafts>;
  /** Store CA's keys and values of verified tokens from position `start` on, in any order. */
  place(start: number, parts: MemoryParts): void;
  /** CA's keys and values of the first `count` positions, which must have been stored. */
  memory(count: number): MemoryParts;
  /** Forget CA's keys and values from position `length` on. */
  cut(length: number): void;
}

/** Slots of new caches, unless the target has fewer positions. */
const FIRST_SLOTS = 512;
const TEXT = ["text_key", "text_value"] as const;
const MEMORY = ["memory_key", "memory_value"] as const;
type CacheName = (typeof TEXT)[number] | (typeof MEMORY)[number];

/**
 * A drafter that runs a bundle's graph (`moaspec/remote/device_onnx/draft_graph.py`).
 *
 * Caches have a fixed number of slots, which is doubled when a text outgrows it. Where a runtime
 * writes outputs into given tensors, the graph writes new keys and values into the cache that it
 * reads. onnxruntime-web copies tensors into WebAssembly's memory and does not; its output then
 * takes the place of the cache.
 */
export class OnnxDrafter implements Drafter {
  private numSlots = 0;
  private caches = {} as Record<CacheName, Float32Array>;
  private tensors = {} as Record<CacheName | "memory_mask", Tensor>;
  private mask = new Uint8Array(0);
  private inPlace = false;

  private constructor(
    private readonly manifest: Manifest,
    private readonly session: InferenceSession,
    private readonly runtime: OnnxRuntime,
  ) {
    this.reserve(Math.min(FIRST_SLOTS, manifest.max_positions));
  }

  /**
   * Load the graph of a bundle.
   *
   * @param options of the runtime's session, such as `executionProviders`
   * @throws BundleError the runtime cannot run the graph
   */
  static async load(
    bundle: Bundle,
    runtime: OnnxRuntime,
    options: InferenceSession.SessionOptions = {},
  ): Promise<OnnxDrafter> {
    try {
      const graph = bundle.files.get(GRAPH_FILE)!;
      const session = await runtime.InferenceSession.create(graph, { logSeverityLevel: 3, ...options });
      const drafter = new OnnxDrafter(bundle.manifest, session, runtime);
      await drafter.tryOut();
      return drafter;
    } catch (error) {
      throw new BundleError(`The runtime cannot run the bundle's graph: ${(error as Error).message}`);
    }
  }

  /** Draft once, and find out whether the runtime writes into given tensors. */
  private async tryOut(): Promise<void> {
    const before = this.caches.text_key;
    this.inPlace = true;
    await this.run([0], 0);
    this.inPlace = this.caches.text_key === before && before.some((value) => value !== 0);
    this.caches.text_key.fill(0);
    this.caches.text_value.fill(0);
  }

  /** See `Drafter`. @throws InputError no tokens, or positions that the target does not have */
  async run(tokenIds: readonly number[], start: number): Promise<Drafts> {
    this.reach(start, start + tokenIds.length);
    const { Tensor } = this.runtime;
    const feeds = {
      ...this.tensors,
      token_ids: new Tensor("int64", BigInt64Array.from(tokenIds, BigInt), [tokenIds.length]),
      start: new Tensor("int64", BigInt64Array.of(BigInt(start)), [1]),
    };
    const given = { new_text_key: this.tensors.text_key, new_text_value: this.tensors.text_value };
    const wanted = { top_token_ids: null, top_log_q: null };
    const found = this.inPlace
      ? await this.session.run(feeds, { ...given, ...wanted })
      : await this.session.run(feeds);
    for (const name of TEXT) {
      this.tensors[name] = found[`new_${name}`]!;
      this.caches[name] = this.tensors[name].data as Float32Array;
    }
    return this.checked(found["top_token_ids"]!, found["top_log_q"]!);
  }

  private checked(ids: Tensor, logQ: Tensor): Drafts {
    const tokenIds = Array.from(ids.data as BigInt64Array, Number);
    const vocabulary = this.manifest.target.vocab_size;
    if (!tokenIds.length || tokenIds.some((id) => id < 0 || id >= vocabulary)) {
      throw new BundleError("The bundle's graph drafts tokens outside the target's vocabulary.");
    }
    return { tokenIds, logQ: Float32Array.from(logQ.data as Float32Array) };
  }

  /** See `Drafter`. @throws InputError no tokens, or positions that the target does not have */
  place(start: number, parts: MemoryParts): void {
    this.reach(start, start + parts.count);
    const { num_kv_heads, head_dim } = this.manifest.cross_attention;
    const width = parts.count * head_dim;
    for (let head = 0; head < num_kv_heads; head++) {
      const place = (head * this.numSlots + start) * head_dim;
      this.caches.memory_key.set(parts.key.subarray(head * width, (head + 1) * width), place);
      this.caches.memory_value.set(parts.value.subarray(head * width, (head + 1) * width), place);
    }
    this.mask.fill(1, start, start + parts.count);
  }

  /** See `Drafter`. */
  memory(count: number): MemoryParts {
    const { num_kv_heads, head_dim } = this.manifest.cross_attention;
    const [from, width] = [this.numSlots * head_dim, count * head_dim];
    const copy = (cache: Float32Array): Float32Array => {
      const parts = new Float32Array(num_kv_heads * width);
      for (let head = 0; head < num_kv_heads; head++) {
        parts.set(cache.subarray(head * from, head * from + width), head * width);
      }
      return parts;
    };
    return { key: copy(this.caches.memory_key), value: copy(this.caches.memory_value), count };
  }

  /** See `Drafter`. */
  cut(length: number): void {
    this.mask.fill(0, length);
  }

  /** Make room for these positions, or refuse them. */
  private reach(start: number, stop: number): void {
    const most = this.manifest.max_positions;
    if (!(start >= 0 && start < stop && stop <= most)) {
      throw new InputError(`Got positions ${start}..${stop - 1}; expected some within 0..${most - 1}.`);
    }
    if (stop > this.numSlots) this.reserve(Math.max(stop, Math.min(2 * this.numSlots, most)));
  }

  /** Make caches of `numSlots` slots; contents stay. */
  private reserve(numSlots: number): void {
    const { Tensor } = this.runtime;
    const old = this.numSlots;
    for (const name of [...TEXT, ...MEMORY]) {
      const sizes = name.startsWith("text") ? this.manifest.self_attention : this.manifest.cross_attention;
      const { num_kv_heads, head_dim } = sizes;
      const grown = new Float32Array(num_kv_heads * numSlots * head_dim);
      for (let head = 0; head < num_kv_heads && old; head++) {
        const from = head * old * head_dim;
        grown.set(this.caches[name].subarray(from, from + old * head_dim), head * numSlots * head_dim);
      }
      this.caches[name] = grown;
      this.tensors[name] = new Tensor("float32", grown, [num_kv_heads, numSlots, head_dim]);
    }
    const mask = new Uint8Array(numSlots);
    mask.set(this.mask);
    this.mask = mask;
    this.tensors.memory_mask = new Tensor("bool", mask, [numSlots]);
    this.numSlots = numSlots;
  }
}
