// The page's scripts, into dist/page: `moaspec target-server --page` serves them.
import { copyFile, readFile, writeFile } from "node:fs/promises";
import { promisify } from "node:util";
import { constants, gzip } from "node:zlib";

const OUT = "dist/page";
const RUNTIME = "node_modules/onnxruntime-web/dist/ort-wasm-simd-threaded";

/** Copies onnxruntime's own files; the server sends the large one as it is stored. */
const runtimeFiles = {
  name: "runtime-files",
  async writeBundle() {
    await copyFile(`${RUNTIME}.mjs`, `${OUT}/ort-wasm-simd-threaded.mjs`);
    const wasm = await readFile(`${RUNTIME}.wasm`);
    const packed = await promisify(gzip)(wasm, { level: constants.Z_BEST_COMPRESSION });
    await writeFile(`${OUT}/ort-wasm-simd-threaded.wasm.gz`, packed);
  },
};

const script = (name, plugins = []) => ({
  input: `src/page/${name}.ts`,
  platform: "browser",
  // onnxruntime-web without its own copy of the runtime's files.
  resolve: { conditionNames: ["onnxruntime-web-use-extern-wasm", "import", "browser", "default"] },
  output: { file: `${OUT}/${name}.js`, format: "esm", minify: true },
  plugins,
});

export default [script("server"), script("worker"), script("sw", [runtimeFiles])];
