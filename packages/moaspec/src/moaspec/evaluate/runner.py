"""Measure methods in one process, alternating on the same prompt ids."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from typing import Any, TypeVar

from moaspec.evaluate.correctness.equality import AuditedText, audit, compare
from moaspec.evaluate.method_names import require_known_noise
from moaspec.evaluate.methods import Method, MethodRun
from moaspec.evaluate.prompt_suites import Prompt
from moaspec.evaluate.report.report import Outcome, Report
from moaspec.evaluate.results_store import PromptTurn, ResultsStore, Sample
from moaspec.target.target import Target
from moaspec_core.engine.generate_options import sampling_params
from moaspec_core.errors import InputError
from moaspec_core.sampling.generation_defaults import NO_DEFAULTS, GenerationDefaults
from moaspec_core.sampling.params import SamplingParams

WARM_UP_PROMPT, WARM_UP_TOKENS = 64, 8
"""The warm-up: largest number of tokens of the first prompt, and new tokens."""

TAU_BATCH = 8  # batch size of methods that are not timed

PLAIN = "plain"
ORDER = {"identical": 0, "near_tie": 1, "different": 2}
SAMPLED = ("temperature", "seed")  # settings that do not affect greedy results
T = TypeVar("T")
Encode = Callable[[Sequence[str], Sequence[Sequence[int]]], list[int]]
"""(user turns, token ids of the answers to all but the last one) -> prompt ids."""


@dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """Settings of a measurement; InputError for a number out of range."""

    max_new_tokens: int = 128
    repeats: int = 1  # decodings of each prompt by each method
    batch: int = 1  # prompts that a method decodes together; above 1, speed is throughput
    temperature: float = 0.0  # of sampling; 0 is greedy
    seed: int = 0  # of the noise; all methods sample the same text

    def __post_init__(self) -> None:
        self.sampling()  # checks its values
        for name in ("max_new_tokens", "repeats", "batch"):
            value = getattr(self, name)
            if value < 1:
                raise InputError(f"{name} must be at least 1, got {value}.")

    def sampling(self, defaults: GenerationDefaults = NO_DEFAULTS) -> SamplingParams:
        return sampling_params({"temperature": self.temperature, "seed": self.seed}, defaults)

    def as_dict(self) -> dict[str, Any]:
        """As JSON; greedy settings omit temperature and seed."""
        info = asdict(self)
        return info if self.temperature else {k: info[k] for k in info if k not in SAMPLED}

    @property
    def choice(self) -> str:
        if not self.temperature:
            return "greedy"
        return f"temperature {self.temperature:g}, seed {self.seed}"


@dataclass
class _Session:
    methods: Sequence[Method]
    settings: EvalSettings
    trusted: Target
    store: ResultsStore
    advance: Callable[[], None]
    outcomes: dict[str, Outcome]
    items: list[PromptTurn] = field(default_factory=list)
    skipped: list[PromptTurn] = field(default_factory=list)
    number: int = 0

    @property
    def base(self) -> Method:
        """The baseline of speed-ups, whose answers later turns follow."""
        return next((method for method in self.methods if method.name == PLAIN), self.methods[0])

    @property
    def room(self) -> int:
        """Length of the longest prompt that leaves room for its answer."""
        return self.methods[0].target.max_positions - self.settings.max_new_tokens

    def measure_turns(self, prompts: Sequence[Prompt], encode: Encode) -> None:
        """Measure first turns together, then second turns, ...; skip turns that do not fit."""
        talks: list[tuple[Prompt, list[list[int]]]] = [(prompt, []) for prompt in prompts]
        while talks:
            fit = []
            for prompt, answers in talks:
                turn = len(answers)
                ids = tuple(encode(prompt.turns[: turn + 1], answers))
                item = PromptTurn(prompt, turn, ids)
                if len(ids) <= self.room:
                    fit.append((item, answers))
                else:
                    self.skipped.append(item)
            items = [item for item, _ in fit]
            if items:
                self.run(self.methods, items, self.settings.batch, self.settings.repeats)
            self.items += items
            talks = [
                (item.prompt, [*answers, self.answer(item)])
                for item, answers in fit
                if item.turn + 1 < len(item.prompt.turns)
            ]

    def run(
        self, methods: Sequence[Method], items: Sequence[PromptTurn], batch: int, repeats: int = 1
    ) -> None:
        """Run methods in turn on these items, with another one first each time."""
        missing = [
            method
            for method in methods
            if any(self.store.get(method.key, item, batch) is None for item in items)
        ]
        runs: dict[str, list[list[MethodRun]]] = {method.name: [] for method in missing}
        for _ in range(repeats):
            for turn in range(len(missing)):
                method = missing[(self.number + turn) % len(missing)]
                runs[method.name].append(self._decode(method, items))
            self.number += 1
        for method in sorted(missing, key=lambda method: method.name != self.base.name):
            self._keep(method, items, runs[method.name], batch)
        for method in methods:
            for item in items:
                sample = self.store.get(method.key, item, batch)
                assert sample is not None, "measured or read before"
                self.outcomes[method.name].samples.append(sample)
                self.advance()

    def drop_unfinished(self) -> bool:
        """Keep prompts that all timed methods finished; KeyboardInterrupt if there is none."""
        whole = min(len(self.outcomes[method.name].samples) for method in self.methods)
        if not whole:
            raise KeyboardInterrupt
        for outcome in self.outcomes.values():
            del outcome.samples[whole:]
        self.items = [sample.item for sample in self.outcomes[self.base.name].samples]
        self.outcomes = {
            name: outcome
            for name, outcome in self.outcomes.items()
            if len(outcome.samples) == whole
        }
        return True

    def answer(self, item: PromptTurn) -> list[int]:
        sample = self.store.get(self.base.key, item, self.settings.batch)
        assert sample is not None, "the base has run before anyone asks for its text"
        return sample.runs[0].token_ids

    def _decode(self, method: Method, items: Sequence[PromptTurn]) -> list[MethodRun]:
        prompts, limit = [item.prompt_ids for item in items], self.settings.max_new_tokens
        return method.run_many(prompts, limit, self.settings.sampling())

    def _keep(
        self,
        method: Method,
        items: Sequence[PromptTurn],
        repeats: Sequence[Sequence[MethodRun]],
        batch: int,
    ) -> None:
        for item, runs in zip(items, zip(*repeats, strict=True), strict=True):
            own = method.name == self.base.name
            expected = runs[0].token_ids if own else self.answer(item)
            base, *texts = (
                self._audit(item.prompt_ids, tuple(token_ids))
                for token_ids in (expected, *(run.token_ids for run in runs))
            )
            worst = max((compare(text, base) for text in texts), key=lambda one: ORDER[one.kind])
            self.store.put(method.key, Sample(item, runs, worst, batch))

    @cached_property
    def _audit(self) -> Callable[[tuple[int, ...], tuple[int, ...]], AuditedText]:
        """Audits a text of a prompt once; most methods produce the same one."""
        trusted, limit = self.trusted, self.settings.max_new_tokens
        sampling = self.settings.sampling(trusted.generation_defaults)

        @cache
        def audited(prompt_ids: tuple[int, ...], token_ids: tuple[int, ...]) -> AuditedText:
            return audit(trusted, prompt_ids, token_ids, sampling, max_new_tokens=limit)

        return audited


def measure(
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    encode: Encode,
    settings: EvalSettings,
    *,
    tau_only: Sequence[Method] = (),
    trusted: Target | None = None,
    store: ResultsStore | None = None,
    advance: Callable[[], None] = lambda: None,
) -> Report:
    """Run every method on every prompt, starting with another method each time.

    Every text is checked against the target (see `equality`) and compared with that of `plain`, or
    of the first method without `plain`. Later turns of a conversation follow that method's answers,
    so all methods see the same prompt.

    Args:
        encode: turns and answers to prompt ids.
        tau_only: methods that decode several prompts together and are not timed.
        trusted: judges the texts: the target as transformers loads it, not packed. None takes the
            target of the first method.
        store: earlier results, which are reused; new ones are added to it.

    Raises:
        KeyboardInterrupt: before anything was measured; later, the report is marked interrupted.
        InputError: a method cannot decode this many prompts together or samples with noise of its
            own, or no prompt fits into the target's context.
    """
    _check(methods, tau_only, settings)
    outcomes = {method.name: Outcome(method) for method in methods}
    outcomes |= {method.name: Outcome(method, timed=False) for method in tau_only}
    session = _Session(
        methods,
        settings,
        trusted or methods[0].target,
        store or ResultsStore(),
        advance,
        outcomes,
    )
    if session.room < 1:
        raise InputError(
            f"{settings.max_new_tokens} new tokens leave no room for a prompt in the context of "
            f"{methods[0].target.name} ({methods[0].target.max_positions}); ask for fewer."
        )
    begun = encode(prompts[0].turns[:1], ())[: min(session.room, WARM_UP_PROMPT)]
    for method in methods:
        method.run(begun, WARM_UP_TOKENS, settings.sampling())
    interrupted = False
    try:
        for group in _chunks(prompts, settings.batch):
            session.measure_turns(group, encode)
        for chunk in _chunks(session.items, TAU_BATCH):
            session.run(tau_only, chunk, TAU_BATCH)
    except KeyboardInterrupt:
        interrupted = session.drop_unfinished()
    if not session.items:
        raise InputError(
            f"No prompt fits into the context of {methods[0].target.name} with "
            f"{settings.max_new_tokens} new tokens; ask for fewer, or use shorter prompts."
        )
    return Report(
        list(session.outcomes.values()),
        session.base.name,
        settings.batch,
        session.skipped,
        settings.choice,
        interrupted,
    )


def _check(methods: Sequence[Method], tau_only: Sequence[Method], settings: EvalSettings) -> None:
    together = [*(methods if settings.batch > 1 else ()), *tau_only]
    alone = [method.name for method in together if not method.batches]
    if alone:
        raise InputError(
            f"{alone[0]} decodes one prompt at a time; leave it out where several are decoded "
            "together (--batch, --tau-only)."
        )
    require_known_noise([method.name for method in (*methods, *tau_only)], settings.temperature)
    twice = {method.name for method in methods} & {method.name for method in tau_only}
    if twice:
        raise InputError(f"{sorted(twice)[0]} is both timed and in --tau-only; name it once.")


def _chunks(values: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]
