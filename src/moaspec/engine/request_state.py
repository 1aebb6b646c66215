"""What the engine keeps of one request, and the checks that a request must pass."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from moaspec.drafting.draft_tree import DraftTree, Tree, merged, without
from moaspec.drafting.ngram_proposer import NgramIndex
from moaspec.drafting.policy.policies import DraftPolicy
from moaspec.drafting.protocols import VerifyRequest
from moaspec.engine.result import GenerationResult, Source, StopReason
from moaspec.errors import ContextError, InputError, PromptError
from moaspec.sampling.params import SamplingParams
from moaspec.sampling.stop_strings import StopStrings

COPY_NGRAMS = (4, 3, 2)
"""Lengths of what free branches look for, longest first: a single token says too little."""


@dataclass
class RequestState:
    """Host-side state of one request."""

    handle: int
    cache_row: int
    token_ids: list[int]
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    stop: StopStrings | None
    policy: DraftPolicy
    branches: DraftPolicy | None
    sampling: SamplingParams
    prompt_length: int
    keep: bool
    index: NgramIndex = field(default_factory=lambda: NgramIndex(COPY_NGRAMS))
    prefilled: bool = False
    num_verified: int = 0  # verified tokens whose activations the verifier holds
    result: GenerationResult = field(default_factory=GenerationResult)
    started: float = field(default_factory=time.perf_counter)

    @property
    def remaining(self) -> int:
        """Tokens that the row may still write."""
        return self.max_new_tokens - len(self.result.token_ids)

    def request(
        self, num_verified: int, new_tokens: Sequence[int], tree: DraftTree
    ) -> VerifyRequest:
        """What the verifier is asked for this row."""
        return VerifyRequest(
            self.cache_row,
            num_verified,
            tuple(new_tokens),
            tree,
            self.sampling,
            self.prompt_length,
            self.policy.wants_features,
        )

    def branched(self, tree: DraftTree, shape: Tree | None) -> DraftTree:
        """The drafts, and beside them what followed when the text had its last tokens before."""
        if shape is None:
            return tree
        self.index.extend(self.token_ids)
        return merged(self.index.paths(shape), len(tree.tokens) + shape.total_tokens, tree)

    def unended(self, tree: DraftTree) -> DraftTree:
        """The drafts without those that would end the row, and what hangs below these.

        Plain decoding chooses nothing behind its end, and a custom processor may have no answer
        there. It costs no round: the target's own choice brings the last token just as soon.
        """
        ends = {node for node, token in enumerate(tree.tokens) if token in self.stop_token_ids}
        if self.stop:
            ends |= self.stop.completing(tree.tokens, tree.parents)
        return without(tree, ends) if ends else tree

    def count(self, tree: DraftTree, accepted: Sequence[int], sources: Sequence[Source]) -> None:
        """Take in a round's outcome: for the result, and for what will be drafted next."""
        own = len(tree.tokens) - tree.num_copied
        self.result.accept_lengths.append(len(sources))
        self.result.copied_lengths.append(sources.count("copy"))
        self.result.drafted_depths.append(max(tree.depths[:own], default=0))
        self.result.num_drafted += own
        for policy in (self.policy, self.branches):
            if policy is not None:
                policy.observe(tree, accepted)

    @staticmethod
    def sources(tree: DraftTree, accepted: Sequence[int]) -> list[Source]:
        """Who proposed each token of a verdict."""
        own = len(tree.tokens) - tree.num_copied
        sources: list[Source] = ["draft" if node < own else "copy" for node in accepted]
        return [*sources, "target"]

    def kept(
        self, tokens: Sequence[int], max_positions: int
    ) -> tuple[list[int], StopReason | None]:
        """Tokens up to and including the first that ends the row, and why it ends."""
        room = max_positions - len(self.token_ids)
        for i, token in enumerate(tokens, start=1):
            if token in self.stop_token_ids:
                return list(tokens[:i]), "stop_token"
            if self.stop and (found := self.stop.push(token)):
                self.result.stop_string = found
                return list(tokens[:i]), "stop_string"
            if i >= self.remaining:
                return list(tokens[:i]), "max_new_tokens"
            if i == room:
                return list(tokens[:i]), "context"
        return list(tokens), None


def check_prompt(prompt_ids: Sequence[int], vocab_size: int, max_positions: int) -> None:
    """Raise PromptError for a prompt that the target cannot take."""
    if not prompt_ids:
        raise PromptError("The prompt is empty; give at least one token.")
    if len(prompt_ids) >= max_positions:
        raise ContextError(
            f"The prompt has {len(prompt_ids)} tokens; the target's context of {max_positions} "
            "leaves no room to generate. Shorten the prompt."
        )
    outside = [token for token in prompt_ids if not 0 <= token < vocab_size]
    if outside:
        raise PromptError(
            f"Token id {outside[0]} is outside the target's vocabulary (0..{vocab_size - 1}). "
            "Was another tokenizer used?"
        )


def check_bias(sampling: SamplingParams, vocab_size: int) -> None:
    """Raise InputError for a bias on tokens that the target does not have."""
    outside = [token for token in sampling.logit_bias if token >= vocab_size]
    if outside:
        raise InputError(
            f"logit_bias names token id {outside[0]}, outside the target's vocabulary "
            f"(0..{vocab_size - 1})."
        )
