import { BundleError } from "../errors.js";

export const MANIFEST_FILE = "manifest.json";
export const GRAPH_FILE = "drafter.onnx";
const FORMAT = "moaspec-device-onnx";
const FORMAT_VERSION = 1;
/** Versions of messages and of seeded sampling (`moaspec_edge/protocol/identity.py`). */
const PROTOCOL = 1;
const SAMPLING_VERSION = 2;
/** Largest size of a token's key in one cache, all heads together. */
const MAX_WIDTH = 2 ** 16;
/** Largest size of a token's keys in all caches: 512 MiB for caches of 512 tokens. */
const MAX_TOTAL_WIDTH = 2 ** 17;
/** Largest number of positions, heads or dimensions that a manifest may state. */
const MAX_SIZE = 2 ** 24;
/** Largest number of layers, of the target or of SA, that a manifest may state. */
const MAX_LAYERS = 1024;
const MAX_FILES = 64;
/** Largest size of a file that a manifest may state, in bytes. */
const MAX_FILE_BYTES = 2 ** 31;
/** Largest vocabulary that a manifest may state. */
const MAX_VOCABULARY = 2 ** 24;

/** What two models must share to be the same target. */
export interface TargetIdentity {
  readonly model_type: string;
  readonly num_layers: number;
  readonly hidden_size: number;
  readonly num_kv_heads: number;
  readonly head_dim: number;
  readonly vocab_size: number;
  readonly tokenizer_hash: string | null;
  readonly adapter: string | null;
}

/** Heads and dimensions of a cache. */
export interface CacheSizes {
  readonly num_kv_heads: number;
  readonly head_dim: number;
}

/** The manifest of an ONNX bundle; see `moaspec_edge/device_onnx/manifest.py`. */
export interface Manifest {
  readonly protocol: number;
  readonly sampling_version: number;
  readonly target: TargetIdentity;
  readonly fingerprint: string;
  readonly self_attention: CacheSizes;
  readonly self_attention_layers: number;
  readonly cross_attention: CacheSizes;
  readonly num_target_layers: number;
  readonly top: number;
  readonly max_positions: number;
  readonly rope_growth: number | null;
  readonly stop_token_ids: readonly number[];
  readonly files: Readonly<Record<string, FileEntry>>;
  /** Missing in bundles of earlier releases, whose drafter cannot be updated. */
  readonly versions?: Versions;
}

/** The bytes of the graph's file that a version of the drafter replaces. */
export interface Versions {
  /** The form of these bytes when a server sends them. */
  readonly packing: string;
  /** First byte and number of bytes of each part, in the order of sending. */
  readonly ranges: readonly (readonly [number, number])[];
}

/** Size and hash, hexadecimal, of a file. */
export interface FileEntry {
  readonly bytes: number;
  readonly sha256: string;
}

/**
 * Parse and check a manifest.
 *
 * @throws BundleError no manifest of this version, or a value that no bundle has
 */
export function parseManifest(json: Uint8Array): Manifest {
  let values: unknown;
  try {
    values = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(json));
  } catch {
    values = undefined;
  }
  const found = new Fields(values, "the manifest");
  if (found.value("format") !== FORMAT) {
    throw new BundleError(
      "This is no ONNX bundle. Make one with `moaspec checkpoint export-device TARGET DRAFTER DIR " +
        "--format onnx`.",
    );
  }
  if (found.value("format_version") !== FORMAT_VERSION) {
    throw new BundleError(
      `The bundle has another format than ${FORMAT_VERSION}: export it again, or upgrade this package.`,
    );
  }
  // Files call the version of sampling "law", since the first bundles.
  const versions = [found.value("protocol"), found.value("law")];
  if (versions[0] !== PROTOCOL || versions[1] !== SAMPLING_VERSION) {
    const got = JSON.stringify(versions).slice(0, 80);
    throw new BundleError(
      `The bundle is for protocol ${got}; this is [${PROTOCOL},${SAMPLING_VERSION}]. Export it again, or ` +
        "upgrade this package.",
    );
  }
  const growth = found.value("rope_growth");
  const target = targetIdentity(found.object("target"));
  const manifest: Manifest = {
    protocol: PROTOCOL,
    sampling_version: SAMPLING_VERSION,
    target,
    fingerprint: found.text("fingerprint"),
    self_attention: cacheSizes(found.object("self_attention")),
    // Missing in bundles of earlier releases.
    self_attention_layers:
      found.value("self_attention_layers") === undefined ? 1 : found.size("self_attention_layers", 1, MAX_LAYERS),
    cross_attention: cacheSizes(found.object("cross_attention")),
    num_target_layers: found.size("num_target_layers", 0, target.num_layers),
    top: found.size("top"),
    max_positions: found.size("max_positions"),
    rope_growth: growth === null ? null : found.size("rope_growth"),
    stop_token_ids: found.ids("stop_token_ids"),
    files: files(found.object("files")),
    ...versionsOf(found),
  };
  const all = [...textSizes(manifest), ...activationSizes(manifest)];
  checkWidth("the keys of a token have", all.reduce((sum, one) => sum + width(one), 0), MAX_TOTAL_WIDTH);
  return manifest;
}

/** Sizes of the caches of SA's layers. */
export function textSizes({ self_attention, self_attention_layers }: Manifest): CacheSizes[] {
  return new Array<CacheSizes>(self_attention_layers).fill(self_attention);
}

/** Sizes of the caches that a server's activations fill: CA's, then those of each reused layer. */
export function activationSizes({ cross_attention, num_target_layers, target }: Manifest): CacheSizes[] {
  return [cross_attention, ...new Array<CacheSizes>(num_target_layers).fill(target)];
}

function targetIdentity(found: Fields): TargetIdentity {
  return {
    model_type: found.text("model_type"),
    num_layers: found.size("num_layers", 1, MAX_LAYERS),
    hidden_size: found.size("hidden_size"),
    ...cacheSizes(found),
    vocab_size: found.size("vocab_size"),
    tokenizer_hash: found.optionalText("tokenizer_hash"),
    adapter: found.optionalText("adapter"),
  };
}

function cacheSizes(found: Fields): CacheSizes {
  const sizes = { num_kv_heads: found.size("num_kv_heads"), head_dim: found.size("head_dim") };
  checkWidth("a key has", width(sizes), MAX_WIDTH);
  return sizes;
}

/** Numbers of a token's key. */
function width({ num_kv_heads, head_dim }: CacheSizes): number {
  return num_kv_heads * head_dim;
}

function checkWidth(what: string, got: number, most: number): void {
  if (got > most) throw new BundleError(`The bundle is damaged: ${what} ${got} numbers; at most ${most} are allowed.`);
}

function files(found: Fields): Record<string, FileEntry> {
  const names = found.names();
  if (names.length > MAX_FILES || !names.includes(GRAPH_FILE)) {
    throw new BundleError(`The bundle is damaged: it lists ${names.length} files.`);
  }
  const pairs = names.map((name): [string, FileEntry] => {
    if (!/^\w[\w.-]*$/.test(name)) {
      throw new BundleError(`The bundle is damaged: ${JSON.stringify(name)} is no name of a file.`);
    }
    const entry = found.object(name);
    return [name, { bytes: entry.size("bytes", 0, MAX_FILE_BYTES), sha256: entry.text("sha256") }];
  });
  return Object.fromEntries(pairs);
}

function versionsOf(found: Fields): { versions?: Versions } {
  if ((found.value("versions") ?? null) === null) return {};
  const entry = found.object("versions");
  const size = found.object("files").object(GRAPH_FILE).size("bytes", 0, MAX_FILE_BYTES);
  return { versions: { packing: entry.text("packing"), ranges: entry.ranges("ranges", size) } };
}

/** Checked access to the fields of an object of JSON. */
class Fields {
  private readonly values: ReadonlyMap<string, unknown>;

  constructor(values: unknown, private readonly name: string) {
    const isObject = typeof values === "object" && values !== null && !Array.isArray(values);
    this.values = new Map(isObject ? Object.entries(values) : []);
  }

  names(): string[] {
    return [...this.values.keys()];
  }

  value(name: string): unknown {
    return this.values.get(name);
  }

  object(name: string): Fields {
    return new Fields(this.value(name), name);
  }

  size(name: string, low = 1, high = MAX_SIZE): number {
    const value = this.value(name);
    if (!Number.isSafeInteger(value) || (value as number) < low || (value as number) > high) {
      throw this.wrong(name);
    }
    return value as number;
  }

  text(name: string): string {
    const value = this.value(name);
    if (typeof value !== "string") throw this.wrong(name);
    return value;
  }

  optionalText(name: string): string | null {
    return this.value(name) === null ? null : this.text(name);
  }

  ids(name: string): number[] {
    const value = this.value(name);
    const fits = (id: unknown) => Number.isSafeInteger(id) && (id as number) >= 0;
    if (!Array.isArray(value) || value.length > MAX_VOCABULARY || !value.every(fits)) {
      throw this.wrong(name);
    }
    return value as number[];
  }

  /** First byte and number of bytes of parts of a file of `size` bytes, one behind the other. */
  ranges(name: string, size: number): [number, number][] {
    const value = this.value(name);
    let end = 0;
    const fits = (range: unknown): boolean => {
      if (!Array.isArray(range) || range.length !== 2 || !range.every(Number.isSafeInteger)) return false;
      const start = end;
      end = range[0] + range[1];
      return range[0] >= start && range[1] > 0 && end <= size;
    };
    if (!Array.isArray(value) || !value.length || !value.every(fits)) throw this.wrong(name);
    return value as [number, number][];
  }

  private wrong(name: string): BundleError {
    const value = JSON.stringify(this.value(name)) ?? "nothing";
    return new BundleError(
      `The bundle is damaged: ${name} of ${this.name} is ${value.slice(0, 80)}. Export it again.`,
    );
  }
}
