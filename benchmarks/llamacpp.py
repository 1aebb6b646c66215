"""llama.cpp's plain decoding, the yardstick of the engine's benchmark.

Through the binding `xllamacpp`, which only this needs: pip install xllamacpp
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from moaspec.target.names import ALIASES, packaged_gguf


def gguf_of(alias: str) -> Path:
    """The quantised file inside an alias's package."""
    path = packaged_gguf(ALIASES[alias])
    if path is None:
        raise SystemExit(f"The package with {alias}'s GGUF is not installed; name a file instead.")
    return path


class LlamaCpp:
    """A model in llama.cpp, decoding greedily in a process of its own.

    In ours, OpenMP would count llama.cpp's idle threads with ours as more than the machine has
    cores, and let threads sleep at every barrier: our decoding would take a fifth longer.

    Args:
        gguf: its file.
        threads: CPU threads.
        context: tokens of its cache.
    """

    def __init__(self, gguf: Path, *, threads: int, context: int = 2048) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._ours, theirs = spawning.Pipe()
        child = spawning.Process(
            target=_serve, args=(theirs, str(gguf), threads, context), daemon=True
        )
        child.start()
        theirs.close()
        self.version: str = self._answer()

    def tokens_per_s(self, prompt_ids: Sequence[int], num_tokens: int) -> float:
        """Speed after the prompt's pass, by llama.cpp's own clock."""
        self._ours.send((list(prompt_ids), num_tokens))
        return float(self._answer())

    def _answer(self) -> Any:
        try:
            return self._ours.recv()
        except EOFError:
            raise SystemExit(
                "llama.cpp's process has ended, see above. Is its binding installed? "
                "pip install xllamacpp"
            ) from None


def _serve(requests: Connection, gguf: str, threads: int, context: int) -> None:
    """Answer with the binding's version, then each request with its tokens per second."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = gguf
    params.n_ctx, params.n_parallel = context, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server: Any = xllamacpp.Server(params)
    requests.send(str(xllamacpp.__version__))
    while True:
        try:
            prompt_ids, num_tokens = requests.recv()
        except EOFError:  # the parent process has ended
            return
        answer = server.handle_completions(
            {
                "prompt": prompt_ids,
                "n_predict": num_tokens,
                "temperature": 0.0,
                "ignore_eos": True,
                "cache_prompt": False,
            }
        )
        requests.send(answer["timings"]["predicted_per_second"])
