"""The training loop: distil the frozen target into a drafter, on one process or many."""

import dataclasses
import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from moaspec.model.layers import weights_of_a_step
from moaspec.target.target import Target
from moaspec_core.errors import InputError, TrainingError
from moaspec_core.support.locks import claimed
from moaspec_train.accelerators import fast_products, peak_memory
from moaspec_train.data_order import DataOrder, NextBatch, TrainBatch, split_batch
from moaspec_train.dataset.examples import Example
from moaspec_train.parallelism import new_accelerator, new_strategy, split_state, sum_over_processes
from moaspec_train.reports.model_card import write_card
from moaspec_train.reports.run_log import (
    BestStep,
    OnStep,
    RunLog,
    StepMetrics,
    held_out_score,
    step_metrics,
    tracker_values,
)
from moaspec_train.reports.run_notes import run_notes
from moaspec_train.run_config import TrainConfig, learning_rate, num_passes
from moaspec_train.run_failures import explain_failures
from moaspec_train.stopping import StopCause, StopCondition
from moaspec_train.students.held_out import HeldOutMetrics, measure_held_out
from moaspec_train.students.losses import LossSums
from moaspec_train.students.students import BaselineStudent, MoAStudent, Student
from moaspec_train.students.target_activations import target_fingerprint
from moaspec_train.training_state import StateFiles, damaged_state

log = logging.getLogger("moaspec.trainer")

LAST, BEST = "drafter", "best"
"""Directories of the last weights, and of those with the highest held-out simulated tau."""

FIXED_SETTINGS = ("drafter", "num_target_layers", "sizes", "held_out", "seed", "optimizer")
"""Settings that a resumed run must share with the saved one, as it must examples and target."""

LARGE_STATE_BYTES = 1e9
"""Saving a larger state takes seconds, and a record tells of it."""

MOMENT = "head_moment"  # name of the head's input moment among the tensors of a saved state


MOST_SKIPPED = 5  # batches in a row that are not finite, after which a run ends


@dataclass(frozen=True)
class _StepBatch:
    """A step's rows: this process's passes, all of them, and the share of pads in the passes."""

    parts: Sequence[TrainBatch]
    whole: TrainBatch
    padding: float


class Trainer:
    """Trains one drafter; resumes exactly from the last state in `config.output`.

    Args:
        examples: training data; without `held_out`, the first `config.held_out` after a seeded
            shuffle are held out.
        held_out: what is measured on; see `TrainConfig.held_out_data`.
        accelerator: of the run's processes; None creates it.

    Attributes:
        about: more entries of `training` in the configuration of exported drafters.

    Raises:
        InputError: settings do not fit the target, the data or the run to resume.
        TrainingError: the saved state is damaged or of another run.
    """

    def __init__(
        self,
        target: Target,
        examples: Sequence[Example],
        config: TrainConfig,
        *,
        held_out: Sequence[Example] = (),
        accelerator: Accelerator | None = None,
    ) -> None:
        self.config, self.target, self.output = config, target, Path(config.output)
        self.accelerator = accelerator or new_accelerator(config)
        with self.accelerator.main_process_first():
            self.output.mkdir(parents=True, exist_ok=True)
        self.data = DataOrder(examples, config, held_out)
        self.states = StateFiles(self.output / "state", config.shard_bytes, config.keep_states)
        saved = self.states.load()
        kind = MoAStudent if config.drafter == "moa" else BaselineStudent
        self.student: Student = kind(target, config, self.data.examples, self.data.train_ids)
        self.step = self.tokens = self.skipped = 0
        self._acceptance: tuple[tuple[float, ...], ...] = ()  # by exit, then by rank
        self._head_moment_EE: Tensor | None = None
        self.about: dict[str, Any] = {}
        self._target_hash = target_fingerprint(target, packed=bool(config.prompts))
        self.best: BestStep | None = None
        if saved is None:
            self.student.start(self.data.train_ids)
        self.strategy = new_strategy(self.accelerator, self.student.module, config)
        if saved is not None:
            self._resume(*saved)
        self.log = RunLog(self.output / "log.jsonl")
        device = self.accelerator.device
        self._next = NextBatch(self.data, self._prepared, ahead=device.type != "cpu")
        self._saver = ThreadPoolExecutor(1, "saving")
        self._saving: Future[None] | None = None
        self._facts: dict[str, float] = {}

    def add(self, examples: Sequence[Example]) -> None:
        """Train on more examples from now on."""
        self._next.give_back()
        self.data.add(examples)
        self.student.add(examples)

    def notes(self) -> list[str]:
        """Notes for the user before the first step, one sentence each."""
        return run_notes(self.student, self.config, self.data)

    def run(self, report: OnStep = lambda _: None, *, seconds: float | None = None) -> StopCause:
        """Train until `config.steps`, a signal or the time limit; then write the drafter.

        `drafter/` has the last weights, `best/` those of the highest held-out simulated tau.

        Args:
            report: called with every step's metrics.
            seconds: time limit, after which the run can be resumed.

        Raises:
            InputError: another process trains in the same directory.
            TrainingError: the run failed; its saved state is intact.
        """
        stop, ending, config = StopCondition(seconds), StopCause.FINISHED, self.config
        with self.running():
            with stop.on_signals():
                while self.step < config.steps and ending is StopCause.FINISHED:
                    number = self.step + 1
                    due = number % config.save_every == 0 or number == config.steps
                    metrics = self.log_step(self.timed_step(), measure=due)
                    ending = self._agree(stop.due)
                    if due or ending is not StopCause.FINISHED:
                        self.save(wait=False)
                    report(metrics)
            self.wait_for_save()
            self.export()
        return ending

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around all steps of a process: locks the directory and explains failures.

        Raises:
            InputError: another process trains in the same directory.
            TrainingError: the run failed; its saved state is intact.
        """
        self._start_trackers()
        with self._locked(), explain_failures("while training", self._saved_sentence):
            yield
        self.accelerator.end_training()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the directory, and cut the log to the step at which the run resumes."""
        if not self.accelerator.is_main_process:
            yield
            return
        refusal = f"Another run trains in {self.output}; wait for it, or use another output."
        file = claimed(self.output / ".lock", refusal)
        try:
            self.log.cut(self.step)
            yield
        finally:
            os.close(file)

    def timed_step(self) -> StepMetrics:
        """Train a step; TrainingError as in `train_step`."""
        started = time.perf_counter()
        parts = self.train_step()
        elapsed = time.perf_counter() - started
        return step_metrics(self.step, self.tokens, elapsed, parts, self._facts)

    def log_step(self, metrics: StepMetrics, *, measure: bool) -> StepMetrics:
        """Log a step; with `measure`, measure held-out text first and export the best weights."""
        if measure:
            metrics = dataclasses.replace(metrics, **self._held_out())
        if self.accelerator.is_main_process:
            self.log.write(dataclasses.asdict(metrics))
        self.accelerator.log(tracker_values(metrics), step=self.step)
        if metrics.held_out_accuracy:
            self._export_if_best(metrics)
        return metrics

    def _export_if_best(self, metrics: StepMetrics) -> None:
        """Export the weights if they are the best so far."""
        score = held_out_score(metrics)
        if self.best is None or score > self.best.score:
            self.best = BestStep(self.step, score)
            self.export(BEST)

    def train_step(self) -> LossSums:
        """One optimiser step over all processes and passes.

        A batch whose loss or gradients are not finite is skipped and counted.

        Returns:
            Sums over the whole step.

        Raises:
            TrainingError: `MOST_SKIPPED` batches in a row are not finite; the weights are
                unchanged.
        """
        rate = learning_rate(self.config, self.step)
        for _ in range(MOST_SKIPPED):
            batch = self._next.take(self.step)
            self.strategy.begin(rate)
            parts, norm = self._gradients(batch)
            if math.isfinite(parts.total) and math.isfinite(norm):
                break
            self.skipped += 1
            log.warning("Skipped a batch of step %d: its loss is %g", self.step + 1, parts.total)
        else:
            raise TrainingError(
                f"Loss or gradients are not finite at step {self.step + 1} (loss {parts.total:g}), "
                f"for {MOST_SKIPPED} batches in a row. {self._saved_sentence()} Resume with a "
                "lower learning_rate; if that fails too, the run had gone wrong before: begin "
                "again, in another output directory."
            )
        self.strategy.step()
        self.step += 1
        self.tokens += int(parts.count)
        self._facts = {
            "gradient_norm": norm,
            "learning_rate": rate,
            "padding": batch.padding,
            "memory_gb": peak_memory(self.accelerator.device) / 1e9,
            "skipped": self.skipped,
        }
        return parts

    def _gradients(self, batch: _StepBatch) -> tuple[LossSums, float]:
        """Compute a step's gradients, clipped; its sums, and the gradients' norm before.

        A GPU is waited for once, at the end.
        """
        device, sums = self.accelerator.device, None
        # Several processes exchange gradients in the last pass, a GPU's layers are compiled.
        is_alone = device.type == "cpu" and self.accelerator.num_processes == 1
        with fast_products(device):
            with weights_of_a_step() if is_alone else nullcontext():
                for number, part in enumerate(batch.parts, start=1):
                    with self.strategy.gradient_sync(last=number == len(batch.parts)):
                        found = self._backward(part.to(device), batch.whole)
                        sums = found if sums is None else sums + found
            norm = self.strategy.clipped(self.config.clip)
        assert sums is not None
        whole = sum_over_processes(self.accelerator, sums)
        *values, size = torch.cat((whole, norm.double().reshape(1))).tolist()
        return LossSums(*values), size

    def _prepared(self, whole: TrainBatch) -> _StepBatch:
        """Split a step into this process's passes; every process has the same number."""
        processes, rank = self.accelerator.num_processes, self.accelerator.process_index
        rows = len(whole.batch.example_ids)
        passes = min(num_passes(self.config, whole.num_tokens, processes), -(-rows // processes))
        parts = split_batch(whole, passes * processes)
        padded = sum(part.batch.input_ids_BT.numel() for part in parts)
        device = self.accelerator.device
        mine = [part.prepared(device) for part in parts[rank::processes]]
        whole.num_loss_tokens  # noqa: B018 - counted here, beside the device's work
        return _StepBatch(mine, whole, max(0.0, 1 - whole.num_tokens / padded))

    def _backward(self, part: TrainBatch, whole: TrainBatch) -> Tensor:
        """Accumulate a pass's gradients of the mean loss over all tokens of the step.

        Returns:
            The pass's sums, (5,) on the device.
        """
        result = self.student.run(self.strategy.model, part, self.step)
        loss, sums = self.student.loss(result, whole, processes=self.accelerator.num_processes)
        self.strategy.backward(loss)
        return sums

    def measure(self) -> dict[int, HeldOutMetrics]:
        with self.strategy.averaged():
            found = measure_held_out(
                self.student,
                self.strategy,
                self.data.examples,
                self.data.held_out_ids,
                step=self.step,
                batch_size=self.config.batch_size,
            )
        return dict(zip(self.student.exits, found, strict=False))

    def _held_out(self) -> dict[str, Any]:
        if self.data.held_out_ids:
            log.info("Measuring %d held-out conversations", len(self.data.held_out_ids))
        found = self.measure()
        if not found:
            return {}
        first = found[self.student.exits[0]]
        self._acceptance = tuple(metrics.acceptance for metrics in found.values())
        self._head_moment_EE = first.moment_EE
        return {
            "held_out_accuracy": first.accuracy,
            "held_out_tau": {
                str(n): metrics.tau if self.student.simulates_chain else None
                for n, metrics in found.items()
            },
        }

    def save(self, *, wait: bool = True) -> None:
        """Write the state for an exact resume, atomically.

        Args:
            wait: False writes in a thread while training goes on; errors of it come in the next
                call, or in `wait_for_save`.
        """
        self._next.give_back()
        self.wait_for_save()
        tensors = self._finite(self.strategy.state())
        info = {
            "run": self._resume_conditions(),
            "step": self.step,
            "tokens": self.tokens,
            "skipped": self.skipped,
            "order": self.data.state(),
            "acceptance": self._acceptance,
            "best": None if self.best is None else dataclasses.asdict(self.best),
        }
        if self._head_moment_EE is not None:
            tensors[MOMENT] = self._head_moment_EE
        if self.accelerator.is_main_process:
            num_bytes = sum(tensor.nbytes for tensor in tensors.values())
            if num_bytes >= LARGE_STATE_BYTES:
                log.info("Saving step %d: %.1f GB", self.step, num_bytes / 1e9)
            if not wait and self.accelerator.device.type == "cpu":  # else they are copies
                tensors = {name: tensor.clone() for name, tensor in tensors.items()}
            self._saving = self._saver.submit(self.states.save, self.step, tensors, info)
            if wait:
                self.wait_for_save()
        self.accelerator.wait_for_everyone()

    def wait_for_save(self) -> None:
        """Wait until the last state is written; TrainingError if it cannot be."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            saving.result()

    def _saved_sentence(self) -> str:
        """What is saved, after a state that is being written."""
        if self._saving is not None:
            futures.wait([self._saving])
        return self.states.sentence()

    def _finite(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """These tensors; TrainingError where one is not finite."""
        wrong = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
        if wrong:
            raise TrainingError(
                f"After step {self.step}, {wrong[0]} is not finite, so this step is not saved. "
                f"{self._saved_sentence()} Resume with a lower learning_rate."
            )
        return tensors

    def export(self, name: str = LAST) -> None:
        """Write the drafter's checkpoint, which `load_drafter` reads, and its model card.

        Args:
            name: directory in `config.output`.
        """
        with self.strategy.averaged():
            weights, *_ = split_state(self._finite(self.strategy.weights()))
            if self.accelerator.is_main_process:
                self._write(self.output / name, weights)
        self.accelerator.wait_for_everyone()

    def _write(self, directory: Path, weights: Mapping[str, Tensor]) -> None:
        """Write a checkpoint of these weights."""
        info = {
            "config": dataclasses.asdict(self.config),
            "steps": self.step,
            "loss_tokens": self.tokens,
            "examples": len(self.data.train_ids),
            **self.about,
        }
        if self._acceptance:
            self.student.record(self._acceptance, self._head_moment_EE)
        self.student.save(weights, directory, info)
        write_card(directory, self.student, self.config, info, self.log.rows())

    def _resume_conditions(self, examples: int | None = None) -> dict[str, Any]:
        """Facts that a resumed run must share with the saved one, as JSON.

        Args:
            examples: of the saved run, which are the first ones; None for all.
        """
        settings = {name: getattr(self.config, name) for name in FIXED_SETTINGS}
        identity = {
            **settings,
            "examples": self.data.fingerprint(examples),
            "target": self._target_hash,
        }
        found: dict[str, Any] = json.loads(json.dumps(identity, default=dataclasses.asdict))
        return found

    def _resume(self, tensors: dict[str, Tensor], info: dict[str, Any]) -> None:
        was = info.get("run", {})
        now = self._resume_conditions(info.get("order", {}).get("examples"))
        changed = [name for name in now if was.get(name) != now[name]]
        if changed:
            raise InputError(
                f"{self.output} holds a run with other {', '.join(changed)}, and a resumed one "
                "would train on what was held out. Use the same, or another output directory; "
                "initial=DIRECTORY goes on from a drafter with new data."
            )
        self._head_moment_EE = tensors.pop(MOMENT, None)
        self.strategy.load(tensors)
        try:
            self.data.restore(info["order"])
            self.step, self.tokens = int(info["step"]), int(info["tokens"])
            self.skipped = int(info["skipped"])
            self._acceptance = tuple(map(tuple, info["acceptance"]))
            self.best = info["best"] and BestStep(**info["best"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise damaged_state(self.states.directory, error) from error

    def _agree(self, ending: StopCause) -> StopCause:
        """Agree on a cause with all processes: all stop as soon as one must."""
        if self.accelerator.num_processes == 1:
            return ending
        mine = torch.tensor([int(ending)], device=self.accelerator.device)
        everyone: Tensor = self.accelerator.gather(mine)
        return StopCause(int(everyone.max()))

    def _start_trackers(self) -> None:
        if self.config.trackers:
            simple = {
                key: value if isinstance(value, int | float | str) else str(value)
                for key, value in dataclasses.asdict(self.config).items()
            }
            self.accelerator.init_trackers("moaspec", config=simple)
