"""Training throughput: our loop against a naive one, same parameters, batches and losses, one run.

Both do whole steps on the same randomly drawn examples with the same blocks, uncached: target, LSA,
SA + CA, head, loss, optimiser. The naive loop is `naive_training.py`. Batches are drawn without
regard to length, as a shuffling loader does. Their losses must agree to 1e-4 of their value in
every step, or no ratio is printed. Ours with a warm activation cache (bf16 on disk, so that losses
differ more) is measured beside them. Steps alternate; the first is a warm-up.
The last line is JSON.

    python benchmarks/training.py --data responses.jsonl --threads 2
    python benchmarks/training.py --data responses.jsonl --threads 2 --draft-vocab 0
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from naive_training import naive_step

import moaspec
from moaspec.calibration.measure_costs import machine
from moaspec.model.moa import MoADrafter
from moaspec.target.target import Target
from moaspec_train.data_order import TrainBatch, random_blocks
from moaspec_train.dataset.examples import Example, collate
from moaspec_train.dataset.read_examples import read_examples
from moaspec_train.run_config import TrainConfig, learning_rate
from moaspec_train.students import students
from moaspec_train.students.drafter_sizes import DrafterSizes
from moaspec_train.students.losses import LossWeights
from moaspec_train.students.students import DraftVocabularyHead, MoAStudent
from moaspec_train.students.target_activations import TargetActivations
from moaspec_train.trainer import Trainer

TOLERANCE = 1e-4
NAIVE, OURS, CACHED = "naive", "ours", "ours, cache warm"


class Clock:
    """Adds up the seconds of each part; a GPU is waited for before and after it."""

    def __init__(self, device: torch.device) -> None:
        self._wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self._wait()
            started = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self._wait()
                spent = time.perf_counter() - started
                self.seconds[name] = self.seconds.get(name, 0.0) + spent

        return call

    def shares(self) -> dict[str, float]:
        """Of the time in all parts; the head's own time is a part of "head and loss"."""
        total = sum(self.seconds.values()) - self.seconds.get("head", 0.0)
        return {name: round(spent / total, 3) for name, spent in self.seconds.items()}


@contextmanager
def parts_of_a_step(clock: Clock, trainer: Trainer) -> Iterator[None]:
    """Measure the parts of our loop while it runs; "backward" is that of LSA, SA and CA."""
    strategy = trainer.strategy
    module = trainer.student.module
    parts = [
        (TargetActivations, "passes", "target"),
        (module.encoder, "mean_over_layers", "LSA"),  # may be compiled
        (MoADrafter, "block_states", "SA + CA"),
        (DraftVocabularyHead, "__call__", "head"),
        (students, "exit_loss", "head and loss"),
        (strategy, "backward", "backward"),
        *((optimizer, "step", "optimiser") for optimizer in strategy.optimizers),
    ]
    with ExitStack() as stack:
        for owner, name, shown in parts:
            timed = clock.timed(shown, getattr(owner, name))
            stack.enter_context(patch.object(owner, name, timed))
        yield


def new_trainer(
    target: Target, examples: list[Example], arguments: argparse.Namespace, *, cached: bool = False
) -> Trainer:
    """A run that starts from seed 0."""
    config = TrainConfig(
        target=arguments.model,
        data=(arguments.data,),
        output=tempfile.mkdtemp(prefix="moaspec-bench-"),
        held_out=0,
        batch_size=arguments.batch_size,
        warm_start=False,
        activation_cache=cached,
        loss=LossWeights(feature=1.0, kl=1.0),
        sizes=DrafterSizes(
            lsa_heads=6, lsa_kv_heads=2, lsa_intermediate=384, draft_vocab=arguments.draft_vocab
        ),
    )
    return Trainer(target, examples, config)


def random_parts(examples: Sequence[Example], arguments: argparse.Namespace) -> list[TrainBatch]:
    """One batch for each step and the warm-up."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(examples), generator=generator).tolist()
    batches = [
        collate(examples, order[start : start + arguments.batch_size])
        for start in range(0, (arguments.steps + 1) * arguments.batch_size, arguments.batch_size)
    ]
    return [
        TrainBatch(batch, random_blocks(batch, shortest=5, longest=15, generator=generator), None)
        for batch in batches
    ]


def ours(trainer: Trainer, part: TrainBatch) -> tuple[float, float]:
    """One step of our loop on this batch; mean loss and tokens with loss."""
    with patch.object(trainer.data, "next_batch", lambda _: part):
        parts = trainer.train_step()
    return parts.total / parts.count, parts.count


def measured(
    target: Target, examples: list[Example], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Speeds of each step by loop, shares, and the largest difference of losses."""
    plain, other = (new_trainer(target, examples, arguments) for _ in range(2))
    cached = new_trainer(target, examples, arguments, cached=True)
    assert isinstance(other.student, MoAStudent)
    naive, ids = other.student.module, other.student.draft_token_ids
    clock, worst, pads = Clock(target.device), 0.0, []
    speeds: dict[str, list[float]] = {NAIVE: [], OURS: [], CACHED: []}
    for step, part in enumerate(random_parts(plain.data.examples, arguments)):
        cached.student.activations.passes(part.batch)  # fills the cache, outside the clock
        (optimizer,) = other.strategy.optimizers
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(plain.config, step)
        runs = {
            NAIVE: partial(naive_step, target, naive, optimizer, part, ids),
            OURS: partial(ours, plain, part),
            CACHED: partial(ours, cached, part),
        }
        losses = {}
        for name in runs if step % 2 else reversed(runs):
            watched = name == OURS and step > 0
            with parts_of_a_step(clock, plain) if watched else nullcontext():
                losses[name], speed = _timed(runs[name])
            speeds[name].append(speed)
        worst = max(worst, abs(losses[OURS] - losses[NAIVE]) / losses[NAIVE])
        pads.append(1 - part.batch.attention_mask_BT.float().mean().item())
        print(f"step {step}: loss {losses[NAIVE]:.6f} {losses[OURS]:.6f}", flush=True)
    warm = {name: found[1:] for name, found in speeds.items()}
    return {
        "tokens_per_s": warm,
        "shares": clock.shares(),
        "worst": worst,
        "pads": statistics.mean(pads[1:]),
    }


def _timed(run: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    """Loss, and tokens with loss per second."""
    started = time.perf_counter()
    loss, count = run()
    return loss, count / (time.perf_counter() - started)


def report(found: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Medians and spread, shares, and the ratio over equal batches where losses agree."""
    speeds = found["tokens_per_s"]
    for name, values in speeds.items():
        print(
            f"{name}: {statistics.median(values):.0f} tokens with loss/s "
            f"({min(values):.0f}..{max(values):.0f})"
        )
    print("ours:", ", ".join(f"{name} {share:.0%}" for name, share in found["shares"].items()))
    same = found["worst"] <= TOLERANCE
    ratios = {
        name: [a / b for a, b in zip(speeds[name], speeds[NAIVE], strict=True)]
        for name in (OURS, CACHED)
    }
    for name, values in ratios.items() if same else ():
        print(
            f"{name} / naive: {statistics.median(values):.2f} ({min(values):.2f}.."
            f"{max(values):.2f})"
        )
    if not same:
        print(f"losses differ by {found['worst']:.1e}: no ratio")
    print(
        json.dumps(
            found
            | {
                "ratios": ratios if same else None,
                "threads": torch.get_num_threads(),
                "machine": machine(torch.device("cpu")),
                "torch": torch.__version__,
                "settings": vars(arguments),
            }
        )
    )


def main() -> None:
    """Measure and print the figures."""
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    target = moaspec.load_target(arguments.model, packed=False)
    examples = read_examples(
        [arguments.data],
        vocab_size=target.vocab_size,
        max_length=arguments.max_length,
        tokenizer=target.tokenizer,
        stop_token_ids=target.stop_token_ids,
    )[: arguments.limit]
    report(measured(target, examples, arguments), arguments)


def parse() -> argparse.Namespace:
    """The options of this script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="responses of the target, JSON lines")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--limit", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-length", type=int, default=640)
    parser.add_argument("--draft-vocab", type=int, default=8192, help="0: all")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
