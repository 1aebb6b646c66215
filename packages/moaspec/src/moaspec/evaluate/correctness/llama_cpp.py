"""Compare how a GGUF file is read with how llama.cpp reads it.

llama.cpp runs a copy that is not quantised (`first_layers.py`), so that it rounds little.

Legend: P positions, V vocabulary.
"""

import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any, Literal

import torch
from torch import Tensor

from moaspec.evaluate.correctness.first_layers import write_first_layers
from moaspec_core.errors import MoaSpecError
from moaspec_core.support.causes import first_line

INSTALL = "pip install xllamacpp"
PROCESS = "moaspec.evaluate.correctness.llama_cpp_process"
NUM_POSITIONS, NUM_BEST = 50, 20
LENGTH = 256
"""Tokens of the text: the later a position, the more a wrong rotation turns it."""
LIMIT = 5e-5
"""Nats of the mean KL divergence that the rounding of the head explains."""
WHOLE_LIMIT = 0.02
"""The same where all layers round: 0.0024 for SmolLM2 in Q4_1, 0.0008 for Qwen 2.5 in Q4_K_M."""
TIMEOUT_S = 600.0


Verdict = Literal["same", "different", "unknown"]


@dataclass(frozen=True)
class ReaderCheck:
    """How our reading of a file compares with llama.cpp's.

    Args:
        verdict: "unknown" if llama.cpp could not be asked.
        reason: why it is unknown, or "".
        largest: largest difference of log-probabilities of llama.cpp's likeliest tokens.
        count: number of positions.
        mean: mean KL divergence from llama.cpp's distributions, in nats.
        limit: the mean that rounding explains.
    """

    verdict: Verdict
    reason: str = ""
    count: int = 0
    largest: float = 0.0
    mean: float = 0.0
    limit: float = 0.0

    def __str__(self) -> str:
        if self.verdict == "unknown":
            return f"The GGUF's reading was not compared with llama.cpp's: {self.reason}"
        measured = (
            f"{self.count} tokens, log-probabilities up to {self.largest:.2g} apart, mean KL "
            f"{self.mean:.2g} (rounding: up to {self.limit:g})"
        )
        if self.verdict == "same":
            return f"The GGUF is read as llama.cpp reads it: {measured}."
        return (
            f"Wrong: the reader of GGUF files reads this one otherwise than llama.cpp: {measured}. "
            "Name the model's directory or hub id instead, and report it."
        )


def why_not() -> str | None:
    """Why llama.cpp cannot be asked here; None if it can."""
    found = importlib.util.find_spec("xllamacpp")
    return f"it is not installed ({INSTALL})." if found is None else None


def compare_readers(
    model: Any,
    gguf: Path,
    token_ids: Sequence[int],
    *,
    told: Callable[[str], None] = lambda _: None,
) -> ReaderCheck:
    """Compare the last positions of a text.

    Args:
        model: transformers' model in float32, of the weights that were read.
        gguf: the file, or its first part.
        token_ids: any text; at most LENGTH of its tokens are used.
        told: is told of each step.
    """
    ids = list(token_ids[:LENGTH])
    count = min(NUM_POSITIONS, len(ids))
    with TemporaryDirectory(prefix="moaspec-") as directory:
        copy = Path(directory) / "first-layers.gguf"
        try:
            told("copying the first layers")
            layers = write_first_layers(gguf, copy)
            told(f"llama.cpp reads {'all' if layers is None else layers} layers")
            theirs = log_probabilities(
                gguf if layers is None else copy,
                ids,
                num_positions=count,
                num_best=NUM_BEST,
                advance=lambda done: told(f"{done} of {count} tokens by llama.cpp"),
            )
        except (MoaSpecError, OSError) as error:
            return ReaderCheck("unknown", first_line(error))
    told("the same tokens by transformers")
    limit = WHOLE_LIMIT if layers is None else LIMIT
    with _first_layers(model.config, layers), torch.inference_mode():
        ids_1T = torch.tensor([ids], device=model.device)
        logits_PV = model(ids_1T, use_cache=False, logits_to_keep=count).logits[0]
    ours_PV = logits_PV.float().log_softmax(-1).cpu()
    rows = [_difference(row_V, best) for row_V, best in zip(ours_PV, theirs, strict=True)]
    largest = max(largest for largest, _ in rows)
    mean = sum(divergence for _, divergence in rows) / count
    # Not `mean > limit`, which is false for NaN.
    verdict: Verdict = "same" if mean <= limit else "different"
    return ReaderCheck(verdict, "", count, largest, mean, limit)


@contextmanager
def _first_layers(config: Any, layers: int | None) -> Iterator[None]:
    """Let a model run its first layers only; None runs all."""
    all_layers = config.num_hidden_layers
    config.num_hidden_layers = layers or all_layers
    try:
        yield
    finally:
        config.num_hidden_layers = all_layers


def _difference(ours_V: Tensor, theirs: dict[int, float]) -> tuple[float, float]:
    """Largest difference and KL divergence, the rest of the vocabulary taken as one token."""
    chosen = ours_V[list(theirs)].double()
    given = torch.tensor(list(theirs.values()), dtype=torch.float64)
    rests = [(1 - part.exp().sum()).clamp(min=1e-9).log()[None] for part in (chosen, given)]
    ours, other = (torch.cat(pair) for pair in zip((chosen, given), rests, strict=True))
    divergence = (other.exp() * (other - ours)).sum()
    return float((chosen - given).abs().max()), float(divergence)


def log_probabilities(
    gguf: Path,
    token_ids: Sequence[int],
    *,
    num_positions: int,
    num_best: int,
    advance: Callable[[int], None] = lambda _: None,
) -> list[dict[int, float]]:
    """llama.cpp's likeliest next tokens after each of the last positions of a text.

    It runs in a process of its own, with the file mapped into memory.

    Args:
        advance: is told the number of positions so far.

    Raises:
        MoaSpecError: it cannot run the file, or is not installed.
    """
    asked = {
        "model": str(gguf),
        "token_ids": list(token_ids),
        "start": len(token_ids) - num_positions + 1,
        "num_best": num_best,
        "threads": torch.get_num_threads(),
    }
    found: list[dict[int, float]] = []
    with TemporaryFile("w+") as question, TemporaryFile("w+", errors="replace") as log:
        json.dump(asked, question)
        question.seek(0)
        command = [sys.executable, "-m", PROCESS]
        with _process(command, stdin=question, stderr=log) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("[["):  # others are llama.cpp's own
                    found.append(dict(map(tuple, json.loads(line))))
                    advance(len(found))
        if process.returncode or len(found) < num_positions:
            log.seek(0)
            raise MoaSpecError(f"it does not run this file: {_cause(log.read())}")
    return found


@contextmanager
def _process(command: Sequence[str], **files: Any) -> Iterator["subprocess.Popen[str]"]:
    """A process that writes text, and is stopped after TIMEOUT_S or with the block.

    Raises:
        MoaSpecError: it was too slow, or cannot be started.
    """
    try:
        started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **files)  # noqa: S603
    except OSError as error:
        raise MoaSpecError(f"it did not start: {first_line(error)}") from error
    stopping = threading.Timer(TIMEOUT_S, started.kill)
    stopping.start()
    try:
        with started:
            try:
                yield started
                started.wait()
            finally:
                started.kill()
        if not stopping.is_alive():
            raise MoaSpecError(f"it did not answer within {TIMEOUT_S:g} s.")
    finally:
        stopping.cancel()


def _cause(log: str) -> str:
    """The first error of llama.cpp's log, or the log's last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    named = [line for line in lines if " E " in line or "GGML_ASSERT" in line]
    return (named or lines[-1:] or ["no message"])[0].rpartition(" E ")[2][:300]
