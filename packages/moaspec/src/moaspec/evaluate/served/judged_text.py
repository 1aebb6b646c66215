"""Judge a greedy text of another program: each token by one trusted pass of the target.

Legend: V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moaspec.evaluate.correctness.equality import (
    DEVIATIONS,
    FLOAT32_TIE,
    rounding_errors,
    trusted_logits,
)
from moaspec.evaluate.served.asked_server import ServedText
from moaspec.target.target import Target

NOT_TOLD = 0.0
"""llama.cpp's log-probability of every accepted draft, which says nothing."""
LENGTH_REASONS = ("length", "max_tokens")


@dataclass(frozen=True)
class Judged:
    """A text with the result of trusted passes.

    Attributes:
        token_ids: judged ones; fewer than the text has where its tokens are not certain.
        gaps: of each token, how many logits it is below the best one; one more for the end of a
            text that stopped without a stop token's id.
        limit: largest gap that the target's rounding explains.
        wrong_end: why the end is wrong, or "".
        unsure: why a part of the text is not judged, or "".
        numbers_apart: how far the server's log-probabilities are from float32's, in nats, for each
            token; empty without them.
        rounding_apart: the same of the target in its own dtype.
    """

    token_ids: tuple[int, ...]
    gaps: tuple[float, ...] = ()
    limit: float = FLOAT32_TIE
    wrong_end: str = ""
    unsure: str = ""
    numbers_apart: tuple[float, ...] = ()
    rounding_apart: tuple[float, ...] = ()

    @property
    def num_right(self) -> int:
        return sum(gap == 0.0 for gap in self.gaps)

    @property
    def num_ties(self) -> int:
        return sum(0.0 < gap <= self.limit for gap in self.gaps)

    @property
    def num_wrong(self) -> int:
        """Tokens that rounding does not explain, NaN among them; and a wrong end."""
        return sum(not gap <= self.limit for gap in self.gaps) + bool(self.wrong_end)

    @property
    def first_wrong(self) -> int | None:
        """Index of the first wrong token, or of a wrong end; None if all are right."""
        wrong = (index for index, gap in enumerate(self.gaps) if not gap <= self.limit)
        return next(wrong, len(self.gaps) if self.wrong_end else None)


class TextJudge:
    """Judges texts of one target; a text that it has judged costs nothing.

    Args:
        target: as transformers loads it, not packed unless it is in float32. Its dtype is that of
            the server, whose rounding it shows.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], _Pass] = {}

    def judge(self, prompt_ids: Sequence[int], text: ServedText, max_tokens: int) -> Judged:
        """Judge a text that was limited to `max_tokens`."""
        if text.token_ids is not None:
            known = range(self._target.vocab_size)
            if any(token not in known for token in text.token_ids):
                told = f"the server's token ids reach beyond the reference's {known.stop} tokens"
                return Judged((), unsure=f"{told}: it has another tokenizer")
            return self._judged(prompt_ids, text, text.token_ids, max_tokens, unsure="")
        ids, unsure = self._tokenised(text)
        if ids is None:
            return Judged((), unsure=unsure)
        found = self._judged(prompt_ids, text, ids, max_tokens, unsure=unsure)
        first = found.first_wrong
        if first is None or found.wrong_end:
            return found
        return self._unless_other_tokens(prompt_ids, found, first)

    def _tokenised(self, text: ServedText) -> tuple[tuple[int, ...] | None, str]:
        """The ids of a text whose server gives none, checked against its count and characters."""
        tokenizer: Any = self._target.tokenizer
        if not text.text:
            return None, "the server gives neither text nor token ids"
        ids = tuple(tokenizer(text.text, add_special_tokens=False)["input_ids"])
        if tokenizer.decode(ids, clean_up_tokenization_spaces=False) != text.text:
            return None, "the text's tokens are not certain (they read as another text)"
        ends = text.finish not in LENGTH_REASONS
        if text.completion_tokens not in (None, len(ids), len(ids) + ends):
            counted = f"{text.completion_tokens} instead of {len(ids)}"
            return None, f"the text's tokens are not certain (the server counts {counted})"
        return ids, ""

    def _unless_other_tokens(self, prompt_ids: Sequence[int], found: Judged, first: int) -> Judged:
        """The judgement, up to a token that may be another one with the same characters."""
        if first >= len(found.token_ids):
            return found
        tokenizer: Any = self._target.tokenizer
        best = self._passed(prompt_ids, found.token_ids).best[first]
        rest = tokenizer.decode(found.token_ids[first:], clean_up_tokenization_spaces=False)
        own = tokenizer.decode([best], clean_up_tokenization_spaces=False)
        if not own or not rest.startswith(own):
            return found
        return Judged(
            found.token_ids[:first],
            found.gaps[:first],
            found.limit,
            unsure="the rest may be other tokens with the same characters",
        )

    def _judged(
        self,
        prompt_ids: Sequence[int],
        text: ServedText,
        ids: Sequence[int],
        max_tokens: int,
        *,
        unsure: str,
    ) -> Judged:
        stops = self._target.stop_token_ids
        done = self._passed(prompt_ids, ids)
        gaps, ended = list(done.gaps), bool(ids) and ids[-1] in stops
        full = min(max_tokens, self._target.max_positions - len(prompt_ids))
        wrong_end = ""
        if any(token in stops for token in ids[:-1]):
            wrong_end = "it goes on after a stop token"
        elif len(ids) > full:
            wrong_end = f"it has {len(ids)} tokens instead of at most {full}"
        elif not ended and text.finish not in LENGTH_REASONS:
            gaps.append(done.end_gap)  # its stop token has no id here
        elif not ended and len(ids) < full:
            wrong_end = f"it ends after {len(ids)} of {full} tokens, without a stop token"
        apart, rounding = (), ()
        if len(text.logprobs) >= len(ids) > 0:
            pairs = zip(text.logprobs, done.right_logprobs, done.rounded_logprobs, strict=False)
            both = [
                (abs(said - right), abs(rounded - right))
                for said, right, rounded in pairs
                if said != NOT_TOLD
            ]
            apart, rounding = zip(*both, strict=True) if both else ((), ())
        return Judged(
            tuple(ids), tuple(gaps), done.limit, wrong_end, unsure, tuple(apart), tuple(rounding)
        )

    def _passed(self, prompt_ids: Sequence[int], ids: Sequence[int]) -> "_Pass":
        key = (tuple(prompt_ids), tuple(ids))
        if key not in self._known:
            self._known[key] = _trusted_pass(self._target, *key)
        return self._known[key]


@dataclass(frozen=True)
class _Pass:
    """One trusted pass over a text and the position behind it."""

    gaps: list[float]
    best: list[int]
    right_logprobs: list[float]
    rounded_logprobs: list[float]
    end_gap: float  # of the best stop token behind the text
    limit: float


def _trusted_pass(target: Target, prompt_ids: Sequence[int], ids: Sequence[int]) -> _Pass:
    stops = sorted(target.stop_token_ids)
    # The pass gives scores for each token but reads the last one nowhere.
    behind = stops[:1] or [0]
    text, gaps, best = [*prompt_ids, *ids, *behind], list[float](), list[int]()
    right_logprobs, rounded_logprobs, errors = list[float](), list[float](), list[Tensor]()
    end_gap = math.inf
    for position, right_V, rounded_V in trusted_logits(target, text, len(prompt_ids)):
        errors.append(rounding_errors(right_V, rounded_V))
        highest = float(right_V.max())
        if position == len(text) - 1:
            end_gap = highest - float(right_V[stops].max()) if stops else math.inf
            continue
        token = text[position]
        gaps.append(highest - float(right_V[token]))
        best.append(int(right_V.argmax()))
        for scores_V, found in ((right_V, right_logprobs), (rounded_V, rounded_logprobs)):
            found.append(float(scores_V[token] - scores_V.logsumexp(-1)))
    deviation = float(torch.cat(errors).square().mean().sqrt())
    limit = max(FLOAT32_TIE, DEVIATIONS * deviation)
    return _Pass(gaps, best, right_logprobs, rounded_logprobs, end_gap, limit)
