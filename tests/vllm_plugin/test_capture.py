"""Keys and values taken from layers, and the heads of several ranks joined."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from block_drafts import layer_features
from moaspec.errors import ServingError
from moaspec.vllm_plugin.capture import HeadShare, VLLMCapture, require_capturable, verified_index

HEADS, DIM, LAYERS, TOKENS = 4, 6, 3, 5


class Layer:
    """What capture sees of a layer of vLLM."""

    kv_sharing_target_layer_name: str | None = None
    attn_backend = SimpleNamespace(
        forward_includes_kv_cache_update=False, get_name=lambda: "SOME_ATTN"
    )

    def __init__(self, name: str = "model.layers.0.self_attn.attn") -> None:
        self.layer_name, self.head_size, self.impl = name, DIM, self
        self.written: list[Tensor] = []

    def do_kv_cache_update(self, _: Any, key: Tensor, *__: Any) -> None:
        self.written.append(key)


def states(seed: int) -> tuple[Tensor, Tensor]:
    """Keys and values of all layers and heads, (L, T, H, D) each."""
    generator = torch.Generator().manual_seed(seed)
    shape = (LAYERS, TOKENS, HEADS, DIM)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def feed(capture_layers: list[Layer], key: Tensor, value: Tensor) -> None:
    for layer, one_key, one_value in zip(capture_layers, key, value, strict=True):
        layer.impl.do_kv_cache_update(layer, one_key, one_value, torch.empty(0), torch.empty(0))


def gather_of(parts: list[Tensor]) -> Any:
    return lambda _, axis: torch.cat(parts, dim=axis)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_join_to_what_the_encoder_reads(ranks: int) -> None:
    key_LTHD, value_LTHD = states(0)
    share = HeadShare(total=HEADS, ranks=ranks)
    captures = []
    for rank in range(ranks):
        first = rank * HEADS // ranks
        own = slice(first, first + share.own)
        layers = [Layer() for _ in range(LAYERS)]
        capture = VLLMCapture(layers, max_tokens=8, share=share, like=torch.empty(0))
        feed(layers, key_LTHD[:, :, own], value_LTHD[:, :, own])
        captures.append(capture)
    chosen = torch.tensor([0, 3, 4])
    gather = gather_of([one.staged_NLGK[chosen] for one in captures])
    expected = layer_features(
        key_LTHD.permute(0, 2, 1, 3)[:, None], value_LTHD.permute(0, 2, 1, 3)[:, None]
    )
    for capture in captures:
        assert torch.equal(capture.read(chosen, gather), expected[0, chosen])


def test_layers_go_on_writing_their_own_caches() -> None:
    layers = [Layer() for _ in range(LAYERS)]
    share = HeadShare(total=HEADS, ranks=1)
    capture = VLLMCapture(layers, max_tokens=8, share=share, like=torch.empty(0))
    key_LTHD, value_LTHD = states(1)
    assert not capture.pending
    feed(layers, key_LTHD, value_LTHD)
    assert capture.pending
    for layer, key in zip(layers, key_LTHD, strict=True):
        assert torch.equal(layer.written[0], key)


def test_padding_beyond_the_buffer_is_left_out() -> None:
    layers = [Layer()]
    share = HeadShare(total=HEADS, ranks=1)
    capture = VLLMCapture(layers, max_tokens=TOKENS - 2, share=share, like=torch.empty(0))
    key_LTHD, value_LTHD = states(2)
    feed(layers, key_LTHD[:1], value_LTHD[:1])
    read = capture.read(slice(0, 2), gather_of([]))
    assert torch.equal(read[:, 0].unflatten(-1, (HEADS, -1))[..., :DIM], key_LTHD[0, :2])


def test_what_is_held_reads_like_what_is_copied() -> None:
    share, reads = HeadShare(total=HEADS, ranks=1), []
    for may_hold in (False, True):
        layers = [Layer() for _ in range(LAYERS)]
        capture = VLLMCapture(
            layers, max_tokens=999, share=share, like=torch.empty(0), may_hold=may_hold
        )
        own = []
        for seed, repeats in ((3, 1), (4, 99), (5, 1)):  # the second step is too long to be held
            key_LTHD, value_LTHD = (x.repeat(1, repeats, 1, 1) for x in states(seed))
            feed(layers, key_LTHD, value_LTHD)
            own += [capture.read(slice(0, 5), gather_of([]))]
            own += [capture.read(torch.tensor([0, 3]), gather_of([]))]
            own = [one.clone() for one in own]
        reads.append(own)
    for copied, held in zip(*reads, strict=True):
        assert torch.equal(copied, held)


def test_uneven_heads_are_refused() -> None:
    with pytest.raises(ServingError, match="3 key-value heads cannot be spread over 2 ranks"):
        HeadShare(total=3, ranks=2)


def test_verified_tokens_of_a_step() -> None:
    starts = [0, 4, 4, 9, 10]
    assert verified_index(starts, [2, 0, 5, 99]) == [0, 1, 4, 5, 6, 7, 8, 9]
    assert verified_index(starts, [4, 0, 5, 1]) == slice(0, 10)
    assert verified_index(starts, [0, 0, 3, 0]) == slice(4, 7)
    assert verified_index([0, 4], [2]) == slice(0, 2)
    assert verified_index([0, 4], [0]) == slice(0)


def test_layers_that_cannot_be_read_are_refused() -> None:
    sharing, fused = Layer("model.layers.1.attn"), Layer()
    sharing.kv_sharing_target_layer_name = "model.layers.0.attn"
    fused.attn_backend = SimpleNamespace(
        forward_includes_kv_cache_update=True, get_name=lambda: "FUSED"
    )
    require_capturable([Layer(), Layer()], 2)
    with pytest.raises(ServingError, match="1 attention layers for a target of 2"):
        require_capturable([Layer()], 2)
    with pytest.raises(ServingError, match=r"layers\.1\.attn shares"):
        require_capturable([Layer(), sharing], 2)
    with pytest.raises(ServingError, match="FUSED"):
        require_capturable([fused], 1)


def test_a_layer_without_the_hook_is_named() -> None:
    layer = SimpleNamespace(head_size=DIM, impl=SimpleNamespace())
    share = HeadShare(total=HEADS, ranks=1)
    with pytest.raises(ServingError, match="do_kv_cache_update"):
        VLLMCapture([layer], max_tokens=1, share=share, like=torch.empty(0))
