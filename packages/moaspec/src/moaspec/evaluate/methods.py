"""Decoding methods that can be measured: this package's and those of transformers."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import nn

from moaspec.drafting.other_proposers.oracle_proposer import OracleProposer
from moaspec.evaluate.meter import Meter
from moaspec.generation.api import generate
from moaspec.generation.shaping import shaping_for
from moaspec.model.moa import MoADrafter
from moaspec.target.families import forget_growth
from moaspec.target.target import Target
from moaspec_core.drafting.draft_tree import Tree
from moaspec_core.drafting.protocols import Proposer
from moaspec_core.engine.request_state import GenerationResult, Timing
from moaspec_core.policy.policies import DraftSettings, FreeBranches
from moaspec_core.sampling.params import GREEDY, SamplingParams

Prompts = Sequence[Sequence[int]]  # token ids of each


@dataclass(frozen=True)
class MethodRun:
    """One decoding of one prompt."""

    token_ids: list[int]
    # Wall-clock time, prompt included. Prompts decoded together get equal parts of the total, so
    # that tokens over seconds is the throughput.
    seconds: float
    # Rounds and timing. For transformers' methods they come from the streamer: a round is one call
    # of it, and only the prompt's time and the total time are known.
    result: GenerationResult
    cpu_s: float = 0.0  # CPU time, divided like `seconds`
    peak_bytes: int | None = None  # see `Meter`


@dataclass(frozen=True)
class Method:
    """A decoding method of this package."""

    batches: ClassVar[bool] = True  # whether it decodes several prompts together
    name: str
    target: Target
    drafter: MoADrafter | Proposer | None = None  # None for plain decoding
    shape: Tree | str = "auto"  # of the drafts, or "auto"
    num_target_layers: int | None = None
    free_branches: FreeBranches = "auto"

    @cached_property
    def shaping(self) -> DraftSettings:
        return shaping_for(
            self.target,
            self.drafter,
            tree=self.shape,
            free_branches=self.free_branches,
            num_target_layers=self.num_target_layers,
        )

    @cached_property
    def key(self) -> str:
        """The name, with hashes of the drafter's weights and of this machine's calibration.

        Stored results use this key, so a changed drafter or calibration is measured again.
        """
        costs = self.shaping.costs
        measured = "" if costs is None else f"~{_sha256(repr(costs).encode())[:8]}"
        if not isinstance(self.drafter, nn.Module):
            return self.name + measured
        weights = (
            parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            for parameter in self.drafter.parameters()
        )
        return f"{self.name}#{_sha256(*weights)[:16]}{measured}"

    def run(
        self, prompt_ids: Sequence[int], max_new_tokens: int, sampling: SamplingParams = GREEDY
    ) -> MethodRun:
        return self.run_many([prompt_ids], max_new_tokens, sampling)[0]

    def run_many(
        self, prompts: Prompts, max_new_tokens: int, sampling: SamplingParams = GREEDY
    ) -> list[MethodRun]:
        """Decode prompts together, measured, with the temperature and seed of `sampling`."""
        with Meter(self.target.device) as meter:
            results = self.decode(prompts, max_new_tokens, sampling)
        share = 1 / len(prompts)
        return [
            MethodRun(
                list(result.token_ids),
                meter.seconds * share,
                result,
                meter.cpu_s * share,
                meter.peak_bytes,
            )
            for result in results
        ]

    def decode(
        self, prompts: Prompts, max_new_tokens: int, sampling: SamplingParams = GREEDY
    ) -> list[GenerationResult]:
        return generate(
            self.target,
            prompts,
            drafter=self.drafter,
            max_new_tokens=max_new_tokens,
            tree=self.shape,
            free_branches=self.free_branches,
            num_target_layers=self.num_target_layers,
            temperature=sampling.temperature,
            seed=sampling.seed,
        )


def _sha256(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


@dataclass(frozen=True)
class ReplayMethod(Method):
    """Drafts from the text of plain decoding, with a given agreement."""

    agreement: float = 1.0  # probability that a draft is right

    def run_many(
        self, prompts: Prompts, max_new_tokens: int, sampling: SamplingParams = GREEDY
    ) -> list[MethodRun]:
        """Decode plainly, not measured, then with drafts from that text, measured."""
        plain = Method("plain", self.target).decode(prompts, max_new_tokens, sampling)
        texts = [[*ids, *text.token_ids] for ids, text in zip(prompts, plain, strict=True)]
        drafter = OracleProposer(texts, agreement=self.agreement)
        drafted = Method(
            self.name, self.target, drafter, self.shape, free_branches=self.free_branches
        )
        return drafted.run_many(prompts, max_new_tokens, sampling)


@dataclass(frozen=True)
class TransformersMethod(Method):
    """Transformers' own `generate`, one prompt at a time."""

    batches: ClassVar[bool] = False
    options: tuple[tuple[str, Any], ...] = ()  # further keyword arguments of `generate`

    def decode(
        self, prompts: Prompts, max_new_tokens: int, sampling: SamplingParams = GREEDY
    ) -> list[GenerationResult]:
        assert not sampling.samples, "transformers draws noise of its own"
        return [self._generate(prompt, max_new_tokens) for prompt in prompts]

    def _generate(self, prompt_ids: Sequence[int], max_new_tokens: int) -> GenerationResult:
        ids_1T = torch.tensor([list(prompt_ids)], device=self.target.device)
        model: Any = self.target.model
        forget_growth(model)
        counter = _TokenCounter(self.target.device)
        with counter.clock:
            output = model.generate(
                input_ids=ids_1T,
                attention_mask=torch.ones_like(ids_1T),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=sorted(self.target.stop_token_ids) or None,
                streamer=counter,
                **dict(self.options),
            )
        tokens = [int(token) for token in output[0, len(prompt_ids) :]]
        lengths = _clipped(counter.counts, len(tokens))[1:]
        return GenerationResult(
            token_ids=tokens,
            accept_lengths=lengths,
            copied_lengths=[0] * len(lengths),
            drafted_depths=[0] * len(lengths),
            timing=Timing(prefill_s=counter.first_s, total_s=counter.clock.seconds),
        )


class _TokenCounter:
    """A streamer of transformers that records the number of tokens of each call.

    The first call with new tokens belongs to the prompt, each further one to a round.
    """

    def __init__(self, device: torch.device) -> None:
        self.clock = Meter(device)
        self.counts: list[int] = []
        self.first_s = 0.0
        self._prompt_seen = False

    def put(self, tokens: torch.Tensor) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        if not self.counts:
            self.first_s = self.clock.elapsed()
        self.counts.append(tokens.numel())

    def end(self) -> None:
        """Do nothing: tokens are counted at once."""


def _clipped(counts: Sequence[int], total: int) -> list[int]:
    """Limit the sum of the counts to `total`, without tokens after a stop token."""
    kept: list[int] = []
    for count in counts:
        left = total - sum(kept)
        if left > 0:
            kept.append(min(count, left))
    return kept
