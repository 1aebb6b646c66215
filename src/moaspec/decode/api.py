"""`generate` and `stream`: thin callers of the engine."""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import overload

from moaspec.decode.engine import Engine
from moaspec.decode.moa import MoADrafting
from moaspec.decode.result import Event, GenerationResult
from moaspec.decode.tree import AUTO, Tree, parse_shape
from moaspec.decode.verifier import LocalVerifier
from moaspec.errors import InputError, UnknownModelError
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
        verifier, drafting, vocab_size=target.vocab_size, max_positions=target.max_positions
    )


@overload
def generate(
    target: Target,
    prompt_ids: Sequence[int],
    *,
    drafter: MoADrafter | None = ...,
    max_new_tokens: int = ...,
    stop_token_ids: Iterable[int] | None = ...,
    tree: Tree | str = ...,
    num_target_layers: int | None = ...,
) -> GenerationResult: ...
@overload
def generate(
    target: Target,
    prompt_ids: Sequence[Sequence[int]],
    *,
    drafter: MoADrafter | None = ...,
    max_new_tokens: int = ...,
    stop_token_ids: Iterable[int] | None = ...,
    tree: Tree | str = ...,
    num_target_layers: int | None = ...,
) -> list[GenerationResult]: ...
def generate(
    target: Target,
    prompt_ids: Sequence[int] | Sequence[Sequence[int]],
    *,
    drafter: MoADrafter | None = None,
    max_new_tokens: int = 64,
    stop_token_ids: Iterable[int] | None = None,
    tree: Tree | str = "auto",
    num_target_layers: int | None = None,
) -> GenerationResult | list[GenerationResult]:
    """Generate greedily; the same tokens with and without a drafter.

    Args:
        target: the model whose text is produced.
        prompt_ids: token ids, or a list of such lists, which are decoded together.
        drafter: proposes tokens; None decodes plainly.
        max_new_tokens: at most so many per prompt.
        stop_token_ids: ids that end a row; None takes the target's own.
        tree: "auto", `Tree(...)` or `Chain(...)`.
        num_target_layers: N, target layers that the drafter reuses; None takes its default.

    Returns:
        One result, or a list of them in the prompts' order.

    Raises:
        InputError: bad prompt ids, tree sizes or numbers.
    """
    batched = len(prompt_ids) > 0 and not isinstance(prompt_ids[0], int)
    prompts: list[Sequence[int]] = list(prompt_ids) if batched else [prompt_ids]  # type: ignore[list-item, arg-type]
    engine = local_engine(target, drafter, num_target_layers=num_target_layers)
    stops = target.stop_token_ids if stop_token_ids is None else frozenset(stop_token_ids)
    handles = [
        engine.add(prompt, max_new_tokens=max_new_tokens, stop_token_ids=stops, shape=_shape(tree))
        for prompt in prompts
    ]
    results = [engine.result(handle) for handle in handles]
    while engine.num_active:
        engine.step()
    return results if batched else results[0]


def stream(
    target: Target,
    prompt_ids: Sequence[int],
    *,
    drafter: MoADrafter | None = None,
    max_new_tokens: int = 64,
    stop_token_ids: Iterable[int] | None = None,
    tree: Tree | str = "auto",
    num_target_layers: int | None = None,
) -> Iterator[Event]:
    """Like `generate` for one prompt, yielding verified tokens as each round ends.

    The generator returns the `GenerationResult`; closing it early frees the row.
    """
    engine = local_engine(target, drafter, num_target_layers=num_target_layers)
    stops = target.stop_token_ids if stop_token_ids is None else frozenset(stop_token_ids)
    engine.add(prompt_ids, max_new_tokens=max_new_tokens, stop_token_ids=stops, shape=_shape(tree))
    while engine.num_active:
        yield from engine.step()


def _shape(tree: Tree | str) -> Tree:
    if isinstance(tree, Tree):
        return tree
    if isinstance(tree, str):
        return AUTO if tree == "auto" else parse_shape(tree)
    raise InputError(f'tree must be "auto", Tree(...) or Chain(...), got {tree!r}.')
