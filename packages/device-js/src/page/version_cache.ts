/** The newest version of the drafter in the browser's cache, so that it is not downloaded each time. */
import type { Manifest } from "../bundle/manifest.js";
import { GRAPH_FILE } from "../bundle/manifest.js";
import type { DrafterVersion } from "../session/server_calls.js";

const CACHE = "moaspec-version";
const HEADER = "x-moaspec-version";

/** Versions of one bundle have one address. */
function key({ files }: Manifest): string {
  return new URL(`/version/${files[GRAPH_FILE]!.sha256}`, self.location.href).href;
}

/** Keep a version, and remove those of other bundles. */
export async function keepVersion(manifest: Manifest, { version, data }: DrafterVersion): Promise<void> {
  try {
    await caches.delete(CACHE);
    const body = new Response(data as BodyInit, { headers: { [HEADER]: encodeURIComponent(version) } });
    await (await caches.open(CACHE)).put(key(manifest), body);
  } catch {
    // The browser's storage is full; the version is downloaded again next time.
  }
}

/** The version that was kept for this bundle; undefined for none. */
export async function keptVersion(manifest: Manifest): Promise<DrafterVersion | undefined> {
  try {
    const found = await (await caches.open(CACHE)).match(key(manifest));
    if (!found) return undefined;
    const version = decodeURIComponent(found.headers.get(HEADER) ?? "");
    return { version, data: new Uint8Array(await found.arrayBuffer()) };
  } catch {
    return undefined; // the browser gives no storage
  }
}

/** Remove a version that cannot be used. */
export async function forgetVersion(): Promise<void> {
  await caches.delete(CACHE).catch(() => {});
}
