import { BundleError } from "../errors.js";
import { GenerationDefaults } from "./generation_defaults.js";
import { GRAPH_FILE, MANIFEST_FILE, parseManifest } from "./manifest.js";
import type { Manifest } from "./manifest.js";

/** Bytes of the largest manifest. */
const MAX_MANIFEST_BYTES = 1 << 20;
const TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json"];
const OPTIONAL_FILES = ["generation_config.json", "chat_template.jinja"];

/**
 * Reads a file of a bundle.
 *
 * @param name of the file
 * @param maxBytes size of the largest valid file; the reader may stop one byte after it
 */
export type ReadFile = (name: string, maxBytes: number) => Promise<Uint8Array>;

/** A bundle in memory, whose files have the sizes and hashes of its manifest. */
export interface Bundle {
  readonly manifest: Manifest;
  readonly files: ReadonlyMap<string, Uint8Array>;
  readonly generationDefaults: GenerationDefaults;
}

/**
 * Read and check a bundle of `moaspec checkpoint export-device --format onnx`.
 *
 * @throws BundleError no such bundle, or a file is missing or damaged
 */
export async function readBundle(read: ReadFile): Promise<Bundle> {
  const manifest = parseManifest(await read(MANIFEST_FILE, MAX_MANIFEST_BYTES));
  const optional = OPTIONAL_FILES.filter((name) => name in manifest.files);
  const files = new Map<string, Uint8Array>();
  for (const name of [...TOKENIZER_FILES, ...optional, GRAPH_FILE]) {
    files.set(name, await readChecked(read, name, manifest));
  }
  const config = files.get("generation_config.json");
  const generationDefaults = new GenerationDefaults(config ? jsonObject(config) : {});
  return { manifest, files, generationDefaults };
}

/**
 * Read a file whose size and hash the manifest has.
 *
 * @throws BundleError it is missing or damaged
 */
export async function readChecked(read: ReadFile, name: string, manifest: Manifest): Promise<Uint8Array> {
  const expected = manifest.files[name];
  const data = expected && (await read(name, expected.bytes));
  if (!data || data.length !== expected.bytes || (await sha256(data)) !== expected.sha256) {
    throw new BundleError(`The bundle is damaged: ${name} is not the file that was exported.`);
  }
  return data;
}

async function sha256(data: Uint8Array): Promise<string> {
  if (!globalThis.crypto?.subtle) {
    throw new BundleError("Hashes need a secure context: serve the page over https.");
  }
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", data as BufferSource));
  return Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/**
 * Parse an object of JSON.
 *
 * @throws BundleError something else
 */
export function jsonObject(data: Uint8Array): Record<string, unknown> {
  let value: unknown;
  try {
    value = JSON.parse(new TextDecoder().decode(data));
  } catch {
    value = null;
  }
  if (typeof value !== "object" || value === null || Array.isArray(value)) {
    throw new BundleError("The bundle is damaged: a file holds no object of JSON.");
  }
  return value as Record<string, unknown>;
}

/**
 * Read a bundle's files below an address.
 *
 * @param url of the directory; in a page also relative to it
 * @param onBytes called with the number of bytes of each piece that arrives
 */
export function fromUrl(url: string | URL, onBytes: (count: number) => void = () => {}): ReadFile {
  const page = (globalThis as { location?: { href: string } }).location?.href;
  const base = new URL(String(url).replace(/\/*$/, "/"), page);
  return async (name, maxBytes) => {
    const response = await fetch(new URL(name, base));
    if (!response.ok || !response.body) {
      throw new BundleError(`${name} cannot be read: HTTP status ${response.status}.`);
    }
    const pieces: Uint8Array[] = [];
    let size = 0;
    // Leaving the loop cancels the download.
    for await (const piece of streamed(response.body)) {
      pieces.push(piece);
      size += piece.length;
      onBytes(piece.length);
      if (size > maxBytes) break;
    }
    const whole = new Uint8Array(size);
    pieces.reduce((start, piece) => (whole.set(piece, start), start + piece.length), 0);
    return whole;
  };
}

/** Safari has no asynchronous iteration of streams. */
async function* streamed(stream: ReadableStream<Uint8Array>): AsyncGenerator<Uint8Array> {
  const reader = stream.getReader();
  let ended = false;
  try {
    for (;;) {
      const { done, value } = await reader.read();
      ended = done;
      if (done) return;
      yield value;
    }
  } finally {
    if (!ended) await reader.cancel();
  }
}
