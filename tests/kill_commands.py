"""Runs and kills `moaspec` at random moments: `kill_commands.py KILLS OUT ARGUMENTS`.

A program of its own: it imports everything once and forks, so that each run costs no more than its
work. A moment is a number of bytes by which the output has grown, and a little while: the clock
alone would hit the same place again and again on a machine that has become slow. Prints one line
of JSON: sizes of the output after each kill, and whether every completed output had the same bytes.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

import moaspec_train.dataset.regenerate
import moaspec_train.dataset.synth  # noqa: F401 - what commands import when they need it
from moaspec_core.cli.main import run
from moaspec_train.cli import writing_options


def started(arguments: list[str]) -> int:
    """A child that runs the command; returns its process id."""
    child = os.fork()
    if child:
        return child
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    sys.argv = ["moaspec", *arguments]
    try:
        run()
    except SystemExit as done:
        os._exit(done.code if isinstance(done.code, int) else 0)
    finally:
        os._exit(1)


def finished(child: int) -> bool:
    """Wait for the child; False if a signal ended it."""
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFEXITED(status)


def size(out: Path) -> int:
    """Bytes of a file; 0 where there is none."""
    return out.stat().st_size if out.exists() else 0


def killed(child: int, out: Path, grown: int, pause_s: float) -> bool:
    """Kill the child this long after the output has grown by this much; False if it has ended."""
    until = size(out) + grown
    while size(out) < until:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return not finished(child)
        time.sleep(0.001)
    time.sleep(pause_s)
    os.kill(child, signal.SIGKILL)
    return not finished(child)


def main(kills: int, out: Path, arguments: list[str]) -> None:
    """Kill, and run to the end whenever a run came to its end before it could be killed."""
    chance, outputs = random.Random(0), set()
    sizes: list[int] = []
    begun = time.monotonic()
    assert finished(started(arguments))
    whole_s = time.monotonic() - begun
    whole = size(out)
    while len(sizes) < kills:
        outputs.add(out.read_bytes())
        for file in (out, out.with_name(out.name + ".progress")):
            file.unlink()
        while killed(
            started(arguments),
            out,
            int(chance.uniform(0, whole / 2)),
            chance.uniform(0, whole_s / 4),
        ):
            sizes.append(size(out))
    assert finished(started(arguments))
    outputs.add(out.read_bytes())
    print(json.dumps({"sizes": sizes, "different_outputs": len(outputs)}))  # noqa: T201


if __name__ == "__main__":
    # A forked child must not inherit a pool of threads that it cannot use.
    torch.set_num_threads(1)
    writing_options.GROUP_SIZE = 3  # so that a few conversations are saved group by group
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
