"""Walking drafted trees along the target's own choices.

Legend: N nodes of all trees, each tree's root first; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moaspec.drafting.draft_tree import children, walk
from moaspec.drafting.protocols import VerifyRequest
from moaspec.sampling.choose import next_tokens
from moaspec.sampling.params import Alternatives
from moaspec.sampling.processors import Prefix


@dataclass(frozen=True)
class Acceptance:
    """What became of one row; see `Verdict`."""

    accepted: tuple[int, ...]
    next_token: int
    logprobs: tuple[float, ...]
    top_logprobs: tuple[Alternatives, ...] = ()


class _Walk:
    """One row on its way from its root.

    Args:
        request: with the tree that is walked.
        text: all tokens up to the root; accepted ones are appended.
        first: the root's place in the logits.
    """

    def __init__(self, request: VerifyRequest, text: list[int], first: int) -> None:
        self.request, self.text, self.first = request, text, first
        self.path: list[int] = []
        self.next_token = -1
        self._children = {} if request.sampling.takes_argmax else children(request.tree)

    @property
    def node(self) -> int:
        """Where the walk stands; -1 is the root."""
        return self.path[-1] if self.path else -1

    @property
    def place(self) -> int:
        """The same as an index into the logits."""
        return self.first + 1 + self.node

    @property
    def prefix(self) -> Prefix:
        """What the choice at this node depends on, besides its logits."""
        return Prefix(self.request.sampling, self.text, self.request.prompt_length)

    def choose(self, token: int) -> bool:
        """Take the target's choice at this node; True when it was drafted and the walk goes on."""
        child = self._children.get((self.node, token))
        if child is None:
            self.next_token = token
            return False
        self.path.append(child)
        self.text.append(token)
        return True

    def choose_all(self, chosen_N: Sequence[int]) -> None:
        """Take choices that were made at every node beforehand."""
        tree = self.request.tree
        chosen = chosen_N[self.first : self.first + 1 + len(tree.tokens)]
        self.path = walk(tree, chosen)
        self.text += [tree.tokens[node] for node in self.path]
        self.next_token = chosen[self.node + 1]

    def decision(self, logits_NV: Tensor) -> Acceptance:
        """The outcome, once the walk has ended."""
        if not self.request.sampling.logprobs:
            return Acceptance(tuple(self.path), self.next_token, ())
        tokens = [*(self.request.tree.tokens[node] for node in self.path), self.next_token]
        places = [self.first, *(self.first + 1 + node for node in self.path)]
        log_p = logits_NV[places].log_softmax(-1)
        index = torch.tensor(tokens, device=log_p.device)[:, None]
        logprobs = tuple(log_p.gather(1, index)[:, 0].tolist())
        top = alternatives(log_p, self.request.sampling.top_logprobs)
        return Acceptance(tuple(self.path), self.next_token, logprobs, top)


def alternatives(log_p_NV: Tensor, number: int) -> tuple[Alternatives, ...]:
    """The most probable tokens of every row, the best first; nothing for 0."""
    if not number:
        return ()
    values, ids = log_p_NV.topk(min(number, log_p_NV.shape[1]), dim=-1)
    rows = zip(ids.tolist(), values.tolist(), strict=True)
    return tuple(tuple(zip(one, scores, strict=True)) for one, scores in rows)


def accept(
    requests: Sequence[VerifyRequest], texts: Sequence[list[int]], logits_NV: Tensor
) -> list[Acceptance]:
    """Walk every request's tree.

    Rows that take the best logit share one argmax over all nodes. The others walk in step with one
    another and ask for one choice at a time, so that settings cost nothing on branches that the
    target does not take, and custom processors never see them.

    Args:
        requests: the rows.
        texts: each row's tokens up to its root; accepted ones are appended.
        logits_NV: the target's, after each root and its nodes, row after row.

    Raises:
        InputError: a custom processor misbehaved.
    """
    walks = _at_roots(requests, texts)
    greedy = [one for one in walks if one.request.sampling.takes_argmax]
    if greedy:
        chosen_N = logits_NV.argmax(-1).tolist()
        for one in greedy:
            one.choose_all(chosen_N)
    _walk_in_step([one for one in walks if not one.request.sampling.takes_argmax], logits_NV)
    return [one.decision(logits_NV) for one in walks]


def accept_greedy(
    requests: Sequence[VerifyRequest], texts: Sequence[list[int]], chosen_N: Sequence[int]
) -> list[Acceptance]:
    """`decide` for rows that need nothing of the logits but their argmax, which is known.

    Args:
        requests: rows whose `sampling.needs_logits` is false.
        texts: see `decide`.
        chosen_N: the target's choice after each root and its nodes, row after row.
    """
    walks = _at_roots(requests, texts)
    for one in walks:
        one.choose_all(chosen_N)
    return [Acceptance(tuple(one.path), one.next_token, ()) for one in walks]


def _at_roots(requests: Sequence[VerifyRequest], texts: Sequence[list[int]]) -> list[_Walk]:
    walks: list[_Walk] = []
    first = 0
    for request, text in zip(requests, texts, strict=True):
        walks.append(_Walk(request, text, first))
        first += 1 + len(request.tree.tokens)
    return walks


def _walk_in_step(walks: list[_Walk], logits_NV: Tensor) -> None:
    while walks:
        tokens = next_tokens(logits_NV[[one.place for one in walks]], [one.prefix for one in walks])
        walks = [one for one, token in zip(walks, tokens, strict=True) if one.choose(token)]
