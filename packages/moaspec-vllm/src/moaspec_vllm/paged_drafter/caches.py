"""Keys and values of the drafter's self-attention (SA) and cross-attention (CA) in vLLM's cache.

They use the same blocks and slots as the target's, so vLLM's prefix caching, preemption and
reordering apply to them too.

Legend: R requests, N tokens, H heads, C KV heads, D head dim, X = H + 2 * C, M blocks of a request,
S draft steps.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata

from moaspec.backends.fast_drafter import JoinedAttend
from moaspec_core.checkpoint.drafter_config import LayerConfig
from moaspec_vllm.paged_drafter.encoded_tokens import Integers


class PagedLayer:
    """An attention layer of the drafter that uses vLLM's paged cache.

    Args:
        config: sizes of the layer. Every rank holds all heads.
        prefix: vLLM's name of the layer, with exactly one number in it.
    """

    def __init__(self, config: LayerConfig, *, prefix: str, cache_config: Any) -> None:
        # The target's sliding window does not apply to the drafter.
        unlimited = copy.copy(cache_config)
        unlimited.sliding_window = None
        self.name = prefix
        self.heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self.attention = Attention(
            config.num_heads,
            config.head_dim,
            config.head_dim**-0.5,
            num_kv_heads=config.num_kv_heads,
            cache_config=unlimited,
            prefix=prefix,
        )

    def write(self, key_1CND: Tensor, value_1CND: Tensor, slots_N: Tensor) -> None:
        """Store keys and values (1, C, N, D) at their slots."""
        self.write_tokens(_by_token(key_1CND), _by_token(value_1CND), slots_N)

    def write_tokens(self, key_NCD: Tensor, value_NCD: Tensor, slots_N: Tensor) -> None:
        """Store keys and values in vLLM's layout, (N, C, D), at their slots."""
        layer = self.attention
        layer.impl.do_kv_cache_update(layer, key_NCD, value_NCD, layer.kv_cache, slots_N)

    def read(self, query_NHD: Tensor, metadata: Any) -> Tensor:
        """Attention of each query over its request's tokens, (N, H, D).

        Calls vLLM's implementation directly: its layer would look up the metadata in the model's
        forward context, which takes longer than the attention of a draft step.
        """
        layer, out_NHD = self.attention, query_NHD.new_empty(query_NHD.shape)
        layer.impl.forward(layer, query_NHD, None, None, layer.kv_cache, metadata, output=out_NHD)
        return out_NHD


@dataclass(frozen=True)
class PagedAttend(JoinedAttend):
    """Attention of one layer, a `SelfAttend` or a `CrossAttend`.

    Each query reads a text of its own length, as that of each request in a draft step.
    """

    layer: PagedLayer
    metadata: Any  # from `CacheGroup.metadata`
    # Slots where SA stores the new tokens' keys and values first; None for CA.
    slots_N: Tensor | None = None

    def __call__(self, *heads_1XND: Tensor) -> Tensor:
        """Attend with queries, and for SA new keys and values: (1, H, N, D)."""
        read_NHD = self._attend(*(_by_token(part_1XND) for part_1XND in heads_1XND))
        return read_NHD.transpose(0, 1)[None]

    def joined(self, heads_BTXD: Tensor) -> Tensor:
        """Attend with all heads concatenated in one tensor: (1, N, H * D)."""
        heads_NXD = heads_BTXD[0]
        parts = (heads_NXD,) if self.slots_N is None else heads_NXD.split(self.layer.heads, dim=1)
        return self._attend(*parts).view(1, len(heads_NXD), -1)

    def _attend(self, query_NHD: Tensor, *own_NCD: Tensor) -> Tensor:
        if self.slots_N is not None:
            key_NCD, value_NCD = own_NCD
            self.layer.write_tokens(key_NCD, value_NCD, self.slots_N)
        return self.layer.read(query_NHD, self.metadata)


def _by_token(x_1HND: Tensor) -> Tensor:
    """(1, H, N, D) -> (N, H, D), vLLM's layout."""
    return x_1HND[0].transpose(0, 1)


class CacheGroup:
    """The KV cache group of some attention layers, in a runner with allocated caches.

    Args:
        name: vLLM's name of one of the layers.
    """

    def __init__(self, runner: Any, name: str) -> None:
        self.group = next(
            group for groups in runner.attn_groups for group in groups if name in group.layer_names
        )
        self._runner = runner

    @property
    def table(self) -> Any:
        """VLLM's block table. vLLM may replace its batch, so the table is looked up each time."""
        return self._runner.input_batch.block_table[self.group.kv_cache_group_id]

    @property
    def block_size(self) -> int:
        return int(self.table.block_size)

    @property
    def num_blocks(self) -> int:
        """Blocks of the table's size; a block that vLLM allocates may be several of them."""
        allocated = self._runner.kv_cache_config.num_blocks * self.group.kv_cache_spec.block_size
        return int(allocated // self.block_size)

    @property
    def blocks(self) -> Integers:
        """Block ids of all requests, (R, M)."""
        table: Integers = self.table.get_numpy_array()
        return table

    def room(self, count: int) -> Integers:
        """Number of allocated slots of each of the first `count` requests."""
        table = self.table
        return table.num_blocks_per_row[:count] * int(table.block_size)

    def slots_of(self, rows: Integers, positions: Integers) -> Integers:
        """Cache slots of positions of the given requests, int64. The arguments broadcast."""
        place, offset = np.divmod(positions, self.block_size)
        blocks = self.blocks[rows, place]
        return np.multiply(blocks, self.block_size, dtype=np.int64) + offset

    def queries(self, rows_R: Integers, first_R: Integers | None = None) -> CommonAttentionMetadata:
        """The common metadata of queries that each read a text of their own length.

        Args:
            rows_R: batch index of each query's request.
            first_R: first block that each query reads; None: block 0.
        """
        count, table_RM = len(rows_R), self.table.get_device_tensor(int(rows_R.max()) + 1)
        if not np.array_equal(rows_R, np.arange(len(table_RM))):
            table_RM = table_RM[torch.from_numpy(rows_R).to(table_RM.device)]
        if first_R is not None:
            width = table_RM.shape[1]
            place_RM = (first_R[:, None] + np.arange(width)).clip(max=width - 1)
            table_RM = table_RM.gather(1, torch.from_numpy(place_RM).to(table_RM.device))
        starts = torch.arange(count + 1, dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts.to(table_RM.device),
            query_start_loc_cpu=starts,
            seq_lens=starts,
            num_reqs=count,
            num_actual_tokens=count,
            max_query_len=1,
            max_seq_len=0,
            block_table_tensor=table_RM,
            slot_mapping=starts,
            causal=True,
        )

    def metadata(
        self, queries: CommonAttentionMetadata, slots_R: Tensor, lengths_R: Tensor, longest: int
    ) -> Any:
        """Metadata of such queries for this layer's attention backend.

        Args:
            queries: from `queries`; modified in place.
            slots_R: slots for the keys of the queries' tokens. CA ignores them.
            lengths_R: number of tokens that each query reads, int32, on the host.
            longest: maximum of `lengths_R`.
        """
        queries.slot_mapping, queries.seq_lens = slots_R, lengths_R.to(slots_R.device)
        queries.seq_lens_cpu_upper_bound, queries.max_seq_len = lengths_R, longest
        return self.group.build_metadata_for_drafting(queries, draft_index=0)
