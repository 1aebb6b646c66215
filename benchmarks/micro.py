"""Microbenchmarks of everything a round consists of, compared with a stored baseline.

The first run in a setting (machine, threads, dtype, target, drafter) becomes its baseline; --save
replaces it. A part counts as slower when its median lies above the baseline's by more than the
noise: the larger of the two interquartile ranges, and at least 5%. The last line is JSON.

    python benchmarks/micro.py --dtype bfloat16 --threads 2
"""

from __future__ import annotations

import time

STARTED = time.perf_counter()

import hashlib  # noqa: E402
import json  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from common import load, parser, setting, spread  # noqa: E402

import moaspec  # noqa: E402
from moaspec import Chain, Tree  # noqa: E402
from moaspec.backends.fast_moa_proposer import FastMoAProposer  # noqa: E402
from moaspec.calibration.measure_costs import fingerprint  # noqa: E402
from moaspec.calibration.round_parts import RoundParts, TimedPart  # noqa: E402
from moaspec.drafting.kv_cache import tree_mask  # noqa: E402
from moaspec_core.drafting.draft_tree import DraftTree, ancestor_matrix, walk  # noqa: E402
from moaspec_core.drafting.ngram_proposer import NgramIndex  # noqa: E402
from moaspec_core.policy.cost_model import CostTable, KnownCosts  # noqa: E402
from moaspec_core.policy.policies import AdaptivePolicy  # noqa: E402
from moaspec_core.support.paths import cache_dir  # noqa: E402

SHAPE = Tree(3, 2, 6)
MIN_NOISE = 0.05
"""Share of a median below which no difference is believed, however quiet a run was."""
CPU = torch.device("cpu")
WARM_UPS = 2


def main() -> None:
    """Print one line per part, what got slower, then one line of JSON."""
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=15)
    options.add_argument("--save", action="store_true", help="Make this run the baseline.")
    options.add_argument("--strict", action="store_true", help="Exit with 1 if a part is slower.")
    args = options.parse_args()
    target, drafter = load(args)
    moaspec.generate(target, [1, 2, 3], drafter=drafter, max_new_tokens=2, tree=SHAPE)
    cold_start_s = time.perf_counter() - STARTED
    figures = measured(target, FastMoAProposer(drafter, target), args.repeats)
    path = baseline_path(fingerprint(target, drafter))
    baseline = json.loads(path.read_text())["milliseconds"] if path.exists() else {}
    slower = slowdowns(figures, baseline)
    for name, figure in figures.items():
        before = f"  was {baseline[name]['median']:.3f}" if name in baseline else ""
        note = f"  SLOWER by {slower[name]:.0%}" if name in slower else ""
        print(f"{name:28} {figure['median']:9.3f} ms{before}{note}")
    data = {"benchmark": "micro", "setting": setting(target), "cold_start_s": cold_start_s}
    data |= {"milliseconds": figures, "slower": slower, "compared": bool(baseline)}
    if args.save or not baseline:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1) + "\n")
        print(f"This run is the baseline now: {path.name}")
    print(f"cold start (imports, loading, first tokens): {cold_start_s:.1f} s")
    print(json.dumps(data))
    if slower and args.strict:
        raise SystemExit(1)


def measured(
    target: moaspec.Target, drafting: FastMoAProposer, repeats: int
) -> dict[str, dict[str, float]]:
    """Milliseconds of each part."""
    bench = RoundParts(target, drafting)
    parts = {
        **{f"target pass, {n} tokens": bench.target_pass(n, 64) for n in (1, 8, 16)},
        "target pass after 1024": bench.target_pass(1, 1024),
        "head, 1 token": bench.head(1),
        "draft, one level": bench.draft(Chain(1)),
        f"draft, {SHAPE}": bench.draft(SHAPE),
        "encode, 1 token": bench.encode(1),
        "encode, 64 tokens": bench.encode(64),
        **{name: TimedPart(run, CPU) for name, run in _host().items()},
    }
    for part in parts.values():
        for turn in range(WARM_UPS + repeats):
            part.time(counts=turn >= WARM_UPS)
    return {name: spread([1000 * s for s in part.seconds]) for name, part in parts.items()}


def _host() -> dict[str, Callable[[], Any]]:
    """What the host does in every round, and now and then."""
    text = [i * 7 % 97 for i in range(2000)]
    index = NgramIndex((4, 3, 2))
    index.extend(text)
    tree = DraftTree(tuple(range(62)), (-1, *[i // 2 for i in range(61)]))
    own = torch.from_numpy(ancestor_matrix(tree.parents))[None]
    line = (0.01, 0.012, 0.02)
    costs = CostTable(
        contexts=(64,),
        tokens=(1, 8, 64),
        pass_s=(line,),
        head_s=line,
        root_s=0.001,
        widths=(1, 8),
        step_s=(0.001, 0.002),
        encode_s=line,
    )
    known = KnownCosts(costs)
    return {
        "tree mask, 62 nodes": lambda: tree_mask([500], own, 600),
        "ancestors, 62 nodes": lambda: ancestor_matrix(tree.parents),
        "walk, 62 nodes": lambda: walk(tree, [0, *range(1, 63)]),
        "free branches": lambda: index.paths(SHAPE),
        "choice of a shape": lambda: AdaptivePolicy(known).shape(64, 1),
    }


def slowdowns(
    figures: dict[str, dict[str, float]], baseline: dict[str, dict[str, float]]
) -> dict[str, float]:
    """The relative slow-down of parts that are slower than the baseline beyond the noise."""
    slower = {}
    for name in figures.keys() & baseline.keys():
        now, before = figures[name], baseline[name]
        noise = max(now["high"] - now["low"], before["high"] - before["low"])
        noise = max(noise, MIN_NOISE * before["median"])
        if now["median"] > before["median"] + noise:
            slower[name] = now["median"] / before["median"] - 1.0
    return slower


def baseline_path(data: dict[str, Any]) -> Path:
    """Where the baseline of a setting is kept: with the calibrations, not in the repository."""
    digest = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
    return cache_dir() / "benchmarks" / f"{digest[:24]}.json"


if __name__ == "__main__":
    main()
