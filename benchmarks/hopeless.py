"""The cost of speculation when no draft is accepted.

Two cases: prompts of random tokens, continued by sampling at temperature 1, and real prompts with a
drafter of random weights. `auto` should turn itself off, and its texts should take no longer than
plain decoding's. Both decode the same prompts in alternation, in an order that changes from round
to round, and times include prompts. N-gram branches are off, because they would bring gains.

    moaspec calibrate --dtype bfloat16 --threads 2
    python benchmarks/hopeless.py --dtype bfloat16 --threads 2
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from common import load, parser, prompts_of, setting, spread

import moaspec
from moaspec import GenerationResult, Target
from moaspec.calibration.measure_costs import stored_costs
from moaspec.model.moa import MoADrafter
from moaspec_train.students.warm_start import random_weights


def main() -> None:
    """Print a line for each case, then one line of JSON."""
    options = parser(__doc__)
    options.add_argument("--suite", default="bundled")
    options.add_argument("--limit", type=int, default=3, help="Prompts of each case.")
    options.add_argument("--length", type=int, default=64, help="Tokens of a random prompt.")
    options.add_argument("--max-new-tokens", type=int, default=384)
    options.add_argument("--rounds", type=int, default=4)
    args = options.parse_args()
    target, drafter = load(args)
    if stored_costs(target, drafter) is None:
        raise SystemExit("auto knows no costs here and never turns off: run moaspec calibrate.")
    torch.manual_seed(0)
    noise = torch.randint(target.vocab_size, (args.limit, args.length)).tolist()
    cases = {
        "random prompts": (drafter, noise, {"temperature": 1.0, "seed": 1}),
        "random drafter": (_random(drafter), prompts_of(args, target), {}),
    }
    found = {}
    for name, (used, prompts, sampling) in cases.items():
        settings = {"max_new_tokens": args.max_new_tokens, **sampling}
        runs = list(_runs(target, used, prompts, settings, rounds=args.rounds))
        longer = spread([100 * (auto / plain - 1) for plain, auto, _ in runs])
        drafted = sum(result.num_drafted for *_, result in runs)
        share = drafted / sum(len(result.token_ids) for *_, result in runs)
        found[name] = {"percent_longer": longer, "drafted_per_token": share, "runs": len(runs)}
        print(
            f"{name}: {longer['median']:+.1f}% (quartiles {longer['low']:+.1f} and "
            f"{longer['high']:+.1f}) of {len(runs)} runs, {share:.2f} drafts a token"
        )
    print(json.dumps({"benchmark": "hopeless", "setting": setting(target), "cases": found}))


def _random(drafter: MoADrafter) -> MoADrafter:
    """One of the same sizes that knows nothing."""
    ids = drafter.draft_token_ids
    made = MoADrafter(drafter.config, None if ids is None else ids.clone())
    torch.manual_seed(0)
    random_weights(made)
    weight = next(drafter.parameters())
    return made.to(weight.device, weight.dtype).requires_grad_(requires_grad=False).eval()


def _runs(
    target: Target,
    drafter: MoADrafter,
    prompts: Sequence[Sequence[int]],
    settings: dict[str, Any],
    *,
    rounds: int,
) -> Iterator[tuple[float, float, GenerationResult]]:
    """Seconds of plain decoding and of `auto`, and the result of `auto`, prompt by prompt."""
    for ids in prompts:
        for number in range(-1, rounds):  # the first warms up
            seconds: dict[bool, float] = {}
            texts: dict[bool, GenerationResult] = {}
            for drafts in (False, True) if number % 2 else (True, False):
                used = drafter if drafts else None
                started = time.perf_counter()
                texts[drafts] = moaspec.generate(
                    target, ids, drafter=used, free_branches=False, **settings
                )
                seconds[drafts] = time.perf_counter() - started
            if texts[True].token_ids != texts[False].token_ids:
                raise SystemExit("Texts differ; no figures.")
            if number >= 0:
                yield seconds[False], seconds[True], texts[True]


if __name__ == "__main__":
    main()
