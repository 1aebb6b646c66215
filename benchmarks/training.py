"""Training throughput: our loop against a naive one, same parameters, batch and losses, one run.

Both do whole steps on the same examples with the same blocks, uncached: target, LSA, SA + CA,
head, loss, optimiser. The naive loop is what a first version looks like: it computes the logits of
every token over the whole vocabulary, for drafter and target. No ratio is printed when the losses
differ by more than 1e-4. Ours with a warm activation cache is shown beside them. The last line is
JSON.

    python benchmarks/training.py --data responses.jsonl --limit 48 --threads 2
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn

import moaspec
import moaspec.train.trainer as loop
from moaspec.model import MoADrafter
from moaspec.model.encoder import Encoder
from moaspec.model.speaker import Speaker
from moaspec.target import Target
from moaspec.train import DrafterSizes, Example, LossWeights, TrainConfig, Trainer, read_examples
from moaspec.train.losses import exit_loss
from moaspec.train.order import Part
from moaspec.train.reader import TargetReader
from moaspec.train.students import MoAStudent

TOLERANCE = 1e-4
SIZES = DrafterSizes(lsa_heads=6, lsa_kv_heads=2, lsa_intermediate=384)


class Clock:
    """Seconds by part, of the forward passes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                spent = time.perf_counter() - started
                self.seconds[name] = self.seconds.get(name, 0.0) + spent

        return call


def new_trainer(
    target: Target, examples: list[Example], arguments: argparse.Namespace, *, cached: bool
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
        sizes=SIZES,
    )
    return Trainer(target, examples, config)


@contextmanager
def shares(clock: Clock, trainer: Trainer) -> Iterator[None]:
    """Measure the parts of our loop while it runs."""
    with (
        patch.object(TargetReader, "passes", clock.timed("target", TargetReader.passes)),
        patch.object(Encoder, "mean_over_layers", clock.timed("LSA", Encoder.mean_over_layers)),
        patch.object(Speaker, "read_text", clock.timed("SA + CA", Speaker.read_text)),
        patch.object(Speaker, "read_memory", clock.timed("SA + CA", Speaker.read_memory)),
        patch.object(MoAStudent, "_logits", clock.timed("head", MoAStudent._logits)),
        patch.object(loop, "exit_loss", clock.timed("head and loss", exit_loss)),
        patch.object(
            trainer.accelerator, "backward", clock.timed("backward", trainer.accelerator.backward)
        ),
        patch.object(trainer.optimizer, "step", clock.timed("optimiser", trainer.optimizer.step)),
    ):
        yield


def naive_step(
    target: Target, drafter: MoADrafter, optimizer: torch.optim.Optimizer, part: Part
) -> float:
    """One step as simply as it can be written; the mean loss."""
    batch, blocks = part.batch, part.blocks
    with torch.no_grad():
        result = target.encode(batch.input_ids_BT, batch.attention_mask_BT)
        wanted_BTV = target.head(result.hidden_BTE).log_softmax(-1)
    states_BTE = drafter.block_states(
        target.embed(batch.input_ids_BT),
        drafter.aggregate(result.kv_BTLK),
        batch.attention_mask_BT,
        blocks.block_start_BT,
    )
    drafted_BTV = target.head(states_BTE).log_softmax(-1)
    feature_BT = F.smooth_l1_loss(states_BTE, result.hidden_BTE, reduction="none").mean(-1)
    kl_BT = F.kl_div(drafted_BTV, wanted_BTV, log_target=True, reduction="none").sum(-1)
    loss = (feature_BT + kl_BT)[blocks.loss_BT].mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


def main() -> None:
    """Alternate the loops, print medians."""
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
    ours = new_trainer(target, examples, arguments, cached=False)
    cached = new_trainer(target, examples, arguments, cached=True)
    other = new_trainer(target, examples, arguments, cached=False)
    assert isinstance(other.student, MoAStudent)
    naive, clock = other.student.module, Clock()
    speeds: dict[str, list[float]] = {"ours": [], "naive": [], "ours, cache warm": []}
    worst = 0.0
    for step in range(arguments.steps + 1):
        part = other.data.next_part(step)
        ids = part.batch.example_ids
        cached.reader.passes(part.batch)  # fills the cache, outside the clock
        for group in other.optimizer.param_groups:
            group["lr"] = 1e-3 * (step + 1) / 50
        started = time.perf_counter()
        plain = naive_step(target, naive, other.optimizer, part)
        seconds = {"naive": time.perf_counter() - started}
        with shares(clock if step else Clock(), ours):
            started = time.perf_counter()
            parts = ours.train_step()
            seconds["ours"] = time.perf_counter() - started
        started = time.perf_counter()
        cached.train_step()
        seconds["ours, cache warm"] = time.perf_counter() - started
        worst = max(worst, abs(parts.total / parts.count - plain) / plain)
        if step:  # the first is a warm-up
            for name, spent in seconds.items():
                speeds[name].append(parts.count / spent)
        print(f"step {step}: {len(ids)} examples, loss {plain:.6f}")
    report(arguments, speeds, clock, worst)


def report(
    arguments: argparse.Namespace, speeds: dict[str, list[float]], clock: Clock, worst: float
) -> None:
    """Medians and spread; shares of our forward passes and what follows them."""
    for name, found in speeds.items():
        print(
            f"{name}: {statistics.median(found):.0f} tokens with loss/s "
            f"({min(found):.0f}..{max(found):.0f})"
        )
    total = sum(clock.seconds.values()) - clock.seconds.get("head", 0.0)
    parts = {name: round(spent / total, 3) for name, spent in clock.seconds.items()}
    print("shares:", ", ".join(f"{name} {share:.0%}" for name, share in parts.items()))
    same = worst <= TOLERANCE
    ratio = statistics.median(speeds["ours"]) / statistics.median(speeds["naive"])
    print(f"ours / naive: {ratio:.2f}x" if same else f"losses differ by {worst:.1e}: no ratio")
    print(
        json.dumps(
            {
                "tokens_per_s": {name: statistics.median(found) for name, found in speeds.items()},
                "ratio": ratio if same else None,
                "shares": parts,
                "largest_relative_difference_of_losses": worst,
                "threads": torch.get_num_threads(),
                "machine": platform.processor() or platform.machine(),
                "torch": torch.__version__,
                "settings": vars(arguments),
            }
        )
    )


def parse() -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="responses of the target, JSON lines")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--limit", type=int, default=48)
    parser.add_argument("--batch-size", type=int, default=6)
    parser.add_argument("--max-length", type=int, default=640)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
