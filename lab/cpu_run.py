"""The thirteenth run: on one core the target writes texts, then a drafter trains.

    python lab/cpu_run.py write PROMPTS.jsonl DIRECTORY --seconds 2000
    python lab/cpu_run.py train lab/runs/smollm2-135m-thirteenth.yaml DIRECTORY --seconds 1500

`write` keeps LSA's means and the target's final states, which it has while it writes. So `train`,
with LSA frozen, runs the target no more. Seconds are CPU time.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_run import WORDS, set_steps
from torch import Tensor

from moaspec import SamplingParams, Target, load_drafter, load_target
from moaspec.backends.fast_drafter import packed_copy
from moaspec.engine.local_verifier import LocalVerifier, PassRow
from moaspec.model.moa import TargetPass
from moaspec_core.cli.prompts import message_ids
from moaspec_core.engine.engine import Engine
from moaspec_train.dataset.examples import Batch, Example
from moaspec_train.run_config import read_train_config
from moaspec_train.trainer import Trainer

ROWS, NEW_TOKENS, SHARD = 128, 224, 320
TEMPERATURES = (0.0, 0.0, 0.0, 0.7, 0.8, 1.0, 1.0)


class KeepingVerifier(LocalVerifier):
    """Keeps the final states of the text in each cache row."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._row_pass = None  # which does not call `_states`
        self._kept: dict[int, list[tuple[int, Tensor]]] = defaultdict(list)

    def _states(self, rows: Sequence[PassRow]) -> list[Tensor]:
        states = super()._states(rows)
        for row, states_TE in zip(rows, states, strict=True):
            self._kept[row.request.cache_row].append((row.start, states_TE.clone()))
        return states

    def take(self, row: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values (1, T, L, K), and states (T, E); those of the last token are zero."""
        kv_1TLK = F.pad(self.cache.features(row, 0, tokens - 1), (0, 0, 0, 0, 0, 1))
        states_TE = kv_1TLK.new_zeros(tokens, self.target.identity.hidden_size)
        for start, part_TE in self._kept.pop(row):
            states_TE[start : start + len(part_TE)] = part_TE
        return kv_1TLK, states_TE


class KeptMeans:
    """Stands in for `LayerMeanCache`."""

    def __init__(self) -> None:
        self.examples: Sequence[Example] = ()
        self._stored: dict[Example, tuple[Tensor, Tensor]] = {}

    def load(self, directory: Path) -> list[Example]:
        """The examples of all shards."""
        for path in sorted(directory.glob("*.jsonl")):
            rows = [json.loads(line) for line in path.open(encoding="utf-8")]
            found = [Example(row["prompt_ids"], row["response_ids"]) for row in rows]
            arrays = torch.load(path.with_suffix(".pt"), mmap=True)
            sizes = list(map(len, found))
            parts = zip(arrays["mean"].split(sizes), arrays["hidden"].split(sizes), strict=True)
            self._stored.update(zip(found, parts, strict=True))
        return list(self._stored)

    def read(self, batch: Batch) -> tuple[Tensor, TargetPass]:
        """Means over layers (B, T, K), and the target's pass without keys and values."""
        rows = [self._stored[self.examples[i]] for i in batch.example_ids]
        mean_BTK, hidden_BTE = (
            torch.nn.utils.rnn.pad_sequence(list(column), batch_first=True).float()
            for column in zip(*rows, strict=True)
        )
        return mean_BTK, TargetPass(mean_BTK[:, :, None, :0], hidden_BTE)


def write(args: argparse.Namespace) -> None:
    """Write shards of texts until the seconds are over."""
    target = load_target("smollm2-135m", dtype="bfloat16")
    whole = copy.deepcopy(load_drafter("smollm2-135m", target=target).encoder).bfloat16()
    encoder: Any = packed_copy(whole, exact=list(whole.children()))
    verifier = KeepingVerifier(target)
    engine = Engine(verifier, None, target=target)
    lines = args.prompts.open(encoding="utf-8")
    waiting = jobs(target, [json.loads(line)["prompt"] for line in lines])
    running: dict[int, tuple[int, list[int]]] = {}
    texts: list[dict[str, list[int]]] = []
    means: list[Tensor] = []
    states: list[Tensor] = []
    shards, over = 0, False
    while not over:
        while len(running) < ROWS and (job := next(waiting, None)):
            ids, sampling = job
            handle = engine.add(
                ids,
                max_new_tokens=NEW_TOKENS,
                stop_token_ids=target.stop_token_ids,
                shape=None,
                sampling=sampling,
            )
            running[handle] = engine._active[handle].cache_row, ids
        for event in engine.step():
            if event.stop_reason is None:
                continue
            row, ids = running.pop(event.handle)
            response = list(engine.result(event.handle).token_ids)
            kv_1TLK, states_TE = verifier.take(row, len(ids) + len(response))
            with torch.inference_mode():
                means.append(encoder.mean_over_layers(kv_1TLK)[0])
            states.append(states_TE)
            texts.append({"prompt_ids": ids, "response_ids": response})
        over = time.process_time() > args.seconds or not running
        if texts and (over or len(texts) >= SHARD):
            path = args.directory / f"{shards:03d}.jsonl"
            torch.save(
                {"mean": torch.cat(means), "hidden": torch.cat(states)}, path.with_suffix(".pt")
            )
            path.write_text("".join(json.dumps(one) + "\n" for one in texts), encoding="utf-8")
            texts, means, states, shards = [], [], [], shards + 1


def jobs(target: Any, prompts: Sequence[str]) -> Iterator[tuple[list[int], SamplingParams]]:
    """Prompts with the default system prompt, another or none, shortest first in each shard."""
    systems = WORDS["system"].split("|")
    for start in range(0, len(prompts), SHARD):
        shard = []
        for number, prompt in enumerate(prompts[start : start + SHARD], start):
            chooser = random.Random(number)  # noqa: S311 - no secrets
            drawn = chooser.random()
            messages = [{"role": "user", "content": prompt}]
            if drawn > 0.75:
                messages.insert(0, {"role": "system", "content": chooser.choice(systems)})
            ids = message_ids(target, messages)
            if drawn < 0.15:
                text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
                ids = target.tokenizer(text, add_special_tokens=False)["input_ids"]
            temperature = chooser.choice(TEMPERATURES)
            seed = number if temperature else None
            shard.append((ids, SamplingParams(temperature=temperature, seed=seed)))
        yield from sorted(shard, key=lambda job: len(job[0]))


def train(args: argparse.Namespace) -> None:
    """Train for `args.seconds`; the learning rate's decay ends with them."""
    config = read_train_config(args.config, args.overrides)
    target = load_target(config.target, dtype="bfloat16", packed=False)
    kept: Any = KeptMeans()
    trainer = Trainer(target, kept.load(args.directory), config)
    kept.examples, trainer.student._means = trainer.data.examples, kept  # type: ignore[attr-defined]
    started = time.process_time()
    while (done := (time.process_time() - started) / args.seconds) < 1:
        set_steps(config, max(trainer.step + 1, int(trainer.step / max(done, 1e-3))))
        parts = trainer.train_step()
        if trainer.step in {1, 25, 50, 100} or trainer.step % 50 == 0:
            print(trainer.step, trainer.tokens, f"loss {parts.total / parts.count:.5f}", flush=True)
    print(trainer._held_out())
    trainer.export()


def main() -> None:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(description="The thirteenth run of the bundled drafter.")
    kinds = parser.add_subparsers(required=True)
    writing, training = kinds.add_parser("write"), kinds.add_parser("train")
    writing.set_defaults(run=write)
    writing.add_argument("prompts", type=Path)
    training.set_defaults(run=train)
    training.add_argument("config", type=Path)
    for kind in (writing, training):
        kind.add_argument("directory", type=Path)
        kind.add_argument("--seconds", type=float, required=True)
    training.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.run(args)


if __name__ == "__main__":
    main()
