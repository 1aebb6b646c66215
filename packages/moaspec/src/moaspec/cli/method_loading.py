"""Loading the methods of `eval` and `demo`, and turning prompts into token ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Literal

import torch

from moaspec.backends.load import load_target
from moaspec.cli.loading import choose_drafter
from moaspec.drafting.proposer_checks import check_trained
from moaspec.evaluate.method_names import (
    KINDS,
    MethodResources,
    needed_checkpoints,
    parse_methods,
    require_methods,
)
from moaspec.evaluate.methods import Method
from moaspec.evaluate.runner import Encode
from moaspec.generation.drafters import (
    check_any_drafter,
    check_drafter,
    load_any_drafter,
    read_drafter,
)
from moaspec.model.moa import MoADrafter
from moaspec.target.registry import read_skeleton
from moaspec.target.target import Target
from moaspec_core.bundled import bundled_drafters
from moaspec_core.cli.prompts import message_ids
from moaspec_core.errors import InputError


@dataclass(frozen=True)
class MethodSources:
    """The models that methods need, and their settings."""

    model: str
    dtype: str
    drafter: str | None = None
    checkpoints: Mapping[str, str] = field(default_factory=dict)
    device: str = "cpu"
    quantize: str | None = None
    adapter: str | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    generation_config: Literal["auto"] | None = "auto"


def check_methods(names: Sequence[str], sources: MethodSources) -> None:
    """Check methods, settings and checkpoints, before any weights of the target are read.

    Raises:
        InputError: an unknown method, one without its checkpoint, a checkpoint without its method,
            or an N that the drafter was not trained for.
        UnknownModelError: no target or drafter of a name.
    """
    drafter = sources.drafter
    if drafter is None and sources.model in bundled_drafters():
        drafter = sources.model
    checkpoints = {**({} if drafter is None else {"moa": drafter}), **sources.checkpoints}
    specs, kinds = require_methods(names, checkpoints.keys()), needed_checkpoints(names)
    _require_used(sources.checkpoints, kinds)
    for kind, name in checkpoints.items():
        if kind == "hf-assisted":
            read_skeleton(name, dtype="float32")
        elif kind in kinds:
            check_any_drafter(name, sources.model, tokenizer=sources.tokenizer)
    for spec in specs:
        if spec.setting:
            skeleton = read_skeleton(sources.model, dtype="float32", tokenizer=sources.tokenizer)
            method = KINDS[spec.kind].make(spec, skeleton, None)
            if spec.kind == "moa":
                check_drafter(checkpoints["moa"], sources.model, tokenizer=sources.tokenizer)
                read = read_drafter(checkpoints["moa"], target=skeleton)
                if isinstance(read, MoADrafter):
                    check_trained(method.num_target_layers, read.config, f"Method {spec.name!r}")


def load_methods(names: Sequence[str], sources: MethodSources) -> list[Method]:
    """Load the target and the checkpoints, and build the methods, which `check_methods` checked."""
    kinds = needed_checkpoints(names)
    target = _target(sources)
    return parse_methods(
        names,
        MethodResources(
            target=target,
            checkpoints=_load_checkpoints(kinds, sources, target),
            stock=lambda: _target(sources, packed=False),
        ),
    )


def load_reference_target(methods: Sequence[Method], sources: MethodSources) -> Target:
    """Load the target as transformers alone loads it, which decides which texts are right.

    A method's target is reused where it is loaded so. In float32 any target does.
    """
    targets = [method.target for method in methods]
    as_loaded = [target for target in targets if not target.packed]
    if as_loaded or targets[0].dtype == torch.float32:
        return (as_loaded or targets)[0]
    return _target(sources, packed=False)


def _target(sources: MethodSources, *, packed: bool = True) -> Target:
    return load_target(
        sources.model,
        dtype=sources.dtype,
        device=sources.device,
        packed=packed,
        quantize=sources.quantize,
        adapter=sources.adapter,
        tokenizer=sources.tokenizer,
        chat_template=sources.chat_template,
        generation_config=sources.generation_config,
    )


def read_checkpoints(options: Sequence[str]) -> dict[str, str]:
    """`KIND=DIR` of each option; InputError for another form, or a kind that takes none."""
    pairs = [option.partition("=") for option in options]
    wrong = [option for option, pair in zip(options, pairs, strict=True) if not pair[2]]
    if wrong:
        raise InputError(f"--checkpoint must be KIND=DIR, got {wrong[0]!r}.")
    takes = sorted(needed_checkpoints(list(KINDS)))
    unknown = [kind for kind, _, _ in pairs if kind not in takes]
    if unknown:
        raise InputError(f"--checkpoint is of one of {', '.join(takes)}; got {unknown[0]!r}.")
    return {kind: path for kind, _, path in pairs}


def _require_used(checkpoints: Mapping[str, str], kinds: set[str]) -> None:
    if unused := sorted(checkpoints.keys() - kinds):
        raise InputError(
            f"--checkpoint {unused[0]}=... is not used: --methods names no {unused[0]}."
        )


def _load_checkpoints(kinds: set[str], sources: MethodSources, target: Target) -> dict[str, Any]:
    """Drafters by kind of method; another target where transformers drafts with one."""
    loaded: dict[str, Any] = {}
    if "moa" in kinds:
        loaded["moa"] = choose_drafter(sources.drafter, sources.model, target)
    for kind, path in sources.checkpoints.items():
        if kind == "hf-assisted":
            loaded[kind] = load_target(
                path, dtype=sources.dtype, device=sources.device, packed=False
            )
        else:
            loaded[kind] = load_any_drafter(path, target=target)
    return loaded


def chat_encoder(target: Target) -> Encode:
    """How turns and answers become prompt ids."""

    def encode(turns: Sequence[str], answers: Sequence[Sequence[int]]) -> list[int]:
        messages = list[dict[str, str]]()
        tokenizer: Any = target.tokenizer
        for turn, answer in zip_longest(turns, answers):
            messages.append({"role": "user", "content": turn})
            if answer is not None:
                text = tokenizer.decode(answer, skip_special_tokens=True)
                messages.append({"role": "assistant", "content": text})
        return message_ids(target, messages)

    return encode
