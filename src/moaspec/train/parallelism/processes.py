"""Training processes, joined by accelerate.

`torchrun` or `accelerate launch` starts several processes; otherwise there is one. Each process
holds the whole frozen target. `moaspec.train.parallelism.strategies` shards the drafter.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from torch import Tensor

from moaspec.errors import InputError
from moaspec.support.extras import require
from moaspec.train.run_config import TrainConfig


def new_accelerator(config: TrainConfig) -> Accelerator:
    """Join the other processes of this run, if there are any.

    Raises:
        InputError: a tracker is unknown or not installed, or the launcher set a sharding plugin.
    """
    _refuse_plugins()
    if config.sharding == "deepspeed":
        require("sharding=deepspeed (not needed with sharding=fsdp)", "deepspeed")
    _require_device(config.device)
    available = [str(tracker) for tracker in get_available_trackers()]
    for name in config.trackers:
        if name not in available:
            known = ", ".join(sorted(str(tracker) for tracker in LOGGER_TYPE_TO_CLASS))
            raise InputError(
                f"The tracker {name!r} is not installed (pip install {name}) or not known to "
                f"accelerate ({known}). Install it, or leave it out of trackers."
            )
    # accelerate keeps the precision of an earlier run in this process.
    AcceleratorState._reset_state()
    return Accelerator(
        cpu=torch.device(config.device).type == "cpu",
        mixed_precision=config.mixed_precision,
        log_with=list(config.trackers) or None,
        project_dir=config.output,
        kwargs_handlers=[
            # A frozen LSA or a left-out part has no gradients.
            DistributedDataParallelKwargs(
                find_unused_parameters=config.frozen_lsa > 0 or bool(config.sizes.without)
            )
        ],
    )


def _require_device(device: str) -> None:
    """Refuse other devices; accelerate would silently use the CPU."""
    if device not in {"cpu", "cuda"}:
        raise InputError(f"device must be cpu or cuda, got {device!r}; each process takes one GPU.")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("device=cuda, but torch finds no GPU here; use device=cpu.")


def _refuse_plugins() -> None:
    """Refuse plugins that wrap the optimiser: an exact resume needs its whole state."""
    for plugin in ("DeepSpeed", "FSDP"):
        if os.environ.get(f"ACCELERATE_USE_{plugin.upper()}", "false").lower() in {"1", "true"}:
            raise InputError(
                f"This run was launched with accelerate's {plugin} plugin. Launch it without, and "
                f"say sharding={plugin.lower()} in the training config: that runs on CPUs too, and "
                "resumes exactly."
            )


def sum_over_processes(accelerator: Accelerator, values: Tensor) -> Tensor:
    """Sum values over all processes; the result is on the CPU."""
    if accelerator.num_processes == 1:
        return values
    moved = values.to(accelerator.device, torch.float64)
    return accelerator.reduce(moved, reduction="sum").cpu()


def make_directory(accelerator: Accelerator, path: Path) -> None:
    """Create a directory before any process uses it."""
    if accelerator.is_main_process:
        path.mkdir(parents=True, exist_ok=True)
    accelerator.wait_for_everyone()
