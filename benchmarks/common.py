"""What the benchmarks share: the setting they run in, medians and spreads."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor

import moaspec
from moaspec import Target
from moaspec.calibration.measure_costs import machine
from moaspec.evaluate.prompt_suites import read_prompts
from moaspec.model.moa import MoADrafter
from moaspec_core.cli.prompts import chat_ids

ALIAS = "smollm2-135m"


def parser(
    description: str | None, *, dtype: str = "bfloat16", threads: int = 2
) -> argparse.ArgumentParser:
    """Options of every benchmark."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--model", default=ALIAS)
    options.add_argument("--drafter", default=ALIAS)
    options.add_argument("--dtype", default=dtype)
    options.add_argument("--device", default="cpu")
    options.add_argument("--threads", type=int, default=threads)
    options.add_argument(
        "--full-bits",
        action="store_true",
        help="Keep 16 bits of weights that were made of fewer, as of any other bf16 model.",
    )
    return options


def text_parser(description: str | None) -> argparse.ArgumentParser:
    """Options of scripts that count over decoded prompts, in float32, where texts are equal."""
    options = parser(description, dtype="float32", threads=1)
    options.add_argument("--suite", default="bundled")
    options.add_argument("--limit", type=int)
    options.add_argument("--max-new-tokens", type=int, default=64)
    return options


def prompts_of(args: argparse.Namespace, target: Target) -> list[list[int]]:
    """The first turns of the suite, as token ids."""
    suite = read_prompts(args.suite, limit=args.limit)
    return [chat_ids(target, prompt.turns[0]) for prompt in suite]


def text_setting(args: argparse.Namespace, target: Target) -> dict[str, Any]:
    """The settings of a count; a suite is named without its directory."""
    return vars(args) | {"suite": Path(args.suite).name} | setting(target)


def _cannot(*_: object) -> bool:
    return False


def load_target(args: argparse.Namespace) -> Target:
    """The target, after setting the threads."""
    torch.set_num_threads(args.threads)
    if args.full_bits:
        # Not what is called with a weight: a mock remembers its arguments, so that all would stay.
        for name in ("unpacks_exactly", "Matrix.can_hold_stored"):
            mock.patch(f"moaspec.backends.cpu.matrix.{name}", new=_cannot).start()
    return moaspec.load_target(args.model, dtype=args.dtype, device=args.device)


def load(args: argparse.Namespace) -> tuple[Target, MoADrafter]:
    """Target and drafter, after setting the threads."""
    target = load_target(args)
    return target, moaspec.load_drafter(args.drafter, target=target)


def trusted(args: argparse.Namespace, target: Target) -> Target:
    """The target as transformers alone loads it, to judge texts."""
    if not target.packed:
        return target
    return moaspec.load_target(args.model, dtype=args.dtype, device=args.device, packed=False)


def setting(target: Target) -> dict[str, Any]:
    """What a figure holds for."""
    return {
        "machine": machine(target.device),
        "device": str(target.device),
        "threads": torch.get_num_threads(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "target": target.name,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles, as JSON."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else [*values] * 3
    return {"median": middle, "low": low, "high": high}


def log_probabilities(target: Target, ids_T: Tensor) -> Tensor:
    """Of the token after each, (T, V) float32."""
    with torch.inference_mode():
        passed = target.capture(ids_T[None], torch.ones_like(ids_T[None]))
        return target.head(passed.hidden_BTE[0]).float().log_softmax(-1)


def distances(right_TV: Tensor, found_TV: Tensor) -> tuple[Tensor, Tensor]:
    """For each token, the KL divergence in nats, and whether another token is the most likely."""
    kl_T = (right_TV.exp() * (right_TV - found_TV)).sum(-1)
    return kl_T.double(), (right_TV.argmax(-1) != found_TV.argmax(-1)).double()
