"""Decoding with drafts beside plain decoding and llama.cpp, prompt by prompt.

Every prompt is decoded by each way in turn, and the order changes from prompt to prompt. A text
with drafts must equal the plain one. Speeds are those of whole requests, prompts included; for
llama.cpp also those after the prompt's pass, because its prompts take longer.

llama.cpp comes with the binding `xllamacpp`: pip install xllamacpp.

    python benchmarks/drafted.py --model qwen2.5-coder-0.5b --drafter qwen2.5-coder-0.5b --threads 2
        --suite bundled-code lab/editing_prompts.jsonl --limit 20 --llama "" ngram_simple
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import load_target, parser, setting
from llamacpp import LlamaCpp

import moaspec
from moaspec.evaluate.prompt_suites import read_prompts
from moaspec.generation.drafters import load_any_drafter
from moaspec.target.registry import find_target_gguf
from moaspec_core.cli.prompts import chat_ids
from moaspec_core.drafting.tree_shapes import Chain

CHAIN = 4

Found = dict[str, Any]
"""What one way did with one prompt: tokens/s of the request and after the prompt, tau, texts."""


def main() -> None:
    """Print a table of medians for every suite, then one line of JSON."""
    options = parser(__doc__)
    options.add_argument("--suite", nargs="+", default=["bundled-code"])
    options.add_argument("--limit", type=int, help="Prompts of each suite, its first ones.")
    options.add_argument("--category", nargs="+", help="Only prompts of these categories.")
    options.add_argument("--max-new-tokens", type=int, default=128)
    options.add_argument(
        "--llama",
        nargs="*",
        default=[""],
        help='Ways of llama.cpp: "" for none of its drafts, its names, or the file of a model.',
    )
    args = options.parse_args()
    target = load_target(args)
    drafter = load_any_drafter(args.drafter, target=target)
    target.threads = None  # llama.cpp's processes, which take their turns, take no core
    gguf = find_target_gguf(args.model)
    most = args.max_new_tokens

    def ours(**how: Any) -> Callable[[Sequence[int]], Found]:
        def run(ids: Sequence[int]) -> Found:
            target.draft_settings.clear()
            start = time.perf_counter()
            result = moaspec.generate(target, ids, max_new_tokens=most, **how)
            seconds = time.perf_counter() - start
            number = len(result.token_ids)
            after = (number - 1) / max(seconds - result.timing.prefill_s, 1e-9)
            found = {"tokens": number, "request": number / seconds, "after": after}
            return found | {"tau": result.tau, "ids": result.token_ids}

        return run

    ways = {
        "plain": ours(),
        "auto": ours(drafter=drafter),
        f"chain of {CHAIN}": ours(drafter=drafter, tree=Chain(CHAIN), free_branches=False),
    }
    for kind in args.llama:
        if gguf is None:
            raise SystemExit(f"{args.model} is no GGUF file that is here; give --llama no ways.")
        name = f"llama.cpp {Path(kind).stem}".strip()
        ways[name] = _llama(LlamaCpp(gguf, threads=args.threads, context=8192, drafts=kind), most)
    runs: dict[str, list[dict[str, Found]]] = defaultdict(list)
    for suite in args.suite:
        name, prompts = Path(suite).stem, read_prompts(suite, max_turns=1)
        if args.category is not None:
            prompts = [prompt for prompt in prompts if prompt.category in args.category]
        for prompt in prompts[: args.limit]:
            ids = chat_ids(target, prompt.turns[0])
            runs[name].append(_by_turns(ways, ids, len(runs[name])))
            _tell(name, prompt.question_id, runs[name][-1])
    found = {suite: _summary(each) for suite, each in runs.items()}
    for suite, summary in found.items():
        print(f"\n{suite}, {len(runs[suite])} prompts, {summary['equal']} texts equal")
        print(
            f"{'':24}{'tokens/s':>9}{'of plain':>9}{'worst':>7}{'after the prompt':>18}{'tau':>6}"
        )
        for way, one in summary["ways"].items():
            tau = "" if one["tau"] is None else f"{one['tau']:.2f}"
            print(
                f"{way:24}{one['request']:9.1f}{one['ratio']:8.2f}x{one['worst']:6.2f}x"
                f"{one['after']:18.1f}{tau:>6}"
            )
    info = {"benchmark": "drafted", "setting": setting(target), "drafter": args.drafter}
    print(json.dumps({**info, "max_new_tokens": most, "found": found}))


def _llama(server: LlamaCpp, most: int) -> Callable[[Sequence[int]], Found]:
    def run(ids: Sequence[int]) -> Found:
        times = server.timings(ids, most, stop=True)
        number = int(times["predicted_n"])
        seconds = (times["prompt_ms"] + times["predicted_ms"]) / 1e3
        after = times["predicted_per_second"]
        return {"tokens": number, "request": number / seconds, "after": after, "tau": None}

    return run


def _by_turns(
    ways: dict[str, Callable[[Sequence[int]], Found]], ids: Sequence[int], turn: int
) -> dict[str, Found]:
    """What each way did with a prompt; the first prompt is decoded once more before, to warm up."""
    names = list(ways)
    first = turn % len(names)
    order = names[first:] + names[:first]
    if not turn:
        for name in order:
            ways[name](ids)
    return {name: ways[name](ids) for name in order}


def _tell(suite: str, prompt: str, found: dict[str, Found]) -> None:
    plain = found["plain"]
    parts = [f"{name} {one['request']:.0f}" for name, one in found.items()]
    equal = all(one["ids"] == plain["ids"] for one in found.values() if "ids" in one)
    line = f"{suite} {prompt}: {', '.join(parts)} tokens/s"
    print(line if equal else f"{line}; TEXTS DIFFER", file=sys.stderr, flush=True)


def _summary(runs: Sequence[dict[str, Found]]) -> dict[str, Any]:
    """Medians over prompts of each way; ratios are taken prompt by prompt."""
    ways: dict[str, Any] = {}
    for name in runs[0]:
        ratios = [run[name]["request"] / run["plain"]["request"] for run in runs]
        taus = [run[name]["tau"] for run in runs if run[name]["tau"] is not None]
        ways[name] = {
            "request": statistics.median(run[name]["request"] for run in runs),
            "after": statistics.median(run[name]["after"] for run in runs),
            "ratio": statistics.median(ratios),
            "worst": min(ratios),
            "ratios": [round(ratio, 3) for ratio in ratios],
            "tau": statistics.mean(taus) if taus else None,
        }
    plain = [run["plain"]["ids"] for run in runs]
    equal = sum(
        all(one["ids"] == ids for one in run.values() if "ids" in one)
        for run, ids in zip(runs, plain, strict=True)
    )
    order = ["plain", *(name for name in ways if name != "plain")]
    return {"equal": equal, "ways": {name: ways[name] for name in order}}


if __name__ == "__main__":
    main()
