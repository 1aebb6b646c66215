"""Measure methods side by side: same process, prompt ids, dtype and threads, in turn per prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from moaspec.errors import InputError
from moaspec.evaluate.equality import Equality, compare
from moaspec.evaluate.methods import Method, Run
from moaspec.evaluate.prompts import Prompt
from moaspec.evaluate.report import Outcome, Report
from moaspec.evaluate.store import Item, Sample, Store

WARM_UP_TOKENS = 8
TAU_BATCH = 8
"""Prompts decoded together by methods that are not timed."""

PLAIN = "plain"
T = TypeVar("T")
Encode = Callable[[Sequence[str], Sequence[Sequence[int]]], list[int]]
"""(a user's turns so far, token ids of the answers to all but the last) -> prompt ids."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to measure.

    Attributes:
        max_new_tokens: of each decoding.
        repeats: decodings of each prompt by each method.
        batch: prompts that a method decodes together; above 1, speed is throughput.

    Raises:
        InputError: a number below 1.
    """

    max_new_tokens: int = 128
    repeats: int = 1
    batch: int = 1

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "repeats", "batch"):
            value = getattr(self, name)
            if value < 1:
                raise InputError(f"{name} must be at least 1, got {value}.")


@dataclass
class _Session:
    """One call of `measure`."""

    methods: Sequence[Method]
    tau_only: Sequence[Method]
    settings: Settings
    store: Store
    advance: Callable[[], None]
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    number: int = 0

    @property
    def base(self) -> Method:
        """Whose texts all others are compared with."""
        return next((one for one in self.methods if one.name == PLAIN), self.methods[0])

    def timed(self, items: Sequence[Item]) -> None:
        """All methods in turn on these items, another one first each time."""
        batch = self.settings.batch
        missing = [one for one in self.methods if not self._have(one, items, batch)]
        runs: dict[str, list[list[Run]]] = {one.name: [] for one in missing}
        for _ in range(self.settings.repeats):
            for turn in range(len(missing)):
                method = missing[(self.number + turn) % len(missing)]
                runs[method.name].append(self._decode(method, items))
            self.number += 1
        for method in sorted(missing, key=lambda one: one.name != self.base.name):
            self._keep(method, items, runs[method.name], batch)
        self._collect(self.methods, items, batch)

    def untimed(self, items: Sequence[Item]) -> None:
        """Methods of which only tau is wanted."""
        for method in self.tau_only:
            if not self._have(method, items, TAU_BATCH):
                self._keep(method, items, [self._decode(method, items)], TAU_BATCH)
        self._collect(self.tau_only, items, TAU_BATCH)

    def answer(self, item: Item) -> list[int]:
        """The base's text."""
        sample = self.store.get(self.base.key, item, self.settings.batch)
        assert sample is not None, "the base has run before anyone asks for its text"
        return sample.runs[0].token_ids

    def _have(self, method: Method, items: Sequence[Item], batch: int) -> bool:
        return all(self.store.get(method.key, item, batch) is not None for item in items)

    def _decode(self, method: Method, items: Sequence[Item]) -> list[Run]:
        prompts, limit = [item.prompt_ids for item in items], self.settings.max_new_tokens
        if len(prompts) == 1:
            return [method.run(prompts[0], limit)]
        return method.run_many(prompts, limit)

    def _keep(
        self, method: Method, items: Sequence[Item], repeats: Sequence[Sequence[Run]], batch: int
    ) -> None:
        for item, runs in zip(items, zip(*repeats, strict=True), strict=True):
            own = method.name == self.base.name
            expected = runs[0].token_ids if own else self.answer(item)
            worst = _worst(_compare(method, item, expected, run) for run in runs)
            self.store.put(method.key, Sample(item, runs, worst, batch))

    def _collect(self, methods: Sequence[Method], items: Sequence[Item], batch: int) -> None:
        for method in methods:
            for item in items:
                sample = self.store.get(method.key, item, batch)
                assert sample is not None, "measured or read before"
                self.outcomes[method.name].samples.append(sample)
                self.advance()


def measure(
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    encode: Encode,
    settings: Settings,
    *,
    tau_only: Sequence[Method] = (),
    store: Store | None = None,
    advance: Callable[[], None] = lambda: None,
) -> Report:
    """Run every method on every prompt, starting with another method each time.

    Every text is compared with that of `plain`, or of the first method where plain is not run.
    Later turns of a conversation follow that method's answers, so that all see the same prompt.

    Args:
        methods: what to time.
        prompts: what to run it on.
        encode: turns and answers to prompt ids.
        settings: how to measure.
        tau_only: methods that decode several prompts together and are not timed.
        store: what was measured before, which is not measured again; all else is added to it.
        advance: called after each method on each turn, for a progress display.

    Raises:
        InputError: a method that cannot decode as many prompts together as asked.
    """
    _check(methods, tau_only, settings)
    outcomes = {one.name: Outcome(one) for one in methods}
    outcomes |= {one.name: Outcome(one, timed=False) for one in tau_only}
    session = _Session(methods, tau_only, settings, store or Store(), advance, outcomes)
    for method in methods:
        method.run(encode(prompts[0].turns[:1], ()), WARM_UP_TOKENS)
    items: list[Item] = []
    skipped: list[Item] = []
    room = methods[0].target.max_positions - settings.max_new_tokens
    for group in _chunks(prompts, settings.batch):
        for turn_items in _turns(group, encode, session.answer):
            fit = [item for item in turn_items if len(item.prompt_ids) <= room]
            skipped += [item for item in turn_items if len(item.prompt_ids) > room]
            turn_items[:] = fit
            if fit:
                session.timed(fit)
            items += fit
    for chunk in _chunks(items, TAU_BATCH):
        session.untimed(chunk)
    return Report(list(session.outcomes.values()), session.base.name, settings.batch, skipped)


def _turns(
    group: Sequence[Prompt], encode: Encode, answer: Callable[[Item], list[int]]
) -> Iterator[list[Item]]:
    """First turns of a group, then their second turns, ... Who drops an item ends its talk."""
    answers: dict[tuple[str, str], list[list[int]]] = {}
    going = list(group)
    for turn in range(max(len(prompt.turns) for prompt in group)):
        items = [
            Item(
                prompt,
                turn,
                tuple(
                    encode(
                        prompt.turns[: turn + 1],
                        answers.get((prompt.suite, prompt.question_id), ()),
                    )
                ),
            )
            for prompt in going
            if turn < len(prompt.turns)
        ]
        yield items
        going = [item.prompt for item in items]
        for item in items:
            key = (item.prompt.suite, item.prompt.question_id)
            if turn + 1 < len(item.prompt.turns):
                answers.setdefault(key, []).append(answer(item))


def _check(methods: Sequence[Method], tau_only: Sequence[Method], settings: Settings) -> None:
    together = [*(methods if settings.batch > 1 else ()), *tau_only]
    alone = [method.name for method in together if not method.batches]
    if alone:
        raise InputError(
            f"{alone[0]} decodes one prompt at a time; leave it out where several are decoded "
            "together (--batch, --tau-only)."
        )
    twice = {method.name for method in methods} & {method.name for method in tau_only}
    if twice:
        raise InputError(f"{sorted(twice)[0]} is both timed and in --tau-only; name it once.")


def _chunks(values: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]


def _compare(method: Method, item: Item, expected: list[int], run: Run) -> Equality:
    return compare(
        method.target,
        item.prompt_ids,
        expected,
        run.token_ids,
        resume=lambda ids, limit: method.run(ids, limit).token_ids,
    )


def _worst(found: Iterator[Equality]) -> Equality:
    order = ("identical", "near_tie", "different")
    return max(found, key=lambda one: order.index(one.kind))
