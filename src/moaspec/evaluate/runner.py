"""Measure methods side by side: same process, prompt ids, dtype and threads, in turn per prompt."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from moaspec.decode import GenerationResult, acceptance_by_depth
from moaspec.evaluate.equality import Equality, compare
from moaspec.evaluate.methods import Method, Run
from moaspec.evaluate.prompts import Prompt

WARM_UP_TOKENS = 8


@dataclass
class Outcome:
    """All runs of one method, in the order of the prompts."""

    method: Method
    runs: list[Run] = field(default_factory=list)
    equality: list[Equality] = field(default_factory=list)

    @property
    def results(self) -> list[GenerationResult]:
        return [run.result for run in self.runs if run.result is not None]

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all prompts over their seconds."""
        return sum(len(run.token_ids) for run in self.runs) / sum(run.seconds for run in self.runs)

    @property
    def tau(self) -> float | None:
        """Tokens per round over all prompts; None for transformers."""
        rounds = sum(result.num_rounds for result in self.results)
        emitted = sum(sum(result.accept_lengths) for result in self.results)
        return emitted / rounds if rounds else None

    @property
    def lossless(self) -> bool:
        return all(item.lossless for item in self.equality)


@dataclass
class Report:
    """Outcomes of a run, with what is needed to read them."""

    prompts: Sequence[Prompt]
    outcomes: list[Outcome]
    baseline: str

    def speedup(self, outcome: Outcome, base: str | None = None) -> float | None:
        """Median over prompts of the speed ratio to a method; None if any text differs."""
        reference = self.outcome(base or self.baseline)
        if reference is None or not outcome.lossless:
            return None
        ratios = [
            (len(run.token_ids) / run.seconds) / (len(other.token_ids) / other.seconds)
            for run, other in zip(outcome.runs, reference.runs, strict=True)
        ]
        return statistics.median(ratios)

    def outcome(self, name: str) -> Outcome | None:
        """The outcome of the method of that name."""
        return next((o for o in self.outcomes if o.method.name == name), None)

    def by_suite(self, outcome: Outcome) -> dict[str, Outcome]:
        """The outcome split by suite."""
        parts: dict[str, Outcome] = {}
        for prompt, run, equality in zip(self.prompts, outcome.runs, outcome.equality, strict=True):
            part = parts.setdefault(prompt.suite, Outcome(outcome.method))
            part.runs.append(run)
            part.equality.append(equality)
        return parts

    def as_json(self) -> dict[str, Any]:
        """Everything measured, and on what."""
        target = self.outcomes[0].method.target
        return {
            "target": target.name,
            "dtype": str(target.dtype).removeprefix("torch."),
            "device": str(target.device),
            "threads": torch.get_num_threads(),
            "machine": platform.processor() or platform.machine(),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "methods": {o.method.name: self._method_json(o) for o in self.outcomes},
        }

    def _method_json(self, outcome: Outcome) -> dict[str, Any]:
        return {
            "tokens_per_s": outcome.tokens_per_s,
            "tau": outcome.tau,
            "lossless": outcome.lossless,
            "median_speedup": self.speedup(outcome),
            "acceptance_by_depth": acceptance_by_depth(outcome.results),
            "suites": {
                name: {"tau": part.tau, "tokens_per_s": part.tokens_per_s}
                for name, part in self.by_suite(outcome).items()
            },
            "prompts": [
                {
                    "suite": prompt.suite,
                    "question_id": prompt.question_id,
                    "tokens": len(run.token_ids),
                    "seconds": run.seconds,
                    "tau": run.result.tau if run.result else None,
                    "equality": vars(equality),
                }
                for prompt, run, equality in zip(
                    self.prompts, outcome.runs, outcome.equality, strict=True
                )
            ],
        }


def measure(
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    encode: Callable[[str], list[int]],
    *,
    max_new_tokens: int,
    advance: Callable[[], None] = lambda: None,
) -> Report:
    """Run every method on every prompt, starting with another method each time.

    Every text is compared with that of `plain`, or of the first method where plain is not run.

    Args:
        methods: what to run.
        prompts: what to run it on.
        encode: text to prompt ids.
        max_new_tokens: of each decoding.
        advance: called after each decoding, for a progress display.
    """
    outcomes = [Outcome(method) for method in methods]
    names = [method.name for method in methods]
    base = outcomes[names.index("plain") if "plain" in names else 0]
    for method in methods:
        method.run(encode(prompts[0].text), WARM_UP_TOKENS)
    for number, prompt in enumerate(prompts):
        ids = encode(prompt.text)
        for turn in range(len(outcomes)):
            outcome = outcomes[(number + turn) % len(outcomes)]
            outcome.runs.append(outcome.method.run(ids, max_new_tokens))
            advance()
        for outcome in outcomes:
            outcome.equality.append(_compare(base, outcome, ids))
    return Report(prompts, outcomes, base.method.name)


def _compare(base: Outcome, outcome: Outcome, prompt_ids: list[int]) -> Equality:
    return compare(
        outcome.method.target,
        prompt_ids,
        base.runs[-1].token_ids,
        outcome.runs[-1].token_ids,
        resume=lambda ids, limit: outcome.method.run(ids, limit).token_ids,
    )
