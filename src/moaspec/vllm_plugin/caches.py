"""SA's and CA's keys and values in vLLM's paged cache, beside the target's.

They live in the same blocks as the target's, at the same slots, so that prefix caching, preemption
and reordering carry them along without a line of code here.

Legend: R requests, N tokens, H heads, C KV heads, D head dim, M blocks of a request, S drafted
tokens of each.
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
from moaspec.vllm_plugin.capture import Integers

DENSE = torch.contiguous_format


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

    def write(self, key_1CND: Tensor, value_1CND: Tensor, slots_N: Tensor) -> None:
        """Store keys and values at their slots."""
        layer, key_NCD, value_NCD = self.attention, _by_token(key_1CND), _by_token(value_1CND)
        layer.impl.do_kv_cache_update(layer, key_NCD, value_NCD, layer.kv_cache, slots_N)

    def read(self, query_1HND: Tensor, metadata: Any) -> Tensor:
        """What each query reads of its row, (1, H, N, D).

        Straight from vLLM's implementation: its layer would look for the metadata in a context
        of the whole model, at more cost than the attention of a draft step.
        """
        layer, query_NHD = self.attention, _by_token(query_1HND)
        out_NHD = torch.empty_like(query_NHD, memory_format=DENSE)
        layer.impl.forward(layer, query_NHD, None, None, layer.kv_cache, metadata, output=out_NHD)
        return out_NHD.transpose(0, 1)[None]


def _by_token(x_1HND: Tensor) -> Tensor:
    """(1, H, N, D) -> (N, H, D), as vLLM lays tokens out."""
    return x_1HND[0].transpose(0, 1)


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Where the rows of a round have their tokens.

    Attributes:
        table_RM: blocks of each row, int32.
        size: slots of a block.
    """

    table_RM: Tensor
    size: int

    def slots(self, position_SR: Tensor) -> Tensor:
        """The slots of some positions of each row, int64."""
        block_RS = self.table_RM.gather(1, (position_SR // self.size).t())
        return torch.add(position_SR % self.size, block_RS.t(), alpha=self.size)


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
        self._starts = torch.arange(runner.max_num_reqs + 1, dtype=torch.int32)

    @property
    def table(self) -> Any:
        """VLLM's block table; it may replace its batch, so none is kept."""
        return self._runner.input_batch.block_table[self.group.kv_cache_group_id]

    def room(self, count: int) -> Integers:
        """Tokens that the blocks of each of the first requests have slots for."""
        table = self.table
        return table.num_blocks_per_row[:count] * int(table.block_size)

    def slots(self, tokens_N: Tensor | slice) -> Tensor:
        """Slots of some of the step's tokens, int64."""
        return self.table.slot_mapping.gpu[tokens_N]

    def blocks(self, rows_R: Tensor, num_reqs: int) -> Blocks:
        """Blocks of the given rows."""
        table_RM = self.table.get_device_tensor(num_reqs)[rows_R]
        return Blocks(table_RM=table_RM, size=int(self.table.block_size))

    def metadata(self, rows: CommonAttentionMetadata, lengths_R: Tensor, longest: int) -> Any:
        """VLLM's metadata of one query per row, for this layer's backend.

        Args:
            rows: from `rows`; it is changed.
            lengths_R: how many of a row's first tokens its query reads, int32, on the host.
            longest: the largest of them.
        """
        rows.seq_lens = lengths_R.to(rows.slot_mapping.device)
        rows.seq_lens_cpu_upper_bound, rows.max_seq_len = lengths_R, longest
        return self.group.build_metadata_for_drafting(rows, draft_index=0)

    def rows(self, blocks: Blocks, slots_R: Tensor) -> CommonAttentionMetadata:
        """What all draft steps of a round share; each fills in how much it reads."""
        num_rows, device = len(slots_R), slots_R.device
        starts = self._starts[: num_rows + 1]
        return CommonAttentionMetadata(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=starts,
            num_reqs=num_rows,
            num_actual_tokens=num_rows,
            max_query_len=1,
            max_seq_len=0,
            block_table_tensor=blocks.table_RM,
            slot_mapping=slots_R,
            causal=True,
        )
