"""Initial weights from what is known without training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import tiny
from moaspec.errors import InputError
from moaspec.model.layers import Rope, masked_attention, rotate
from moaspec.model.masks import text_mask
from moaspec.model.moa import MoADrafter, TargetEncoder, positions
from moaspec.target.target import Target
from moaspec.train.dataset.examples import Example, collate
from moaspec.train.students.output_fit import fit_linear
from moaspec.train.students.warm_start import (
    TOKEN_SLOPES,
    balance_norms,
    copy_first_layer,
    distance_query,
    init_cross_attention,
    init_layer_attention,
    warm_start,
)


def test_regression_recovers_a_linear_map() -> None:
    torch.manual_seed(0)
    truth, fitted = nn.Linear(6, 4), nn.Linear(6, 4)
    inputs = torch.randn(4000, 6) + 2
    with torch.no_grad():
        fit_linear(fitted, inputs, truth(inputs))
    # The ridge shrinks weights by about one part in a hundred.
    assert_close(fitted.weight, truth.weight, atol=2e-2, rtol=0)
    assert_close(fitted(inputs), truth(inputs), atol=0.1, rtol=0)


@pytest.mark.parametrize("slope", [1.2, 0.4])
def test_a_constant_query_scores_by_distance(slope: float) -> None:
    """Fitted coefficients, put through real rotary embedding, give the wanted order of scores."""
    rope, distances = Rope.plain(64, 10000.0), torch.arange(200)
    query_D = distance_query(
        rope.inv_freq, distances, (-slope * distances).clamp(min=-12), weights=1 / (1 + distances)
    )
    query_HD, key_CD = balance_norms(query_D[None], 1)
    cos_sin = rope(distances[None])
    queries, keys = (
        rotate(x.expand(200, -1)[None, None], cos_sin)[0, 0] for x in (query_HD, key_CD)
    )
    scores = queries[199] @ keys.T / 64**0.5
    assert scores.argmax() == 199
    near = scores[190:].flip(0)
    assert (near[:-1] > near[1:]).all()
    # A sum of few cosines follows the line only nearly.
    assert (near[0] - near[-1]).item() == pytest.approx(9 * slope, rel=0.35)
    assert scores[:150].max() < scores[195:].min()


def test_newest_tokens_win_in_the_drafter_itself() -> None:
    drafter = tiny.random_drafter(tiny.fresh_target(head_dim=64))
    config = drafter.config.cross_attention
    tokens_NE = torch.randn(60, config.hidden_size) * 0.1 + 1.0
    query, key = drafter.decoder.cross_attention.self_attn, drafter.encoder.memory_key_value
    with torch.no_grad():
        query.q_proj.weight.zero_()
        key.k_proj.weight.zero_()
        init_cross_attention(drafter, queries_NE=tokens_NE, keys_NE=tokens_NE)
        cos_sin = Rope.plain(config.head_dim, 10000.0)(torch.arange(60)[None])
        query_HTD = query.query(tokens_NE[None], cos_sin)[0]
        key_CTD = key(tokens_NE[None], cos_sin)[0][0]
    group = config.num_heads // config.num_kv_heads
    for head in range(config.num_heads):
        share = (query_HTD[head, 59] @ key_CTD[head // group].T / 64**0.5).softmax(-1)
        if head % len(TOKEN_SLOPES) < 2:
            assert share[55:].sum() > 0.6
        else:  # the last kind prefers nothing
            assert share[55:].sum() < 0.2


def test_lsa_reads_the_last_layers_and_what_predicts_the_final_state() -> None:
    """Only the last layer predicts; the mean over layers must carry it through."""
    torch.manual_seed(0)
    target = tiny.fresh_target(num_hidden_layers=12, head_dim=8)
    encoder = tiny.random_drafter(target).encoder
    kv_NLK = torch.randn(3000, 12, target.identity.kv_size)
    final_NE = kv_NLK[:, -1] @ torch.randn(target.identity.kv_size, target.identity.hidden_size)
    with torch.no_grad():
        before = _explained(encoder, kv_NLK, final_NE)
        init_layer_attention(encoder, kv_NLK, final_NE)
        after = _explained(encoder, kv_NLK, final_NE)
        shuffled = kv_NLK[:, torch.randperm(12)]
        order_lost = _explained(encoder, shuffled, final_NE, fit_on=kv_NLK)
    assert after > before + 0.2
    assert after > order_lost + 0.2


def test_a_sample_of_too_few_tokens_is_refused() -> None:
    target = tiny.target()
    kv_NLK = torch.randn(2, 3, target.identity.kv_size)
    encoder = tiny.random_drafter(target).encoder
    with torch.no_grad(), pytest.raises(InputError, match=r"needs \d+ tokens .* got 2: add"):
        init_layer_attention(encoder, kv_NLK, torch.randn(2, target.identity.hidden_size))


def _explained(
    encoder: TargetEncoder, kv_NLK: torch.Tensor, final_NE: torch.Tensor, *, fit_on: Any = None
) -> float:
    """Share of the final state's variance that a regression on the means explains."""
    mean_NK = encoder.mean_over_layers((kv_NLK if fit_on is None else fit_on)[None])[0]
    linear = nn.Linear(mean_NK.shape[1], final_NE.shape[1])
    fit_linear(linear, mean_NK, final_NE)
    error = linear(encoder.mean_over_layers(kv_NLK[None])[0]) - final_NE
    return 1 - float(error.square().sum() / (final_NE - final_NE.mean(0)).square().sum())


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
def test_sa_starts_as_the_first_layer(family: str) -> None:
    """Exactly where that is a plain layer; else norms are folded, which holds on average."""
    target = tiny.target(family)
    drafter = tiny.random_drafter(target)
    batches = [collate([Example(prompt, (1, 2))], [0]) for prompt in tiny.PROMPTS]
    before, _ = _first_layer_error(target, drafter)
    copy_first_layer(target, drafter, batches)
    after, size = _first_layer_error(target, drafter)
    plain = family in ("llama", "qwen2", "mistral", "phi3")
    assert after < (1e-6 if plain else 0.5) * size
    assert after < 0.5 * before


def _first_layer_error(target: Target, drafter: MoADrafter) -> tuple[float, float]:
    """Mean square of SA's output minus the first layer's, and of what that layer adds.

    The text is shorter than sliding windows and LongRoPE's switch.
    """
    ids = torch.tensor([[9, 30, 4, 22, 51, 7]])
    ones, decoder = torch.ones_like(ids), drafter.decoder
    embedded = target.embed(ids)
    found = decoder.run_self_attention(
        embedded,
        decoder.self_rope(positions(ones)),
        [lambda q, k, v: masked_attention(q, k, v, text_mask(ones))],
    )
    layer = target.capture(ids, ones, before=(target.num_layers - 1,))
    wanted = layer.before[target.num_layers - 1]
    return float((found - wanted).square().mean()), float((wanted - embedded).square().mean())


def test_a_first_layer_with_other_parts_is_told(caplog: pytest.LogCaptureFixture) -> None:
    target = tiny.fresh_target("qwen3")
    drafter = tiny.random_drafter(target, sa_intermediate=20)
    before = drafter.decoder.self_attention.mlp.down_proj.weight.clone()
    copy_first_layer(target, drafter, [collate([Example((1, 2), (3, 4))], [0])])
    assert "SA keeps random weights" in caplog.text
    assert "qwen3" in caplog.text
    assert torch.equal(drafter.decoder.self_attention.mlp.down_proj.weight, before)


@pytest.mark.parametrize("family", ["gemma3_text", "phi3"])
def test_a_warm_start_for_families_with_layers_of_their_own(family: str) -> None:
    """The regression starts from the target's states, whatever SA starts from."""
    target = tiny.target(family)
    drafter = tiny.random_drafter(target)
    texts = zip(tiny.PROMPTS, tiny.own_texts(family), strict=True)
    examples = [Example(prompt, text) for prompt, text in texts]
    batches = [collate(examples, [index]) for index in range(len(examples))]
    passes = [target.capture(one.input_ids_BT, one.attention_mask_BT) for one in batches]
    warm_start(target, drafter, zip(batches, passes, strict=True))
    ids = torch.tensor([[*tiny.PROMPTS[2], *tiny.own_texts(family)[2]]])
    seen = target.capture(ids, torch.ones_like(ids))
    error = (drafter.aggregate(seen.kv_BTLK) - seen.hidden_BTE).square().mean()
    assert error < 0.5 * seen.hidden_BTE.square().mean()
