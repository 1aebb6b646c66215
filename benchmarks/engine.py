"""The engine's speed with a drafter of a set quality at the real drafter's price.

The replay drafter proposes the plain run's own tokens, right at every depth with a set probability.
Before that, the real drafter encodes and grows its tree for the same row and shape, so that its
full price is paid; its tree is thrown away. Plain decoding and all agreements run
alternately in one process on the same prompts. Every text must be the target's own, or there are no
figures.

With --llama-cpp, llama.cpp's plain decoding of the 4-bit file takes its turn (the binding has to
be installed: pip install xllamacpp).

    python benchmarks/engine.py --dtype bfloat16 --threads 2 --suite spec_bench.jsonl --limit 10
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

from common import load, parser, setting, spread, trusted
from llamacpp import LlamaCpp, gguf_of

from moaspec import GenerationResult, OracleProposer, Target, Tree
from moaspec.drafting.moa_proposer import MoAProposer
from moaspec.evaluate.correctness.equality import judge
from moaspec.evaluate.prompt_suites import read_prompts
from moaspec.generation.local_engine import local_engine
from moaspec.model.moa import MoADrafter
from moaspec_core.cli.prompts import chat_ids
from moaspec_core.drafting.draft_tree import DraftTree
from moaspec_core.drafting.protocols import RequestText
from moaspec_core.drafting.tree_shapes import parse_shape

AGREEMENTS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
WARM_UP_TOKENS = 8


class PaidReplay(MoAProposer):
    """A Mixture-of-Attentions drafter whose work is done and whose words are replaced."""

    def __init__(self, drafter: MoADrafter, target: Target, replay: OracleProposer) -> None:
        super().__init__(drafter, target)
        self._replay = replay

    def propose(self, rows: Sequence[RequestText], shape: Tree) -> list[DraftTree]:
        super().propose(rows, shape)
        return self._replay.propose(rows, shape)


def main() -> None:
    """Print one line per agreement, then one line of JSON."""
    options = parser(__doc__)
    options.add_argument("--suite", default="bundled")
    options.add_argument("--limit", type=int, default=4)
    options.add_argument("--max-new-tokens", type=int, default=128)
    options.add_argument("--shape", default="chain:4", help="chain:4 emits 5 tokens at most.")
    options.add_argument("--agreements", type=float, nargs="+", default=[*AGREEMENTS])
    options.add_argument("--tau", type=float, default=3.0, help="Report the speed-up at this tau.")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--llama-cpp", action="store_true", help="Compare with llama.cpp.")
    args = options.parse_args()
    target, drafter = load(args)
    judging = trusted(args, target)
    shape = parse_shape(args.shape)
    agreements = sorted({*args.agreements, agreement_for(args.tau, shape.depth)})
    prompts = [
        chat_ids(target, prompt.turns[0]) for prompt in read_prompts(args.suite, limit=args.limit)
    ]
    speeds: dict[float | None, list[float]] = {None: [], **{a: [] for a in agreements}}
    taus: dict[float, list[float]] = {a: [] for a in agreements}
    yardstick = LlamaCpp(gguf_of(args.model), threads=args.threads) if args.llama_cpp else None
    llama: list[float] = []
    for ids in prompts:
        plain, _ = _timed(target, None, ids, shape, args.max_new_tokens)
        drafters = _drafters(target, drafter, [*ids, *plain.token_ids], agreements)
        _timed(target, drafters[agreements[0]], ids, shape, WARM_UP_TOKENS)
        texts = _run_all(target, drafters, ids, shape, args=args, speeds=speeds, taus=taus)
        for text in texts:
            found = judge(judging, ids, plain.token_ids, text, max_new_tokens=args.max_new_tokens)
            if not found.lossless:
                raise SystemExit(f"Texts differ ({found}); no figures.")
        if yardstick is not None:
            llama += [yardstick.tokens_per_s(ids, args.max_new_tokens) for _ in range(args.rounds)]
    base = statistics.median(speeds.pop(None))
    print(f"plain     {base:6.1f} tokens/s")
    curve = []
    for agreement, values in speeds.items():
        assert agreement is not None
        tau, speed = statistics.mean(taus[agreement]), spread(values)
        ratio = speed["median"] / base
        print(f"{agreement:.3f}     {speed['median']:6.1f} tokens/s  {ratio:.2f}x  tau {tau:.2f}")
        curve.append({"agreement": agreement, "tau": tau, "tokens_per_s": speed, "speedup": ratio})
    data = {"benchmark": "engine", "setting": setting(target), "shape": args.shape}
    if yardstick is not None:
        print(f"llama.cpp {statistics.median(llama):6.1f} tokens/s, plain, 4 bits")
        data |= {"llama_cpp": {"version": yardstick.version, "tokens_per_s": spread(llama)}}
    print(json.dumps(data | {"prompts": len(prompts), "plain_tokens_per_s": base, "curve": curve}))


def agreement_for(tau: float, depth: int) -> float:
    """The agreement at which a chain of this depth emits `tau` tokens a round."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        emitted = sum(middle**level for level in range(depth + 1))
        low, high = (middle, high) if emitted < tau else (low, middle)
    return round(low, 3)


def _drafters(
    target: Target, drafter: MoADrafter, text: list[int], agreements: Sequence[float]
) -> dict[float | None, PaidReplay | None]:
    made: dict[float | None, PaidReplay | None] = {None: None}
    for agreement in agreements:
        made[agreement] = PaidReplay(drafter, target, OracleProposer([text], agreement=agreement))
    return made


def _run_all(
    target: Target,
    drafters: dict[float | None, PaidReplay | None],
    ids: list[int],
    shape: Tree,
    *,
    args: Any,
    speeds: dict[float | None, list[float]],
    taus: dict[float, list[float]],
) -> set[tuple[int, ...]]:
    """Every way of decoding in turn, several times over, its speed and tau noted: its texts."""
    texts: set[tuple[int, ...]] = set()
    for _ in range(args.rounds):
        for agreement, drafting in drafters.items():
            result, seconds = _timed(target, drafting, ids, shape, args.max_new_tokens)
            texts.add(tuple(result.token_ids))
            speeds[agreement].append((len(result.token_ids) - 1) / seconds)
            if agreement is not None and result.tau is not None:
                taus[agreement].append(result.tau)
    return texts


def _timed(
    target: Target, drafting: PaidReplay | None, ids: list[int], shape: Tree, max_new_tokens: int
) -> tuple[GenerationResult, float]:
    """One decoding, and its seconds after the prompt's pass."""
    engine = local_engine(target, drafting)
    row = engine.add(
        ids, max_new_tokens=max_new_tokens, shape=shape, stop_token_ids=target.stop_token_ids
    )
    result = engine.result(row)
    engine.step()
    started = time.perf_counter()
    while engine.num_active:
        engine.step()
    return result, time.perf_counter() - started


if __name__ == "__main__":
    main()
