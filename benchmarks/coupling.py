"""What coupling gains: acceptance of drafts when the target samples.

All methods verify the same texts, or the script refuses to print (sampling is seeded),
so only the drafts differ:

- greedy: target and drafter at temperature 0, for comparison;
- coupled: the drafter uses the target's own noise;
- likeliest: the drafter proposes its most probable tokens, as if the target were greedy;
- independent: the drafter samples with noise of its own.

    python benchmarks/coupling.py --suite prompts.jsonl --limit 8
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from common import load, prompts_of, text_parser, text_setting

import moaspec
from moaspec import GenerationResult, SamplingParams
from moaspec.drafting.moa_proposer import MoAProposer
from moaspec.generation.local_engine import local_engine
from moaspec_core.drafting.draft_tree import DraftTree, Tree
from moaspec_core.drafting.protocols import RequestText
from moaspec_core.drafting.tree_shapes import parse_shape
from moaspec_core.engine.request_state import acceptance_by_depth
from moaspec_core.sampling.params import GREEDY


class Likeliest(MoAProposer):
    """Drafts the most likely tokens, without noise."""

    def propose(self, rows: Sequence[RequestText], shape: Tree) -> list[DraftTree]:
        return super().propose([replace(row, sampling=GREEDY) for row in rows], shape)


class Independent(MoAProposer):
    """Drafts with other noise than the target's."""

    def propose(self, rows: Sequence[RequestText], shape: Tree) -> list[DraftTree]:
        return super().propose([replace(row, sampling=_other(row.sampling)) for row in rows], shape)


def _other(sampling: SamplingParams) -> SamplingParams:
    return replace(sampling, seed=(sampling.seed or 0) + 1)


METHODS: dict[str, type[MoAProposer]] = {
    "greedy": MoAProposer,
    "coupled": MoAProposer,
    "likeliest": Likeliest,
    "independent": Independent,
}


def main() -> None:
    """Print one line per shape and method, then one line of JSON."""
    options = text_parser(__doc__)
    options.add_argument("--temperature", type=float, default=0.8)
    options.add_argument("--top-p", type=float, default=1.0)
    options.add_argument("--shapes", nargs="+", default=["chain:4", "tree:4x4x12"])
    args = options.parse_args()
    target, drafter = load(args)
    prompts = prompts_of(args, target)
    sampled = SamplingParams(temperature=args.temperature, top_p=args.top_p, seed=1234)
    figures = {}
    for shape in args.shapes:
        runs = {
            name: _run(
                target,
                kind(drafter, target),
                prompts,
                shape=shape,
                sampling=GREEDY if name == "greedy" else sampled,
                max_new_tokens=args.max_new_tokens,
            )
            for name, kind in METHODS.items()
        }
        _require_equal([runs[name] for name in METHODS if name != "greedy"])
        figures[shape] = {name: _figures(results) for name, results in runs.items()}
        for name, figure in figures[shape].items():
            depths = " ".join(f"{share:.1%}" for share in figure["acceptance_by_depth"])
            print(f"{shape:14} {name:12} tau {figure['tau']:.3f}   by depth {depths}", flush=True)
    data = text_setting(args, target) | {"prompts": len(prompts), "figures": figures}
    print(json.dumps(data))


def _run(
    target: moaspec.Target,
    drafting: MoAProposer,
    prompts: Sequence[Sequence[int]],
    *,
    shape: str,
    sampling: SamplingParams,
    max_new_tokens: int,
) -> list[GenerationResult]:
    """All prompts in one batch."""
    engine = local_engine(target, drafting)
    handles = [
        engine.add(
            prompt,
            max_new_tokens=max_new_tokens,
            stop_token_ids=target.stop_token_ids,
            shape=parse_shape(shape),
            sampling=sampling,
        )
        for prompt in prompts
    ]
    results = [engine.result(handle) for handle in handles]
    while engine.num_active:
        engine.step()
    return results


def _require_equal(runs: Sequence[list[GenerationResult]]) -> None:
    """Rows may part at a tie; more than one in a hundred rows would be a fault."""
    texts = [[result.token_ids for result in run] for run in runs]
    different = sum(a != b for other in texts[1:] for a, b in zip(texts[0], other, strict=True))
    if different > max(1, len(texts[0]) * len(texts) // 100):
        raise SystemExit(f"{different} texts differ between drafters; no figures.")


def _figures(results: list[GenerationResult]) -> dict[str, Any]:
    emitted = sum(sum(result.accept_lengths) for result in results)
    return {
        "tau": emitted / sum(result.num_rounds for result in results),
        "rounds": sum(result.num_rounds for result in results),
        "acceptance_by_depth": acceptance_by_depth(results),
    }


if __name__ == "__main__":
    main()
