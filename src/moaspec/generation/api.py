"""`generate` and `stream`: thin callers of the engine."""

from __future__ import annotations

import operator
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, overload

from moaspec.calibration.choose_exit import chosen_exit
from moaspec.calibration.first_use import measure_once
from moaspec.drafting.baseline_proposers import baseline_drafting
from moaspec.drafting.draft_tree import Tree
from moaspec.drafting.moa_proposer import MoAProposer, drafts_behind
from moaspec.drafting.policy.assumed_costs import sure_costs
from moaspec.drafting.policy.policies import DraftSettings, FreeBranches
from moaspec.drafting.protocols import DRAFTER_METHODS, Drafter
from moaspec.engine.engine import Engine
from moaspec.engine.local_verifier import LocalVerifier
from moaspec.engine.result import Event, GenerationResult
from moaspec.errors import InputError, PromptError, UnknownModelError
from moaspec.generation.bundled import bundled_drafters
from moaspec.model.checkpoint.baseline_checkpoint import is_baseline, load_baseline
from moaspec.model.checkpoint.directory import is_directory
from moaspec.model.checkpoint.moa_checkpoint import load_checkpoint
from moaspec.model.moa import MoADrafter
from moaspec.sampling.params import LogitsProcessor, SamplingParams
from moaspec.sampling.stop_strings import stop_strings
from moaspec.sampling.token_ids import as_token_ids
from moaspec.support.hub import cached_if_offline
from moaspec.support.torch_settings import plain_torch
from moaspec.target.generation_defaults import NO_DEFAULTS, GenerationDefaults
from moaspec.target.spec import TargetSpec
from moaspec.target.target import Target
from moaspec.target.token_rules import TokenRules


@plain_torch()
def load_drafter(name: str | Path, *, target: TargetSpec) -> MoADrafter:
    """Load a drafter in the target's dtype, on its device.

    Args:
        name: a bundled alias (`moaspec models` lists them), a directory, or a hub id.
        target: the target it will draft for.

    Raises:
        UnknownModelError: nothing of that name.
        CheckpointError: unreadable, damaged, or made for another target.
    """
    drafter = load_checkpoint(find_drafter(name), target.identity, target.config)
    return drafter.to(device=target.device, dtype=target.dtype)


@plain_torch()
def load_any_drafter(name: str | Path, *, target: Target) -> MoADrafter | Drafter:
    """`load_drafter` for Mixture-of-Attentions drafters and for trained baselines alike.

    Returns:
        What `generate` takes as `drafter`. A baseline holds rows of one engine only.
    """
    directory = find_drafter(name)
    if not is_baseline(directory):
        return load_drafter(directory, target=target)
    module = load_baseline(directory, target.identity)
    return baseline_drafting(module.to(device=target.device, dtype=target.dtype), target)


def find_drafter(name: str | Path) -> Path:
    """Directory of a checkpoint: a bundled alias, a directory, or a hub id, which is fetched.

    Raises:
        UnknownModelError: nothing of that name.
    """
    directory = bundled_drafters().get(str(name), Path(name))
    return directory if is_directory(directory) else _from_hub(str(name))


def _from_hub(name: str) -> Path:
    # Imported here: only hub users pay for it.
    from huggingface_hub import snapshot_download

    try:
        if (cached := cached_if_offline(name)) is not None:
            return cached
        return Path(snapshot_download(name, allow_patterns=["config.json", "model*.safetensors*"]))
    # The hub's client passes on whatever its HTTP library raises, which changes with versions.
    except Exception as error:
        bundled = ", ".join(bundled_drafters()) or "none"
        raise UnknownModelError(
            f"No drafter {name!r}: not bundled ({bundled}), no directory, and the hub cannot be "
            "asked or does not have it."
        ) from error


def local_engine(
    target: Target,
    drafter: MoADrafter | Drafter | None = None,
    *,
    num_target_layers: int | None = None,
) -> Engine:
    """An engine with target and drafter in this process.

    Args:
        target: the model whose text is produced.
        drafter: a trained module, any object with the methods of `Drafter`, or None.
        num_target_layers: N of a trained module; None takes its default.

    Raises:
        InputError: something that is no drafter, or N for a drafter that reuses no layers.
    """
    verifier, drafting = local_parts(target, drafter, num_target_layers=num_target_layers)
    return Engine(
        verifier,
        drafting,
        vocab_size=target.vocab_size,
        max_positions=target.max_positions,
        tokenizer=target.tokenizer,
        rope_switches=target.rope_switches,
        rope_growth=target.rope_growth,
    )


@plain_torch()
def local_parts(
    target: Target,
    drafter: MoADrafter | Drafter | None = None,
    *,
    num_target_layers: int | None = None,
) -> tuple[LocalVerifier, Drafter | None]:
    """Verifier and drafter of `local_engine`, for those who drive them step by step."""
    drafting = _drafting(target, drafter, num_target_layers)
    verifier = LocalVerifier(target, drafting)
    if isinstance(drafting, MoAProposer):
        drafting.share_target_cache(verifier.cache)
    return verifier, drafting


def _drafting(
    target: Target, drafter: MoADrafter | Drafter | None, num_target_layers: int | None
) -> Drafter | None:
    if isinstance(drafter, MoADrafter):
        return MoAProposer(drafter, target, num_target_layers=num_target_layers)
    if num_target_layers is not None and drafter is not None:
        raise InputError(
            f"num_target_layers={num_target_layers} is for Mixture-of-Attentions drafters; "
            f"{type(drafter).__name__} reuses no layers. Leave it out."
        )
    missing = [name for name in DRAFTER_METHODS if not hasattr(drafter, name)]
    if drafter is not None and missing:
        raise InputError(
            f"A drafter must be a MoADrafter or have the methods of moaspec's Drafter protocol; "
            f"{type(drafter).__name__} lacks {', '.join(missing)}."
        )
    return drafter


@plain_torch()
def shaping_for(
    target: Target,
    drafter: MoADrafter | Drafter | None,
    *,
    tree: Tree | str = "auto",
    free_branches: FreeBranches = "auto",
    num_target_layers: int | None = None,
) -> DraftSettings:
    """How rows of this target and drafter decide what to draft.

    By what `calibrate` has stored, else by `sure_costs`.

    The engine that they join must have the N of the answer.

    Args:
        target: of the rows.
        drafter: of the rows; what it costs is known for `MoADrafter` only.
        tree: see `Options`.
        free_branches: see `Options`.
        num_target_layers: see `Options`.

    Raises:
        InputError: a shape or setting that does not exist.
    """
    if tree != "auto" or not isinstance(drafter, MoADrafter):
        return DraftSettings(tree, free_branches, num_target_layers=num_target_layers)
    exits, _ = measure_once(target, drafter, num_target_layers=num_target_layers)
    chosen = chosen_exit(exits)
    layers = chosen.num_target_layers
    costs = chosen.costs or sure_costs(target, drafter, layers, chosen.prior)
    if costs is None:
        return DraftSettings(None, free_branches, None, chosen.prior, num_target_layers=layers)
    lags = drafts_behind(drafter, layers)
    return DraftSettings(tree, free_branches, costs, chosen.prior, lags, layers)


class RowOptions(TypedDict, total=False):
    """Keyword arguments of everything that decodes one text.

    Attributes:
        max_new_tokens: at most so many per prompt; 64. 0 gives an empty result.
        temperature, top_k, top_p, min_p, seed, repetition_penalty, presence_penalty,
        frequency_penalty, logit_bias, rules, logprobs, top_logprobs, choice: see `SamplingParams`.
            None, or nothing, is the model's own default, and without one that of `SamplingParams`;
            for the temperature always 0.
        generation_config: "auto" (the default) takes those defaults from the model's
            `generation_config.json`; None takes none from there.
        logits_processors: functions of (prefix token ids, logits); see `SamplingParams`. For these,
            `logit_bias` and `stop`, None is none.
        stop: a string or several; the text ends with the token that completes one.
        stop_token_ids: ids that end a row; None takes the target's own.
        tree: "chain:4", "tree:6x8x62", a `Tree` or `Chain`; or "auto": the shape that pays most on
            this machine, plain rounds included, as `moaspec calibrate` has measured it for this
            target, drafter, dtype and number of threads. Where it has not, the first call measures
            it in some seconds and stores the result. Where that is impossible or takes longer, see
            `measure_once`, costs are estimated from the models' sizes, and only what is sure to pay
            is drafted. A drafter of another kind than `MoADrafter` drafts a small fixed tree.
        free_branches: whether candidates out of the text itself are verified beside the drafts:
            True, False, or "auto" (the default): together with `tree="auto"`, as long as they pay.
            Their tokens are reported as "copy".
    """

    max_new_tokens: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    rules: TokenRules | None
    generation_config: Literal["auto"] | None
    logits_processors: Iterable[LogitsProcessor] | None
    logprobs: bool
    top_logprobs: int
    choice: int
    stop: str | Iterable[str] | None
    stop_token_ids: Iterable[int] | None
    tree: Tree | str
    free_branches: FreeBranches


class Options(RowOptions, total=False):
    """Keyword arguments of `generate` and `stream`: those of `RowOptions`, and these.

    Attributes:
        drafter: proposes tokens: a `MoADrafter`, or any object with the methods of the `Drafter`
            protocol; None (the default) decodes plainly.
        num_choices: continuations per prompt, each with noise of its own; with more than one,
            every prompt gives a list of results.
        num_target_layers: N, target layers that the drafter reuses. None takes its default: the
            first, or, of several, with `tree="auto"` the one that pays most on this machine, where
            `moaspec calibrate` has measured it.
    """

    drafter: MoADrafter | Drafter | None
    num_choices: int
    num_target_layers: int | None


@overload
def generate(
    target: Target, prompt_ids: Sequence[int], **options: Unpack[Options]
) -> GenerationResult: ...
@overload
def generate(
    target: Target, prompt_ids: Sequence[Sequence[int]], **options: Unpack[Options]
) -> list[GenerationResult]: ...
def generate(target: Target, prompt_ids: Any, **options: Unpack[Options]) -> Any:
    """Generate: the same tokens with and without a drafter, in any batch.

    Args:
        target: the model whose text is produced.
        prompt_ids: token ids, or a list of such lists, which are decoded together.
        **options: see `Options`. All prompts share them, seed included.

    Returns:
        One result, or a list of them in the prompts' order. With `num_choices` above 1 a list of
        that many results stands for each of them; see `choices` for the same in types.

    Raises:
        InputError: bad prompt ids, tree sizes or numbers.
    """
    batched = _is_batch(prompt_ids)
    results = choices(target, prompt_ids if batched else [prompt_ids], **options)
    if options.get("num_choices", 1) == 1:
        flat = [one for (one,) in results]
        return flat if batched else flat[0]
    return results if batched else results[0]


def choices(
    target: Target, prompts: Sequence[Sequence[int]], **options: Unpack[Options]
) -> list[list[GenerationResult]]:
    """Like `generate` for a list of prompts: for each a list of `num_choices` results."""
    engine, results = start(target, prompts, **options)
    for _ in engine.run():
        pass
    number = options.get("num_choices", 1)
    return [results[i : i + number] for i in range(0, len(results), number)]


def stream(
    target: Target, prompt_ids: Sequence[int], **options: Unpack[Options]
) -> Generator[Event]:
    """Like `generate` for one prompt, yielding verified tokens as each round ends.

    With `num_choices` above 1, an event's `handle` is the number of its choice. Closing the
    iterator early ends decoding.
    """
    engine, _ = start(target, [prompt_ids], **options)
    return engine.run()


def start(
    target: Target, prompts: Sequence[Sequence[int]], **options: Unpack[Options]
) -> tuple[Engine, list[GenerationResult]]:
    """An engine that all prompts have joined, and their results, which fill as it runs."""
    check_options(options, Options)
    number = options.get("num_choices", 1)
    if not isinstance(number, int) or number < 1:
        raise InputError(f"num_choices must be an integer of at least 1, got {number!r}.")
    drafter, layers = options.get("drafter"), options.get("num_target_layers")
    settings = row_settings(target, options)
    shaping = row_shaping(target, drafter, options, num_target_layers=layers)
    engine = local_engine(target, drafter, num_target_layers=shaping.num_target_layers)
    sampling = settings.pop("sampling")
    handles = [
        engine.add(
            token_ids(prompt),
            shape=shaping.policy(sampling),
            free_branches=shaping.branches(sampling),
            sampling=replace(sampling, choice=sampling.choice + choice),
            **settings,
        )
        for prompt in prompts
        for choice in range(number)
    ]
    return engine, [engine.result(handle) for handle in handles]


def check_options(options: Mapping[str, Any], known: type) -> None:
    """Raise TypeError for an option that no one knows."""
    unknown = set(options) - set(known.__annotations__)
    if unknown:
        raise TypeError(
            f"Unknown option(s) {sorted(unknown)}; known: {', '.join(known.__annotations__)}."
        )


def row_settings(target: Target, options: RowOptions) -> dict[str, Any]:
    """What `options` mean for `Engine.add`, all but what to draft."""
    stops = options.get("stop_token_ids")
    return {
        "max_new_tokens": options.get("max_new_tokens", 64),
        # Sets and tuples: every row reads them, and an iterator could be read once only.
        "stop_token_ids": (
            target.stop_token_ids if stops is None else as_token_ids("stop_token_ids", stops)
        ),
        "stop": stop_strings(options.get("stop")),
        "sampling": sampling_params(options, defaults_of(target, options)),
    }


def row_shaping(
    target: Target,
    drafter: MoADrafter | Drafter | None,
    options: RowOptions,
    *,
    num_target_layers: int | None = None,
) -> DraftSettings:
    """What `options` mean for what rows draft."""
    return shaping_for(
        target,
        drafter,
        tree=options.get("tree", "auto"),
        free_branches=options.get("free_branches", "auto"),
        num_target_layers=num_target_layers,
    )


def _is_batch(prompt_ids: Any) -> bool:
    """Whether this is a list of prompts; a tensor or array of two dimensions is one too."""
    if hasattr(prompt_ids, "ndim"):
        return bool(prompt_ids.ndim > 1 and len(prompt_ids))
    if not isinstance(prompt_ids, Sequence) or not prompt_ids:
        return False  # `token_ids` says what is wrong with it
    first = prompt_ids[0]
    return first.ndim > 0 if hasattr(first, "ndim") else hasattr(first, "__len__")


def token_ids(prompt: Any) -> list[int]:
    """One prompt as plain integers.

    Raises:
        PromptError: something else than a list, array or tensor of integers.
    """
    if isinstance(prompt, Mapping):
        raise PromptError(
            "A prompt must be a list of integer token ids, got a mapping; of what a tokenizer "
            "returns, pass tokenizer(...)['input_ids']."
        )
    try:
        return [operator.index(token) for token in prompt]
    except TypeError as error:
        raise PromptError(f"A prompt must be a list of integer token ids: {error}.") from error


def defaults_of(target: Any, options: RowOptions) -> GenerationDefaults:
    """The model's defaults, where `options` want them.

    Raises:
        InputError: `generation_config` is neither "auto" nor None.
    """
    wanted = options.get("generation_config", "auto")
    if wanted not in ("auto", None):
        raise InputError(f'generation_config must be "auto" or None, got {wanted!r}.')
    return NO_DEFAULTS if wanted is None else target.generation_defaults


def sampling_params(
    options: RowOptions, defaults: GenerationDefaults = NO_DEFAULTS
) -> SamplingParams:
    """What `options` say about sampling, with a seed drawn where one is needed and missing.

    Args:
        options: what is None, or not there, is not said.
        defaults: hold where nothing is said, but for the temperature.

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
