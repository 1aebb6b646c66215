"""Drafting: what runs, what is cached, and that it is what training computes."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import moaspec
import tiny
from block_drafts import block_logits
from moaspec.backends.fast_drafter import prepared
from moaspec.backends.fast_moa_proposer import FastMoAProposer
from moaspec.backends.linear_backends import can_pack
from moaspec.drafting.moa_proposer import MoAProposer
from moaspec.model.moa import ExitAdapter, MoADrafter
from moaspec.target.target import Target
from moaspec_core.drafting.draft_tree import DraftTree, Tree, ancestor_matrix
from moaspec_core.drafting.protocols import RequestText
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_core.errors import InputError, MismatchError
from moaspec_train.students.drafter_sizes import DrafterSizes, drafter_config


def test_the_same_text_may_be_drafted_for_twice() -> None:
    target, drafter = tiny.target(), tiny.random_drafter(tiny.target())
    drafting = FastMoAProposer(drafter, target)
    (features,) = drafting.encode(*_verified(target, tiny.PROMPTS[1][:-1]))
    drafting.append_features(0, features)
    row = RequestText(0, tiny.PROMPTS[1])
    first, second = (drafting.propose([row], Chain(3)) for _ in range(2))
    assert first == second


def _verified(target: Target, tokens: Sequence[int]) -> tuple[Tensor, Tensor, list[int]]:
    """Keys and values of a text, its positions and its length."""
    ids_1T = torch.tensor([list(tokens)])
    read = target.capture(ids_1T, torch.ones_like(ids_1T))
    return read.kv_BTLK, torch.arange(len(tokens))[None], [len(tokens)]


def training_log_q(
    target: Target, drafter: MoADrafter, text: list[int], drafts: list[int], layers: int
) -> Tensor:
    """Log q after the root and after each draft, by one pass of the training code."""
    last_verified = len(text) - 2
    ids = torch.tensor([[*text, *drafts]])
    start = torch.arange(ids.shape[1]).clamp(max=last_verified)[None]
    logits = block_logits(
        drafter, target, ids, torch.ones_like(ids), start, num_target_layers=layers
    )
    return logits[0, last_verified + 1 :].log_softmax(-1)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("layers", [0, 1, 2, 3])
@pytest.mark.parametrize("vocabulary", [None, (3, 8, 9, 21, 40, 63)])
def test_drafting_a_chain_is_the_training_pass(
    family: str, layers: int, vocabulary: tuple[int, ...] | None
) -> None:
    target = tiny.target(family)
    ids = None if vocabulary is None else torch.tensor(vocabulary)
    drafter = tiny.random_drafter(target, draft_token_ids=ids)
    text, tree = tiny.draft(target, drafter, tiny.PROMPTS[1], Chain(6), num_target_layers=layers)
    log_q = training_log_q(target, drafter, text, list(tree.tokens), layers)
    assert list(tree.tokens) == log_q[:-1].argmax(-1).tolist()
    assert tree.parents == (-1, 0, 1, 2, 3, 4)
    assert vocabulary is None or set(tree.tokens) <= set(vocabulary)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize(("layers", "sa_layers"), [(0, 1), (2, 1), (0, 3)])
@pytest.mark.parametrize("chunk", [512, 5])
def test_every_round_drafts_what_the_training_pass_does(
    family: str, layers: int, sa_layers: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past the window, before and after LongRoPE's switch, whatever the batch mates are.

    And in however many passes a text is read.
    """
    monkeypatch.setattr("moaspec.drafting.tree_proposer.READ_CHUNK_TOKENS", chunk)
    target = tiny.target(family)
    drafter = tiny.random_drafter(target, sa_layers=sa_layers)
    propose = MoAProposer.propose
    lengths: list[int] = []

    def checked(self: MoAProposer, rows: list[RequestText], shape: Tree) -> list[DraftTree]:
        trees = propose(self, rows, shape)
        for row, tree in zip(rows, trees, strict=True):
            text, drafts = list(row.token_ids), list(tree.tokens)
            log_q = training_log_q(target, drafter, text, drafts, layers)
            assert drafts == log_q[:-1].argmax(-1).tolist()
            lengths.append(len(text))
        return trees

    monkeypatch.setattr(MoAProposer, "propose", checked)
    moaspec.generate(
        target,
        tiny.PROMPTS[1:],
        drafter=drafter,
        max_new_tokens=16,
        tree=Chain(3),
        num_target_layers=layers,
    )
    assert min(lengths) < tiny.WINDOW
    assert max(lengths) > tiny.SWITCH + tiny.WINDOW


def best_tree(
    target: Target, drafter: MoADrafter, text: list[int], shape: Tree, layers: int
) -> set[tuple[int, ...]]:
    """EAGLE-2's tree by brute force: paths of the kept nodes, each scored without any cache."""

    @functools.cache
    def children(path: tuple[int, ...]) -> dict[int, float]:
        log_q = training_log_q(target, drafter, text, list(path), layers)[-1]
        scores, tokens = log_q.topk(shape.breadth)
        return dict(zip(tokens.tolist(), scores.tolist(), strict=True))

    scored: dict[tuple[int, ...], float] = {}
    frontier: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(shape.depth):
        grown = {
            (*path, token): score + log_q
            for path, score in frontier.items()
            for token, log_q in children(path).items()
        }
        scored |= grown
        best = sorted(grown, key=lambda path: -grown[path])[: shape.breadth]
        frontier = {path: grown[path] for path in best}
    return set(sorted(scored, key=lambda path: -scored[path])[: shape.total_tokens])


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    matrix = ancestor_matrix(tree.parents)
    return {
        tuple(token for token, seen in zip(tree.tokens, row, strict=True) if seen) for row in matrix
    }


@pytest.mark.parametrize("layers", [0, 2])
@pytest.mark.parametrize("shape", [Tree(2, 2, 4), Tree(3, 3, 8), Tree(4, 2, 6)], ids=str)
def test_drafting_a_tree_keeps_the_best_paths(layers: int, shape: Tree) -> None:
    target = tiny.target("qwen2")
    drafter = tiny.random_drafter(target)
    text, tree = tiny.draft(target, drafter, tiny.PROMPTS[0], shape, num_target_layers=layers)
    assert len(tree.tokens) == shape.total_tokens
    assert max(tree.depths) <= shape.depth
    assert paths(tree) == best_tree(target, drafter, text, shape, layers)


def counted(target: Target) -> Counter[str]:
    """Counts passes through each of the target's layers from now on."""
    counts: Counter[str] = Counter()

    def count(name: str) -> None:
        counts[name] += 1

    for index, layer in enumerate(target.model.base_model.layers):
        layer.register_forward_hook(lambda *_, name=f"layer {index}": count(name))
    return counts


@pytest.mark.parametrize("layers", [0, 1])
def test_one_target_pass_a_round(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny.fresh_target()
    counts = counted(target)
    drafting_counts: Counter[str] = Counter()
    propose = MoAProposer.propose

    def watched(self: MoAProposer, rows: list[RequestText], shape: Tree) -> list[DraftTree]:
        before = counts.copy()
        trees = propose(self, rows, shape)
        drafting_counts.update(counts - before)
        return trees

    monkeypatch.setattr(MoAProposer, "propose", watched)
    result = moaspec.generate(
        target,
        tiny.PROMPTS[0],
        drafter=tiny.random_drafter(target),
        max_new_tokens=10,
        tree=Chain(3),
        num_target_layers=layers,
    )
    assert counts["layer 0"] == result.num_rounds + 1
    assert set(drafting_counts) == ({"layer 2"} if layers else set())


def test_encode_splits_features_by_row() -> None:
    target = tiny.target()
    drafting = FastMoAProposer(tiny.random_drafter(target), target)
    ids = torch.tensor([[4, 5, 6, 7, 8]])
    kv = target.capture(ids, torch.ones_like(ids)).kv_BTLK
    together = drafting.encode(kv, torch.arange(5)[None], [2, 3])
    assert [key.shape[2] for key, _ in together] == [2, 3]
    (tail,) = drafting.encode(kv[:, 2:], torch.tensor([[2, 3, 4]]), [3])
    for got, expected in zip(together[1], tail, strict=True):
        assert_close(got, expected, **tiny.TOLERANCE)


def test_observing_in_pieces_is_observing_at_once() -> None:
    target = tiny.target()
    drafter = tiny.random_drafter(target)
    ids = torch.tensor([tiny.PROMPTS[2]])
    kv = target.capture(ids, torch.ones_like(ids)).kv_BTLK
    trees = []
    for cuts in ([12], [5, 4, 3]):
        drafting = FastMoAProposer(drafter, target)
        positions = torch.arange(12)[None]
        for features in drafting.encode(kv, positions, cuts):
            drafting.append_features(0, features)
        trees.append(drafting.propose([RequestText(0, [*tiny.PROMPTS[2], 7])], Tree(3, 2, 6)))
    assert trees[0] == trees[1]


def test_a_closed_row_is_forgotten_and_release_gives_memory_back() -> None:
    target = tiny.target()
    drafting = FastMoAProposer(tiny.random_drafter(target), target)
    kv = torch.randn(1, 3, target.num_layers, target.identity.kv_size)
    drafting.append_features(0, drafting.encode(kv, torch.arange(3)[None], [3])[0])
    drafting.propose([RequestText(0, [1, 2, 3, 4])], Chain(2))
    drafting.close(0)
    assert drafting.num_read == drafting.num_encoded == {}
    drafting.release()
    assert drafting.text_cache.num_bytes == drafting.memory.num_bytes == 0


def test_breadth_beyond_the_draft_vocabulary() -> None:
    target = tiny.target()
    drafter = tiny.random_drafter(target, draft_token_ids=torch.tensor([1, 2, 3]))
    """All of it is drafted; a row that asks for more must not end the others."""
    wide, all_of_it = (
        moaspec.generate(
            target, tiny.PROMPTS[0], drafter=drafter, max_new_tokens=8, tree=Tree(2, breadth, 12)
        )
        for breadth in (4, 3)
    )
    assert tuple(wide.token_ids) == tiny.own_texts("llama")[0][:8]
    assert (wide.num_drafted, wide.accept_lengths) == (
        all_of_it.num_drafted,
        all_of_it.accept_lengths,
    )


@pytest.mark.parametrize("layers", [-1, 4])
def test_more_reused_layers_than_there_are(layers: int) -> None:
    target = tiny.target()
    with pytest.raises(InputError, match=r"0\.\.3"):
        FastMoAProposer(tiny.random_drafter(target), target, num_target_layers=layers)


@pytest.mark.parametrize("place", [torch.bfloat16, torch.float64, "meta"])
def test_a_drafter_of_another_dtype_or_device(place: torch.dtype | str) -> None:
    target = tiny.target()
    drafter = tiny.random_drafter(target).to(place)
    with pytest.raises(InputError, match=r"Call drafter\.to\('cpu', torch\.float32\)"):
        moaspec.generate(target, [1, 2], drafter=drafter)
    ids = torch.tensor([[1, 2]])
    hook = moaspec.custom_generate(drafter)
    with pytest.raises(InputError, match="and the target in torch"):
        target.model.generate(input_ids=ids, max_new_tokens=2, custom_generate=hook)


@pytest.mark.parametrize(
    ("field", "value"), [("tokenizer_hash", "another"), ("num_layers", 9), ("model_type", "qwen2")]
)
def test_a_drafter_of_another_target_of_the_same_sizes(field: str, value: Any) -> None:
    target = tiny.fresh_target(tokenizer=tiny.tokenizer())
    drafter = tiny.random_drafter(target)
    recorded = drafter.config.target
    assert recorded is not None
    own = getattr(recorded, field)
    other = dataclasses.replace(recorded, **{field: value})
    drafter.config = dataclasses.replace(drafter.config, target=other)
    expected = f"{field} is {value} in the drafter and {own} in the target"
    with pytest.raises(MismatchError, match=expected):
        moaspec.generate(target, [1, 2], drafter=drafter)


@pytest.mark.parametrize("known", ["drafter", "target", "neither"])
def test_what_is_not_recorded_is_not_compared(known: str) -> None:
    plain, full = tiny.target(), tiny.fresh_target(tokenizer=tiny.tokenizer())
    drafter = tiny.random_drafter(full if known == "drafter" else plain)
    if known == "neither":
        drafter.config = dataclasses.replace(drafter.config, target=None)
    FastMoAProposer(drafter, full if known == "target" else plain)


@pytest.mark.parametrize("always_same", [True, False])
def test_trimmed_vocabulary_is_lossless(always_same: bool) -> None:
    target = tiny.target()
    ids = torch.tensor([tiny.own_texts("llama")[0][3]]) if always_same else torch.arange(0, 64, 3)
    result = moaspec.generate(
        target,
        tiny.PROMPTS[0],
        drafter=tiny.random_drafter(target, draft_token_ids=ids),
        max_new_tokens=tiny.NEW_TOKENS,
        tree=Chain(3),
    )
    assert tuple(result.token_ids) == tiny.own_texts("llama")[0]


# Prepared weights


def test_weights_are_prepared_once_and_again_when_they_change() -> None:
    target, drafter = tiny.target(), tiny.random_drafter(tiny.target())
    first = prepared(drafter, target)
    assert prepared(drafter, target) == first
    names = set(drafter.state_dict())
    before, _ = tiny.draft(target, drafter, tiny.PROMPTS[1], Chain(6))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.mul_(-0.5)
    assert prepared(drafter, target)[0] is not first[0] or first[0] is drafter
    text, tree = tiny.draft(target, drafter, tiny.PROMPTS[1], Chain(6))
    assert text == before
    log_q = training_log_q(target, drafter, text, list(tree.tokens), 0)
    assert list(tree.tokens) == log_q[:-1].argmax(-1).tolist()
    assert set(drafter.state_dict()) == names
    other = tiny.fresh_target()
    assert prepared(drafter, other)[1] is other.draft_head(None)


def test_hooks_and_replaced_methods_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a drafter has decoded before, on a copy of its weights."""
    monkeypatch.setattr("moaspec.backends.linear_backends._mkl_copies_weights", lambda: True)
    target, drafter = tiny.target(), tiny.random_drafter(tiny.target())
    calls: list[str] = []

    def decode() -> set[str]:
        calls.clear()
        moaspec.generate(target, tiny.PROMPTS[0], drafter=drafter, max_new_tokens=4, tree=Chain(2))
        return set(calls)

    assert decode() == set()
    project_kv = drafter.encoder.project_kv

    def watched(*arguments: Any) -> Any:
        calls.append("kv")
        return project_kv(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(drafter.encoder, "project_kv", watched)
        assert decode() == {"kv"}
    layer = drafter.decoder.self_attention.mlp.down_proj
    handle = layer.register_forward_hook(lambda *_: calls.append("hook"))
    assert decode() == {"hook"}
    handle.remove()
    assert decode() == set()


def test_preparing_leaves_the_drafter_trainable_and_copyable() -> None:
    target, drafter = tiny.target(), tiny.random_drafter(tiny.target())
    prepared(drafter, target)
    assert any(type(module) is torch.nn.Linear for module in drafter.modules())
    for clone in (copy.deepcopy(drafter), pickle.loads(pickle.dumps(drafter))):
        assert prepared(clone, target)[0] is not prepared(drafter, target)[0]
    drafter.train().requires_grad_(requires_grad=True)
    module, _ = prepared(drafter, target)
    assert module is drafter


def test_exits_are_prepared_like_everything_else() -> None:
    target = tiny.target()
    torch.manual_seed(3)
    drafter = MoADrafter(drafter_config(target, DrafterSizes(), (0, 1)))
    drafter.eval().requires_grad_(requires_grad=False)
    for _ in range(2):
        for layers in (0, 1):
            text, tree = tiny.draft(
                target, drafter, tiny.PROMPTS[1], Chain(6), num_target_layers=layers
            )
            log_q = training_log_q(target, drafter, text, list(tree.tokens), layers)
            assert list(tree.tokens) == log_q[:-1].argmax(-1).tolist()
        packed = cast(ExitAdapter, prepared(drafter, target)[0].exits["1"])
        assert (type(packed.linear) is torch.nn.Linear) != can_pack(target.dtype, target.device)
        with torch.no_grad():
            cast(ExitAdapter, drafter.exits["1"]).linear.weight.mul_(-1.0)
    with pytest.raises(InputError, match="trained for N = 0, 1"):
        FastMoAProposer(drafter, target, num_target_layers=2)


def test_bf16_drafts_run_on_packed_weights_and_change_no_text() -> None:
    target = tiny.fresh_target()
    target.model.bfloat16()
    drafter = tiny.random_drafter(target).bfloat16()
    options = {"max_new_tokens": 12, "tree": Tree(2, 2, 4)}
    one, two = (
        moaspec.generate(target, tiny.PROMPTS[0], drafter=drafter, **options)  # type: ignore[call-overload]
        for _ in range(2)
    )
    assert one.token_ids == two.token_ids
    assert one.accept_lengths == two.accept_lengths


# What a draft step costs, in operations


class CountOps(TorchDispatchMode):
    """Counts the operations that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # pragma: no cover - called by torch
        self.ops[str(func)] += 1
        return func(*args, **(kwargs or {}))


def ops_of_a_draft(shape: Tree, rows: int = 1) -> Counter[str]:
    """Operations of one `propose` over rows of one length."""
    target, drafter = tiny.target(), tiny.random_drafter(tiny.target())
    drafting = FastMoAProposer(drafter, target)
    kv = torch.zeros(1, 4 * rows, target.num_layers, target.identity.kv_size)
    positions = torch.arange(4).repeat(rows)[None]
    for row, features in enumerate(drafting.encode(kv, positions, [4] * rows)):
        drafting.append_features(row, features)
    texts = [RequestText(row, [1, 2, 3, 4, 5]) for row in range(rows)]
    with CountOps() as count:
        drafting.propose(texts, shape)
    return count.ops


def test_operations_do_not_grow_with_nodes_or_rows() -> None:
    small = ops_of_a_draft(Tree(3, 2, 4)).total()
    # A tree that keeps all its nodes need not sort them.
    assert ops_of_a_draft(Tree(3, 2, 10)).total() <= small
    # Up to four nodes fold query heads, a few operations that pay; more nodes never need more.
    assert ops_of_a_draft(Tree(3, 8, 60)).total() <= small
    # Writing several rows' slots takes an index where one row needs none.
    assert ops_of_a_draft(Tree(3, 2, 4), rows=4).total() <= 1.1 * small


def test_a_second_call_prepares_nothing() -> None:
    target = tiny.target()
    drafter = tiny.random_drafter(target, draft_token_ids=torch.arange(0, tiny.VOCAB, 3))
    drafting = FastMoAProposer(drafter, target)
    with CountOps() as count:
        again = FastMoAProposer(drafter, target)
    assert again.module is drafting.module
    assert not {name for name in count.ops if "mkldnn" in name or "clone" in name}
    assert "aten.index.Tensor" not in count.ops
