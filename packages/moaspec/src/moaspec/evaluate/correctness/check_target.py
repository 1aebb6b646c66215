"""Check that all ways of decoding with a target and drafter write the target's own text.

Every decoded text is checked against one trusted pass (see `equality`) and compared with the text
of plain decoding, to show where rounding makes them differ.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, Literal, TypeVar

import torch

from moaspec.drafting.other_proposers.oracle_proposer import OracleProposer
from moaspec.evaluate.correctness.equality import AuditedText, Equality, audit, compare, up_to_stop
from moaspec.evaluate.correctness.step_times import StepTimes
from moaspec.evaluate.methods import Method, TransformersMethod
from moaspec.generation.local_engine import local_engine
from moaspec.model.moa import MoADrafter
from moaspec.target.target import Target
from moaspec_core.drafting.draft_tree import DraftTree, Tree
from moaspec_core.drafting.ngram_proposer import NgramProposer
from moaspec_core.drafting.protocols import Proposer, TextProposer
from moaspec_core.drafting.tree_shapes import Chain, merged
from moaspec_core.engine.generate_options import GenerateOptions, sampling_params
from moaspec_core.policy.policies import FreeBranches
from moaspec_core.sampling.params import SamplingParams

SHAPES: Mapping[str, Tree] = {"chain": Chain(3), "tree": Tree(3, 2, 6)}
REPLAY_AGREEMENT = 0.8
"""Most rounds accept several drafts and many end at a rejected one, so faults of both show."""

SHORT = ("copies", "moa, auto", "moa, tree and copies", "replay, tree", "stop tokens, chain")
"""Methods of a short check: each way of verifying, and what servers and commands use."""

ROWS_TOGETHER = 64
"""Batch size: large, to read the weights less often, but small enough for the memory of any machine
that runs the target."""

Batch = Literal["alone", "ragged"]
Told = Callable[[str, float | None], None]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class CheckedText(Equality):
    """Result of one text."""

    # setting, method, prompt: how it was decoded, and the prompt's number.
    setting: str
    method: str
    batch: Batch  # "alone", or in a "ragged" batch with other prompts and settings
    prompt: int
    num_tokens: int


@dataclass(frozen=True)
class _CheckRow:
    setting: str
    prompt: int


@dataclass(frozen=True)
class _CheckedMethod(Method):
    """A way to decode all prompts."""

    shape: Tree | str = SHAPES["chain"]
    free_branches: FreeBranches = False
    # Ignore stop tokens while decoding and cut the text afterwards, so that drafts of stop tokens
    # are verified; otherwise the engine drops them.
    beyond_stops: bool = False


@dataclass
class Check:
    """A check of one target and drafter.

    Args:
        drafter: to check; None checks without trained and random drafters.
        stock: the target as transformers loads it, for the trusted passes and its own `generate`;
            None takes `target`.
        alone: number of prompts that are also decoded alone.
        methods: names of ways to decode, plain decoding apart; None: all. Names that do not apply
            to this drafter are ignored.
    """

    target: Target
    prompts: Sequence[Sequence[int]]
    drafter: MoADrafter | Proposer | None = None
    stock: Target | None = None
    max_new_tokens: int = 64
    seeds: Sequence[int] = (0,)
    alone: int = 1
    methods: Collection[str] | None = None  # names of those to check; None: all

    @cached_property
    def settings(self) -> dict[str, SamplingParams]:
        """Sampling settings by name; the target's defaults complete them."""
        given: dict[str, GenerateOptions] = {"greedy": {}}
        for seed in self.seeds:
            name = f"temperature 0.8, top-p 0.95, seed {seed}"
            given[name] = {"temperature": 0.8, "top_p": 0.95, "seed": seed}
        given["repetition penalty 1.2"] = {"repetition_penalty": 1.2}
        defaults, stops = self.target.generation_defaults, self.target.stop_token_ids
        return {
            name: sampling_params(options, defaults).bound(stops, self.max_new_tokens)
            for name, options in given.items()
        }

    @property
    def num_texts(self) -> int:
        together, alone = len(self._rows()), len(self._rows(self.alone))
        return len(self.prompts) + len(self._methods([])) * (together + alone)

    def run(self, told: Told = lambda _doing, _left_s: None) -> Iterator[CheckedText]:
        """Check text after text.

        Args:
            told: is told of each step: what it does, and the remaining seconds if they are known.
        """
        rows, plain = self._rows(), _CheckedMethod("plain", self.target)
        alone, methods = self._rows(self.alone), len(self._methods([]))
        times = StepTimes(
            {
                "together": methods,
                "alone": methods * len(alone),
                "audit": len(rows),
                "transformers": len(self.prompts),
            }
        )

        def timed(kind: str, doing: str, step: Callable[[], T]) -> T:
            told(doing, times.left_s)
            with times.step(kind):
                return step()

        texts = timed("together", plain.name, partial(self._decode_all, plain, rows))
        base = {
            row: timed("audit", "trusted passes", partial(self._audit, row, tuple(text)))
            for row, text in zip(rows, texts, strict=True)
        }
        greedy = [row for row in rows if row.setting == "greedy"]
        hf = [
            timed("transformers", "transformers", partial(self._transformers, prompt))
            for prompt in self.prompts
        ]
        yield from self._judged("hf", "alone", greedy, hf, base)
        known = [[*self.prompts[row.prompt], *base[row].token_ids] for row in rows]
        for method in self._methods(known):
            for row in alone:
                one = timed("alone", method.name, partial(self._decode, method, [row]))
                yield from self._judged(method.name, "alone", [row], one, base)
            if method.name != plain.name:
                texts = timed("together", method.name, partial(self._decode_all, method, rows))
            yield from self._judged(method.name, "ragged", rows, texts, base)

    def _rows(self, num_prompts: int | None = None) -> list[_CheckRow]:
        """All settings of the first prompts."""
        numbers = range(len(self.prompts))[:num_prompts]
        return [_CheckRow(setting, prompt) for prompt in numbers for setting in self.settings]

    def _transformers(self, prompt: Sequence[int]) -> list[int]:
        hf = TransformersMethod("hf", self.stock or self.target)
        return hf.run(prompt, self._max_length(prompt)).token_ids

    def _max_length(self, prompt: Sequence[int]) -> int:
        """Largest length of a text in the context, which transformers does not limit itself."""
        return min(self.max_new_tokens, self.target.max_positions - len(prompt))

    def _methods(self, known: Sequence[Sequence[int]]) -> list[_CheckedMethod]:
        """Plain decoding and all others; `known` texts of plain decoding are drafts of replay."""

        def method(name: str, *settings: Any, **options: Any) -> _CheckedMethod:
            return _CheckedMethod(name, self.target, *settings, **options)

        drafters: dict[str, tuple[MoADrafter | Proposer, int | None]] = {
            "lookup": (NgramProposer(), None),
            "replay": (OracleProposer(known, agreement=REPLAY_AGREEMENT), None),
            "stop tokens": (StopTokenProposer(sorted({0, *self.target.stop_token_ids})), None),
        }
        methods = [method("plain"), method("copies", free_branches=True)]
        if self.drafter is not None:
            methods += [
                method("moa, auto", self.drafter, "auto", free_branches="auto"),
                method("moa, tree and copies", self.drafter, SHAPES["tree"], free_branches=True),
            ]
        if isinstance(self.drafter, MoADrafter):
            drafters["random"] = (_untrained(self.drafter), None)
            for layers in self.drafter.config.num_target_layers:
                drafters[f"moa (N={layers})"] = (self.drafter, layers)
        elif self.drafter is not None:
            drafters["trained"] = (self.drafter, None)
        methods += [
            method(f"{name}, {of}", drafter, shape, layers, beyond_stops=name == "stop tokens")
            for name, (drafter, layers) in drafters.items()
            for of, shape in SHAPES.items()
        ]
        names = self.methods
        return [one for one in methods if names is None or one.name in (*names, "plain")]

    def _decode_all(self, method: _CheckedMethod, rows: Sequence[_CheckRow]) -> list[list[int]]:
        starts = range(0, len(rows), ROWS_TOGETHER)
        batches = (rows[start : start + ROWS_TOGETHER] for start in starts)
        return [text for batch in batches for text in self._decode(method, batch)]

    def _decode(self, method: _CheckedMethod, rows: Sequence[_CheckRow]) -> list[list[int]]:
        shaping, stops = method.shaping, self.target.stop_token_ids
        engine = local_engine(
            self.target, method.drafter, num_target_layers=shaping.num_target_layers
        )
        handles = [
            engine.add(
                self.prompts[row.prompt],
                max_new_tokens=self.max_new_tokens,
                stop_token_ids=() if method.beyond_stops else stops,
                shape=shaping.policy(self.settings[row.setting]),
                free_branches=shaping.branches(self.settings[row.setting]),
                sampling=self.settings[row.setting],
            )
            for row in rows
        ]
        results = [engine.result(handle) for handle in handles]
        for _ in engine.run():
            pass  # fills the results
        texts = [result.token_ids for result in results]
        return [up_to_stop(text, stops) if method.beyond_stops else text for text in texts]

    @cached_property
    def _audit(self) -> Callable[[_CheckRow, tuple[int, ...]], AuditedText]:
        """Audits a text once; most ways of decoding produce the same one."""
        target, prompts, settings = self.stock or self.target, self.prompts, self.settings
        limit = self.max_new_tokens

        @cache
        def audited(row: _CheckRow, token_ids: tuple[int, ...]) -> AuditedText:
            prompt, sampling = prompts[row.prompt], settings[row.setting]
            return audit(target, prompt, token_ids, sampling, max_new_tokens=limit)

        return audited

    def _judged(
        self,
        method: str,
        batch: Batch,
        rows: Sequence[_CheckRow],
        texts: Sequence[Sequence[int]],
        base: Mapping[_CheckRow, AuditedText],
    ) -> Iterator[CheckedText]:
        for row, token_ids in zip(rows, texts, strict=True):
            found = compare(self._audit(row, tuple(token_ids)), base[row])
            yield CheckedText(
                **vars(found),
                setting=row.setting,
                method=method,
                batch=batch,
                prompt=row.prompt,
                num_tokens=len(token_ids),
            )


class StopTokenProposer(TextProposer):
    """Proposes tokens that a faulty verification could accept: pads (0), stops, repetitions."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens

    def draft(self, token_ids: Sequence[int], shape: Tree) -> DraftTree:
        """Paths that begin with different tokens, in another order after each token."""
        tokens = [*self._tokens, token_ids[-1]]
        first = len(token_ids)
        paths = [
            [tokens[(first + path + level) % len(tokens)] for level in range(shape.depth)]
            for path in range(min(shape.breadth, len(tokens)))
        ]
        return merged(paths, shape.total_tokens)


def _untrained(drafter: MoADrafter) -> MoADrafter:
    """A drafter of the same sizes with random weights."""
    some = next(drafter.parameters())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        fresh = MoADrafter(drafter.config, drafter.draft_token_ids)
    return fresh.to(device=some.device, dtype=some.dtype).eval().requires_grad_(False)
