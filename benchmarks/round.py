"""Where a round's time goes: target, drafter, encoder (LSA), and everything else.

The parts are timed from outside, by wrapping the calls that the engine makes, in rounds of real
decoding; "rest" is what is left of the round. CPU kernels compute the head of a single request in
the target's call. On a GPU every wrapped call waits for the device, so there the parts are right
and the round is slower than it would be.

    python benchmarks/round.py --dtype bfloat16 --threads 2 --tree tree:3x2x6
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from common import load, parser, setting, spread

from moaspec.backends.fast_moa_proposer import FastMoAProposer
from moaspec.drafting.moa_proposer import MoAProposer
from moaspec.engine.local_verifier import LocalVerifier
from moaspec.evaluate.prompt_suites import read_prompts
from moaspec_core.cli.prompts import chat_ids
from moaspec_core.drafting.tree_shapes import parse_shape
from moaspec_core.engine.engine import Engine

PARTS = ("target", "head", "drafter", "encoder")
WARM_UP_ROUNDS = 3


class Stopwatch:
    """Adds up the seconds of wrapped calls, by name."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, float] = defaultdict(float)

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """A function that makes the call and adds its time to `name`."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._wait()
            started = time.perf_counter()
            result = call(*args, **kwargs)
            self._wait()
            self.seconds[name] += time.perf_counter() - started
            return result

        return timed

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def main() -> None:
    """Print a table of medians, then one line of JSON."""
    options = parser(__doc__)
    options.add_argument("--tree", default="tree:3x2x6")
    options.add_argument("--suite", default="bundled")
    options.add_argument("--limit", type=int, default=4)
    options.add_argument("--max-new-tokens", type=int, default=64)
    options.add_argument("--batch", type=int, default=1)
    args = options.parse_args()
    target, drafter = load(args)
    drafting = FastMoAProposer(drafter, target)
    watch = Stopwatch(target.device)
    rounds: list[dict[str, float]] = []
    for prompt in read_prompts(args.suite, limit=args.limit):
        ids = chat_ids(target, prompt.turns[0])
        engine = _engine(target, drafting, watch)
        for _ in range(args.batch):
            engine.add(ids, max_new_tokens=args.max_new_tokens, shape=parse_shape(args.tree))
        rounds += _rounds(engine, watch)
    figures = {part: spread([one[part] * 1000 for one in rounds]) for part in (*PARTS, "rest")}
    total = spread([1000 * sum(one.values()) for one in rounds])
    for part, figure in figures.items():
        share = figure["median"] / total["median"]
        print(f"{part:8} {figure['median']:7.2f} ms  {share:6.1%}")
    print(f"{'round':8} {total['median']:7.2f} ms  over {len(rounds)} rounds")
    shares = {part: figure["median"] / total["median"] for part, figure in figures.items()}
    data = {"benchmark": "round", "setting": setting(target), "tree": args.tree}
    data |= {
        "batch": args.batch,
        "rounds": len(rounds),
        "milliseconds": figures | {"round": total},
    }
    print(json.dumps(data | {"shares": shares}))


def _engine(target: Any, drafting: FastMoAProposer, watch: Stopwatch) -> Engine:
    """A local engine whose calls go through the stopwatch."""
    timed = _TimedTarget(target, watch)
    verifier = LocalVerifier(timed, drafting)  # type: ignore[arg-type]
    verifier._encode = watch.wrap("encoder", drafting.encode)
    verifier._encode_and_append = watch.wrap("encoder", drafting.encode_and_append)
    if verifier._text_pass is not None:
        verifier._text_pass.run = watch.wrap("target", verifier._text_pass.run)  # type: ignore[method-assign]
    drafting.share_target_cache(verifier.cache)
    return Engine(
        verifier,
        _TimedDrafting(drafting, watch),
        target=target,
    )


class _TimedTarget:
    """The target as the verifier uses it."""

    def __init__(self, target: Any, watch: Stopwatch) -> None:
        self._target = target
        self.run = watch.wrap("target", target.run)
        self.best = watch.wrap("head", target.best)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


class _TimedDrafting:
    """The drafter as the engine uses it."""

    def __init__(self, drafting: MoAProposer, watch: Stopwatch) -> None:
        self.needs, self.encode = drafting.needs, drafting.encode
        self.rollback, self.close = drafting.rollback, drafting.close
        self.propose = watch.wrap("drafter", drafting.propose)
        self.append_features = watch.wrap("drafter", drafting.append_features)


def _rounds(engine: Engine, watch: Stopwatch) -> list[dict[str, float]]:
    """Seconds of each part in every round after the prompt's pass and a few to warm up."""
    found: list[dict[str, float]] = []
    while engine.num_active:
        watch.seconds.clear()
        started = time.perf_counter()
        engine.step()
        total = time.perf_counter() - started
        parts = {part: watch.seconds[part] for part in PARTS}
        found.append(parts | {"rest": total - sum(parts.values())})
    return found[1 + WARM_UP_ROUNDS :]


if __name__ == "__main__":
    main()
