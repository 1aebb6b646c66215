"""Names of methods, `KIND[:SETTING][@SHAPE][+copy]`, and the requirements of each kind."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moaspec.evaluate.methods import Method, ReplayMethod, TransformersMethod
from moaspec.model.baselines import KINDS as BASELINES
from moaspec.model.moa import MoADrafter
from moaspec.target.target import Target
from moaspec_core.drafting.draft_tree import Tree
from moaspec_core.drafting.ngram_proposer import NgramProposer
from moaspec_core.drafting.protocols import Proposer
from moaspec_core.drafting.tree_shapes import parse_shape
from moaspec_core.errors import InputError
from moaspec_core.policy.policies import FreeBranches

LOOKUP_TOKENS = 10  # drafts of transformers' prompt lookup, as in its documentation

FREE_BRANCHES: dict[str, FreeBranches] = {"": "auto", "copy": True, "nocopy": False}
"""Values after the plus."""


@dataclass(frozen=True, kw_only=True)
class MethodResources:
    """Models of the methods."""

    target: Target
    # Loaded models, by the kind of method that needs one.
    checkpoints: Mapping[str, Any] = field(default_factory=dict)
    # Loads the target as transformers alone does, for transformers' methods; None takes `target`.
    stock: Callable[[], Target] | None = None


@dataclass(frozen=True)
class MethodSpec:
    """A parsed method name."""

    name: str
    kind: str
    setting: str
    shape: Tree | str
    free_branches: FreeBranches


@dataclass(frozen=True)
class MethodKind:
    """A kind of method."""

    # Builds the method from spec, target and the kind's checkpoint, if any.
    make: Callable[[MethodSpec, Target, Any], Method]
    shaped: bool = False  # whether it takes `@SHAPE`, and `+copy` or `+nocopy`
    setting: str = ""  # name of the value after the colon; "" for none
    checkpoint: bool = False  # whether it needs a checkpoint
    stock: bool = False  # whether it runs on the target as transformers loads it


def _hf(spec: MethodSpec, target: Target, assistant: Target | None) -> Method:
    options: dict[str, Any] = {}
    if spec.kind == "hf-lookup":
        options["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
    elif assistant is not None:
        options["assistant_model"] = assistant.model
    return TransformersMethod(spec.name, target, options=tuple(options.items()))


def _replay(spec: MethodSpec, target: Target, _: Any) -> Method:
    try:
        agreement = float(spec.setting or 1.0)
    except ValueError:
        agreement = -1.0
    if not 0.0 <= agreement <= 1.0:
        raise InputError(
            f"Method {spec.name!r}: the agreement must be a number within 0..1, such as "
            f"replay:0.8@chain:4."
        )
    return ReplayMethod(
        spec.name, target, None, spec.shape, None, spec.free_branches, agreement=agreement
    )


def _method(spec: MethodSpec, target: Target, drafter: MoADrafter | Proposer | None) -> Method:
    if spec.kind == "plain":
        return Method(spec.name, target)
    if spec.kind == "lookup":
        drafter = NgramProposer()
    layers = _num_layers(spec, target) if spec.setting else None
    return Method(spec.name, target, drafter, spec.shape, layers, spec.free_branches)


def _num_layers(spec: MethodSpec, target: Target) -> int:
    digits = spec.setting.removeprefix("n")
    if (
        spec.setting[:1] != "n"
        or not digits.isdecimal()
        or int(digits) > target.num_reusable_layers
    ):
        raise InputError(
            f"Method {spec.name!r}: write the number of reused target layers as n0 to "
            f"n{target.num_reusable_layers}, for example moa:n1@chain:4."
        )
    return int(digits)


KINDS = {
    "hf": MethodKind(_hf, stock=True),
    "hf-lookup": MethodKind(_hf, stock=True),
    "hf-assisted": MethodKind(_hf, stock=True, checkpoint=True),
    "plain": MethodKind(_method),
    "lookup": MethodKind(_method, shaped=True),
    "replay": MethodKind(_replay, shaped=True, setting="AGREEMENT"),
    "moa": MethodKind(_method, shaped=True, setting="nN", checkpoint=True),
    **dict.fromkeys(BASELINES, MethodKind(_method, shaped=True, checkpoint=True)),
}
"""All kinds of methods, which docs/evaluation.md explains; add new ones here, but for kinds of
drafters."""


def needed_checkpoints(names: Sequence[str]) -> set[str]:
    """Kinds among these methods that need a checkpoint."""
    kinds = {_kind_name(name) for name in names}
    return {kind for kind in kinds if kind in KINDS and KINDS[kind].checkpoint}


def require_known_noise(names: Sequence[str], temperature: float) -> None:
    """InputError for methods that sample with noise of their own: no text can be expected."""
    for name in names if temperature else ():
        kind = KINDS.get(_kind_name(name))
        if kind is not None and kind.stock:
            raise InputError(
                f"{name} samples with noise of its own, so nobody knows which text is right: name "
                "other methods, or measure at temperature 0."
            )


def parse_methods(names: Sequence[str], parts: MethodResources) -> list[Method]:
    """Parse method names, for example `hf`, `plain`, `moa`, `moa:n1@chain:4`, `replay:0.8`.

    `+copy` adds n-gram branches, as in `moa@auto+copy`, and `+nocopy` forbids them. By default
    drafters have them if the machine is calibrated and they pay.

    Raises:
        InputError: an unknown name, a repeated name, or a missing checkpoint.
    """
    given = {kind for kind, checkpoint in parts.checkpoints.items() if checkpoint is not None}
    specs = require_methods(names, given)
    stock = parts.target
    if parts.stock is not None and any(KINDS[spec.kind].stock for spec in specs):
        stock = parts.stock()
    return [
        KINDS[spec.kind].make(
            spec,
            stock if KINDS[spec.kind].stock else parts.target,
            parts.checkpoints.get(spec.kind),
        )
        for spec in specs
    ]


def require_methods(names: Sequence[str], checkpoints: Collection[str]) -> list[MethodSpec]:
    """Read method names, so that wrong ones are refused before anything is loaded.

    Args:
        checkpoints: kinds of method that have a checkpoint.

    Raises:
        InputError: see `parse_methods`.
    """
    if not names:
        raise InputError(f"Name at least one method: {usage()}.")
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise InputError(f"Method {sorted(twice)[0]!r} is named twice; once is enough.")
    specs = [_spec(name) for name in names]
    for spec in specs:
        if KINDS[spec.kind].checkpoint and spec.kind not in checkpoints:
            how = "--drafter DIR" if spec.kind == "moa" else f"--checkpoint {spec.kind}=DIR"
            raise InputError(f"Method {spec.name!r} needs a checkpoint; give one with {how}.")
    return specs


def usage() -> str:
    """The syntax of all names, for messages."""
    return ", ".join(
        name
        + (f"[:{kind.setting}]" if kind.setting else "")
        + ("[@SHAPE][+copy|+nocopy]" if kind.shaped else "")
        for name, kind in KINDS.items()
    )


def _kind_name(name: str) -> str:
    return name.partition("+")[0].partition("@")[0].partition(":")[0]


def _spec(name: str) -> MethodSpec:
    rest, plus, copies = name.partition("+")
    head, at, shape = rest.partition("@")
    kind_name, colon, setting = head.partition(":")
    kind = KINDS.get(kind_name)
    if kind is None or ((at or plus) and not kind.shaped) or (colon and not kind.setting):
        raise InputError(f"Unknown method {name!r}; use {usage()}.")
    if copies not in FREE_BRANCHES or bool(plus) != bool(copies):
        raise InputError(f"Method {name!r}: after the plus write copy or nocopy, not {copies!r}.")
    tree = parse_shape(shape) if at and shape != "auto" else "auto"
    return MethodSpec(name, kind_name, setting, tree, FREE_BRANCHES[copies])
