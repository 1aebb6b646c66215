"""Drafters as models of the package speculators, which then loads and saves their checkpoints."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from moaspec.generation.drafters import find_drafter
from moaspec.model.checkpoint.baseline_checkpoint import read_whole
from moaspec.model.checkpoint.eight_bits import widened_tensors
from moaspec.model.checkpoint.tensor_names import BESIDE_WEIGHTS
from moaspec_core.checkpoint.speculators_fields import MOA
from moaspec_core.support.extras import require


@cache
def register_speculators_type() -> type[Any]:
    """Make the package speculators know the type "moa" of our checkpoints.

    From then on its `SpeculatorModel.from_pretrained` loads them (directory or hub id), and
    `save_pretrained` of what it returns writes what `load_drafter` reads: the same weights, those
    of eight bits in bf16. Tools over speculators can so list, copy and upload drafters. Such a
    model computes nothing; moaspec drafts.

    Returns:
        The class of these models.

    Raises:
        InputError: speculators is not installed.
    """
    require("The type of speculators", "speculators")
    from speculators import SpeculatorModel, SpeculatorModelConfig, reload_schemas

    @SpeculatorModelConfig.register(MOA)
    class MoASpeculatorConfig(SpeculatorModelConfig):
        """`config.json`; sections of ours are kept as they are."""

        speculators_model_type: Literal["moa"] = "moa"
        _auto_class: ClassVar[str | None] = None  # else this file is copied beside the weights

    @SpeculatorModel.register(MOA)
    class MoASpeculator(SpeculatorModel):
        """The tensors of a checkpoint under their published names."""

        config_class: ClassVar[type[Any]] = MoASpeculatorConfig

        def __init__(self, config: Any, tensors: dict[str, torch.Tensor]) -> None:
            super().__init__(config)
            for name, tensor in tensors.items():
                _place(self, name, tensor)

        @classmethod
        def from_pretrained(cls, name: Any, *_: Any, config: Any = None, **__: Any) -> Any:
            directory = find_drafter(name)
            tensors = read_whole(directory)[1]
            own = config or MoASpeculatorConfig.from_pretrained(directory)
            return cls(own, widened_tensors(tensors)).eval()

    reload_schemas()
    return MoASpeculator


def _place(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Register a tensor below a module; parts of its name are modules."""
    *parts, last = name.split(".")
    for part in parts:
        if part not in dict(module.named_children()):
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    if name in BESIDE_WEIGHTS:
        module.register_buffer(last, tensor)
    else:
        module.register_parameter(last, nn.Parameter(tensor, requires_grad=False))
