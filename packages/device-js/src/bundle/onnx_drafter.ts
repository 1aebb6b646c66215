import type { InferenceSession, InferenceSessionFactory, Tensor, TensorConstructor } from "onnxruntime-common";
import { BundleError, InputError } from "../errors.js";
import { concatenated } from "../protocol/activations.js";
import type { MemoryParts } from "../protocol/activations.js";
import type { Drafts } from "../sampling/ranking.js";
import type { Bundle } from "./bundle.js";
import { withoutWeights } from "./external_weights.js";
import { activationSizes, GRAPH_FILE, textSizes } from "./manifest.js";
import type { CacheSizes, Manifest } from "./manifest.js";

/** onnxruntime-web, or another package with the interface of onnxruntime-common. */
export interface OnnxRuntime {
  readonly InferenceSession: InferenceSessionFactory;
  readonly Tensor: TensorConstructor;
  /** Its versions tell whether it runs in WebAssembly. */
  readonly env?: { readonly versions?: { readonly web?: string } };
}

/** Drafts tokens one at a time; holds the caches of one text. */
export interface Drafter {
  /**
   * Store the tokens of a text from position `start` on, and draft the token after them. Tokens
   * before `start` must have been stored; later ones are not attended to.
   */
  run(tokenIds: readonly number[], start: number): Promise<Drafts>;
  /** Store activations of verified tokens from position `start` on, in any order. */
  place(start: number, parts: MemoryParts): void;
  /** Activations of the first `count` positions, which must have been stored. */
  memory(count: number): MemoryParts;
  /** Forget activations from position `length` on. */
  cut(length: number): void;
  /**
   * Draft with the newest version from now on; returns whether the version changed. Then activations stay valid, and the
   * text must be run again.
   */
  renew?(): boolean;
}

/** Slots of new caches, unless the target has fewer positions. */
const FIRST_SLOTS = 512;

/** A cache of the graph: keys and values, (heads, slots, dimensions) each. */
interface Cache extends CacheSizes {
  /** Names of the graph's inputs. */
  readonly key: string;
  readonly value: string;
  /** Whether the graph writes it. */
  readonly isWritten: boolean;
}

/** The caches of a bundle's graph: of SA's layers, and CA's with those of the reused target layers. */
function cachesOf(manifest: Manifest): { texts: Cache[]; memories: Cache[] } {
  const named = (name: string, number: string, sizes: CacheSizes): Cache => ({
    key: `${name}_key${number}`,
    value: `${name}_value${number}`,
    isWritten: name !== "memory",
    num_kv_heads: sizes.num_kv_heads,
    head_dim: sizes.head_dim,
  });
  const [own, ...layers] = activationSizes(manifest);
  return {
    texts: textSizes(manifest).map((sizes, i) => named("text", i ? `_${i}` : "", sizes)),
    memories: [named("memory", "", own!), ...layers.map((sizes, i) => named("layer", `_${i}`, sizes))],
  };
}

/** Name of a graph's weights as a file beside it. */
const WEIGHTS = "weights";

function created(
  graph: Uint8Array,
  { InferenceSession, env }: OnnxRuntime,
  options: InferenceSession.SessionOptions,
): Promise<InferenceSession> {
  if (env?.versions?.web === undefined) return InferenceSession.create(graph, options);
  const externalData = [...(options.externalData ?? []), { path: WEIGHTS, data: graph }];
  return InferenceSession.create(withoutWeights(graph, WEIGHTS), { ...options, externalData });
}

/**
 * A drafter that runs a bundle's graph (`moaspec_edge/device_onnx/draft_graph.py`).
 *
 * Caches have a fixed number of slots, which is doubled when a text outgrows it. If the runtime
 * writes outputs into given tensors, the graph writes new keys and values into the cache that it
 * reads. onnxruntime-web does not, as it copies tensors into WebAssembly's memory; there the output
 * replaces the cache.
 */
export class OnnxDrafter implements Drafter {
  private numSlots = 0;
  private readonly texts: readonly Cache[];
  /** Those that activations fill. */
  private readonly memories: readonly Cache[];
  private readonly data = new Map<string, Float32Array>();
  private readonly tensors = new Map<string, Tensor>();
  private mask = new Uint8Array(0);
  private inPlace = false;
  /** Of a version that `renew` takes. */
  private next: InferenceSession | undefined;

  private constructor(
    private readonly manifest: Manifest,
    private session: InferenceSession,
    private readonly runtime: OnnxRuntime,
    private readonly options: InferenceSession.SessionOptions,
  ) {
    const { texts, memories } = cachesOf(manifest);
    [this.texts, this.memories] = [texts, memories];
    this.reserve(Math.min(FIRST_SLOTS, manifest.max_positions));
  }

  private get caches(): readonly Cache[] {
    return [...this.texts, ...this.memories];
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
    return OnnxDrafter.of(bundle.files.get(GRAPH_FILE)!, bundle.manifest, runtime, options);
  }

  private static async of(
    graph: Uint8Array,
    manifest: Manifest,
    runtime: OnnxRuntime,
    options: InferenceSession.SessionOptions,
  ): Promise<OnnxDrafter> {
    let session: InferenceSession | undefined;
    try {
      session = await created(graph, runtime, { logSeverityLevel: 3, ...options });
      const drafter = new OnnxDrafter(manifest, session, runtime, options);
      await drafter.tryOut();
      return drafter;
    } catch (error) {
      session?.release().catch(() => {});
      throw new BundleError(`The runtime cannot run the bundle's graph: ${(error as Error).message}`);
    }
  }

  /**
   * Try out a version's graph, which `renew` will take.
   *
   * @throws BundleError the runtime cannot run it; the drafter stays as it is
   */
  async prepare(graph: Uint8Array): Promise<void> {
    const { session } = await OnnxDrafter.of(graph, this.manifest, this.runtime, this.options);
    this.next?.release().catch(() => {});
    this.next = session;
  }

  /** See `Drafter`. */
  renew(): boolean {
    if (!this.next) return false;
    this.session.release().catch(() => {});
    this.session = this.next;
    this.next = undefined;
    return true;
  }

  /** Draft once, and find out whether the runtime writes into given tensors. */
  private async tryOut(): Promise<void> {
    const { key } = this.texts[0]!;
    const before = this.data.get(key)!;
    this.inPlace = true;
    const { logQ } = await this.run([0], 0);
    if (!Array.from(logQ).every(Number.isFinite)) throw new BundleError("a draft's probability is not finite");
    this.inPlace = this.data.get(key) === before && before.some((value) => value !== 0);
    for (const { key, value, isWritten } of this.caches) {
      if (isWritten) for (const name of [key, value]) this.data.get(name)!.fill(0);
    }
  }

  /** See `Drafter`. @throws InputError no tokens, or positions that the target does not have */
  async run(tokenIds: readonly number[], start: number): Promise<Drafts> {
    this.reach(start, start + tokenIds.length);
    const { Tensor } = this.runtime;
    const feeds = {
      ...Object.fromEntries(this.tensors),
      token_ids: new Tensor("int64", BigInt64Array.from(tokenIds, BigInt), [tokenIds.length]),
      start: new Tensor("int64", BigInt64Array.of(BigInt(start)), [1]),
    };
    const written = this.caches.flatMap(({ key, value, isWritten }) => (isWritten ? [key, value] : []));
    const given = Object.fromEntries(written.map((name) => [`new_${name}`, this.tensors.get(name)!]));
    const wanted = { top_token_ids: null, top_log_q: null };
    const found = this.inPlace
      ? await this.session.run(feeds, { ...given, ...wanted })
      : await this.session.run(feeds);
    for (const name of written) {
      const output = found[`new_${name}`]!;
      this.tensors.set(name, output);
      this.data.set(name, output.data as Float32Array);
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
    let first = 0;
    for (const { key, value, num_kv_heads, head_dim } of this.memories) {
      const width = parts.count * head_dim;
      for (let head = 0; head < num_kv_heads; head++, first += width) {
        const place = (head * this.numSlots + start) * head_dim;
        this.data.get(key)!.set(parts.key.subarray(first, first + width), place);
        this.data.get(value)!.set(parts.value.subarray(first, first + width), place);
      }
    }
    this.mask.fill(1, start, start + parts.count);
  }

  /** See `Drafter`. */
  memory(count: number): MemoryParts {
    const copies = (name: "key" | "value") =>
      this.memories.flatMap(({ [name]: cache, num_kv_heads, head_dim }) =>
        Array.from({ length: num_kv_heads }, (_, head) => {
          const from = head * this.numSlots * head_dim;
          return this.data.get(cache)!.subarray(from, from + count * head_dim);
        }),
      );
    return { key: concatenated(copies("key")), value: concatenated(copies("value")), count };
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
    for (const { key, value, num_kv_heads, head_dim } of this.caches) {
      for (const name of [key, value]) {
        const grown = new Float32Array(num_kv_heads * numSlots * head_dim);
        for (let head = 0; head < num_kv_heads && old; head++) {
          const from = head * old * head_dim;
          grown.set(this.data.get(name)!.subarray(from, from + old * head_dim), head * numSlots * head_dim);
        }
        this.data.set(name, grown);
        this.tensors.set(name, new Tensor("float32", grown, [num_kv_heads, numSlots, head_dim]));
      }
    }
    const mask = new Uint8Array(numSlots);
    mask.set(this.mask);
    this.mask = mask;
    this.tensors.set("memory_mask", new Tensor("bool", mask, [numSlots]));
    this.numSlots = numSlots;
  }
}
