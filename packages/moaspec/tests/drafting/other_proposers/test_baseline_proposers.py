"""Baseline drafters in the same engine: lossless, cached as trained, in parity with the reference.

Legend: B batch, T tokens, E hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

import golden
import moaspec
import moaspec.generation.local_engine
import tiny
from golden import TOLERANCE, needs_golden
from moaspec.backends.fast_baselines import baseline_drafting
from moaspec.drafting.other_proposers.baseline_proposers import (
    EagleProposer,
    IndependentProposer,
)
from moaspec.generation.drafters import load_any_drafter
from moaspec.generation.local_engine import local_engine
from moaspec.model.baselines import Baseline, EagleDrafter, StackConfig
from moaspec.model.checkpoint.baseline_checkpoint import load_baseline, save_baseline
from moaspec.model.moa import positions
from moaspec_core.checkpoint.drafter_config import LayerConfig
from moaspec_core.drafting.draft_tree import DraftTree
from moaspec_core.drafting.protocols import RequestText
from moaspec_core.errors import CorruptCheckpointError, MismatchError
from moaspec_core.policy.policies import COPIES, DraftPolicy
from moaspec_train.students.drafter_sizes import DrafterSizes, stack_config
from moaspec_train.students.losses import feature_loss

KINDS = ("eagle", "independent")


def new(kind: Any, family: str = "llama", seed: int = 1) -> Baseline:
    """Random weights: it disagrees with the target."""
    from moaspec.model.baselines import KINDS as CLASSES

    torch.manual_seed(seed)
    module = CLASSES[kind](stack_config(tiny.target(family), DrafterSizes(), kind))
    return module.eval().requires_grad_(requires_grad=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "phi3"])
@pytest.mark.parametrize("shape", [moaspec.Chain(3), moaspec.Tree(4, 3, 9)], ids=str)
def test_lossless(kind: str, family: str, shape: moaspec.Tree) -> None:
    results = moaspec.generate(
        tiny.target(family),
        tiny.PROMPTS,
        drafter=baseline_drafting(new(kind, family), tiny.target(family)),
        max_new_tokens=tiny.NEW_TOKENS,
        tree=shape,
    )
    assert [tuple(result.token_ids) for result in results] == list(tiny.own_texts(family))


@pytest.mark.parametrize("kind", KINDS)
def test_lossless_when_sampled(kind: str) -> None:
    target = tiny.target()
    plain, drafted = (
        moaspec.generate(
            target, tiny.PROMPTS[1], drafter=drafter, max_new_tokens=24, temperature=1.0, seed=5
        )
        for drafter in (None, baseline_drafting(new(kind), target))
    )
    assert plain.token_ids == drafted.token_ids


def test_what_they_need() -> None:
    target = tiny.target()
    assert baseline_drafting(new("eagle"), target).needs == {"final_states"}
    assert baseline_drafting(new("independent"), target).needs == frozenset()
    assert isinstance(baseline_drafting(new("eagle"), target), EagleProposer)
    assert isinstance(baseline_drafting(new("independent"), target), IndependentProposer)


def test_long_prompts_keep_all_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """States of a prompt that is read in pieces are put together again."""
    target, prompt = tiny.target(), tiny.PROMPTS[2]
    seen = []
    for size in (1024, 4):
        monkeypatch.setattr("moaspec.engine.local_verifier.PREFILL_CHUNK_TOKENS", size)
        drafter = baseline_drafting(new("eagle"), target)
        assert isinstance(drafter, EagleProposer)
        features: list[torch.Tensor] = []
        monkeypatch.setattr(drafter, "append_features", lambda _, one, f=features: f.append(one))
        engine = moaspec.generation.local_engine.local_engine(target, drafter)
        engine.add(prompt, max_new_tokens=1)
        engine.step()
        seen.append(features[0])
    # float32 sums in another order.
    assert_close(*seen, **tiny.TOLERANCE)


def test_states_of_rounds_without_drafts_come_late_but_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also beside free branches, of which several tokens may be verified at once."""
    target = tiny.target()
    drafting = EagleProposer(cast(EagleDrafter, new("eagle")), target)
    propose = EagleProposer.propose

    def checked(
        self: EagleProposer, rows: list[RequestText], shape: moaspec.Tree
    ) -> list[DraftTree]:
        for row in rows:
            ids = torch.tensor([list(row.token_ids[:-1])])
            expected = target.capture(ids, torch.ones_like(ids)).hidden_BTE[0]
            # float32 sums in another order.
            assert_close(self.hidden[row.cache_row], expected, **tiny.TOLERANCE)
        return propose(self, rows, shape)

    monkeypatch.setattr(EagleProposer, "propose", checked)
    engine = local_engine(target, drafting)
    handles = [
        engine.add(
            prompt,
            max_new_tokens=tiny.NEW_TOKENS,
            shape=EveryThirdRound(number),
            free_branches=COPIES if number > 1 else None,
        )
        for number, prompt in enumerate(tiny.PROMPTS)
    ]
    results = [engine.result(handle) for handle in handles]
    for _ in engine.run():
        pass
    assert [tuple(result.token_ids) for result in results] == list(tiny.own_texts("llama"))
    # Drafts after rounds without any: what these verified was needed.
    assert all([0, 0, 2] in windows(result.drafted_depths[:-2]) for result in results)


def windows(depths: list[int]) -> list[list[int]]:
    return [depths[i : i + 3] for i in range(len(depths) - 2)]


class EveryThirdRound(DraftPolicy):
    """Drafts two tokens in every third round, and has all tokens encoded."""

    wants_features = True

    def __init__(self, number: int) -> None:
        self.number = number

    def shape(self, length: int, num_requests: int, copied: float) -> moaspec.Tree | None:
        del length, num_requests, copied
        self.number += 1
        return None if self.number % 3 else moaspec.Chain(2)

    def record_round(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        del tree, accepted


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(kind: str, tmp_path: Path) -> None:
    target, module = tiny.target(), new(kind)
    save_baseline(module, tmp_path, training={"steps": 3})
    loaded = load_baseline(tmp_path, target.identity)
    assert loaded.config == module.config
    for name, value in loaded.state_dict().items():
        assert_close(value, module.state_dict()[name], rtol=0, atol=0)
    assert load_any_drafter(tmp_path, target=target).__class__.__name__.lower().startswith(kind)
    with pytest.raises(MismatchError):
        load_baseline(tmp_path, tiny.target("qwen2").identity)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.popitem()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CorruptCheckpointError):
        load_baseline(tmp_path, target.identity)


# Parity with the reference


def golden_eagle(directory: Path) -> EagleDrafter:
    target = golden.target()
    layer = LayerConfig(
        hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=128
    )
    config = StackConfig(
        layer=layer, rope_parameters={"rope_theta": 10000.0}, target=target.identity
    )
    save_baseline(EagleDrafter(config), directory)
    save_file(load_file(golden.ROOT / "eagle_drafter.safetensors"), directory / "model.safetensors")
    module = load_baseline(directory, target.identity)
    assert isinstance(module, EagleDrafter)
    return module


@needs_golden
@pytest.mark.parametrize("noisy", [False, True])
def test_the_training_pass_is_the_references(noisy: bool, tmp_path: Path) -> None:
    """With its noise too, which it adds to what the loss compares with as well."""
    target, module = golden.target(), golden_eagle(tmp_path)
    expected, batch = golden.arrays("eagle.npz"), golden.arrays("train_batch.npz")
    mask_BT, hidden_BTE = batch["attention_mask"], batch["target_hidden_4"]
    embeddings_BTE = target.embed(batch["input_ids"])
    prefix = ""
    if noisy:
        prefix = "noisy_seed3."
        hidden_BTE = hidden_BTE + expected[prefix + "noise_features"]
        embeddings_BTE = embeddings_BTE + expected[prefix + "noise_embeddings"]
    states_BTE = module(embeddings_BTE, hidden_BTE, positions(mask_BT), mask_BT)
    response_BT = batch["response_mask"].bool()
    response_BT[:, 0] = False
    count = response_BT.sum() + 1e-5
    wanted_MV = target.head(hidden_BTE)[response_BT]
    logits_BTV = target.head(states_BTE)
    # The reference's KL lacks the target's entropy.
    kl = -(wanted_MV.softmax(-1) * logits_BTV[response_BT].log_softmax(-1)).sum()
    feature = feature_loss(states_BTE[response_BT], hidden_BTE[response_BT])
    assert_close(kl / count, expected[f"{prefix}stat.forward_KL"].float(), **TOLERANCE)
    assert_close(feature / count, expected[f"{prefix}stat.feature_loss"].float(), **TOLERANCE)
    loss = (0.1 * kl + feature) / count
    assert_close(loss, expected[f"{prefix}loss"].float(), **TOLERANCE)
    if not noisy:
        real_BT = mask_BT.bool()[:, 1:]
        assert_close(logits_BTV[:, 1:][real_BT], expected["logits"][real_BT], **TOLERANCE)


@pytest.mark.slow
@needs_golden
def test_the_papers_tree_accepts_as_the_reference_does(tmp_path: Path) -> None:
    target, expected = golden.target(), golden.arrays("eagle.npz")
    prompt = expected["prompt"][0].tolist()
    wanted = expected["greedy_ids"][0].tolist()[len(prompt) :]
    result = moaspec.generate(
        target,
        prompt,
        drafter=baseline_drafting(golden_eagle(tmp_path), target),
        max_new_tokens=len(wanted),
        stop_token_ids=(),
        tree=moaspec.Tree(depth=6, breadth=8, total_tokens=62),
    )
    assert result.token_ids == wanted
    assert result.accept_lengths[:-1] == expected["accept_stats"].tolist()[: result.num_rounds - 1]


@needs_golden
def test_config_of_the_golden_head(tmp_path: Path) -> None:
    golden_eagle(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["moaspec_baseline"]["kind"] == "eagle"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_rolled_back_baselines_draft_as_fresh_ones_do(kind: str) -> None:
    """What is drafted and accepted shows that states and caches hold the right tokens."""
    target, module = tiny.target(), new(kind)
    session = moaspec.Session(target, baseline_drafting(module, target))
    for prompt in (tiny.PROMPTS[1], tiny.PROMPTS[2], tiny.PROMPTS[1][:5], tiny.PROMPTS[1]):
        got, fresh = (
            generate(prompt, max_new_tokens=tiny.NEW_TOKENS, tree="tree:3x4x12")
            for generate in (
                session.generate,
                lambda ids, **options: moaspec.generate(
                    target, ids, drafter=baseline_drafting(module, target), **options
                ),
            )
        )
        assert got.token_ids == fresh.token_ids
        assert got.accept_lengths == fresh.accept_lengths


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_texts_read_in_several_passes_draft_the_same(
    kind: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 12, 7 and 27 tokens; the last is past LongRoPE's switch from its first one on."""
    target, module = tiny.target(family), new(kind, family)
    long = [*tiny.PROMPTS[2], *tiny.own_texts(family)[2][:15]]
    drafted = []
    for chunk in (512, 5):
        monkeypatch.setattr("moaspec.drafting.tree_proposer.READ_CHUNK_TOKENS", chunk)
        drafting = baseline_drafting(module, target)
        engine = local_engine(target, drafting)
        for prompt in (tiny.PROMPTS[2], tiny.PROMPTS[1], long):
            engine.add(prompt, max_new_tokens=9, shape=moaspec.Tree(3, 2, 6))
        propose = drafting.propose
        trees: list[Any] = []
        monkeypatch.setattr(
            drafting, "propose", lambda *a, propose=propose, trees=trees: kept(trees, propose(*a))
        )
        for _ in engine.run():
            pass
        drafted.append(trees)
    assert drafted[0] == drafted[1]


def kept(into: list[Any], value: Any) -> Any:
    into.append(value)
    return value
