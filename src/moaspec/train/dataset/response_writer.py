"""The target writes text for many conversations at once, through the engine."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moaspec.errors import InputError
from moaspec.sampling.params import SamplingParams

if TYPE_CHECKING:
    from moaspec.drafting.protocols import Drafter
    from moaspec.engine.engine import Engine
    from moaspec.engine.result import GenerationResult
    from moaspec.generation.options import RowOptions
    from moaspec.model.moa import MoADrafter
    from moaspec.target.generation_defaults import GenerationDefaults
    from moaspec.target.target import Target

Row = dict[str, Any]
"""One line of output."""


@dataclass(frozen=True)
class WriteRequest:
    """A request to let the target continue a prompt; the number tells conversations apart."""

    prompt_ids: Sequence[int]
    number: int


Author = Generator[WriteRequest, "GenerationResult", list[Row]]
"""One conversation in the making: asks, is sent what the target wrote, in the end has rows."""


@dataclass(frozen=True, kw_only=True)
class Writing:
    """How the target writes.

    Attributes:
        max_new_tokens: at most so many in a turn.
        batch_size: conversations that are decoded together.
        group_size: conversations that are saved together. Within a group a finished one makes room
            for the next; groups are decoded one after another, each with an engine of its own, so
            that a group's text does not depend on where an earlier run was interrupted.
        temperature, top_p: of sampling; temperature 0 takes the best token. A `top_p` of None is
            the target's own.
        seed: of the noise; every conversation has noise of its own.
    """

    max_new_tokens: int = 512
    batch_size: int = 8
    group_size: int = 64
    temperature: float = 0.0
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        top_p = 1.0 if self.top_p is None else self.top_p
        SamplingParams(temperature=self.temperature, top_p=top_p, seed=self.seed)
        for name in ("max_new_tokens", "batch_size", "group_size"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}.")

    def sampling(self, number: int, defaults: GenerationDefaults | None = None) -> SamplingParams:
        """Settings of one conversation: a choice of its own under the run's seed.

        Args:
            number: of the conversation.
            defaults: the target's, for what is not said here; None for none.
        """
        from moaspec.generation.options import sampling_params
        from moaspec.target.generation_defaults import NO_DEFAULTS

        options: RowOptions = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "choice": number,
        }
        return sampling_params(options, defaults or NO_DEFAULTS)


Advance = Callable[[int, int], None]
"""Called with (new tokens, finished conversations) after each step of the engine."""


class ResponseWriter:
    """Decodes groups of conversations with one target.

    Args:
        target: who writes.
        drafter: makes it faster; None decodes plainly.
        writing: how.
        stop_token_ids: ids that end a turn; None takes the target's own.
        advance: is told of progress.
    """

    def __init__(
        self,
        target: Target,
        drafter: MoADrafter | Drafter | None,
        writing: Writing,
        *,
        stop_token_ids: Collection[int] | None = None,
        advance: Advance = lambda *_: None,
    ) -> None:
        self.target, self.writing = target, writing
        self._drafter, self._advance = drafter, advance
        self._stops = target.stop_token_ids if stop_token_ids is None else stop_token_ids

    def write(self, authors: Sequence[Author]) -> list[Row]:
        """Bring one group to its end; rows are in the authors' order, not that of finishing.

        Prompts of like length are decoded together: a pass reads as many keys of every row as the
        longest has.
        """
        from moaspec.generation.local_engine import local_engine

        engine = local_engine(self.target, self._drafter)
        rows: list[list[Row]] = [[] for _ in authors]
        waiting = deque(sorted(enumerate(map(_first, authors)), key=_prompt_length, reverse=True))
        running: dict[int, tuple[int, GenerationResult]] = {}
        while waiting or running:
            while waiting and len(running) < self.writing.batch_size:
                index, step = waiting.popleft()
                if isinstance(step, WriteRequest):
                    handle = self._add(engine, step)
                    running[handle] = (index, engine.result(handle))
                else:
                    rows[index] = step
                    self._advance(0, 1)
            for event in engine.step():
                self._advance(len(event.token_ids), 0)
                if event.stop_reason is not None:
                    index, result = running.pop(event.handle)
                    # A conversation's next turn goes first, so that few are under way at once.
                    waiting.appendleft((index, _next(authors[index], result)))
        return [row for part in rows for row in part]

    def settings(self, **more: object) -> dict[str, object]:
        """What the text depends on, for the journal that keeps it."""
        defaults = self.target.generation_defaults.as_facts()
        return {
            "target": self.target.name,
            "identity": dataclasses.asdict(self.target.identity),
            "dtype": str(self.target.dtype),
            **dataclasses.asdict(self.writing),
            "top_p": self._sampling(0).top_p,
            **({"generation_config": defaults} if defaults else {}),
            **more,
        }

    def _sampling(self, number: int) -> SamplingParams:
        return self.writing.sampling(number, self.target.generation_defaults)

    def _add(self, engine: Engine, ask: WriteRequest) -> int:
        return engine.add(
            ask.prompt_ids,
            max_new_tokens=self.writing.max_new_tokens,
            stop_token_ids=self._stops,
            sampling=self._sampling(ask.number),
        )


def _prompt_length(waiting: tuple[int, WriteRequest | list[Row]]) -> int:
    step = waiting[1]
    return len(step.prompt_ids) if isinstance(step, WriteRequest) else 0


def _first(author: Author) -> WriteRequest | list[Row]:
    try:
        return next(author)
    except StopIteration as done:
        return done.value


def _next(author: Author, result: GenerationResult) -> WriteRequest | list[Row]:
    try:
        return author.send(result)
    except StopIteration as done:
        return done.value
