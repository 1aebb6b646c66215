"""Errors of device, disk and other processes, with advice on how to continue."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from safetensors import SafetensorError
from torch.distributed import DistError

from moaspec_core.errors import TrainingError
from moaspec_core.support.causes import first_line


@contextmanager
def explain_failures(what: str, intact: Callable[[], str]) -> Iterator[None]:
    """Raise a `TrainingError` that says how to continue after such a failure.

    Args:
        what: what the run was doing.
        intact: called after a failure; returns a sentence about the saved state.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise TrainingError(
            f"Out of memory {what}: {_cause(error)}. {intact()} Run the same command again "
            "with smaller batches, or fewer of their tokens at once."
        ) from error
    except RuntimeError as error:
        # Gloo raises plain RuntimeErrors.
        lost = isinstance(error, torch.AcceleratorError | DistError) or "gloo" in str(error).lower()
        if not lost:
            raise
        raise TrainingError(
            f"The device, or another process, failed {what}: {_cause(error)}. {intact()} Run "
            "the same command again when it is back, or elsewhere with the same files."
        ) from error
    except (OSError, SafetensorError) as error:
        raise TrainingError(
            f"A file could not be read or written {what}: {_cause(error)}. {intact()} Make "
            "room and run the same command again."
        ) from error


def _cause(error: Exception) -> str:
    """Without the advice and the stack of CUDA's messages."""
    return first_line(error).rstrip(".")
