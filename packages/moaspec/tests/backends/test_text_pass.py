"""A pass over one text in one call has the states and choices of the pass in several."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import moaspec
from bits import needs_packed_kernels
from moaspec import Target
from moaspec.backends.cpu.cpu_attention import MAX_ATTENDED
from moaspec.backends.fast_target import FastDecoderLayers, accelerate
from moaspec.drafting.kv_cache import KVCache, tree_mask
from moaspec.target.decoder_layers import Slots, TextPass
from moaspec_core.drafting.draft_tree import ancestor_matrix
from tiny import PROMPTS, kernel_target

pytestmark = [pytest.mark.kernels, needs_packed_kernels]

TEXT = tuple((7 * i + 3) % 64 for i in range(300))  # longer than the first table of angles
START = 290
TOKENS = (5, 9, 9, 2, 61, *TEXT[:195])
TREES = {
    "plain": (-1,),
    "chain": (-1, 0, 1, 2, 3),
    "tree": (-1, 0, 0, 2, 1),
    "prompt": tuple(range(-1, 199)),
}


def accelerated(family: str = "llama") -> Target:
    target = kernel_target(family)
    accelerate(target)
    return target


def filled_cache(target: Target) -> KVCache:
    """Row 1 has the keys and values of the text's first tokens."""
    cache = KVCache(target)
    cache.reserve(2, START + len(TOKENS))
    target.run(
        torch.tensor([TEXT[:START]]),
        torch.arange(START)[None],
        mask_B1TS=tree_mask([0], torch.ones(1, START, START).tril().bool(), START),
        write=cache.writer([1], [0], START, START),
    )
    return cache


def by_several_calls(
    target: Target, cache: KVCache, parents: Sequence[int]
) -> tuple[Tensor, list[int]]:
    sees = torch.from_numpy(ancestor_matrix(parents))
    count, stop = len(parents), START + len(parents)
    states_1TE = target.run(
        torch.tensor([TOKENS[:count]]),
        START + sees.sum(1)[None] - 1,
        mask_B1TS=tree_mask([START], sees[None], stop),
        write=cache.writer([1], [START], count, stop),
    )
    return states_1TE[0], target.best(states_1TE[0]).tolist()


def by_one_call(
    text_pass: TextPass,
    cache: KVCache,
    parents: Sequence[int],
    choices: int,
    finished: int | None = None,
) -> tuple[Tensor, list[int] | None] | None:
    count = len(parents)
    slots = Slots(cache.data, [1], [START], START + count)
    finished = count if finished is None else finished
    return text_pass.run(TOKENS[:count], parents, slots, finished=finished, choices=choices)


@pytest.mark.parametrize("finished", [1, 2, 5])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_states_that_nobody_needs_are_left_unfinished(family: str, finished: int) -> None:
    target, parents = accelerated(family), TREES["tree"]
    text_pass, first, second = target.text_pass(), filled_cache(target), filled_cache(target)
    assert text_pass is not None
    with torch.inference_mode():
        states_TE, chosen = by_several_calls(target, first, parents)
        found = by_one_call(text_pass, second, parents, 1, finished)
    assert found is not None
    assert torch.equal(found[0], states_TE[len(parents) - finished :])
    assert found[1] == chosen[-1:]
    assert torch.equal(first.data, second.data)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", TREES)
def test_states_choices_and_keys_have_the_same_bits(family: str, kind: str) -> None:
    target, parents = accelerated(family), TREES[kind]
    text_pass, first, second = target.text_pass(), filled_cache(target), filled_cache(target)
    assert text_pass is not None
    with torch.inference_mode():
        states_TE, chosen = by_several_calls(target, first, parents)
        for choices in (len(parents), 1, 0):  # the second time the structure is used again
            found = by_one_call(text_pass, second, parents, choices)
            assert found is not None
            assert torch.equal(found[0], states_TE)
            assert found[1] == chosen[len(chosen) - choices :]
    assert torch.equal(first.data, second.data)


def test_a_cache_that_grew_is_read_where_it_is_now() -> None:
    target, parents = accelerated(), TREES["tree"]
    text_pass, cache = target.text_pass(), filled_cache(target)
    assert text_pass is not None
    with torch.inference_mode():
        before = by_one_call(text_pass, cache, parents, 5)
        cache.reserve(4, 3 * START)
        after = by_one_call(text_pass, cache, parents, 5)
    assert before is not None
    assert after is not None
    assert torch.equal(before[0], after[0])
    assert before[1] == after[1]


def test_angles_in_use_are_not_freed_where_another_engine_needs_more() -> None:
    target, parents = accelerated(), TREES["plain"]
    text_pass, cache = target.text_pass(), filled_cache(target)
    assert text_pass is not None
    assert isinstance(target.layers, FastDecoderLayers)
    last = target.layers.last(target.num_layers)
    assert last is not None
    with torch.inference_mode():
        by_one_call(text_pass, cache, parents, 1)
        in_use = weakref.ref(last.angles.reaching(1000)[0])
        by_one_call(text_pass, cache, parents, 1)
        last.angles.reaching(4000)
    assert in_use() is not None


def test_a_new_embedding_is_read() -> None:
    target, parents = accelerated(), TREES["tree"]
    text_pass, first, second = target.text_pass(), filled_cache(target), filled_cache(target)
    assert text_pass is not None
    table = target.model.base_model.embed_tokens
    with torch.inference_mode():
        by_one_call(text_pass, second, parents, 5)
        table.weight = nn.Parameter(table.weight.detach().flip(0), requires_grad=False)
        states_TE, chosen = by_several_calls(target, first, parents)
        found = by_one_call(text_pass, second, parents, 5)
    assert found is not None
    assert torch.equal(found[0], states_TE)
    assert found[1] == chosen


@pytest.mark.parametrize(
    "tokens",
    [[1] * (MAX_ATTENDED + 1), [64], [-1]],
    ids=["too many", "beyond the vocabulary", "negative"],
)
def test_what_it_cannot_do_is_left_to_the_other_pass(tokens: list[int]) -> None:
    target = accelerated()
    text_pass, cache = target.text_pass(), KVCache(target)
    assert text_pass is not None
    cache.reserve(1, 100)
    slots = Slots(cache.data, [0], [0], len(tokens))
    assert text_pass.run(tokens, range(-1, len(tokens) - 1), slots, finished=1, choices=1) is None


@pytest.mark.parametrize("part", ["embed_tokens", "layer", "norm"])
def test_hooks_that_come_later_are_called(part: str) -> None:
    target, seen = accelerated(), []
    base = target.model.base_model
    module = base.layers[0] if part == "layer" else getattr(base, part)
    plain = moaspec.generate(target, PROMPTS[0], max_new_tokens=4).token_ids
    handle = module.register_forward_hook(lambda *_: seen.append(1))
    assert moaspec.generate(target, PROMPTS[0], max_new_tokens=4).token_ids == plain
    handle.remove()
    assert len(seen) == 4


@pytest.mark.parametrize("family", ["gemma3_text", "mistral", "olmo2", "phi3", "qwen3"])
def test_targets_that_need_other_passes_have_none(family: str) -> None:
    assert accelerated(family).text_pass() is None
