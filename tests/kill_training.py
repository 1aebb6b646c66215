"""Trains in a child that is killed at random moments: `kill_training.py CONFIG KILLS`.

The child is forked, so that ten kills cost one import. A moment is a number of steps and a little
while, because the clock alone tells little of how far a run is. A run that comes to its end before
it could be killed is deleted and begun again, so that all kills hit. Prints one line of JSON: how
many did, and from how many different steps the next run went on.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch

from moaspec.backends.load import load_target
from moaspec_train.dataset.read_examples import read_examples
from moaspec_train.run_config import read_train_config
from moaspec_train.trainer import Trainer
from moaspec_train.training_state import StateFiles


def num_rows(log: Path) -> int:
    """Steps that a log tells of."""
    return log.read_bytes().count(b"\n") if log.exists() else 0


def wait_for_rows(child: int, log: Path, number: int) -> None:
    """Wait until the child has logged this many steps, or has ended."""
    while num_rows(log) < number:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return
        time.sleep(0.001)


def main(config: Path, kills: int) -> None:
    """Kill `kills` times, then let a run come to its end."""
    torch.set_num_threads(1)
    settings = read_train_config(config)
    target = load_target(settings.target, dtype="float32", packed=False)
    examples = read_examples(
        settings.data,
        vocab_size=target.vocab_size,
        max_length=settings.max_length,
        tokenizer=target.tokenizer,
        stop_token_ids=target.stop_token_ids,
    )
    moments, steps, hits, ended = random.Random(3), set(), 0, False
    log = Path(settings.output) / "log.jsonl"
    while hits < kills or not ended:
        if ended:
            shutil.rmtree(settings.output)
        child = os.fork()
        if child == 0:
            Trainer(target, examples, settings).run()
            os._exit(0)
        if hits < kills:
            wait_for_rows(child, log, num_rows(log) + moments.randrange(8))
            time.sleep(moments.uniform(0, 0.1))
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        assert status in {0, signal.SIGKILL}
        ended = status == 0
        hits += not ended
        latest = StateFiles(Path(settings.output) / "state").latest()
        steps.add(latest.name if latest else "none")
    print(json.dumps({"hits": hits, "steps": len(steps)}))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
