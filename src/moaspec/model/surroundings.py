"""What callers set for all of torch, held off from our own passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_AUTOCAST = ("cpu", "cuda")


@contextmanager
def plain_torch() -> Iterator[None]:
    """No autocast, float32 and the CPU as defaults, whatever holds outside.

    Passes are exact in the dtype of their weights, so that a text does not depend on who calls. To
    be entered around what runs at once, never across a `yield` or an `await`.
    """
    with ExitStack() as stack:
        for kind in _AUTOCAST:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_dtype() != torch.float32:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float32)
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield
