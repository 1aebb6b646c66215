"""Acceptance: follow each draft tree along the tokens that the target itself chooses.

`accept_sampled.py` does it for requests whose tokens are not simply the argmax of the logits.

Legend: N nodes of all trees, each tree's root first.
"""

from collections.abc import Sequence

from moaspec.drafting.draft_tree import walk
from moaspec.drafting.protocols import VerifyRequest, VerifyResult


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
