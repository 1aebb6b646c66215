"""Is the text of a drafted vLLM that of plain vLLM, and is no acceptance lost on the way?

In float32. Requests join and leave at concurrency 1, 8 and 32, prompts are read in chunks and share
a prefix, and the cache is so small that requests are preempted. The trained drafter and one of
random weights; tau of the trained one beside that of moaspec's own chain for the same prompts.

`tau` is from vLLM's counters, which take a last draft whole though the text ends within it;
`tokens_per_round` counts what was kept, as moaspec does. A request that is preempted starts anew
with a step that has no draft, so compare where there are no preemptions.

    python tests/soak/vllm_equality.py --suite spec_bench.jsonl
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from vllm_common import Requests, counters, engine, parser, prompt_ids, serve, speculative

import moaspec
from moaspec import Chain, Target
from moaspec.evaluate.correctness.equality import judge
from moaspec.model.checkpoint.moa_checkpoint import save_drafter
from moaspec.model.moa import MoADrafter

LONGEST_PROMPT = 320
CROWDED: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 128,
    "block_size": 32,
    "num_gpu_blocks_override": 48,
    "enable_prefix_caching": True,
}
WATCHED = ("num_preemptions", "prefix_cache_hits", "spec_decode_num_drafts")


def main() -> None:
    """Print one line per drafter and concurrency, then one line of JSON."""
    options = parser(__doc__)
    options.add_argument("--max-new-tokens", type=int, default=64, help="Of the longest answers.")
    options.add_argument("--drafters", nargs="*", default=["trained", "random"])
    options.add_argument("--concurrency", nargs="+", type=int, default=[32, 8, 1])
    args = options.parse_args()
    target = moaspec.load_target(args.model)
    drafter = moaspec.load_drafter(args.drafter, target=target)
    prompts = prompt_ids(args.model, args.suite, args.limit, longest=LONGEST_PROMPT)
    # Answers of different lengths, so that requests leave one by one.
    lengths = [args.max_new_tokens * (4 + index % 5) // 8 for index in range(len(prompts))]
    plain, rows = Requests(prompts, lengths), []
    if args.drafters:
        with engine(**speculative(args, "plain"), **CROWDED) as llm:
            serve(llm, plain, 8)
    with tempfile.TemporaryDirectory() as scratch:
        random = Path(scratch) / "random"
        torch.manual_seed(0)
        save_drafter(MoADrafter(drafter.config, drafter.draft_token_ids), random)
        names = {"trained": args.drafter, "random": str(random)}
        for kind in args.drafters:
            with engine(**speculative(args, "moa", names[kind]), **CROWDED) as llm:
                rows += [_row(llm, kind, plain, target, each) for each in args.concurrency]
    own = _own_tau(target, drafter, plain, args.draft_tokens)
    print(f"moaspec's own chain: tau {own:.4f}")
    data = {"benchmark": "vllm_equality", "prompts": len(prompts), "own_tau": own, "rows": rows}
    print(json.dumps(data))


def _row(llm: Any, kind: str, plain: Requests, target: Target, concurrency: int) -> dict[str, Any]:
    before = counters(llm)
    requests = Requests(plain.prompts, plain.lengths)
    serve(llm, requests, concurrency)
    after = counters(llm)
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    verdicts = _verdicts(target, plain, requests)
    drafts, accepted = grown["spec_decode_num_drafts"], grown["spec_decode_num_accepted_tokens"]
    row = {
        "drafter": kind,
        "concurrency": concurrency,
        "identical": verdicts.count("identical"),
        "near_tie": verdicts.count("near_tie"),
        "different": verdicts.count("different"),
        "tau": 1 + accepted / drafts,
        # A text's first token comes from reading its prompt.
        "tokens_per_round": (sum(plain.lengths) - len(plain.lengths)) / drafts,
        **{name: grown[name] for name in WATCHED},
    }
    print(row, flush=True)
    return row


def _verdicts(target: Target, plain: Requests, got: Requests) -> list[str]:
    return [
        judge(
            target,
            prompt,
            plain.texts[index],
            got.texts[index],
            max_new_tokens=plain.lengths[index],
            stop_token_ids=(),
        ).kind
        for index, prompt in enumerate(plain.prompts)
    ]


def _own_tau(target: Target, drafter: MoADrafter, plain: Requests, draft_tokens: int) -> float:
    """Tokens per round over all prompts."""
    rounds = tokens = 0
    for index, prompt in enumerate(plain.prompts):
        result = moaspec.generate(
            target,
            prompt,
            drafter=drafter,
            max_new_tokens=plain.lengths[index],
            stop_token_ids=(),
            tree=Chain(draft_tokens),
            free_branches=False,
        )
        rounds += result.num_rounds
        tokens += sum(result.accept_lengths)
    return tokens / rounds


if __name__ == "__main__":
    main()
