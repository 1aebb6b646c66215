"""Continual training on one domain: tau before and after, an exact restart, a roll-back, a flood.

The domain is questions to be answered as JSON. The target answers all of them first (greedy). Then
`ContinualTrainer` gets the answers one by one. Other questions are decoded with the first drafter
and with the newest version, and their texts must be equal. A cycle with 300 times the learning rate
must roll back, and so must a cycle of random tokens, on which no drafter's tau rises.

    python lab/continual.py QUESTIONS.jsonl SCRATCH_DIRECTORY

QUESTIONS.jsonl has a `prompt` per line. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import moaspec
from moaspec import Target
from moaspec_core.bundled import bundled_drafters
from moaspec_core.cli.prompts import chat_ids
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_train.continual import ContinualTrainer, CycleReport, LearnConfig, newest_version
from moaspec_train.students.held_out import BLOCK_LENGTH

ALIAS = "smollm2-135m"
ROWS = 12  # texts that are decoded together
DOMAIN = 'Answer as JSON with the keys "question", "answer" and "explanation". Question: {}'

Text = tuple[list[int], list[int]]


def say(**facts: Any) -> None:
    """Print a line of JSON."""
    print(json.dumps(facts), flush=True)


def answers(
    target: Target, drafter: Any, prompts: Sequence[list[int]], new_tokens: int
) -> tuple[list[list[int]], float]:
    """The target's greedy answers, and tokens per round with greedy chains of this drafter."""
    found = [
        one
        for start in range(0, len(prompts), ROWS)
        for one in moaspec.generate(
            target,
            prompts[start : start + ROWS],
            drafter=drafter,
            tree=Chain(BLOCK_LENGTH),
            free_branches=False,
            max_new_tokens=new_tokens,
            temperature=0.0,
        )
    ]
    lengths = [length for one in found for length in one.accept_lengths]
    return [list(one.token_ids) for one in found], sum(lengths) / len(lengths)


def cycles(learner: ContinualTrainer, texts: Sequence[Text]) -> Iterator[CycleReport]:
    """The reports of the cycles that these texts fill."""
    for prompt, answer in texts:
        started = time.process_time()
        report = learner.add(prompt, answer)
        if report is not None:
            cpu_s = round(time.process_time() - started, 1)
            say(**dataclasses.asdict(report), last_text_cpu_s=cpu_s)
            yield report


def state_bytes(directory: Path, cycle: int) -> bytes:
    """The saved weights and moments."""
    return (directory / "state" / f"step-{cycle}" / "model.safetensors").read_bytes()


def read_stream(args: argparse.Namespace, target: Target) -> tuple[list[list[int]], list[Text]]:
    """Prompts that are only decoded, and the stream of texts, which is kept for another run."""
    with args.questions.open(encoding="utf-8") as file:
        questions = sorted({json.loads(line)["prompt"] for line in file})
    order = torch.randperm(len(questions), generator=torch.Generator().manual_seed(args.seed))
    chosen = [questions[i] for i in order[: args.decoded + args.texts].tolist()]
    prompts = [chat_ids(target, DOMAIN.format(one)) for one in chosen]
    kept = args.scratch / "texts.json"
    if not kept.exists():
        drafter = moaspec.load_drafter(ALIAS, target=target)
        written, tau = answers(target, drafter, prompts[args.decoded :], args.new_tokens)
        kept.write_text(json.dumps([written, tau]))
    written, tau = json.loads(kept.read_text())
    say(stream_texts=len(written), tokens=sum(map(len, written)), tau_of_the_first_drafter=tau)
    return prompts[: args.decoded], list(zip(prompts[args.decoded :], written, strict=True))


def _split(texts: Sequence[list[int]]) -> list[Text]:
    return [(one[:20], one[20:]) for one in texts]


def parsed() -> argparse.Namespace:
    """The options of the command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("questions", type=Path)
    options.add_argument("scratch", type=Path)
    options.add_argument("--texts", type=int, default=160)
    options.add_argument("--decoded", type=int, default=12)
    options.add_argument("--new-tokens", type=int, default=64)
    options.add_argument("--learning-rate", type=float, default=LearnConfig().learning_rate)
    options.add_argument("--batch-size", type=int, default=4)
    options.add_argument("--steps", type=int, default=6)
    options.add_argument("--held-out", type=int, default=8)
    options.add_argument("--dtype", default="auto")
    options.add_argument("--seed", type=int, default=0)
    return options.parse_args()


def main() -> int:
    """Run all parts and print their results."""
    args = parsed()
    torch.set_num_threads(1)
    args.scratch.mkdir(parents=True, exist_ok=True)
    target = moaspec.load_target(ALIAS, dtype=args.dtype)
    decoded, stream = read_stream(args, target)
    config = LearnConfig(
        batch_size=args.batch_size,
        steps=args.steps,
        held_out=args.held_out,
        learning_rate=args.learning_rate,
    )
    teacher = moaspec.load_target(ALIAS, dtype="float32", packed=False)
    initial = bundled_drafters()[ALIAS]
    first, again = args.scratch / "first", args.scratch / "again"
    for old in args.scratch.glob("*/"):
        shutil.rmtree(old)

    learner = ContinualTrainer(teacher, initial, first, config)
    reports, exact = [], False
    for report in cycles(learner, stream):
        reports.append(report)
        if len(reports) == 1:
            shutil.copytree(first, again)  # as a process leaves it that is killed now
        elif len(reports) == 2:
            saved = state_bytes(first, 2)
            restarted = ContinualTrainer(teacher, initial, again, config)
            next(cycles(restarted, stream[restarted.texts :]))
            exact = state_bytes(again, 2) == saved
            say(restart_is_exact=exact)
    kept = newest_version(first)
    before, tau_before = answers(
        target, moaspec.load_drafter(ALIAS, target=target), decoded, args.new_tokens
    )
    newest = moaspec.load_drafter(kept or ALIAS, target=target)
    after, tau_after = answers(target, newest, decoded, args.new_tokens)
    say(decoded_tau_before=tau_before, decoded_tau_after=tau_after, texts_equal=before == after)

    wild = args.scratch / "wild"
    shutil.copytree(first, wild)
    fast = dataclasses.replace(config, learning_rate=min(1.0, 300 * config.learning_rate))
    rolled_back = next(cycles(ContinualTrainer(teacher, initial, wild, fast), stream))
    flooded = args.scratch / "flooded"
    shutil.copytree(first, flooded)
    drawn = torch.Generator().manual_seed(args.seed)
    noise = torch.randint(target.vocab_size, (len(stream), 60), generator=drawn).tolist()
    flood = next(cycles(ContinualTrainer(teacher, initial, flooded, config), _split(noise)))
    newest = moaspec.load_drafter(newest_version(flooded) or ALIAS, target=target)
    _, tau_flooded = answers(target, newest, decoded, args.new_tokens)
    say(
        setting={name: str(value) for name, value in vars(args).items()}
        | {"precision": target.precision, "torch": torch.__version__},
        held_out_tau=[(one.tau_before, one.tau_after, one.accepted) for one in reports],
        decoded_tau=(tau_before, tau_after),
        texts_equal=before == after,
        restart_is_exact=exact,
        too_fast=(rolled_back.tau_before, rolled_back.tau_after, rolled_back.accepted),
        random_tokens=(flood.tau_before, flood.tau_after, flood.accepted),
        decoded_tau_after_random_tokens=tau_flooded,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
