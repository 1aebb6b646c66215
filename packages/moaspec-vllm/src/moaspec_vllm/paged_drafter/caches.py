"""Keys and values of the drafter's self-attention (SA) and cross-attention (CA) in vLLM's cache.

They use the same blocks and slots as the target's, so vLLM's prefix caching, preemption and
reordering apply to them too.

Legend: R requests, N tokens, H heads, C KV heads, D head dim, X = H + 2 * C, M blocks of a request,
S draft steps.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.model_executor.layers.attention import Attention
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import CommonAttentionMetadata

from moaspec.backends.fast_drafter import JoinedAttend
from moaspec_core.checkpoint.drafter_config import LayerConfig
from moaspec_core.errors import ServingError
from moaspec_vllm.paged_drafter.encoded_tokens import Integers


class PagedLayer:
    """An attention layer of the drafter that uses vLLM's paged cache.

    Args:
        config: sizes of the layer. Every rank holds all heads.
        prefix: vLLM's name of the layer, with exactly one number in it.
        like: an attention layer of the target, whose backend this one uses.
        dtype: of the model.
        device: of the model.

    Raises:
        ServingError: the target's backend does not know heads of this size.
    """

    def __init__(
        self,
        config: LayerConfig,
        *,
        prefix: str,
        cache_config: Any,
        like: Any,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        # The target's sliding window does not apply to the drafter.
        unlimited = copy.copy(cache_config)
        unlimited.sliding_window = None
        self.name = prefix
        self.heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        backend = like.attn_backend
        if not backend.supports_head_size(config.head_dim):
            raise ServingError(
                f"vLLM's attention backend {backend.get_name()}, which the target uses, does not "
                f"know the drafter's heads of {config.head_dim}. Choose another "
                "--attention-backend."
            )
        # vLLM reads both defaults here, and sets them only while it loads the target.
        with set_default_torch_dtype(dtype), device:
            self.attention = Attention(
                config.num_heads,
                config.head_dim,
                config.head_dim**-0.5,
                num_kv_heads=config.num_kv_heads,
                cache_config=unlimited,
                prefix=prefix,
                attn_backend=backend,
            )
        self.attention.to(device)
        _require_alike(self.attention, like, device)

    def write(self, key_1CND: Tensor, value_1CND: Tensor, slots_N: Tensor) -> None:
        """Store keys and values (1, C, N, D) at their slots."""
        self.write_tokens(_by_token(key_1CND), _by_token(value_1CND), slots_N)

    def write_tokens(self, key_NCD: Tensor, value_NCD: Tensor, slots_N: Tensor) -> None:
        """Store keys and values in vLLM's layout, (N, C, D), at their slots."""
        layer = self.attention
        # FlashAttention's function takes a token's heads to lie side by side.
        key_NCD, value_NCD = _side_by_side(key_NCD), _side_by_side(value_NCD)
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


def _side_by_side(x_NCD: Tensor) -> Tensor:
    """Each token's heads one after another; tokens may be further apart."""
    _, heads, size = x_NCD.shape
    together = x_NCD.stride(2) == 1 and (heads == 1 or x_NCD.stride(1) == size)
    return x_NCD if together else x_NCD.contiguous()


def _require_alike(own: Any, like: Any, device: torch.device) -> None:
    """ServingError where vLLM made the drafter's layer otherwise than the target's."""
    kinds = [(one.attn_backend.get_name(), one.kv_cache_torch_dtype) for one in (own, like)]
    places = {own._k_scale.device.type, own._v_scale.device.type}
    if kinds[0] != kinds[1] or places != {device.type}:
        raise ServingError(
            f"vLLM made {own.layer_name} with {kinds[0]} and scales on {sorted(places)}; the "
            f"target's layers have {kinds[1]} and lie on {device.type}. Serve without drafts, and "
            "report what `moaspec vllm-check` prints."
        )


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
        self._host_starts = torch.arange(runner.max_num_reqs + 1, dtype=torch.int32)
        self._device_starts = self._host_starts.to(runner.positions.device)

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

    def slots_of(self, rows: Integers, positions: Integers) -> Integers:
        """Cache slots of positions of the given requests, int64. The arguments broadcast."""
        place, offset = np.divmod(positions, self.block_size)
        blocks = self.blocks[rows, place]
        return np.multiply(blocks, self.block_size, dtype=np.int64) + offset

    def keeps(self, rows_R: Integers, stop_R: Integers) -> Integers:
        """Whether each request has slots for its first tokens up to `stop`."""
        return self.table.num_blocks_per_row[rows_R] * self.block_size >= stop_R

    def queries(
        self, row_R: Tensor, first_R: Tensor | None, longest: int
    ) -> CommonAttentionMetadata:
        """The common metadata of queries that each read a text of their own length.

        Args:
            row_R: batch index of each query's request, on the device.
            first_R: first block that each query reads, on the device; None: all blocks.
            longest: most tokens that one of them reads.
        """
        count, table = len(row_R), self.table.get_device_tensor(self._runner.max_num_reqs)
        table_RM = table.index_select(0, row_R)
        if first_R is not None:
            width = table_RM.shape[1]
            place_M = torch.arange(width, device=table_RM.device)
            table_RM = table_RM.gather(1, (first_R[:, None] + place_M).clamp(max=width - 1))
        starts = self._device_starts[: count + 1]
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=self._host_starts[: count + 1],
            seq_lens=starts,
            num_reqs=count,
            num_actual_tokens=count,
            max_query_len=1,
            max_seq_len=longest,
            block_table_tensor=table_RM,
            slot_mapping=starts,
            causal=True,
        )

    def metadata(self, queries: CommonAttentionMetadata, slots_R: Tensor, lengths_R: Tensor) -> Any:
        """Metadata of such queries for this layer's attention backend.

        Args:
            queries: from `queries`.
            slots_R: slots for the keys of the queries' tokens. CA ignores them.
            lengths_R: number of tokens that each query reads, int32, on the device.
        """
        queries = replace(queries, slot_mapping=slots_R, seq_lens=lengths_R)
        return self.group.build_metadata_for_drafting(queries, draft_index=0)
