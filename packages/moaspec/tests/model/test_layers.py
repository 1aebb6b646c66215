"""Our layers are transformers' layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

import tiny
from moaspec.model import layers
from moaspec.model.layers import (
    CrossAttentionLayer,
    DecoderLayer,
    KeyValueProjection,
    Rope,
    attention_among_few,
    folded,
    masked_attention,
    normed_products,
    scaled_rope,
    weights_of_a_step,
)
from moaspec.model.masks import text_mask
from moaspec.target.families import plain_layer_state
from moaspec_core.checkpoint.drafter_config import LayerConfig

EPS = 1e-6
POSITIONS = torch.arange(7)[None].expand(2, -1)
MASK = text_mask(torch.tensor([[1] * 7, [1] * 5 + [0] * 2]))


def config_of(model: Any) -> LayerConfig:
    config = model.config
    return LayerConfig(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.hidden_size // config.num_attention_heads,
        intermediate_size=config.intermediate_size,
        qkv_bias=config.model_type == "qwen2",
    )


def our_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.replace("self_attn.k_", "key_value.k_").replace("self_attn.v_", "key_value.v_"): value
        for name, value in state.items()
    }


@pytest.fixture(params=["llama", "qwen2", "mistral", "phi3"])
def model(request: pytest.FixtureRequest) -> Any:
    """A model whose layers are built as ours, except that Phi-3 fuses some projections."""
    made = tiny.model(request.param, rms_norm_eps=EPS)
    return made.requires_grad_(False)


def layer_state(model: Any, index: int) -> dict[str, Tensor]:
    state = plain_layer_state(model.config, model.model.layers[index].state_dict())
    assert state is not None
    return our_names(state)


@torch.no_grad()
def test_a_decoder_layer_is_transformers_own(model: Any) -> None:
    theirs = model.model.layers[1]
    ours = DecoderLayer(config_of(model), eps=EPS, hidden_act="silu")
    ours.load_state_dict(layer_state(model, 1))
    x_BTE = torch.randn(2, 7, 48, generator=torch.Generator().manual_seed(0))
    cos_sin = scaled_rope(8, model.config.rope_parameters, 256)(POSITIONS)
    got = ours(x_BTE, cos_sin, lambda q, k, v: masked_attention(q, k, v, MASK))
    expected = theirs(
        x_BTE,
        attention_mask=MASK,
        position_ids=POSITIONS,
        position_embeddings=model.model.rotary_emb(x_BTE, POSITIONS),
    )
    assert_close(got, expected, **tiny.TOLERANCE)


@torch.no_grad()
def test_a_cross_layer_that_reads_its_own_input_is_a_decoder_layer(model: Any) -> None:
    config = config_of(model)
    state = layer_state(model, 0)
    whole = DecoderLayer(config, eps=EPS, hidden_act="silu")
    whole.load_state_dict(state)
    cross, key_value = (
        CrossAttentionLayer(config, eps=EPS, hidden_act="silu"),
        KeyValueProjection(config),
    )
    cross.load_state_dict({k: v for k, v in state.items() if not k.startswith("key_value.")})
    key_value.load_state_dict(
        {k.removeprefix("key_value."): v for k, v in state.items() if k.startswith("key_value.")}
    )
    x_BTE = torch.randn(2, 7, 48, generator=torch.Generator().manual_seed(1))
    cos_sin = Rope.plain(8, 10000.0)(POSITIONS)
    key, value = key_value(cross.input_layernorm(x_BTE), cos_sin)
    got = cross(x_BTE, cos_sin, lambda q: masked_attention(q, key, value, MASK))
    expected = whole(x_BTE, cos_sin, lambda q, k, v: masked_attention(q, k, v, MASK))
    assert_close(got, expected)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_attention_against_its_closed_form(kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(2, 6, 7, 8, generator=generator)
    key, value = torch.randn(2, 2, kv_heads, 7, 8, generator=generator)
    repeated = [part.repeat_interleave(6 // kv_heads, dim=1) for part in (key, value)]
    scores = query @ repeated[0].mT / 8**0.5
    expected = scores.masked_fill(~MASK, float("-inf")).softmax(-1) @ repeated[1]
    # Sums of at most 8 products of numbers near 1, in float32.
    assert_close(masked_attention(query, key, value, MASK), expected, rtol=1e-5, atol=1e-5)


def test_masks_and_grouped_heads_do_not_meet_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a drafter trains there: PyTorch has no fused kernel for both. Shapes of Llama-3-8B."""
    calls: list[tuple[int, bool]] = []

    def recorded(query: Any, key: Any, _value: Any, *, enable_gqa: bool, **_: Any) -> Any:
        calls.append((key.shape[1], enable_gqa))
        return query

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    with FakeTensorMode():
        query = torch.empty(4, 32, 512, 128, device="cuda")
        key = torch.empty(4, 8, 1024, 128, device="cuda")
        mask = torch.empty(4, 1, 512, 1024, dtype=torch.bool, device="cuda")
        masked_attention(query, key, key, mask)
        masked_attention(query, key, key)
        with torch.no_grad():
            masked_attention(query, key, key, mask)
    assert calls == [(32, False), (8, True), (8, True)]


def test_biases_are_where_the_config_says() -> None:
    config = LayerConfig(
        hidden_size=8,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        intermediate_size=12,
        o_bias=True,
        mlp_bias=True,
    )
    names = set(DecoderLayer(config, eps=EPS, hidden_act="silu").state_dict())
    assert {name for name in names if name.endswith("bias")} == {
        "self_attn.o_proj.bias",
        "mlp.gate_proj.bias",
        "mlp.up_proj.bias",
        "mlp.down_proj.bias",
    }


@pytest.mark.parametrize("bias", [False, True])
def test_products_of_a_normed_input_and_their_gradients(bias: bool) -> None:
    """As one product, with the norm's weight multiplied into the layers', or one by one."""
    torch.manual_seed(0)
    norm, x = torch.nn.RMSNorm(8, eps=EPS), torch.randn(2, 5, 8, requires_grad=True)
    torch.nn.init.normal_(norm.weight)
    linears = [torch.nn.Linear(8, size, bias=bias) for size in (4, 2, 6)]
    weights = [norm.weight, x, *(p for one in linears for p in one.parameters())]
    found = normed_products(norm, x, linears)
    expected = [one(norm(x)) for one in linears]
    for got, wanted in zip(found, expected, strict=True):
        assert_close(got, wanted)
    sums = [torch.cat(parts, dim=-1).square().sum() for parts in (found, expected)]
    gradients = [torch.autograd.grad(one, weights, retain_graph=True) for one in sums]
    for got, wanted in zip(*gradients, strict=True):
        assert_close(got, wanted)
    with torch.no_grad():
        for got, wanted in zip(normed_products(norm, x, linears), expected, strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_among_few_and_its_gradients(kv_heads: int) -> None:
    """By products, as PyTorch's own."""
    torch.manual_seed(0)
    shapes = [(3, heads, 7, 8) for heads in (4, kv_heads, kv_heads)]
    given = [torch.randn(shape, requires_grad=True) for shape in shapes]
    found, expected = attention_among_few(*given), masked_attention(*given)
    assert_close(found, expected)
    weights = torch.randn_like(expected)
    gradients = [torch.autograd.grad(one, given, weights) for one in (found, expected)]
    for got, wanted in zip(*gradients, strict=True):
        assert_close(got, wanted)
    with torch.no_grad():
        assert torch.equal(attention_among_few(*given), masked_attention(*given))


def test_passes_of_a_step_fold_weights_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients are those of passes that fold them anew; a frozen layer gets none."""
    torch.manual_seed(0)
    norm, still = torch.nn.RMSNorm(8, eps=EPS), torch.nn.RMSNorm(8, eps=EPS)
    still.requires_grad_(requires_grad=False)
    linears = [torch.nn.Linear(8, size) for size in (4, 2)]
    frozen = [torch.nn.Linear(8, 3).requires_grad_(requires_grad=False)]
    parameters = [norm.weight, *(p for one in linears for p in one.parameters())]
    passes, folds = torch.randn(3, 5, 8), list[Any]()

    def gradients() -> list[torch.Tensor]:
        for x in passes:
            parts = [*normed_products(norm, x, linears), *normed_products(still, x, frozen)]
            torch.cat(parts, dim=-1).square().sum().backward()
        return [p.grad.clone() for p in parameters if p.grad is not None]

    expected = gradients()

    def counted(*given: Any) -> torch.Tensor:
        folds.append(given)
        return folded(*given)

    monkeypatch.setattr(layers, "folded", counted)
    for p in parameters:
        p.grad = None
    with weights_of_a_step():
        gradients()
    assert len(folds) == 2
    for p, wanted in zip(parameters, expected, strict=True):
        assert p.grad is not None
        assert_close(p.grad, wanted)
    assert all(p.grad is None for p in (still.weight, *frozen[0].parameters()))


def test_the_mean_of_a_layer_and_its_gradients(model: Any) -> None:
    """The last projection on the mean gives the mean of the last projection.

    In float64, where sums in another order do not show.
    """
    torch.manual_seed(0)
    layer = DecoderLayer(config_of(model), eps=EPS, hidden_act="silu").double()
    layer.load_state_dict(layer_state(model, 1))
    rope = Rope.plain(layer.self_attn.head_dim, 10000.0)(POSITIONS)
    x = torch.randn(2, 7, layer.input_layernorm.weight.shape[0], dtype=torch.float64)
    expected = layer(x, rope, masked_attention).mean(dim=1)
    found = layer.mean(x, rope, masked_attention)
    assert_close(found, expected)
    weights = list(layer.parameters())
    for got, wanted in zip(
        torch.autograd.grad(found.square().sum(), weights),
        torch.autograd.grad(expected.square().sum(), weights),
        strict=True,
    ):
        assert_close(got, wanted)
