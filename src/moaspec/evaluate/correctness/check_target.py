"""Check that all ways of decoding with a target and drafter write the target's own text.

Every decoded text is checked against one trusted pass (see `equality`) and compared with the text
of plain decoding, to show where rounding makes them differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch

from moaspec.drafting.draft_tree import DraftTree, Tree
from moaspec.drafting.ngram_proposer import NgramProposer
from moaspec.drafting.oracle_proposer import OracleProposer
from moaspec.drafting.policy.policies import FreeBranches
from moaspec.drafting.protocols import Proposer, TextProposer
from moaspec.drafting.tree_shapes import Chain, merged
from moaspec.evaluate.correctness.equality import AuditedText, Equality, audit, compare, up_to_stop
from moaspec.evaluate.methods import TransformersMethod
from moaspec.generation.local_engine import local_engine
from moaspec.generation.options import GenerateOptions, sampling_params, shaping_for
from moaspec.model.moa import MoADrafter
from moaspec.sampling.params import SamplingParams
from moaspec.target.target import Target

SHAPES: Mapping[str, Tree] = {"chain": Chain(3), "tree": Tree(3, 2, 6)}
REPLAY_AGREEMENT = 0.8
"""Most rounds accept several drafts and many end at a rejected one, so faults of both show."""

ROWS_TOGETHER = 64
"""Batch size: large, to read the weights less often, but small enough for the memory of any machine
that runs the target."""

Batch = Literal["alone", "ragged"]


@dataclass(frozen=True, kw_only=True)
class CheckedText(Equality):
    """Result of one text.

    Attributes:
        setting, method, prompt: how it was decoded, and the prompt's number.
        batch: "alone", or in a "ragged" batch with other prompts and settings.
        num_tokens: length of the text.
    """

    setting: str
    method: str
    batch: Batch
    prompt: int
    num_tokens: int


@dataclass(frozen=True)
class _CheckRow:
    setting: str
    prompt: int


@dataclass(frozen=True)
class _DecodingMode:
    """A way to decode all prompts.

    Attributes:
        beyond_stops: ignore stop tokens while decoding and cut the text afterwards, so that drafts
            of stop tokens are verified; otherwise the engine drops them.
    """

    name: str
    drafter: MoADrafter | Proposer | None = None
    shape: Tree | str = SHAPES["chain"]
    num_target_layers: int | None = None
    free_branches: FreeBranches = False
    beyond_stops: bool = False


PLAIN = _DecodingMode("plain")


@dataclass
class Check:
    """A check of one target and drafter.

    Args:
        target: to check.
        prompts: token ids.
        drafter: to check; None checks without trained and random drafters.
        stock: the target as transformers loads it, for the trusted passes and its own `generate`;
            None takes `target`.
        max_new_tokens: of each text.
        seeds: of the sampled texts.
        alone: number of prompts that are also decoded alone.
    """

    target: Target
    prompts: Sequence[Sequence[int]]
    drafter: MoADrafter | Proposer | None = None
    stock: Target | None = None
    max_new_tokens: int = 64
    seeds: Sequence[int] = (0,)
    alone: int = 1
    _audited: dict[tuple[_CheckRow, tuple[int, ...]], AuditedText] = field(
        default_factory=dict, init=False
    )

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
        return len(self.prompts) + len(self._ways([])) * (together + alone)

    def run(self) -> Iterator[CheckedText]:
        rows = self._rows()
        plain = self._decode_all(PLAIN, rows)
        base = {row: self._audit(row, text) for row, text in zip(rows, plain, strict=True)}
        greedy = [row for row in rows if row.setting == "greedy"]
        yield from self._judged("hf", "alone", greedy, self._transformers(), base)
        known = [[*self.prompts[row.prompt], *base[row].token_ids] for row in rows]
        for way in self._ways(known):
            for row in self._rows(self.alone):
                yield from self._judged(way.name, "alone", [row], self._decode(way, [row]), base)
            texts = plain if way is PLAIN else self._decode_all(way, rows)
            yield from self._judged(way.name, "ragged", rows, texts, base)

    def _rows(self, num_prompts: int | None = None) -> list[_CheckRow]:
        """All settings of the first prompts."""
        numbers = range(len(self.prompts))[:num_prompts]
        return [_CheckRow(setting, prompt) for prompt in numbers for setting in self.settings]

    def _transformers(self) -> list[list[int]]:
        hf = TransformersMethod("hf", self.stock or self.target)
        return [hf.run(prompt, self._max_length(prompt)).token_ids for prompt in self.prompts]

    def _max_length(self, prompt: Sequence[int]) -> int:
        """Largest length of a text in the context, which transformers does not limit itself."""
        return min(self.max_new_tokens, self.target.max_positions - len(prompt))

    def _ways(self, known: Sequence[Sequence[int]]) -> list[_DecodingMode]:
        """All ways of decoding; `known` texts of plain decoding serve as drafts of replay."""
        drafters: dict[str, tuple[MoADrafter | Proposer, int | None]] = {
            "lookup": (NgramProposer(), None),
            "replay": (OracleProposer(known, agreement=REPLAY_AGREEMENT), None),
            "stop tokens": (StopTokenProposer(sorted({0, *self.target.stop_token_ids})), None),
        }
        if self.drafter is not None and not isinstance(self.drafter, MoADrafter):
            drafters["trained"] = (self.drafter, None)
        elif self.drafter is not None:
            drafters["random"] = (_untrained(self.drafter), None)
            for layers in self.drafter.config.num_target_layers:
                drafters[f"moa (N={layers})"] = (self.drafter, layers)
        return [
            PLAIN,
            _DecodingMode("copies", free_branches=True),
            *self._trained(),
            *(
                _DecodingMode(
                    f"{name}, {shape_name}",
                    drafter,
                    shape,
                    layers,
                    beyond_stops=name == "stop tokens",
                )
                for name, (drafter, layers) in drafters.items()
                for shape_name, shape in SHAPES.items()
            ),
        ]

    def _trained(self) -> list[_DecodingMode]:
        """The default, and draft trees with n-gram branches."""
        if self.drafter is None:
            return []
        return [
            _DecodingMode("moa, auto", self.drafter, "auto", free_branches="auto"),
            _DecodingMode("moa, tree and copies", self.drafter, SHAPES["tree"], free_branches=True),
        ]

    def _decode_all(self, way: _DecodingMode, rows: Sequence[_CheckRow]) -> list[list[int]]:
        starts = range(0, len(rows), ROWS_TOGETHER)
        batches = (rows[start : start + ROWS_TOGETHER] for start in starts)
        return [text for batch in batches for text in self._decode(way, batch)]

    def _decode(self, way: _DecodingMode, rows: Sequence[_CheckRow]) -> list[list[int]]:
        shaping = shaping_for(
            self.target,
            way.drafter,
            tree=way.shape,
            free_branches=way.free_branches,
            num_target_layers=way.num_target_layers,
        )
        engine = local_engine(self.target, way.drafter, num_target_layers=shaping.num_target_layers)
        stops = self.target.stop_token_ids
        handles = [
            engine.add(
                self.prompts[row.prompt],
                max_new_tokens=self.max_new_tokens,
                stop_token_ids=() if way.beyond_stops else stops,
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
        return [up_to_stop(text, stops) for text in texts] if way.beyond_stops else texts

    def _audit(self, row: _CheckRow, token_ids: Sequence[int]) -> AuditedText:
        """Audit a text once; most ways of decoding produce the same one."""
        key = (row, tuple(token_ids))
        if key not in self._audited:
            self._audited[key] = audit(
                self.stock or self.target,
                self.prompts[row.prompt],
                token_ids,
                self.settings[row.setting],
                max_new_tokens=self.max_new_tokens,
            )
        return self._audited[key]

    def _judged(
        self,
        method: str,
        batch: Batch,
        rows: Sequence[_CheckRow],
        texts: Sequence[Sequence[int]],
        base: Mapping[_CheckRow, AuditedText],
    ) -> Iterator[CheckedText]:
        for row, token_ids in zip(rows, texts, strict=True):
            found = compare(self._audit(row, token_ids), base[row])
            yield CheckedText(
                **vars(found),
                setting=row.setting,
                method=method,
                batch=batch,
                prompt=row.prompt,
                num_tokens=len(token_ids),
            )


class StopTokenProposer(TextProposer):
    """Proposes tokens that a faulty verification could accept: pads, stop tokens, repetitions.

    Args:
        tokens: to propose; 0 is the pad of fixed-size trees.
    """

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
    """A drafter of the same sizes that knows nothing."""
    some = next(drafter.parameters())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        fresh = MoADrafter(drafter.config, drafter.draft_token_ids)
    return fresh.to(device=some.device, dtype=some.dtype).eval().requires_grad_(False)
