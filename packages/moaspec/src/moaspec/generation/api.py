"""`generate` and `stream`: thin callers of the engine."""

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any, Unpack, overload

from moaspec.generation.local_engine import local_engine
from moaspec.generation.options import Options
from moaspec.generation.shaping import shaping_for
from moaspec.target.target import Target
from moaspec_core.engine.engine import Engine
from moaspec_core.engine.generate_options import (
    check_num_choices,
    check_options,
    row_settings,
    token_ids,
)
from moaspec_core.engine.request_state import Event, GenerationResult


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
        flat = [result for (result,) in results]
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
    check_num_choices("num_choices", number)
    drafter, layers = options.get("drafter"), options.get("num_target_layers")
    settings = row_settings(target, options)
    shaping = shaping_for(
        target,
        drafter,
        tree=options.get("tree", "auto"),
        free_branches=options.get("free_branches", "auto"),
        num_target_layers=layers,
    )
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


def _is_batch(prompt_ids: Any) -> bool:
    """Whether this is a list of prompts; a tensor or array of two dimensions is one too."""
    if hasattr(prompt_ids, "ndim"):
        return bool(prompt_ids.ndim > 1 and len(prompt_ids))
    if not isinstance(prompt_ids, Sequence) or not prompt_ids:
        return False  # `token_ids` says what is wrong with it
    first = prompt_ids[0]
    return first.ndim > 0 if hasattr(first, "ndim") else hasattr(first, "__len__")
