"""Run torch code independently of the caller's global torch settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_AUTOCAST = ("cpu", "cuda")


@contextmanager
def plain_torch() -> Iterator[None]:
    """Disable autocast; make float32 the default dtype and the CPU the default device.

    Passes then compute in the dtype of their weights. These settings are global, so never `yield`
    to a caller or `await` inside.
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
