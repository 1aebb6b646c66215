"""PyTorch's settings of a process, where PyTorch is loaded; this package works without it."""

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

PROCESS_SETTINGS = threading.RLock()
"""Held while transformers builds a model (torch's default dtype is then its own) or is patched."""


@contextmanager
def plain_torch() -> Iterator[None]:
    """Disable autocast; make float32 the default dtype and the CPU the default device.

    Passes then compute in the dtype of their weights under any settings of the caller. Settings
    are global, so never `yield` to a caller or `await` inside. Does nothing in a process without
    PyTorch.
    """
    if "torch" not in sys.modules:
        yield
        return
    import torch

    made = torch.empty(0)  # takes less time than `torch.get_default_device`
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if made.dtype != torch.float32:
            stack.enter_context(PROCESS_SETTINGS)
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float32)
        if made.device.type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield
