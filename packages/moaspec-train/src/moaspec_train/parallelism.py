"""Training processes, joined by accelerate, and the sharding of a drafter over them.

`torchrun` or `accelerate launch` starts several processes; otherwise there is one. Each process
holds the whole frozen target. Sharding `none` replicates weights, gradients and optimiser state,
and averages gradients (accelerate's DDP). `fsdp` shards all three with torch's `fully_shard`, which
also runs on CPUs.

A saved state is unsharded and the same for all, so a run may resume with another number of
processes or another sharding.
"""

import math
import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from moaspec_core.errors import InputError, TrainingError
from moaspec_train.muon import Muon
from moaspec_train.run_config import TrainConfig, launched_processes
from moaspec_train.weight_average import WeightAverage


def new_accelerator(config: TrainConfig) -> Accelerator:
    """Join the run's processes.

    Raises:
        InputError: an unknown tracker, a launcher's plugin, or variables of a launcher that cannot
            be.
    """
    _refuse_plugins()
    if launched_processes() > 1 and not os.environ.get("MASTER_ADDR"):
        raise InputError(
            "$WORLD_SIZE is above 1, and $MASTER_ADDR does not say where the processes meet. "
            "Start with torchrun, which sets both, or unset $WORLD_SIZE."
        )
    _require_device(config.device)
    available = [str(tracker) for tracker in get_available_trackers()]
    for name in config.trackers:
        if name not in available:
            known = ", ".join(sorted(str(tracker) for tracker in LOGGER_TYPE_TO_CLASS))
            raise InputError(
                f"The tracker {name!r} is not installed (pip install {name}) or not known to "
                f"accelerate ({known}). Install it, or leave it out of trackers."
            )
    if config.device == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans each new shape for tens of ms
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
                "say sharding=fsdp in the training config: that runs on CPUs too, and resumes "
                "exactly."
            )


def sum_over_processes(accelerator: Accelerator, values: Tensor) -> Tensor:
    """Sum values over all processes, in float64."""
    if accelerator.num_processes == 1:
        return values.double()
    return accelerator.reduce(values.to(accelerator.device, torch.float64), reduction="sum")


class ParallelStrategy:
    """A drafter and its optimiser, distributed over the processes: `none` (DDP) and `fsdp`.

    Args:
        module: the drafter.
        model: the wrapped module to call for a training pass.
        *optimizers: over this process's shard, each of other parameters.
        average_steps: that an average of the weights reaches back; 0 for no average.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        module: nn.Module,
        model: nn.Module,
        *optimizers: torch.optim.Optimizer,
        average_steps: int = 0,
    ) -> None:
        self.accelerator = accelerator
        self._average = WeightAverage(module, average_steps) if average_steps else None
        self.module, self.model, self.optimizers = module, model, optimizers
        self._of = {
            parameter: optimizer
            for optimizer in optimizers
            for g in optimizer.param_groups
            for parameter in g["params"]
        }

    def begin(self, learning_rate: float) -> None:
        """Start a step: clear gradients and set the learning rate."""
        self.model.zero_grad()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate

    def gradient_sync(self, *, last: bool) -> AbstractContextManager[Any]:
        """Context of one pass; gradients are exchanged in the last pass of a step only."""
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(last)
            return nullcontext()
        return nullcontext() if last else self.accelerator.no_sync(self.model)

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients of one pass; they are averaged over processes."""
        self.accelerator.backward(loss)

    def update(self, clip: float) -> float:
        """Clip the gradients' norm and make an optimiser step.

        Returns:
            The norm before clipping. If it is not finite, weights are unchanged.
        """
        norm = float(self.clipped(clip))
        if math.isfinite(norm):
            self.step()
        return norm

    def clipped(self, clip: float) -> Tensor:
        """Clip the gradients' norm; the norm before, on the device."""
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), clip)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def step(self) -> None:
        """Make an optimiser step."""
        for optimizer in self.optimizers:
            optimizer.step()
        if self._average:
            self._average.update()

    def averaged(self) -> AbstractContextManager[None]:
        """The module has the average as its weights, if there is one."""
        return self._average.in_place() if self._average else nullcontext()

    def weights(self) -> dict[str, Tensor]:
        """Gather the weights on the CPU, for all processes; all must call it."""
        found = self.module.state_dict()
        return {f"model.{name}": gather_tensor(value) for name, value in found.items()}

    def state(self) -> dict[str, Tensor]:
        """Gather weights, moments and the average on the CPU, for all processes.

        Their names are `model.*`, `optimizer.KIND.PARAMETER` and `average.PARAMETER`.

        All processes must call it.
        """
        tensors = self.weights()
        for name, parameter in self.module.named_parameters():
            for kind, value in self.moments(parameter).items():
                tensors[f"optimizer.{kind}.{name}"] = gather_tensor(value)
        for name, value in self._average.state().items() if self._average else ():
            tensors[f"average.{name}"] = gather_tensor(value)
        return tensors

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load this process's shard of a saved state; TrainingError if it is of other sizes."""
        weights, moments, averages = split_state(tensors)
        try:
            current = self.module.state_dict()
            self.module.load_state_dict(
                {name: _place_like(value, current[name]) for name, value in weights.items()}
            )
            for name, parameter in self.module.named_parameters():
                if name in moments:
                    self.set_moments(parameter, moments[name])
            if self._average:
                like = self._average.state()
                self._average.restore(
                    {name: _place_like(value, like[name]) for name, value in averages.items()}
                )
        except (RuntimeError, KeyError) as error:
            raise TrainingError(
                "The saved state is of a run with other sizes; use another output directory, or "
                f"delete its state/ to start again ({error})."
            ) from error

    def moments(self, parameter: nn.Parameter) -> Mapping[str, Tensor]:
        """Optimiser state of a parameter, by kind; empty before the first step, or if frozen."""
        optimizer = self._of.get(parameter)
        return {} if optimizer is None else optimizer.state.get(parameter, {})

    def set_moments(self, parameter: nn.Parameter, moments: Mapping[str, Tensor]) -> None:
        self._of[parameter].state[parameter] = {
            kind: _place_like(value, parameter) for kind, value in moments.items()
        }


def new_strategy(
    accelerator: Accelerator, module: nn.Module, config: TrainConfig
) -> ParallelStrategy:
    """Distribute a module by the config; InputError for one process."""
    config.require_processes(accelerator.num_processes)
    model = module
    if config.sharding == "fsdp":
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if config.mixed_precision == "bf16" else None,
            output_dtype=torch.float32,
        )
        fully_shard(module, mesh=mesh, mp_policy=policy)
    else:
        model = accelerator.prepare_model(module)
    optimizers = new_optimizers(module, config)
    return ParallelStrategy(
        accelerator, module, model, *optimizers, average_steps=config.average_steps
    )


def new_optimizers(module: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """The optimisers of a run: AdamW alone, or Muon for matrices and AdamW for the rest."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if config.optimizer == "adamw":
        return [adamw(parameters, config)]
    matrices = [parameter for parameter in parameters if parameter.ndim == 2]
    muon = Muon(matrices, lr=config.learning_rate, weight_decay=config.weight_decay)
    return [muon, adamw([parameter for parameter in parameters if parameter.ndim != 2], config)]


def adamw(parameters: Iterable[nn.Parameter], config: TrainConfig) -> torch.optim.AdamW:
    """AdamW with the settings of a run; on a CPU in one pass over weights and moments."""
    return torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=config.betas,
        weight_decay=config.weight_decay,
        fused=True if config.device == "cpu" and config.sharding == "none" else None,
    )


def split_state(
    tensors: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """Split a saved state into weights by name, moments by parameter, and averages by name."""
    weights: dict[str, Tensor] = {}
    moments: dict[str, dict[str, Tensor]] = {}
    averages: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        if part == "model":
            weights[rest] = tensor
        elif part == "average":
            averages[rest] = tensor
        else:
            kind, _, parameter = rest.partition(".")
            moments.setdefault(parameter, {})[kind] = tensor
    return weights, moments, averages


def gather_tensor(tensor: Tensor) -> Tensor:
    """Gather a tensor that may be sharded, on the CPU."""
    collected: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return collected.detach().cpu()


def _place_like(value: Tensor, like: Tensor) -> Tensor:
    """Move and shard a tensor as `like` is; AdamW keeps its step count on the CPU."""
    if value.ndim == 0:
        return value
    value = value.to(like.device)
    if isinstance(like, DTensor):
        return distribute_tensor(value, like.device_mesh, like.placements)
    return value
