"""Sizes that no drafter can have."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest

import tiny
from moaspec_core.checkpoint.drafter_config import (
    DrafterConfig,
    LayerConfig,
    TargetIdentity,
    activation_name,
    inner_size,
    norm_eps,
    text_rope,
)
from moaspec_core.errors import ShapeError
from moaspec_train.students.drafter_sizes import DrafterSizes, drafter_config

LAYER: dict[str, Any] = {
    "hidden_size": 8,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 2,
    "intermediate_size": 8,
}


@pytest.mark.parametrize("name", list(LAYER))
@pytest.mark.parametrize("size", [0, -1])
def test_layer_sizes_are_positive(name: str, size: int) -> None:
    with pytest.raises(ShapeError, match=name):
        LayerConfig(**LAYER | {name: size})


def test_heads_share_keys_evenly() -> None:
    with pytest.raises(ShapeError, match="multiple"):
        LayerConfig(**LAYER | {"num_kv_heads": 3})


def test_odd_head_dim() -> None:
    with pytest.raises(ShapeError, match="even"):
        LayerConfig(**LAYER | {"head_dim": 3})


@pytest.mark.parametrize("name", ["layer_self_attention", "self_attention", "cross_attention"])
def test_layers_have_the_drafters_width(name: str) -> None:
    config = drafter_config(tiny.target(), DrafterSizes())
    with pytest.raises(ShapeError, match=name):
        DrafterConfig(**vars(config) | {name: LayerConfig(**LAYER)})


@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_theta", "max_position_embeddings"])
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, "a", None], ids=repr)
def test_numbers_that_must_be_positive(name: str, value: Any) -> None:
    config = drafter_config(tiny.target(), DrafterSizes())
    with pytest.raises(ShapeError, match=name):
        dataclasses.replace(config, **{name: value})


@pytest.mark.parametrize("layers", [(), (-1,), (0, -2), (0.5,)])
def test_num_target_layers(layers: tuple[Any, ...]) -> None:
    config = drafter_config(tiny.target(), DrafterSizes())
    with pytest.raises(ShapeError, match="num_target_layers"):
        dataclasses.replace(config, num_target_layers=layers)


RATES = ((0.5, 0.2),)


@pytest.mark.parametrize(
    "rates",
    [{"acceptance": ((1.5,),)}, {"acceptance": ((),)}, {"further_acceptance": (RATES, RATES)}],
    ids=["above 1", "no rank", "three exits"],
)
def test_acceptance_that_does_not_fit(rates: dict[str, Any]) -> None:
    config = drafter_config(tiny.target(), DrafterSizes(), (0, 3))
    with pytest.raises(ShapeError, match="acceptance"):
        dataclasses.replace(config, **rates)
    with pytest.raises(ShapeError, match="must be rates"):
        dataclasses.replace(config, further_acceptance=(((-0.1,),),))
    whole = dataclasses.replace(config, acceptance=RATES, further_acceptance=(((0.1,),),))
    assert [whole.acceptance_of(n) for n in (0, 3, 1)] == [RATES, ((0.1,),), ()]


def test_kv_size() -> None:
    identity = TargetIdentity(
        model_type="llama", num_layers=2, hidden_size=8, num_kv_heads=3, head_dim=5, vocab_size=9
    )
    assert identity.kv_size == 30


@pytest.mark.parametrize(
    ("data", "eps", "inner", "activation"),
    [
        ({"rms_norm_eps": 1e-5, "intermediate_size": 6, "hidden_act": "gelu"}, 1e-5, 6, "gelu"),
        ({"layer_norm_eps": 1e-3, "intermediate_size": [5, 9]}, 1e-3, 9, "silu"),
        ({"layer_norm_epsilon": 0.1, "intermediate_size": None}, 0.1, 32, "silu"),
        ({"hidden_act": "xielu"}, 1e-6, 32, "silu"),
        ({"hidden_activation": "relu"}, 1e-6, 32, "relu"),
    ],
)
def test_configs_with_other_names(
    data: dict[str, Any], eps: float, inner: int, activation: str
) -> None:
    config = SimpleNamespace(hidden_size=8, **data)
    assert norm_eps(config) == eps
    assert inner_size(config) == inner
    assert activation_name(config) == activation


@pytest.mark.parametrize("given", [None, {}, {"rope_theta": None}])
def test_a_target_without_rotary_embeddings(given: dict[str, Any] | None) -> None:
    assert text_rope(SimpleNamespace(rope_parameters=given)) == {"rope_theta": 10_000.0}
