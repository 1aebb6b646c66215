"""CUDA graphs of drafts without a GPU.

vLLM's own wrapper captures and replays; only `torch.cuda.CUDAGraph` is replaced. In its place the
operations of a capture are recorded, and a replay repeats them on the same memory: what Python
decided at the capture stays as it was, as in a graph.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from moaspec_vllm.vllm_settings import VLLMServeSettings
from vllm_batch import DEPTH, MOST, Batch

pytest.importorskip("vllm", reason="vLLM is not installed; `make test-vllm` installs it")
pytestmark = pytest.mark.filterwarnings("default")

WAITS = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "masked_select", "unique")


class RecordedGraph:
    """Repeats what was recorded, in the place of a `torch.cuda.CUDAGraph`."""

    latest: ClassVar[list[RecordedGraph]] = []

    def __init__(self) -> None:
        self.calls = list[Any]()
        self.latest.append(self)
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        with _disable_current_modes():  # a GPU repeats them without the host
            self._repeat()

    def _repeat(self) -> None:
        for func, args, kwargs, found in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(found), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Recording(TorchDispatchMode):
    """Records operations, and refuses operations that wait for a GPU."""

    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masked = name == "index" and any(one.dtype == torch.bool for one in tree_leaves(args))
        assert name not in WAITS and not masked, f"{func} waits for the device"  # noqa: PT018
        found = func(*args, **kwargs or {})
        self._graph.calls.append((func, args, kwargs or {}, found))
        return found


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RecordedGraph]]:
    """All graphs that are captured."""
    from vllm.compilation import cuda_graph
    from vllm.compilation.monitor import set_cudagraph_capturing_enabled
    from vllm.platforms import current_platform

    RecordedGraph.latest.clear()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **_: Recording(graph))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(cuda_graph, "current_stream", lambda: None)
    monkeypatch.setattr(cuda_graph, "weak_ref_tensors", lambda found: found)
    monkeypatch.setattr(cuda_graph, "capture_pool", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(type(current_platform), "get_global_graph_pool", lambda _: None)
    set_cudagraph_capturing_enabled(True)
    with torch.inference_mode():
        yield RecordedGraph.latest
    set_cudagraph_capturing_enabled(False)


def twins(**sizes: Any) -> tuple[Batch, Batch]:
    """Two batches alike; the second one has captured its graphs."""
    torch.manual_seed(0)
    plain, replaying = Batch(**sizes), Batch(**sizes)
    replaying.head_VE.copy_(plain.head_VE)
    for layer, other in zip(plain.layers, replaying.layers, strict=True):
        other.kv_cache.copy_(layer.kv_cache.normal_())
    replaying.proposer._drafter.capture({DEPTH})
    return plain, replaying


@pytest.mark.parametrize("sizes", [{}, {"sa_layers": 2}, {"window": 24}], ids=str)
def test_replayed_graphs_draft_what_the_drafter_does(
    graphs: list[RecordedGraph], sizes: dict[str, Any]
) -> None:
    """Steps of other requests, lengths and tokens than those of the capture."""
    batches = twins(**sizes)
    captured, chance = len(graphs), random.Random(1)
    assert captured == batches[1].proposer._drafter.num_graphs
    for number in (3, 1, 20, MOST):
        computed = [chance.randrange(2, 60) for _ in range(number)]
        starts, new = [0] * number, [1] * number
        for _ in range(3):
            plain, replayed = (batch.step(starts, computed, new) for batch in batches)
            assert replayed == plain
            starts = [start + count for start, count in zip(starts, computed, strict=True)]
            computed = new = [chance.randrange(1, DEPTH + 2) for _ in range(number)]
    for one, other in zip(batches[0].caches, batches[1].caches, strict=True):
        # Sums in products of more rows may be in another order.
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert len(graphs) == captured
    assert sum(graph.replays > 0 for graph in graphs) >= 6


def test_a_step_of_graphs_starts_no_operation_but_graphs(graphs: list[RecordedGraph]) -> None:
    """Two graphs; on a GPU also the transfer of the inputs."""
    batch, counts = twins()[1], Counter[str]()

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            counts[func.overloadpacket.__name__] += 1
            return func(*args, **kwargs or {})

    for number in (1, 7, MOST):
        batch.step([0] * number, [20] * number, [1] * number)
        before = sum(graph.replays for graph in graphs)
        counts.clear()
        with Counted():
            batch.step([20] * number, [1] * number, [1] * number)
        assert sum(graph.replays for graph in graphs) == before + 2
        assert counts.keys() <= {"slice", "resolve_conj", "resolve_neg"}  # to read the drafts


def test_prompts_and_sizes_without_a_graph_run_as_they_are(graphs: list[RecordedGraph]) -> None:
    plain, replaying = twins()
    drafter = replaying.proposer._drafter
    before = sum(graph.replays for graph in graphs)
    computed = [90, 80]  # more tokens than the largest graph that encodes
    assert drafter._encode_graphs.padded(sum(computed), 0) == 0
    steps = [batch.step([0, 0], computed, [1, 1]) for batch in (plain, replaying)]
    assert steps[0] == steps[1]
    assert sum(graph.replays for graph in graphs) == before + 1  # the drafts
    drafter.drop_graphs()
    steps = [batch.step(computed, [1, 1], [1, 1]) for batch in (plain, replaying)]
    assert steps[0] == steps[1]
    assert sum(graph.replays for graph in graphs) == before + 1


@pytest.mark.usefixtures("graphs")
def test_what_waits_for_the_device_is_not_captured() -> None:
    batch = Batch()
    drafter = batch.proposer._drafter
    find = drafter._cross_group.queries
    drafter._cross_group.queries = lambda row_R, *rest: find(row_R[row_R >= 0], *rest)
    with pytest.raises(AssertionError, match="waits for the device"):
        drafter.capture({DEPTH})


@pytest.mark.parametrize("drafts", [0, DEPTH])
def test_full_graphs_exist_with_drafts_and_without(drafts: int) -> None:
    """The dispatcher of vLLM says which graph runs a pass of equally many tokens per request."""
    from vllm.config import CUDAGraphMode, VllmConfig
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    from moaspec_vllm.target_graphs import OneTokenGraphs

    config, captured = VllmConfig(), list[Any]()
    config.speculative_config = SimpleNamespace(num_speculative_tokens=DEPTH)
    config.compilation_config.cudagraph_capture_sizes = [4, 8, 16, 32]
    config.compilation_config.max_cudagraph_capture_size = 32
    mode = CUDAGraphMode.FULL_DECODE_ONLY
    runner = SimpleNamespace(
        vllm_config=config,
        cudagraph_dispatcher=CudagraphDispatcher(config),
        uniform_decode_query_len=1 + DEPTH,
        _capture_cudagraphs=lambda found, kind: captured.extend((kind, one) for one in found),
    )
    runner.cudagraph_dispatcher.initialize_cudagraph_keys(mode, 1 + DEPTH)
    stock = runner.cudagraph_dispatcher
    graphs = OneTokenGraphs(runner)
    graphs.capture()
    assert runner.cudagraph_dispatcher is stock
    assert graphs.use(one_token=not drafts) == (not drafts)
    assert runner.uniform_decode_query_len == 1 + drafts
    tokens = 5 * (1 + drafts)
    kind, found = runner.cudagraph_dispatcher.dispatch(tokens, uniform_decode=True)
    assert kind == CUDAGraphMode.FULL
    assert found.num_tokens == found.num_reqs * (1 + drafts) >= tokens
    if not drafts:
        assert (kind, found) in captured
    graphs.clear()
    assert runner.cudagraph_dispatcher is stock
    assert not graphs.use(one_token=True)


@pytest.mark.parametrize("own", [True, False])
def test_draft_up_to_leaves_vllm_its_full_graphs(own: bool) -> None:
    """VLLM's option for the same takes them away, in its first runner."""
    from vllm.config import CUDAGraphMode, VllmConfig
    from vllm.config.speculative import SpeculativeConfig

    settings = VLLMServeSettings(model="m", drafter="d", draft_up_to=8 if own else None)
    speculative = settings.engine_arguments["speculative_config"]
    if not own:
        speculative["num_speculative_tokens_per_batch_size"] = [(1, 8, 3)]
    config = VllmConfig()
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    config.speculative_config = SpeculativeConfig.__new__(SpeculativeConfig)
    vars(config.speculative_config).update(
        {"parallel_drafting": False, "num_speculative_tokens_per_batch_size": None} | speculative
    )
    config._maybe_override_dynamic_sd_cudagraph_mode()
    kept = config.compilation_config.cudagraph_mode.has_full_cudagraphs()
    assert kept is own
