"""Decode a prompt plainly and speculatively, in turns, and compare time, passes and text.

The two decodings never run at once. Each has a clock that counts only its own passes, and the one
whose clock is behind makes the next pass. So both can be watched side by side, and other load on
the machine slows both alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from operator import add
from typing import Any

from moaspec.drafting.protocols import Drafter
from moaspec.engine.result import Source
from moaspec.evaluate.correctness.equality import Equality, judge
from moaspec.generation.api import start
from moaspec.model.moa import MoADrafter
from moaspec.sampling.incremental_text import TextStream
from moaspec.target.target import Target


@dataclass(frozen=True, kw_only=True)
class DecodingStats:
    """What one or several decodings took.

    Attributes:
        tokens: generated.
        seconds: of the decoding's own passes, the prompt's included.
        passes: of the target, each prompt's first one included.
        accepted: tokens that the drafter had proposed.
        copied: tokens that were proposed because the text had them before.
    """

    tokens: int = 0
    seconds: float = 0.0
    passes: int = 0
    accepted: int = 0
    copied: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Tokens over seconds; 0 before the first pass."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Tokens over passes; 0 before the first pass."""
        return self.tokens / self.passes if self.passes else 0.0

    def __add__(self, other: DecodingStats) -> DecodingStats:
        ours, theirs = asdict(self), asdict(other)
        return DecodingStats(**{name: ours[name] + theirs[name] for name in ours})

    def as_json(self) -> dict[str, Any]:
        """All numbers, the derived ones too."""
        return {
            **asdict(self),
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_pass": self.tokens_per_pass,
        }


class TimedDecoding:
    """One decoding of a prompt, advanced pass by pass.

    Args:
        target: decodes.
        drafter: proposes tokens; None decodes plainly.
        prompt_ids: of the prompt.
        max_new_tokens: where the text ends at the latest.

    Attributes:
        pieces: the text so far, with the source of each piece.
        seconds: time that `advance` has taken.
        done: whether the text has ended.
    """

    def __init__(
        self,
        target: Target,
        drafter: MoADrafter | Drafter | None,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
    ) -> None:
        self.pieces: list[tuple[str, Source]] = []
        self.done = False
        self._stream = TextStream(target.tokenizer, skip_special_tokens=True)
        started = time.perf_counter()
        engine, (self._result,) = start(
            target, [prompt_ids], drafter=drafter, max_new_tokens=max_new_tokens
        )
        self._events = engine.run()
        self.seconds = time.perf_counter() - started

    @property
    def token_ids(self) -> list[int]:
        """The text so far."""
        return self._result.token_ids

    @property
    def effort(self) -> DecodingStats:
        """What the text has taken so far."""
        sources = self._result.sources
        return DecodingStats(
            tokens=len(sources),
            seconds=self.seconds,
            passes=self._result.num_rounds + bool(sources),
            accepted=sources.count("draft"),
            copied=sources.count("copy"),
        )

    def advance(self) -> None:
        """Make one pass of the target, and draft for it."""
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
        """Leave the text as it is, whole or not."""
        self._events.close()


def run_race(
    plain: TimedDecoding,
    speculative: TimedDecoding,
    *,
    watch: Callable[[], None] = lambda: None,
    stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Let two runners take turns until both have ended.

    Args:
        plain: goes first where the clocks agree.
        speculative: the other one.
        watch: called after each pass, while no clock runs.
        stop: asked after each pass whether to end early.

    Returns:
        True when both texts are whole.
    """
    try:
        while running := [one for one in (plain, speculative) if not one.done]:
            min(running, key=lambda one: one.seconds).advance()
            watch()
            if stop():
                return False
        return True
    finally:
        plain.close()
        speculative.close()


@dataclass(frozen=True, kw_only=True)
class Race:
    """A prompt that was decoded both ways.

    Attributes:
        name: of the prompt.
        prompt: its text.
        plain: without drafts.
        speculative: with drafts.
        equality: of the two texts.
    """

    name: str
    prompt: str
    plain: DecodingStats
    speculative: DecodingStats
    equality: Equality

    @property
    def speedup(self) -> float | None:
        """See `speedup`; None where a text is wrong."""
        return speedup(self.plain, self.speculative) if self.equality.lossless else None


@dataclass(frozen=True)
class Races:
    """All prompts of a demonstration.

    Attributes:
        each: one race per prompt.
    """

    each: Sequence[Race]

    @property
    def plain(self) -> DecodingStats:
        """Sum over the prompts."""
        return reduce(add, [one.plain for one in self.each], DecodingStats())

    @property
    def speculative(self) -> DecodingStats:
        """Sum over the prompts."""
        return reduce(add, [one.speculative for one in self.each], DecodingStats())

    @property
    def lossless(self) -> bool:
        """Whether every text is the target's own."""
        return all(one.equality.lossless for one in self.each)

    @property
    def speedup(self) -> float | None:
        """Of all prompts together; None without prompts, or where a text is wrong."""
        return speedup(self.plain, self.speculative) if self.each and self.lossless else None

    def as_json(self) -> dict[str, Any]:
        """All that was measured."""
        return {
            "speedup": self.speedup,
            "lossless": self.lossless,
            "plain": self.plain.as_json(),
            "speculative": self.speculative.as_json(),
            "prompts": [
                {
                    "name": one.name,
                    "prompt": one.prompt,
                    "speedup": one.speedup,
                    "plain": one.plain.as_json(),
                    "speculative": one.speculative.as_json(),
                    "equality": asdict(one.equality),
                }
                for one in self.each
            ],
        }


def speedup(plain: DecodingStats, speculative: DecodingStats) -> float | None:
    """Ratio of tokens per second; None where nothing was decoded."""
    return speculative.tokens_per_s / plain.tokens_per_s if plain.tokens_per_s else None


def compare_texts(
    plain: TimedDecoding,
    speculative: TimedDecoding,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    trusted: Callable[[], Target],
) -> Equality:
    """Compare two whole texts; only where they differ is a trusted target asked which is right.

    Args:
        plain: has decoded without drafts.
        speculative: has decoded with drafts.
        prompt_ids: of both.
        max_new_tokens: of both.
        trusted: loads the target that judges; see `judge`.
    """
    if plain.token_ids == speculative.token_ids:
        return Equality("identical")
    return judge(
        trusted(),
        prompt_ids,
        plain.token_ids,
        speculative.token_ids,
        max_new_tokens=max_new_tokens,
    )
