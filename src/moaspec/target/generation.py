"""A model's own generation defaults, from its `generation_config.json`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import (
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from moaspec.errors import InputError


@dataclass(frozen=True, kw_only=True)
class TokenRules:
    """Constraints on tokens by their position, with the names and meaning of `GenerationConfig`.

    Attributes:
        stop_token_ids, max_new_tokens: the text's own limits, which some rules need; None until
            `bound` fills them in.
    """

    no_repeat_ngram_size: int = 0
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    min_length: int = 0
    min_new_tokens: int = 0
    forced_bos_token_id: int | None = None
    forced_eos_token_id: tuple[int, ...] = ()
    remove_invalid_values: bool = False
    exponential_decay_length_penalty: tuple[int, float] | None = None
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] | None = None
    max_new_tokens: int | None = None

    def __bool__(self) -> bool:
        """Whether any rule is set."""
        return self._any

    @cached_property
    def _any(self) -> bool:
        return replace(self, stop_token_ids=None, max_new_tokens=None) != TokenRules()

    @property
    def token_ids(self) -> set[int]:
        """All token ids in the rules."""
        words = (token for word in self.bad_words_ids for token in word)
        bos = () if self.forced_bos_token_id is None else (self.forced_bos_token_id,)
        lists = (self.forced_eos_token_id, self.suppress_tokens, self.begin_suppress_tokens)
        return {*words, *bos, *(token for tokens in lists for token in tokens)}

    def bound(self, stop_token_ids: Collection[int], max_new_tokens: int) -> TokenRules:
        """The rules for a text with these limits; limits that are already set stay."""
        if not self:
            return self
        stops, limit = self.stop_token_ids, self.max_new_tokens
        return replace(
            self,
            stop_token_ids=tuple(sorted(stop_token_ids)) if stops is None else stops,
            max_new_tokens=max_new_tokens if limit is None else limit,
        )

    def apply(self, token_ids: Iterable[int], prompt_length: int, logits_V: Tensor) -> Tensor:
        """Process the logits of the token after `token_ids`."""
        key = (prompt_length, logits_V.device)
        if key not in self._processors:
            self._processors[key] = self._made(prompt_length, logits_V.device)
        ids_1T = torch.tensor([list(token_ids)], device=logits_V.device)
        scores_1V: Tensor = self._processors[key](ids_1T, logits_V[None])
        return scores_1V[0]

    @cached_property
    def _processors(self) -> dict[tuple[int, torch.device], LogitsProcessorList]:
        return {}

    def _made(self, prompt_length: int, device: torch.device) -> LogitsProcessorList:
        """Transformers' processors, in its order."""
        where = str(device)
        found: list[Any] = [*self._repetition(), *self._length(prompt_length, where)]
        if self.suppress_tokens:
            found.append(SuppressTokensLogitsProcessor(list(self.suppress_tokens), where))
        if self.begin_suppress_tokens:
            # A forced first token is not counted, as in transformers.
            begin = prompt_length + (prompt_length == 1 and self.forced_bos_token_id is not None)
            tokens = list(self.begin_suppress_tokens)
            found.append(SuppressTokensAtBeginLogitsProcessor(tokens, begin, where))
        return LogitsProcessorList(found)

    def _repetition(self) -> Iterable[Any]:
        if self.no_repeat_ngram_size:
            yield NoRepeatNGramLogitsProcessor(self.no_repeat_ngram_size)
        stops = {(token,) for token in self.stop_token_ids or ()}
        words = [list(word) for word in self.bad_words_ids if word not in stops]
        if words:
            yield NoBadWordsLogitsProcessor(words)

    def _length(self, prompt_length: int, device: str) -> Iterable[Any]:
        stops = list(self.stop_token_ids or ())
        if self.min_length and stops:
            yield MinLengthLogitsProcessor(self.min_length, stops, device)
        if self.min_new_tokens and stops:
            least = self.min_new_tokens
            yield MinNewTokensLengthLogitsProcessor(prompt_length, least, stops, device)
        if self.forced_bos_token_id is not None:
            yield ForcedBOSTokenLogitsProcessor(self.forced_bos_token_id)
        if self.forced_eos_token_id and self.max_new_tokens is not None:
            longest = prompt_length + self.max_new_tokens
            yield ForcedEOSTokenLogitsProcessor(longest, list(self.forced_eos_token_id), device)
        if self.remove_invalid_values:
            yield InfNanRemoveLogitsProcessor()
        if self.exponential_decay_length_penalty and stops:
            decay = self.exponential_decay_length_penalty
            yield ExponentialDecayLengthPenalty(decay, stops, prompt_length)


NO_RULES = TokenRules()

SAMPLED = ("temperature", "top_k", "top_p", "min_p")
"""Settings that need `do_sample: true`."""

_REFUSED: Mapping[str, Callable[[Any], bool]] = {
    "num_beams": lambda value: value > 1,
    "num_beam_groups": lambda value: value > 1,
    "num_return_sequences": lambda value: value > 1,
    "penalty_alpha": lambda value: value > 0,
    "guidance_scale": lambda value: value != 1,
    "encoder_repetition_penalty": lambda value: value != 1,
    "encoder_no_repeat_ngram_size": lambda value: value > 0,
    "cache_implementation": lambda value: value == "quantized",
    **dict.fromkeys(
        (
            "constraints",
            "dola_layers",
            "force_words_ids",
            "max_time",
            "stop_strings",
            "token_healing",
            "watermarking_config",
        ),
        bool,
    ),
}
"""Settings that are not supported here, and which of their values change transformers' text."""
_LENGTHS = ("max_length", "max_new_tokens")
_REFUSED_SAMPLED: Mapping[str, Callable[[Any], bool]] = {
    "typical_p": lambda value: value < 1,
    "epsilon_cutoff": lambda value: value > 0,
    "eta_cutoff": lambda value: value > 0,
    "top_h": lambda _: True,
}


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """Settings that apply when a caller does not give them.

    Attributes:
        sampling: temperature, top_k, top_p and min_p; empty without `do_sample: true`.
        repetition_penalty: 1 changes nothing.
        logit_bias: the single-token entries of `sequence_bias`.
        rules: constraints on tokens.
        refused: names of unsupported settings.
        refused_sampled: the same, for sampled texts only.
        unused: names of settings that are not used because every call has its own value.
    """

    sampling: Mapping[str, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    rules: TokenRules = NO_RULES
    refused: tuple[str, ...] = ()
    refused_sampled: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: GenerationConfig | None, vocab_size: int) -> GenerationDefaults:
        """Read a model's `GenerationConfig`."""
        if config is None:
            return cls()
        rules = _rules(config)
        biases = _biases(config.sequence_bias)
        refused = [name for name, changes in _REFUSED.items() if _is_set(config, name, changes)]
        refused += [] if set(map(len, biases)) <= {1} else ["sequence_bias"]
        if any(not 0 <= token < vocab_size for token in rules.token_ids):
            refused.append("a token id outside the vocabulary")
        samples = {name: getattr(config, name) for name in SAMPLED} if config.do_sample else {}
        return cls(
            sampling={name: value for name, value in samples.items() if value is not None},
            repetition_penalty=config.repetition_penalty or 1.0,
            logit_bias={ids[0]: bias for ids, bias in biases.items() if len(ids) == 1},
            rules=rules,
            refused=tuple(refused),
            refused_sampled=tuple(
                name for name, changes in _REFUSED_SAMPLED.items() if _is_set(config, name, changes)
            ),
            unused=tuple(name for name in _LENGTHS if _is_set(config, name, bool)),
        )

    @property
    def temperature(self) -> float | None:
        """The default temperature; None without `do_sample: true`."""
        return self.sampling.get("temperature", 1.0) if self.sampling else None

    def settings(self, *, sampled: bool) -> dict[str, Any]:
        """Keyword arguments of `SamplingParams`.

        Args:
            sampled: whether the text's temperature is above 0.

        Raises:
            InputError: the file has a setting that is not supported.
        """
        refused = (*self.refused, *(self.refused_sampled if sampled else ()))
        if refused:
            raise InputError(
                f"The model's generation_config.json sets {', '.join(refused)}, which moaspec "
                "does not support. Ignore the file with generation_config=None "
                "(--generation-config none), or remove the setting."
            )
        found = dict(self.sampling) if sampled else {}
        return {
            **found,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": self.logit_bias,
            "rules": self.rules,
        }

    def as_facts(self) -> dict[str, Any]:
        """All settings that differ from `NO_DEFAULTS`, as JSON."""
        rules = {
            one.name: getattr(self.rules, one.name)
            for one in fields(TokenRules)
            if getattr(self.rules, one.name) != one.default
        }
        bias = {"logit_bias": dict(self.logit_bias)} if self.logit_bias else {}
        penalty = self.repetition_penalty
        return {
            **self.sampling,
            **({} if penalty == 1.0 else {"repetition_penalty": penalty}),
            **bias,
            **rules,
        }

    @property
    def words(self) -> str:
        """`as_facts` as one line of text; empty if no setting differs."""
        said = [f"{name} {_short(value)}" for name, value in self.as_facts().items()]
        return ", ".join([*said, *(f"{name} (not used)" for name in self.unused)])


NO_DEFAULTS = GenerationDefaults()


def without_defaults(config: GenerationConfig) -> GenerationConfig:
    """A config with the special tokens of another, so that EOS ids stay the model's."""
    names = ("eos_token_id", "bos_token_id", "pad_token_id")
    return GenerationConfig(**{name: getattr(config, name) for name in names})


def _is_set(config: GenerationConfig, name: str, changes: Callable[[Any], bool]) -> bool:
    value = getattr(config, name, None)
    return value is not None and changes(value)


def _rules(config: GenerationConfig) -> TokenRules:
    given = {one.name: getattr(config, one.name, None) for one in fields(TokenRules)}
    for name in ("stop_token_ids", "max_new_tokens"):  # the caller sets all limits of length
        del given[name]
    given["bad_words_ids"] = tuple(tuple(word) for word in given["bad_words_ids"] or ())
    for name in ("forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"):
        given[name] = _ids(given[name])
    decay = given["exponential_decay_length_penalty"]
    given["exponential_decay_length_penalty"] = None if decay is None else tuple(decay)
    return TokenRules(**{name: value for name, value in given.items() if value is not None})


def _ids(value: int | Iterable[int] | None) -> tuple[int, ...]:
    """One id or several as a tuple. Some files write -1 for none."""
    if value is None:
        return ()
    return tuple(token for token in ([value] if isinstance(value, int) else value) if token >= 0)


def _biases(given: Any) -> dict[tuple[int, ...], float]:
    """`sequence_bias` as a mapping; files have a list of pairs."""
    if not given:
        return {}
    pairs = given.items() if isinstance(given, Mapping) else given
    return {tuple(ids): float(bias) for ids, bias in pairs}


def _short(value: Any) -> str:
    if isinstance(value, tuple | dict) and len(value) > 4:
        return f"({len(value)} of them)"
    return f"{value:g}" if isinstance(value, float) else str(value)
