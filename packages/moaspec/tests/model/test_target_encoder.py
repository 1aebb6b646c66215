"""The half beside the target: layout of what it reads, chunks, CA's memory."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

import moaspec.model.moa
import tiny
from block_drafts import layer_features
from moaspec.model.layers import masked_attention
from moaspec.model.moa import LayerFeatures
from moaspec_core.errors import ShapeError


def test_layout_of_layer_features() -> None:
    """Key of head 0, value of head 0, key of head 1, ...; layers inside tokens."""
    layers, batch, heads, tokens, dim = 2, 3, 2, 4, 5
    shape = (layers, batch, heads, tokens, dim)
    key = torch.arange(layers * batch * heads * tokens * dim).reshape(shape)
    value = -1 - key
    features = layer_features(key, value)
    filled = LayerFeatures(layers)
    for layer in range(layers):
        filled.write(layer, key[layer], value[layer])
    assert torch.equal(filled.read(), features)
    assert features.shape == (batch, tokens, layers, 2 * heads * dim)
    for layer in range(layers):
        assert features[2, 1, layer].tolist() == [
            *key[layer, 2, 0, 1].tolist(),
            *value[layer, 2, 0, 1].tolist(),
            *key[layer, 2, 1, 1].tolist(),
            *value[layer, 2, 1, 1].tolist(),
        ]


@pytest.mark.parametrize("chunk", [1, 4, 9, 10, 11])
def test_chunks_do_not_change_the_aggregate(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = tiny.random_drafter(tiny.target())
    kv = torch.randn(2, 5, 3, 32, generator=torch.Generator().manual_seed(0))
    expected = drafter.aggregate(kv)
    for name in ("AGGREGATE_CHUNK_TOKENS", "LEARNING_CHUNK_TOKENS"):
        monkeypatch.setattr(moaspec.model.moa, name, chunk)
    assert_close(drafter.aggregate(kv), expected, **tiny.TOLERANCE)
    with torch.no_grad():
        assert_close(drafter.aggregate(kv), expected, **tiny.TOLERANCE)


def test_aggregate_step_by_step() -> None:
    encoder = tiny.random_drafter(tiny.target()).encoder
    kv = torch.randn(1, 1, 3, 32, generator=torch.Generator().manual_seed(0))
    layer_ids = torch.arange(3)[None]
    lsa = encoder.layer_self_attention(kv[0], encoder.layer_rope(layer_ids), masked_attention)
    expected = encoder.projection(lsa.sum(1) / 3)
    assert_close(encoder.aggregate(kv)[0], expected, **tiny.TOLERANCE)


def test_the_order_of_layers_matters() -> None:
    drafter = tiny.random_drafter(tiny.target())
    kv = torch.randn(1, 2, 3, 32, generator=torch.Generator().manual_seed(0))
    assert not torch.allclose(drafter.aggregate(kv), drafter.aggregate(kv.flip(2)), atol=1e-3)


def test_memory_of_a_token_depends_on_its_position_alone() -> None:
    drafter = tiny.random_drafter(tiny.target())
    states = torch.randn(1, 3, 48, generator=torch.Generator().manual_seed(0))
    key, value = drafter.project_kv(states, torch.tensor([[0, 1, 2]]))
    moved_key, moved_value = drafter.project_kv(states[:, 1:], torch.tensor([[1, 2]]))
    assert key.shape == value.shape == (1, 2, 3, 8)
    assert_close(key[:, :, 1:], moved_key, **tiny.TOLERANCE)
    assert_close(value[:, :, 1:], moved_value, **tiny.TOLERANCE)
    elsewhere, _ = drafter.project_kv(states, torch.tensor([[5, 6, 7]]))
    assert not torch.allclose(key, elsewhere, atol=1e-3)


@pytest.mark.parametrize("shape", [(1, 2, 3, 31), (1, 2, 3, 64), (2, 3, 32), (32,)])
def test_wrong_width_of_keys_and_values(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="another target"):
        tiny.random_drafter(tiny.target()).aggregate(torch.zeros(shape))
