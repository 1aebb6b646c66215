"""llama.cpp's plain decoding, the yardstick of the engine's benchmark.

Through the binding `xllamacpp`, which only this needs: pip install xllamacpp
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moaspec.target.registry import ALIASES, packaged_gguf


def gguf_of(alias: str) -> Path:
    """The quantised file inside an alias's package."""
    path = packaged_gguf(ALIASES[alias])
    if path is None:
        raise SystemExit(f"The package with {alias}'s GGUF is not installed; name a file instead.")
    return path


class LlamaCpp:
    """A model in llama.cpp, decoding greedily in this process.

    Args:
        gguf: its file.
        threads: CPU threads.
        context: tokens of its cache.
    """

    def __init__(self, gguf: Path, *, threads: int, context: int = 2048) -> None:
        try:
            import xllamacpp
        except ImportError as error:
            raise SystemExit("The comparison needs: pip install xllamacpp") from error
        params = xllamacpp.CommonParams()
        params.model.path = str(gguf)
        params.n_ctx, params.n_parallel = context, 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        self.version = str(xllamacpp.__version__)
        self._server: Any = xllamacpp.Server(params)

    def tokens_per_s(self, prompt_ids: Sequence[int], num_tokens: int) -> float:
        """Speed after the prompt's pass, by llama.cpp's own clock."""
        answer = self._server.handle_completions(
            {
                "prompt": list(prompt_ids),
                "n_predict": num_tokens,
                "temperature": 0.0,
                "ignore_eos": True,
                "cache_prompt": False,
            }
        )
        return float(answer["timings"]["predicted_per_second"])
