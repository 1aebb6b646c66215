"""Ways of decoding, to be measured side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moaspec.decode import GenerationResult, Tree, generate, parse_shape
from moaspec.decode.shaping import FreeBranches
from moaspec.errors import InputError
from moaspec.model import MoADrafter
from moaspec.target import Target

COPIES: dict[str, FreeBranches] = {"": "auto", "copy": True, "nocopy": False}


@dataclass(frozen=True)
class Run:
    """One decoding of one prompt. Seconds are wall-clock, prompt included."""

    token_ids: list[int]
    seconds: float
    result: GenerationResult | None = None


@dataclass(frozen=True)
class Method:
    """A way of decoding greedily.

    Attributes:
        name: as the user wrote it.
        target: what decodes.
        drafter: None for plain decoding and for transformers.
        shape: of the drafts, or "auto"; None for transformers' own `generate`.
        free_branches: see `moaspec.generate`.
    """

    name: str
    target: Target
    drafter: MoADrafter | None = None
    shape: Tree | str | None = None
    free_branches: FreeBranches = "auto"

    def run(self, prompt_ids: Sequence[int], max_new_tokens: int) -> Run:
        """Decode, timed."""
        started = time.perf_counter()
        if self.shape is None:
            ids, result = self._transformers(prompt_ids, max_new_tokens), None
        else:
            result = generate(
                self.target,
                prompt_ids,
                drafter=self.drafter,
                max_new_tokens=max_new_tokens,
                tree=self.shape,
                free_branches=self.free_branches,
            )
            ids = result.token_ids
        return Run(ids, time.perf_counter() - started, result)

    def _transformers(self, prompt_ids: Sequence[int], max_new_tokens: int) -> list[int]:
        ids_1T = torch.tensor([list(prompt_ids)], device=self.target.device)
        model: Any = self.target.model
        output = model.generate(
            input_ids=ids_1T,
            attention_mask=torch.ones_like(ids_1T),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=sorted(self.target.stop_token_ids) or None,
        )
        return [int(token) for token in output[0, len(prompt_ids) :]]


def parse_methods(
    names: Sequence[str],
    target: Target,
    drafter: MoADrafter | None,
    *,
    stock: Callable[[], Target] | None = None,
) -> list[Method]:
    """Read method names: `hf`, `plain`, `moa`, `moa@chain:4`, `moa@tree:6x8x62`, `moa@auto+copy`.

    `+copy` adds free branches and `+nocopy` forbids them; without either, `moa` has them where the
    machine was measured and they pay.

    Args:
        names: the names.
        target: decodes all of our methods.
        drafter: drafts for them; None when no method needs one.
        stock: loads the target as transformers alone would, for `hf`, so that it is compared as its
            users have it; None lets it run on `target`.

    Raises:
        InputError: an unknown name, or a drafter that is missing.
    """
    if not names:
        raise InputError("Name at least one method: hf, plain, moa or moa@SHAPE.")
    return [
        _parse(name, stock() if stock is not None and name == "hf" else target, drafter)
        for name in names
    ]


def _parse(name: str, target: Target, drafter: MoADrafter | None) -> Method:
    rest, plus, copies = name.partition("+")
    kind, _, shape = rest.partition("@")
    tree = "auto" if shape in ("", "auto") else parse_shape(shape)
    if name == "hf":
        return Method(name, target)
    if name == "plain":
        return Method(name, target, shape=tree)
    if kind == "moa" and copies in COPIES and bool(plus) == bool(copies):
        if drafter is None:
            raise InputError(f"Method {name!r} needs a drafter; give one with --drafter.")
        return Method(name, target, drafter, tree, COPIES[copies])
    raise InputError(
        f"Unknown method {name!r}; use hf, plain, moa or moa@SHAPE, the last two with +copy or "
        "+nocopy if you like."
    )
