"""One process or many: accelerate starts them, torch shards what is trained.

`torchrun` and `accelerate launch` start the processes; without them there is one. Each holds the
whole frozen target. With `sharding: fsdp` the drafter's weights, gradients and optimiser are shared
out among them (torch's `fully_shard`, which also runs on CPUs, where accelerate's own does not).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from moaspec.errors import InputError, TrainingError
from moaspec.train.config import TrainConfig


def new_accelerator(config: TrainConfig) -> Accelerator:
    """Join the other processes of this run, if it was started with several.

    Raises:
        InputError: a tracker that accelerate does not know or that is not installed, or a launch
            that asks for sharding of accelerate's own.
    """
    _refuse_plugins()
    available = [str(one) for one in get_available_trackers()]
    for name in config.trackers:
        if name not in available:
            known = ", ".join(sorted(str(one) for one in LOGGER_TYPE_TO_CLASS))
            raise InputError(
                f"The tracker {name!r} is not installed (pip install {name}) or not known to "
                f"accelerate ({known})."
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


def _refuse_plugins() -> None:
    """A launcher's plugins would wrap the optimiser, whose state an exact resume needs whole."""
    for plugin, variable in (("DeepSpeed", "DEEPSPEED"), ("FSDP", "FSDP")):
        if os.environ.get(f"ACCELERATE_USE_{variable}", "false").lower() in {"1", "true"}:
            raise InputError(
                f"This run was launched with accelerate's {plugin} plugin, which is not supported: "
                "launch it without, and let sharding=fsdp share out weights, gradients and "
                "optimiser (what DeepSpeed calls ZeRO stage 3)."
            )


def distribute(
    accelerator: Accelerator, module: nn.Module, config: TrainConfig
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The module as the processes share it, and its optimiser."""
    if config.sharding == "fsdp":
        if accelerator.num_processes == 1:
            raise InputError(
                "sharding=fsdp needs several processes: start with torchrun --nproc-per-node 2 -m "
                "moaspec train ..., or leave it out."
            )
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if config.mixed_precision == "bf16" else None,
            output_dtype=torch.float32,
        )
        fully_shard(module, mesh=mesh, mp_policy=policy)
        model = module
    else:
        model = accelerator.prepare_model(module)
    optimizer = torch.optim.AdamW(
        module.parameters(),
        lr=config.learning_rate,
        betas=config.betas,
        weight_decay=config.weight_decay,
    )
    return model, optimizer


def full_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights (`model.*`) and optimiser state (`optimizer.KIND.PARAMETER`), whole, on the CPU.

    All processes must call it: shards are collected.
    """
    tensors = {f"model.{name}": _whole(tensor) for name, tensor in module.state_dict().items()}
    for name, parameter in module.named_parameters():
        for kind, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{kind}.{name}"] = _whole(value)
    return tensors


def load_full_state(
    module: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    """Give this process its part of what `full_state` returned.

    Raises:
        TrainingError: they are of another drafter.
    """
    weights, moments = parts_of(tensors)
    try:
        current = module.state_dict()
        module.load_state_dict(
            {name: _placed(value, current[name]) for name, value in weights.items()}
        )
        for name, parameter in module.named_parameters():
            if name in moments:
                optimizer.state[parameter] = {
                    kind: _placed(value, parameter) for kind, value in moments[name].items()
                }
    except (RuntimeError, KeyError) as error:
        raise TrainingError(
            "The saved state is of a run with other sizes; use another output directory, or "
            f"delete its state/ to start again ({error})."
        ) from error


def _whole(tensor: Tensor) -> Tensor:
    whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().cpu()


def _placed(value: Tensor, like: Tensor) -> Tensor:
    """On the device of `like`, in shards where it is; AdamW keeps its step count on the CPU."""
    if value.ndim == 0:
        return value
    value = value.to(like.device)
    if isinstance(like, DTensor):
        return distribute_tensor(value, like.device_mesh, like.placements)
    return value


def parts_of(
    tensors: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Weights by name, and optimiser states by parameter."""
    weights: dict[str, Tensor] = {}
    moments: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        if part == "model":
            weights[rest] = tensor
        else:
            kind, _, parameter = rest.partition(".")
            moments.setdefault(parameter, {})[kind] = tensor
    return weights, moments


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
