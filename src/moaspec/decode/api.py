"""`generate` and `stream`: thin callers of the engine."""

from __future__ import annotations

import importlib.resources
import operator
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack, overload

from moaspec.decode.engine import Engine
from moaspec.decode.moa import MoADrafting
from moaspec.decode.result import Event, GenerationResult
from moaspec.decode.tree import Tree, parse_shape
from moaspec.decode.verifier import LocalVerifier
from moaspec.errors import InputError, PromptError, UnknownModelError
from moaspec.model import MoADrafter, load_checkpoint
from moaspec.target import Target


def bundled_drafters() -> dict[str, Path]:
    """Drafters that ship inside the package, by the alias of their target."""
    root = Path(str(importlib.resources.files("moaspec"))) / "bundled"
    return {path.parent.name: path.parent for path in sorted(root.glob("*/config.json"))}


def load_drafter(name: str | Path, *, target: Target) -> MoADrafter:
    """Load a drafter in the target's dtype, on its device.

    Args:
        name: a bundled alias (`moaspec models` lists them), a directory, or a hub id.
        target: the target it will draft for.

    Raises:
        UnknownModelError: nothing of that name.
        CheckpointError: unreadable, damaged, or made for another target.
    """
    directory = bundled_drafters().get(str(name), Path(name))
    if not directory.is_dir():
        directory = _from_hub(str(name))
    drafter = load_checkpoint(directory, target.identity, target.config)
    return drafter.to(device=target.device, dtype=target.dtype)


def _from_hub(name: str) -> Path:
    # Imported here: only hub users pay for it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=["config.json", "model.safetensors"]))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        bundled = ", ".join(bundled_drafters()) or "none"
        raise UnknownModelError(
            f"No drafter {name!r}: not bundled ({bundled}), no directory, and the hub cannot be "
            "asked or does not have it."
        ) from error


def local_engine(
    target: Target,
    drafter: MoADrafter | None = None,
    *,
    num_target_layers: int | None = None,
) -> Engine:
    """An engine with target and drafter in this process."""
    drafting = None
    if drafter is not None:
        drafting = MoADrafting(drafter, target, num_target_layers=num_target_layers)
    verifier = LocalVerifier(target, drafting)
    if drafting is not None:
        drafting.borrow(verifier.cache)
    return Engine(
        verifier,
        drafting,
        vocab_size=target.vocab_size,
        max_positions=target.max_positions,
        rope_switches=target.rope_switches,
    )


class Options(TypedDict, total=False):
    """Keyword arguments of `generate` and `stream`.

    Attributes:
        drafter: proposes tokens; None (the default) decodes plainly.
        max_new_tokens: at most so many per prompt; 64.
        temperature: 0.0, greedy; sampling is not there yet.
        stop_token_ids: ids that end a row; None takes the target's own.
        tree: "auto", "chain:4", "tree:6,8,62", or a `Tree` or `Chain`.
        num_target_layers: N, target layers that the drafter reuses; None takes its default.
    """

    drafter: MoADrafter | None
    max_new_tokens: int
    temperature: float
    stop_token_ids: Iterable[int] | None
    tree: Tree | str
    num_target_layers: int | None


@overload
def generate(
    target: Target, prompt_ids: Sequence[int], **options: Unpack[Options]
) -> GenerationResult: ...
@overload
def generate(
    target: Target, prompt_ids: Sequence[Sequence[int]], **options: Unpack[Options]
) -> list[GenerationResult]: ...
def generate(
    target: Target,
    prompt_ids: Any,
    **options: Unpack[Options],
) -> GenerationResult | list[GenerationResult]:
    """Generate greedily: the same tokens with and without a drafter.

    Args:
        target: the model whose text is produced.
        prompt_ids: token ids, or a list of such lists, which are decoded together.
        **options: see `Options`.

    Returns:
        One result, or a list of them in the prompts' order.

    Raises:
        InputError: bad prompt ids, tree sizes or numbers.
    """
    batched = _is_batch(prompt_ids)
    prompts = list(prompt_ids) if batched else [prompt_ids]
    results = _run(target, [_token_ids(prompt) for prompt in prompts], options)
    return results if batched else results[0]


def stream(
    target: Target, prompt_ids: Sequence[int], **options: Unpack[Options]
) -> Iterator[Event]:
    """Like `generate` for one prompt, yielding verified tokens as each round ends."""
    engine, _ = _start(target, [_token_ids(prompt_ids)], options)

    def events() -> Iterator[Event]:
        while engine.num_active:
            yield from engine.step()

    return events()


def _is_batch(prompt_ids: Any) -> bool:
    """Whether this is a list of prompts; a tensor or array of two dimensions is one too."""
    if len(prompt_ids) == 0:
        return False
    first = prompt_ids[0]
    return first.ndim > 0 if hasattr(first, "ndim") else hasattr(first, "__len__")


def _token_ids(prompt: Any) -> list[int]:
    """One prompt as plain integers."""
    try:
        return [operator.index(token) for token in prompt]
    except TypeError as error:
        raise PromptError(f"A prompt must be a list of integer token ids: {error}.") from error


def _run(
    target: Target, prompts: Sequence[Sequence[int]], options: Options
) -> list[GenerationResult]:
    engine, results = _start(target, prompts, options)
    while engine.num_active:
        engine.step()
    return results


def _start(
    target: Target, prompts: Sequence[Sequence[int]], options: Options
) -> tuple[Engine, list[GenerationResult]]:
    """An engine that all prompts have joined, and their results, which fill as it steps."""
    unknown = set(options) - set(Options.__annotations__)
    if unknown:
        raise TypeError(
            f"Unknown option(s) {sorted(unknown)}; known: {', '.join(Options.__annotations__)}."
        )
    if options.get("temperature", 0.0) != 0.0:
        raise InputError("Only greedy decoding (temperature=0.0) is implemented.")
    stops = options.get("stop_token_ids")
    engine = local_engine(
        target, options.get("drafter"), num_target_layers=options.get("num_target_layers")
    )
    handles = [
        engine.add(
            prompt,
            max_new_tokens=options.get("max_new_tokens", 64),
            stop_token_ids=target.stop_token_ids if stops is None else stops,
            shape=_shape(options.get("tree", "auto")),
        )
        for prompt in prompts
    ]
    return engine, [engine.result(handle) for handle in handles]


def _shape(tree: Tree | str) -> Tree:
    if isinstance(tree, Tree):
        return tree
    if isinstance(tree, str):
        return parse_shape(tree)
    raise InputError(f'tree must be "auto", Tree(...) or Chain(...), got {tree!r}.')
