"""A proposer over a made-up batch of vLLM's: no engine, and no target but its caches.

The attention is a plain reference with the layout and the demands of vLLM's FlashAttention. Tensors
of PyTorch's device "meta", which have no values, stand for those on a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import tiny
from moaspec.model.layers import FoldedPositions, masked_attention

SIZE, BLOCKS, MOST, DEPTH, TARGET_LAYERS = 16, 400, 64, 3, 3


class FullAttentionSpec:
    """The name tells vLLM's kind."""

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
        memory = torch.zeros(BLOCKS + 1, SIZE, kv_heads, 2 * dim, **like)
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
        slots = torch.where(slots < 0, BLOCKS * SIZE, slots)  # the kernel leaves them out
        block, offset = slots // SIZE, slots % SIZE
        kv_cache[block, :, offset] = torch.cat((key, value), dim=-1)

    def forward(
        self, _: Any, query: Tensor, key: None, value: None, cache: Tensor, common: Any, **out: Any
    ) -> None:
        """One query for each text of its own length."""
        assert key is value is None
        assert common.seq_lens.dtype == common.query_start_loc.dtype == torch.int32
        assert common.block_table_tensor.dtype == torch.int32
        width = min(-(-common.max_seq_len // SIZE), common.block_table_tensor.shape[1])
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
        window: the drafter's `prompt_window`.
        trained_positions: of the drafter.
        sizes: of the drafter.
    """

    def __init__(
        self,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        window: int = 0,
        trained_positions: int = 0,
        **sizes: Any,
    ) -> None:
        from vllm.config import VllmConfig
        from vllm.utils.torch_utils import set_default_torch_dtype
        from vllm.v1.attention.backend import AttentionCGSupport

        from moaspec_vllm.paged_drafter.cache_reader import HeadShare
        from moaspec_vllm.paged_drafter.caches import PagedLayer
        from moaspec_vllm.paged_drafter.vllm_drafting import DrafterParts, PagedDrafter
        from moaspec_vllm.proposer import VLLMMoAProposer, _Step

        like: dict[str, Any] = {"dtype": dtype, "device": device}
        with set_default_torch_dtype(dtype), torch.device(device):
            self.drafter = tiny.random_drafter(tiny.target(), **sizes)
            self.drafter.config = replace(
                self.drafter.config, prompt_window=window, trained_positions=trained_positions
            )
            if trained_positions:
                self.drafter.encoder.fold = FoldedPositions(self.drafter.config)
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
            flash: Any = FlashLayer(
                name, sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, **like
            )
            layer.attention = flash
            return layer

        names = [layer.layer_name for layer in self.layers]
        own = [f"own.{i}" for i in range(config.self_attention_layers)]
        builder = SimpleNamespace(get_cudagraph_support=lambda *_: AttentionCGSupport.ALWAYS)
        group = SimpleNamespace(
            layer_names=[*names, *own, "cross"],
            kv_cache_group_id=0,
            kv_cache_spec=FullAttentionSpec(),
            build_metadata_for_drafting=lambda common, **_: common,
            get_metadata_builder=lambda: builder,
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
            max_model_len=96,
            positions=self.head_VE,
            vllm_config=VllmConfig(),
            compilation_config=SimpleNamespace(cudagraph_capture_sizes=[4, 8, 16, 32, 64, 128]),
        )
        parts = DrafterParts(
            drafter=self.drafter,
            embed=lambda ids_N: F.embedding(ids_N, self.head_VE),
            head=SimpleNamespace(best=self.best),  # type: ignore[arg-type]
            text_layers=[paged(name, config.self_attention) for name in own],
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
            _graphs=None,
            _greedy_only=False,
            _failed=0,
            _begun_s=0.0,
            _latest=_Step(),
            _drafter=PagedDrafter(parts, runner, max_depth=DEPTH),
        )

    @property
    def caches(self) -> list[Tensor]:
        """Caches of SA's layers and of CA, in blocks that requests may have."""
        parts = self.proposer._drafter._parts
        return [
            layer.attention.kv_cache[1:BLOCKS]
            for layer in (*parts.text_layers, parts.cross_attention)
        ]

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
                [lambda q, k, v: masked_attention(q, k, v, causal=True)] * len(decoder.text_layers),
            )[:, -1:]
            states = decoder.run_cross_attention(
                states,
                decoder.cross_rope(positions[:, -1:]),
                lambda q: masked_attention(q, key, value),
            )
            chain.append(int(self.best(states[0])[0]))
        return chain
