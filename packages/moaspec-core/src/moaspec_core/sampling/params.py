"""Settings for choosing a request's next token from the target's logits."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from moaspec_core.errors import InputError
from moaspec_core.sampling.token_ids import as_integer
from moaspec_core.tokens.token_rules import NO_RULES, TokenRules

Alternatives = tuple[tuple[int, float], ...]
"""The most probable tokens at one place and their log-probabilities, the best first."""

if TYPE_CHECKING:
    from torch import Tensor

MAX_ALTERNATIVES = 1000
"""Limit of `top_logprobs`; whole vocabularies would take gigabytes of Python numbers."""

LogitsProcessor = Callable[[Sequence[int], "Tensor"], "Tensor"]
"""(token ids of the prefix, prompt included; float32 logits of shape (V,)) -> logits.

It must depend on its arguments only: with speculation it is called on the prefixes of drafted
nodes, some of which are called again in a later round.
"""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The settings of one row. Defaults: greedy, nothing changed.

    They apply in the order of transformers: logit bias, penalties, rules, custom processors,
    temperature, top-k, top-p, min-p.

    Args:
        temperature: divides the logits; 0 takes the best token, without noise.
        top_k: keep the k best tokens (and ties with the last); 0 keeps all.
        top_p: keep the most probable tokens until they hold this mass.
        min_p: drop tokens below this share of the best token's probability.
        seed: of the noise, 0 .. 2^64 - 1; None lets `resolved` draw one.
        choice: which of several continuations of one prompt this is.
        repetition_penalty: divides positive logits of tokens in prompt or output, multiplies
            negative ones; 1 changes nothing.
        presence_penalty: subtracted once from the logits of generated tokens.
        frequency_penalty: subtracted for every occurrence.
        logit_bias: added to the logits, by token id; -inf forbids a token.
        rules: which tokens may stand where; see `TokenRules`.
        processors: called in order; see `LogitsProcessor`.
        logprobs: whether to report log-probabilities of the chosen tokens.
        top_logprobs: number of most probable tokens to report for each position; needs
            `logprobs`.

    Raises:
        InputError: a value outside its range; the message says which.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    choice: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    rules: TokenRules = NO_RULES
    processors: tuple[LogitsProcessor, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        self._need_number("temperature", low=0.0)
        self._need_number("top_p", low=0.0, high=1.0)
        self._need_number("min_p", low=0.0, high=1.0)
        self._need_number("repetition_penalty", low=0.0)
        self._need_number("presence_penalty")
        self._need_number("frequency_penalty")
        if self.repetition_penalty == 0.0:
            raise InputError("repetition_penalty must be above 0 (1.0 changes nothing), got 0.")
        self._need_integer("top_k", high=2**63 - 1, otherwise="0 keeps all tokens")
        self._need_integer("choice", high=2**32 - 1, otherwise="0 is the first")
        self._need_integer("top_logprobs", high=MAX_ALTERNATIVES, otherwise="0 reports none")
        if self.top_logprobs and not self.logprobs:
            raise InputError("top_logprobs needs logprobs=True.")
        if self.seed is not None:
            self._need_integer("seed", high=2**64 - 1, otherwise="None draws one")
        _check_bias(self.logit_bias)
        if not isinstance(self.rules, TokenRules):
            raise InputError(f"rules must be TokenRules, got {self.rules!r}.")
        if not isinstance(self.processors, Sequence):
            raise InputError(
                f"Logits processors come in a list, also a single one; got {self.processors!r}."
            )
        for processor in self.processors:
            if not callable(processor):
                raise InputError(
                    f"A logits processor must be a function of (prefix_token_ids, logits_V), "
                    f"got {processor!r}."
                )

    @cached_property
    def samples(self) -> bool:
        """Whether noise takes part."""
        return self.temperature > 0.0

    @cached_property
    def filters(self) -> bool:
        """Whether unlikely tokens are left out."""
        return bool(self.top_k or self.min_p) or self.top_p < 1.0

    @cached_property
    def changes_logits(self) -> bool:
        """Whether bias, penalties, rules or processors change logits before the choice."""
        return self.needs_prefix or bool(self.logit_bias)

    @cached_property
    def needs_prefix(self) -> bool:
        """Whether the choice depends on the tokens before it, given the logits."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0) or bool(self.rules or self.processors)

    @cached_property
    def takes_argmax(self) -> bool:
        """Whether the choice is the argmax of the target's unchanged logits."""
        return not self.samples and not self.changes_logits

    @cached_property
    def needs_logits(self) -> bool:
        """Whether the choice or the log-probabilities need more than that argmax."""
        return bool(self.logprobs) or not self.takes_argmax

    def resolved(self) -> SamplingParams:
        """These settings with a seed, drawn now if they sample and have none."""
        if self.seed is not None or not self.samples:
            return self
        return replace(self, seed=secrets.randbits(63))

    def bound(self, stop_token_ids: Collection[int], max_new_tokens: int) -> SamplingParams:
        """These settings for a text that ends at one of these ids or after `max_new_tokens` tokens.

        Some rules depend on either; what was bound before stays.
        """
        if not self.rules:
            return self
        return replace(self, rules=self.rules.bound(stop_token_ids, max_new_tokens))

    def _need_number(self, name: str, low: float = -math.inf, high: float = math.inf) -> None:
        value = getattr(self, name)
        if not _is_finite(value) or not low <= value <= high:
            bounds = f" of at least {low:g}" if high == math.inf else f" within {low:g}..{high:g}"
            bounds = "" if low == -math.inf else bounds
            raise InputError(f"{name} must be a finite number{bounds}, got {value!r}.")

    def _need_integer(self, name: str, *, high: int, otherwise: str) -> None:
        # Kept as Python's own integer: scalars of numpy and torch overflow or sit on a device.
        number = as_integer(name, getattr(self, name), high=high, hint=otherwise)
        object.__setattr__(self, name, number)


def _check_bias(bias: Mapping[int, float]) -> None:
    if not isinstance(bias, Mapping):
        raise InputError(f"logit_bias must map token ids to numbers, got {bias!r}.")
    for token, value in bias.items():
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise InputError(f"logit_bias must be keyed by token ids, got {token!r}.")
        if value != -math.inf and not _is_finite(value):
            raise InputError(
                f"logit_bias of token {token} must be a finite number or -inf, got {value!r}."
            )


def _is_finite(value: object) -> bool:
    """Whether it is a number that a float can hold; Python's integers may be larger."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


GREEDY = SamplingParams()  # the best token of the target's own logits

PLAIN_SETTINGS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "choice",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logprobs",
)
"""Settings that have the same name and the same plain value wherever they occur: in
`SamplingParams`, in the options of `generate`, in wire messages and over HTTP."""


def plain_settings(source: Any) -> dict[str, Any]:
    """The `PLAIN_SETTINGS` and the logit bias of a `SamplingParams` or of a message."""
    settings = {name: getattr(source, name) for name in PLAIN_SETTINGS}
    return settings | {"logit_bias": dict(source.logit_bias)}
