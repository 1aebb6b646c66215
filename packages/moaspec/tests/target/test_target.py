"""The frozen target: what a pass captures, the head, identity and stop tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

import moaspec
import tiny
from block_drafts import layer_features
from moaspec.backends.fast_target import accelerate
from moaspec.target.decoder_layers import cache_argument
from moaspec.target.target import Target
from moaspec_core.errors import UnsupportedTargetError

pytestmark = pytest.mark.kernels

LONG, SHORT = 20, 11
"""Both past the sliding windows, one past LongRoPE's switch."""
IDS = torch.tensor([[(7 * i + 5) % 64 for i in range(LONG)], [*range(30, 41), *[0] * 9]])
MASK = torch.tensor([[1] * LONG, [1] * SHORT + [0] * (LONG - SHORT)])


@torch.no_grad()
def transformers_pass(target: Target, ids: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of transformers' own cache, final states and logits."""
    cache = DynamicCache()  # without a config it keeps what lies outside sliding windows
    model: Any = target.model
    options = {cache_argument(model): cache, "output_hidden_states": True}
    output = model(input_ids=torch.tensor([ids]), **options)
    keys = torch.stack([layer.keys for layer in cache.layers])
    values = torch.stack([layer.values for layer in cache.layers])
    return layer_features(keys, values)[0], output.hidden_states[-1][0], output.logits[0]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_encode_gives_what_transformers_caches(family: str) -> None:
    target = tiny.target(family)
    result = target.capture(IDS, MASK)
    assert result.kv_BTLK.shape == (2, LONG, 3, target.identity.kv_size)
    for row, length in enumerate(MASK.sum(1).tolist()):
        kv, hidden, logits = transformers_pass(target, IDS[row, :length].tolist())
        assert_close(result.kv_BTLK[row, :length], kv, **tiny.TOLERANCE)
        assert_close(result.hidden_BTE[row, :length], hidden, **tiny.TOLERANCE)
        got = target.head(result.hidden_BTE[row, :length])
        assert_close(got, logits, **tiny.TOLERANCE)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_pads_on_the_right_change_nothing(family: str) -> None:
    target = tiny.target(family)
    padded, alone = target.capture(IDS, MASK), target.capture(IDS[1:, :SHORT], MASK[1:, :SHORT])
    assert_close(padded.kv_BTLK[1:, :SHORT], alone.kv_BTLK, **tiny.TOLERANCE)
    assert_close(padded.hidden_BTE[1:, :SHORT], alone.hidden_BTE, **tiny.TOLERANCE)
    assert bool(padded.hidden_BTE.isfinite().all())


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_pads_on_the_left_change_nothing(family: str) -> None:
    target = tiny.target(family)
    turned = target.capture(IDS.roll(LONG - SHORT, 1), MASK.roll(LONG - SHORT, 1))
    alone = target.capture(IDS[1:, :SHORT], MASK[1:, :SHORT])
    assert_close(turned.kv_BTLK[1:, -SHORT:], alone.kv_BTLK, **tiny.TOLERANCE)
    assert_close(turned.hidden_BTE[1:, -SHORT:], alone.hidden_BTE, **tiny.TOLERANCE)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("num", [0, 1, 2, 3])
def test_the_last_layers_finish_a_pass(family: str, num: int) -> None:
    """From the states that enter layer L - N, the last N layers give the pass's own output."""
    target = tiny.target(family)
    model: Any = target.model
    with torch.no_grad():
        output = model(input_ids=IDS[:1], output_hidden_states=True)
    states = output.hidden_states[target.num_layers - num]
    if num == 0:
        states = captured_before_norm(target)
    got = target.layers.run(
        states,
        torch.arange(LONG)[None],
        num=num,
        mask_B1TS=torch.ones(LONG, LONG, dtype=torch.bool).tril()[None, None],
        write=lambda _, key, value: (key, value),
    )
    assert_close(got, output.hidden_states[-1], **tiny.TOLERANCE)


def captured_before_norm(target: Target) -> Tensor:
    seen: list[Tensor] = []
    norm = target.model.base_model.norm
    handle = norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    target.capture(IDS[:1], MASK[:1])
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("bias", [False, True])
def test_head_of_some_tokens_is_rows_of_the_full_head(bias: bool) -> None:
    target = tiny.fresh_target()
    if bias:
        target.model.get_output_embeddings().bias = torch.nn.Parameter(
            torch.randn(64), requires_grad=False
        )
    ids = torch.tensor([7, 0, 63])
    states = torch.randn(2, 3, 48, generator=torch.Generator().manual_seed(0))
    full = target.head(states)
    assert full.shape == (2, 3, 64)
    assert full.dtype == torch.float32
    assert_close(target.head(states, ids), full[..., ids], **tiny.TOLERANCE)
    assert_close(target.logits(states, target.draft_head(ids)), full[..., ids], **tiny.TOLERANCE)
    assert target.draft_head(None) is target.model.get_output_embeddings()


def test_logits_are_float32_in_any_dtype() -> None:
    target = Target(tiny.model().to(torch.bfloat16), None, name="bf16")
    assert target.dtype == torch.bfloat16
    hidden = target.capture(IDS, MASK).hidden_BTE
    assert hidden.dtype == torch.bfloat16
    assert target.head(hidden).dtype == torch.float32


def test_embed() -> None:
    target = tiny.target()
    expected = target.model.get_input_embeddings().weight[IDS]
    assert_close(target.embed(IDS), expected, rtol=0, atol=0)


def test_the_model_is_frozen() -> None:
    model = tiny.model().train()
    target = Target(model, None, name="x")
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert target.device == torch.device("cpu")


def test_layer_state() -> None:
    state = tiny.target().layer_state(2)
    weights = tiny.target().model.state_dict()
    assert state
    for name, value in state.items():
        assert_close(value, weights[f"model.layers.2.{name}"], rtol=0, atol=0)


def test_identity() -> None:
    identity = tiny.target("qwen2").identity
    assert identity.model_type == "qwen2"
    assert (identity.num_layers, identity.hidden_size, identity.vocab_size) == (3, 48, 64)
    assert (identity.num_kv_heads, identity.head_dim, identity.kv_size) == (2, 8, 32)
    assert identity.tokenizer_hash is None
    assert tiny.target().max_positions == 256


def test_explicit_head_dim() -> None:
    assert tiny.fresh_target(head_dim=12).identity.kv_size == 48


def test_tokenizer_hash_tells_vocabularies_apart() -> None:
    first, same = (tiny.fresh_target(tokenizer=tiny.tokenizer()).identity for _ in range(2))
    other_tokenizer = tiny.tokenizer()
    other_tokenizer.add_tokens(["more"])
    other = tiny.fresh_target(tokenizer=other_tokenizer).identity
    assert first == same
    assert first.tokenizer_hash is not None
    assert first.tokenizer_hash != other.tokenizer_hash


@pytest.mark.parametrize(
    ("ids", "expected"), [(None, frozenset()), (7, frozenset({7})), ([7, 9], frozenset({7, 9}))]
)
@pytest.mark.parametrize("recorded_by", ["generation_config", "config"])
def test_stop_token_ids(
    ids: int | list[int] | None, expected: frozenset[int], recorded_by: str
) -> None:
    model = tiny.model()
    getattr(model, recorded_by).eos_token_id = ids
    assert Target(model, None, name="x").stop_token_ids == expected


def test_the_generation_config_wins() -> None:
    model = tiny.model()
    model.config.eos_token_id, model.generation_config.eos_token_id = 3, [4, 5]
    assert Target(model, None, name="x").stop_token_ids == {4, 5}


def test_a_family_that_is_not_covered() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=8))
    with pytest.raises(UnsupportedTargetError, match="gpt2"):
        Target(model, None, name="x")


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


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *(
            (
                "qwen2",
                {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": layers},
            )
            for layers in (0, 1, 3)
        ),
        ("qwen3", {"use_sliding_window": False}),
        ("mistral", {"sliding_window": None, "head_dim": 6}),
        ("phi3", {"sliding_window": 4, "rope_parameters": {"rope_type": "default"}}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 50.0}}),
        ("olmo2", {"attention_bias": True, "num_key_value_heads": 6}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}),
        ("qwen3", {"attention_bias": True, "num_key_value_heads": 1}),
        ("gemma3_text", {"attention_bias": True}),
        ("mistral", {"rope_parameters": YARN}),
    ],
    ids=str,
)
@pytest.mark.parametrize("packed", [False, True])
def test_settings_beside_the_usual_ones(packed: bool, family: str, changes: dict[str, Any]) -> None:
    target = tiny.fresh_target(family, **changes)
    if packed:
        accelerate(target)
    kv, hidden, _ = transformers_pass(target, IDS[0].tolist())
    result = target.capture(IDS[:1], MASK[:1])
    assert_close(result.kv_BTLK[0], kv, **tiny.TOLERANCE)
    assert_close(result.hidden_BTE[0], hidden, **tiny.TOLERANCE)
    prompt = IDS[1, :SHORT].tolist()
    drafter = tiny.random_drafter(target)
    got = moaspec.generate(target, prompt, drafter=drafter, max_new_tokens=8, num_target_layers=1)
    assert got.token_ids == tiny.own_text(target, prompt, 8)


def test_embeddings_are_scaled_where_the_model_scales_them() -> None:
    target = tiny.target("gemma3_text")
    weight = target.model.get_input_embeddings().weight
    assert_close(target.embed(IDS), weight[IDS] * 48**0.5)


def test_tied_and_soft_capped_head() -> None:
    target = tiny.fresh_target("gemma3_text", tie_word_embeddings=True)
    ids = torch.tensor([7, 0, 63])
    hidden = target.capture(IDS[:1], MASK[:1]).hidden_BTE
    _, _, logits = transformers_pass(target, IDS[0].tolist())
    assert target.draft_head(None).weight is target.model.get_input_embeddings().weight
    # The cap is 4: uncapped logits of this model reach far beyond it.
    assert float(logits.abs().max()) > 3.9
    assert_close(target.head(hidden)[0], logits, **tiny.TOLERANCE)
    assert_close(target.head(hidden, ids)[0], logits[:, ids], **tiny.TOLERANCE)


def test_only_masks_that_are_taken_as_they_are() -> None:
    model = tiny.model()
    model.set_attn_implementation("eager")
    with pytest.raises(UnsupportedTargetError, match="sdpa"):
        Target(model, None, name="x")
