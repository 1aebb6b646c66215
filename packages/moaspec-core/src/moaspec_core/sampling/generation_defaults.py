"""A model's own generation defaults, from its `generation_config.json`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from moaspec_core.errors import InputError
from moaspec_core.sampling.params import FILTERS
from moaspec_core.tokens.token_rules import NO_RULES, TokenRules

if TYPE_CHECKING:
    from transformers import GenerationConfig

SAMPLED = ("temperature", *FILTERS)  # settings that need `do_sample: true`

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
"""Settings that are not supported here, and a test whether a value changes the text."""
_LENGTHS = ("max_length", "max_new_tokens")
_REFUSED_SAMPLED: Mapping[str, Callable[[Any], bool]] = {
    "typical_p": lambda value: value < 1,
    "epsilon_cutoff": lambda value: value > 0,
    "eta_cutoff": lambda value: value > 0,
    "top_h": lambda _: True,
}


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """Settings that apply when a caller does not give them."""

    # `SAMPLED`, of which the temperature is 1 if it is not given; empty without `do_sample: true`.
    sampling: Mapping[str, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0  # 1 changes nothing
    # The single-token entries of `sequence_bias`.
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    rules: TokenRules = NO_RULES  # constraints on tokens
    refused: tuple[str, ...] = ()  # names of unsupported settings
    refused_sampled: tuple[str, ...] = ()  # the same, for sampled texts only
    # Names of settings that are ignored, because every call sets its own value.
    unused: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: GenerationConfig | None, vocab_size: int) -> GenerationDefaults:
        if config is None:
            return cls()
        rules = _rules(config)
        biases = _biases(config.sequence_bias)
        refused = [name for name, changes in _REFUSED.items() if _is_set(config, name, changes)]
        refused += [] if set(map(len, biases)) <= {1} else ["sequence_bias"]
        if any(not 0 <= token < vocab_size for token in rules.token_ids):
            refused.append("a token id outside the vocabulary")
        names = SAMPLED if config.do_sample else ()
        samples = {name: getattr(config, name, None) for name in names}
        if config.do_sample and samples["temperature"] is None:
            samples["temperature"] = 1.0
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
        return self.sampling.get("temperature")

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

    def as_dict(self) -> dict[str, Any]:
        """All settings that differ from `NO_DEFAULTS`, as JSON."""
        rules = {
            field.name: getattr(self.rules, field.name)
            for field in fields(TokenRules)
            if getattr(self.rules, field.name) != field.default
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
        """`as_dict` as one line of text; empty if no setting differs."""
        said = [f"{name} {_short(value)}" for name, value in self.as_dict().items()]
        return ", ".join([*said, *(f"{name} (not used)" for name in self.unused)])


NO_DEFAULTS = GenerationDefaults()


def check_ends(ids: Any, vocab_size: int, where: str) -> None:
    """Refuse an `eos_token_id` by which no text would end as the model's texts do.

    Raises:
        ValueError: it is no id and no list of ids, or none of them is in the vocabulary.
    """
    given = [] if ids is None else ids if isinstance(ids, list | tuple) else [ids]
    if any(type(token_id) is not int for token_id in given):
        raise ValueError(f"{where}: eos_token_id must be a token id or a list of them, got {ids!r}")
    # Some files say -1 where they mean none.
    if given and not any(token_id < vocab_size for token_id in given):
        raise ValueError(f"{where}: eos_token_id {ids!r} is not in the {vocab_size} tokens")


def check_numbers(config: GenerationConfig, where: str) -> None:
    """Refuse settings of sampling that are no numbers, or negative; ValueError: says which."""
    for name in (*SAMPLED, "repetition_penalty"):
        value = getattr(config, name, None)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 <= value < math.inf):
            raise ValueError(f"{where}: {name} must be a number of at least 0, got {value!r}")


def without_defaults(config: GenerationConfig) -> GenerationConfig:
    """A config with the special tokens of another, so that EOS ids stay the model's."""
    from transformers import GenerationConfig

    names = ("eos_token_id", "bos_token_id", "pad_token_id")
    return GenerationConfig(**{name: getattr(config, name) for name in names})


def _is_set(config: GenerationConfig, name: str, changes: Callable[[Any], bool]) -> bool:
    value = getattr(config, name, None)
    return value is not None and changes(value)


def _rules(config: GenerationConfig) -> TokenRules:
    given = {field.name: getattr(config, field.name, None) for field in fields(TokenRules)}
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
