"""The drafter on vLLM's batch: encode verified tokens, then draft a chain for each request.

A token is encoded when its request is drafted for, and not before: until then its keys and values
wait in vLLM's cache. Requests that nobody drafts for cost nothing.

Legend: R requests, N tokens, S draft steps, D head dim, E hidden size, M blocks of a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed import tensor_model_parallel_all_gather

from moaspec.model.layers import CosSin
from moaspec.model.moa import MoADrafter
from moaspec_core.errors import ServingError
from moaspec_vllm.paged_drafter.cache_reader import CacheReader, HeadShare, require_kept
from moaspec_vllm.paged_drafter.caches import CacheGroup, PagedAttend, PagedLayer
from moaspec_vllm.paged_drafter.encoded_tokens import EncodedTokens, Integers
from moaspec_vllm.paged_drafter.vllm_target_layers import DraftHead, Embed

ENCODE_CHUNK = 1024  # tokens that are encoded at once; bounds memory for long prompts


@dataclass(frozen=True, kw_only=True)
class DrafterParts:
    """The drafter and its connections to the target, all on this rank."""

    drafter: MoADrafter  # packed for this CPU, see `packed_copy`
    embed: Embed
    head: DraftHead
    # text_layers, cross_attention: SA's layers and CA in vLLM's cache.
    text_layers: Sequence[PagedLayer]
    cross_attention: PagedLayer
    target_layers: Sequence[Any]  # vLLM's attention layers of the target, in order
    share: HeadShare  # of the target's KV heads


class PagedDrafter:
    """A drafter that uses vLLM's caches.

    Args:
        parts: the drafter and its connections.
        runner: vLLM's model runner, its caches allocated.

    Raises:
        ServingError: the target's keys and values cannot be read from its caches.
    """

    def __init__(self, parts: DrafterParts, runner: Any) -> None:
        self._parts, self._runner = parts, runner
        require_kept(runner, parts.target_layers)
        self._reader = CacheReader(parts.target_layers, parts.share)
        self._target_group = CacheGroup(runner, parts.target_layers[0].layer_name)
        self._self_group = CacheGroup(runner, parts.text_layers[0].name)
        self._cross_group = CacheGroup(runner, parts.cross_attention.name)
        own, cross = self._self_group, self._cross_group
        if not {layer.name for layer in parts.text_layers} <= set(own.group.layer_names):
            raise ServingError(
                "vLLM keeps the layers of the drafter's self-attention in several cache groups for "
                "this target. Use a drafter with one such layer (sizes.sa_layers=1)."
            )
        self._self_encoded = EncodedTokens(own.num_blocks, own.block_size)
        self._cross_encoded = EncodedTokens(cross.num_blocks, cross.block_size)
        self._window = parts.drafter.config.prompt_window
        self._first_blocks: dict[str, int] = {}

    @property
    def device(self) -> torch.device:
        return self._reader.device

    @property
    def block_size(self) -> int:
        """Slots of a block of SA's cache."""
        return self._self_group.block_size

    def room(self, count: int) -> list[int]:
        """Number of tokens that each of the first `count` requests has slots for."""
        return np.minimum(self._self_group.room(count), self._cross_group.room(count)).tolist()

    def note_pass(self) -> None:
        """Note which blocks the target has begun to fill in this step."""
        batch = self._runner.input_batch
        start_R = batch.num_computed_tokens_cpu[: batch.num_reqs]
        query_R = self._runner.query_start_loc.np[: batch.num_reqs + 1]
        stop_R = start_R + query_R[1:] - query_R[:-1]
        self._self_encoded.forget(self._self_group.blocks, start_R, stop_R)
        self._cross_encoded.forget(self._cross_group.blocks, start_R, stop_R)

    def backlog(self, row: int, length: int) -> int:
        """Number of a request's first `length` tokens that CA needs and that are not encoded."""
        return len(self._unread(row, length))

    def _unread(self, row: int, length: int) -> Integers:
        blocks_M, size = self._cross_group.blocks[row], self._cross_group.block_size
        first = self._first_block(row)
        missing = self._cross_encoded.missing(blocks_M, first, length)
        if self._window and len(missing) >= self._window:
            # A new prompt, or a request that was not drafted for: CA reads its last tokens only.
            first = max(0, length - self._window) // size
            self._first_blocks[self._runner.input_batch.req_ids[row]] = first
            missing = self._cross_encoded.missing(blocks_M, first, length)
        return missing

    def _first_block(self, row: int) -> int:
        """The first block of a request that CA reads."""
        if not self._first_blocks:
            return 0
        return self._first_blocks.get(self._runner.input_batch.req_ids[row], 0)

    def encode(self, rows: Sequence[int], lengths: Sequence[int]) -> int:
        """Write the drafter's keys and values of the tokens of some requests that lack them.

        Args:
            rows: batch indices of the requests.
            lengths: number of tokens of each that the target has computed and verified.

        Returns:
            Number of tokens whose keys and values were missing.
        """
        self._prune()
        unread, unseen = [], []
        for row, length in zip(rows, lengths, strict=True):
            unread.append(self._unread(row, length))
            blocks_M = self._self_group.blocks[row]
            unseen.append(self._self_encoded.missing(blocks_M, 0, length))
        for row_N, position_N in _chunks(rows, unread):
            self.encode_target(row_N, position_N)
        # All layers of SA but the last take each token for a request.
        most = ENCODE_CHUNK if len(self._parts.text_layers) == 1 else self._runner.max_num_reqs
        for row_N, position_N in _chunks(rows, unseen, most):
            self.encode_text(row_N, position_N)
        for row, length in zip(rows, lengths, strict=True):
            self._cross_encoded.add(self._cross_group.blocks[row], self._first_block(row), length)
            self._self_encoded.add(self._self_group.blocks[row], 0, length)
        return sum(map(len, unread))

    def _prune(self) -> None:
        """Forget the first blocks of requests that have left the batch."""
        if len(self._first_blocks) > 2 * self._runner.max_num_reqs:
            here = set(self._runner.input_batch.req_ids)
            self._first_blocks = {k: v for k, v in self._first_blocks.items() if k in here}

    def encode_target(self, row_N: Integers, position_N: Integers) -> None:
        """Write CA's keys and values of tokens at these positions of these requests."""
        parts = self._parts
        kv_NLK = self._reader.read(
            self._slots(self._target_group, row_N, position_N), tensor_model_parallel_all_gather
        )
        position_1N = torch.from_numpy(position_N).to(kv_NLK.device)[None]
        parts.cross_attention.write(
            *parts.drafter.encode(kv_NLK[None], position_1N),
            self._slots(self._cross_group, row_N, position_N),
        )

    def encode_text(self, row_N: Integers, position_N: Integers) -> None:
        """Write SA's keys and values of tokens at these positions of these requests."""
        parts, decoder = self._parts, self._parts.drafter.decoder
        ids_N = self._runner.input_batch.token_ids_cpu[row_N, position_N].astype(np.int64)
        slots_N = self._slots(self._self_group, row_N, position_N)
        host_2N = torch.from_numpy(np.stack((ids_N, position_N)))
        ids, position_1N = host_2N.to(slots_N.device).split(1)
        cos_sin, x_1NE = decoder.self_rope(position_1N), parts.embed(ids[0])[None]
        *before, last = zip(decoder.text_layers, parts.text_layers, strict=True)
        if before:
            # Each token reads its text up to itself, like a draft of its own.
            group, lengths_N = self._self_group, _lengths(position_N + 1)
            queries, longest = group.queries(row_N), int(position_N.max()) + 1
            metadata = group.metadata(queries, slots_N, lengths_N, longest)
            for layer, paged in before:
                x_1NE = layer(x_1NE, cos_sin, PagedAttend(paged, metadata, slots_N))
        layer, paged = last
        paged.write(*layer.keys_values(x_1NE, cos_sin), slots_N)

    def _slots(self, group: CacheGroup, row_N: Integers, position_N: Integers) -> Tensor:
        """Cache slots of tokens, int64, on the device."""
        return torch.from_numpy(group.slots_of(row_N, position_N)).to(self.device)

    def draft(
        self, rows: Sequence[int], tokens: Sequence[int], positions: Sequence[int], depth: int
    ) -> list[list[int]]:
        """Draft a chain after the newest token of some requests, which has no activations yet.

        Args:
            rows: batch indices of the requests.
            tokens: ids of their newest tokens.
            positions: positions of these, so the number of earlier tokens, which are encoded.
        """
        parts, decoder = self._parts, self._parts.drafter.decoder
        row_R, root_R, position_R = np.array((rows, tokens, positions))
        # Number of tokens that CA reads, then those before each drafted token.
        step_S1 = np.arange(depth)[:, None]
        token_R, position_SR, slots_SR = self._on_device(row_R, root_R, position_R + step_S1)
        cross_attend, self_attends = self._attends(row_R, slots_SR, position_R)
        self_rope = _by_step(decoder.self_rope(position_SR))
        cross_rope = _by_step(decoder.cross_rope(position_SR))
        drafted = []
        for attends, self_cos_sin, cross_cos_sin in zip(
            self_attends, self_rope, cross_rope, strict=True
        ):
            states_1RE = decoder.run_self_attention(
                parts.embed(token_R)[None], self_cos_sin, attends
            )
            states_1RE = decoder.run_cross_attention(states_1RE, cross_cos_sin, cross_attend)
            token_R = parts.head.best(parts.drafter.adapt(states_1RE, 0)[0])
            drafted.append(token_R)
        ids = torch.cat(drafted).tolist()
        return [ids[place :: len(row_R)] for place in range(len(row_R))]

    def _on_device(
        self, row_R: Integers, root_R: Integers, position_SR: Integers
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Root ids, and the positions and SA slots of each draft step, on the device."""
        slots_SR = self._self_group.slots_of(row_R, position_SR)
        host_XR = torch.from_numpy(np.concatenate((root_R[None], position_SR, slots_SR)))
        sizes = (1, len(position_SR), len(slots_SR))
        token_1R, positions, slots = host_XR.to(self.device).split(sizes)
        return token_1R[0], positions, slots

    def _attends(
        self, row_R: Integers, slots_SR: Tensor, position_R: Integers
    ) -> tuple[PagedAttend, list[list[PagedAttend]]]:
        """The attention of CA, used in all draft steps, and that of SA's layers for each step.

        Args:
            row_R: batch indices of the requests.
            slots_SR: slots for SA's keys and values.
            position_R: positions of the newest tokens.
        """
        parts, cross_group, slots = self._parts, self._cross_group, slots_SR.unbind()
        # CA reads the same tokens in all steps and stores no keys.
        first_R = np.array([self._first_block(row) for row in row_R])
        known_R = position_R - first_R * cross_group.block_size
        queries = cross_group.queries(row_R, first_R if first_R.any() else None)
        cross = PagedAttend(
            parts.cross_attention,
            cross_group.metadata(queries, slots[0], _lengths(known_R), int(known_R.max())),
        )
        queries, longest = self._self_group.queries(row_R), int(position_R.max())
        steps = []
        for step, slots_R in enumerate(slots, start=1):
            metadata = self._self_group.metadata(
                queries, slots_R, _lengths(position_R + step), longest + step
            )
            steps.append([PagedAttend(layer, metadata, slots_R) for layer in parts.text_layers])
        return cross, steps


def _lengths(lengths_R: Integers) -> Tensor:
    return torch.from_numpy(lengths_R.astype(np.int32))


def _chunks(
    rows: Sequence[int], positions: Sequence[Integers], most: int = ENCODE_CHUNK
) -> Iterator[tuple[Integers, Integers]]:
    """Batch index and position of all tokens, (N,) each, in chunks of at most this many.

    Args:
        rows: batch indices of requests.
        positions: of each one's tokens.
    """
    position_N = np.concatenate(positions)
    row_N = np.repeat(rows, [len(position) for position in positions])
    for start in range(0, len(row_N), most):
        part = slice(start, start + most)
        yield row_N[part], position_N[part]


def _by_step(cos_sin: CosSin) -> Iterable[CosSin]:
    """(S, 1, R, D) each -> S pairs of (1, 1, R, D)."""
    cos_S1RD, sin_S1RD = cos_sin
    return zip(cos_S1RD.split(1), sin_S1RD.split(1), strict=True)
