"""Sizes of a target, which may lie on the meta device."""

from typing import Any

from moaspec.target.target import Target


def num_parameters(target: Target) -> int:
    """Parameters of the whole model."""
    return sum(p.numel() for p in target.model.parameters())


def weight_bytes(target: Target) -> int:
    """Memory of the weights in their dtype."""
    return sum(p.nbytes for p in target.model.parameters())


def active_parameters(target: Target) -> int:
    """Parameters of the layers that a token passes, with only the chosen experts."""
    found = 0.0
    for index in range(int(target.config.num_hidden_layers)):
        for name, tensor in target.layer_state(index).items():
            share = _chosen_experts(target.config) if ".experts." in name else 1.0
            found += tensor.numel() * share
    return int(found)


def _chosen_experts(config: Any) -> float:
    """Share of a layer's experts that a token passes."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((getattr(config, one) for one in names if getattr(config, one, None)), None)
    chosen = getattr(config, "num_experts_per_tok", None)
    return int(chosen) / int(experts) if experts and chosen else 1.0
