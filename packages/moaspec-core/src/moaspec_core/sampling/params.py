"""Settings for choosing a request's next token from the target's logits.

Each is declared here alone, as a field of `SamplingParams` and an option of `SamplingOptions`: the
command line, HTTP, messages, defaults of models and kernels derive theirs from `SETTINGS`.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeGuard

from moaspec_core.errors import InputError
from moaspec_core.sampling.token_ids import as_integer
from moaspec_core.tokens.token_rules import NO_RULES, TokenRules

Alternatives = tuple[tuple[int, float], ...]
"""The most probable tokens at one place and their log-probabilities, the best first."""


@dataclass(frozen=True)
class TextLogprobs:
    """Of each token of a text but its first one, which nothing comes before.

    Attributes:
        logprobs: of the token itself.
        top_logprobs: the most probable tokens at its place.
    """

    logprobs: tuple[float, ...]
    top_logprobs: tuple[Alternatives, ...]


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
class Setting:
    """What other layers know of a field of `SamplingParams`.

    Args:
        default: the value that changes nothing.
        kind: its type; a bool is not checked.
        low, high: least and largest value.
        above: whether `low` itself is too small.
        hint: for the message of a refused value.
        stage: "penalty" changes logits by the tokens before them; "filter" leaves out unlikely
            tokens where a text is sampled, and models may have defaults for it.
        help: of its command-line option; empty where there is none.
        http: least and largest value in a request; None where it is no field of requests.
        gguf: name in the fields `general.sampling.*` of GGUF files; empty where there is none.
        plain: whether `Sampling` in `target.proto` has a field of the same name and value. A new
            one has 0 as its default, which is what older peers send.
    """

    default: Any
    kind: type = float
    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    hint: str = ""
    stage: Literal["penalty", "filter"] | None = None
    help: str = ""
    http: tuple[float, float] | None = None
    gguf: str = ""
    plain: bool = True

    def accepts(self, value: object) -> bool:
        """Whether it is a finite number within the bounds."""
        if not _is_finite(value):
            return False
        return self.low <= value <= self.high and not (self.above and value == self.low)

    @property
    def bounds(self) -> str:
        """The bounds in words, with a space before them; empty without any."""
        if self.low == -math.inf:
            return ""
        if self.high < math.inf:
            return f" within {self.low}..{self.high}"
        return f" above {self.low}" if self.above else f" of at least {self.low}"

    def checked(self, name: str, value: Any) -> Any:
        """The value; InputError where it is not acceptable."""
        if self.kind is bool or (value is None and self.default is None):
            return value
        if self.kind is int:
            # Python's own integer: scalars of numpy and torch overflow or sit on a device.
            return as_integer(name, value, high=int(self.high), hint=self.hint)
        if not self.accepts(value):
            hint = f" ({self.hint})" if self.hint else ""
            raise InputError(f"{name} must be a finite number{self.bounds}{hint}, got {value!r}.")
        return value


def _setting(default: Any, kind: type = float, **info: Any) -> Any:
    """A field of `SamplingParams` with its `Setting`."""
    setting = Setting(default=default, kind=kind, **info)
    return field(default=default, metadata={"setting": setting})


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
        repetition_penalty: divides positive logits of tokens in prompt or output, multiplies
            negative ones; 1 changes nothing.
        presence_penalty: subtracted once from the logits of generated tokens.
        frequency_penalty: subtracted for every occurrence.
        seed: of the noise, 0 .. 2^64 - 1; None lets `resolved` draw one.
        choice: which of several continuations of one prompt this is.
        logit_bias: added to the logits, by token id; -inf forbids a token.
        rules: which tokens may stand where; see `TokenRules`.
        processors: called in order; see `LogitsProcessor`.
        logprobs: whether to report log-probabilities of the chosen tokens.
        top_logprobs: number of most probable tokens to report for each position; needs
            `logprobs`.

    Raises:
        InputError: a value outside its range; the message says which.
    """

    temperature: float = _setting(
        0.0,
        low=0,
        help="0: greedy; default: the model's if it samples, else 0.",
        http=(0, 2),
        gguf="temp",
    )
    top_k: int = _setting(
        0,
        int,
        low=0,
        high=2**63 - 1,
        hint="0 keeps all tokens",
        stage="filter",
        help="Sample among this many tokens; 0: all; default: the model's.",
        http=(-1, 2**31),
        gguf="top_k",
    )
    top_p: float = _setting(
        1.0,
        low=0,
        high=1,
        stage="filter",
        help="Sample among the likeliest tokens with this total probability; default: the model's.",
        http=(0, 1),
        gguf="top_p",
    )
    min_p: float = _setting(
        0.0,
        low=0,
        high=1,
        stage="filter",
        help="Drop tokens below this share of the best one's probability; default: the model's.",
        http=(0, 1),
        gguf="min_p",
    )
    repetition_penalty: float = _setting(
        1.0,
        low=0,
        above=True,
        hint="1.0 changes nothing",
        stage="penalty",
        help="Above 1, tokens that occurred before are less likely; default: the model's.",
        http=(0.01, 100),
        gguf="penalty_repeat",
    )
    presence_penalty: float = _setting(0.0, stage="penalty", http=(-2, 2))
    frequency_penalty: float = _setting(0.0, stage="penalty", http=(-2, 2))
    seed: int | None = _setting(
        None,
        int,
        low=0,
        high=2**64 - 1,
        hint="None draws one",
        help="Seed of sampling; random by default.",
        http=(-(2**63), 2**63 - 1),
        plain=False,
    )
    choice: int = _setting(0, int, low=0, high=2**32 - 1, hint="0 is the first")
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    rules: TokenRules = NO_RULES
    processors: tuple[LogitsProcessor, ...] = ()
    logprobs: bool = _setting(False, bool)
    top_logprobs: int = _setting(
        0, int, low=0, high=MAX_ALTERNATIVES, hint="0 reports none", plain=False
    )

    def __post_init__(self) -> None:
        for name, setting in SETTINGS.items():
            object.__setattr__(self, name, setting.checked(name, getattr(self, name)))
        if self.top_logprobs and not self.logprobs:
            raise InputError("top_logprobs needs logprobs=True.")
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
        return self.changes(FILTERS)

    @cached_property
    def changes_logits(self) -> bool:
        """Whether bias, penalties, rules or processors change logits before the choice."""
        return self.needs_prefix or bool(self.logit_bias)

    @cached_property
    def needs_prefix(self) -> bool:
        """Whether the choice depends on the tokens before it, given the logits."""
        return self.changes(PENALTIES) or bool(self.rules or self.processors)

    @cached_property
    def takes_argmax(self) -> bool:
        """Whether the choice is the argmax of the target's unchanged logits."""
        return not self.samples and not self.changes_logits

    @cached_property
    def needs_logits(self) -> bool:
        """Whether the choice or the log-probabilities need more than that argmax."""
        return bool(self.logprobs) or not self.takes_argmax

    def changes(self, names: Iterable[str]) -> bool:
        """Whether any of these settings differs from its default."""
        return any(getattr(self, name) != SETTINGS[name].default for name in names)

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


def _is_finite(value: object) -> TypeGuard[float]:
    """Whether it is a number that a float can hold; Python's integers may be larger."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


SETTINGS: dict[str, Setting] = {
    field.name: field.metadata["setting"] for field in fields(SamplingParams) if field.metadata
}
"""Those fields of `SamplingParams` that are one number each, in its order."""
FILTERS = tuple(name for name, setting in SETTINGS.items() if setting.stage == "filter")
PENALTIES = tuple(name for name, setting in SETTINGS.items() if setting.stage == "penalty")

GREEDY = SamplingParams()  # the best token of the target's own logits


class SamplingOptions(TypedDict, total=False):
    """`SamplingParams` as keyword arguments; None takes a default."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    choice: int
    logit_bias: Mapping[int, float] | None
    rules: TokenRules | None
    logprobs: bool
    top_logprobs: int


def plain_settings(source: Any) -> dict[str, Any]:
    """The settings that are `plain` and the logit bias, of a `SamplingParams` or of a message."""
    settings = {name: getattr(source, name) for name, setting in SETTINGS.items() if setting.plain}
    return settings | {"logit_bias": dict(source.logit_bias)}
