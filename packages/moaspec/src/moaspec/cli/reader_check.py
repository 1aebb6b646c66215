"""Whether the target's GGUF file is read as llama.cpp reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moaspec_core.cli import options
from moaspec_core.cli.terminal import console
from moaspec_core.cli.terminal.status import status

if TYPE_CHECKING:
    from moaspec.evaluate.correctness.llama_cpp import ReaderCheck


def check_reader(
    asked: options.LoadOptions, token_ids: Sequence[int], *, quiet: bool
) -> ReaderCheck | None:
    """Compare the readers and print the verdict; None where the target is no GGUF file.

    Args:
        asked: the target; without adapter and rounding, which llama.cpp does not know.
        token_ids: any text of the target.
        quiet: print nothing.
    """
    from moaspec.backends.load import load_target
    from moaspec.evaluate.correctness.llama_cpp import ReaderCheck, compare_readers, why_not
    from moaspec.target.registry import find_target_gguf

    gguf = find_target_gguf(asked.model)
    if gguf is None:
        return None
    reason = why_not()
    if reason is not None:
        found = ReaderCheck("unknown", reason)
    else:
        said = "Comparing with llama.cpp how the GGUF is read"
        with status(said) as shown:
            target = load_target(
                asked.model, dtype="float32", packed=False, tokenizer=asked.tokenizer
            )
            found = compare_readers(
                target.model, gguf, token_ids, told=lambda doing: shown.update(f"{said}: {doing}")
            )
    if not quiet:
        style = {"same": "green", "different": "bold red", "unknown": ""}[found.verdict]
        console.print_wrapped(str(found), style)
    return found
