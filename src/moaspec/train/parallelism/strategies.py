"""Parallel strategies: sharding of a drafter's weights, gradients and optimiser state.

`none` replicates all three and averages gradients (accelerate's DDP). `fsdp` shards all three with
torch's `fully_shard`, which also runs on CPUs. `deepspeed` shards gradients and optimiser state
(`moaspec.train.parallelism.zero`).

A saved state is unsharded and the same for all strategies, so a run may resume with another number
of processes or another strategy.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from moaspec.errors import InputError, TrainingError
from moaspec.train.run_config import TrainConfig


class ParallelStrategy(ABC):
    """A drafter and its optimiser, distributed over the processes.

    Attributes:
        module: the drafter.
        model: the wrapped module to call for a training pass.
        optimizer: AdamW over this process's shard.
    """

    def __init__(
        self, module: nn.Module, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self.module, self.model, self.optimizer = module, model, optimizer

    def begin(self, learning_rate: float) -> None:
        """Start a step: clear gradients and set the learning rate."""
        self.zero_gradients()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate

    @abstractmethod
    def zero_gradients(self) -> None:
        """Clear the gradients of an earlier step."""

    @abstractmethod
    def gradient_sync(self, *, last: bool) -> AbstractContextManager[Any]:
        """Context of one pass; gradients are exchanged in the last pass of a step only."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients of one pass; they are averaged over processes."""

    @abstractmethod
    def update(self, clip: float) -> float:
        """Clip the gradients' norm and make an optimiser step.

        Returns:
            The norm before clipping. If it is not finite, weights are unchanged (except with
            DeepSpeed).
        """

    def state(self) -> dict[str, Tensor]:
        """Gather weights (`model.*`) and moments (`optimizer.KIND.PARAMETER`) on the CPU.

        All processes must call it.
        """
        tensors = {
            f"model.{name}": gather_tensor(value)
            for name, value in self.module.state_dict().items()
        }
        for name, parameter in self.module.named_parameters():
            for kind, value in self.moments(parameter).items():
                tensors[f"optimizer.{kind}.{name}"] = gather_tensor(value)
        return tensors

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load this process's shard of a state that `state` returned.

        Raises:
            TrainingError: the state is of a drafter with other sizes.
        """
        weights, moments = split_state(tensors)
        try:
            current = self.module.state_dict()
            self.module.load_state_dict(
                {name: _place_like(value, current[name]) for name, value in weights.items()}
            )
            for name, parameter in self.module.named_parameters():
                if name in moments:
                    self.set_moments(parameter, moments[name])
        except (RuntimeError, KeyError) as error:
            raise TrainingError(
                "The saved state is of a run with other sizes; use another output directory, or "
                f"delete its state/ to start again ({error})."
            ) from error

    @abstractmethod
    def moments(self, parameter: nn.Parameter) -> Mapping[str, Tensor]:
        """Optimiser state of a parameter, by kind; empty before the first step."""

    @abstractmethod
    def set_moments(self, parameter: nn.Parameter, moments: Mapping[str, Tensor]) -> None:
        """Set the optimiser state of a parameter from unsharded tensors on the CPU."""


class TorchStrategy(ParallelStrategy):
    """The strategies `none` (DDP) and `fsdp`."""

    def __init__(self, accelerator: Accelerator, module: nn.Module, config: TrainConfig) -> None:
        if config.sharding == "fsdp":
            mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
            policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16 if config.mixed_precision == "bf16" else None,
                output_dtype=torch.float32,
            )
            fully_shard(module, mesh=mesh, mp_policy=policy)
            model = module
        else:
            model = accelerator.prepare_model(module)
        super().__init__(module, model, adamw(module, config))
        self._accelerator = accelerator

    def zero_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def gradient_sync(self, *, last: bool) -> AbstractContextManager[Any]:
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(last)
            return nullcontext()
        return nullcontext() if last else self._accelerator.no_sync(self.model)

    def backward(self, loss: Tensor) -> None:
        self._accelerator.backward(loss)

    def update(self, clip: float) -> float:
        norm = float(gather_tensor(nn.utils.clip_grad_norm_(self.module.parameters(), clip)))
        if math.isfinite(norm):
            self.optimizer.step()
        return norm

    def moments(self, parameter: nn.Parameter) -> Mapping[str, Tensor]:
        return self.optimizer.state.get(parameter, {})

    def set_moments(self, parameter: nn.Parameter, moments: Mapping[str, Tensor]) -> None:
        self.optimizer.state[parameter] = {
            kind: _place_like(value, parameter) for kind, value in moments.items()
        }


def new_strategy(
    accelerator: Accelerator, module: nn.Module, config: TrainConfig
) -> ParallelStrategy:
    """Distribute a module over the processes with the config's strategy.

    Raises:
        InputError: sharding with one process, or DeepSpeed is not installed.
    """
    if config.sharding != "none" and accelerator.num_processes == 1:
        raise InputError(
            f"sharding={config.sharding} needs several processes: start with torchrun "
            "--nproc-per-node 2 -m moaspec train ..., or leave it out."
        )
    if config.sharding == "deepspeed":
        # DeepSpeed is optional and slow to import.
        from moaspec.train.parallelism.zero import ZeroStrategy

        return ZeroStrategy(accelerator, module, config)
    return TorchStrategy(accelerator, module, config)


def adamw(module: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Create the optimiser of a run."""
    return torch.optim.AdamW(
        module.parameters(),
        lr=config.learning_rate,
        betas=config.betas,
        weight_decay=config.weight_decay,
    )


def split_state(
    tensors: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Split a saved state into weights by name and moments by parameter."""
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
