"""Layers by kernels are those of modules, to the same bits however many tokens a call has.

Legend: B rows, T tokens, S slots, X joined heads, D head dim, E hidden size, R rotated dims.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu
from torch.testing import assert_close

from bits import BF16_STEP, ROWS, needs_kernels, normal, same_bits, threads
from moaspec.backends.cpu.cpu_attention import MAX_QUERIES, attend, fast_attention
from moaspec.backends.cpu.fused_layers import FusedLayer, FusedNorm, FusedStack
from moaspec.backends.cpu.matrix import Matrix, large_pages
from moaspec.backends.fast_drafter import FastAttentionBlock, fast_layer
from moaspec.drafting.kv_cache import KVCache, StoredMemory, prefix_mask, tree_mask
from moaspec.model.layers import CrossAttentionLayer, DecoderLayer, Rope, masked_attention, rotate
from moaspec_core.checkpoint.drafter_config import LayerConfig

pytestmark = [needs_kernels, pytest.mark.kernels]

EPS = 1e-5
CONFIG = LayerConfig(hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=96)
CONFIGS = {
    "plain": CONFIG,
    "biases": replace(CONFIG, qkv_bias=True, o_bias=True, mlp_bias=True),
    "no groups": replace(CONFIG, num_kv_heads=4),
    "wide heads": replace(CONFIG, num_heads=3, num_kv_heads=1, head_dim=64, qkv_bias=True),
}
SHAPES = ((1, 1), (1, 3), (2, 5), (1, 70), (3, 67))
"""Rows and tokens: one tile of a product, several, and more than a layer takes at once."""

every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


def random_layer(kind: Any, config: LayerConfig) -> Any:
    """Packed, and the same as plain modules in float32 of the same numbers, and in bf16."""
    torch.manual_seed(0)
    plain = kind(config, eps=EPS, hidden_act="silu").requires_grad_(requires_grad=False)
    for name, parameter in plain.named_parameters():
        parameter.add_(0.3 * torch.randn_like(parameter) * (0.5 if "weight" in name else 1.0))
    plain.bfloat16()
    copies = [kind(config, eps=EPS, hidden_act="silu") for _ in range(2)]
    for copied in copies:
        copied.load_state_dict(plain.state_dict())
    packed = fast_layer(plain, drafts=False)
    assert isinstance(packed, FastAttentionBlock)
    assert isinstance(packed, kind)
    return packed, copies[0].requires_grad_(requires_grad=False), copies[1].bfloat16()


def angles(config: LayerConfig, rows: int, tokens: int, turned: int = 0) -> tuple[Tensor, Tensor]:
    positions_BT = torch.arange(tokens) + 11 * torch.arange(rows)[:, None]
    return Rope.plain(turned or config.head_dim, 100.0)(positions_BT)


def assert_as_exact_as(got: Tensor, plain: Tensor, exact: Tensor) -> None:
    """Both round to bf16, the kernel in fewer places; a wrong number would be far off."""
    assert got.shape == exact.shape
    assert got.dtype == torch.bfloat16
    error, expected = ((one.float() - exact).norm() for one in (got, plain))
    assert error < 1.2 * expected


@every_config
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("turned", [0, 16])
@torch.inference_mode()
def test_a_decoder_layer_by_kernels(config: LayerConfig, mean: bool, turned: int) -> None:
    packed, exact, plain = random_layer(DecoderLayer, config)
    for rows, tokens in SHAPES:
        x_BTE, cos_sin = normal(rows, tokens, 64, seed=1), angles(config, rows, tokens, turned)

        def run(layer: Any, x: Tensor, cos_sin: Any = cos_sin, one: int = tokens) -> Tensor:
            call = layer.mean if mean else layer
            return call(x, cos_sin, lambda *heads: masked_attention(*heads, causal=one > 1))

        outputs = run(packed, x_BTE), run(plain, x_BTE), run(exact, x_BTE.float())
        assert_as_exact_as(*outputs)


@every_config
@torch.inference_mode()
def test_a_cross_layer_by_kernels(config: LayerConfig) -> None:
    packed, exact, plain = random_layer(CrossAttentionLayer, config)
    for rows, tokens in SHAPES:
        x_BTE, cos_sin = normal(rows, tokens, 64, seed=1), angles(config, rows, tokens)
        key, value = normal(2, rows, config.num_kv_heads, 9, config.head_dim, seed=2)

        def run(layer: Any, x: Tensor, key: Tensor, value: Tensor, cos_sin: Any = cos_sin) -> Any:
            return layer(x, cos_sin, lambda query: masked_attention(query, key, value))

        assert_as_exact_as(
            run(packed, x_BTE, key, value),
            run(plain, x_BTE, key, value),
            run(exact, x_BTE.float(), key.float(), value.float()),
        )


@pytest.mark.parametrize("turned", [2, 16, 30, 32])
@pytest.mark.parametrize("of_heads", [False, True], ids=["", "norms of heads"])
@pytest.mark.parametrize("shared", [False, True], ids=["own angles", "shared angles"])
def test_queries_keys_and_values(of_heads: bool, turned: int, shared: bool) -> None:
    layer = some_layer(of_heads=of_heads, biased=True)
    rows, tokens = 3, 70
    x_BTE = normal(rows, tokens, 64, seed=1)
    cos_B1TR, sin_B1TR = angles(CONFIG, 1 if shared else rows, tokens, turned)
    got_BTXD = layer.fused.project(x_BTE, cos_B1TR[:, 0], sin_B1TR[:, 0])
    joined = layer.normed(x_BTE.double(), 0) @ layer.weights[0].double().t()
    heads_BTXD = (joined + layer.biases[0].double()).unflatten(-1, (8, 32))
    query, key, value = heads_BTXD.split((4, 2, 2), dim=2)
    if of_heads:
        query, key = (layer.normed(one, 2 + i) for i, one in enumerate((query, key)))
    double = cos_B1TR.double(), sin_B1TR.double()
    turn = [rotate(one.transpose(1, 2), double).transpose(1, 2) for one in (query, key)]
    exact_BTXD = torch.cat((*turn, value), dim=2)
    # What is multiplied was rounded to bf16, as is the result; norms of heads are rounded between.
    # Errors of the inputs are apart from each other, so some of them make up for others.
    assert_close(got_BTXD.double(), exact_BTXD, atol=4 * BF16_STEP * 8**0.5, rtol=2 * BF16_STEP)
    # Taken together, they are those of two roundings.
    assert (got_BTXD.double() - exact_BTXD).norm() < BF16_STEP * exact_BTXD.norm()


class SomeLayer:
    """A fused layer of random weights, and these."""

    def __init__(self, *, of_heads: bool, biased: bool, seed: int = 0) -> None:
        shapes = ((256, 64), (64, 128), (192, 64), (64, 96))
        self.weights = [0.2 * normal(*shape, seed=seed + i) for i, shape in enumerate(shapes)]
        self.biases = [
            normal(shape[0], seed=seed + 10 + i) if biased else None
            for i, shape in enumerate(shapes)
        ]
        sizes = (64, 64, *((32, 32) if of_heads else ()))
        self.norms = [1 + 0.3 * normal(size, seed=seed + 20 + i) for i, size in enumerate(sizes)]
        pairs = zip(self.weights, self.biases, strict=True)
        made = FusedLayer.of(
            [Matrix(weight, bias) for weight, bias in pairs],
            norms=self.norms[:2],
            head_norms=self.norms[2:] or None,
            eps=EPS,
            heads=(4, 2),
            head_dim=32,
        )
        assert made is not None
        self.fused = made

    def normed(self, x: Tensor, which: int) -> Tensor:
        return rms_norm(x, x.shape[-1:], self.norms[which].to(x.dtype), EPS)

    def product(self, x: Tensor, which: int) -> Tensor:
        bias = self.biases[which]
        out = x @ self.weights[which].to(x.dtype).t()
        return out if bias is None else out + bias.to(x.dtype)

    def finished(self, x_BTE: Tensor, read_BTX: Tensor) -> Tensor:
        x_BTE = x_BTE + self.product(read_BTX, 1)
        gate, up = self.product(self.normed(x_BTE, 1), 2).chunk(2, dim=-1)
        return x_BTE + self.product(silu(gate) * up, 3)


def some_layer(*, of_heads: bool = False, biased: bool = False, seed: int = 0) -> Any:
    return SomeLayer(of_heads=of_heads, biased=biased, seed=seed)


@pytest.mark.parametrize("biased", [False, True])
def test_what_comes_after_attention(biased: bool) -> None:
    layer = some_layer(biased=biased)
    for rows, tokens in (*SHAPES, (1, 200), (0, 3)):
        x_BTE, read_BTX = normal(rows, tokens, 64, seed=1), normal(rows, tokens, 128, seed=2)
        exact = layer.finished(x_BTE.double(), read_BTX.double())
        plain = layer.finished(x_BTE, read_BTX)
        got = layer.fused.finish(x_BTE, read_BTX)
        mean = layer.fused.finish_mean(x_BTE, read_BTX)
        assert mean.shape == (rows, 64)
        if rows:
            assert_as_exact_as(got, plain, exact.float())
            assert_as_exact_as(mean, plain.mean(1), exact.mean(1).float())


def test_layers_have_the_same_bits_in_every_call() -> None:
    layer = some_layer(of_heads=True, biased=True).fused
    x_BTE, read_BTX = normal(1, 200, 64, seed=1), normal(1, 200, 128, seed=2)
    cos_BTR, sin_BTR = (part[:, 0] for part in angles(CONFIG, 1, 200))
    with threads(1):
        projected, finished = layer.project(x_BTE, cos_BTR, sin_BTR), layer.finish(x_BTE, read_BTX)
        means = layer.finish_mean(x_BTE.view(40, 5, 64), read_BTX.view(40, 5, 128))
    for num in (1, 2):
        with threads(num):
            for tokens in ROWS[1:]:
                part = slice(200 - tokens, 200)
                turn = cos_BTR[:, part].contiguous(), sin_BTR[:, part].contiguous()
                assert same_bits(layer.project(x_BTE[:, part], *turn), projected[:, part])
                got = layer.finish(x_BTE[:, part], read_BTX[:, part])
                assert same_bits(got, finished[:, part])
            for row in (0, 17, 39):
                own = slice(5 * row, 5 * row + 5)
                got = layer.finish_mean(x_BTE[:, own], read_BTX[:, own])
                assert same_bits(got, means[row : row + 1])


def test_numbers_of_any_size_stay_finite() -> None:
    """Gates far from zero, where an exponential of them would not be."""
    layer = some_layer()
    x_BTE, read_BTX = normal(1, 4, 64), 1e4 * normal(1, 4, 128, seed=1)
    layer.biases[2] = torch.linspace(-3e4, 3e4, 192).bfloat16()
    pairs = list(zip(layer.weights, layer.biases, strict=True))
    made = FusedLayer.of(
        [Matrix(weight, bias) for weight, bias in pairs],
        norms=layer.norms,
        head_norms=None,
        eps=EPS,
        heads=(4, 2),
        head_dim=32,
    )
    assert made is not None
    exact = layer.finished(x_BTE.double(), read_BTX.double()).float()
    assert_as_exact_as(made.finish(x_BTE, read_BTX), layer.finished(x_BTE, read_BTX), exact)


def refused_sizes() -> Iterator[tuple[str, Callable[[], FusedLayer | None]]]:
    def layer(
        shapes: Sequence[tuple[int, int]], head_dim: int, heads: tuple[int, int] = (4, 2)
    ) -> FusedLayer | None:
        return FusedLayer.of(
            [Matrix(normal(*shape), None) for shape in shapes],
            norms=[torch.ones(shapes[1][0]).bfloat16()] * 2,
            head_norms=None,
            eps=EPS,
            heads=heads,
            head_dim=head_dim,
        )

    usual = ((256, 64), (64, 128), (192, 64), (64, 96))
    yield "", lambda: layer(usual, 32)
    yield "width", lambda: layer(((256, 72), (72, 128), (192, 72), (72, 96)), 32)
    yield "inner", lambda: layer((*usual[:2], (176, 64), (64, 88)), 32)
    # A stack attends by itself, in steps of 32 numbers: more would be written than there are.
    yield "head_dim 16", lambda: layer(((128, 64), (64, 64), *usual[2:]), 16)
    yield "head_dim 48", lambda: layer(((384, 64), (64, 192), *usual[2:]), 48)
    yield "head_dim 288", lambda: layer(((864, 64), (64, 288), *usual[2:]), 288, (1, 1))


def test_sizes_that_layers_refuse() -> None:
    made = {name: make() for name, make in refused_sizes()}
    assert [name for name, one in made.items() if one is not None] == [""]


def test_a_layer_with_a_matrix_of_another_form_is_refused() -> None:
    matrices = [None, *(Matrix(normal(64, 64), None) for _ in range(3))]
    rest: dict[str, Any] = {"norms": (), "head_norms": None, "eps": EPS, "heads": (1, 1)}
    assert FusedLayer.of(matrices, head_dim=32, **rest) is None


# FusedStack


def empty_cache(num_layers: int) -> KVCache:
    sizes: dict[str, Any] = {"num_layers": num_layers, "num_kv_heads": 2, "head_dim": 32}
    target = SimpleNamespace(
        **sizes, dtype=torch.bfloat16, device=torch.device("cpu"), max_positions=4096
    )
    return KVCache(target)


def filled_cache(num_layers: int = 3) -> KVCache:
    cache = empty_cache(num_layers)
    cache.attend = fast_attention
    cache.reserve(4, 100)
    cache.data.copy_(normal(*cache.data.shape, seed=5))
    return cache


def layer_by_layer(
    layers: Sequence[FusedLayer], x_BTE: Tensor, turn: Any, mask: Tensor, write: Any
) -> Tensor:
    for index, layer in enumerate(layers, start=3 - len(layers)):
        heads = layer.project(x_BTE, *turn).split((4, 2, 2), dim=2)
        query, key, value = (part.transpose(1, 2) for part in heads)
        keys, values = write(index, key, value)
        read_BHTD = attend(query, keys, values, mask, 0.2)
        x_BTE = layer.finish(x_BTE, read_BHTD.transpose(1, 2).flatten(2))
    return x_BTE


@pytest.mark.parametrize("num", [3, 1])
@pytest.mark.parametrize("tokens", [1, 5, MAX_QUERIES])
@pytest.mark.parametrize(
    ("rows", "starts"), [([0], [0]), ([2], [7]), ([0, 1], [3, 9]), ([3, 0, 2], [0, 20, 4])]
)
def test_a_stack_is_its_layers(rows: list[int], starts: list[int], tokens: int, num: int) -> None:
    layers = [some_layer(of_heads=True, biased=True, seed=100 * i).fused for i in range(3)]
    B, visible = len(rows), max(starts) + tokens
    x_BTE = normal(B, tokens, 64, seed=1)
    cos_BTR, sin_BTR = (part[:, 0].contiguous() for part in angles(CONFIG, B, tokens))
    mask = tree_mask(starts, torch.ones(B, tokens, tokens).tril().bool(), visible)
    apart, at_once = filled_cache(), filled_cache()
    write = apart.writer(rows, starts, tokens, visible)
    expected = layer_by_layer(layers[3 - num :], x_BTE, (cos_BTR, sin_BTR), mask, write)
    before = x_BTE.clone()
    stack = FusedStack(layers, 0.2)
    slots = at_once.writer(rows, starts, tokens, visible).slots
    for threads_of_run in (1, 2):
        with threads(threads_of_run):
            got = stack.run(x_BTE, cos_BTR, sin_BTR, mask, slots=slots, num=num)
        assert same_bits(got, expected)
        assert same_bits(at_once.data, apart.data)
    assert same_bits(x_BTE, before)
    norm = FusedNorm(normal(64, seed=5), EPS)
    got = stack.run(x_BTE, cos_BTR, sin_BTR, mask, slots=slots, num=num, norm=norm)
    assert same_bits(got, norm(expected))


def test_a_device_has_only_the_last_layers_of_a_cache() -> None:
    layers = [some_layer(seed=100 * i).fused for i in range(2)]
    x_BTE = normal(1, 4, 64)
    cos_BTR, sin_BTR = (part[:, 0].contiguous() for part in angles(CONFIG, 1, 4))
    mask = tree_mask([6], torch.ones(1, 4, 4).tril().bool(), 10)
    apart, at_once = filled_cache(), filled_cache()
    write = apart.writer([0], [6], 4, 10)
    expected = layer_by_layer(layers, x_BTE, (cos_BTR, sin_BTR), mask, write)
    slots = at_once.writer([0], [6], 4, 10).slots
    stack = FusedStack(layers, 0.2)
    got = stack.run(x_BTE, cos_BTR, sin_BTR, mask, slots=slots, num=2)
    assert same_bits(got, expected)
    assert same_bits(at_once.data, apart.data)


def test_weights_that_layers_share_lie_in_one_place() -> None:
    layer, other = (some_layer(seed=100 * i).fused for i in range(2))
    same = copy.copy(layer)
    before = layer.finish(normal(1, 3, 64), normal(1, 3, 128, seed=1))
    FusedStack([layer, other, same], 0.2)
    places = [one.described.output.panels for one in (layer, other, same)]
    assert places[0] == places[2] != places[1]
    for one in (layer, same):
        assert same_bits(one.finish(normal(1, 3, 64), normal(1, 3, 128, seed=1)), before)


def test_layers_of_a_stack_still_work_alone() -> None:
    layer, x_BTE, read_BTX = some_layer(), normal(1, 3, 64), normal(1, 3, 128, seed=1)
    before = layer.fused.finish(x_BTE, read_BTX)
    weights = [matrix.weight().clone() for matrix in layer.fused.matrices]
    FusedStack([layer.fused], 0.2)
    assert same_bits(layer.fused.finish(x_BTE, read_BTX), before)
    for matrix, weight_OI in zip(layer.fused.matrices, weights, strict=True):
        assert same_bits(matrix.weight(), weight_OI)


# Drafters' layers


@torch.inference_mode()
def test_layers_of_drafts_are_rounded_to_four_bits() -> None:
    torch.manual_seed(0)
    layer = DecoderLayer(CONFIG, eps=EPS, hidden_act="silu").requires_grad_(requires_grad=False)
    fast = fast_layer(layer.bfloat16(), drafts=True)
    assert isinstance(fast, FastAttentionBlock)
    assert [matrix.bits for matrix in fast.fused.matrices] == [4] * 4


@pytest.mark.parametrize("act", ["gelu", "relu"])
def test_other_activations_are_left_to_modules(act: str) -> None:
    layer = DecoderLayer(CONFIG, eps=EPS, hidden_act=act).requires_grad_(requires_grad=False)
    assert fast_layer(layer.bfloat16(), drafts=False) is layer


def test_biases_that_only_some_projections_have_are_left_to_modules() -> None:
    torch.manual_seed(0)
    config = replace(CONFIG, qkv_bias=True)
    layer = DecoderLayer(config, eps=EPS, hidden_act="silu").requires_grad_(requires_grad=False)
    layer.key_value.k_proj.register_parameter("bias", None)
    layer.bfloat16()
    x_BTE, cos_sin = normal(1, 5, 64), angles(CONFIG, 1, 5)

    def run() -> Tensor:
        with torch.inference_mode():
            return layer(x_BTE, cos_sin, lambda *heads: masked_attention(*heads, causal=True))

    expected = run()
    assert fast_layer(layer, drafts=False) is layer
    # Products are rounded to bf16 in both; states are below 8.
    assert_close(run(), expected, atol=8 * BF16_STEP, rtol=2 * BF16_STEP)


@pytest.mark.parametrize("tokens", [1, 5, MAX_QUERIES, MAX_QUERIES + 1])
@pytest.mark.parametrize("rows", [[0], [1, 2], [3, 0, 2]])
@torch.inference_mode()
def test_a_decoder_layer_over_a_cache_is_one_call(rows: list[int], tokens: int) -> None:
    packed, exact, plain = random_layer(DecoderLayer, CONFIG)
    B, starts = len(rows), [4 * row for row in rows]
    visible = max(starts) + tokens
    x_BTE, cos_sin = normal(B, tokens, 64, seed=1), angles(CONFIG, B, tokens)
    mask = tree_mask(starts, torch.ones(B, tokens, tokens).tril().bool(), visible)
    results, stored = [], []
    for layer, calls_kernels in ((packed, True), (packed, False), (plain, False)):
        cache = filled_cache(2)
        attend_to = cache.attentions(rows, starts, tokens, mask)[1]
        if layer is packed:
            whole = packed.in_one_call(x_BTE, cos_sin, attend_to)
            assert (whole is not None) is (tokens <= MAX_QUERIES)
        call = attend_to if calls_kernels else lambda *heads, to=attend_to: to(*heads)
        results.append(layer(x_BTE, cos_sin, call))
        stored.append(cache.data)
    assert same_bits(results[0], results[1])
    assert same_bits(stored[0], stored[1])
    assert same_bits(stored[0][0], filled_cache(2).data[0])  # another layer's

    def read(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = filled_cache(2).data[1, :, rows, :, :visible].float().unbind(0)
        for i, start in enumerate(starts):
            keys[i, :, start : start + tokens] = key[i]
            values[i, :, start : start + tokens] = value[i]
        return masked_attention(query, keys, values, mask)

    assert_as_exact_as(results[0], results[2], exact(x_BTE.float(), cos_sin, read))


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("lengths", [[29], [3, 29], [0, 29, 7]])
@pytest.mark.parametrize("own_masks", [False, True])
@torch.inference_mode()
def test_a_cross_layer_over_a_cache_is_one_call(
    lengths: list[int], tokens: int, own_masks: bool
) -> None:
    """A mask that all tokens of a row share was once read beyond its end."""
    packed, _, _ = random_layer(CrossAttentionLayer, CONFIG)
    B = len(lengths)
    x_BTE, cos_sin = normal(B, tokens, 64, seed=1), angles(CONFIG, B, tokens)
    mask = prefix_mask(lengths, max(lengths), torch.device("cpu"))
    if own_masks:
        mask = mask & (torch.rand(B, 1, tokens, max(lengths)) < 0.6)
    cache = filled_cache(1)
    memory = StoredMemory(cache, [3, 0, 2][:B], mask)
    got = packed(x_BTE, cos_sin, memory)
    assert same_bits(got, packed.in_one_call(x_BTE, cos_sin, memory))
    assert same_bits(got, packed(x_BTE, cos_sin, lambda query: memory(query)))
    assert same_bits(cache.data, filled_cache(1).data)  # nothing is stored


@torch.inference_mode()
def test_a_cross_layer_without_memory_reads_nothing() -> None:
    packed, _, _ = random_layer(CrossAttentionLayer, CONFIG)
    cache = empty_cache(1)
    memory = StoredMemory(cache, [0], prefix_mask([0], 0, torch.device("cpu")))
    x_BTE = normal(1, 3, 64)
    got = packed(x_BTE, angles(CONFIG, 1, 3), memory)
    assert same_bits(got, packed.fused.finish(x_BTE, torch.zeros(1, 3, 128).bfloat16()))


@pytest.mark.parametrize("shape", [(64,), (3, 32), (0, 2, 16), (2, 150, 576)])
@torch.inference_mode()
def test_a_norm_by_a_kernel(shape: tuple[int, ...]) -> None:
    x, weight_E = normal(*shape, seed=3), normal(shape[-1], seed=4)
    norm = torch.nn.RMSNorm(shape[-1], eps=EPS)
    norm.weight = torch.nn.Parameter(weight_E.float())
    exact = norm(x.float())
    fused = FusedNorm(weight_E, EPS)
    got = fused(x)
    assert got.shape == x.shape
    # One rounding of numbers that float32 has to seven digits.
    torch.testing.assert_close(got.float(), exact, rtol=2.0**-8, atol=1e-6)
    for one, many in zip(x.view(-1, shape[-1]), got.view(-1, shape[-1]), strict=True):
        assert torch.equal(fused(one), many)


def test_weights_ask_for_large_pages() -> None:
    """Shared memory, which Python's `mmap` gives unless told otherwise, gets none by default."""
    room = large_pages(4 * 2**20)
    flags: list[list[str]] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if re.fullmatch(r"[0-9a-f]+-[0-9a-f]+", first):
            start, stop = (int(end, 16) for end in first.split("-"))
        elif first == "VmFlags:" and start <= room.data_ptr() < stop:
            flags.append(rest)
    (own,) = flags
    assert "hg" in own, own
    assert "sh" not in own, own
