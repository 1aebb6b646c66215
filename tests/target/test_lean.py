"""Lean layers compute what transformers' layers do."""

from __future__ import annotations

import copy

import pytest
import torch

import moaspec
from moaspec import Target
from moaspec.decode.cache import KVCache, tree_mask
from tiny import FAMILIES, PROMPTS, fresh_target, random_drafter

LONG = tuple(range(1, 60))


def cached_pass(target: Target, num_tokens: int) -> torch.Tensor:
    """Final states of the last `num_tokens` of a text whose start is in the cache."""
    cache = KVCache(
        num_layers=target.num_layers,
        num_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        dtype=target.dtype,
        device=target.device,
    )
    start, total = len(LONG) - num_tokens, len(LONG)
    cache.reserve(1, total)
    states = torch.empty(0)
    for first, last in ((0, start), (start, total)):
        tokens = last - first
        states = target.run(
            torch.tensor([LONG[first:last]]),
            torch.arange(first, last)[None],
            mask_B1TS=tree_mask([first], torch.ones(1, tokens, tokens).tril().bool(), last),
            write=cache.writer([0], [first], tokens, last),
            lengths_B=torch.tensor([total]),
        )
    return states


@pytest.mark.parametrize("num_tokens", [1, 3, 9])
@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_of_transformers_layers(family: str, num_tokens: int) -> None:
    plain = fresh_target(family)
    lean = Target(copy.deepcopy(plain.model), None, name="lean")
    lean.pack()
    assert lean.lean
    with torch.inference_mode():
        # The same sums of float32 products in another order, through all layers; states near 1.
        torch.testing.assert_close(
            cached_pass(lean, num_tokens), cached_pass(plain, num_tokens), atol=5e-5, rtol=0
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_in_float32_the_path_changes_no_token(family: str) -> None:
    plain, lean = fresh_target(family), fresh_target(family)
    lean.pack()
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
    lean.pack()
    assert torch.equal(lean.model.generate(ids_BT, **options), expected)


def test_hooks_on_layers_see_every_pass() -> None:
    lean, calls = fresh_target(), []
    lean.pack()
    lean.model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    result = moaspec.generate(lean, PROMPTS[0], max_new_tokens=6)
    assert len(calls) == result.num_rounds + 1
