import type { GenerationDefaults } from "./bundle/generation_defaults.js";
import { GRAPH_FILE } from "./bundle/manifest.js";
import type { Manifest } from "./bundle/manifest.js";
import { readBundle, readChecked } from "./bundle/bundle.js";
import type { Bundle, ReadFile } from "./bundle/bundle.js";
import { OnnxDrafter } from "./bundle/onnx_drafter.js";
import type { Drafter, OnnxRuntime } from "./bundle/onnx_drafter.js";
import { DeviceTokenizer } from "./bundle/tokenizer.js";
import { BundleError, RefusedError } from "./errors.js";
import type { WebSocketTransport } from "./protocol/websocket.js";
import { newerVersion } from "./session/server_calls.js";
import type { DrafterVersion } from "./session/server_calls.js";

/** A device as its session uses it: a drafter, and what it knows of the target. */
export interface Device {
  readonly manifest: Manifest;
  readonly generationDefaults: GenerationDefaults;
  /** Holds the caches of one text, so that a device serves one session at a time. */
  readonly drafter: Drafter;
  /** Stop strings need it. */
  readonly tokenizer?: DeviceTokenizer;
}

/** A device of a bundle's files. */
export interface LoadedDevice extends Device {
  readonly tokenizer: DeviceTokenizer;
  /** Fingerprint of the version that drafts from the next turn on. */
  readonly version: string;
  /**
   * Take the newest version of the drafter of a server that learns. Texts go on meanwhile, but for the time that the
   * runtime needs to load a graph; sessions draft with it from their next turn on. It reads the bundle's graph again.
   *
   * @returns the version, or undefined if there is no newer one
   * @throws LinkError the link broke
   * @throws RefusedError the server refuses, or sends weights that are not of this drafter
   * @throws WireError the server's answer is invalid
   * @throws BundleError the bundle's graph cannot be read again
   */
  update(server: WebSocketTransport): Promise<DrafterVersion | undefined>;
  /** Take a version that `update` has returned for the same bundle; errors are those of `update`. */
  take(version: DrafterVersion): Promise<void>;
}

/**
 * Load a bundle of `moaspec checkpoint export-device --format onnx`.
 *
 * @param read `fromUrl(...)`, or `fromDirectory(...)` of moaspec-device/node
 * @param runtime the module onnxruntime-web, or another with its interface
 * @param options of the runtime's session, such as `executionProviders`
 * @param kept a version that `update` has returned for the same bundle: its graph is loaded in place of the bundle's,
 *   unless it does not fit
 * @throws BundleError no such bundle, a damaged one, or one that the runtime cannot run
 */
export async function loadDevice(
  read: ReadFile,
  runtime: OnnxRuntime,
  options: Parameters<typeof OnnxDrafter.load>[2] = {},
  kept?: (manifest: Manifest) => Promise<DrafterVersion | undefined>,
): Promise<LoadedDevice> {
  const bundle = await readBundle(read);
  const { manifest, generationDefaults } = bundle;
  const tokenizer = new DeviceTokenizer(bundle);
  const [drafter, version] = await newestDrafter(bundle, await kept?.(manifest), runtime, options);
  const device = {
    ...{ manifest, generationDefaults, drafter, tokenizer, version },
    async update(server: WebSocketTransport): Promise<DrafterVersion | undefined> {
      const found = manifest.versions && (await newerVersion(server, manifest.versions, device.version));
      if (found) await device.take(found);
      return found;
    },
    async take(version: DrafterVersion): Promise<void> {
      const graph = await readChecked(read, GRAPH_FILE, manifest);
      try {
        await drafter.prepare(patched(graph, manifest, version));
      } catch (error) {
        if (!(error instanceof BundleError)) throw error;
        throw new RefusedError(`The server's weights do not fit this bundle: ${error.message}`);
      }
      device.version = version.version;
    },
  };
  return device;
}

/** A drafter with a version's graph, or with the bundle's if that does not fit; and which of them it has. */
async function newestDrafter(
  bundle: Bundle,
  kept: DrafterVersion | undefined,
  ...how: [OnnxRuntime, Parameters<typeof OnnxDrafter.load>[2]]
): Promise<[OnnxDrafter, string]> {
  if (kept) {
    try {
      const graph = patched(bundle.files.get(GRAPH_FILE)!, bundle.manifest, kept);
      const files = new Map(bundle.files).set(GRAPH_FILE, graph);
      return [await OnnxDrafter.load({ ...bundle, files }, ...how), kept.version];
    } catch (error) {
      if (!(error instanceof BundleError)) throw error;
    }
  }
  return [await OnnxDrafter.load(bundle, ...how), bundle.manifest.fingerprint];
}

/** A copy of the bundle's graph with the weights of a version; BundleError if they do not fit. */
function patched(own: Uint8Array, { versions }: Manifest, { data }: DrafterVersion): Uint8Array {
  const graph = own.slice();
  let first = 0;
  for (const [start, count] of versions?.ranges ?? []) {
    graph.set(data.subarray(first, first + count), start);
    first += count;
  }
  if (first !== data.length) throw new BundleError(`they have ${data.length} bytes, expected ${first}`);
  return graph;
}
