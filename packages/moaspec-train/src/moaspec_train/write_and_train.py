"""`moaspec train --continuous`: alternate writing answers and training; keep the best drafter.

The target answers a group of prompts, and `AnswerKeeper` stores its states for training. The
drafter trains on all answers so far, the newest first, at a constant rate. An average of its
weights is measured and exported. How fast this machine writes and how fast it trains decide
which of the two comes next (`passes_that_pay`).

Each part is saved when it is made: answers in `answers.jsonl`, their states in `kept`, weights in
`state/`. A stop loses the answers under way, a kill also the steps since the last save: at most a
minute's. Elsewhere, with the drafter alone as `initial`, a run goes on from its weights and with
the next prompts.
"""

import dataclasses
import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression
from typing import Any

from moaspec.data.conversations import Conversation
from moaspec.generation.drafters import find_drafter
from moaspec.target.target import Target
from moaspec_core.chat.chat_template import ChatTemplate
from moaspec_core.checkpoint.directory import read_config
from moaspec_core.errors import InputError
from moaspec_train.dataset.answer_keeper import AnswerKeeper
from moaspec_train.dataset.examples import Example
from moaspec_train.dataset.journal import Journal
from moaspec_train.dataset.read_examples import examples_of_answers
from moaspec_train.dataset.regenerate import fingerprint, first_prompt, written_groups
from moaspec_train.dataset.response_writer import OutputRow, ResponseWriter, WriterOptions
from moaspec_train.reports.run_log import StepMetrics
from moaspec_train.run_config import TrainConfig
from moaspec_train.stopping import StopCause, StopCondition
from moaspec_train.students.students import MoAStudent
from moaspec_train.trainer import Trainer

log = logging.getLogger("moaspec.write_and_train")

SAVE_EVERY_S = 45.0
"""Seconds between two saved states, or between two looks for finished answers to save."""
TELL_EVERY_S = 60.0
MEASURING_SHARE, LONGEST_WAIT_S = 0.05, 900.0
"""Share of the time for held-out measurements; and the longest time between two, in seconds."""
FIRST_TOGETHER, MOST_TOGETHER, GROUP_SIZE = 16, 64, 128
"""Answers that are decoded together: before the speed is known, and at most; and those of a group,
after which training may go on."""
ANSWER_S = 40.0
"""Seconds that the longest answer may take: what a stop can lose. It bounds the answers that are
decoded together."""
AVERAGE_STEPS = 100
REPEATS = 5.0
"""The n-th pass over a text teaches exp(-(n - 1) / REPEATS) of the first one: the law of arXiv
2305.16264. Its constant is 15 for large models; small drafters need fresh texts sooner (a run with
five passes had 81% accuracy in training and 74% held out)."""
MOST_PASSES = 20
LEAST_GAIN, LEAST_SPAN = 0.05, 0.3
"""A doubling of the trained tokens that brings less tau does not pay; it is known when that many
doublings are measured."""
ENDLESS = 1 << 40  # steps


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        seconds: of this process.
        written: tokens of answers in all.
        written_per_s: while it writes.
        trained: tokens with loss in all, those of the initial drafter's runs included.
        trained_per_s: while it trains.
        tau: the last held-out one, None before the first.
        doubling: tau that the next doubling of the trained tokens is expected to bring, and its
            hours; None if too little is measured.
    """

    seconds: float
    written: int
    written_per_s: float
    trained: int
    trained_per_s: float
    tau: float | None
    doubling: tuple[float, float] | None

    @property
    def pays(self) -> bool:
        """Whether another doubling is expected to bring `LEAST_GAIN`."""
        return self.doubling is None or self.doubling[0] >= LEAST_GAIN


class _StopWritingError(Exception):
    """The run ends while answers are written."""


@dataclass
class _Speed:
    tokens: int = 0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens += tokens
        self.seconds += seconds

    @property
    def per_s(self) -> float:
        """0 if nothing is measured."""
        return self.tokens / self.seconds if self.seconds else 0.0


class Answers:
    """The target's answers to a run's prompts, in a file that grows by groups.

    Args:
        conversations: the prompts, as `check_prompts` returns them.
        advance: called with the new tokens while answers are written; may raise.

    Attributes:
        examples: of all answers so far.

    Raises:
        InputError, DataError: the file is another run's, or damaged.
    """

    def __init__(
        self,
        target: Target,
        config: TrainConfig,
        conversations: Sequence[Conversation],
        advance: Callable[[int], None],
    ) -> None:
        self._target, self._config, self._conversations = target, config, conversations
        self._advance = advance
        options = WriterOptions(
            max_new_tokens=config.max_new_tokens, batch_size=FIRST_TOGETHER, group_size=GROUP_SIZE
        )
        self._writer = ResponseWriter(target, None, options)
        settings = self._writer.settings(prompts=fingerprint(conversations))
        del settings["batch_size"]  # goes by the speed, and changes no answer
        self._journal = _journal(Path(config.output), settings)
        self.examples: list[Example] = []
        self._saved_tokens = self._new_tokens = 0
        with self._journal.path.open(encoding="utf-8") as file:
            self._take([json.loads(line) for line in file])
        self._groups: Iterator[list[OutputRow]] = iter(())

    @property
    def tokens(self) -> int:
        """Of all answers so far, those under way included."""
        return self._saved_tokens + self._new_tokens

    @property
    def num_prompts(self) -> int:
        return len(self._conversations)

    @property
    def asked(self) -> int:
        """Number of prompts that were answered."""
        return min(self._journal.groups * GROUP_SIZE, len(self._conversations))

    @property
    def all_written(self) -> bool:
        return self.asked == len(self._conversations)

    def prompts(self) -> list[Example]:
        """The prompts as examples, whose tokens count for a vocabulary."""
        template, length = ChatTemplate(self._target.tokenizer), self._config.max_length
        return [Example((), first_prompt(template, one)[:length]) for one in self._conversations]

    def begin(self, keeper: AnswerKeeper | None) -> None:
        """Store the states of the following answers by `keeper`."""
        self._writer = ResponseWriter(
            self._target, None, self._writer.options, keeper=keeper, advance=self._progress
        )
        self._groups = written_groups(self._writer, self._conversations, self._journal)
        self._saved_s = time.monotonic()

    def write_group(self, per_s: float) -> list[Example]:
        """Write the next answers; an interruption saves the finished ones.

        Args:
            per_s: tokens a second that were written so far; 0 if that is not known.

        Returns:
            Their examples; those without a loss are left out.
        """
        if per_s:
            together = int(per_s * ANSWER_S / self._config.max_new_tokens)
            together = min(max(together, 1), MOST_TOGETHER)
            self._writer.options = dataclasses.replace(self._writer.options, batch_size=together)
        try:
            return self._take(next(self._groups, []))
        except BaseException:
            self._journal.keep(self._writer.finished)
            raise

    def _progress(self, tokens: int, finished: int) -> None:
        del finished
        self._new_tokens += tokens
        if time.monotonic() >= self._saved_s + SAVE_EVERY_S:
            self._journal.keep(self._writer.finished)
            self._saved_s = time.monotonic()
        self._advance(tokens)

    def _take(self, rows: Sequence[Mapping[str, Any]]) -> list[Example]:
        new = examples_of_answers(rows, self._config.max_length)
        self.examples += new
        self._saved_tokens += sum(len(row["response_ids"]) for row in rows)
        self._new_tokens = 0
        return new

    def close(self) -> None:
        self._journal.close()


class WriteAndTrain:
    """A run in `config.output`, which goes on from what is there.

    Args:
        conversations: prompts to answer, as `check_prompts` returns them.
        data: examples that were written before, to train on too.
        held_out: what is measured on; none takes the first answers.
        disk_bytes: no answers are written where `config.output` and `config.kept` have more.
        report: called with the progress about once a minute.

    Raises:
        InputError: settings do not fit a run of this kind, or what is in `output`.
        DataError: the answers in `output` are damaged.
    """

    def __init__(
        self,
        target: Target,
        config: TrainConfig,
        conversations: Sequence[Conversation],
        *,
        data: Sequence[Example] = (),
        held_out: Sequence[Example] = (),
        disk_bytes: float = math.inf,
        report: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        self._config = continuous_settings(config)
        self._target, self._data, self._held_out = target, data, held_out
        self._disk_bytes, self._report = disk_bytes, report
        self._output, self._kept = Path(self._config.output), Path(self._config.kept)
        self._output.mkdir(parents=True, exist_ok=True)
        self._earlier = _EarlierRuns.of(config.initial, fingerprint(conversations))
        left = conversations[self._earlier.answered :]
        if not left:
            raise InputError(
                f"All {len(conversations)} prompts were answered for {config.initial} before: give "
                "other prompts."
            )
        self._answers = Answers(target, self._config, left, self._wrote)
        self._trainer: Trainer | None = None
        self._writing, self._training = _Speed(), _Speed()
        self._tau: float | None = None
        self._saved_step = -1
        self._told: set[str] = set()

    def run(self, *, seconds: float | None = None) -> StopCause:
        """Go on until a signal or the time limit; then save, and write the drafter.

        Raises:
            InputError: too few prompts, or settings that do not fit the target or the saved run.
            TrainingError: the run failed, or its saved state is damaged.
        """
        self._stop = StopCondition(seconds)
        self._started_s = self._told_s = self._wrote_s = time.monotonic()
        try:
            with self._stop.on_signals():
                trainer = self._begin()
                if trainer is not None:
                    with trainer.running():
                        self._alternate(trainer)
        finally:
            self._answers.close()
        return self._stop.due

    def _begin(self) -> Trainer | None:
        """Write the first answers and make the trainer; None if the run shall stop before."""
        config, answers = self._config, self._answers
        answers.begin(None)
        held_out = 0 if self._held_out else config.held_out
        while not self._is_enough(held_out):
            if answers.all_written or answers.num_prompts < held_out:
                raise InputError(
                    f"{answers.num_prompts} prompts give too few different answers for "
                    f"held_out={held_out} and batch_size={config.batch_size}: give more prompts."
                )
            self._write_group()
            if self._stop.due is not StopCause.FINISHED:
                return None
        if not config.initial:
            # Later answers do not change its vocabulary.
            sizes = dataclasses.replace(config.sizes, draft_vocab=0)
            config = dataclasses.replace(config, initial=str(self._first_drafter()), sizes=sizes)
        self._trainer = Trainer(
            self._target,
            [*self._data, *answers.examples[held_out:]],
            config,
            held_out=self._held_out or answers.examples[:held_out],
        )
        # What came with a drafter was trained on before.
        known = [] if self._config.initial else self._data
        self._available = _loss_tokens([*known, *answers.examples[held_out:]])
        self._trained_at_start = self._trainer.tokens
        answers.begin(self._keeper(self._trainer))
        return self._trainer

    def _is_enough(self, held_out: int) -> bool:
        """Whether there are answers to measure on, and others for a step."""
        answers = self._answers.examples
        if len(answers) < held_out:
            return False
        measured = {one.token_ids for one in self._held_out or answers[:held_out]}
        others = [
            one for one in (*self._data, *answers[held_out:]) if one.token_ids not in measured
        ]
        return len(others) >= self._config.batch_size

    def _first_drafter(self) -> Path:
        """A new drafter, whose vocabulary is that of answers and prompts."""
        directory = self._output / "first"
        if directory.exists():
            return directory
        written = [*self._data, *self._answers.examples]
        examples = [*written, *self._answers.prompts()]
        student = MoAStudent(self._target, self._config, examples, range(len(examples)))
        student.start(range(len(written)))
        scratch = directory.with_name("first.partial")
        shutil.rmtree(scratch, ignore_errors=True)
        student.save(student.module.cpu().state_dict(), scratch, {"steps": 0, "loss_tokens": 0})
        return scratch.rename(directory)

    def _keeper(self, trainer: Trainer) -> AnswerKeeper | None:
        module, length = trainer.student.module, self._config.max_length
        try:
            return AnswerKeeper(self._target, module, self._kept, max_length=length)
        except InputError as error:
            log.warning("The target reads each answer again to train on it. %s", error)
            return None

    def _alternate(self, trainer: Trainer) -> None:
        """Alternate writing and training until the run shall stop."""
        if trainer.best is None:
            self._measure(trainer, StepMetrics(trainer.step, trainer.tokens, 0, 0, 0, 0, 0))
        self._next_measurement_s = time.monotonic() + TELL_EVERY_S
        self._save(trainer)
        while self._stop.due is StopCause.FINISHED:
            if self._wants_answers(trainer):
                self._save(trainer)
                new = self._write_group()
                trainer.add(new)
                self._available += _loss_tokens(new)
            else:
                self._train(trainer)
        self._save(trainer)
        trainer.export()

    def _wants_answers(self, trainer: Trainer) -> bool:
        """Whether the answers so far have been trained on as often as it pays."""
        passes = passes_that_pay(self._writing.per_s, self._training.per_s)
        if trainer.tokens < passes * self._available:
            return False
        if self._answers.all_written:
            self._warn_once("All prompts are answered. Training goes on with what there is.")
            return False
        if self._is_full():
            self._warn_once("The disk space of this run is used up: it writes no more answers.")
            return False
        return True

    def _warn_once(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            log.warning(sentence)

    def _is_full(self) -> bool:
        if self._disk_bytes == math.inf:
            return False
        is_inside = self._kept.resolve().is_relative_to(self._output.resolve())
        places = [self._output] if is_inside else [self._output, self._kept]
        return sum(map(_bytes_in, places)) >= self._disk_bytes

    def _write_group(self) -> list[Example]:
        """Write answers; none where the run shall stop."""
        self._wrote_s = time.monotonic()
        try:
            return self._answers.write_group(self._writing.per_s)
        except _StopWritingError:
            return []

    def _wrote(self, tokens: int) -> None:
        now = time.monotonic()
        self._writing.add(tokens, now - self._wrote_s)
        self._wrote_s = now
        self._tell()
        if self._stop.due is not StopCause.FINISHED:
            raise _StopWritingError

    def _train(self, trainer: Trainer) -> None:
        """Train a step; measure and save where that is due."""
        started, before = time.monotonic(), trainer.tokens
        metrics = trainer.timed_step()
        now = time.monotonic()
        self._training.add(trainer.tokens - before, now - started)
        if now >= self._next_measurement_s:
            self._measure(trainer, metrics)
        else:
            trainer.log_step(metrics, measure=False)
        if now >= self._saved_s + SAVE_EVERY_S:
            self._save(trainer)
        self._tell()

    def _measure(self, trainer: Trainer, metrics: StepMetrics) -> None:
        started = time.monotonic()
        self._describe(trainer)
        found = trainer.log_step(metrics, measure=True).held_out_tau or {}
        self._tau = next(iter(found.values()), None)
        wait = (time.monotonic() - started) / MEASURING_SHARE
        self._next_measurement_s = time.monotonic() + min(max(wait, TELL_EVERY_S), LONGEST_WAIT_S)

    def _save(self, trainer: Trainer) -> None:
        self._describe(trainer)
        if trainer.step != self._saved_step:
            trainer.save()
        self._saved_step, self._saved_s = trainer.step, time.monotonic()

    def _describe(self, trainer: Trainer) -> None:
        """What exported drafters say of themselves, for runs that go on from them."""
        trainer.about = {
            "earlier_loss_tokens": self._earlier.trained,
            "prompts": {
                "fingerprint": self._earlier.prompts,
                "answered": self._earlier.answered + self._answers.asked,
            },
        }

    @property
    def _trained(self) -> int:
        """Tokens with loss, those of earlier runs included."""
        return self._earlier.trained + (self._trainer.tokens if self._trainer else 0)

    def _tell(self) -> None:
        now = time.monotonic()
        if now >= self._told_s + TELL_EVERY_S:
            self._told_s = now
            self._report(self._progress(now - self._started_s))

    def _progress(self, seconds: float) -> Progress:
        doubling = None
        if self._trainer is not None:
            new = self._trainer.tokens - self._trained_at_start
            slope = tau_per_doubling(self._trainer.log.rows(), self._earlier.trained)
            if new and slope is not None:
                doubling = (slope, seconds / 3600 * self._trained / new)
        return Progress(
            seconds=seconds,
            written=self._answers.tokens,
            written_per_s=self._writing.per_s,
            trained=self._trained,
            trained_per_s=self._training.per_s,
            tau=self._tau,
            doubling=doubling,
        )


@dataclass(frozen=True)
class _EarlierRuns:
    """Earlier work for the initial drafter.

    Attributes:
        trained: tokens with loss.
        prompts: hash of this run's prompts.
        answered: number of them that were answered.
    """

    trained: int
    prompts: str
    answered: int

    @classmethod
    def of(cls, initial: str, prompts: str) -> "_EarlierRuns":
        about = read_config(find_drafter(initial)).get("training", {}) if initial else {}
        try:
            trained = sum(
                int(about.get(name, 0)) for name in ("loss_tokens", "earlier_loss_tokens")
            )
            asked = about.get("prompts", {})
            same = asked.get("fingerprint") == prompts
            return cls(trained, prompts, int(asked["answered"]) if same else 0)
        except (AttributeError, KeyError, TypeError, ValueError):
            return cls(0, prompts, 0)  # a drafter of another trainer


def continuous_settings(config: TrainConfig) -> TrainConfig:
    """The settings of a run without end: a constant rate, and an average of the weights.

    Raises:
        InputError: settings that do not fit.
    """
    if not config.prompts:
        raise InputError("--continuous writes answers to prompts: set prompts='[\"FILE\"]'.")
    if config.drafter != "moa" or config.frozen_lsa != 1.0:
        raise InputError(
            "--continuous keeps what a frozen LSA computes: set frozen_lsa=1, with drafter=moa."
        )
    if config.staircase:
        raise InputError("staircase goes by the number of steps, which --continuous has not.")
    if config.max_new_tokens < 2:
        raise InputError("max_new_tokens must be 2 or more: a token alone teaches nothing.")
    if not config.held_out and not config.held_out_data:
        raise InputError("--continuous keeps the best drafter on held-out text: set held_out.")
    return dataclasses.replace(
        config,
        steps=ENDLESS,
        final_lr=1.0,
        average_steps=config.average_steps or AVERAGE_STEPS,
        kept=config.kept or str(Path(config.output) / "means"),
    )


def passes_that_pay(written_per_s: float, trained_per_s: float) -> int:
    """Passes over a text before new ones are written: the number that teaches most an hour.

    With p passes a token costs 1 / `written_per_s` + p / `trained_per_s` seconds. See `REPEATS` for
    what it teaches.

    Args:
        written_per_s, trained_per_s: tokens a second of each alone; 0 if not known.
    """
    cost = trained_per_s / written_per_s if written_per_s and trained_per_s else 1.0
    decay = math.exp(-1 / REPEATS)

    def taught_per_cost(passes: int) -> float:
        return (1 - decay**passes) / (cost + passes)

    return max(range(1, MOST_PASSES + 1), key=taught_per_cost)


def tau_per_doubling(rows: Sequence[Mapping[str, Any]], earlier: int) -> float | None:
    """Held-out tau that a doubling of the trained tokens brought lately; None if that is not known.

    The slope of a line through the measurements of the last two doublings over the logarithm of the
    tokens.

    Args:
        rows: of a run's log.
        earlier: tokens before this run.
    """
    points = []
    for row in rows:
        tau = next(iter((row.get("held_out_tau") or {}).values()), None)
        tokens = earlier + row["tokens"]
        if tau is not None and tokens:
            points.append((math.log2(tokens), tau))
    points = [point for point in points if point[0] >= points[-1][0] - 2]
    if len(points) < 3 or points[-1][0] - points[0][0] < LEAST_SPAN:
        return None
    logs, taus = zip(*points, strict=True)
    return linear_regression(logs, taus).slope


def _loss_tokens(examples: Sequence[Example]) -> int:
    return sum(one.num_response_tokens for one in examples)


def _bytes_in(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def _journal(output: Path, settings: Mapping[str, Any]) -> Journal:
    try:
        return Journal(output / "answers.jsonl", settings)
    except InputError as error:
        raise InputError(
            f"{error} A run with other prompts or settings needs another output; "
            f"initial={output / 'drafter'} goes on from its drafter."
        ) from error
