"""Checks of the token ids and other integers that callers give."""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from moaspec_core.errors import InputError


def as_integer(name: str, value: Any, *, high: int | None = None, hint: str = "") -> int:
    """A whole number of at least 0; scalars of numpy and torch are taken as well.

    Args:
        value: what was given. True and False are no numbers.
        high: the largest allowed value.
        hint: for the message, in parentheses.

    Raises:
        InputError: something else, or out of range.
    """
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if number < 0 or (high is not None and number > high):
        bounds = "of at least 0" if high is None else f"within 0..{high}"
        raise InputError(
            f"{name} must be an integer {bounds}{f' ({hint})' if hint else ''}, got {value!r}."
        )
    return number


def as_token_ids(name: str, values: Iterable[Any]) -> frozenset[int]:
    """Several token ids as a set; InputError for anything else."""
    if not isinstance(values, Iterable):
        raise InputError(f"{name} must be a list of token ids, got {values!r}.")
    return frozenset(as_integer(f"Every one of {name}", value) for value in values)


def common_length(a: Sequence[object], b: Sequence[object]) -> int:
    """The length of the longest common prefix of two texts, in tokens or characters."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
