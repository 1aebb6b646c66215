"""tau and tokens per second of `moaspec eval` against an independent count.

Speed: `moaspec generate` is run as a subprocess for two lengths; the difference of the two cancels
loading and prompt. Beside wall-clock time stands the subprocess's CPU time, which other work on the
machine hardly changes; with one thread and nothing else running the two are the same. tau: accepted
lengths that the command prints, of the longer run.

    python benchmarks/independent.py --repeats 3
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from common import load, parser, setting

from moaspec.cli.console import chat_ids
from moaspec.evaluate import Method

PROMPT = "Tell me a long story about a lighthouse keeper."
SHORT, LONG = 32, 160


def main() -> None:
    """Print one line per method, then one line of JSON."""
    options = parser(__doc__, dtype="float32", threads=1)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--shape", default="chain:2")
    args = options.parse_args()
    target, drafter = load(args)
    prompt_ids = chat_ids(target, PROMPT)
    figures = {}
    for name, method, flags in (
        ("plain", Method("plain", target), ["--no-speculation"]),
        ("moa", Method("moa", target, drafter, args.shape), ["--tree", args.shape]),
    ):
        inside = [_inside(method, prompt_ids) for _ in range(args.repeats)]
        outside = [_outside(flags, args) for _ in range(args.repeats)]
        figures[name] = {
            key: {"eval": _median(inside, key), "subprocess": _median(outside, key)}
            for key in ("tau", "tokens_per_s", "tokens_per_cpu_s")
        }
        for key, pair in figures[name].items():
            off = pair["eval"] / pair["subprocess"] - 1
            print(f"{name:6} {key:17} {pair['eval']:8.3f} {pair['subprocess']:8.3f} {off:+7.2%}")
    print(json.dumps(setting(target) | {"repeats": args.repeats, "figures": figures}))


def _inside(method: Method, prompt_ids: Sequence[int]) -> dict[str, float]:
    """As `eval` measures, by the difference of two lengths too."""
    short, long = (method.run(prompt_ids, length) for length in (SHORT, LONG))
    tokens = len(long.token_ids) - len(short.token_ids)
    return {
        "tau": long.result.tau or 1.0,
        "tokens_per_s": tokens / (long.seconds - short.seconds),
        "tokens_per_cpu_s": tokens / (long.cpu_s - short.cpu_s),
    }


def _outside(flags: Sequence[str], args: Any) -> dict[str, float]:
    short, long = (_command(length, flags, args) for length in (SHORT, LONG))
    tokens = len(long["token_ids"]) - len(short["token_ids"])
    rounds = len(long["accept_lengths"])
    return {
        "tau": (len(long["token_ids"]) - 1) / rounds,
        "tokens_per_s": tokens / (long["wall_s"] - short["wall_s"]),
        "tokens_per_cpu_s": tokens / (long["cpu_s"] - short["cpu_s"]),
    }


def _command(length: int, flags: Sequence[str], args: Any) -> dict[str, Any]:
    """What `moaspec generate --json` printed, and what the process took as its parent sees it."""
    command = [sys.executable, "-m", "moaspec", "generate", PROMPT, "--json", *flags]
    command += ["--max-new-tokens", str(length), "--threads", str(args.threads)]
    command += ["--model", args.model, "--dtype", args.dtype]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603
    wall_s, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {**json.loads(done.stdout), "wall_s": wall_s, "cpu_s": cpu_s}


def _median(runs: Sequence[dict[str, float]], key: str) -> float:
    return statistics.median(run[key] for run in runs)


if __name__ == "__main__":
    main()
