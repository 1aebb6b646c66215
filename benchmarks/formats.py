"""A GGUF target in its file's bits beside llama.cpp: plain decoding, prompts, load, memory.

Both read one file with as many threads and take turns; llama.cpp's process is idle in ours.

`--formats` also measures files with the same weights rounded to other formats, those that the
package `gguf` can write: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, F16, BF16. With them stands how far
log-probabilities of 200 tokens are from those that transformers computes in float32 with the same
weights: the mean KL divergence in nats, and the share of other most likely tokens.

llama.cpp comes with the binding `xllamacpp`: pip install xllamacpp.

    python benchmarks/formats.py --model qwen2.5-coder-1.5b --dtype bfloat16 --threads 2
    python benchmarks/formats.py --model qwen2.5-coder-0.5b --formats Q4_0 Q8_0 BF16
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import torch
from common import distances, log_probabilities, parser, setting
from gguf import GGMLQuantizationType, quants
from llamacpp import LlamaCpp
from torch import Tensor

from moaspec import Target, generate, load_target
from moaspec.backends.fast_target import weight_bytes
from moaspec.evaluate.prompt_suites import read_prompts
from moaspec.target.registry import find_target_gguf
from moaspec_core.cli.prompts import chat_ids
from moaspec_core.support.paths import cache_dir

PROMPTS = (40, 500, 4000)
TEXT = Path(__file__).parents[1] / "docs"
COMPARED = 200  # tokens whose log-probabilities are compared


def main() -> None:
    """Print a table for each file, and after it a line of JSON."""
    options = parser(__doc__)
    options.add_argument("--max-new-tokens", type=int, default=128)
    options.add_argument("--runs", type=int, default=3)
    options.add_argument("--prompts", type=int, nargs="+", default=PROMPTS, help="Their tokens.")
    options.add_argument("--formats", nargs="*", default=(), help="Further formats of the weights.")
    args = options.parse_args()
    own = find_target_gguf(args.model)
    if own is None:
        raise SystemExit(f"{args.model} is no GGUF file that is here.")
    torch.set_num_threads(args.threads)
    _measure(own, args, compared=bool(args.formats))
    for name in args.formats:
        with TemporaryDirectory() as directory:
            file = Path(directory) / f"{name}.gguf"
            _write(own, file, GGMLQuantizationType[name])
            _measure(file, args, compared=True)


def _measure(file: Path, args: argparse.Namespace, *, compared: bool) -> None:
    before, start = _resident_mb(), time.perf_counter()
    target = load_target(str(file), dtype=args.dtype)
    found: dict[str, Any] = {
        "benchmark": "formats",
        "setting": setting(target) | {"target": file.name},
        "file_mb": file.stat().st_size / 1e6,
        "weights_mb": weight_bytes(target) / 1e6,
        "load_s": time.perf_counter() - start,
        "peak_mb_over_imports": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3 - before,
    }
    target.threads = None  # llama.cpp's process, which has just had its turn, takes no core
    llama = LlamaCpp(file, threads=args.threads, context=8192)
    found["llama_cpp"] = llama.version
    tokenizer: Any = target.tokenizer
    text = tokenizer.encode("".join(path.read_text() for path in sorted(TEXT.glob("*.md"))))
    asked = [chat_ids(target, prompt.turns[0]) for prompt in read_prompts("bundled-code")]
    speeds: dict[str, tuple[list[float], list[float]]] = {}
    for run in range(args.runs):
        prompt = asked[run % len(asked)]
        start, most = time.perf_counter(), args.max_new_tokens
        result = generate(target, prompt, max_new_tokens=most, stop_token_ids=())
        seconds = time.perf_counter() - start
        ours, theirs = speeds.setdefault("decoding", ([], []))
        ours.append(len(result.token_ids) / seconds)
        theirs.append(llama.tokens_per_s(prompt, most))
        for length in args.prompts:
            ids = text[run * 97 : run * 97 + length]
            start = time.perf_counter()
            generate(target, ids, max_new_tokens=1)
            ours, theirs = speeds.setdefault(f"prompt of {length}", ([], []))
            ours.append(length / (time.perf_counter() - start))
            theirs.append(llama.prompt_tokens_per_s(ids))
    llama.close()
    print(f"{file.name}\n{'':16} {'moaspec':>9} {'llama.cpp':>9} {'ratio':>6}   tokens/s")
    for name, both in speeds.items():
        ours_s, theirs_s = map(statistics.median, both)
        found[name] = {"moaspec": ours_s, "llama.cpp": theirs_s, "ratio": ours_s / theirs_s}
        print(f"{name:16} {ours_s:9.1f} {theirs_s:9.1f} {ours_s / theirs_s:6.2f}")
    for name in ("load_s", "file_mb", "weights_mb", "peak_mb_over_imports"):
        print(f"{name}: {found[name]:.1f}")
    if compared:
        found["kl"], found["changed"] = _distance(target, file, torch.tensor(text[:COMPARED]))
        print(f"from float32: KL {found['kl']:.2e}, other tokens {found['changed']:.1%}")
    print(json.dumps(found), flush=True)


def _write(source: Path, file: Path, kind: GGMLQuantizationType) -> None:
    """Write a copy of a GGUF file whose matrices are rounded to one format."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(file, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        of_items = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=of_items)
    for tensor in reader.tensors:
        weights = quants.dequantize(tensor.data, tensor.tensor_type)
        if weights.ndim > 1:
            writer.add_tensor(tensor.name, quants.quantize(weights, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _distance(target: Target, file: Path, ids_T: Tensor) -> tuple[float, float]:
    """Mean KL divergence from float32, in nats, and the share of other most likely tokens."""
    dequantised = f"{file.stem}-*/*.safetensors"
    kept = set(cache_dir().glob(dequantised))
    right_TV = log_probabilities(load_target(str(file), dtype="float32"), ids_T)
    for path in set(cache_dir().glob(dequantised)) - kept:
        path.unlink()
    found_TV = log_probabilities(target, ids_T)
    kl_T, changed_T = distances(right_TV, found_TV)
    return float(kl_T.mean()), float(changed_T.mean())


def _resident_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


if __name__ == "__main__":
    main()
