"""tau and tokens per second of `moaspec eval` against an independent count.

Speed: `moaspec eval` runs as a subprocess with one repeat (thrice, of which the median counts) and
with many. What they differ by, on the clock of their parent, is the decodings that one did more:
loading and everything else that a process does once cancels. tau: accepted lengths that `moaspec
generate --json` prints for the same prompt. Nothing else may run on the machine.

    python tests/soak/independent.py --repeats 16
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from common import parser, setting

import moaspec

PROMPT = "Tell me a long story about a lighthouse keeper."
LENGTH = 128


@dataclass(frozen=True)
class Command:
    """What a subprocess printed, and what it took as its parent sees it."""

    printed: dict[str, Any]
    wall_s: float
    cpu_s: float


def main() -> None:
    """Print one line per method and figure, then one line of JSON."""
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=16, help="decodings that are timed")
    options.add_argument("--shape", default="chain:2")
    args = options.parse_args()
    common = ["--model", args.model, "--dtype", args.dtype, "--threads", str(args.threads)]
    common += ["--max-new-tokens", str(LENGTH)]
    figures: dict[str, dict[str, dict[str, float]]] = {}
    print(f"{'method':16} {'figure':17} {'eval':>8} {'here':>8}")
    for name, flags in (
        ("plain", ["--drafter", "none"]),
        (f"moa@{args.shape}", ["--tree", args.shape]),
    ):
        figures[name] = compared(name, flags, common, args.repeats)
        for key, pair in figures[name].items():
            off = pair["eval"] / pair["here"] - 1
            print(f"{name:16} {key:17} {pair['eval']:8.3f} {pair['here']:8.3f} {off:+7.2%}")
    target = moaspec.load_target(args.model, dtype=args.dtype)
    print(json.dumps(setting(target) | {"repeats": args.repeats, "figures": figures}))


def compared(
    method: str, flags: list[str], common: list[str], repeats: int
) -> dict[str, dict[str, float]]:
    """Each figure as `eval` reports it and as it is counted here."""
    with tempfile.TemporaryDirectory() as directory:
        suite = Path(directory) / "suite.jsonl"
        suite.write_text(json.dumps({"prompt": PROMPT}))
        command = ["eval", "--suite", str(suite), "--methods", method, "--json", *common]
        once = [run([*command, "--repeats", "1"]) for _ in range(3)]
        often = run([*command, "--repeats", str(1 + repeats)])
    report = often.printed["methods"][method]
    tokens = report["tokens"] * repeats
    text = run(["generate", PROMPT, "--json", *flags, *common]).printed
    # The prompt's own pass gives the first token and belongs to no round.
    tau = (len(text["token_ids"]) - 1) / len(text["accept_lengths"])
    return {
        "tau": {"eval": report["tau"], "here": tau},
        "tokens_per_s": {
            "eval": statistics.harmonic_mean(report["tokens_per_s_by_repeat"]),
            "here": tokens / (often.wall_s - statistics.median(one.wall_s for one in once)),
        },
        "cpu_s_per_token": {
            "eval": report["cpu_s_per_token"],
            "here": (often.cpu_s - statistics.median(one.cpu_s for one in once)) / tokens,
        },
    }


def run(arguments: list[str]) -> Command:
    """One command of `moaspec`."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "moaspec", *arguments], check=True, capture_output=True, text=True
    )
    wall_s, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Command(json.loads(done.stdout), wall_s, cpu_s)


if __name__ == "__main__":
    main()
