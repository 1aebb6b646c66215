"""Resident memory beyond that of the imports, and the share of weights, caches and tokenizer.

A tiny random model that decodes with a drafter gives the memory of imports and of lazily loaded
libraries. Pages of files (the mapped checkpoint, libraries) are listed apart: the system may drop
them. Linux only.

    python benchmarks/memory.py --dtype bfloat16 --threads 2
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import load, parser, prompts_of, setting
from safetensors.torch import save_model
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import moaspec
from moaspec import Session
from moaspec.backends.cpu.matrix import Matrix
from moaspec.drafting.kv_cache import KVCache
from moaspec.model.checkpoint.moa_checkpoint import save_drafter
from moaspec.model.moa import MoADrafter
from moaspec.target.registry import find_weights, load_tokenizer
from moaspec_core.process_memory import return_freed_memory
from moaspec_train.students.drafter_sizes import DrafterSizes, drafter_config
from moaspec_train.students.warm_start import random_weights

MB = 1e6


def main() -> None:
    """Print where memory is, in MB, then one line of JSON."""
    options = parser(__doc__)
    options.add_argument("--suite", default="bundled")
    options.add_argument("--limit", type=int, default=1)
    options.add_argument("--max-new-tokens", type=int, default=64)
    args = options.parse_args()
    _decode_tiny(args)
    before = _resident()
    tokenizer_mb = _tokenizer_mb(args.model, before)
    target, drafter = load(args)
    session = Session(target, drafter)
    for ids in prompts_of(args, target):
        session.generate(ids, max_new_tokens=args.max_new_tokens)
    after = _resident()
    parts = {
        "weights": sum(matrix.num_bytes for matrix in _all(Matrix)) / MB,
        "caches": sum(cache.num_bytes for cache in _all(KVCache)) / MB,
        "tokenizer": tokenizer_mb,
    }
    own = after["RssAnon"] - before["RssAnon"]
    more = 100 * (own / sum(parts.values()) - 1)
    files = after["RssFile"] - before["RssFile"]
    named = ", ".join(f"{name} {size:.0f}" for name, size in parts.items())
    print(
        f"{sum(after.values()):.0f} MB resident, {sum(before.values()):.0f} with a tiny model; "
        f"{files:.0f} of the difference are pages of files. The other {own:.0f}: {named}, "
        f"and {more:.0f}% more."
    )
    found = {"before": before, "after": after, "parts": parts, "percent_more": more}
    print(json.dumps({"benchmark": "memory", "setting": setting(target)} | found))


def _decode_tiny(args: argparse.Namespace) -> None:
    """Have everything imported, and every library at work once."""
    torch.set_num_threads(args.threads)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        architectures=["LlamaForCausalLM"],
    )
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}))
    with tempfile.TemporaryDirectory() as folder:
        # Not by transformers, which imports more for saving than anybody loads.
        model = LlamaForCausalLM(config).to(getattr(torch, args.dtype))
        save_model(model, f"{folder}/model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(folder)
        PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
        target = moaspec.load_target(folder, dtype=args.dtype, device=args.device)
        drafter = MoADrafter(drafter_config(target, DrafterSizes()))
        random_weights(drafter)
        save_drafter(drafter.to(target.dtype), Path(folder) / "drafter")
        drafter = moaspec.load_drafter(f"{folder}/drafter", target=target)
        Session(target, drafter).generate([1, 2, 3], max_new_tokens=16, tree="chain:2")


def _resident() -> dict[str, float]:
    """MB of this process, by kind."""
    gc.collect()
    return_freed_memory()
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kinds = ("RssAnon", "RssFile", "RssShmem")
    return {kind: int(lines[kind].split()[0]) * 1024 / MB for kind in kinds}


def _tokenizer_mb(model: str, before: dict[str, float]) -> float:
    """What the model's tokenizer takes; it is let go again."""
    tokenizer = load_tokenizer(find_weights(model))
    taken = _resident()["RssAnon"] - before["RssAnon"]
    del tokenizer
    return taken


def _all(kind: type[Any]) -> list[Any]:
    """Every object of a class that is alive."""
    return [one for one in gc.get_objects() if type(one) is kind]


if __name__ == "__main__":
    main()
