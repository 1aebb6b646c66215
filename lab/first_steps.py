"""Loss of a drafter's first steps, with the warm start and without.

    python lab/first_steps.py CONFIG.yaml STEPS key=value ...

Prints KL of a drafter with equal probabilities, then for either start the held-out accuracy before
the first step, KL and accuracy of steps 1, 10, 20, ..., and the held-out accuracy and tau after the
last one. The last line is JSON. Everything is written to a temporary directory.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from moaspec.backends.load import load_target
from moaspec.target.target import Target
from moaspec_train.dataset.examples import Example
from moaspec_train.dataset.read_examples import read_examples
from moaspec_train.run_config import TrainConfig, read_train_config
from moaspec_train.trainer import Trainer

UNIFORM_EXAMPLES = 20


@torch.no_grad()
def uniform_kl(target: Target, examples: list[Example], size: int) -> float:
    """KL(p || uniform) over a draft vocabulary of this size, if it has p's likely tokens."""
    found: list[float] = []
    for example in examples[:UNIFORM_EXAMPLES]:
        ids = torch.tensor([example.token_ids])
        states = target.capture(ids, torch.ones_like(ids)).hidden_BTE[0].float()
        log_p = target.head(states[torch.tensor(example.response_mask)]).log_softmax(-1)
        found += ((log_p.exp() * log_p).sum(-1) + math.log(size)).tolist()
    return fmean(found)


def curve(target: Target, examples: list[Example], config: TrainConfig, steps: int) -> Any:
    """Train a drafter for `steps` steps, and measure it before and after."""
    run = Trainer(target, examples, config)

    def held_out() -> tuple[float, float | None]:
        metrics = run.measure()[config.num_target_layers[0]]
        return round(fmean(metrics.accuracy), 4), metrics.tau

    before, rows = held_out(), []
    for step in range(1, steps + 1):
        parts = run.train_step()
        if step == 1 or step % 10 == 0:
            rows.append(
                (step, round(parts.kl / parts.count, 3), round(parts.hits / parts.count, 3))
            )
            print(*rows[-1], flush=True)
    return {"held_out_before": before, "step_kl_accuracy": rows, "held_out_after": held_out()}


def main() -> None:
    """Compare both starts."""
    config = read_train_config(Path(sys.argv[1]), sys.argv[3:])
    torch.set_num_threads(config.threads or torch.get_num_threads())
    target = load_target(config.target, dtype=config.target_dtype, packed=False)
    examples = read_examples(
        config.data,
        vocab_size=target.vocab_size,
        max_length=config.max_length,
        tokenizer=target.tokenizer,
        stop_token_ids=target.stop_token_ids,
    )
    size = config.sizes.draft_vocab or target.vocab_size
    found: dict[str, Any] = {"uniform_kl": round(uniform_kl(target, examples, size), 3)}
    print(found)
    for warm in (True, False):
        with tempfile.TemporaryDirectory() as output:
            changed = dataclasses.replace(config, warm_start=warm, output=output)
            found["warm" if warm else "random"] = curve(target, examples, changed, int(sys.argv[2]))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
