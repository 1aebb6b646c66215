"""A target's layers without their weights: names, shapes and sizes of what would be loaded."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from moaspec.target.spec import TargetSpec
from moaspec.target.target_base import TargetBase


class TargetSkeleton(TargetBase):
    """A target whose model lies on the meta device.

    Args:
        facts: of the target.
    """

    def __init__(self, facts: TargetSpec) -> None:
        super().__init__(
            facts.config,
            facts.tokenizer,
            name=facts.name,
            dtype=facts.dtype,
            generation_config=facts._generation_config,
        )
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(
                facts.config, dtype=facts.dtype, trust_remote_code=False
            )

    @property
    def num_parameters(self) -> int:
        """Of the whole model."""
        return sum(p.numel() for p in self.model.parameters())

    @property
    def weight_bytes(self) -> int:
        """Memory of its weights in its dtype."""
        return sum(p.nbytes for p in self.model.parameters())

    @cached_property
    def active_parameters(self) -> int:
        """Parameters of its layers that a token passes, with only the chosen experts."""
        found = 0.0
        for name, parameter in self.model.base_model.layers.named_parameters():
            share = _chosen_experts(self.config) if ".experts." in name else 1.0
            found += parameter.numel() * share
        return int(found)


def _chosen_experts(config: Any) -> float:
    """Share of a layer's experts that a token passes."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((getattr(config, one) for one in names if getattr(config, one, None)), None)
    chosen = getattr(config, "num_experts_per_tok", None)
    return int(chosen) / int(experts) if experts and chosen else 1.0
