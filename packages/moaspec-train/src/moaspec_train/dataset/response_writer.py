"""Generate text for many conversations at once with the engine."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from moaspec_core.errors import DataError, InputError
from moaspec_core.sampling.params import SamplingParams

if TYPE_CHECKING:
    from moaspec.model.moa import MoADrafter
    from moaspec.target.spec import TargetSpec
    from moaspec.target.target import Target
    from moaspec_core.drafting.protocols import Proposer
    from moaspec_core.engine.engine import Engine
    from moaspec_core.engine.generate_options import GenerateOptions
    from moaspec_core.engine.request_state import GenerationResult
    from moaspec_train.dataset.answer_keeper import AnswerKeeper

OutputRow = dict[str, Any]  # one line of the output file


@dataclass(frozen=True)
class WriteRequest:
    """A prompt to continue, and the number of its conversation."""

    prompt_ids: Sequence[int]
    number: int


ConversationTask = Generator[WriteRequest, "GenerationResult", list[OutputRow]]
"""A coroutine of one conversation: yields requests, receives results, returns output rows.

It receives a DataError in place of a result that cannot be used.
"""
ConversationGroup = Mapping[int, ConversationTask]
"""The tasks of conversations that are saved together, by the conversation's number."""


@dataclass(frozen=True, kw_only=True)
class WriterOptions:
    """Options of a `ResponseWriter`."""

    max_new_tokens: int = 512  # largest number of tokens of a turn
    batch_size: int = 8  # conversations that are decoded together
    # Conversations that are saved together. Within a group a finished conversation makes room for
    # the next. Each group has a new engine, so its text does not depend on where an earlier run was
    # interrupted.
    group_size: int = 64
    # temperature, top_p: of sampling; temperature 0 is greedy. A `top_p` of None takes the target's
    # default.
    temperature: float = 0.0
    top_p: float | None = None
    seed: int = 0  # of the noise, combined with the conversation's number

    def __post_init__(self) -> None:
        top_p = 1.0 if self.top_p is None else self.top_p
        SamplingParams(temperature=self.temperature, top_p=top_p, seed=self.seed)
        for name in ("max_new_tokens", "batch_size", "group_size"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}.")


OnProgress = Callable[[int, int], None]
"""Called with (new tokens, finished conversations) after each step of the engine; may raise."""


class Writer(ABC):
    """Writes responses, with the engine or by a server; a context manager."""

    target: TargetSpec
    options: WriterOptions
    # Rows of finished conversations of groups under way, by the conversation's number. A group
    # stays until the next one is asked for, when the caller has saved its rows. What an earlier run
    # finished is put in before the first group.
    finished: dict[int, list[OutputRow]]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:  # noqa: B027 - only an endpoint's writer has something to close
        """Leave the server, if there is one."""

    def connect(self, prompt_ids: Sequence[int]) -> None:  # noqa: B027
        """Find out which form of prompts the server takes, before the first group."""

    @abstractmethod
    def settings(self, **more: object) -> dict[str, object]:
        """The settings that determine the rows."""

    @abstractmethod
    def write_groups(self, groups: Iterable[ConversationGroup]) -> Iterator[list[OutputRow]]:
        """The rows of each group, in order."""


class ResponseWriter(Writer):
    """Decodes groups of conversations with one target.

    Args:
        drafter: for speculative decoding; None decodes plainly.
        keeper: keeps what training needs of each answer; only without drafter.
        stop_token_ids: ids that end a turn; None takes the target's own.
        advance: called with the progress.

    Attributes:
        finished: see `Writer`.
    """

    def __init__(
        self,
        target: Target,
        drafter: MoADrafter | Proposer | None,
        options: WriterOptions,
        *,
        keeper: AnswerKeeper | None = None,
        stop_token_ids: Collection[int] | None = None,
        advance: OnProgress = lambda *_: None,
    ) -> None:
        self.target: Target = target
        self.options = options
        self.finished: dict[int, list[OutputRow]] = {}
        self._drafter, self._keeper, self._advance = drafter, keeper, advance
        self._stops = target.stop_token_ids if stop_token_ids is None else stop_token_ids

    def write_groups(self, groups: Iterable[ConversationGroup]) -> Iterator[list[OutputRow]]:
        return map(self.write, groups)

    def write(self, tasks: ConversationGroup) -> list[OutputRow]:
        """Run the tasks of one group; the rows are in the order of the tasks.

        Prompts of similar length are decoded together, because a pass reads as many keys of every
        request as the longest has.
        """
        from moaspec.generation.local_engine import local_engine

        keeper = self._keeper
        engine = keeper.engine() if keeper else local_engine(self.target, self._drafter)
        first = min(tasks, default=0)
        # Earlier groups are saved.
        self.finished = {n: rows for n, rows in self.finished.items() if n >= first}
        started = (
            (number, next_step(task, None))
            for number, task in tasks.items()
            if number not in self.finished
        )
        waiting = deque(sorted(started, key=_prompt_length, reverse=True))
        running: dict[int, tuple[int, WriteRequest, GenerationResult]] = {}
        while waiting or running:
            while waiting and len(running) < self.options.batch_size:
                number, step = waiting.popleft()
                if isinstance(step, WriteRequest):
                    handle = self._add(engine, step)
                    running[handle] = (number, step, engine.result(handle))
                else:
                    self.finished[number] = step
                    self._advance(0, 1)
            for event in engine.step():
                self._advance(len(event.token_ids), 0)
                if event.stop_reason is not None:
                    number, asked, result = running.pop(event.handle)
                    if keeper:
                        keeper.keep(asked.prompt_ids, result.token_ids)
                    # A next turn goes first, to keep the number of open conversations small.
                    waiting.appendleft((number, next_step(tasks[number], result)))
        return [row for number in tasks for row in self.finished[number]]

    def settings(self, **more: object) -> dict[str, object]:
        defaults = self.target.generation_defaults.as_dict()
        return {
            "target": self.target.name,
            "identity": self.target.identity.as_dict(),
            "dtype": str(self.target.dtype),
            **({"quantize": self.target.quantize} if self.target.quantize else {}),
            **dataclasses.asdict(self.options),
            "top_p": self._sampling(0).top_p,
            **({"generation_config": defaults} if defaults else {}),
            **more,
        }

    def _sampling(self, number: int) -> SamplingParams:
        from moaspec_core.engine.generate_options import sampling_params

        options: GenerateOptions = {
            "temperature": self.options.temperature,
            "top_p": self.options.top_p,
            "seed": self.options.seed,
            "choice": number,
        }
        return sampling_params(options, self.target.generation_defaults)

    def _add(self, engine: Engine, request: WriteRequest) -> int:
        return engine.add(
            request.prompt_ids,
            max_new_tokens=self.options.max_new_tokens,
            stop_token_ids=self._stops,
            sampling=self._sampling(request.number),
        )


def _prompt_length(waiting: tuple[int, WriteRequest | list[OutputRow]]) -> int:
    step = waiting[1]
    return len(step.prompt_ids) if isinstance(step, WriteRequest) else 0


def next_step(
    task: ConversationTask, result: GenerationResult | DataError | None
) -> WriteRequest | list[OutputRow]:
    """Start the task (result None) or resume it, up to its next request or its rows."""
    try:
        if isinstance(result, DataError):
            return task.throw(result)
        return next(task) if result is None else task.send(result)
    except StopIteration as done:
        return done.value
