"""Options of all functions that decode a text, converted for the engine; no PyTorch."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, Literal

from moaspec_core.drafting.draft_tree import Tree
from moaspec_core.errors import InputError, PromptError
from moaspec_core.policy.policies import FreeBranches
from moaspec_core.sampling.generation_defaults import NO_DEFAULTS, GenerationDefaults
from moaspec_core.sampling.params import LogitsProcessor, SamplingOptions, SamplingParams
from moaspec_core.sampling.stop_strings import stop_strings
from moaspec_core.sampling.token_ids import as_token_ids

MAX_NUM_CHOICES = 1024  # each takes a row of the caches


class GenerateOptions(SamplingOptions, total=False):
    """Keyword arguments of everything that decodes one text.

    Attributes:
        max_new_tokens: limit of generated tokens per prompt; 64. 0 returns an empty result.
        temperature, top_p, seed and the others of `SamplingOptions`: see `SamplingParams`. Without
            a value, or with None, the model's own default, else that of `SamplingParams`; the
            temperature's default is always 0.
        generation_config: "auto" (the default) takes those defaults from the model's
            `generation_config.json`; None takes none from there.
        logits_processors: functions of (prefix token ids, logits); see `SamplingParams`. For these,
            `logit_bias` and `stop`, None is none.
        stop: a string or several; the text ends with the token that completes a stop string.
        stop_token_ids: ids that end a text; None takes the target's own.
        tree: "chain:4", "tree:6x8x62", a `Tree` or `Chain`; or "auto": the fastest shape on this
            machine, or no drafts, by the costs that `moaspec calibrate` has measured for this
            target, drafter, dtype and number of threads. Without these costs, the first call
            measures them in some seconds and stores them. For machines that cannot be measured, and
            for drafters other than `MoADrafter`, see `shaping_for`.
        free_branches: whether continuations copied from the text are verified beside the drafts:
            True, False, or "auto" (the default): together with `tree="auto"`, as far as they pay,
            while no other request is decoded. Their tokens are reported as "copy".
    """

    max_new_tokens: int
    generation_config: Literal["auto"] | None
    logits_processors: Iterable[LogitsProcessor] | None
    stop: str | Iterable[str] | None
    stop_token_ids: Iterable[int] | None
    tree: Tree | str
    free_branches: FreeBranches


def check_num_choices(name: str, value: Any) -> None:
    """Raise InputError for a number of choices that cannot be decoded together."""
    if not isinstance(value, int) or not 1 <= value <= MAX_NUM_CHOICES:
        raise InputError(f"{name} must be an integer of 1 to {MAX_NUM_CHOICES}, got {value!r}.")


def check_options(options: Mapping[str, Any], known: type) -> None:
    """Raise TypeError for an option that no one knows."""
    unknown = set(options) - set(known.__annotations__)
    if unknown:
        raise TypeError(
            f"Unknown option(s) {sorted(unknown)}; known: {', '.join(known.__annotations__)}."
        )


def row_settings(target: Any, options: GenerateOptions) -> dict[str, Any]:
    """Arguments of `Engine.add` from `options`, except what to draft."""
    stops = options.get("stop_token_ids")
    return {
        "max_new_tokens": options.get("max_new_tokens", 64),
        # Sets and tuples: every request reads them, and an iterator could be read once only.
        "stop_token_ids": (
            target.stop_token_ids if stops is None else as_token_ids("stop_token_ids", stops)
        ),
        "stop": stop_strings(options.get("stop")),
        "sampling": sampling_params(options, defaults_of(target, options)),
    }


def defaults_of(target: Any, options: GenerateOptions) -> GenerationDefaults:
    """The model's defaults, or none, as `generation_config` says; InputError for a wrong one."""
    wanted = options.get("generation_config", "auto")
    if wanted not in ("auto", None):
        raise InputError(f'generation_config must be "auto" or None, got {wanted!r}.')
    return NO_DEFAULTS if wanted is None else target.generation_defaults


def sampling_params(
    options: GenerateOptions, defaults: GenerationDefaults = NO_DEFAULTS
) -> SamplingParams:
    """Sampling parameters from `options`, with a seed drawn if one is needed and missing.

    Args:
        options: values that are None or missing take the default.
        defaults: of the model, except the temperature.

    Raises:
        InputError: a value outside its range, or defaults that cannot be honoured.
    """
    names = {field.name for field in fields(SamplingParams)}
    said = {name: value for name, value in options.items() if name in names and value is not None}
    samples = bool(said.get("temperature"))
    given: dict[str, Any] = {**defaults.settings(sampled=samples), **said}
    if isinstance(given["logit_bias"], Mapping):  # else it is refused
        given["logit_bias"] = {**defaults.logit_bias, **given["logit_bias"]}
    processors: Any = options.get("logits_processors") or ()
    if isinstance(processors, Iterable):
        processors = tuple(processors)
    return SamplingParams(processors=processors, **given).resolved()


def token_ids(prompt: Any) -> list[int]:
    """One prompt as integers; PromptError where it is no list, array or tensor of these."""
    if isinstance(prompt, Mapping):
        raise PromptError(
            "A prompt must be a list of integer token ids, got a mapping; of what a tokenizer "
            "returns, pass tokenizer(...)['input_ids']."
        )
    try:
        return [operator.index(token) for token in prompt]
    except TypeError as error:
        raise PromptError(f"A prompt must be a list of integer token ids: {error}.") from error
