"""How rows of one pass are split, and that this changes nothing that they say."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import tiny
from moaspec.engine.local_verifier import LocalVerifier, PassRow, ragged_states
from moaspec_core.drafting.draft_tree import DraftTree
from moaspec_core.drafting.protocols import VerifyRequest
from moaspec_core.engine.engine import run_now


def chain(*tokens: int) -> DraftTree:
    return DraftTree(tokens, tuple(range(-1, len(tokens) - 1)))


def padded(*trees: DraftTree, new: int = 1, recorded: bool = False) -> int:
    """Tokens of a pass over rows with these drafts and 14 without; its states must keep order."""
    sizes = [(new, tree) for tree in trees] + [(1, DraftTree())] * 14
    requests = [VerifyRequest(0, 0, (7,) * size, tree) for size, tree in sizes]
    rows = [
        PassRow(one, 200 * i, one.new_tokens + one.tree.tokens, len(one.new_tokens))
        for i, one in enumerate(requests)
    ]
    passes: list[Tensor] = []

    def run(split: Sequence[PassRow]) -> Tensor:
        starts_B11 = torch.tensor([one.start for one in split])[:, None, None]
        passes.append(starts_B11 + torch.arange(max(len(one.tokens) for one in split))[:, None])
        return passes[-1]

    for row, states_T1 in zip(rows, ragged_states(rows, run, recorded=recorded), strict=True):
        assert states_T1[:, 0].tolist() == [*range(row.start, row.start + len(row.tokens))]
    return passes[0].numel()


def test_long_rows_give_the_others_few_pads() -> None:
    bush, drafts = DraftTree((1, 2, 3), (-1, -1, 0)), chain(1, 2, 3, 4)
    assert padded(drafts, drafts) == 14 + 10
    assert padded(DraftTree(), new=128) == 16 * (14 + 8)
    assert padded(drafts, recorded=True) == 15 * 5
    # Bushes are not split, but chains beside them are.
    assert padded(bush, drafts) == 4 * (14 + 1 + 2)


@pytest.mark.kernels
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_split_chains_are_decided_as_alone(family: str) -> None:
    """A window goes by the whole text, not by its parts."""
    asked = []
    for row, text in enumerate(tiny.own_texts(family)):
        drafts = chain(*text[1:4]) if row % 2 else chain(*text[1:2], 0, 0, 0, 0, 0)
        prompt = tuple(tiny.PROMPTS[row])
        follow_up = VerifyRequest(row, len(prompt), tuple(text[:1]), drafts)
        asked.append((VerifyRequest(row, 0, prompt), follow_up))

    def decided(rows: slice) -> list[tuple[tuple[int, ...], int]]:
        verifier = LocalVerifier(tiny.target(family))
        for requests in zip(*asked[rows], strict=True):
            results = run_now(verifier.verify(requests))
        return [(one.accepted, one.next_token) for one in results]

    together = decided(slice(4))
    assert together == [decided(slice(row, row + 1))[0] for row in range(4)]
    assert together[1][0] == (0, 1, 2)
