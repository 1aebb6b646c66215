"""Initial weights from what is known without training."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import tiny
from moaspec.model.layers import masked_attention
from moaspec.model.masks import text_mask
from moaspec.model.moa import MoADrafter, positions
from moaspec.target.target import Target
from moaspec_train.dataset.examples import Batch, Example, collate
from moaspec_train.students.warm_start import copy_first_layer, fit_linear, warm_start


def test_regression_recovers_a_linear_map() -> None:
    torch.manual_seed(0)
    truth, fitted = nn.Linear(6, 4), nn.Linear(6, 4)
    inputs = torch.randn(4000, 6) + 2
    with torch.no_grad():
        fit_linear(fitted, inputs, truth(inputs))
    # The ridge shrinks weights by about one part in a hundred.
    assert_close(fitted.weight, truth.weight, atol=2e-2, rtol=0)
    assert_close(fitted(inputs), truth(inputs), atol=0.1, rtol=0)


PLAIN = ("llama", "qwen2", "mistral", "phi3")


@pytest.mark.parametrize("family", PLAIN)
def test_sa_starts_as_the_first_layer(family: str) -> None:
    target = tiny.target(family)
    drafter = tiny.random_drafter(target)
    copy_first_layer(target, drafter, batches())
    error, size = _first_layer_error(target, drafter)
    assert error < 1e-6 * size


@pytest.mark.parametrize("family", PLAIN)
def test_a_narrow_sa_keeps_the_units_that_add_most(family: str) -> None:
    """What is lost is fitted to the units that stay; SA is the layer itself if they did nothing."""
    target = tiny.fresh_target(family)
    layer = target.model.base_model.layers[0].mlp
    width = layer.down_proj.in_features
    errors = {}
    for kept in (width, width // 2, width // 4):
        drafter = tiny.random_drafter(target, sa_intermediate=kept)
        copy_first_layer(target, drafter, [*batches(), random_text(300)])
        errors[kept], size = _first_layer_error(target, drafter)
    assert errors[width] < 1e-6 * size
    assert errors[width // 2] < errors[width // 4] < 0.5 * size
    with torch.no_grad():
        layer.down_proj.weight[:, ::2] = 0
    drafter = tiny.random_drafter(target, sa_intermediate=width // 2)
    copy_first_layer(target, drafter, batches())
    error, size = _first_layer_error(target, drafter)
    assert error < 1e-6 * size


def test_a_drafter_without_sa_copies_nothing() -> None:
    drafter = tiny.random_drafter(tiny.target(), without=("sa",))
    before = drafter.decoder.self_attention.mlp.down_proj.weight.clone()
    copy_first_layer(tiny.target(), drafter, batches())
    assert torch.equal(drafter.decoder.self_attention.mlp.down_proj.weight, before)


@pytest.mark.parametrize("family", sorted(set(tiny.FAMILIES) - set(PLAIN)))
def test_a_first_layer_with_other_parts_is_told(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    target = tiny.target(family)
    drafter = tiny.random_drafter(target)
    before = drafter.decoder.self_attention.mlp.down_proj.weight.clone()
    copy_first_layer(target, drafter, batches())
    assert "SA keeps random weights" in caplog.text
    assert target.config.model_type in caplog.text
    assert torch.equal(drafter.decoder.self_attention.mlp.down_proj.weight, before)


def test_massive_dimensions_of_the_first_layer_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """All later norms of the target remove them; a copy would fill CA's norms with them."""
    target = tiny.fresh_target()
    with torch.no_grad():
        down = target.model.base_model.layers[0].mlp.down_proj.weight
        down[:8] *= 600 / down[:8].norm(dim=1, keepdim=True)
    drafter = tiny.random_drafter(target)
    before = drafter.decoder.self_attention.mlp.down_proj.weight.clone()
    copy_first_layer(target, drafter, batches())
    assert "massive dimensions" in caplog.text
    assert torch.equal(drafter.decoder.self_attention.mlp.down_proj.weight, before)


def batches() -> list[Batch]:
    return [collate([Example(prompt, (1, 2))], [0]) for prompt in tiny.PROMPTS]


def random_text(tokens: int) -> Batch:
    ids = torch.randint(3, 64, (tokens,), generator=torch.Generator().manual_seed(0))
    return collate([Example(tuple(ids.tolist()), (1, 2))], [0])


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


@pytest.mark.parametrize("family", ["gemma3_text", "phi3"])
def test_a_warm_start_for_families_with_layers_of_their_own(family: str) -> None:
    """The regression starts from the target's states, whatever SA starts from."""
    target = tiny.target(family)
    drafter = tiny.random_drafter(target)
    texts = zip(tiny.PROMPTS, tiny.own_texts(family), strict=True)
    examples = [Example(prompt, text) for prompt, text in texts]
    batches = [collate(examples, [index]) for index in range(len(examples))]
    passes = [target.capture(one.input_ids_BT, one.attention_mask_BT) for one in batches]
    warm_start(target, drafter, list(zip(batches, passes, strict=True)))
    ids = torch.tensor([[*tiny.PROMPTS[2], *tiny.own_texts(family)[2]]])
    seen = target.capture(ids, torch.ones_like(ids))
    error = (drafter.aggregate(seen.kv_BTLK) - seen.hidden_BTE).square().mean()
    assert error < 0.5 * seen.hidden_BTE.square().mean()
