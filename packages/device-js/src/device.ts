import type { GenerationDefaults } from "./bundle/generation_defaults.js";
import type { Manifest } from "./bundle/manifest.js";
import { readBundle } from "./bundle/bundle.js";
import type { ReadFile } from "./bundle/bundle.js";
import { OnnxDrafter } from "./bundle/onnx_drafter.js";
import type { Drafter, OnnxRuntime } from "./bundle/onnx_drafter.js";
import { DeviceTokenizer } from "./bundle/tokenizer.js";

/** What a session needs: a drafter, and facts of the target that it drafts for. */
export interface Device {
  readonly manifest: Manifest;
  readonly generationDefaults: GenerationDefaults;
  /** Holds the caches of one text, so that a device serves one session at a time. */
  readonly drafter: Drafter;
  /** Stop strings need it. */
  readonly tokenizer?: DeviceTokenizer;
}

/**
 * Load a bundle of `moaspec checkpoint export-device --format onnx`.
 *
 * @param read `fromUrl(...)`, or `fromDirectory(...)` of moaspec-device/node
 * @param runtime the module onnxruntime-web, or another with its interface
 * @param options of the runtime's session, such as `executionProviders`
 * @throws BundleError no such bundle, a damaged one, or one that the runtime cannot run
 */
export async function loadDevice(
  read: ReadFile,
  runtime: OnnxRuntime,
  options: Parameters<typeof OnnxDrafter.load>[2] = {},
): Promise<Device & { readonly tokenizer: DeviceTokenizer }> {
  const bundle = await readBundle(read);
  const { manifest, generationDefaults } = bundle;
  const tokenizer = new DeviceTokenizer(bundle);
  const drafter = await OnnxDrafter.load(bundle, runtime, options);
  return { manifest, generationDefaults, drafter, tokenizer };
}
