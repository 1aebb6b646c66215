"""One process or many, joined by accelerate.

`torchrun` and `accelerate launch` start the processes; without them there is one. Each holds the
whole frozen target. How they share what is trained: `moaspec.train.parallelism.strategies`.
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
    """Join the other processes of this run, if it was started with several.

    Raises:
        InputError: a tracker that accelerate does not know or that is not installed, or a launch
            that asks for sharding of accelerate's own.
    """
    _refuse_plugins()
    if config.sharding == "deepspeed":
        require("sharding=deepspeed (not needed with sharding=fsdp)", "deepspeed")
    _require_device(config.device)
    available = [str(one) for one in get_available_trackers()]
    for name in config.trackers:
        if name not in available:
            known = ", ".join(sorted(str(one) for one in LOGGER_TYPE_TO_CLASS))
            raise InputError(
                f"The tracker {name!r} is not installed (pip install {name}) or not known to "
                f"accelerate ({known}). Install it, or leave it out of trackers."
            )
    # Another run in this process may have had another precision, which accelerate remembers.
    AcceleratorState._reset_state()
    return Accelerator(
        cpu=torch.device(config.device).type == "cpu",
        mixed_precision=config.mixed_precision,
        log_with=list(config.trackers) or None,
        project_dir=config.output,
        kwargs_handlers=[
            # A frozen LSA or a part left out has no gradients to wait for.
            DistributedDataParallelKwargs(
                find_unused_parameters=config.frozen_lsa > 0 or bool(config.sizes.without)
            )
        ],
    )


def _require_device(device: str) -> None:
    """Otherwise accelerate takes the CPU without a word."""
    if device not in {"cpu", "cuda"}:
        raise InputError(f"device must be cpu or cuda, got {device!r}; each process takes one GPU.")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("device=cuda, but torch finds no GPU here; use device=cpu.")


def _refuse_plugins() -> None:
    """A launcher's plugins would wrap the optimiser, whose state an exact resume needs whole."""
    for plugin in ("DeepSpeed", "FSDP"):
        if os.environ.get(f"ACCELERATE_USE_{plugin.upper()}", "false").lower() in {"1", "true"}:
            raise InputError(
                f"This run was launched with accelerate's {plugin} plugin. Launch it without, and "
                f"say sharding={plugin.lower()} in the training config: that runs on CPUs too, and "
                "resumes exactly."
            )


def summed(accelerator: Accelerator, values: Tensor) -> Tensor:
    """The sum over all processes, on the CPU."""
    if accelerator.num_processes == 1:
        return values
    moved = values.to(accelerator.device, torch.float64)
    return accelerator.reduce(moved, reduction="sum").cpu()


def make_directory(accelerator: Accelerator, path: Path) -> None:
    """Create it once, before any process uses it."""
    if accelerator.is_main_process:
        path.mkdir(parents=True, exist_ok=True)
    accelerator.wait_for_everyone()
