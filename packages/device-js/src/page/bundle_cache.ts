/** A bundle in the browser's cache, which makes the page work without a network. */
import { fromUrl } from "../bundle/bundle.js";
import type { ReadFile } from "../bundle/bundle.js";
import { MANIFEST_FILE, parseManifest } from "../bundle/manifest.js";
import type { Manifest } from "../bundle/manifest.js";
import { download } from "./download.js";

const CACHE = "moaspec-bundle";
/** Time to wait for the server's manifest before the cached one is used. */
const MANIFEST_MS = 3000;

/** Reads a bundle's files: from the cache, or from the server and then into the cache. */
export class BundleCache {
  private manifest: Manifest | undefined;
  private loaded = 0;
  /** Whether the cache had room for all files. */
  private complete = true;

  /**
   * @param base URL of the bundle's directory
   * @param onProgress called with the bytes that are here and those of the whole bundle
   */
  constructor(
    private readonly base: string,
    private readonly onProgress: (loaded: number, total: number) => void,
  ) {}

  /** Bytes of all files; 0 before the manifest was read. */
  get bytes(): number {
    return Object.values(this.manifest?.files ?? {}).reduce((sum, { bytes }) => sum + bytes, 0);
  }

  readonly read: ReadFile = async (name, maxBytes) => {
    if (name === MANIFEST_FILE) return this.readManifest(maxBytes);
    const cache = await caches.open(CACHE);
    const found = await cache.match(this.key(name));
    if (found) {
      const data = new Uint8Array(await found.arrayBuffer());
      this.advance(data.length);
      return data;
    }
    const data = await download(new URL(name, this.base), maxBytes, (count) => this.advance(count));
    // If there is no room, the page downloads the bundle again next time.
    await cache.put(this.key(name), new Response(data as BodyInit)).catch(() => { this.complete = false; });
    return data;
  };

  /** Keep this bundle for later, and remove files of others. To be called when all was read. */
  async keep(manifest: Uint8Array): Promise<void> {
    const cache = await caches.open(CACHE);
    const wanted = new Set(Object.keys(this.manifest!.files).map((name) => this.key(name)));
    if (this.complete) {
      await cache.put(this.url(MANIFEST_FILE), new Response(manifest as BodyInit)).catch(() => {});
      wanted.add(this.url(MANIFEST_FILE));
    }
    for (const { url } of await cache.keys()) if (!wanted.has(url)) await cache.delete(url);
    // Browsers may delete caches of pages that have not asked.
    await navigator.storage?.persist?.().catch(() => false);
  }

  /** Forget a bundle that cannot be used. */
  static async forget(): Promise<void> {
    await caches.delete(CACHE);
  }

  /** The server's manifest, or the cached one if the server cannot be reached. */
  private async readManifest(maxBytes: number): Promise<Uint8Array> {
    const cached = await (await caches.open(CACHE)).match(this.url(MANIFEST_FILE));
    const late = new Promise<undefined>((resolve) => setTimeout(resolve, MANIFEST_MS));
    const given = fromUrl(this.base)(MANIFEST_FILE, maxBytes);
    let data: Uint8Array | undefined;
    if (cached) {
      data = await Promise.race([given.catch(() => undefined), late]);
      data ??= new Uint8Array(await cached.arrayBuffer());
    } else {
      data = await given;
    }
    this.manifest = parseManifest(data);
    this.loaded = 0;
    this.complete = true;
    return data;
  }

  private advance(count: number): void {
    this.loaded += count;
    this.onProgress(this.loaded, this.bytes);
  }

  private url(name: string): string {
    return new URL(name, this.base).href;
  }

  private key(name: string): string {
    return `${this.url(name)}?sha256=${this.manifest!.files[name]?.sha256}`;
  }
}
