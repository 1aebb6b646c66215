"""Rotary embeddings: ours are transformers'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.phi3 import modeling_phi3

from moaspec.model.layers import LongRope, Rope, rotate, scaled_rope

POSITIONS = torch.tensor([[0, 1, 2, 50, 255, 1000], [7, 6, 5, 4, 3, 2]])
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 5000.0,
    "partial_rotary_factor": 0.5,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
}


def theirs(parameters: dict[str, Any]) -> tuple[Tensor, Tensor]:
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=512,
        rope_parameters=dict(parameters),
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), POSITIONS)
    return cos, sin


def test_plain() -> None:
    cos, sin = Rope.plain(16, 5000.0)(POSITIONS)
    expected_cos, expected_sin = theirs({"rope_type": "default", "rope_theta": 5000.0})
    assert_close(cos[:, 0], expected_cos)
    assert_close(sin[:, 0], expected_sin)


@pytest.mark.parametrize("parameters", [LLAMA3, YARN, {"rope_theta": 5000.0}], ids=str)
def test_scaled(parameters: dict[str, Any]) -> None:
    cos, sin = scaled_rope(16, parameters, 512)(POSITIONS)
    expected_cos, expected_sin = theirs({"rope_type": "default"} | parameters)
    assert cos.shape == (2, 1, 6, 16)
    assert_close(cos[:, 0], expected_cos)
    assert_close(sin[:, 0], expected_sin)


def phi3_rotary() -> Any:
    return modeling_phi3.Phi3RotaryEmbedding(
        Phi3Config(
            hidden_size=64,
            num_attention_heads=4,
            max_position_embeddings=512,
            original_max_position_embeddings=64,
            rope_parameters=dict(LONGROPE),
        )
    )


def test_longrope_goes_by_the_length_of_each_row() -> None:
    rope, theirs = scaled_rope(16, LONGROPE, 512), phi3_rotary()
    assert isinstance(rope, LongRope)
    assert (rope.switch, rope.attention_scaling) == (64, theirs.attention_scaling)
    positions = torch.tensor([[0, 1, 62, 63], [0, 1, 63, 64]])
    cos, sin = rope(positions)
    for row in range(2):
        expected_cos, expected_sin = theirs(torch.zeros(1), positions[row : row + 1])
        assert_close(cos[row], expected_cos)
        assert_close(sin[row], expected_sin)
    assert not torch.allclose(cos[0, :, :2], cos[1, :, :2])


def test_partial_rotation() -> None:
    query, key = torch.randn(2, 2, 3, 4, 16, generator=torch.Generator().manual_seed(0))
    cos, sin = scaled_rope(16, LONGROPE, 512)(POSITIONS[:, :4])
    assert cos.shape == (2, 1, 4, 8)
    expected = modeling_phi3.apply_rotary_pos_emb(query, key, cos[:, 0], sin[:, 0])
    assert_close(rotate(query, (cos, sin)), expected[0])
    assert_close(rotate(key, (cos, sin)), expected[1])
    plain = scaled_rope(16, {"rope_theta": 10.0, "partial_rotary_factor": 0.5}, 512)
    assert_close(plain.inv_freq, Rope.plain(8, 10.0).inv_freq, rtol=0, atol=0)


def test_scaling_does_something() -> None:
    plain, scaled = Rope.plain(16, 5000.0), scaled_rope(16, LLAMA3, 512)
    assert not torch.allclose(plain.inv_freq, scaled.inv_freq)


def test_rotate() -> None:
    query, key = torch.randn(2, 2, 3, 6, 16, generator=torch.Generator().manual_seed(0))
    cos_sin = Rope.plain(16, 5000.0)(POSITIONS)
    expected = apply_rotary_pos_emb(query, key, cos_sin[0][:, 0], cos_sin[1][:, 0])
    assert_close(rotate(query, cos_sin), expected[0])
    assert_close(rotate(key, cos_sin), expected[1])
    assert rotate(query.bfloat16(), cos_sin).dtype == torch.bfloat16


def test_frequencies_stay_in_float32() -> None:
    """In bf16 neighbouring positions beyond 256 would coincide."""
    rope = scaled_rope(16, LONGROPE, 512)
    before = {name: buffer.clone() for name, buffer in rope.named_buffers()}
    assert set(before) == {"inv_freq", "long_inv_freq"}
    nn.Sequential(rope).to(torch.bfloat16)
    for name, buffer in rope.named_buffers():
        assert buffer.dtype == torch.float32
        # A round trip through bf16 would already have lost 16 of the 24 bits.
        assert_close(buffer, before[name], rtol=0, atol=0)
    assert rope(POSITIONS)[0].dtype == torch.float32


def test_nothing_is_saved() -> None:
    assert Rope.plain(8, 10.0).state_dict() == {}


def test_neighbouring_positions_of_a_text() -> None:
    rope = Rope.plain(16, 5000.0)
    for start, stop in ((0, 1), (0, 30), (7, 9), (1020, 1025)):
        expected = rope(torch.arange(start, stop)[None])
        for found, wanted in zip(rope.between(start, stop), expected, strict=True):
            assert torch.equal(found, wanted)
