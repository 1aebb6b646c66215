"""tau of drafters along texts that the target wrote before: many drafters, one writing.

Drafts do not change the target's text, so rounds can be simulated along it: a verifier that knows
the text accepts the tree's nodes on it, and runs the target only for the drafter's activations. No
text has to be checked, and no tree verified. The last digit differs from that of decoding where two
tokens tie and passes of another width choose the other.

    python benchmarks/known_texts.py --suite paper_eval --limit 20
    python benchmarks/known_texts.py --suite mine.jsonl --drafters smollm2-135m runs/mine@n3

`--limit` is for each file of the suite. A drafter is an alias or a directory; `@n3` takes its exit
for N = 3. Intervals are 90% by bootstrap over prompts; the change is that from the first drafter.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from common import load_target, parser, setting
from rich.console import Console
from rich.progress import track

from moaspec import GenerationResult, SamplingParams, Target, generate
from moaspec.backends.fast_baselines import baseline_drafting
from moaspec.evaluate.prompt_suites import read_prompts
from moaspec.generation.drafters import read_drafter
from moaspec.generation.local_engine import local_parts
from moaspec.model.moa import MoADrafter
from moaspec_core.cli.prompts import chat_ids
from moaspec_core.drafting.draft_tree import DraftTree
from moaspec_core.drafting.protocols import Proposer, Verifier, VerifyRequest, VerifyResult
from moaspec_core.drafting.tree_shapes import parse_shape
from moaspec_core.engine.engine import Engine
from moaspec_core.sampling.params import GREEDY

CONSOLE = Console(stderr=True)
BATCH = 16
BOOTSTRAPS = 1000
INTERVAL = (0.05, 0.95)
Text = tuple[list[int], list[int]]  # prompt, answer
Counts = np.ndarray  # tokens and rounds of every text, (n, 2)
Parts = Callable[[Sequence[Text]], tuple[Verifier, Proposer | None]]
Load = Callable[[Target, str], Parts]


def main() -> None:
    """Print one line per drafter and shape, then one line of JSON."""
    measure(text_options(__doc__).parse_args(), local)


def text_options(description: str | None) -> argparse.ArgumentParser:
    """The options that `measure` takes."""
    options = parser(description, threads=1)
    options.add_argument("--suite", default="bundled")
    options.add_argument("--limit", type=int, help="Prompts of each file.")
    options.add_argument("--max-new-tokens", type=int, default=128)
    options.add_argument("--temperature", type=float, default=0.0)
    options.add_argument("--seed", type=int, default=7)
    options.add_argument("--drafters", nargs="+", help="Several instead of --drafter.")
    options.add_argument("--shapes", nargs="+", default=["tree:6x8x62"])
    return options


def measure(args: argparse.Namespace, load: Load) -> None:
    """Write the texts, then print the tau of each drafter along them.

    Args:
        load: returns verifier and proposer of a drafter for each batch of texts, from its name.
    """
    if args.max_new_tokens < 2:
        raise SystemExit("--max-new-tokens must be at least 2: the first token is no round's.")
    args.drafters = args.drafters or [args.drafter]
    del args.drafter
    target = load_target(args)
    sampling = SamplingParams(
        temperature=args.temperature, seed=args.seed if args.temperature else None
    )
    prompts = read_prompts(args.suite, limit=args.limit)
    several = len({prompt.suite for prompt in prompts}) > 1
    sets = [prompt.suite if several else prompt.category or prompt.suite for prompt in prompts]
    texts = written(target, [chat_ids(target, prompt.turns[0]) for prompt in prompts], args)
    figures: dict[str, Any] = {}
    for shape in args.shapes:
        base = None
        for name in args.drafters:
            options = {
                "max_new_tokens": args.max_new_tokens,
                "stop_token_ids": target.stop_token_ids,
                "shape": parse_shape(shape),
                "sampling": sampling,
            }
            counts = drafted(target, load(target, name), f"{name} {shape}", texts, options)
            base = counts if base is None else base
            figures[f"{name} {shape}"] = found = figure(sets, counts, base)
            print(_line(f"{name} {shape}", found), flush=True)
    print(json.dumps({"setting": vars(args) | setting(target), "figures": figures}))


def local(target: Target, name: str) -> Parts:
    """Parts of a trained drafter."""
    path, _, exit_ = name.partition("@n")
    module = read_drafter(path, target=target).to(device=target.device, dtype=target.dtype)
    if isinstance(module, MoADrafter):
        number = int(exit_) if exit_ else None
        return lambda _: local_parts(target, module, num_target_layers=number)
    return lambda _: local_parts(target, baseline_drafting(module, target))


def written(target: Target, prompts: Sequence[list[int]], args: argparse.Namespace) -> list[Text]:
    """The target's own answers."""
    texts: list[Text] = []
    starts = range(0, len(prompts), BATCH)
    for start in track(starts, "Writing texts", console=CONSOLE):
        batch = prompts[start : start + BATCH]
        answers = generate(
            target,
            batch,
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            seed=args.seed if args.temperature else None,
        )
        texts += [(ids, answer.token_ids) for ids, answer in zip(batch, answers, strict=True)]
    return texts


class KnownText(Verifier):
    """A verifier that knows the target's text and runs the target for activations only.

    Args:
        inner: gives the drafter's features.
        texts: prompts and answers; no prompt is the beginning of another text.
    """

    def __init__(self, inner: Verifier, texts: Sequence[Text]) -> None:
        self._inner = inner
        self._texts = [prompt + answer for prompt, answer in texts]
        self._rows: dict[int, list[int]] = {}

    async def verify(self, requests: Sequence[VerifyRequest]) -> list[VerifyResult]:
        """Accept the nodes of each tree that are on the text."""
        walks = [self._walk(request) for request in requests]
        passed = []
        for request, (accepted, _) in zip(requests, walks, strict=True):
            drafts = tuple(request.tree.tokens[node] for node in accepted)
            known = request.new_tokens + drafts
            passed.append(replace(request, new_tokens=known, tree=DraftTree(), sampling=GREEDY))
        verdicts = await self._inner.verify(passed)
        return [
            replace(verdict, accepted=accepted, next_token=token)
            for verdict, (accepted, token) in zip(verdicts, walks, strict=True)
        ]

    def close(self, row: int) -> None:
        """Forget the text of a row."""
        self._inner.close(row)

    def _walk(self, request: VerifyRequest) -> tuple[tuple[int, ...], int]:
        if not request.num_verified:
            self._rows[request.cache_row] = self._begun(list(request.new_tokens))
        rest = self._rows[request.cache_row][request.num_verified + len(request.new_tokens) :]
        tree, node = request.tree, -1
        accepted: list[int] = []
        children = {edge: i for i, edge in enumerate(zip(tree.parents, tree.tokens, strict=True))}
        while len(accepted) + 1 < len(rest) and (node, rest[len(accepted)]) in children:
            node = children[node, rest[len(accepted)]]
            accepted.append(node)
        return tuple(accepted), rest[len(accepted)] if rest else 0

    def _begun(self, known: list[int]) -> list[int]:
        return next(text for text in self._texts if text[: len(known)] == known)


def drafted(
    target: Target, parts: Parts, name: str, texts: Sequence[Text], options: dict[str, Any]
) -> Counts:
    """Tokens and rounds of every text."""
    found: list[tuple[int, int]] = []
    for start in track(range(0, len(texts), BATCH), name, console=CONSOLE):
        batch = texts[start : start + BATCH]
        inner, drafting = parts(batch)
        engine = Engine(KnownText(inner, batch), drafting, target=target)
        for result in _results(engine, batch, options):
            found.append((sum(result.accept_lengths), result.num_rounds))
    return np.array(found)


def _results(
    engine: Engine, texts: Sequence[Text], options: dict[str, Any]
) -> list[GenerationResult]:
    results = [engine.result(engine.add(ids, **options)) for ids, _ in texts]
    while engine.num_active:
        engine.step()
    for result, (_, answer) in zip(results, texts, strict=True):
        if result.token_ids != answer:
            raise SystemExit(
                "A text was not followed: one prompt is the beginning of another text."
            )
    return results


def figure(sets: Sequence[str], counts: Counts, base: Counts) -> dict[str, Any]:
    """Tau by set, over all rounds, and as the mean of sets; what it has more than `base`."""
    names = np.array(sets)
    groups = {name: np.flatnonzero(names == name) for name in dict.fromkeys(sets)}
    draw = np.random.default_rng(0)
    means, changes = [], []
    for _ in range(BOOTSTRAPS):
        chosen = [draw.choice(rows, len(rows)) for rows in groups.values()]
        means.append(_mean(counts, chosen))
        changes.append(means[-1] - _mean(base, chosen))
    return {
        "sets": {name: _tau(counts[rows]) for name, rows in groups.items()},
        "all": _tau(counts),
        "mean": _mean(counts, groups.values()),
        "interval": np.quantile(means, INTERVAL).tolist(),
        "change": _mean(counts, groups.values()) - _mean(base, groups.values()),
        "change_interval": np.quantile(changes, INTERVAL).tolist(),
        "prompts": len(counts),
    }


def _mean(counts: Counts, groups: Iterable[np.ndarray]) -> float:
    return float(np.mean([_tau(counts[rows]) for rows in groups]))


def _tau(counts: Counts) -> float:
    tokens, rounds = counts.sum(0)
    return float(tokens / max(rounds, 1))


def _line(name: str, found: dict[str, Any]) -> str:
    by_set = ", ".join(f"{one} {tau:.2f}" for one, tau in found["sets"].items())
    low, high = found["interval"]
    less, more = found["change_interval"]
    return (
        f"{name}: {by_set}; mean {found['mean']:.3f} ({low:.3f} to {high:.3f}), change "
        f"{found['change']:+.3f} ({less:+.3f} to {more:+.3f}); all rounds {found['all']:.3f}"
    )


if __name__ == "__main__":
    main()
