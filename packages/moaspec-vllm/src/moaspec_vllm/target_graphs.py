"""Full CUDA graphs of the target for steps without drafts.

vLLM captures full graphs for passes in which each request has as many tokens as a draft and one
more. In a step that drafts nothing each has one token, and vLLM has piecewise graphs only, which
start attention from the host layer by layer. Here the same captures are made for one token.
"""

from __future__ import annotations

from typing import Any

from vllm.config import CUDAGraphMode
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher


class OneTokenGraphs:
    """A second dispatcher of vLLM's, which the runner uses in passes of one token per request.

    Args:
        runner: vLLM's model runner, its graphs captured.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._stock = (runner.cudagraph_dispatcher, runner.uniform_decode_query_len)
        self._own: tuple[CudagraphDispatcher, int] | None = None

    def capture(self) -> None:
        """Capture them, inside `capturing`, where vLLM has full graphs for equal requests only."""
        runner, mode = self._runner, self._stock[0].cudagraph_mode
        if (
            not mode.separate_routine()
            or mode.decode_mode() != CUDAGraphMode.FULL
            or runner.vllm_config.parallel_config.data_parallel_size > 1
        ):
            return
        dispatcher = CudagraphDispatcher(runner.vllm_config)
        dispatcher.uniform_decode_query_len = 1
        dispatcher.initialize_cudagraph_keys(mode, 1)
        self._own = dispatcher, 1
        self.use(one_token=True)
        try:
            for kind, descriptors in dispatcher.get_capture_descs():
                if kind == CUDAGraphMode.FULL:
                    runner._capture_cudagraphs(descriptors, kind)
        finally:
            self.use(one_token=False)

    @property
    def captured(self) -> bool:
        """Whether there are any."""
        return self._own is not None

    def use(self, *, one_token: bool) -> bool:
        """Choose the graphs of the next pass; whether these are the ones for one token.

        Args:
            one_token: whether each of its requests has one token.
        """
        own = self._own if one_token else None
        dispatcher, length = own or self._stock
        self._runner.cudagraph_dispatcher = dispatcher
        self._runner.uniform_decode_query_len = length
        return own is not None

    def clear(self) -> None:
        """Run as if nothing had been captured."""
        self._own = None
        self.use(one_token=False)
