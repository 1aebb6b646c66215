"""A step as a GPU sees it: FlashAttention's layout, devices, transfers and operations.

The attention is a plain reference with the layout and the demands of vLLM's FlashAttention. Tensors
of PyTorch's device "meta", which have no values, stand for those on a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tiny
from moaspec.model.layers import masked_attention

pytest.importorskip("vllm", reason="vLLM is not installed; `make test-vllm` installs it")
pytestmark = pytest.mark.filterwarnings("default")

SIZE, BLOCKS, MOST, DEPTH, TARGET_LAYERS = 16, 400, 64, 3, 3


class FullAttentionSpec:
    """Named as vLLM's."""

    block_size = SIZE


class FlashLayer:
    """Layer and implementation in one: (blocks, heads, slots, 2 D) over memory slot by slot."""

    kv_sharing_target_layer_name = None
    attn_backend = SimpleNamespace(
        forward_includes_kv_cache_update=False, get_name=lambda: "FLASH_LIKE"
    )

    def __init__(self, name: str, heads: int, kv_heads: int, dim: int, **like: Any) -> None:
        self.layer_name, self.head_size, self.heads = name, dim, (heads, kv_heads, kv_heads)
        self.impl = self
        memory = torch.zeros(BLOCKS, SIZE, kv_heads, 2 * dim, **like)
        self.kv_cache = memory.transpose(1, 2)

    def do_kv_cache_update(
        self, _: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor
    ) -> None:
        for part in (key, value):
            assert part.shape[1:] == (self.heads[1], self.head_size)
            assert part.stride(2) == 1, "the kernel copies a token's heads as one piece"
            assert part.stride(1) == self.head_size or part.shape[1] == 1
            assert part.dtype == kv_cache.dtype
        assert slots.dtype == torch.int64
        block, offset = slots // SIZE, slots % SIZE
        kv_cache[block, :, offset] = torch.cat((key, value), dim=-1)

    def forward(
        self, _: Any, query: Tensor, key: None, value: None, cache: Tensor, common: Any, **out: Any
    ) -> None:
        """One query for each text of its own length."""
        assert key is value is None
        assert common.seq_lens.dtype == common.query_start_loc.dtype == torch.int32
        assert common.block_table_tensor.dtype == torch.int32
        width = -(-common.max_seq_len // SIZE)
        # (R, blocks, H, slots, 2 D) -> (R, H, tokens, 2 D)
        text = cache[common.block_table_tensor[:, :width].long()].transpose(1, 2).flatten(2, 3)
        keys, values = text.chunk(2, dim=-1)
        seen = torch.arange(width * SIZE, device=query.device) < common.seq_lens[:, None]
        got = masked_attention(query[:, :, None], keys, values, seen[:, None, None])
        out["output"].copy_(got[:, :, 0])


class Table:
    """VLLM's block table: request r has blocks 1 + r * 6 and the next five."""

    block_size = SIZE

    def __init__(self, device: torch.device) -> None:
        self.blocks = 1 + np.arange(MOST * 6, dtype=np.int32).reshape(MOST, 6)
        self.num_blocks_per_row = np.full(MOST, 6, np.int32)
        self._device_table = torch.from_numpy(self.blocks).to(device)

    def get_numpy_array(self) -> Any:
        return self.blocks

    def get_device_tensor(self, num_reqs: int) -> Tensor:
        return self._device_table[:num_reqs]


class FakeReader:
    """Reads the target's keys and values where Triton cannot be asked for its kernel."""

    def __init__(self, layers: list[FlashLayer], _: Any) -> None:
        self._layers, self.device = layers, layers[0].kv_cache.device

    def read(self, slots_N: Tensor, _: Any) -> Tensor:
        found = [one.kv_cache[slots_N // SIZE, :, slots_N % SIZE] for one in self._layers]
        return torch.stack(found, dim=1).flatten(2)


class Batch:
    """A proposer over a made-up batch of vLLM's.

    Args:
        device: of the model.
        dtype: of the model.
    """

    def __init__(self, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        from vllm.utils.torch_utils import set_default_torch_dtype

        from moaspec_vllm.paged_drafter.cache_reader import HeadShare
        from moaspec_vllm.paged_drafter.caches import PagedLayer
        from moaspec_vllm.paged_drafter.vllm_drafting import DrafterParts, PagedDrafter
        from moaspec_vllm.proposer import VLLMMoAProposer, _Step

        like: dict[str, Any] = {"dtype": dtype, "device": device}
        with set_default_torch_dtype(dtype), torch.device(device):
            self.drafter = tiny.random_drafter(tiny.target())
        config, identity = self.drafter.config, tiny.target().identity
        self.head_VE = torch.randn(tiny.VOCAB, config.hidden_size, **like)
        self.layers = [
            FlashLayer(f"t.{i}", 1, identity.num_kv_heads, identity.head_dim, **like)
            for i in range(TARGET_LAYERS)
        ]

        def paged(name: str, sizes: Any) -> Any:
            layer = PagedLayer.__new__(PagedLayer)
            layer.name = name
            layer.heads = (sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads)
            own: Any = FlashLayer(name, sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, **like)
            layer.attention = own
            return layer

        names = [layer.layer_name for layer in self.layers]
        group = SimpleNamespace(
            layer_names=[*names, "own", "cross"],
            kv_cache_group_id=0,
            kv_cache_spec=FullAttentionSpec(),
            build_metadata_for_drafting=lambda common, **_: common,
        )
        self.input = SimpleNamespace(
            block_table=[Table(torch.device(device))],
            token_ids_cpu=np.random.default_rng(0).integers(0, tiny.VOCAB, (MOST, 96), np.int32),
            num_computed_tokens_cpu=np.zeros(MOST, np.int32),
            num_reqs=0,
            req_ids=[],
            all_greedy=True,
        )
        self.query = np.zeros(MOST + 1, np.int32)
        runner = SimpleNamespace(
            input_batch=self.input,
            query_start_loc=SimpleNamespace(np=self.query),
            attn_groups=[[group]],
            kv_cache_config=SimpleNamespace(num_blocks=BLOCKS),
            max_num_reqs=MOST,
            positions=self.head_VE,
        )
        parts = DrafterParts(
            drafter=self.drafter,
            embed=lambda ids_N: F.embedding(ids_N, self.head_VE),
            head=SimpleNamespace(best=self.best),  # type: ignore[arg-type]
            text_layers=[paged("own", config.self_attention)],
            cross_attention=paged("cross", config.cross_attention),
            target_layers=self.layers,
            share=HeadShare(total=identity.num_kv_heads, ranks=1),
        )
        self.proposer: Any = VLLMMoAProposer.__new__(VLLMMoAProposer)
        vars(self.proposer).update(
            runner=runner,
            vllm_config=SimpleNamespace(
                speculative_config=SimpleNamespace(num_speculative_tokens=DEPTH),
                parallel_config=SimpleNamespace(tensor_parallel_size=2),  # failures are raised
            ),
            _depths=[DEPTH] * (MOST + 1),
            _chooser=None,
            _greedy_only=False,
            _failed=0,
            _begun_s=0.0,
            _latest=_Step(),
            _drafter=PagedDrafter(parts, runner),
        )

    def best(self, states_TE: Tensor) -> Tensor:
        return (states_TE @ self.head_VE.T).argmax(-1)

    def step(self, starts: list[int], computed: list[int], new: list[int]) -> list[list[int]]:
        """A step that computes tokens of each request and gives it new ones; the drafts."""
        number = len(starts)
        self.input.num_reqs, self.input.req_ids = number, [f"r{row}" for row in range(number)]
        self.input.num_computed_tokens_cpu[:number] = starts
        self.query[1 : number + 1] = np.cumsum(computed)
        self.proposer.note_pass()
        # An accepted draft is a token whose keys and values exist already.
        lengths = np.array(starts) + np.where(np.array(new) > 0, np.array(computed), 0)
        lengths = np.where(np.array(new) > 0, lengths + 1, np.array(starts) + np.array(computed))
        drafts: list[list[int]] = self.proposer.propose([[0] * one for one in new], lengths)
        return drafts

    def expected(self, row: int, length: int) -> list[int]:
        """The chain after a text, by the drafter's own layers over the whole text."""
        decoder, text = self.drafter.decoder, self.input.token_ids_cpu[row, :length].tolist()
        place = np.arange(length - 1)
        blocks = self.input.block_table[0].blocks[row, place // SIZE].astype(np.int64)
        slots = torch.from_numpy(blocks * SIZE + place % SIZE)
        kv_1NLK = FakeReader(self.layers, None).read(slots, None)[None]
        key, value = self.drafter.encode(kv_1NLK, torch.arange(length - 1)[None])
        chain: list[int] = []
        for _ in range(DEPTH):
            ids = torch.tensor([text + chain])
            positions = torch.arange(ids.shape[1])[None]
            states = decoder.run_self_attention(
                F.embedding(ids, self.head_VE),
                decoder.self_rope(positions),
                [lambda q, k, v: masked_attention(q, k, v, causal=True)],
            )[:, -1:]
            states = decoder.run_cross_attention(
                states,
                decoder.cross_rope(positions[:, -1:]),
                lambda q: masked_attention(q, key, value),
            )
            chain.append(int(self.best(states[0])[0]))
        return chain


@torch.inference_mode()
def test_drafts_over_flash_attentions_layout_are_the_drafters_own() -> None:
    """Prompts of several lengths, one in two chunks, then steps of one and several tokens."""
    batch = Batch()
    for layer in batch.layers:
        layer.kv_cache.copy_(torch.randn(layer.kv_cache.shape))
    drafts = batch.step([0, 0, 0], [40, 7, 20], [1, 1, 0])
    assert drafts == [batch.expected(0, 41), batch.expected(1, 8), []]
    drafts = batch.step([40, 7, 20], [1, 1, 13], [1, 1, 1])
    assert drafts == [batch.expected(row, length) for row, length in enumerate((42, 9, 34))]
    drafts = batch.step([41, 8, 33], [4, 2, 1], [4, 2, 1])
    assert drafts == [batch.expected(row, length) for row, length in enumerate((46, 11, 35))]


class Watched(TorchDispatchMode):
    """Counts operations, those between devices apart, and refuses mixed devices in all others.

    PyTorch itself lets an index lie on the host, and copies it in silence.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **kwargs or {})
        moves = func.overloadpacket.__name__ in ("to", "_to_copy", "copy_")
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        places = {one.device.type for one in (*tensors, *([found] if moves else []))}
        assert moves or len(places) < 2, f"{func} of tensors on {places}"
        self.counts["operations"] += 1
        self.counts["transfers"] += len(places) > 1
        return found


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """Drafts that come back from the device are zeros."""
    from moaspec_vllm.paged_drafter import vllm_drafting

    def grow(self: Any, size: int) -> None:
        self._numbers = np.zeros(size, np.int64)
        self._host = torch.from_numpy(self._numbers)

    def tolist(self: Tensor) -> Any:
        if self.device.type == "cpu":
            return plain(self)
        watched.counts["waits"] += 1
        return np.zeros(tuple(self.shape), int).tolist()

    plain, watched = Tensor.tolist, Watched()
    monkeypatch.setattr(vllm_drafting, "CacheReader", FakeReader)
    monkeypatch.setattr(vllm_drafting.Sender, "_grow", grow)
    monkeypatch.setattr(Tensor, "tolist", tolist)
    with torch.inference_mode(), watched:
        yield watched


def made(backend: str, dtype: torch.dtype, scales: str) -> Any:
    """An attention layer as vLLM has made it."""
    return SimpleNamespace(
        layer_name="moa_spec.layers.3.self_attn.attn",
        attn_backend=SimpleNamespace(get_name=lambda: backend),
        kv_cache_torch_dtype=dtype,
        _k_scale=torch.ones((), device=scales),
        _v_scale=torch.ones((), device=scales),
    )


@pytest.mark.parametrize(
    "own",
    [
        made("TRITON_ATTN", torch.bfloat16, "meta"),
        made("FLASH_ATTN", torch.float32, "meta"),
        made("FLASH_ATTN", torch.bfloat16, "cpu"),
    ],
    ids=["backend", "dtype", "scales"],
)
def test_layers_that_vllm_made_unlike_the_targets_are_refused(own: Any) -> None:
    from moaspec_core.errors import ServingError
    from moaspec_vllm.paged_drafter.caches import _require_alike

    like = made("FLASH_ATTN", torch.bfloat16, "meta")
    _require_alike(like, like, torch.device("meta"))
    with pytest.raises(ServingError, match="vLLM made moa_spec"):
        _require_alike(own, like, torch.device("meta"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.usefixtures("gpu")
def test_a_step_runs_on_the_device_of_the_model(dtype: torch.dtype) -> None:
    batch = Batch("meta", dtype)
    drafts = batch.step([0, 0], [40, 30], [1, 0])
    assert [len(chain) for chain in drafts] == [DEPTH, 0]
    assert [len(chain) for chain in batch.step([40, 30], [1, 9], [1, 1])] == [DEPTH] * 2


def test_a_step_has_one_transfer_one_wait_and_no_operations_by_request(
    gpu: Watched,
) -> None:
    counts = []
    for number in (1, 4, MOST):
        batch = Batch("meta", torch.bfloat16)
        batch.step([0] * number, [40] * number, [1] * number)
        gpu.counts.clear()
        batch.step([40] * number, [1] * number, [1] * number)
        counts.append(gpu.counts.copy())
    for one in counts:
        assert one["transfers"] == 1
        assert one["waits"] == 1
    # Attention of few queries folds heads, and one token needs no copies: a tenth at most.
    numbers = [one["operations"] for one in counts]
    assert max(numbers) < 1.15 * min(numbers)


def test_steps_without_drafts_touch_no_device(gpu: Watched) -> None:
    batch = Batch("meta", torch.bfloat16)
    batch.proposer._depths = [0] * (MOST + 1)
    gpu.counts.clear()
    assert batch.step([0, 0], [40, 30], [1, 0]) == [[], []]
    assert not gpu.counts
