"""The local verifier: what it decides, and what it leaves in the cache."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import moaspec.engine.local_verifier
import tiny
from moaspec.engine.local_verifier import LocalVerifier
from moaspec_core.drafting.draft_tree import DraftTree
from moaspec_core.drafting.protocols import VerifyRequest, VerifyResult
from moaspec_core.engine.engine import run_now


def verify(verifier: LocalVerifier, *requests: VerifyRequest) -> list[VerifyResult]:
    return run_now(verifier.verify(requests))


def uncached_kv(family: str, text: Sequence[int]) -> Tensor:
    ids = torch.tensor([list(text)])
    return tiny.target(family).capture(ids, torch.ones_like(ids)).kv_BTLK[0]


def right_and_wrong(draw: st.DrawFn, right: Sequence[int]) -> DraftTree:
    """A random tree that contains a random stretch of the right tokens among wrong ones."""
    depth = draw(st.integers(0, len(right)))
    tokens: list[int] = []
    parents: list[int] = []
    path = [-1]
    for level in range(depth):
        for _ in range(draw(st.integers(0, 3))):
            tokens.append((right[level] + draw(st.integers(1, 5))) % tiny.VOCAB)
            parents.append(draw(st.sampled_from([path[-1], *range(-1, len(parents))])))
        tokens.append(right[level])
        parents.append(path[-1])
        path.append(len(tokens) - 1)
    return DraftTree(tuple(tokens), tuple(parents))


@pytest.mark.slow
@settings(max_examples=25)
@given(st.data())
def test_cache_compaction_is_recomputation(data: st.DataObject) -> None:
    """After any rounds on any trees, the cache holds what an uncached pass computes.

    Nothing is trimmed: in layers with a sliding window too, it holds every token.
    """
    # Phi-3's drafts end at its switch, which the engine sees to: see the engine's tests.
    family = data.draw(st.sampled_from([f for f in tiny.FAMILIES if f != "phi3"]))
    rows = data.draw(st.permutations(range(len(tiny.PROMPTS))))[:2]
    verifier = LocalVerifier(tiny.target(family))
    wholes = {row: [*tiny.PROMPTS[row], *tiny.own_texts(family)[row]] for row in rows}
    lengths = {row: len(tiny.PROMPTS[row]) for row in rows}
    first = verify(verifier, *(VerifyRequest(row, 0, tiny.PROMPTS[row]) for row in rows))
    for row, verdict in zip(rows, first, strict=True):
        assert verdict.next_token == wholes[row][lengths[row]]
    for _ in range(data.draw(st.integers(1, 3))):
        requests = []
        for row in rows:
            at = lengths[row]
            tree = data.draw(st.composite(right_and_wrong)(wholes[row][at + 1 : at + 5]))
            requests.append(VerifyRequest(row, at, (wholes[row][at],), tree))
        for request, verdict in zip(requests, verify(verifier, *requests), strict=True):
            row, at = request.cache_row, lengths[request.cache_row]
            taken = [request.tree.tokens[node] for node in verdict.accepted]
            lengths[row] += 1 + len(taken)
            assert [*taken, verdict.next_token] == wholes[row][at + 1 : at + 2 + len(taken)]
    for row in rows:
        expected = uncached_kv(family, wholes[row][: lengths[row]])
        assert_close(verifier.cache.features(row, 0, lengths[row])[0], expected, **tiny.TOLERANCE)


@pytest.mark.parametrize("chunk", [1, 3, 4, 12])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3"])
def test_a_long_prompt_takes_several_passes(
    family: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Phi-3's first pieces already have the rotary embeddings of the whole prompt's length."""
    monkeypatch.setattr(moaspec.engine.local_verifier, "PREFILL_CHUNK_TOKENS", chunk)
    text = (*tiny.PROMPTS[2], *tiny.own_texts(family)[2])
    prompt = text[:20]
    assert len(prompt) > max(tiny.SWITCH, tiny.WINDOW)
    verifier = LocalVerifier(tiny.target(family))
    (verdict,) = verify(verifier, VerifyRequest(1, 0, prompt))
    assert verdict.next_token == text[20]
    assert_close(
        verifier.cache.features(1, 0, len(prompt))[0], uncached_kv(family, prompt), **tiny.TOLERANCE
    )


def test_a_request_may_carry_several_known_tokens_and_a_tree() -> None:
    text = [*tiny.PROMPTS[0], *tiny.own_texts("llama")[0]]
    verifier = LocalVerifier(tiny.target())
    tree = DraftTree(tokens=(63, text[5], text[6]), parents=(-1, -1, 1))
    (verdict,) = verify(verifier, VerifyRequest(0, 0, tuple(text[:5]), tree))
    assert verdict.accepted == (1, 2)
    assert verdict.next_token == text[7]
    assert verdict.features is None
    assert_close(
        verifier.cache.features(0, 0, 7)[0], uncached_kv("llama", text[:7]), **tiny.TOLERANCE
    )


def test_release() -> None:
    verifier = LocalVerifier(tiny.target())
    verify(verifier, VerifyRequest(0, 0, tiny.PROMPTS[0]))
    verifier.close(0)
    verifier.release()
    assert verifier.cache.num_bytes == 0
    (verdict,) = verify(verifier, VerifyRequest(0, 0, tiny.PROMPTS[0]))
    assert verdict.next_token == tiny.own_texts("llama")[0][0]
