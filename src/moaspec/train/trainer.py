"""The training loop: distil the frozen target into a drafter.

Legend: B batch, T tokens, M queries with loss, E hidden size, V draft vocabulary.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moaspec.errors import InputError, TrainingError
from moaspec.model import MoADrafter, save_drafter
from moaspec.model.drafter import TargetPass
from moaspec.target import Target
from moaspec.train.activations import ActivationCache, ExampleStore, fingerprint
from moaspec.train.blocks import Blocks, fixed_blocks, random_blocks
from moaspec.train.config import TrainConfig, drafter_config
from moaspec.train.data import Batch, Example, collate, epoch_batches, frequent_tokens
from moaspec.train.losses import LossParts, backward_in_chunks
from moaspec.train.warm_start import random_weights, warm_start

MEASURED_BLOCK = 8
"""Drafts in a row that held-out accuracy is measured over."""


@dataclass(frozen=True)
class Progress:
    """What one optimiser step tells the display and the log."""

    step: int
    tokens: int
    tokens_per_s: float
    loss: float
    feature: float
    kl: float
    accuracy: float
    held_out_accuracy: list[float] | None = None


Report = Callable[[Progress], None]


def new_drafter(target: Target, config: TrainConfig, examples: Sequence[Example]) -> MoADrafter:
    """A drafter with random weights."""
    torch.manual_seed(config.seed)
    vocabulary = frequent_tokens(
        examples, size=config.sizes.draft_vocab, always=target.stop_token_ids
    )
    drafter = MoADrafter(drafter_config(target, config.sizes), vocabulary)
    random_weights(drafter)
    return drafter.float().to(config.device)


class Trainer:
    """One process, N = 0. Resumes exactly from the last checkpoint in `config.output`.

    Args:
        target: the frozen target, float32.
        examples: training data; the first `held_out` after a seeded shuffle are set aside.
        config: the run.
    """

    def __init__(self, target: Target, examples: Sequence[Example], config: TrainConfig) -> None:
        self.config, self.target = config, target
        self.output = Path(config.output)
        self.output.mkdir(parents=True, exist_ok=True)
        order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(config.seed))
        shuffled = [examples[i] for i in order.tolist()]
        if len(shuffled) <= config.held_out:
            raise InputError(
                f"{len(shuffled)} examples are too few for held_out={config.held_out}."
            )
        self.examples = shuffled
        self.train_ids = list(range(config.held_out, len(shuffled)))
        self.drafter = new_drafter(target, config, shuffled)
        self.cache = (
            ActivationCache(self.output / "activations", shuffled, target.identity)
            if config.activation_cache
            else None
        )
        self.optimizer = torch.optim.AdamW(
            self.drafter.parameters(),
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
        )
        self.generator = torch.Generator().manual_seed(config.seed + 1)
        self.step = self.tokens = 0
        self.queue: list[list[int]] = []
        if not self._resume() and config.warm_start:
            warm_start(target, self.drafter, self._sample())
        self.means = self._means_store() if self._lsa_is_frozen() else None

    def run(self, report: Report = lambda _: None) -> MoADrafter:
        """Train until `config.steps`, then write the drafter to `output/drafter`."""
        while self.step < self.config.steps:
            started = time.perf_counter()
            parts = self.train_step()
            elapsed = time.perf_counter() - started
            due = self.step % self.config.save_every == 0 or self.step == self.config.steps
            accuracy = self.measure() if due else None
            progress = _progress(self.step, self.tokens, elapsed, parts, accuracy)
            self._log(progress)
            if due:
                self.save()
            report(progress)
        self.export()
        return self.drafter

    def train_step(self) -> LossParts:
        """One optimiser step on one batch."""
        batch = self._next_batch()
        config = self.config
        blocks = random_blocks(
            batch,
            shortest=config.shortest_block,
            longest=config.longest_block,
            generator=self.generator,
        )
        staircase_B = self._staircase(len(batch.example_ids))
        states_ME, target_ME, summary = self._states(batch, blocks, staircase_B)
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate()
        self.optimizer.zero_grad(set_to_none=True)
        parts = backward_in_chunks(
            states_ME, target_ME, self._logits, weights=config.loss, summary=summary
        )
        if not math.isfinite(parts.total):
            raise TrainingError(
                f"The loss became {parts.total} at step {self.step}. The last checkpoint in "
                f"{self.output} is intact: resume from it with a lower learning_rate."
            )
        nn.utils.clip_grad_norm_(self.drafter.parameters(), config.clip)
        self.optimizer.step()
        self.step += 1
        self.tokens += parts.count
        return parts

    @torch.no_grad()
    def measure(self) -> list[float]:
        """Held-out accuracy of each draft step (the draft's first choice is the target's)."""
        hits, counts = torch.zeros(MEASURED_BLOCK), torch.zeros(MEASURED_BLOCK)
        ids = sorted(range(self.config.held_out), key=lambda i: len(self.examples[i]))
        for start in range(0, len(ids), self.config.batch_size):
            batch = collate(self.examples, ids[start : start + self.config.batch_size])
            blocks = fixed_blocks(batch, MEASURED_BLOCK)
            states_ME, target_ME, _ = self._states(batch, blocks, None)
            full = self.target.head(target_ME).argmax(-1)
            drafted = self._logits(states_ME).argmax(-1)
            if self.drafter.draft_token_ids is not None:
                drafted = self.drafter.draft_token_ids[drafted]
            steps = blocks.step_BT[blocks.loss_BT]
            hits.index_add_(0, steps, (drafted == full).float())
            counts.index_add_(0, steps, torch.ones(len(steps)))
        return [round(value, 4) for value in (hits / counts.clamp(min=1)).tolist()]

    def save(self) -> None:
        """Write everything that an exact resume needs, atomically."""
        state = {
            "drafter": self.drafter.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "step": self.step,
            "tokens": self.tokens,
            "queue": self.queue,
        }
        scratch = self.output / "state.pt.partial"
        torch.save(state, scratch)
        scratch.replace(self.output / "state.pt")

    def export(self, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write the drafter as a checkpoint that `load_drafter` reads."""
        facts = {
            "config": dataclasses.asdict(self.config),
            "steps": self.step,
            "loss_tokens": self.tokens,
            "examples": len(self.train_ids),
        }
        save_drafter(self.drafter, self.output / "drafter", dtype=dtype, training=facts)

    def _resume(self) -> bool:
        """Take up the last checkpoint; False when there is none."""
        path = self.output / "state.pt"
        if not path.exists():
            return False
        try:
            state = torch.load(path, weights_only=True, map_location=self.config.device)
            self.drafter.load_state_dict(state["drafter"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, EOFError, KeyError, ValueError, pickle.UnpicklingError) as error:
            raise TrainingError(
                f"{path} is damaged or from a run with other sizes; use another output directory, "
                f"or delete it to start again ({type(error).__name__})."
            ) from error
        self.generator.set_state(state["generator"].cpu())
        self.step, self.tokens, self.queue = state["step"], state["tokens"], state["queue"]
        return True

    def _sample(self) -> Iterator[tuple[Batch, TargetPass]]:
        """The first training examples, one a batch, for `warm_start`."""
        tokens = 0
        for index in self.train_ids:
            if tokens >= self.config.warm_start_tokens:
                return
            batch = collate(self.examples, [index])
            tokens += len(self.examples[index])
            yield batch, self._activations(batch)

    def _next_batch(self) -> Batch:
        if not self.queue:
            pool = [self.examples[i] for i in self.train_ids]
            batches = epoch_batches(
                pool,
                batch_size=self.config.batch_size,
                batch_tokens=self.config.batch_tokens,
                generator=self.generator,
            )
            self.queue = [[self.train_ids[i] for i in ids] for ids in batches]
        return collate(self.examples, self.queue.pop())

    def _activations(self, batch: Batch) -> TargetPass:
        if self.cache is None:
            return self.target.encode(batch.input_ids_BT, batch.attention_mask_BT)
        return self.cache.passes(self.target, batch)

    def _read(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The drafter's aggregate of every token and the target's final state, (B, T, E) each."""
        if self.means is None or not self._lsa_is_frozen():
            result = self._activations(batch)
            return self.drafter.aggregate(result.kv_BTLK), result.hidden_BTE.float()
        if not self.means.holds(batch):
            result = self._activations(batch)
            with torch.no_grad():
                mean_BTK = self.drafter.encoder.mean_over_layers(result.kv_BTLK)
            self.means.write(batch, mean=mean_BTK.cpu(), hidden=result.hidden_BTE.cpu())
        mean_BTK = self.means.read("mean", batch).to(self.config.device).float()
        hidden_BTE = self.means.read("hidden", batch).to(self.config.device).float()
        return self.drafter.encoder.projection(mean_BTK), hidden_BTE

    def _lsa_is_frozen(self) -> bool:
        return self.step < self.config.frozen_lsa * self.config.steps

    def _means_store(self) -> ExampleStore:
        """Means over layers belong to these examples, this target and these weights of LSA."""
        identity = self.target.identity
        weights = self.drafter.encoder.layer_self_attention.state_dict()
        return ExampleStore(
            self.output / "means" / fingerprint(self.examples, identity, weights),
            self.examples,
            {"mean": identity.kv_size, "hidden": identity.hidden_size},
        )

    def _states(
        self, batch: Batch, blocks: Blocks, staircase_B: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Final states of drafter and target at the queries with loss, and the summary loss."""
        aggregated_BTE, hidden_BTE = self._read(batch)
        states_BTE = self.drafter.block_states(
            self.target.embed(batch.input_ids_BT),
            aggregated_BTE,
            batch.attention_mask_BT,
            blocks.block_start_BT,
            staircase_B=staircase_B,
        )
        summary = None
        if self.config.loss.summary:
            real_BT = batch.attention_mask_BT.bool()
            summary = F.smooth_l1_loss(aggregated_BTE[real_BT], hidden_BTE[real_BT])
        return states_BTE[blocks.loss_BT], hidden_BTE[blocks.loss_BT], summary

    def _logits(self, states_ME: Tensor) -> Tensor:
        return self.target.head(states_ME, self.drafter.draft_token_ids)

    def _staircase(self, rows: int) -> Tensor | None:
        """Which sequences use the staircase mask: all at first, none after half of training."""
        if not self.config.staircase:
            return None
        probability = max(0.0, 1 - self.step / (self.config.steps / 2))
        return torch.rand(rows, generator=self.generator) < probability

    def _learning_rate(self) -> float:
        config = self.config
        if self.step < config.warmup_steps:
            return config.learning_rate * (self.step + 1) / config.warmup_steps
        done = (self.step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        return config.learning_rate * (config.final_lr + (1 - config.final_lr) * cosine)

    def _log(self, progress: Progress) -> None:
        row: dict[str, Any] = dataclasses.asdict(progress)
        with (self.output / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _progress(
    step: int, tokens: int, elapsed: float, parts: LossParts, accuracy: list[float] | None
) -> Progress:
    count = parts.count
    return Progress(
        step=step,
        tokens=tokens,
        tokens_per_s=round(count / elapsed, 1),
        loss=round(parts.total / count, 5),
        feature=round(parts.feature / count, 5),
        kl=round(parts.kl / count, 5),
        accuracy=round(parts.hits / count, 4),
        held_out_accuracy=accuracy,
    )
