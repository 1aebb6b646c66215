"""One draft of an ONNX bundle in Chromium: milliseconds, and memory of the page.

A worker as the device page has it runs onnxruntime-web; nothing else works meanwhile. Bundles take
turns. Prints the median of each turn's drafts after the warm-up, and the renderer's private memory.
Needs `npm ci` in packages/device-js, Chromium and Playwright. The last line is JSON.

    python benchmarks/page_draft.py BUNDLE [BUNDLE ...] --turns 5
"""

from __future__ import annotations

import argparse
import functools
import http.server
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from page_start import renderer_bytes

import browsing

ROOT = Path(__file__).parents[1]
WORKER = """
import * as ort from "/ort/ort.wasm.min.mjs";
import { withoutWeights } from "/weights.js";
const [SLOTS, NUM_READ] = [512, 40];
self.onmessage = async ({ data: { bundle, warmUp, repeats } }) => {
  ort.env.wasm.wasmPaths = new URL("/ort/", self.location.href).href;
  ort.env.wasm.numThreads = 1;
  const facts = await (await fetch(`${bundle}/manifest.json`)).json();
  let graph = new Uint8Array(await (await fetch(`${bundle}/drafter.onnx`)).arrayBuffer());
  const options = { logSeverityLevel: 3, externalData: [{ path: "weights", data: graph }] };
  const session = await ort.InferenceSession.create(withoutWeights(graph, "weights"), options);
  graph = options.externalData = undefined;
  const cache = ({ num_kv_heads, head_dim }) => {
    const sizes = [num_kv_heads, SLOTS, head_dim];
    return new ort.Tensor("float32", new Float32Array(sizes.reduce((a, b) => a * b)), sizes);
  };
  const { self_attention: text, cross_attention: memory } = facts;
  const feeds = {
    text_key: cache(text), text_value: cache(text),
    memory_key: cache(memory), memory_value: cache(memory),
    memory_mask: new ort.Tensor("bool", new Uint8Array(SLOTS).fill(1, 0, NUM_READ), [SLOTS]),
  };
  const steps = [];
  for (let i = 0; i < warmUp + repeats; i++) {
    feeds.token_ids = new ort.Tensor("int64", BigInt64Array.of(BigInt(1000 + i)), [1]);
    feeds.start = new ort.Tensor("int64", BigInt64Array.of(BigInt(NUM_READ + (i % 8))), [1]);
    const began = performance.now();
    const found = await session.run(feeds);
    steps.push(performance.now() - began);
    for (const name of Object.keys(found)) {
      if (name.startsWith("new_")) feeds[name.slice(4)] = found[name];
    }
  }
  self.postMessage(steps);
};
"""
RUN = """(asked) => new Promise((resolve, reject) => {
  const worker = new Worker("/worker.js", { type: "module" });
  worker.onmessage = ({ data }) => resolve(data);
  worker.onerror = (event) => reject(new Error(event.message));
  worker.postMessage(asked);
})"""


@functools.cache
def loading_code() -> bytes:
    """The package's module that loads a graph's weights apart from it."""
    package = ROOT / "packages/device-js"
    with tempfile.TemporaryDirectory() as directory:
        made = Path(directory) / "weights.js"
        source = "src/bundle/external_weights.ts"
        command = ["npx", "rolldown", source, "--file", str(made), "--format", "esm"]
        subprocess.run(command, cwd=package, check=True, stdout=subprocess.DEVNULL)  # noqa: S603
        return made.read_bytes()


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves the runtime, bundles and the worker to an isolated page."""

    def __init__(self, bundles: list[Path], *args: object) -> None:
        self.bundles = bundles
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        """Answer one request."""
        kinds = {".mjs": "text/javascript", ".js": "text/javascript", ".wasm": "application/wasm"}
        data = self.content(self.path)
        self.send_response(200 if data is not None else 404)
        self.send_header("Content-Type", kinds.get(Path(self.path).suffix, "text/html"))
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        self.end_headers()
        self.wfile.write(data or b"")

    def content(self, path: str) -> bytes | None:
        """The bytes of a path."""
        if path == "/weights.js":
            return loading_code()
        if path in ("/", "/worker.js"):
            return WORKER.encode() if path != "/" else b"<title>drafts</title>"
        place, _, name = path[1:].partition("/")
        if place == "ort":
            dist = ROOT / "packages/device-js/node_modules/onnxruntime-web/dist"
            return (dist / name).read_bytes()
        return (self.bundles[int(place)] / name).read_bytes() if place.isdigit() else None

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def main() -> None:
    """Print a row for each bundle, then one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundles", nargs="+", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=40, help="Drafts before the first counts.")
    parser.add_argument("--repeats", type=int, default=60)
    args = parser.parse_args()
    made = functools.partial(Handler, args.bundles)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), made)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}/"
    found: dict[int, list[dict[str, float]]] = {index: [] for index in range(len(args.bundles))}
    with browsing.chromium() as browser:
        for _ in range(args.turns):
            for index, turns in found.items():
                with browsing.visit(browser, url) as visited:
                    asked = {"bundle": f"/{index}", "warmUp": args.warm_up, "repeats": args.repeats}
                    steps = visited.page.evaluate(RUN, asked)
                    turns.append(
                        {
                            "first_ms": statistics.median(steps[:10]),
                            "draft_ms": statistics.median(steps[args.warm_up :]),
                            "least_ms": min(steps),
                            "memory_mb": renderer_bytes() / 1e6,
                        }
                    )
    rows = []
    for index, turns in found.items():
        row = {key: statistics.median(turn[key] for turn in turns) for key in turns[0]}
        row["load"] = os.getloadavg()[0]
        print(args.bundles[index].name, {key: round(value, 1) for key, value in row.items()})
        rows.append({"bundle": str(args.bundles[index]), **row, "turns": turns})
    server.shutdown()
    print(json.dumps({"benchmark": "page_draft", "rows": rows}))


if __name__ == "__main__":
    main()
