"""What is peculiar to each family, and what is refused."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    GPT2Config,
    MistralConfig,
)

import tiny
from moaspec.target.families import (
    FULL,
    SLIDING,
    RotaryEmbeddings,
    layer_types,
    plain_layer_state,
    require_supported,
)
from moaspec_core.errors import UnsupportedTargetError
from moaspec_core.tokens.names import SUPPORTED_FAMILIES


def test_every_supported_family_is_tested() -> None:
    assert set(tiny.FAMILIES) == set(SUPPORTED_FAMILIES)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (GPT2Config(), "In vLLM only models of these families"),
        (tiny.model("gemma3_text", use_bidirectional_attention=True).config, "bidirectional"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_refusals_say_why_and_what_is_supported(config: Any, reason: str) -> None:
    with pytest.raises(UnsupportedTargetError, match=reason) as caught:
        require_supported(config, "some/model")
    message = str(caught.value)
    assert config.model_type in message
    assert all(family in message for family in SUPPORTED_FAMILIES)


def test_unknown_layer_types_are_refused() -> None:
    config = tiny.model("qwen3").config
    config.layer_types = [FULL, "chunked_attention", FULL]
    with pytest.raises(UnsupportedTargetError, match="layers"):
        require_supported(config, "x")


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", [FULL, FULL, FULL]),
        ("qwen3", [FULL, FULL, SLIDING]),
        ("mistral", [SLIDING, SLIDING, SLIDING]),
        ("gemma3_text", [SLIDING, FULL, SLIDING]),
        ("phi3", [FULL, FULL, FULL]),
    ],
)
def test_layer_types(family: str, expected: list[str]) -> None:
    assert list(layer_types(tiny.model(family).config)) == expected


def test_windows_that_are_switched_off() -> None:
    assert set(layer_types(MistralConfig(sliding_window=None))) == {FULL}
    config = tiny.model("llama").config
    config.sliding_window = 4  # Llama never reads it
    assert set(layer_types(config)) == {FULL}


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "olmo2"])
def test_layers_with_more_norms_have_no_plain_form(family: str) -> None:
    assert tiny.target(family).plain_layer_state(0) is None


def test_phi3_projections_are_split() -> None:
    """That the parts are the right ones: `test_a_decoder_layer_is_transformers_own`."""
    config, state = tiny.target("phi3").config, tiny.target("phi3").layer_state(1)
    plain = plain_layer_state(config, state)
    assert plain is not None
    assert {name: tuple(plain[name].shape) for name in plain if "_proj" in name} == {
        "self_attn.q_proj.weight": (48, 48),
        "self_attn.k_proj.weight": (16, 48),
        "self_attn.v_proj.weight": (16, 48),
        "self_attn.o_proj.weight": (48, 48),
        "mlp.gate_proj.weight": (56, 48),
        "mlp.up_proj.weight": (56, 48),
        "mlp.down_proj.weight": (48, 56),
    }
    assert "self_attn.qkv_proj.weight" in state


def test_longrope_goes_by_each_rows_own_length() -> None:
    model = tiny.model("phi3")
    rotary, states = model.model.rotary_emb, torch.zeros(3, 4, 48)
    positions = torch.tensor([[0, 1, 2, 3], [12, 13, 14, 15], [13, 14, 15, 16]])
    lengths = torch.tensor([40, 16, 17])
    cos, sin = RotaryEmbeddings(rotary, model.config)(states, positions, lengths)[FULL]
    # The first row is the start of a long text; transformers sees that only in the whole of it.
    whole = rotary(states[:1], torch.arange(40)[None])
    assert_close(cos[0], whole[0][0, :4], rtol=0, atol=0)
    assert_close(sin[0], whole[1][0, :4], rtol=0, atol=0)
    for row in (1, 2):
        alone = rotary(states[:1], positions[row : row + 1])
        assert_close(cos[row], alone[0][0], rtol=0, atol=0)
        assert_close(sin[row], alone[1][0], rtol=0, atol=0)


def test_each_layer_type_may_have_its_own_rotary_embeddings() -> None:
    model = tiny.model("gemma3_text")
    ids = torch.arange(4)[None]
    rotary = RotaryEmbeddings(model.model.rotary_emb, model.config)
    made = rotary(torch.zeros(1, 4, 48), ids, torch.tensor([4]))
    assert set(made) == {FULL, SLIDING}
    assert not torch.allclose(made[FULL][0], made[SLIDING][0])


@pytest.mark.slow
def test_threads_with_one_target_get_their_own_rotary_embeddings() -> None:
    """LongRoPE's module changes itself in every call."""
    model = tiny.model("phi3")
    embed = RotaryEmbeddings(model.model.rotary_emb, model.config)
    states, positions, lengths = torch.zeros(1, 12, 8), torch.arange(12)[None], torch.tensor([5])
    expected = embed(states, positions, lengths)[FULL]

    def right(_: int) -> bool:
        return all(map(torch.equal, embed(states, positions, lengths)[FULL], expected))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as pool:
            assert all(pool.map(right, range(2000)))
    finally:
        sys.setswitchinterval(before)
