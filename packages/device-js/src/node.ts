/** Parts that need Node's file system. */
import { open } from "node:fs/promises";
import { join } from "node:path";
import type { ReadFile } from "./bundle/bundle.js";
import { BundleError } from "./errors.js";

/** Read a bundle's files from a directory. */
export function fromDirectory(directory: string): ReadFile {
  return async (name, maxBytes) => {
    try {
      const file = await open(join(directory, name));
      try {
        const { size } = await file.stat();
        const data = new Uint8Array(Math.min(size, maxBytes + 1));
        await file.read(data, 0, data.length, 0);
        return data;
      } finally {
        await file.close();
      }
    } catch (error) {
      throw new BundleError(`${name} cannot be read: ${(error as Error).message}`);
    }
  };
}
