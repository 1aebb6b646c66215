"""The drafter on vLLM's batch: encode verified tokens, then draft a chain for each request.

Legend: R requests, N tokens, S draft steps, D head dim, E hidden size.
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
from moaspec.vllm_plugin.caches import CacheGroup, PagedAttend, PagedLayer
from moaspec.vllm_plugin.capture import Integers, VLLMCapture, verified_index
from moaspec.vllm_plugin.vllm_target_layers import DraftHead, Embed


@dataclass(frozen=True, kw_only=True)
class DrafterParts:
    """The drafter and its connections to the target, all on this rank."""

    drafter: MoADrafter  # packed for this CPU, see `packed_copy`
    embed: Embed
    head: DraftHead
    # self_attention, cross_attention: its layers in vLLM's cache.
    self_attention: PagedLayer
    cross_attention: PagedLayer
    capture: VLLMCapture


class PagedDrafter:
    """A drafter that uses vLLM's caches. `runner`: vLLM's model runner, its caches allocated."""

    def __init__(self, parts: DrafterParts, runner: Any) -> None:
        self._parts, self._runner = parts, runner
        self._self_group = CacheGroup(runner, parts.self_attention)
        # Layers of equal size are in one group and have a token's keys at the same slot.
        same = parts.cross_attention.name in self._self_group.group.layer_names
        self._cross_group = self._self_group if same else CacheGroup(runner, parts.cross_attention)

    def room(self, count: int) -> list[int]:
        """Number of tokens that each of the first `count` requests has slots for."""
        room_R = self._self_group.room(count)
        if self._cross_group is not self._self_group:
            room_R = np.minimum(room_R, self._cross_group.room(count))
        return room_R.tolist()

    def encode(self, lengths_R: Sequence[int] | None = None) -> None:
        """Write the drafter's keys and values of the step's verified tokens.

        Args:
            lengths_R: number of each request's tokens that are verified and have activations. It
                may exceed the computed tokens. None: all tokens of all requests.
        """
        parts, runner = self._parts, self._runner
        verified = self._verified(lengths_R)
        position_1N, ids_N = runner.positions[verified][None], runner.input_ids.gpu[verified]
        read_NLK = parts.capture.read(verified, tensor_model_parallel_all_gather)
        slots_N = self._cross_group.slots(verified)
        parts.cross_attention.write(*parts.drafter.encode(read_NLK[None], position_1N), slots_N)
        decoder, embeddings_1NE = parts.drafter.decoder, parts.embed(ids_N)[None]
        if self._self_group is not self._cross_group:
            slots_N = self._self_group.slots(verified)
        cos_sin = decoder.self_rope(position_1N)
        parts.self_attention.write(
            *decoder.self_attention.keys_values(embeddings_1NE, cos_sin), slots_N
        )

    def _verified(self, lengths_R: Sequence[int] | None) -> slice | Tensor:
        """Indices of the step's verified tokens."""
        batch = self._runner.input_batch
        starts = self._runner.query_start_loc.np[: batch.num_reqs + 1].tolist()
        if lengths_R is None:
            return slice(0, starts[-1])
        known_R = batch.num_computed_tokens_cpu[: batch.num_reqs].tolist()
        verified_R = [last - known for last, known in zip(lengths_R, known_R, strict=True)]
        index = verified_index(starts, verified_R)
        if isinstance(index, slice):
            return index
        return torch.tensor(index, device=self._runner.positions.device)

    def draft(
        self, rows: Sequence[int], tokens: Sequence[int], positions: Sequence[int], depth: int
    ) -> list[list[int]]:
        """Draft a chain after the newest token of some requests, which has no activations yet.

        Args:
            rows: batch indices of the requests.
            tokens: ids of their newest tokens.
            positions: positions of these, so the number of earlier tokens with activations.
        """
        parts, decoder = self._parts, self._parts.drafter.decoder
        row_R, root_R, position_R = np.array((rows, tokens, positions))
        # Number of tokens before each root and before each drafted token.
        length_XR = position_R + np.arange(depth + 1)[:, None]
        token_R, position_SR, slots_SR = self._on_device(row_R, root_R, length_XR[:-1])
        cross_attend, *self_attends = self._attends(row_R, slots_SR, length_XR.astype(np.int32))
        self_rope = _by_step(decoder.self_rope(position_SR))
        cross_rope = _by_step(decoder.cross_rope(position_SR))
        drafted = []
        for attend, self_cos_sin, cross_cos_sin in zip(
            self_attends, self_rope, cross_rope, strict=True
        ):
            states_1RE = decoder.run_self_attention(
                parts.embed(token_R)[None], self_cos_sin, attend
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
        token_1R, positions, slots = host_XR.to(self._parts.capture.device).split(sizes)
        return token_1R[0], positions, slots

    def _attends(
        self, row_R: Integers, slots_SR: Tensor, length_XR: Integers
    ) -> Iterator[PagedAttend]:
        """Yield the attention of CA, used in all draft steps, then that of SA for each step.

        Args:
            row_R: batch indices of the requests.
            slots_SR: slots for SA's keys and values.
            length_XR: number of tokens that CA reads, then that SA reads in each step, int32.
        """
        parts, self_group, cross_group = self._parts, self._self_group, self._cross_group
        num_reqs, longest = self._runner.input_batch.num_reqs, int(length_XR[0].max())
        known_R, *lengths = torch.from_numpy(length_XR).unbind()
        slots = slots_SR.unbind()
        queries = cross_group.queries(row_R, num_reqs)
        # CA reads the same tokens in all steps and stores no keys.
        yield PagedAttend(
            parts.cross_attention, cross_group.metadata(queries, slots[0], known_R, longest)
        )
        if self_group is not cross_group:
            queries = self_group.queries(row_R, num_reqs)
        for step, (slots_R, lengths_R) in enumerate(zip(slots, lengths, strict=True), start=1):
            metadata = self_group.metadata(queries, slots_R, lengths_R, longest + step)
            yield PagedAttend(parts.self_attention, metadata, slots_R)


def _by_step(cos_sin: CosSin) -> Iterable[CosSin]:
    """(S, 1, R, D) each -> S pairs of (1, 1, R, D)."""
    cos_S1RD, sin_S1RD = cos_sin
    return zip(cos_S1RD.split(1), sin_S1RD.split(1), strict=True)
