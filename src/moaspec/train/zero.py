"""DeepSpeed ZeRO stage 2: gradients and optimiser state are sharded, weights are replicated.

DeepSpeed's engine is used directly; accelerate supports it on GPUs only. For sharded weights (stage
3) use `fsdp`.
"""

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor, nn

from moaspec.train.parallelism import ParallelStrategy, adamw
from moaspec.train.run_config import TrainConfig

STEP = "step"


class ZeroStrategy(ParallelStrategy):
    """The strategy `deepspeed`.

    The optimiser sees one flat tensor per process, a shard of the concatenated parameters.
    DeepSpeed maps its pieces to parameters once moments exist, so they are created here, as AdamW
    does in its first step.
    """

    def __init__(self, accelerator: Accelerator, module: nn.Module, config: TrainConfig) -> None:
        deepspeed = _deepspeed(accelerator.device)
        self._tools = deepspeed.utils
        self._engine, self._zero, _, _ = deepspeed.initialize(
            model=_in_precision(module, accelerator.device, config),
            optimizer=adamw(module.parameters(), config),
            config={
                "train_micro_batch_size_per_gpu": 1,  # losses are normalised by the trainer
                "gradient_accumulation_steps": 1,
                "gradient_clipping": config.clip,
                "zero_allow_untested_optimizer": True,
                "zero_optimization": {"stage": 2, "overlap_comm": False},
            },
        )
        super().__init__(accelerator, module, self._engine, self._zero.optimizer)
        self._start_moments()

    def gradient_sync(self, *, last: bool) -> AbstractContextManager[Any]:
        self._engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss)

    def update(self, _clip: float) -> float:
        # The engine clips by its config and reports the norm after the step only.
        self._engine.step()
        return float(self._engine.get_global_grad_norm() or 0.0)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        super().load(tensors)
        # AdamW updates float32 copies of the weights.
        self._zero.refresh_fp32_params()

    def moments(self, parameter: nn.Parameter) -> Mapping[str, Tensor]:
        steps = self._flat_states()[0][STEP]
        if not steps:
            return {}
        found = {
            kind: self._tools.safe_get_full_optimizer_state(parameter, kind)
            for kind in ("exp_avg", "exp_avg_sq")
        }
        return {STEP: steps.clone(), **found}

    def set_moments(self, parameter: nn.Parameter, moments: Mapping[str, Tensor]) -> None:
        for kind, value in moments.items():
            if kind == STEP:
                for state in self._flat_states():
                    state[STEP].copy_(value)
            else:
                moved = value.to(parameter.device)
                self._tools.safe_set_full_optimizer_state(parameter, moved, kind)

    def _flat_states(self) -> list[dict[str, Tensor]]:
        return [
            self._zero.optimizer.state[flat] for flat in self._zero.single_partition_of_fp32_groups
        ]

    def _start_moments(self) -> None:
        for flat, parameters in zip(
            self._zero.single_partition_of_fp32_groups, self._zero.bit16_groups, strict=True
        ):
            self._zero.optimizer.state[flat] = {
                STEP: torch.tensor(0.0),
                "exp_avg": torch.zeros_like(flat),
                "exp_avg_sq": torch.zeros_like(flat),
            }
            self._tools.lazy_init_hp_params_optimizer_state(
                parameters, flat, self._zero.optimizer.state
            )


def _deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed and set its device, which it would otherwise detect by itself."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    import deepspeed
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    if device.type == "cpu":
        set_accelerator(CPU_Accelerator())
        # DeepSpeed would compile its reduction in shared memory for minutes; gloo reduces instead.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _in_precision(module: nn.Module, device: torch.device, config: TrainConfig) -> nn.Module:
    """Autocast the forward pass to bf16 if the config says so; weights stay float32."""
    if config.mixed_precision == "bf16":
        forward = torch.autocast(device.type, torch.bfloat16)(module.forward)
        module.forward = convert_outputs_to_fp32(forward)
    return module
