"""The promise that drafting never loses more than 3%, prompt by prompt.

README's first prompt and those of the demo are decoded plainly and with `auto`, by turns, on an
idle machine and beside one busy process. Every text starts as in a new process: nothing was
observed before. Times are those of whole requests, prompts included.

    python benchmarks/promise.py --threads 2
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from common import load, parser, setting

import moaspec
from moaspec import Target
from moaspec.calibration.measure_costs import stored_costs
from moaspec.cli.demo import MAX_PROMPTS, MAX_TOKENS
from moaspec.evaluate.prompt_suites import read_prompts
from moaspec.model.moa import MoADrafter
from moaspec_core.cli.prompts import chat_ids

README = "Why is the sky blue?"
LEAST = 0.97
SETTLE_S = 0.5  # until a busy process is noticed, or that it has gone


def main() -> None:
    """Print a table of medians, then one line of JSON."""
    options = parser(__doc__)
    options.add_argument("--runs", type=int, default=10)
    options.add_argument("--tokens", type=int, default=128, help="Tokens of README's prompt.")
    options.add_argument(
        "--outranks",
        action="store_true",
        help="When idle, give no thread up: the scheduler prefers this process to all others.",
    )
    args = options.parse_args()
    target, drafter = load(args)
    limiter = target.threads
    demo = read_prompts("bundled", limit=MAX_PROMPTS)
    texts = {"README": (README, args.tokens)}
    texts |= {one.category or str(one.question_id): (one.turns[0], MAX_TOKENS) for one in demo}
    found: dict[str, dict[str, Any]] = {}
    for load_name, busy in (("idle", 0), ("beside a busy process", 1)):
        target.threads = None if args.outranks and not busy else limiter
        with busy_processes(busy):
            for name, (text, tokens) in texts.items():
                ids = chat_ids(target, text)
                found[f"{name}, {load_name}"] = _compared(target, drafter, ids, tokens, args.runs)
    print(f"{'prompt':<36}{'plain':>8}{'auto':>8}  tokens/s{'ratio':>8}{'lowest':>8}")
    for name, one in found.items():
        print(
            f"{name:<36}{one['plain']:>8.0f}{one['auto']:>8.0f}{'':10}{one['ratio']:>8.2f}"
            f"{min(one['ratios']):>8.2f}"
        )
    broken = [name for name, one in found.items() if one["ratio"] < LEAST]
    print(f"below {LEAST}: {', '.join(broken) or 'none'}")
    costs = "shipped" if stored_costs(target, drafter) is None else "measured"
    data = {"benchmark": "promise", "costs": costs, "runs": args.runs, "least": LEAST}
    print(json.dumps({**data, "setting": setting(target), "prompts": found, "below": broken}))


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """As many processes that use a core each."""
    processes = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)
    ]
    time.sleep(SETTLE_S)
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _compared(
    target: Target, drafter: MoADrafter, ids: list[int], tokens: int, runs: int
) -> dict[str, Any]:
    """Tokens per second and their ratios; the order changes from run to run."""
    speeds: dict[str, list[float]] = {"plain": [], "auto": []}
    for run in range(-1, runs):  # the first pair warms up
        for name in ("plain", "auto") if run % 2 else ("auto", "plain"):
            target.draft_settings.clear()
            used = drafter if name == "auto" else None
            result = moaspec.generate(target, ids, drafter=used, max_new_tokens=tokens)
            if run >= 0:
                speeds[name].append(len(result.token_ids) / result.timing.total_s)
    ratios = [auto / plain for plain, auto in zip(*speeds.values(), strict=True)]
    medians = {name: statistics.median(of) for name, of in speeds.items()}
    return {**medians, "ratio": statistics.median(ratios), "ratios": ratios}


if __name__ == "__main__":
    main()
