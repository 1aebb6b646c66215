"""Training tokens a second for a target of Llama-3-8B's shapes, on one GPU in five minutes.

How fast training is does not depend on the numbers in the weights. So the target is random, and so
are the texts: their lengths are drawn as those of chats are. The drafter, its loss and its
optimiser are those of a recipe of `moaspec train --init`. After two steps, in which functions are
compiled, whole steps are timed; then others in which the device is waited for around each part:
the target's pass, LSA, SA and CA, the heads with the loss, the backward pass through the drafter,
the optimiser. The share of a GPU's operations goes by `moaspec train --dry-run`.
The last line is JSON.

    python benchmarks/training_shapes.py --gpu h100
    python benchmarks/training_shapes.py --gpu h100 batch_tokens=32768 pass_tokens=16384
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from importlib.metadata import version
from typing import Any

import torch
from scale import SHAPES
from training import Clock, parts_of_a_step
from transformers import LlamaForCausalLM

from moaspec.calibration.measure_costs import machine
from moaspec.target.target import Target
from moaspec_train.dataset.examples import Example
from moaspec_train.recipes import RECIPES
from moaspec_train.reports.plan import GPUS, make_plan
from moaspec_train.run_config import TrainConfig, read_train_config
from moaspec_train.trainer import Trainer

COMPILING = 2  # first steps, in which functions are compiled
TEXT, SPREAD = 900, 0.6
"""Median length of a text, in tokens, and the standard deviation of its logarithm."""
PROMPT_SHARE = 0.3


def main() -> None:
    """Measure and print the figures."""
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as output:
        config = read_train_config(
            RECIPES / f"{options.recipe}.yaml",
            [
                *("data=[random]", f"output={output}", "held_out=0", "save_every=1000000"),
                *("steps=1000000", "initial=", f"device={options.device}", *options.settings),
            ],
        )
        found = measured(random_target(options, config), config, options)
    for name, value in found.items():
        print(f"{name}: {value}")
    print(
        json.dumps(
            found
            | {
                "benchmark": "training_shapes",
                "machine": machine(torch.device(options.device)),
                "torch": version("torch"),
                "options": vars(options),
            }
        )
    )


def parse() -> argparse.Namespace:
    """The options of this script."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("settings", nargs="*", help="of the recipe, as key=value")
    parser.add_argument("--shape", choices=SHAPES, default="8B")
    parser.add_argument("--recipe", default="llama-3.1-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gpu", choices=GPUS, help="for the share of its operations")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--threads", type=int, default=0, help="of a CPU; 0: PyTorch's default")
    return parser.parse_args()


def random_target(options: argparse.Namespace, config: TrainConfig) -> Target:
    """A target of the shape, made on the device."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, config.target_dtype))
    try:
        with torch.device(options.device):
            model = LlamaForCausalLM(SHAPES[options.shape])
    finally:
        torch.set_default_dtype(dtype)
    return Target(model, None, name=f"random Llama of {options.shape}")


def random_texts(number: int, config: TrainConfig, vocab_size: int) -> list[Example]:
    """Texts of random tokens."""
    made = torch.Generator().manual_seed(0)
    lengths = torch.randn(number, generator=made).mul(SPREAD).exp() * TEXT
    examples = []
    for length in lengths.long().clamp(16, config.max_length).tolist():
        ids = torch.randint(vocab_size, (length,), generator=made).tolist()
        prompt = int(PROMPT_SHARE * length)
        examples.append(Example(ids[:prompt], ids[prompt:]))
    return examples


def measured(target: Target, config: TrainConfig, options: argparse.Namespace) -> dict[str, Any]:
    """Speeds of whole steps, and the seconds of each part."""
    examples = random_texts(options.texts, config, target.vocab_size)
    plan = make_plan(target, config, examples)
    trainer = Trainer(target, examples, config)
    whole = [timed_step(trainer) for _ in range(COMPILING + options.steps)][COMPILING:]
    clock = Clock(trainer.accelerator.device)
    with parts_of_a_step(clock, trainer):
        for _ in range(options.steps):
            timed_step(trainer)
    speed = statistics.median(count / spent for count, spent in whole)
    found = {
        "tokens with loss/s": round(speed, 1),
        "slowest and fastest step": [
            round(find(count / spent for count, spent in whole), 1) for find in (min, max)
        ],
        "seconds a step": round(statistics.median(spent for _, spent in whole), 4),
        "seconds by part": {
            name: round(spent / options.steps, 4) for name, spent in clock.seconds.items()
        },
        "memory, GB": round(trainer._facts["memory_gb"], 2),
        "pads": round(trainer._facts["padding"], 3),
    }
    if options.gpu:
        a_token = plan.operations / plan.loss_tokens
        found["share of operations"] = float(f"{speed * a_token / GPUS[options.gpu][0]:.3g}")
    return found


def timed_step(trainer: Trainer) -> tuple[float, float]:
    """Tokens with loss, and seconds. A step ends with reading its sums, which waits for a GPU."""
    started = time.perf_counter()
    count = trainer.train_step().count
    if trainer.accelerator.device.type == "cuda":
        torch.cuda.synchronize()  # the optimiser's operations, too
    return count, time.perf_counter() - started


if __name__ == "__main__":
    main()
