"""Acceptance: follow each draft tree along the tokens that the target itself chooses.

Legend: N nodes of all trees, each tree's root first; V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moaspec.sampling.choose import next_tokens
from moaspec.sampling.processors import Prefix
from moaspec_core.drafting.draft_tree import children, walk
from moaspec_core.drafting.protocols import VerifyRequest, VerifyResult
from moaspec_core.sampling.params import Alternatives


def accept_greedy(
    requests: Sequence[VerifyRequest], texts: Sequence[list[int]], chosen_N: Sequence[int]
) -> list[VerifyResult]:
    """Accept the drafts of requests whose tokens are the argmax of the logits; no features yet.

    Args:
        requests: their `sampling.needs_logits` is false.
        texts: each request's tokens up to its root; accepted ones are appended.
        chosen_N: the target's choice after each root and each node, request after request.
    """
    decisions: list[VerifyResult] = []
    first = 0
    for request, text in zip(requests, texts, strict=True):
        tree = request.tree
        chosen = chosen_N[first : first + 1 + len(tree.tokens)]
        path = walk(tree, chosen)
        text += [tree.tokens[node] for node in path]
        last = path[-1] if path else -1
        decisions.append(VerifyResult(tuple(path), chosen[last + 1]))
        first += len(chosen)
    return decisions


def accept(
    requests: Sequence[VerifyRequest], texts: Sequence[list[int]], logits_NV: Tensor
) -> list[VerifyResult]:
    """Accept the drafts of requests with any sampling settings; no features yet.

    Greedy requests share one argmax over all nodes. The others choose one token at a time, all
    requests together. So settings cost no time on branches that the target does not choose, and
    custom processors never see those.

    Args:
        texts: each request's tokens up to its root; accepted ones are appended.
        logits_NV: the target's, after each root and each node, request after request.

    Raises:
        InputError: a custom processor misbehaved.
    """
    walks = _at_roots(requests, texts)
    greedy = [walk for walk in walks if walk.request.sampling.takes_argmax]
    if greedy:
        chosen_N = logits_NV.argmax(-1).tolist()
        for walk in greedy:
            walk.follow(chosen_N)
    running = [walk for walk in walks if not walk.request.sampling.takes_argmax]
    while running:
        prefixes = [walk.prefix for walk in running]
        tokens = next_tokens(logits_NV[[walk.logits_index for walk in running]], prefixes)
        running = [walk for walk, token in zip(running, tokens, strict=True) if walk.step(token)]
    return [walk.acceptance(logits_NV) for walk in walks]


class _Walk:
    """The path of accepted drafts in one request's tree, from the root on.

    Args:
        text: all tokens up to the root; accepted ones are appended.
        first: index of the root in the logits.

    Attributes:
        next_token: the target's choice after the last accepted draft.
    """

    def __init__(self, request: VerifyRequest, text: list[int], first: int) -> None:
        self.request, self.text, self.first = request, text, first
        self.path: list[int] = []
        self.next_token = -1
        self._spent_s: list[float] = []
        self._children = {} if request.sampling.takes_argmax else children(request.tree)

    @property
    def node(self) -> int:
        """The last accepted node; -1 is the root."""
        return self.path[-1] if self.path else -1

    @property
    def logits_index(self) -> int:
        """Index of the last accepted node in the logits."""
        return self.first + 1 + self.node

    @property
    def prefix(self) -> Prefix:
        request = self.request
        return Prefix(request.sampling, self.text, request.prompt_length, self._spent_s)

    def step(self, token: int) -> bool:
        """Take the target's next choice; True when it was drafted, so that the walk goes on."""
        child = self._children.get((self.node, token))
        if child is None:
            self.next_token = token
            return False
        self.path.append(child)
        self.text.append(token)
        return True

    def follow(self, chosen_N: Sequence[int]) -> None:
        """Walk to the end along choices that were made for all nodes beforehand."""
        tree = self.request.tree
        chosen = chosen_N[self.first : self.first + 1 + len(tree.tokens)]
        self.path = walk(tree, chosen)
        self.text += [tree.tokens[node] for node in self.path]
        self.next_token = chosen[self.node + 1]

    def acceptance(self, logits_NV: Tensor) -> VerifyResult:
        """The result of the walk, with log-probabilities if the request wants them."""
        if not self.request.sampling.logprobs:
            return VerifyResult(tuple(self.path), self.next_token, process_s=sum(self._spent_s))
        tokens = [*(self.request.tree.tokens[node] for node in self.path), self.next_token]
        indices = [self.first, *(self.first + 1 + node for node in self.path)]
        log_p = logits_NV[indices].log_softmax(-1)
        index = torch.tensor(tokens, device=log_p.device)[:, None]
        logprobs = tuple(log_p.gather(1, index)[:, 0].tolist())
        top = alternatives(log_p, self.request.sampling.top_logprobs)
        return VerifyResult(
            tuple(self.path),
            self.next_token,
            logprobs=logprobs,
            top_logprobs=top,
            process_s=sum(self._spent_s),
        )


def _at_roots(requests: Sequence[VerifyRequest], texts: Sequence[list[int]]) -> list[_Walk]:
    walks: list[_Walk] = []
    first = 0
    for request, text in zip(requests, texts, strict=True):
        walks.append(_Walk(request, text, first))
        first += 1 + len(request.tree.tokens)
    return walks


def alternatives(log_p_NV: Tensor, number: int) -> tuple[Alternatives, ...]:
    """The `number` most probable tokens of every row, the best first; nothing for 0."""
    if not number:
        return ()
    values, ids = log_p_NV.topk(min(number, log_p_NV.shape[1]), dim=-1)
    rows = zip(ids.tolist(), values.tolist(), strict=True)
    return tuple(tuple(zip(tokens, scores, strict=True)) for tokens, scores in rows)
