"""Decode a prompt plainly and speculatively in turn, and compare time, passes and text.

The decodings never run at the same time. Each has a clock that counts its own passes only, and the
one with the smaller clock makes the next pass. So both can be shown side by side, and other load on
the machine affects both equally. (`runner` measures whole decodings of any number of methods.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from moaspec.evaluate.correctness.equality import Equality, judge
from moaspec.generation.api import start
from moaspec.model.moa import MoADrafter
from moaspec.target.target import Target
from moaspec_core.drafting.protocols import Proposer
from moaspec_core.engine.request_state import Source
from moaspec_core.policy.policies import FreeBranches
from moaspec_core.sampling.incremental_text import TextStream


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

    @property
    def tokens_per_pass(self) -> float:
        """0 before the first pass."""
        return self.tokens / self.passes if self.passes else 0.0

    @classmethod
    def total(cls, parts: Iterable[DecodingStats]) -> DecodingStats:
        each = list(parts)
        return cls(**{f.name: sum(getattr(one, f.name) for one in each) for f in fields(cls)})

    def as_json(self) -> dict[str, Any]:
        speeds = {"tokens_per_s": self.tokens_per_s, "tokens_per_pass": self.tokens_per_pass}
        return asdict(self) | speeds


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
    """Results of one prompt."""

    name: str
    prompt: str
    plain: DecodingStats
    speculative: DecodingStats
    equality: Equality

    @property
    def speedup(self) -> float | None:
        """Speed-up of the speculative decoding; None if a text is wrong."""
        return speedup(self.plain, self.speculative) if self.equality.lossless else None


@dataclass(frozen=True)
class Races:
    """Results of all prompts; `each` has one race per prompt."""

    each: Sequence[Race]

    @property
    def plain(self) -> DecodingStats:
        return DecodingStats.total(race.plain for race in self.each)

    @property
    def speculative(self) -> DecodingStats:
        return DecodingStats.total(race.speculative for race in self.each)

    @property
    def lossless(self) -> bool:
        return all(race.equality.lossless for race in self.each)

    @property
    def speedup(self) -> float | None:
        """Speed-up over all prompts; None without prompts, or if a text is wrong."""
        return speedup(self.plain, self.speculative) if self.each and self.lossless else None

    def as_json(self) -> dict[str, Any]:
        prompts = [
            {
                "name": race.name,
                "prompt": race.prompt,
                **_stats_json(race),
                "equality": asdict(race.equality),
            }
            for race in self.each
        ]
        return {**_stats_json(self), "lossless": self.lossless, "prompts": prompts}


def _stats_json(found: Race | Races) -> dict[str, Any]:
    return {
        "speedup": found.speedup,
        "plain": found.plain.as_json(),
        "speculative": found.speculative.as_json(),
    }


def speedup(plain: DecodingStats, speculative: DecodingStats) -> float | None:
    """Ratio of tokens per second; None if nothing was decoded."""
    return speculative.tokens_per_s / plain.tokens_per_s if plain.tokens_per_s else None


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
