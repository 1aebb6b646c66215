"""Decode a prompt plainly and speculatively in turn, and compare time, passes and text.

The decodings never run at the same time. Each has a clock that counts its own passes only, and the
one with the smaller clock makes the next pass. So both can be shown side by side, and other load on
the machine affects both equally. (`runner` measures whole decodings of any number of methods.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from moaspec.evaluate.correctness.equality import Equality, judge
from moaspec.generation.api import start
from moaspec.model.moa import MoADrafter
from moaspec.target.target import Target
from moaspec_core.drafting.protocols import Proposer
from moaspec_core.engine.request_state import Source
from moaspec_core.policy.policies import FreeBranches
from moaspec_core.sampling.incremental_text import TextStream

KINDS = ("identical", "near_tie", "different")  # of equality, from the best to the worst


@dataclass(frozen=True, kw_only=True)
class DecodingStats:
    """Statistics of one or several decodings."""

    tokens: int = 0
    seconds: float = 0.0  # time of the decoding's own passes, prompts included
    passes: int = 0  # target passes, prompts included
    accepted: int = 0  # accepted tokens of the drafter
    copied: int = 0  # accepted tokens of n-gram branches

    @property
    def tokens_per_s(self) -> float:
        """0 before the first pass."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def __add__(self, other: DecodingStats) -> DecodingStats:
        names = (field.name for field in fields(self))
        return DecodingStats(**{n: getattr(self, n) + getattr(other, n) for n in names})


class TimedDecoding:
    """One decoding of a prompt, advanced pass by pass.

    Attributes:
        pieces: the text so far, with the source of each piece.
        seconds: total time of `advance`.
    """

    def __init__(
        self,
        target: Target,
        drafter: MoADrafter | Proposer | None,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        *,
        free_branches: FreeBranches = "auto",
    ) -> None:
        self.pieces: list[tuple[str, Source]] = []
        self.done = False
        self._stream = TextStream(target.tokenizer, skip_special_tokens=True)
        started = time.perf_counter()
        engine, (self._result,) = start(
            target,
            [prompt_ids],
            drafter=drafter,
            max_new_tokens=max_new_tokens,
            free_branches=free_branches,
            temperature=0.0,  # whatever the model's own default is: both write one text
        )
        self._events = engine.run()
        self.seconds = time.perf_counter() - started

    @property
    def token_ids(self) -> list[int]:
        return self._result.token_ids

    @property
    def stats(self) -> DecodingStats:
        sources = self._result.sources
        return DecodingStats(
            tokens=len(sources),
            seconds=self.seconds,
            passes=self._result.num_rounds + bool(sources),
            accepted=sources.count("draft"),
            copied=sources.count("copy"),
        )

    def advance(self) -> None:
        """Run one round of the engine."""
        started = time.perf_counter()
        event = next(self._events, None)
        self.seconds += time.perf_counter() - started
        if event is None:
            self.done = True
            return
        self.done = event.stop_reason is not None
        for token, source in zip(event.token_ids, event.sources, strict=True):
            piece = self._stream.step(token)
            if piece:
                self.pieces.append((piece, source))

    def close(self) -> None:
        self._events.close()


def run_race(
    plain: TimedDecoding,
    speculative: TimedDecoding,
    *,
    watch: Callable[[], None] = lambda: None,
    stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Advance two decodings in turn until both have ended; the plain one goes first.

    After each pass `watch` is called, while no clock runs, and `stop`, which may end both early.

    Returns:
        True if both texts are complete.
    """
    try:
        while running := [run for run in (plain, speculative) if not run.done]:
            min(running, key=lambda run: run.seconds).advance()
            watch()
            if stop():
                return False
        return True
    finally:
        plain.close()
        speculative.close()


@dataclass(frozen=True, kw_only=True)
class Race:
    """Both decodings of one prompt, or of several prompts together."""

    plain: DecodingStats
    speculative: DecodingStats
    equality: Equality

    @classmethod
    def total(cls, races: Sequence[Race]) -> Race:
        """The sums, and the equality of the worst text."""
        return cls(
            plain=sum((race.plain for race in races), DecodingStats()),
            speculative=sum((race.speculative for race in races), DecodingStats()),
            equality=max((race.equality for race in races), key=lambda e: KINDS.index(e.kind)),
        )

    @property
    def speedup(self) -> float | None:
        """Ratio of tokens per second; None if a text is wrong."""
        if not self.equality.lossless:
            return None
        return self.speculative.tokens_per_s / self.plain.tokens_per_s


def compare_texts(
    plain: TimedDecoding,
    speculative: TimedDecoding,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    trusted: Callable[[], Target],
) -> Equality:
    """Compare two complete texts; if they differ, a trusted target judges them."""
    if plain.token_ids == speculative.token_ids:
        return Equality("identical")
    texts = (plain.token_ids, speculative.token_ids)
    return judge(trusted(), prompt_ids, *texts, max_new_tokens=max_new_tokens)
