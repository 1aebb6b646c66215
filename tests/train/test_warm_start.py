"""Initial weights from what is known without training."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import tiny
from moaspec.model.rope import Rope, rotate
from moaspec.train import Example
from moaspec.train.warm_start import copy_first_layer, fit_linear, prefer_near, warm_start


def test_regression_recovers_a_linear_map() -> None:
    torch.manual_seed(0)
    truth, fitted = nn.Linear(6, 4), nn.Linear(6, 4)
    inputs = torch.randn(4000, 6) + 2
    with torch.no_grad():
        fit_linear(fitted, inputs, truth(inputs))
    # The ridge shrinks weights by about one part in a hundred.
    assert_close(fitted.weight, truth.weight, atol=2e-2, rtol=0)
    assert_close(fitted(inputs), truth(inputs), atol=0.1, rtol=0)


@pytest.mark.parametrize("head", [0, 1])
def test_heads_prefer_near_tokens(head: int) -> None:
    """The constant parts of query and key score small distances above large ones."""
    drafter = tiny.random_drafter(tiny.fresh_target(head_dim=64))
    config = drafter.config.cross_attention
    query, key = drafter.speaker.cross_attention.self_attn, drafter.encoder.memory_key_value
    mean_E = torch.ones(config.hidden_size)
    with torch.no_grad():
        query.q_proj.weight.zero_()
        key.k_proj.weight.zero_()
        prefer_near(drafter, query_mean_E=mean_E, key_mean_E=mean_E)
        cos_sin = Rope.plain(config.head_dim, 10000.0)(torch.arange(40)[None])
        tokens = mean_E.expand(1, 40, -1)
        query_TD = query.query(tokens, cos_sin)[0, head]
        key_TD = key(tokens, cos_sin)[0][0, 0]
    scores = query_TD[39] @ key_TD.T / config.head_dim**0.5
    assert scores.argmax() == 39
    assert scores[37:].mean() > scores[:30].mean() + 1


def test_the_last_kind_of_head_prefers_nothing() -> None:
    drafter = tiny.random_drafter(tiny.target())
    config = drafter.config.cross_attention
    projection = drafter.speaker.cross_attention.self_attn.q_proj
    before = projection.weight.detach().clone()
    mean_E = torch.ones(config.hidden_size)
    with torch.no_grad():
        prefer_near(drafter, query_mean_E=mean_E, key_mean_E=mean_E)
    unchanged = slice(2 * config.head_dim, 3 * config.head_dim)
    assert_close(projection.weight[unchanged], before[unchanged], rtol=0, atol=0)


def test_rotation_keeps_a_preference_relative() -> None:
    """Shifting query and key together changes no score."""
    rope = Rope.plain(8, 10000.0)
    x = torch.randn(1, 1, 1, 8)
    near, far = (
        (rotate(x, rope(torch.tensor([[p + 3]]))) * rotate(x, rope(torch.tensor([[p]])))).sum()
        for p in (0, 200)
    )
    assert_close(near, far)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_sa_starts_as_the_first_layer_where_that_is_a_plain_one(family: str) -> None:
    target = tiny.target(family)
    drafter = tiny.random_drafter(target)
    layer = drafter.speaker.self_attention
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    copy_first_layer(target, drafter)
    changed = {name for name, value in layer.state_dict().items() if not value.equal(before[name])}
    plain = family in ("llama", "qwen2", "mistral", "phi3")
    assert changed == (set(before) if plain else set())


@pytest.mark.parametrize("family", ["gemma3_text", "phi3"])
def test_a_warm_start_for_families_with_layers_of_their_own(family: str) -> None:
    """The regression starts from the target's states, whatever SA starts from."""
    target = tiny.target(family)
    drafter = tiny.random_drafter(target)
    texts = zip(tiny.PROMPTS, tiny.own_texts(family), strict=True)
    examples = [Example(prompt, text) for prompt, text in texts]
    warm_start(target, drafter, examples)
    ids = torch.tensor([[*tiny.PROMPTS[2], *tiny.own_texts(family)[2]]])
    seen = target.encode(ids, torch.ones_like(ids))
    error = (drafter.aggregate(seen.kv_BTLK) - seen.hidden_BTE).square().mean()
    assert error < 0.5 * seen.hidden_BTE.square().mean()
