/** The last text with its activations: after a reload without a network, drafts read it again. */
import { activationSizes } from "../bundle/manifest.js";
import type { Manifest } from "../bundle/manifest.js";
import type { Prefix } from "../session/remote_session.js";

/** Of the browser; the page deletes it together with all conversations. */
export const PREFIX_CACHE = "moaspec-prefix";
/** Longest text that is kept. */
const MAX_TOKENS = 4096;

function key({ fingerprint }: Manifest): string {
  return new URL(`/prefix/${encodeURIComponent(fingerprint)}`, self.location.href).href;
}

/** Keep a text, and remove those of other drafters; undefined keeps the stored one. */
export async function keepPrefix(manifest: Manifest, prefix: Prefix | undefined): Promise<void> {
  if (!prefix || prefix.tokenIds.length > MAX_TOKENS) return;
  const ids = Uint32Array.of(prefix.tokenIds.length, ...prefix.tokenIds);
  const body = new Blob([ids, prefix.key, prefix.value] as BlobPart[]);
  try {
    const cache = await caches.open(PREFIX_CACHE);
    for (const { url } of await cache.keys()) if (url !== key(manifest)) await cache.delete(url);
    await cache.put(key(manifest), new Response(body));
  } catch {
    // The browser's storage is full; the page works without the text.
  }
}

/** The text that was kept for this drafter; undefined for none. */
export async function keptPrefix(manifest: Manifest): Promise<Prefix | undefined> {
  const found = await (await caches.open(PREFIX_CACHE)).match(key(manifest));
  if (!found) return undefined;
  const data = await found.arrayBuffer();
  const count = data.byteLength >= 4 ? new Uint32Array(data, 0, 1)[0]! : 0;
  const sizes = activationSizes(manifest);
  const numbers = count * sizes.reduce((sum, { num_kv_heads, head_dim }) => sum + num_kv_heads * head_dim, 0);
  if (!count || count > MAX_TOKENS || data.byteLength !== 4 * (1 + count + 2 * numbers)) return undefined;
  return {
    tokenIds: Array.from(new Uint32Array(data, 4, count)),
    key: new Float32Array(data, 4 * (1 + count), numbers),
    value: new Float32Array(data, 4 * (1 + count + numbers), numbers),
  };
}
