"""The check passes what is right and reports every fault that is planted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import moaspec.engine.accept
import moaspec.engine.local_verifier
import moaspec.sampling.choose
import tiny
from moaspec.drafting.kv_cache import KVCache
from moaspec.engine.local_verifier import LocalVerifier
from moaspec.evaluate.correctness.check_target import Check, CheckedText, StopTokenProposer
from moaspec.sampling.kernels import SamplerParams
from moaspec.sampling.processors import Prefix
from moaspec.target.target import Target
from moaspec_core.drafting.draft_tree import DraftTree, ancestor_matrix, children
from moaspec_core.drafting.protocols import VerifyRequest
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_core.engine.request_state import RequestState

pytestmark = pytest.mark.essential

NEW = 8
PROMPTS = tiny.PROMPTS[:2]


def checked(family: str = "llama", **changes: Any) -> list[CheckedText]:
    target = tiny.target(family)
    settings: dict[str, Any] = {
        "target": target,
        "prompts": PROMPTS,
        "drafter": tiny.random_drafter(target),
        "max_new_tokens": NEW,
    }
    check = Check(**settings | changes)
    left_s: list[float | None] = []
    findings = list(check.run(lambda _, left: left_s.append(left)))
    assert left_s[0] is None
    assert left_s[-1] is not None
    assert len(findings) == check.num_texts
    return findings


def faults(findings: Sequence[CheckedText]) -> list[CheckedText]:
    return [finding for finding in findings if not finding.lossless]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3"])
def test_what_is_right_passes(family: str) -> None:
    findings = checked(family, prompts=tiny.PROMPTS[1:3])
    assert {finding.kind for finding in findings} == {"identical"}
    assert {finding.method for finding in findings} == {
        "hf",
        "plain",
        "copies",
        "moa, auto",
        "moa, tree and copies",
        *(
            f"{drafter}, {shape}"
            for drafter in ("lookup", "replay", "stop tokens", "random", "moa (N=0)")
            for shape in ("chain", "tree")
        ),
    }
    assert {finding.batch for finding in findings} == {"alone", "ragged"}
    assert len({finding.setting for finding in findings}) == 3


@pytest.mark.slow
def test_rows_beyond_one_batch_and_prompts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every prompt is decoded with every setting, however rows are put together."""
    monkeypatch.setattr("moaspec.evaluate.correctness.check_target.ROWS_TOGETHER", 4)
    findings = checked(drafter=None, alone=0, prompts=tiny.PROMPTS[:3])
    assert {finding.kind for finding in findings} == {"identical"}
    ragged = [finding for finding in findings if finding.method == "replay, tree"]
    assert {finding.batch for finding in ragged} == {"ragged"}
    assert len({(finding.setting, finding.prompt) for finding in ragged}) == len(ragged) == 9
    alone = [one for one in checked(drafter=None, alone=2) if one.method == "replay, tree"]
    assert sum(finding.batch == "alone" for finding in alone) == 6


Plant = Callable[[pytest.MonkeyPatch], None]


def position_off_by_one(patch: pytest.MonkeyPatch) -> None:
    plan = moaspec.engine.local_verifier.PassRow
    right: Any = plan.positions

    def wrong(self: Any) -> list[int]:
        known = right.fget(self)[: self.num_new]
        return [*known, *(position + 1 for position in right.fget(self)[self.num_new :])]

    patch.setattr(plan, "positions", property(wrong))


def rejected_branch_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCache, "commit", lambda *_: None)


def pad_accepted(patch: pytest.MonkeyPatch) -> None:
    """The reference's fault: a drafted token 0 counts as accepted."""

    def walk(tree: DraftTree, chosen: Sequence[int]) -> list[int]:
        known, node = children(tree), -1
        path: list[int] = []
        while True:
            child = known.get((node, chosen[node + 1]), known.get((node, 0)))
            if child is None:
                return path
            path.append(child)
            node = child

    patch.setattr(moaspec.engine.accept, "walk", walk)


def _depths(parents: Sequence[int]) -> list[int]:
    return ancestor_matrix(parents).sum(1).tolist()


def siblings_see_each_other(patch: pytest.MonkeyPatch) -> None:
    def matrix(tree: DraftTree) -> np.ndarray:
        same = np.array(tree.parents)
        return ancestor_matrix(tree.parents) | (same[:, None] == same[None])

    patch.setattr(DraftTree, "ancestors", property(matrix))
    patch.setattr(DraftTree, "depths", property(lambda tree: _depths(tree.parents)))


def noise_by_step(patch: pytest.MonkeyPatch) -> None:
    """Right for plain decoding, where a step is a token."""
    verify, distribution_of = LocalVerifier.verify, moaspec.sampling.choose._params_of
    step = 0

    async def counted(self: LocalVerifier, requests: Sequence[VerifyRequest]) -> Any:
        nonlocal step
        step = 0 if requests[0].num_verified == 0 else step + 1
        return await verify(self, requests)

    def by_step(prefix: Prefix) -> SamplerParams:
        return distribution_of(prefix)._replace(position=prefix.prompt_length + step)

    patch.setattr(LocalVerifier, "verify", counted)
    patch.setattr(moaspec.sampling.choose, "_params_of", by_step)


def token_lost(patch: pytest.MonkeyPatch) -> None:
    """The last token of every drafted text is dropped."""
    decode = Check._decode

    def shorter(self: Check, way: Any, rows: Any) -> list[list[int]]:
        texts = decode(self, way, rows)
        return texts if way.drafter is None else [text[:-1] for text in texts]

    patch.setattr(Check, "_decode", shorter)


PLANTS: dict[Plant, set[str]] = {
    position_off_by_one: {"replay, chain", "replay, tree"},
    rejected_branch_kept: {"replay, tree"},
    pad_accepted: {"stop tokens, chain", "stop tokens, tree"},
    siblings_see_each_other: {"replay, tree"},
    noise_by_step: {"replay, chain", "replay, tree"},
    token_lost: {"replay, chain", "replay, tree", "stop tokens, chain"},
}
"""Each fault, and methods that must find it."""


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_planted_faults_are_reported(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    found = faults(checked(drafter=None))
    assert {finding.method for finding in found} >= PLANTS[plant]
    assert not {finding.method for finding in found} & {"hf", "plain"}
    assert {finding.batch for finding in found} == {"alone", "ragged"}
    for finding in found:
        assert finding.position is not None
        assert finding.gap is None or finding.gap > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("stops", [[0], [7], [0, 7]])
def test_drafts_of_stop_tokens_are_verified_too(
    stops: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the id that pads fixed-size trees is the end of turns, as in Qwen and others."""
    target = tiny.fresh_target(eos_token_id=stops)
    assert not faults(checked(target=target, drafter=None))
    pad_accepted(monkeypatch)
    found = {finding.method for finding in faults(checked(target=target, drafter=None))}
    assert found >= PLANTS[pad_accepted]


def test_a_faulty_target_cannot_excuse_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of our passes wrong in the same way agree with one another, but not with transformers."""
    target = tiny.fresh_target()
    head = target.head
    monkeypatch.setattr(target, "head", lambda *arguments: -head(*arguments))
    found = faults(checked(target=target, drafter=None))
    assert {finding.method for finding in found} >= {"plain", "replay, chain"}
    assert "hf" not in {finding.method for finding in found}


@pytest.mark.slow
def test_a_text_that_goes_on_after_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny.fresh_target(eos_token_id=tiny.own_texts("llama")[0][4])
    assert not faults(checked(target=target, drafter=None))
    monkeypatch.setattr(RequestState, "_until_end", lambda row, tokens, _: _limited(row, tokens))
    found = faults(checked(target=target, drafter=None))
    assert "it goes on after a stop token" in {finding.reason for finding in found}


def _limited(row: Any, tokens: list[int]) -> tuple[list[int], Any]:
    kept = tokens[: row.num_remaining]
    return kept, "max_new_tokens" if len(kept) == row.num_remaining else None


def test_a_text_that_ends_with_the_context() -> None:
    target = tiny.fresh_target(max_position_embeddings=len(PROMPTS[1]) + 3)
    findings = checked(target=target, drafter=None, prompts=PROMPTS[1:], max_new_tokens=NEW)
    assert not faults(findings)
    assert {finding.num_tokens for finding in findings} == {3}


def test_a_tie_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens with one head row: a method that takes the other one is not wrong."""
    prompt, own = tiny.PROMPTS[0], tiny.own_texts("llama")[0]
    model = tiny.model()
    model.lm_head.weight.data[62] = model.lm_head.weight.data[own[4]]

    decode = Check._decode

    def other(self: Check, way: Any, rows: Any) -> list[list[int]]:
        texts = decode(self, way, rows)
        return [
            [62 if token == own[4] and way.drafter and greedy else token for token in text]
            for text, greedy in zip(texts, (row.setting == "greedy" for row in rows), strict=True)
        ]

    monkeypatch.setattr(Check, "_decode", other)
    tied = Target(model, None, name="tied")
    findings = checked(target=tied, prompts=[prompt], drafter=None, max_new_tokens=5, seeds=())
    assert not faults(findings)
    parted = [finding for finding in findings if finding.kind == "near_tie"]
    assert {finding.position for finding in parted} == {4}
    # Two rows of one matrix: their logits differ by rounding at most.
    assert all(finding.gap is not None and finding.gap < 1e-4 for finding in parted)


def test_stop_tokens_mix_what_must_not_be_accepted() -> None:
    proposer = StopTokenProposer([0, 7])
    assert proposer.draft([5, 9], Chain(3)) == DraftTree((9, 0, 7), (-1, 0, 1))
