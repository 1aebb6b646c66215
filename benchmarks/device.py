"""What a device costs: bundles, starts, draft steps, memory, tau, and tokens over emulated links.

Parts, of which any may be named with --parts, in the order of their needs:

- bundle: bytes of each kind of bundle.
- start: from a process's start to its first draft, and its memory. Cold: without the bundle's files
  in the system's file cache. Processes are started in turn; figures are the least of all.
- step: milliseconds of one draft, the least of repeated short runs, and its CPU time.
  WASM needs Node and `npm ci` in packages/device-js.
- tau: tokens a round of greedy chains, simulated along the target's own texts in float32, with
  activations as `int8` sends them. The drafter in float32 is the measure.
- page: the page in headless Chromium, from its address to its first draft: with empty caches, then
  again; the download is from this machine. A draft's time and the bytes of a token, with those of
  the prompt, are what it shows after an answer. Needs `make device-page` and Playwright.
- links: milliseconds per token over lan, 5g and 4g beside plain streaming and the formula, by
  tools/edge_bench, as root on Linux; a pass of the server is held at --pass-ms. `slow` holds a
  draft step at three times this machine's own. `auto` lets the session choose how much to draft,
  or nothing: it is to have at least 0.97 of plain streaming's speed with every device.

Only `page` and `links` need a quiet machine. The last line is JSON.

    python benchmarks/device.py
    python benchmarks/device.py --parts tau --suite spec_bench.jsonl --limit 20
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from moaspec_core.drafting.protocols import RequestText
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_edge.device.device_parts import Device, DeviceProposer
from moaspec_edge.device_onnx.manifest import is_onnx_bundle
from moaspec_edge.protocol.activation_layout import Activations
from moaspec_edge.protocol.codec import Codec, Floats

# Only functions import PyTorch: a process of a device without it is measured.

ROOT = Path(__file__).parents[1]
ALIAS = "smollm2-135m"
KINDS = {
    "PyTorch": [],
    "PyTorch, 8 bits": ["--bits", "8"],
    "onnxruntime, 8 bits": ["--format", "onnx", "--bits", "8"],
    "onnxruntime, 4 bits": ["--format", "onnx", "--bits", "4"],
    "WebAssembly, 8 bits": ["--format", "onnx-web", "--bits", "8"],
    "WebAssembly, 4 bits": ["--format", "onnx-web", "--bits", "4"],
}
WEB = [name for name in KINDS if name.startswith("WebAssembly")]
NUM_READ, DEPTH = 40, 8
"""Tokens of the text that a draft step is timed after, and drafts of a run."""
LINK_DEVICES = {
    "PyTorch": ("PyTorch", {}),
    "PyTorch, AVX2": ("PyTorch", {"MOASPEC_KERNELS": "avx2"}),
    "onnxruntime, 8 bits": ("onnxruntime, 8 bits", {}),
}
"""Bundle and environment of the devices of `links`."""
MIN_AUTO = 0.97
"""Speed over plain streaming that `auto` must have."""


def main() -> None:
    """Print a table for each part, then one line of JSON."""
    args = parse()
    if args.child:
        print(json.dumps(child(args.child)))
        return
    parts: dict[str, Callable[..., Any]] = {
        "bundle": bundle_sizes,
        "start": starts,
        "step": steps,
        "tau": taus,
        "page": page_start,
        "links": links,
    }
    found: dict[str, Any] = {"benchmark": "device", "machine": platform.processor(), **vars(args)}
    del found["child"]
    with tempfile.TemporaryDirectory() as scratch:
        places = exported(args.bundles or Path(scratch), args)
        for name in args.parts.split(","):
            began = time.monotonic()
            found[name] = parts[name](places, args)
            print(f"({name}: {time.monotonic() - began:.0f} s)\n", flush=True)
    print(json.dumps(found, default=str))


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="bundle,start,step,tau,page,links")
    parser.add_argument("--model", default=ALIAS)
    parser.add_argument("--drafter", default=ALIAS)
    parser.add_argument("--suite", default="bundled", help="Prompts of `tau`.")
    parser.add_argument("--limit", type=int, default=10, help="Prompts of `tau`.")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="Of each, for `tau`.")
    parser.add_argument("--depth", type=int, default=5, help="Drafts of a chain.")
    parser.add_argument("--repeats", type=int, default=3, help="Starts of each process.")
    parser.add_argument("--links", default="lan,5g,4g")
    parser.add_argument("--pass-ms", type=float, default=150.0)
    parser.add_argument("--link-tokens", type=int, default=48, help="Of each prompt, for `links`.")
    parser.add_argument("--link-prompts", type=int, default=2)
    parser.add_argument(
        "--auto-only",
        action="store_true",
        help="Of `links`: no fixed chains, only devices at a third of their speed.",
    )
    parser.add_argument("--bundles", type=Path, help="Keep bundles here, or take these.")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def table(*rows: Sequence[object]) -> None:
    """Print rows in Markdown, the first as headings."""
    head, *rest = ([str(cell) for cell in row] for row in rows)
    for row in (head, ["---"] * len(head), *rest):
        print(f"| {' | '.join(row)} |", flush=True)


# Bundles


def exported(directory: Path, args: argparse.Namespace) -> dict[str, Path]:
    """Every kind of bundle; those that are there stay."""
    command = [sys.executable, "-m", "moaspec", "checkpoint", "export-device"]
    places = {}
    for number, (name, options) in enumerate(KINDS.items()):
        places[name] = directory / str(number)
        if places[name].exists():
            continue
        whole = [*command, args.model, args.drafter, str(places[name]), *options]
        subprocess.run(whole, check=True, capture_output=True)  # noqa: S603 - our own
    return places


def bundle_sizes(places: dict[str, Path], args: argparse.Namespace) -> dict[str, int]:
    """Bytes of all files."""
    del args
    files = {
        name: [one for one in place.rglob("*") if one.is_file()] for name, place in places.items()
    }
    found = {name: sum(one.stat().st_size for one in all_of) for name, all_of in files.items()}
    table(("bundle", "MB"), *((name, f"{size / 1e6:.1f}") for name, size in found.items()))
    return found


# Processes of a device


def child(directory: str) -> dict[str, float]:
    """Load a device and draft, in a process of its own; times and memory."""
    process = psutil.Process()
    device = load(directory)
    import moaspec_edge.device.remote_session
    import moaspec_edge.protocol.websocket_transport  # noqa: F401 - a device has it in memory

    drafter: Any = device.drafting(None)
    read(drafter)
    draft(drafter, 1)
    start_s = time.time() - process.create_time()
    loaded = process.memory_info().rss
    times = [draft(drafter, DEPTH) for _ in range(20)]
    return {
        "start_s": start_s,
        "step_ms": 1e3 * min(wall for wall, _ in times) / DEPTH,
        "step_cpu_ms": 1e3 * min(cpu for _, cpu in times) / DEPTH,
        "rss_bytes": max(loaded, process.memory_info().rss),
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def load(directory: str | Path) -> Device:
    """A device of either kind of bundle, with one thread."""
    if is_onnx_bundle(directory):
        from moaspec_edge.device_onnx.onnx_device import OnnxDevice

        return OnnxDevice(directory)
    import torch

    from moaspec_edge.device.bundle import load_device

    torch.set_num_threads(1)
    return load_device(directory)


def read(drafter: DeviceProposer) -> None:
    """Give a drafter activations of a made-up text."""
    layout, generator = drafter.layout("int8"), np.random.default_rng(0)

    def numbers(codec: Codec) -> Floats:
        shape = NUM_READ - 1, codec.vectors, codec.width
        return generator.standard_normal(shape, dtype=np.float32)

    layers = None if layout.layers is None else numbers(layout.layers)
    data = layout.encode(numbers(layout.memory), layers)
    drafter.place_activations(0, 0, layout.decode(data.tobytes(), NUM_READ - 1))


def draft(drafter: DeviceProposer, depth: int) -> tuple[float, float]:
    """Draft a chain after the made-up text; seconds of wall clock and of CPU."""
    text = [1000 + i for i in range(NUM_READ)]
    drafter.rollback(0, NUM_READ)
    wall, cpu = time.perf_counter(), time.process_time()
    drafter.propose([RequestText(0, text)], Chain(depth))
    return time.perf_counter() - wall, time.process_time() - cpu


def started(place: Path) -> dict[str, float]:
    """What `child` measures, in a new process with one thread."""
    command = [sys.executable, __file__, "--child", str(place)]
    threads = {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, capture_output=True, env=os.environ | threads)  # noqa: S603 - our own
    found: dict[str, float] = json.loads(done.stdout)
    return found


def starts(places: dict[str, Path], args: argparse.Namespace) -> dict[str, Any]:
    """Seconds to the first draft, and memory."""
    found: dict[str, Any] = {}
    for _ in range(args.repeats):
        for name in (kind for kind in KINDS if kind not in WEB):
            row = found.setdefault(name, {"cold_s": [], "warm_s": []})
            forget(places[name])
            row["cold_s"].append(started(places[name])["start_s"])
            row |= (warm := started(places[name]))
            row["warm_s"].append(warm["start_s"])
    cells = (
        (
            name,
            *(f"{min(row[key]):.2f}" for key in ("cold_s", "warm_s")),
            *(f"{row[key] / 1e6:.0f}" for key in ("rss_bytes", "peak_bytes")),
        )
        for name, row in found.items()
    )
    table(("device", "first draft, cold, s", "warm, s", "memory, MB", "at most, MB"), *cells)
    return found


def forget(place: Path) -> None:
    """Drop a bundle's files from the system's file cache."""
    for path in place.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def steps(places: dict[str, Path], args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of one draft."""
    found: dict[str, Any] = {}
    runs: dict[str, Callable[[], dict[str, float]]] = {
        f"{name}, one thread": lambda place=place: started(place)  # type: ignore[misc]
        for name, place in places.items()
        if name not in WEB
    }
    if shutil.which("node") and (ROOT / "packages" / "device-js" / "node_modules").exists():
        for name, threads in product(WEB, sorted({1, min(4, os.cpu_count() or 1)})):
            step = functools.partial(in_wasm, places[name], threads)
            runs[f"{name}, threads: {threads}"] = step
    for _ in range(args.repeats):
        for name, run in runs.items():
            try:
                row = run()
            except subprocess.CalledProcessError as error:
                print(f"{name}: {error.stderr.decode().strip()[-300:]}", flush=True)
                continue
            best = found.setdefault(name, row)
            for key in ("step_ms", "step_cpu_ms"):
                best[key] = min(best[key], row[key])
    cells = ((n, f"{r['step_ms']:.2f}", f"{r['step_cpu_ms']:.2f}") for n, r in found.items())
    table(("device", "ms per draft, wall clock", "CPU"), *cells)
    return found


def in_wasm(place: Path, threads: int) -> dict[str, float]:
    """A draft step in onnxruntime-web."""
    script = Path(__file__).with_name("device_wasm.mjs")
    command = ["node", str(script), str(place), str(threads)]
    done = subprocess.run(command, check=True, capture_output=True)  # noqa: S603 - our own
    found: dict[str, float] = json.loads(done.stdout)
    return found


# Acceptance


def taus(places: dict[str, Path], args: argparse.Namespace) -> dict[str, Any]:
    """Tokens a round of every device, along the target's texts."""
    import torch

    import moaspec
    from moaspec.evaluate.prompt_suites import read_prompts
    from moaspec_core.cli.prompts import chat_ids
    from moaspec_edge.device.local_parts import LocalDevice

    torch.set_num_threads(1)
    target = moaspec.load_target(args.model, dtype="float32")
    module: Any = moaspec.load_drafter(args.drafter, target=target)
    prompts = [chat_ids(target, one.turns[0]) for one in read_prompts(args.suite, limit=args.limit)]
    devices = {"PyTorch, float32": LocalDevice(target, module)}
    drafters: dict[str, Any] = {name: device.drafting(None) for name, device in devices.items()}
    drafters |= {name: load(place).drafting(None) for name, place in places.items()}
    counts = {name: [0, 0] for name in drafters}
    for prompt in prompts:
        result = moaspec.generate(target, prompt, max_new_tokens=args.max_new_tokens)
        ids = [*prompt, *result.token_ids]
        seen = features(target, module, ids)
        for name, drafter in drafters.items():
            counts[name][0] += len(ids) - len(prompt) - 1
            counts[name][1] += num_rounds(drafter, ids, len(prompt) + 1, seen, args.depth)
    tau = {name: tokens / rounds for name, (tokens, rounds) in counts.items()}
    best = tau["PyTorch, float32"]
    cells = ((name, f"{one:.3f}", f"{100 * one / best:.1f}%") for name, one in tau.items())
    table(("device", f"tau, chains of {args.depth}", "of float32"), *cells)
    return {"tau": tau, "tokens": counts["PyTorch, float32"][0]}


def features(target: Any, module: Any, ids: list[int]) -> Any:
    """A server's `ActivationParts` of a text."""
    from moaspec.engine.local_verifier import LocalVerifier
    from moaspec_core.drafting.protocols import VerifyRequest
    from moaspec_core.engine.engine import run_now
    from moaspec_edge.server.service import wire_encoder

    encoder: Any = wire_encoder(module, target)
    verifier = LocalVerifier(target, encoder)
    (verdict,) = run_now(verifier.verify([VerifyRequest(0, 0, tuple(ids))]))
    return verdict.features


def num_rounds(drafter: DeviceProposer, ids: list[int], start: int, seen: Any, depth: int) -> int:
    """Rounds that greedy chains take for a known text from position `start` on."""
    from moaspec_edge.server.activation_records import encoded

    layout, placed, rounds = drafter.layout("int8"), 0, 0
    records = encoded(seen, layout)
    drafter.rollback(0, 0)
    while start < len(ids):
        new = records[placed : start - 1]
        sent: Activations = layout.decode(new.tobytes(), len(new))
        drafter.place_activations(0, placed, sent)
        placed = start - 1
        (tree,) = drafter.propose([RequestText(0, ids[:start])], Chain(depth))
        right = [a == b for a, b in zip(tree.tokens, ids[start:], strict=False)]
        accepted = (*right, False).index(False)
        drafter.rollback(0, start + accepted)
        start, rounds = start + accepted + 1, rounds + 1
    return rounds


def page_start(places: dict[str, Path], args: argparse.Namespace) -> dict[str, Any]:
    """The page: see `page_starts`."""
    from page_start import page_starts

    found = page_starts(places[WEB[0]], args.model, args.drafter, args.repeats)
    draft, sent, received = min(found["figures"], key=lambda one: float(one[0].split()[0]))
    row = (
        f"{found['bytes'] / 1e6:.1f} MB",
        f"{min(found['cold_s']):.1f} s",
        f"{min(found['warm_s']):.1f} s",
        *(draft, sent, received),
        f"{found['memory_bytes'] / 1e6:.0f} MB",
    )
    head = ("download", "first draft, cold", "warm", "a draft", "a token, sent", "received")
    table((*head, "memory"), row)
    return found


# Links


def links(places: dict[str, Path], args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds per token over emulated links."""
    sys.path.insert(0, str(ROOT / "tools"))
    from edge_bench.bench import EdgeSettings, run_edge_bench
    from moaspec.evaluate.prompt_suites import read_prompts

    prompts = tuple(prompt.turns[0] for prompt in read_prompts("bundled", limit=args.link_prompts))
    found: dict[str, Any] = {}
    rows: list[Sequence[object]] = []
    brief: list[Sequence[object]] = []
    auto: dict[str, float] = {}
    for (name, (kind, variables)), drafted in itertools.product(
        LINK_DEVICES.items(), (0,) if args.auto_only else (args.depth, 0)
    ):
        settings = EdgeSettings(
            model=args.model,
            drafter=args.drafter,
            bundles={"moa": str(places[kind])},
            prompts=prompts,
            dtype="float32",
            links=tuple(args.links.split(",")),
            modes=("plain", "ahead"),
            drafters=("moa",),
            num_target_layers=(num_target_layers(places[kind]),),
            server_speeds=(3.0,) if args.auto_only else (1.0, 3.0),
            drafted=drafted,
            pass_s=args.pass_ms / 1e3,
            max_new_tokens=args.link_tokens,
        )
        with unittest.mock.patch.dict(os.environ, variables):
            report = found[f"{name}, {drafted or 'auto'}"] = run_edge_bench(settings)
        new = list(link_rows(name, drafted, report))
        rows += new
        if not drafted:
            auto |= {f"{row[0]}, {row[1]}": float(str(row[6])) for row in new}
            names = dict.fromkeys(row[1] for row in new)
            brief += [
                (one, *(f"{row[3]}, {row[4]} ({row[6]})" for row in new if row[1] == one))
                for one in names
            ]
    head = ("link", "device", "drafts", "plain, ms/token", "with drafts", "formula", "over plain")
    table((*head, "step, ms", "text"), *rows)
    print("\nWith draft=auto, ms a token plain, with drafts, and the ratio:\n")
    table(("device", *args.links.split(",")), *brief)
    least = min(auto, key=auto.__getitem__)
    print(f"Least of auto over plain: {auto[least]} ({least}); it must be {MIN_AUTO} or more.")
    return found | {"auto_over_plain": auto, "auto_is_enough": auto[least] >= MIN_AUTO}


def num_target_layers(place: Path) -> int:
    """N of a bundle's drafter."""
    drafter: Any = load(place).drafting(None)
    return int(drafter.num_target_layers)


def link_rows(kind: str, drafted: int, report: dict[str, Any]) -> Iterator[Sequence[object]]:
    """A row for each link and speed."""
    for link, of in report["links"].items():
        plain, *others = of["rows"]
        for row in others:
            slow = " slow" if row["server_speed"] > 1 else ""
            times = (plain["per_token_s"], row["per_token_s"], row["predicted_s"])
            yield (
                link,
                kind + slow,
                drafted or "auto",
                *(f"{1e3 * one:.0f}" for one in times),
                f"{row['over_plain']:.2f}",
                f"{1e3 * row['round']['step_s']:.1f}",
                "same" if row["same_text"] else "differs",
            )


if __name__ == "__main__":
    main()
