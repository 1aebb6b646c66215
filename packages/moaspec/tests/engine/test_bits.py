"""In bf16 by kernels, speculation gives the very ids of plain decoding.

A token's numbers are the same bits in a pass over one token, a chain, a tree or a batch. So ties,
of which bf16 has many, are broken alike, and sampling draws the same; for prompts of so many tokens
as kernels attend from at once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import moaspec
import tiny
from bits import needs_packed_kernels
from moaspec import Target
from moaspec.backends.cpu.cpu_attention import MAX_QUERIES
from moaspec.backends.cpu.fused_drafting import FusedDrafter
from moaspec.backends.fast_moa_proposer import MAX_KERNEL_ROWS, FastMoAProposer
from moaspec.backends.fast_target import accelerate
from moaspec.drafting.kv_cache import KVCache
from moaspec.drafting.moa_proposer import MoAProposer
from moaspec.engine.local_verifier import LocalVerifier
from moaspec.model.layers import FoldedPositions
from moaspec.model.moa import MoADrafter
from moaspec.target.partial import PartialTarget, excerpt_tensors
from moaspec_core.drafting.draft_tree import DraftTree
from moaspec_core.drafting.protocols import RequestText
from moaspec_core.drafting.tree_shapes import PricedTree
from tiny import PROMPTS, kernel_target, random_drafter

pytestmark = [needs_packed_kernels, pytest.mark.kernels]

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "phi3")
ALL_PROMPTS = (*PROMPTS, *(tuple((7 * step * i + 3) % 64 for i in range(n)) for step, n in (
    (1, 40), (3, MAX_QUERIES),
)))  # fmt: skip
SHAPES = (moaspec.Chain(4), moaspec.Tree(3, 3, 8))
LENGTH = 30
DISTRIBUTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_p": 0.95, "seed": 5},
    "penalised": {"repetition_penalty": 1.3},
}


@functools.cache
def fused_target(family: str) -> Target:
    target = kernel_target(family)
    assert accelerate(target)
    assert tiny.fast_layers(target).fused is not None
    return target


@functools.cache
def parts(
    family: str, exits: tuple[int, ...] = (0,), sa_layers: int = 1
) -> tuple[Target, MoADrafter]:
    """A fused target, and a drafter that disagrees with it."""
    target = fused_target(family)
    drafter = random_drafter(target, exits=exits, sa_layers=sa_layers).bfloat16()
    for n in drafter.exits:
        drafter.adapter(int(n)).scale.fill_(3.0)  # type: ignore[union-attr]
    return target, drafter


def text(family: str, prompt: Sequence[int], distribution: str, **options: Any) -> list[int]:
    result = moaspec.generate(
        parts(family)[0], prompt, max_new_tokens=LENGTH, **DISTRIBUTIONS[distribution], **options
    )
    return list(result.token_ids)


@functools.cache
def plain_texts(family: str, distribution: str) -> list[list[int]]:
    """Each prompt decoded plainly and by itself."""
    return [text(family, prompt, distribution) for prompt in ALL_PROMPTS]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize(
    ("shape", "num_target_layers"), [(SHAPES[0], 0), (SHAPES[1], 0), (SHAPES[1], 2)], ids=str
)
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_change_no_id(
    family: str, shape: moaspec.Tree, num_target_layers: int, distribution: str
) -> None:
    options = {"drafter": parts(family)[1], "tree": shape, "num_target_layers": num_target_layers}
    drafted = [text(family, prompt, distribution, **options) for prompt in ALL_PROMPTS]
    assert drafted == plain_texts(family, distribution)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("shape", [None, *SHAPES], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_batches_change_no_id(family: str, shape: moaspec.Tree | None, distribution: str) -> None:
    target, drafter = parts(family)
    drafted: dict[str, Any] = {} if shape is None else {"drafter": drafter, "tree": shape}
    results = moaspec.generate(
        target, ALL_PROMPTS, max_new_tokens=LENGTH, **drafted, **DISTRIBUTIONS[distribution]
    )
    assert [result.token_ids for result in results] == plain_texts(family, distribution)


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_out_of_the_text_change_no_id(family: str) -> None:
    for drafter in (moaspec.NgramProposer(), parts(family)[1]):
        options = {"drafter": drafter, "free_branches": True}
        drafted = [text(family, prompt, "greedy", **options) for prompt in ALL_PROMPTS]
        assert drafted == plain_texts(family, "greedy")


@pytest.mark.parametrize("num_threads", [1, 2])
def test_threads_change_no_id(num_threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        options = {"drafter": parts("llama")[1], "tree": SHAPES[1]}
        drafted = [text("llama", prompt, "greedy", **options) for prompt in ALL_PROMPTS]
        assert drafted == plain_texts("llama", "greedy")
    finally:
        torch.set_num_threads(before)


def test_texts_are_no_repetition() -> None:
    """Which would hide a difference, as it comes back to the same."""
    for family in FAMILIES:
        for one in plain_texts(family, "sampled"):
            assert len(set(one)) > 5


DRAWN = [
    moaspec.Chain(1),
    moaspec.Chain(5),
    moaspec.Tree(1, 4, 4),
    moaspec.Tree(3, 2, 6),
    moaspec.Tree(6, 8, 62),
    PricedTree(6, 4, 16, prices=tuple(0.05 * n for n in range(1, 17)), least=0.02),
]


DRAFTED_BY: dict[str, moaspec.SamplingParams] = {
    "greedy": moaspec.SamplingParams(),
    "sampled": moaspec.SamplingParams(temperature=0.9, seed=5),
    "cold": moaspec.SamplingParams(temperature=1e-300, seed=2**64 - 1, choice=2),
    "hot": moaspec.SamplingParams(temperature=30.0, seed=6),
}


def both_ways(monkeypatch: pytest.MonkeyPatch, *args: Any, **options: Any) -> int:
    """Draft in one call and by levels, which give the same: how often one call was enough."""
    calls: list[int] = []
    draft_tree = FusedDrafter.draft_tree

    def counted(*args: Any) -> Any:
        calls.append(1)
        return draft_tree(*args)

    monkeypatch.setattr(FusedDrafter, "draft_tree", counted)
    in_one_call = drafts(*args, **options)
    assert len(calls) in {0, len(in_one_call)}
    monkeypatch.setattr(FastMoAProposer, "grow", MoAProposer.grow)
    by_levels = drafts(*args, **options)
    for got, expected in zip(in_one_call, by_levels, strict=True):
        assert paths(got) == paths(expected)
        assert (got.levels, got.num_expanded) == (expected.levels, expected.num_expanded)
    return len(calls)


@pytest.mark.parametrize("distribution", DRAFTED_BY)
@pytest.mark.parametrize("shape", DRAWN, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_in_one_call_is_what_levels_draft(
    family: str, shape: moaspec.Tree, distribution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert both_ways(monkeypatch, family, shape, DRAFTED_BY[distribution])


@pytest.mark.parametrize("behind", [0, 2])
@pytest.mark.parametrize(
    ("exits", "num_target_layers"), [((0,), 1), ((0,), 3), ((0, 2), 0), ((0, 2), 2)], ids=str
)
@pytest.mark.parametrize("shape", [DRAWN[1], DRAWN[3], DRAWN[4]], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_so_it_is_through_exits_and_reused_layers(
    family: str,
    shape: moaspec.Tree,
    exits: tuple[int, ...],
    num_target_layers: int,
    behind: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    distribution = DRAFTED_BY["sampled" if behind else "greedy"]
    options = {"exits": exits, "num_target_layers": num_target_layers, "behind": behind}
    options["sa_layers"] = 2 if behind else 1
    assert both_ways(monkeypatch, family, shape, distribution, **options)


@pytest.mark.parametrize("sa_layers", [1, 2, 3])
@pytest.mark.parametrize(("num_target_layers", "behind"), [(0, 0), (0, 3), (2, 0), (2, 200)])
def test_so_it_is_after_a_long_text(
    num_target_layers: int, behind: int, sa_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = [5 * i % 64 for i in range(430)]
    assert both_ways(
        monkeypatch,
        *("llama", DRAWN[3]),
        num_target_layers=num_target_layers,
        behind=behind,
        sa_layers=sa_layers,
        prompts=[text],
    )


@pytest.mark.parametrize("family", ["phi3", "qwen3"])
def test_layers_that_go_by_a_window_or_the_texts_length_are_reused_level_by_level(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not both_ways(monkeypatch, family, DRAWN[3], DRAFTED_BY["greedy"], num_target_layers=2)


def test_a_device_drafts_what_its_whole_target_does() -> None:
    target, drafter = parts("llama", (0, 2))
    whole = kernel_target("llama")
    excerpt = PartialTarget(
        whole.config,
        excerpt_tensors(whole, num_layers=2, head_token_ids=None),
        None,
        name="excerpt",
        num_layers=2,
        head_token_ids=None,
        stop_token_ids=frozenset(),
        dtype=torch.bfloat16,
    )
    # The target's was rounded with all the rest of it.
    inv_freq = whole.model.base_model.rotary_emb.inv_freq
    excerpt.model.base_model.rotary_emb.inv_freq.copy_(inv_freq)
    assert accelerate(excerpt)
    local = FastMoAProposer(drafter, target, num_target_layers=2)
    local.share_target_cache(LocalVerifier(target).cache)
    on_device = FastMoAProposer(drafter, excerpt, num_target_layers=2)
    on_device.share_target_cache(KVCache(target, drafter.config.self_attention, num_layers=2))
    assert on_device.kernel_parts() is not None
    for row, prompt in enumerate(ALL_PROMPTS):
        for drafting in (local, on_device):
            _read(drafting, target, row, prompt)
        texts = [RequestText(row, prompt)]
        assert on_device.propose(texts, DRAWN[3]) == local.propose(texts, DRAWN[3])


@pytest.mark.parametrize("num_target_layers", [0, 2])
def test_hooks_between_rounds_are_called(num_target_layers: int) -> None:
    target, drafter = parts("llama", (0, 2))
    drafting = FastMoAProposer(drafter, target, num_target_layers=num_target_layers)
    drafting.share_target_cache(LocalVerifier(target).cache)
    _read(drafting, target, 0, PROMPTS[0])
    texts, calls, base = [RequestText(0, PROMPTS[0])], list[int](), target.model.base_model
    (before,) = drafting.propose(texts, DRAWN[3])
    watched = base.layers[-1] if num_target_layers else base.embed_tokens
    handle = watched.register_forward_hook(lambda *_: calls.append(1))
    try:
        (meanwhile,) = drafting.propose(texts, DRAWN[3])
    finally:
        handle.remove()
    assert calls
    assert paths(meanwhile) == paths(before)
    calls.clear()
    assert drafting.propose(texts, DRAWN[3]) == [before]
    assert not calls


def test_another_version_drafts_what_a_new_proposer_does() -> None:
    target, drafter = parts("llama", (0, 2))
    drafting = FastMoAProposer(random_drafter(target, seed=5).bfloat16(), target)
    texts, trees = [RequestText(0, PROMPTS[0])], []
    for adopted in (False, True):
        if adopted:
            drafting.adopt(drafter)
        for one in (drafting, FastMoAProposer(drafter, target, num_target_layers=0)):
            _read(one, target, 0, PROMPTS[0])
            trees.append(one.propose(texts, DRAWN[3]))
    assert trees[0] != trees[1]
    assert trees[2] == trees[3]


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.1}, {"min_p": 0.2}], ids=str)
@pytest.mark.parametrize("family", FAMILIES[:2])
def test_a_tree_in_one_call_has_what_filters_leave(
    family: str, filters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's way fills a tree up with drafts of no hope."""
    sampling = moaspec.SamplingParams(temperature=0.9, seed=5, **filters)
    in_one_call = drafts(family, moaspec.Tree(2, 4, 20), sampling)
    monkeypatch.setattr(FastMoAProposer, "grow", MoAProposer.grow)
    by_levels = drafts(family, moaspec.Tree(2, 4, 20), sampling)
    for few, more in zip(in_one_call, by_levels, strict=True):
        assert 0 < len(few.tokens) <= len(more.tokens)
        assert paths(few) <= paths(more)
    assert any(len(few.tokens) < 20 for few in in_one_call)


@pytest.mark.parametrize("num_target_layers", [0, 2])
@pytest.mark.parametrize("rows", [2, 3, MAX_KERNEL_ROWS, MAX_KERNEL_ROWS + 1])
def test_rows_together_draft_what_they_draft_alone(rows: int, num_target_layers: int) -> None:
    """Row by row in calls of their own, or all of them by PyTorch."""
    target, drafter = parts("llama")

    def new_drafting() -> MoAProposer:
        made = FastMoAProposer(drafter, target, num_target_layers=num_target_layers)
        made.share_target_cache(LocalVerifier(target).cache)
        return made

    distributions = list(DRAFTED_BY.values())
    texts = [
        RequestText(i, ALL_PROMPTS[i % len(ALL_PROMPTS)], distributions[i % len(distributions)])
        for i in range(rows)
    ]
    drafting = new_drafting()
    for one in texts:
        _read(drafting, target, one.cache_row, one.token_ids)
    together = drafting.propose(texts, moaspec.Tree(3, 3, 8))
    alone = []
    for one in texts:
        drafting = new_drafting()
        _read(drafting, target, one.cache_row, one.token_ids)
        alone += drafting.propose([one], moaspec.Tree(3, 3, 8))
    assert together == alone


@pytest.mark.parametrize("tokens", [0, 1, 5, 64, 150])
@pytest.mark.parametrize("family", FAMILIES)
def test_encoding_in_one_call_is_what_its_parts_give(family: str, tokens: int) -> None:
    target, drafter = parts(family)
    module = FastMoAProposer(drafter, target).module
    assert module.encoder.in_one_call is not None
    generator = torch.Generator().manual_seed(tokens)
    size = (1, tokens, target.num_layers, target.identity.kv_size)
    kv_1TLK = torch.randn(size, generator=generator).bfloat16()
    positions_1T = torch.arange(7, 7 + tokens)[None]
    with torch.inference_mode():
        expected = module.project_kv(module.aggregate(kv_1TLK), positions_1T)
        for got, wanted in zip(module.encode(kv_1TLK, positions_1T), expected, strict=True):
            assert torch.equal(got, wanted)


def test_encoding_in_one_call_folds_positions() -> None:
    target, drafter = parts("llama")
    folding = MoADrafter(dataclasses.replace(drafter.config, trained_positions=16))
    folding.load_state_dict(drafter.state_dict())
    module = FastMoAProposer(folding.bfloat16().eval(), target).module
    assert module.encoder.in_one_call is not None
    size = (1, 9, target.num_layers, target.identity.kv_size)
    kv_1TLK, positions_1T = torch.randn(size).bfloat16(), torch.arange(30, 39)[None]
    with torch.inference_mode():
        folded_1TLK = FoldedPositions(folding.config)(kv_1TLK, positions_1T)
        expected = module.project_kv(module.aggregate(folded_1TLK), positions_1T)
        for got, wanted in zip(module.encode(kv_1TLK, positions_1T), expected, strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("trained", [0, 16])  # keys of later positions are turned first
@pytest.mark.parametrize(("start", "stop"), [(0, 1), (7, 12), (0, 16), (3, 150), (5, 5)])
def test_encoding_from_the_cache_is_that_of_a_copy(start: int, stop: int, trained: int) -> None:
    target, drafter = parts("llama")
    folding = MoADrafter(dataclasses.replace(drafter.config, trained_positions=trained))
    folding.load_state_dict(drafter.state_dict())
    proposer = FastMoAProposer(folding.bfloat16().eval(), target)
    cache, tokens = LocalVerifier(target).cache, range(start, stop)
    cache.reserve(3, 150)
    cache.data.copy_(torch.randn(cache.data.shape))
    with torch.inference_mode():
        proposer.encode_and_append(cache, 1, tokens)
        got = proposer.memory.data[0, :, 1, None, :, start:stop]
        copied = cache.features(1, start, stop)
        expected = proposer.module.encode(copied, torch.arange(start, stop)[None])
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    """Each draft, as the tokens from the root to it."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return set(found)


def _read(
    drafting: MoAProposer, target: Target, row: int, text: Sequence[int], behind: int = 0
) -> None:
    """Let it read what was verified: all but the newest token, or tokens."""
    known = torch.tensor([text[: max(1, len(text) - 1 - behind)]])
    kv_1TLK = target.capture(known, torch.ones_like(known)).kv_BTLK
    size = known.shape[1]
    (features,) = drafting.encode(kv_1TLK, torch.arange(size)[None], [size])
    drafting.close(row)
    drafting.append_features(row, features)
    if drafting.target_cache is not None:
        kv_TLH2D = kv_1TLK[0].unflatten(-1, (target.num_kv_heads, 2, -1))
        kv_2LHTD = kv_TLH2D.permute(3, 1, 2, 0, 4)
        drafting.target_cache.reserve(row + 1, size)
        layers = len(drafting.target_cache.data)
        drafting.target_cache.append(row, 0, *kv_2LHTD[:, -layers:])


def drafts(
    family: str,
    shape: moaspec.Tree,
    sampling: moaspec.SamplingParams = DRAFTED_BY["greedy"],
    *,
    exits: tuple[int, ...] = (0,),
    num_target_layers: int = 0,
    behind: int = 0,
    sa_layers: int = 1,
    prompts: Sequence[Sequence[int]] = ALL_PROMPTS,
) -> list[DraftTree]:
    """What is drafted after the ends of all prompts, as each grows token by token."""
    target, drafter = parts(family, exits, sa_layers)
    drafting = FastMoAProposer(drafter, target, num_target_layers=num_target_layers)
    if num_target_layers:
        drafting.share_target_cache(LocalVerifier(target).cache)
    drafted = []
    for row, prompt in enumerate(prompts):
        for length in range(max(2, len(prompt) - 3), len(prompt) + 1):
            _read(drafting, target, row, prompt[:length], behind)
            ends = [switch for switch in target.rope_switches if switch >= length]
            limited = shape.limited(min(ends) - length) if ends else shape  # as `Engine` does
            if limited is not None:
                drafted += drafting.propose([RequestText(row, prompt[:length], sampling)], limited)
    return drafted
