"""What the benchmarks share: the setting they run in, medians and spreads."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import torch
import transformers

import moaspec
from moaspec import Target
from moaspec.decode.calibrate import machine
from moaspec.model import MoADrafter

ALIAS = "smollm2-135m"


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options of every benchmark."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--model", default=ALIAS)
    options.add_argument("--drafter", default=ALIAS)
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--device", default="cpu")
    options.add_argument("--threads", type=int, default=2)
    return options


def load(args: argparse.Namespace) -> tuple[Target, MoADrafter]:
    """Target and drafter, after setting the threads."""
    torch.set_num_threads(args.threads)
    target = moaspec.load_target(args.model, dtype=args.dtype, device=args.device)
    return target, moaspec.load_drafter(args.drafter, target=target)


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
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else [*values] * 3
    return {"median": middle, "low": low, "high": high}
