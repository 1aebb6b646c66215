/** A download that resumes after the connection broke. */
import { BundleError, LinkError } from "../errors.js";

/** Time without a new byte of the file after which a download fails. */
const GIVE_UP_MS = 60_000;
/** Time between a broken connection and the next one. */
const PAUSE_MS = 1000;
/** Bytes of the first buffer; it doubles until the file fits. */
const FIRST_BYTES = 1 << 20;

/**
 * Download a file. Where a connection ends early, the next one asks for the rest.
 *
 * @param url of the file
 * @param maxBytes the expected size; the download stops one byte after it, and a connection that breaks at
 *   this size has sent the whole file. The caller checks the file's hash.
 * @param onBytes called with the number of bytes that arrived; negative if bytes are dropped
 * @throws BundleError the server refuses the file, or it does not fit in memory
 * @throws LinkError connections broke, and for a minute none brought a new byte
 */
export async function download(
  url: URL,
  maxBytes: number,
  onBytes: (count: number) => void,
): Promise<Uint8Array> {
  let data = new Uint8Array(Math.min(FIRST_BYTES, maxBytes + 1));
  let size = 0;
  let furthest = 0;
  let furthestMs = performance.now();
  const advance = (count: number): void => {
    size += count;
    onBytes(count);
    if (size <= furthest) return;
    furthest = size;
    furthestMs = performance.now();
  };
  for (;;) {
    try {
      const response = await fetch(url, size ? { headers: { Range: `bytes=${size}-` } } : {});
      // The range begins at the file's end: all of it is here.
      if (response.status === 416 && size) return data.subarray(0, size);
      if (!response.ok || !response.body) {
        throw new BundleError(`${url} cannot be read: HTTP status ${response.status}.`);
      }
      if (response.status !== 206 && size) advance(-size);
      const reader = response.body.getReader();
      for (let piece = await reader.read(); !piece.done; piece = await reader.read()) {
        const taken = piece.value.subarray(0, maxBytes + 1 - size);
        const needed = size + taken.length;
        if (needed > data.length) {
          const grown = new Uint8Array(Math.min(Math.max(2 * data.length, needed), maxBytes + 1));
          grown.set(data);
          data = grown;
        }
        data.set(taken, size);
        advance(taken.length);
        if (size > maxBytes) {
          await reader.cancel();
          break;
        }
      }
      return data.subarray(0, size);
    } catch (error) {
      if (error instanceof BundleError) throw error;
      if (error instanceof RangeError) throw new BundleError(`${url} does not fit in memory: ${error.message}`);
      if (size === maxBytes) return data.subarray(0, size);
      if (performance.now() - furthestMs > GIVE_UP_MS) {
        throw new LinkError(`${url} cannot be downloaded: ${(error as Error).message}`);
      }
    }
    await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
  }
}
