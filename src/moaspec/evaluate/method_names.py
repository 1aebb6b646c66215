"""The names of methods: `KIND[:SETTING][@SHAPE][+copy]`, and what each kind needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moaspec.drafting.draft_tree import Tree, parse_shape
from moaspec.drafting.ngram_proposer import NgramProposer
from moaspec.drafting.policy.policies import FreeBranches
from moaspec.drafting.protocols import Drafter
from moaspec.errors import InputError
from moaspec.evaluate.methods import Method, ReplayMethod, TransformersMethod
from moaspec.model.moa import MoADrafter
from moaspec.target.target import Target

LOOKUP_TOKENS = 10
"""Drafts of transformers' prompt lookup, the number its documentation uses."""


COPIES: dict[str, FreeBranches] = {"": "auto", "copy": True, "nocopy": False}
"""What may stand after the plus."""


@dataclass(frozen=True, kw_only=True)
class MethodParts:
    """What methods are made of.

    Attributes:
        target: decodes all of our methods.
        checkpoints: what was loaded for kinds that need a checkpoint, by kind.
        stock: loads the target as transformers alone would, so that transformers' methods are
            compared as their users have them; None lets them run on `target`.
    """

    target: Target
    checkpoints: Mapping[str, Any] = field(default_factory=dict)
    stock: Callable[[], Target] | None = None


@dataclass(frozen=True)
class Spec:
    """A method's name, read."""

    name: str
    kind: str
    setting: str
    shape: Tree | str
    free_branches: FreeBranches


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One row of the table.

    Attributes:
        make: builds the method of a spec; the last argument is the kind's checkpoint, if any.
        help: for messages.
        shaped: drafts, so it takes `@SHAPE`, and `+copy` or `+nocopy`.
        setting: what stands after the colon; empty: nothing may.
        checkpoint: needs one.
        stock: runs on the target as transformers loads it.
    """

    make: Callable[[Spec, Target, Any], Method]
    help: str
    shaped: bool = False
    setting: str = ""
    checkpoint: bool = False
    stock: bool = False


def _hf(spec: Spec, target: Target, _: Any) -> Method:
    return TransformersMethod(spec.name, target)


def _hf_lookup(spec: Spec, target: Target, _: Any) -> Method:
    options = (("prompt_lookup_num_tokens", LOOKUP_TOKENS),)
    return TransformersMethod(spec.name, target, options=options)


def _hf_assisted(spec: Spec, target: Target, assistant: Target) -> Method:
    return TransformersMethod(spec.name, target, options=(("assistant_model", assistant.model),))


def _plain(spec: Spec, target: Target, _: Any) -> Method:
    return Method(spec.name, target)


def _lookup(spec: Spec, target: Target, _: Any) -> Method:
    return Method(spec.name, target, NgramProposer(), spec.shape, free_branches=spec.free_branches)


def _replay(spec: Spec, target: Target, _: Any) -> Method:
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
        spec.name,
        target,
        shape=spec.shape,
        free_branches=spec.free_branches,
        agreement=agreement,
    )


def _drafted(spec: Spec, target: Target, drafter: Drafter) -> Method:
    return Method(spec.name, target, drafter, spec.shape, free_branches=spec.free_branches)


def _moa(spec: Spec, target: Target, drafter: MoADrafter) -> Method:
    layers = _num_layers(spec, target) if spec.setting else None
    return Method(spec.name, target, drafter, spec.shape, layers, spec.free_branches)


def _num_layers(spec: Spec, target: Target) -> int:
    digits = spec.setting.removeprefix("n")
    if spec.setting[:1] != "n" or not digits.isdecimal() or int(digits) > target.num_layers:
        raise InputError(
            f"Method {spec.name!r}: write the number of reused target layers as n0 to "
            f"n{target.num_layers}, for example moa:n1@chain:4."
        )
    return int(digits)


KINDS: dict[str, Kind] = {
    "hf": Kind(make=_hf, stock=True, help="transformers' generate"),
    "hf-lookup": Kind(make=_hf_lookup, stock=True, help="transformers' prompt lookup"),
    "hf-assisted": Kind(
        make=_hf_assisted, stock=True, checkpoint=True, help="transformers' assisted generation"
    ),
    "plain": Kind(make=_plain, help="this package without drafts"),
    "lookup": Kind(make=_lookup, shaped=True, help="prompt lookup"),
    "replay": Kind(
        make=_replay, shaped=True, setting="AGREEMENT", help="drafts of a set agreement"
    ),
    "moa": Kind(
        make=_moa, shaped=True, setting="nN", checkpoint=True, help="Mixture of Attentions"
    ),
    "eagle": Kind(make=_drafted, shaped=True, checkpoint=True, help="EAGLE-2's draft head"),
    "independent": Kind(make=_drafted, shaped=True, checkpoint=True, help="a small model"),
}
"""A new way of decoding is a row here."""


def needed_checkpoints(names: Sequence[str]) -> set[str]:
    """Kinds among these methods that cannot do without a checkpoint."""
    kinds = {_kind_name(name) for name in names}
    return {kind for kind in kinds if kind in KINDS and KINDS[kind].checkpoint}


def require_known_noise(names: Sequence[str], temperature: float) -> None:
    """Refuse methods that sample with noise of their own: nobody knows which text is right.

    Args:
        names: of methods; the first one that cannot be judged is named.
        temperature: at 0 there is no noise.

    Raises:
        InputError: there is such a method.
    """
    for name in names if temperature else ():
        kind = KINDS.get(_kind_name(name))
        if kind is not None and kind.stock:
            raise InputError(
                f"{name} samples with noise of its own, so nobody knows which text is right: name "
                "other methods, or measure at temperature 0."
            )


def parse_methods(names: Sequence[str], parts: MethodParts) -> list[Method]:
    """Read method names, for example `hf`, `plain`, `moa`, `moa:n1@chain:4`, `replay:0.8`.

    `+copy` adds free branches, as in `moa@auto+copy`, and `+nocopy` forbids them; without either,
    drafters have them where the machine was measured and they pay.

    Args:
        names: the names; each once.
        parts: what they are made of.

    Raises:
        InputError: an unknown name, one that occurs twice, or a checkpoint that is missing.
    """
    specs = require_methods(
        names, {kind for kind, one in parts.checkpoints.items() if one is not None}
    )
    stock = None
    if any(KINDS[spec.kind].stock for spec in specs):
        stock = parts.target if parts.stock is None else parts.stock()
    return [_made(spec, parts, stock) for spec in specs]


def require_methods(names: Sequence[str], checkpoints: Collection[str]) -> list[Spec]:
    """Read method names, so that wrong ones are refused before anything is loaded.

    Args:
        names: see `parse_methods`.
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
    """All names, for messages."""
    return ", ".join(
        name
        + (f"[:{kind.setting}]" if kind.setting else "")
        + ("[@SHAPE][+copy|+nocopy]" if kind.shaped else "")
        for name, kind in KINDS.items()
    )


def _kind_name(name: str) -> str:
    return name.partition("+")[0].partition("@")[0].partition(":")[0]


def _spec(name: str) -> Spec:
    rest, plus, copies = name.partition("+")
    head, at, shape = rest.partition("@")
    kind_name, colon, setting = head.partition(":")
    kind = KINDS.get(kind_name)
    if kind is None or ((at or plus) and not kind.shaped) or (colon and not kind.setting):
        raise InputError(f"Unknown method {name!r}; use {usage()}.")
    if copies not in COPIES or bool(plus) != bool(copies):
        raise InputError(f"Method {name!r}: after the plus write copy or nocopy, not {copies!r}.")
    tree = parse_shape(shape) if at and shape != "auto" else "auto"
    return Spec(name, kind_name, setting, tree, COPIES[copies])


def _made(spec: Spec, parts: MethodParts, stock: Target | None) -> Method:
    kind = KINDS[spec.kind]
    target = parts.target if not kind.stock else stock
    assert target is not None, "loaded wherever a kind wants it"
    return kind.make(spec, target, parts.checkpoints.get(spec.kind))
