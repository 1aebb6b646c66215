"""Lean layers compute what transformers' layers do."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import moaspec
import tiny
from bits import needs_packed_kernels
from moaspec import Target
from moaspec.backends.cpu.cpu_attention import MAX_QUERIES
from moaspec.backends.cpu.fused_layers import FusedStack
from moaspec.backends.fast_target import FastDecoderLayers, accelerate
from moaspec.drafting.kv_cache import KVCache, tree_mask
from tiny import (
    FAMILIES,
    PROMPTS,
    SWITCH,
    WINDOW,
    fresh_target,
    kernel_target,
    random_drafter,
)

pytestmark = pytest.mark.kernels

LONG = tuple(range(1, 60))
TEXTS = tuple(tuple((11 * step * i + step) % 64 for i in range(90)) for step in (1, 3, 5, 7))
"""Longer than all windows and switches, and than what kernels attend from at once."""
FUSED = ("llama", "qwen2", "qwen3", "mistral", "phi3")
"""Families whose layers kernels compute."""


def cached_pass(
    target: Target, num_tokens: int, text: Sequence[int] = LONG, watch: Any = None
) -> torch.Tensor:
    """Final states of the last `num_tokens` of a text whose start is in the cache."""
    cache = KVCache(target)
    start, total = len(text) - num_tokens, len(text)
    cache.reserve(1, total)
    states = torch.empty(0)
    for first, last in ((0, start), (start, total)):
        tokens = last - first
        states = target.run(
            torch.tensor([text[first:last]]),
            torch.arange(first, last)[None],
            mask_B1TS=tree_mask([first], torch.ones(1, tokens, tokens).tril().bool(), last),
            write=cache.writer([0], [first], tokens, last),
            lengths_B=torch.tensor([total]),
            watch=watch,
        )
    return states


@pytest.mark.parametrize("num_tokens", [1, 3, 9])
@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_of_transformers_layers(family: str, num_tokens: int) -> None:
    plain = fresh_target(family)
    lean = Target(copy.deepcopy(plain.model), None, name="lean")
    accelerate(lean)
    assert isinstance(lean.layers, FastDecoderLayers)
    with torch.inference_mode():
        # The same sums of float32 products in another order, through all layers; states near 1.
        torch.testing.assert_close(
            cached_pass(lean, num_tokens), cached_pass(plain, num_tokens), atol=5e-5, rtol=0
        )


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_in_float32_the_path_changes_no_token(family: str) -> None:
    plain, lean = fresh_target(family), fresh_target(family)
    accelerate(lean)
    drafter = random_drafter(plain)
    for prompt in PROMPTS:
        expected = moaspec.generate(plain, prompt, max_new_tokens=24).token_ids
        assert moaspec.generate(lean, prompt, max_new_tokens=24).token_ids == expected
        drafted = moaspec.generate(
            lean, prompt, drafter=drafter, tree=moaspec.Tree(3, 3, 8), max_new_tokens=24
        )
        assert drafted.token_ids == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_itself_still_works_as_transformers_users_know_it(family: str) -> None:
    lean = fresh_target(family)
    ids_BT = torch.tensor([PROMPTS[1]])
    options = {"max_new_tokens": 8, "do_sample": False}
    expected = lean.model.generate(ids_BT, **options)
    accelerate(lean)
    assert torch.equal(lean.model.generate(ids_BT, **options), expected)


def test_hooks_on_layers_see_every_pass() -> None:
    lean, calls = fresh_target(), []
    accelerate(lean)
    lean.model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    result = moaspec.generate(lean, PROMPTS[0], max_new_tokens=6)
    assert len(calls) == result.num_rounds + 1


def packed_target(family: str) -> Target:
    target = kernel_target(family)
    assert accelerate(target)
    return target


@needs_packed_kernels
@pytest.mark.parametrize("family", FAMILIES)
def test_families_that_kernels_compute(family: str) -> None:
    assert (tiny.fast_layers(packed_target(family)).fused is not None) is (family in FUSED)
    # Sizes that they do not take; nor is float32 theirs.
    small, single = fresh_target(family), kernel_target(family, dtype=torch.float32)
    small.model.bfloat16()
    accelerate(small)
    accelerate(single)
    assert tiny.fast_layers(small).fused is tiny.fast_layers(single).fused is None


@needs_packed_kernels
@pytest.mark.parametrize("head_dim", [16, 48])
def test_heads_that_kernels_do_not_take(head_dim: int) -> None:
    """A stack once wrote more numbers than such a head has."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    exact, plain, packed = (fresh_target(head_dim=head_dim, **sizes) for _ in range(3))
    for one in (exact, plain, packed):
        one.model.bfloat16()
    exact.model.float()  # of the same weights, rounded
    accelerate(packed)
    assert tiny.fast_layers(packed).fused is None
    assert_as_exact(exact, plain, packed, 9)


def assert_as_exact(exact: Target, plain: Target, packed: Target, num_tokens: int) -> None:
    """Compare with states in float32.

    Both others round to bf16, not always in the same place, so over some texts their errors are
    much the same; a wrong number would be far off.
    """
    errors = torch.zeros(2)
    with torch.inference_mode():
        for text in TEXTS:
            expected = cached_pass(exact, num_tokens, text)
            got = [cached_pass(one, num_tokens, text).float() for one in (plain, packed)]
            errors += torch.stack([(one - expected).square().sum() for one in got])
    plain_error, packed_error = errors.sqrt().tolist()
    assert packed_error < 1.5 * plain_error


@needs_packed_kernels
@pytest.mark.parametrize("num_tokens", [1, 3, 9, MAX_QUERIES, 70])
@pytest.mark.parametrize("family", FAMILIES)
def test_in_bf16_they_are_as_exact_as_transformers_layers(family: str, num_tokens: int) -> None:
    exact, plain = kernel_target(family), kernel_target(family)
    exact.model.float()  # of the same weights, rounded
    assert_as_exact(exact, plain, packed_target(family), num_tokens)


@needs_packed_kernels
@pytest.mark.parametrize("length", [SWITCH - 3, SWITCH, SWITCH + 1, 40])
def test_longrope_by_kernels(length: int) -> None:
    exact, plain, packed = kernel_target("phi3"), kernel_target("phi3"), packed_target("phi3")
    exact.model.float()
    errors = torch.zeros(2)
    with torch.inference_mode():
        for text in TEXTS:
            expected = cached_pass(exact, 7, text[:length])
            got = [cached_pass(one, 7, text[:length]).float() for one in (plain, packed)]
            errors += torch.stack([(one - expected).square().sum() for one in got])
    assert errors[1].sqrt() < 1.5 * errors[0].sqrt()  # as in `assert_as_exact`


@needs_packed_kernels
@pytest.mark.parametrize("num_tokens", [20, 70])
def test_what_lies_before_all_sliding_windows_is_not_read(num_tokens: int) -> None:
    target, text = packed_target("mistral"), TEXTS[0]
    other = (*text[:50], *((token + 1) % 64 for token in text[50:60]), *text[60:])
    # Each layer reads states that have read further back themselves.
    first_apart = 60 + target.num_layers * (WINDOW - 1)
    with torch.inference_mode():
        states, changed = (cached_pass(target, num_tokens, one)[0] for one in (text, other))
    assert torch.equal(states[first_apart - 90 :], changed[first_apart - 90 :])
    assert not torch.equal(states[70 - 90], changed[70 - 90])


@needs_packed_kernels
@pytest.mark.parametrize("num_tokens", [1, 9, MAX_QUERIES])
@pytest.mark.parametrize("family", FUSED)
def test_one_call_gives_the_bits_of_one_per_layer(
    family: str, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, calls, seen = packed_target(family), [], []
    run = FusedStack.run

    def counted(self: FusedStack, *args: Any, **options: Any) -> torch.Tensor:
        calls.append(1)
        return run(self, *args, **options)

    monkeypatch.setattr(FusedStack, "run", counted)
    text = TEXTS[1][: 2 * MAX_QUERIES - 40]
    with torch.inference_mode():
        at_once = cached_pass(target, num_tokens, text)
        # Mixed windows need masks by layer; a start of more tokens is not theirs.
        one_kind = len(set(target.layers.types)) == 1
        assert len(calls) == ((len(text) - num_tokens <= MAX_QUERIES) + 1 if one_kind else 0)
        calls.clear()
        apart = cached_pass(target, num_tokens, text, watch=lambda index, _: seen.append(index))
    assert calls == []
    assert seen == [*range(target.num_layers)] * 2
    assert torch.equal(at_once, apart)


@needs_packed_kernels
@pytest.mark.parametrize("family", FUSED)
def test_a_token_has_the_same_bits_alone_in_a_chain_and_in_a_batch(family: str) -> None:
    """So speculation never parts from plain decoding, ties included."""
    target, text = packed_target(family), TEXTS[2][:60]
    cache = KVCache(target)
    cache.reserve(4, 80)
    with torch.inference_mode():
        alone = [cached_pass(target, 1, text[:length])[0, 0] for length in range(50, 61)]
        chain = cached_pass(target, 11, text)[0]
        rows, starts = [3, 0, 2], [0, 49, 20]
        states = torch.empty(0)
        for first, last in (([0, 0, 0], 49), (starts, 11)):
            ids_BT = torch.tensor([[*text[one : one + last]] for one in first])
            positions_BT = torch.tensor(first)[:, None] + torch.arange(last)
            visible = max(first) + last
            states = target.run(
                ids_BT,
                positions_BT,
                mask_B1TS=tree_mask(first, torch.ones(3, last, last).tril().bool(), visible),
                write=cache.writer(rows, first, last, visible),
                lengths_B=torch.tensor([60, 60, 60]),
            )
    long_rope = family == "phi3"  # every length here is beyond its switch
    assert not long_rope or len(text) - 11 > SWITCH
    assert torch.equal(torch.stack(alone), chain)
    assert torch.equal(states[1], chain)


@needs_packed_kernels
@pytest.mark.parametrize("family", FUSED)
def test_hooks_on_fused_layers_see_every_pass(family: str) -> None:
    lean, calls = packed_target(family), []
    expected = moaspec.generate(lean, PROMPTS[0], max_new_tokens=6)
    handles = [
        register(lambda *_: calls.append(1))
        for register in (
            lean.model.model.layers[1].register_forward_hook,
            lean.model.model.layers[2].register_forward_pre_hook,
        )
    ]
    result = moaspec.generate(lean, PROMPTS[0], max_new_tokens=6)
    assert len(calls) == 2 * (result.num_rounds + 1)
    assert result.token_ids == expected.token_ids
    for handle in handles:
        handle.remove()
    moaspec.generate(lean, PROMPTS[0], max_new_tokens=6)
    assert len(calls) == 2 * (result.num_rounds + 1)


@needs_packed_kernels
@pytest.mark.parametrize("family", FUSED)
def test_fused_models_still_work_as_transformers_users_know_them(family: str) -> None:
    plain, fused = kernel_target(family), packed_target(family)
    ids_BT = torch.tensor([TEXTS[0][:30]])
    ones_BT = torch.ones_like(ids_BT)
    with torch.inference_mode():
        expected, got = (one.model(ids_BT).logits.float() for one in (plain, fused))
        # Products that are rounded to bf16 in both, of sums in another order.
        assert (got - expected).norm() < 0.1 * expected.norm()
        # Uncached passes, for training, are the kernels' but for their attention.
        expected, got = (one.capture(ids_BT, ones_BT).hidden_BTE.float() for one in (plain, fused))
        assert (got - expected).norm() < 0.1 * expected.norm()


@needs_packed_kernels
def test_gradients_flow_through_fused_layers() -> None:
    """As training through reused layers needs them."""
    plain, fused = kernel_target(), packed_target("llama")
    plain.model.float()
    states_BTE = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    gradients: list[torch.Tensor] = []
    for target in (plain, fused):
        x_BTE = states_BTE.to(target.dtype).requires_grad_()
        cache = KVCache(target)
        cache.reserve(1, 5)
        out = target.layers.run(
            x_BTE,
            torch.arange(5)[None],
            num=2,
            mask_B1TS=torch.ones(1, 1, 5, 5).tril().bool(),
            write=lambda _, key, value: (key, value),
        )
        gradients += torch.autograd.grad(out.float().square().sum(), x_BTE)
    expected, got = (one.float() for one in gradients)
    # Some tens of roundings to bf16, of 2 ** -9 each, through two layers and back.
    assert (got - expected).norm() < 0.1 * expected.norm()
