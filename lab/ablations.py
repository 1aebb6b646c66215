"""Baselines and ablations at one small budget: trained by `moaspec train`'s loop, then decoded.

Every file in `lab/ablations/` runs for the same steps on the same examples, reading the
target's activations from one cache; then its drafter decodes the bundled prompts greedily as a
chain. What is told of each: accuracy and simulated tau on held-out responses, and tau of real
decoding. Texts are compared with plain decoding's: a difference stops the script. So small a budget
says that all of them train and decode, and little about which is best. The last line is JSON.

    python lab/ablations.py --data responses.jsonl.gz --out runs/ablations
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import moaspec
from moaspec.evaluate.prompt_suites import read_prompts
from moaspec.generation.drafters import load_any_drafter
from moaspec.target.target import Target
from moaspec_core.cli.prompts import chat_ids
from moaspec_train.dataset.examples import Example
from moaspec_train.dataset.read_examples import read_examples
from moaspec_train.run_config import TrainConfig, read_train_config
from moaspec_train.trainer import Trainer

CONFIGS = Path(__file__).parent / "ablations"


def budget(path: Path, arguments: argparse.Namespace) -> TrainConfig:
    """The run that a config describes, cut down to this script's budget."""
    changes = {
        "target": arguments.model,
        "data": f"[{arguments.data}]",
        "output": str(arguments.out / path.stem),
        "steps": arguments.steps,
        "save_every": arguments.steps,
        "warmup_steps": max(1, arguments.steps // 10),
        "batch_size": arguments.batch_size,
        "held_out": arguments.held_out,
        "max_length": arguments.max_length,
    }
    return read_train_config(path, [f"{key}={value}" for key, value in changes.items()])


def trained(target: Target, examples: list[Example], config: TrainConfig) -> dict[str, Any]:
    """Train one drafter; what was measured on held-out responses at the end."""
    shared, own = Path(config.output).parent / "activations", Path(config.output) / "activations"
    shared.mkdir(parents=True, exist_ok=True)
    own.parent.mkdir(exist_ok=True)
    if not own.exists():
        own.symlink_to(shared.resolve(), target_is_directory=True)
    run = Trainer(target, examples, config)
    started = time.perf_counter()
    run.run()
    last = run.log.rows()[-1]
    size = sum(parameter.numel() for parameter in run.student.module.parameters())
    return {
        "parameters": size,
        "loss_tokens": run.tokens,
        "seconds": round(time.perf_counter() - started),
        "accuracy": statistics.mean(last["held_out_accuracy"]),
        "simulated_tau": last["held_out_tau"],
    }


def decoded(target: Target, config: TrainConfig, arguments: argparse.Namespace) -> float:
    """Tau of greedy chains on the bundled prompts; every text must be the target's own."""
    drafter = load_any_drafter(Path(config.output) / "drafter", target=target)
    prompts = [
        chat_ids(target, prompt.turns[0])
        for prompt in read_prompts("bundled", limit=arguments.prompts)
    ]
    options = {"max_new_tokens": arguments.max_new_tokens}
    plain = moaspec.generate(target, prompts, drafter=None, **options)
    drafted = moaspec.generate(
        target, prompts, drafter=drafter, tree=moaspec.Chain(arguments.chain), **options
    )
    if [one.token_ids for one in plain] != [one.token_ids for one in drafted]:
        raise SystemExit(f"{config.output}: a text differs from plain decoding's")
    lengths = [length for one in drafted for length in one.accept_lengths]
    return statistics.mean(lengths)


def main() -> None:
    """Train and decode all, print a table."""
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
    found: dict[str, dict[str, Any]] = {}
    print("| config | parameters | accuracy | simulated tau | tau |\n|---|---|---|---|---|")
    for path in sorted(CONFIGS.glob("*.yaml")):
        config = budget(path, arguments)
        facts = trained(target, examples, config)
        facts["tau"] = round(decoded(target, config, arguments), 3)
        found[path.stem] = facts
        taus = ", ".join(
            f"{tau:.2f} (N={n})" for n, tau in facts["simulated_tau"].items() if tau is not None
        )
        print(
            f"| `{path.stem}` | {facts['parameters'] / 1e6:.1f}M | {facts['accuracy']:.1%} | "
            f"{taus or 'none'} | {facts['tau']:.2f} |",
            flush=True,
        )
    settings = {key: str(value) for key, value in vars(arguments).items()}
    print(json.dumps({"found": found, "settings": settings, "cpus": os.cpu_count()}))


def parse() -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="responses of the target, JSON lines")
    parser.add_argument("--out", type=Path, required=True, help="directory of the runs")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--limit", type=int, default=112, help="examples")
    parser.add_argument("--held-out", type=int, default=16)
    parser.add_argument("--max-length", type=int, default=192)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=4, help="bundled ones that are decoded")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--chain", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
