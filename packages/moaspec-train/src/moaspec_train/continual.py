"""Continual training of a drafter on texts that its target writes while it serves.

Texts arrive one by one (`ContinualTrainer.add`). A cycle makes `steps` optimiser steps on batches
of new texts, then compares the trained drafter with the previous version on `held_out` other texts.
If its simulated tau is higher, it becomes the next version; else weights and optimiser roll back.
A prompt is always either trained on or held out.

**Only the decoder learns** (SA, CA and exits). All versions share the encoder, so its features of
verified tokens stay valid: a server changes versions between two rounds, and a device may draft
with an older one.

**No text is stored.** A batch is dropped after its step, and the held-out texts after the cycle.
Weights, optimiser, random state and counters are saved between two cycles. From there the same
stream of texts gives the same weights, bit for bit.
"""

import dataclasses
import hashlib
import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moaspec.generation.drafters import find_drafter
from moaspec.model.checkpoint.moa_checkpoint import fingerprint, load_checkpoint
from moaspec.target.target import Target
from moaspec_core.errors import InputError
from moaspec_core.support.paths import make_private
from moaspec_train.data_order import TrainBatch, random_blocks, split_batch
from moaspec_train.dataset.examples import Example, collate
from moaspec_train.parallelism import new_accelerator, new_strategy, split_state
from moaspec_train.reports.run_log import RunLog
from moaspec_train.run_config import TrainConfig, learning_rate, num_passes
from moaspec_train.students.held_out import BLOCK_LENGTH, measure_held_out
from moaspec_train.students.losses import LossWeights
from moaspec_train.students.students import MoAStudent
from moaspec_train.training_state import STATE_FILE, StateFiles, damaged_state

MIN_RESPONSE_TOKENS = 2 * BLOCK_LENGTH
"""Shorter responses are not used: they have no complete block, which simulated tau needs."""
HELD_OUT_SHARE = 4
"""One prompt in this many is held out."""
KEPT_VERSIONS = 3


@dataclass(frozen=True, kw_only=True)
class LearnConfig:
    """Settings of continual training.

    Attributes:
        batch_size: texts of one optimiser step.
        steps: optimiser steps of one cycle.
        held_out: texts for comparing the drafters of a cycle.
        learning_rate: of AdamW, the same in all steps.
        max_length: tokens of a text, prompt included; the rest is cut off.
        seed: of the lengths of blocks.
    """

    batch_size: int = 8
    steps: int = 6
    held_out: int = 16
    learning_rate: float = 3e-4
    max_length: int = 768
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class CycleReport:
    """Outcome of one cycle.

    Attributes:
        cycle: its number, from 1.
        version: the newest version after it; 0 is the first drafter.
        accepted: whether the cycle made this version; if not, it was rolled back.
        tau_before, tau_after: simulated tau of the version before and of the trained drafter on the
            cycle's held-out texts; `tau_after` is None where loss or gradients were not finite.
        texts: texts received since the beginning, used or not.
        fingerprint: of the newest version.
    """

    cycle: int
    version: int
    accepted: bool
    tau_before: float
    tau_after: float | None
    texts: int
    fingerprint: str

    def sentence(self) -> str:
        """The outcome, for messages."""
        after = "not finite" if self.tau_after is None else f"{self.tau_after:.3f}"
        tau = f"held-out tau {self.tau_before:.3f} -> {after}"
        if self.accepted:
            return f"Learning cycle {self.cycle} made version {self.version}: {tau}."
        return f"Learning cycle {self.cycle} is rolled back to version {self.version}: {tau}."


class ContinualTrainer:
    """Trains versions of one drafter from a stream of texts; goes on from the state in `directory`.

    Args:
        target: wrote the texts.
        initial: the drafter to begin with, a Mixture-of-Attentions drafter: an alias, directory or
            hub id.
        directory: of states, versions and `log.jsonl`, which has numbers only.

    Attributes:
        texts: texts received so far.
        steps: optimiser steps so far; the learning rate rises in those of the first cycle.
        version: number of the newest version.

    Raises:
        InputError: the directory holds versions of another drafter.
        TrainingError: the saved state is damaged.
        CheckpointError: the drafter is unreadable, damaged or of another target.
    """

    def __init__(
        self,
        target: Target,
        initial: str | Path,
        directory: str | Path,
        config: LearnConfig | None = None,
    ) -> None:
        self.target, self.directory, self.config = target, Path(directory), config or LearnConfig()
        make_private(self.directory)
        drafter = load_checkpoint(find_drafter(initial), target.identity, target.config)
        layers = drafter.config.num_target_layers
        self._settings = _settings(self.config, target, initial, self.directory, layers)
        self._student = MoAStudent(target, self._settings, (), ())
        self._module = self._student.module
        self._module.encoder.requires_grad_(requires_grad=False)
        accelerator = new_accelerator(self._settings)
        self._strategy = new_strategy(accelerator, self._module, self._settings)
        self._generator = torch.Generator().manual_seed(self.config.seed)
        self.texts = self.steps = self.cycle = self.version = 0
        self.fingerprints = [fingerprint(drafter)]
        self._states = StateFiles(self.directory / "state")
        self._resume(self._states.load())
        self._log = RunLog(self.directory / "log.jsonl")
        self._log.cut(self.cycle)
        self._before = self._state()
        self._begin_cycle()

    def _begin_cycle(self) -> None:
        self._batch: list[Example] = []
        self._held_out: list[Example] = []
        self._steps_left, self._finite = self.config.steps, True
        self._steps_before = self.steps

    def add(self, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> CycleReport | None:
        """Learn from a text; at the end of a cycle compare, save and report.

        A text is ignored if its response is too short, or if the cycle has enough texts of its
        kind, trained on or held out.

        Raises:
            TrainingError: the state cannot be written.
        """
        self.texts += 1
        example = Example(prompt_ids, response_ids).cut(self.config.max_length)
        if example is None or example.num_response_tokens < MIN_RESPONSE_TOKENS:
            return None
        if is_held_out(prompt_ids):
            if len(self._held_out) < self.config.held_out:
                self._held_out.append(example)
        elif self._steps_left:
            self._batch.append(example)
            if len(self._batch) == self.config.batch_size:
                self._train_step()
        if self._steps_left or len(self._held_out) < self.config.held_out:
            return None
        return self._end_cycle()

    def _train_step(self) -> None:
        """Make an optimiser step on the batch, and drop it."""
        batch = collate(self._batch, range(len(self._batch)))
        settings = self._settings
        blocks = random_blocks(
            batch,
            shortest=settings.shortest_block,
            longest=settings.longest_block,
            generator=self._generator,
        )
        whole = TrainBatch(batch, blocks, None)
        passes = num_passes(settings, int(batch.attention_mask_BT.sum()), 1)
        self._strategy.begin(learning_rate(settings, self.steps))
        for part in split_batch(whole, min(passes, len(self._batch))):
            result = self._student.run(
                self._strategy.model, part.with_places().to(self.target.device), self.steps
            )
            loss, _ = self._student.loss(result, whole)
            self._strategy.backward(loss)
        self._finite &= math.isfinite(self._strategy.update(settings.clip))
        self._batch, self._steps_left, self.steps = [], self._steps_left - 1, self.steps + 1

    def _end_cycle(self) -> CycleReport:
        """Make the trained drafter a version or roll back, and save."""
        trained = self._state()
        finite = self._finite and all(bool(one.isfinite().all()) for one in trained.values())
        after = self._tau() if finite else None
        self._load(self._before)
        trained_steps, self.steps = self.steps, self._steps_before
        before = self._tau()
        accepted = after is not None and after > before
        self.cycle += 1
        if accepted:
            self._load(trained)
            self._before, self.steps = trained, trained_steps
            self._add_version()
        report = CycleReport(
            cycle=self.cycle,
            version=self.version,
            accepted=accepted,
            tau_before=before,
            tau_after=after,
            texts=self.texts,
            fingerprint=self.fingerprints[-1],
        )
        self._save()
        self._log.write(dataclasses.asdict(report) | {"step": self.cycle})
        self._begin_cycle()
        return report

    def _tau(self) -> float:
        """Simulated tau of the current weights on the held-out texts."""
        found = measure_held_out(
            self._student,
            self._strategy,
            self._held_out,
            range(len(self._held_out)),
            step=self.steps,
            batch_size=1,
        )
        assert found[0].tau is not None, "responses of `MIN_RESPONSE_TOKENS` fill a block"
        return found[0].tau

    def _add_version(self) -> None:
        """Write the current weights as the next version; the oldest one goes."""
        self.version += 1
        info = {
            "cycle": self.cycle,
            "texts": self.texts,
            "config": dataclasses.asdict(self.config),
        }
        weights, *_ = split_state(self._before)
        self._student.save(weights, version_directory(self.directory, self.version), info)
        self.fingerprints.append(fingerprint(self._module))
        old = version_directory(self.directory, self.version - KEPT_VERSIONS)
        shutil.rmtree(old, ignore_errors=True)

    def _state(self) -> dict[str, Tensor]:
        """A copy of weights and optimiser state."""
        return {name: tensor.clone() for name, tensor in self._strategy.state().items()}

    def _load(self, state: dict[str, Tensor]) -> None:
        for optimizer in self._strategy.optimizers:
            optimizer.state.clear()  # before the first step there is none to replace it
        self._strategy.load({name: tensor.clone() for name, tensor in state.items()})

    def _save(self) -> None:
        info = {
            "texts": self.texts,
            "steps": self.steps,
            "fingerprints": self.fingerprints,
            "generator": self._generator.get_state().tolist(),
            "cycle": self.cycle,
        }
        self._states.save(self.cycle, self._before, info)

    def _resume(self, saved: tuple[dict[str, Tensor], dict[str, Any]] | None) -> None:
        if saved is None:
            return
        tensors, info = saved
        try:
            first, *later = map(str, info["fingerprints"])
            self._generator.set_state(torch.tensor(info["generator"], dtype=torch.uint8))
            self.texts, self.steps = int(info["texts"]), int(info["steps"])
            self.cycle = int(info["cycle"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise damaged_state(self._states.directory, error) from error
        if first != self.fingerprints[0]:
            raise other_drafter(self.directory, self._settings.initial)
        self.fingerprints += later
        self.version = len(later)
        self._load(tensors)


def is_held_out(prompt_ids: Sequence[int]) -> bool:
    """Whether texts of this prompt are held out; the same for every text of the same prompt."""
    digest = hashlib.sha256(repr(tuple(prompt_ids)).encode()).digest()
    return digest[0] % HELD_OUT_SHARE == 0


def version_directory(directory: Path, version: int) -> Path:
    """The checkpoint of a version from 1 on."""
    return directory / f"version-{version}"


def newest_version(directory: Path) -> Path | None:
    """The checkpoint of the newest version in a directory; None if there is none.

    Raises:
        TrainingError: the saved state is damaged.
    """
    number = len(fingerprints(directory)) - 1
    return version_directory(directory, number) if number > 0 else None


def other_drafter(directory: Path, initial: str | Path | None) -> InputError:
    """The error for a directory whose versions have another initial drafter."""
    return InputError(
        f"{directory} holds versions of another drafter than {initial}. Use another directory."
    )


def fingerprints(directory: Path) -> list[str]:
    """Saved fingerprints of the initial drafter and its versions; empty if nothing is saved.

    Raises:
        TrainingError: the saved state is damaged.
    """
    state = StateFiles(directory / "state").latest()
    if state is None:
        return []
    try:
        found = json.loads((state / STATE_FILE).read_text())["fingerprints"]
        return [str(one) for one in found]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise damaged_state(state, error) from error


def _settings(
    config: LearnConfig,
    target: Target,
    initial: str | Path,
    directory: Path,
    layers: tuple[int, ...],
) -> TrainConfig:
    """The training run that a cycle's steps belong to."""
    return TrainConfig(
        target=target.name,
        data=(),
        output=str(directory),
        initial=str(initial),
        num_target_layers=layers,
        batch_size=config.batch_size,
        learning_rate=config.learning_rate,
        final_lr=1.0,
        warmup_steps=config.steps,
        max_length=config.max_length,
        activation_cache=False,
        seed=config.seed,
        device="cuda" if target.device.type == "cuda" else "cpu",
        loss=LossWeights(kl=1.0),
    )
