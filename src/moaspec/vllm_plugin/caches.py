"""SA's and CA's keys and values in vLLM's paged cache, beside the target's.

They live in the same blocks as the target's, at the same slots, so that prefix caching, preemption
and reordering carry them along without a line of code here.

Legend: R requests, T tokens, H heads, C KV heads, D head dim, M blocks of a request.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata

from moaspec.model.config import LayerConfig


class PagedLayer:
    """One of the drafter's attentions as vLLM runs it.

    Args:
        config: sizes; every rank holds all heads.
        prefix: vLLM's name of it, with exactly one number in it.
        cache_config: vLLM's.
    """

    def __init__(self, config: LayerConfig, *, prefix: str, cache_config: Any) -> None:
        # A target's sliding window is not the drafter's.
        unlimited = copy.copy(cache_config)
        unlimited.sliding_window = None
        self.name = prefix
        self.attention = Attention(
            config.num_heads,
            config.head_dim,
            config.head_dim**-0.5,
            num_kv_heads=config.num_kv_heads,
            cache_config=unlimited,
            prefix=prefix,
        )

    def write(self, key_1CTD: Tensor, value_1CTD: Tensor, slots_T: Tensor) -> None:
        """Store keys and values at their slots."""
        layer = self.attention
        layer.impl.do_kv_cache_update(
            layer, _flat(key_1CTD), _flat(value_1CTD), layer.kv_cache, slots_T
        )

    def attend(
        self, query_1HTD: Tensor, key_1CTD: Tensor | None = None, value_1CTD: Tensor | None = None
    ) -> Tensor:
        """What queries read; keys and values of their own, if given, are stored first."""
        read_TE = self.attention(
            _flat(query_1HTD),
            None if key_1CTD is None else _flat(key_1CTD),
            None if value_1CTD is None else _flat(value_1CTD),
        )
        return read_TE.unflatten(-1, (-1, query_1HTD.shape[-1])).transpose(0, 1)[None]


def _flat(x_1HTD: Tensor) -> Tensor:
    """(1, H, T, D) -> (T, H, D), as vLLM lays tokens out."""
    return x_1HTD[0].transpose(0, 1).contiguous()


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Where the rows of a round have their tokens.

    Attributes:
        table_RM: blocks of each row, int32.
        size: slots of a block.
    """

    table_RM: Tensor
    size: int

    def slots(self, position_R: Tensor) -> Tensor:
        """The slot of one position per row, int64."""
        block_R1 = self.table_RM.gather(1, (position_R // self.size)[:, None])
        return block_R1[:, 0].long() * self.size + position_R % self.size


class CacheGroup:
    """One of the drafter's layers in vLLM's cache, once vLLM has divided that up.

    Args:
        runner: vLLM's model runner, its caches allocated.
        layer: whose group.
    """

    def __init__(self, runner: Any, layer: PagedLayer) -> None:
        self.group = next(
            group
            for groups in runner.attn_groups
            for group in groups
            if layer.name in group.layer_names
        )
        self._runner = runner

    @property
    def table(self) -> Any:
        """VLLM's block table; it may replace its batch, so none is kept."""
        return self._runner.input_batch.block_table[self.group.kv_cache_group_id]

    def room(self, row: int) -> int:
        """Tokens that a request's blocks have slots for."""
        return int(self.table.num_blocks_per_row[row]) * int(self.table.block_size)

    def slots(self, count: int) -> Tensor:
        """Slots of the step's first tokens, int64."""
        return self.table.slot_mapping.gpu[:count]

    def blocks(self, rows_R: Tensor, num_reqs: int) -> Blocks:
        """Blocks of the given rows."""
        table_RM = self.table.get_device_tensor(num_reqs)[rows_R]
        return Blocks(table_RM=table_RM, size=int(self.table.block_size))

    def metadata(self, blocks: Blocks, seq_lens: list[int], slots_R: Tensor) -> Any:
        """VLLM's metadata of one query per row that reads the row's first `seq_lens` tokens."""
        num_rows, device = len(seq_lens), slots_R.device
        starts = torch.arange(num_rows + 1, dtype=torch.int32)
        lengths = torch.tensor(seq_lens, dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=lengths.to(device),
            seq_lens_cpu_upper_bound=lengths,
            num_reqs=num_rows,
            num_actual_tokens=num_rows,
            max_query_len=1,
            max_seq_len=max(seq_lens),
            block_table_tensor=blocks.table_RM,
            slot_mapping=slots_R,
            causal=True,
        )
        return self.group.build_metadata_for_drafting(common, draft_index=0)
