"""Quality of text that a drafter generates alone, after the connection to the target is cut.

The target generates a few tokens, then the drafter continues alone from the activations it has
received. Afterwards the target scores that text.

Legend: T tokens of prompt and text, V vocabulary.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from moaspec.evaluate.correctness.equality import first_difference, up_to_stop
from moaspec.evaluate.methods import Method
from moaspec.evaluate.prompt_suites import Prompt
from moaspec.generation.local_engine import local_parts
from moaspec.target.target import Target
from moaspec_core.drafting.protocols import RequestText, VerifyRequest
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_core.engine.engine import run_now
from moaspec_core.errors import InputError

Grader = Callable[[Prompt, Sequence[int]], bool | None]
"""(prompt, token ids of the answer) -> whether the answer is right; None if unknown."""

DRAFTS_PER_CALL = 64  # tokens drafted by one call; the text does not depend on it
TARGET_NAME = "target"  # the name of the target's own continuation among the methods


@dataclass(frozen=True)
class Continuation:
    """One continuation of one prompt."""

    suite: str
    question_id: str
    tokens: int  # length of the continuation, with its stop token
    # Mean log-probability of its tokens under the target; None without tokens.
    log_likelihood: float | None
    agreement: float | None  # fraction of its tokens that are the target's most likely ones
    same: int  # length of the common prefix with the target's own continuation
    right: bool | None = None  # whether the whole answer is right; None if unknown


@dataclass(frozen=True)
class CutQuality:
    """Continuations by method, with the target's own."""

    after: int  # tokens that the target generated before the cut
    texts: dict[str, list[Continuation]]
    # Number of prompts that do not fit into the target's context, or whose answer ended before the
    # cut.
    left_out: int = 0
    interrupted: bool = False  # whether Ctrl-C ended the measurement early

    def as_json(self) -> dict[str, Any]:
        return {
            "after": self.after,
            "left_out": self.left_out,
            "interrupted": self.interrupted,
            "methods": {name: _summary(texts) for name, texts in self.texts.items()},
        }


def _summary(texts: Sequence[Continuation]) -> dict[str, Any]:
    return {
        "log_likelihood": _mean(text.log_likelihood for text in texts),
        "agreement": _mean(text.agreement for text in texts),
        "same": _mean(text.same for text in texts),
        "accuracy": _mean(text.right for text in texts),
        "tokens": sum(text.tokens for text in texts),
        "texts": len(texts),
        "judged": sum(text.tokens > 0 for text in texts),
        "prompts": [asdict(text) for text in texts],
    }


def measure_cut(
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    encode: Callable[[str], list[int]],
    *,
    after: int,
    max_new_tokens: int,
    is_correct: Grader = lambda *_: None,
    advance: Callable[[], None] = lambda: None,
) -> CutQuality:
    """Let every drafter continue alone after `after` tokens of the target.

    Prompts that do not fit, or whose answer ends before the cut, are left out.

    Args:
        methods: methods with a drafter are measured; plain decoding is always measured.
        prompts: their first turns are used.
        after: tokens before the cut, at least 1.
        max_new_tokens: of the whole text, more than `after`.

    Raises:
        InputError: no method with a drafter, or all prompts are left out.
        KeyboardInterrupt: before a prompt was measured; later, the result is marked interrupted.
    """
    drafted = [method for method in methods if method.drafter is not None]
    if not drafted:
        raise InputError("--cut needs a method with a drafter, for example moa.")
    left_out, interrupted, lengths = 0, False, (after, max_new_tokens)
    names = (TARGET_NAME, *(method.name for method in drafted))
    texts: dict[str, list[Continuation]] = {name: [] for name in names}
    try:
        for prompt in prompts:
            found = _texts(drafted, prompt, encode(prompt.turns[0]), lengths, is_correct)
            left_out += not found
            for name, text in found.items():
                texts[name].append(text)
            advance()
    except KeyboardInterrupt:
        if not texts[TARGET_NAME]:
            raise
        interrupted = True
    if left_out == len(prompts):
        raise InputError(
            f"No prompt fits, or no answer is longer than the {after} tokens before the cut; use "
            "other prompts or an earlier --cut."
        )
    return CutQuality(after, texts, left_out, interrupted)


def _texts(
    drafted: Sequence[Method],
    prompt: Prompt,
    prompt_ids: list[int],
    lengths: tuple[int, int],
    is_correct: Grader,
) -> dict[str, Continuation]:
    """The continuations of one prompt by method; empty if it is left out.

    `lengths`: tokens before the cut, and of the whole text.
    """
    target, (after, max_new_tokens) = drafted[0].target, lengths
    if len(prompt_ids) + max_new_tokens > target.max_positions:
        return {}
    own = Method(TARGET_NAME, target).decode([prompt_ids], max_new_tokens)[0].token_ids
    begun, expected = own[:after], own[after:]
    if not expected:
        return {}
    seen, left = [*prompt_ids, *begun], max_new_tokens - after
    texts = {TARGET_NAME: expected}
    texts |= {method.name: continue_alone(method, seen, left) for method in drafted}
    found = {}
    for name, text in texts.items():
        parting = first_difference(text, expected)
        likelihood, agreement = score_text(target, seen, text) if text else (None, None)
        found[name] = Continuation(
            prompt.suite,
            prompt.question_id,
            len(text),
            likelihood,
            agreement,
            len(text) if parting is None else parting,
            is_correct(prompt, [*begun, *text]),
        )
    return found


def continue_alone(method: Method, token_ids: Sequence[int], max_new_tokens: int) -> list[int]:
    """Continue a text with a method's drafter, given the target's activations of the text.

    As in every round, the newest token has no activations.
    """
    verifier, drafter = local_parts(
        method.target, method.drafter, num_target_layers=method.shaping.num_target_layers
    )
    assert drafter is not None, "only methods with a drafter come here"
    if len(token_ids) > 1:
        (verdict,) = run_now(verifier.verify([VerifyRequest(0, 0, tuple(token_ids[:-1]))]))
        if verdict.features is not None:
            drafter.append_features(0, verdict.features)
    stops, text = method.target.stop_token_ids, list[int]()
    while len(text) < max_new_tokens and not stops.intersection(text):
        shape = Chain(min(DRAFTS_PER_CALL, max_new_tokens - len(text)))
        (tree,) = drafter.propose([RequestText(0, [*token_ids, *text])], shape)
        if not tree.tokens:
            break
        text += tree.tokens
    return up_to_stop(text, stops)


@torch.inference_mode()
def score_text(target: Target, seen: Sequence[int], text: list[int]) -> tuple[float, float]:
    """Mean log-probability of `text` under the target, and fraction of its most likely tokens."""
    ids_1T = torch.tensor([[*seen, *text]], device=target.device)
    hidden_TE = target.capture(ids_1T, torch.ones_like(ids_1T)).hidden_BTE[0]
    logits_TV = target.head(hidden_TE[len(seen) - 1 : -1])
    tokens_T = ids_1T[0, len(seen) :]
    log_p_T = logits_TV.log_softmax(-1).gather(1, tokens_T[:, None])[:, 0]
    agree_T = logits_TV.argmax(-1) == tokens_T
    return float(log_p_T.mean()), float(agree_T.double().mean())


def _mean(values: Any) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.fmean(found) if found else None
