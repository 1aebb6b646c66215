"""Quality under a cut: what a drafter writes once the target is taken away.

The target generates a few tokens, then the drafter goes on alone from what it has seen until then.
The target is asked afterwards what it thinks of that text.

Legend: T tokens of prompt and text, V vocabulary.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from moaspec.drafting.draft_tree import Chain
from moaspec.drafting.protocols import RowText, VerifyRequest
from moaspec.engine.engine import run_now
from moaspec.errors import InputError
from moaspec.evaluate.correctness.equality import first_difference, up_to_stop
from moaspec.evaluate.methods import Method
from moaspec.evaluate.prompt_suites import Prompt
from moaspec.generation.local_engine import local_parts
from moaspec.target.target import Target

IsRight = Callable[[Prompt, Sequence[int]], bool | None]
"""(what was asked, token ids of the answer) -> whether it is right, where anybody can tell."""

STRETCH = 64
"""Tokens drafted in one go; what a text goes on with does not depend on it."""

OWN = "target"
"""The name under which the target's own continuation stands beside the drafters'."""


@dataclass(frozen=True)
class CutText:
    """One continuation of one prompt.

    Attributes:
        suite, question_id: of the prompt.
        tokens: length of the continuation, a token that ends the turn included.
        log_likelihood: mean log-probability of its tokens under the target; None without tokens.
        agreement: share of its tokens that are the target's first choice after what precedes them.
        same: tokens until it parts from what the target itself would have written.
        right: whether the whole answer is right, beginning and continuation; None where nobody
            asked or nobody can tell.
    """

    suite: str
    question_id: str
    tokens: int
    log_likelihood: float | None
    agreement: float | None
    same: int
    right: bool | None = None


@dataclass(frozen=True)
class Cut:
    """Continuations by method, the target's own among them.

    Attributes:
        after: tokens that the target generated before it was taken away.
        left_out: prompts that do not fit into the target's context, or whose answer ended before
            the cut.
        interrupted: whether Ctrl-C came before all prompts were measured.
    """

    after: int
    texts: dict[str, list[CutText]]
    left_out: int = 0
    interrupted: bool = False

    def as_json(self) -> dict[str, Any]:
        """Plain values, summed up by method."""
        methods = {
            name: {
                "log_likelihood": _mean(one.log_likelihood for one in texts),
                "agreement": _mean(one.agreement for one in texts),
                "same": _mean(one.same for one in texts),
                "accuracy": _mean(one.right for one in texts),
                "tokens": sum(one.tokens for one in texts),
                "texts": len(texts),
                "judged": sum(one.tokens > 0 for one in texts),
                "prompts": [asdict(one) for one in texts],
            }
            for name, texts in self.texts.items()
        }
        counts = {"left_out": self.left_out, "interrupted": self.interrupted}
        return {"after": self.after, **counts, "methods": methods}


def check_cut(after: int, max_new_tokens: int) -> None:
    """Refuse a cut that leaves nothing before or after it.

    Raises:
        InputError: it does.
    """
    if not 1 <= after < max_new_tokens:
        raise InputError(
            f"--cut must be at least 1 and below --max-new-tokens ({max_new_tokens}), got {after}."
        )


def measure_cut(
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    encode: Callable[[str], list[int]],
    *,
    after: int,
    max_new_tokens: int,
    is_right: IsRight = lambda *_: None,
    advance: Callable[[], None] = lambda: None,
) -> Cut:
    """Let every drafter go on alone after `after` tokens of the target.

    A prompt that does not fit, or whose answer ends before the cut, is left out.

    Args:
        methods: those with a drafter are measured; plain decoding is measured without being named.
        prompts: their first turns are asked.
        encode: a turn to prompt ids.
        after: tokens before the cut, at least 1.
        max_new_tokens: of the whole text.
        is_right: judges whole answers; the target's own tell what it does without a cut.
        advance: called after each prompt, for a progress display.

    Raises:
        InputError: no method with a drafter, or nothing left after the cut of any prompt.
        KeyboardInterrupt: it came before a prompt was measured; later, the result says so.
    """
    drafted = [method for method in methods if method.drafter is not None]
    if not drafted:
        raise InputError("--cut needs a method with a drafter, for example moa.")
    check_cut(after, max_new_tokens)
    left_out, interrupted = 0, False
    texts: dict[str, list[CutText]] = {name: [] for name in (OWN, *(m.name for m in drafted))}
    try:
        for prompt in prompts:
            found = _texts(
                drafted, prompt, encode(prompt.turns[0]), (after, max_new_tokens), is_right
            )
            left_out += not found
            for name, text in found.items():
                texts[name].append(text)
            advance()
    except KeyboardInterrupt:
        if not texts[OWN]:
            raise
        interrupted = True
    if left_out == len(prompts):
        raise InputError(
            f"No prompt fits, or no answer is longer than the {after} tokens before the cut; use "
            "other prompts or an earlier --cut."
        )
    return Cut(after, texts, left_out, interrupted)


def _texts(
    drafted: Sequence[Method],
    prompt: Prompt,
    prompt_ids: list[int],
    lengths: tuple[int, int],
    is_right: IsRight,
) -> dict[str, CutText]:
    """The continuations of one prompt, by method; none where it is left out.

    `lengths`: tokens before the cut, and of the whole text.
    """
    target, (after, max_new_tokens) = drafted[0].target, lengths
    if len(prompt_ids) + max_new_tokens > target.max_positions:
        return {}
    own = Method(OWN, target).decode([prompt_ids], max_new_tokens)[0].token_ids
    begun, expected = own[:after], own[after:]
    if not expected:
        return {}
    seen, left = [*prompt_ids, *begun], max_new_tokens - after
    alone = {one.name: continue_alone(one, seen, left) for one in drafted}
    return {
        name: replace(
            _judged(target, prompt, seen, text, expected), right=is_right(prompt, [*begun, *text])
        )
        for name, text in {OWN: expected, **alone}.items()
    }


def continue_alone(method: Method, token_ids: Sequence[int], max_new_tokens: int) -> list[int]:
    """What a method's drafter writes after a text, having seen the target's activations of it.

    Of the newest token it has none, as in every round.
    """
    verifier, drafter = local_parts(
        method.target, method.drafter, num_target_layers=method.shaping.num_target_layers
    )
    assert drafter is not None, "only methods with a drafter come here"
    if len(token_ids) > 1:
        (verdict,) = run_now(verifier.verify([VerifyRequest(0, 0, tuple(token_ids[:-1]))]))
        if verdict.features is not None:
            drafter.observe(0, verdict.features)
    stops, text = method.target.stop_token_ids, list[int]()
    while len(text) < max_new_tokens and not stops.intersection(text):
        shape = Chain(min(STRETCH, max_new_tokens - len(text)))
        (tree,) = drafter.propose([RowText(0, [*token_ids, *text])], shape)
        if not tree.tokens:
            break
        text += tree.tokens
    return up_to_stop(text, stops)


def _judged(
    target: Target, prompt: Prompt, seen: Sequence[int], text: list[int], expected: Sequence[int]
) -> CutText:
    parting = first_difference(text, expected)
    same = len(text) if parting is None else parting
    likelihood, agreement = opinion(target, seen, text) if text else (None, None)
    return CutText(prompt.suite, prompt.question_id, len(text), likelihood, agreement, same)


@torch.inference_mode()
def opinion(target: Target, seen: Sequence[int], text: list[int]) -> tuple[float, float]:
    """Mean log-probability and share of first choices of `text` under the target.

    Args:
        target: gives its opinion.
        seen: token ids before the text.
        text: at least one token id.
    """
    ids_1T = torch.tensor([[*seen, *text]], device=target.device)
    hidden_TE = target.encode(ids_1T, torch.ones_like(ids_1T)).hidden_BTE[0]
    logits_TV = target.head(hidden_TE[len(seen) - 1 : -1])
    tokens_T = ids_1T[0, len(seen) :]
    log_p_T = logits_TV.log_softmax(-1).gather(1, tokens_T[:, None])[:, 0]
    agree_T = logits_TV.argmax(-1) == tokens_T
    return float(log_p_T.mean()), float(agree_T.double().mean())


def _mean(values: Any) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.fmean(found) if found else None
