"""Acceptance traces: how many drafts in a row were right, at each place of real texts.

The target writes an answer. At each of its tokens the drafter, which has read all before, drafts a
chain; noted is how many of its tokens are the target's own. A round that drafts n tokens at a place
then accepts the smaller of n and that number, so a trace replays chains of any length.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from moaspec import Target
from moaspec.generation.local_engine import local_parts
from moaspec.model.moa import MoADrafter
from moaspec_core.drafting.draft_tree import DraftTree
from moaspec_core.drafting.protocols import RequestText, VerifyRequest
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_core.engine.engine import run_now
from moaspec_core.policy.cost_model import MAX_DEPTH
from moaspec_core.sampling.token_ids import common_length

TRACES = Path(__file__).with_name("traces.json")


@dataclass(frozen=True)
class Trace:
    """One answer.

    Attributes:
        prompt: tokens of its prompt.
        right: by token of the answer, how many drafts after it were right in a row, at most
            `MAX_DEPTH`.
    """

    prompt: int
    right: tuple[int, ...]


def record(
    target: Target, drafter: MoADrafter, prompts: Sequence[Sequence[int]], most: int
) -> list[Trace]:
    """Let the target answer greedily, and draft at each of its tokens."""
    return [_recorded(target, drafter, prompt, most) for prompt in prompts]


def _recorded(target: Target, drafter: MoADrafter, prompt: Sequence[int], most: int) -> Trace:
    verifier, proposer = local_parts(target, drafter)
    assert proposer is not None
    text, known, drafts = list(prompt), 0, list[tuple[int, ...]]()
    while len(text) - len(prompt) < most:
        asked = VerifyRequest(0, known, tuple(text[known:]), DraftTree())
        (result,) = run_now(verifier.verify([asked]))
        if result.features is not None:
            proposer.append_features(0, result.features)
        known = len(text)
        text.append(result.next_token)
        if result.next_token in target.stop_token_ids:
            break
        (tree,) = proposer.propose([RequestText(0, text)], Chain(MAX_DEPTH))
        drafts.append(tree.tokens)
    answer = text[len(prompt) :]
    right = [common_length(draft, answer[i + 1 :]) for i, draft in enumerate(drafts)]
    return Trace(len(prompt), tuple(right))


def save(traces: Sequence[Trace], path: Path = TRACES) -> None:
    """Write one line per trace."""
    lines = (
        json.dumps(asdict(trace) | {"right": "".join(map(str, trace.right))}) for trace in traces
    )
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def load(path: Path = TRACES) -> list[Trace]:
    """The traces of a file."""
    found = json.loads(path.read_text(encoding="utf-8"))
    return [Trace(one["prompt"], tuple(map(int, one["right"]))) for one in found]
