"""The drafter's two halves on vLLM's batch: encode what is verified, draft a chain per request.

Legend: R requests, N tokens, S drafted tokens of each request, D head dim, E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed import tensor_model_parallel_all_gather

from moaspec.model.moa import MoADrafter
from moaspec.model.rope import CosSin
from moaspec.vllm_plugin.caches import CacheGroup, PagedAttend, PagedLayer
from moaspec.vllm_plugin.capture import Integers, KVCapture, verified_index
from moaspec.vllm_plugin.draft_head import TrimmedHead
from moaspec.vllm_plugin.embedding import Embed


@dataclass(frozen=True, kw_only=True)
class Roots:
    """The newest tokens of some requests: verified themselves, their activations not yet there.

    Attributes:
        rows: the requests' places in the batch.
        tokens: ids.
        positions: theirs, and so how many tokens before each have activations.
    """

    rows: Sequence[int]
    tokens: Sequence[int]
    positions: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class DraftInputs:
    """What drafting is made of, all of it on this rank.

    Attributes:
        drafter: as it runs fastest here, see `packed_copy`.
    """

    drafter: MoADrafter
    embed: Embed
    head: TrimmedHead
    text: PagedLayer
    memory: PagedLayer
    capture: KVCapture


class Drafting:
    """A drafter on vLLM's caches.

    Args:
        parts: what it is made of.
        runner: vLLM's model runner, its caches allocated.
    """

    def __init__(self, parts: DraftInputs, runner: Any) -> None:
        self._parts, self._runner = parts, runner
        self._text = CacheGroup(runner, parts.text)
        # Of one size, both have their tokens at the same slots.
        alike = parts.memory.name in self._text.group.layer_names
        self._memory = self._text if alike else CacheGroup(runner, parts.memory)

    def room(self, count: int) -> list[int]:
        """Tokens that each of the first requests has slots for."""
        room_R = self._text.room(count)
        if self._memory is not self._text:
            room_R = np.minimum(room_R, self._memory.room(count))
        return room_R.tolist()

    def encode(self, lengths_R: Sequence[int] | None = None) -> None:
        """Write what later drafts read of the step's tokens.

        Args:
            lengths_R: how many of each request's tokens are verified and have activations; as many
                as it has, or more, where all that the step computed are. None: all are of all.
        """
        parts, runner = self._parts, self._runner
        kept = self._kept(lengths_R)
        position_1N, ids_N = runner.positions[kept][None], runner.input_ids.gpu[kept]
        read_NLK = parts.capture.read(kept, tensor_model_parallel_all_gather)
        states_1NE = parts.drafter.aggregate(read_NLK[None])
        slots_N = self._memory.slots(kept)
        parts.memory.write(*parts.drafter.project_kv(states_1NE, position_1N), slots_N)
        decoder, embeddings_1NE = parts.drafter.decoder, parts.embed(ids_N)[None]
        if self._text is not self._memory:
            slots_N = self._text.slots(kept)
        turns = decoder.self_rope(position_1N)
        parts.text.write(*decoder.text_keys_values(embeddings_1NE, turns), slots_N)

    def _kept(self, lengths_R: Sequence[int] | None) -> slice | Tensor:
        """Which of the step's tokens are encoded."""
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

    def draft(self, roots: Roots, depth: int) -> list[list[int]]:
        """A chain of `depth` tokens below each root."""
        parts, decoder = self._parts, self._parts.drafter.decoder
        row_R, root_R, position_R = np.array((roots.rows, roots.tokens, roots.positions))
        # How many tokens are before each root and each of its drafts.
        length_XR = position_R + np.arange(depth + 1)[:, None]
        token_R, position_SR, slots_SR = self._on_device(row_R, root_R, length_XR[:-1])
        ask, *attends = self._attends(row_R, slots_SR, length_XR.astype(np.int32))
        text_turns = _by_step(decoder.self_rope(position_SR))
        memory_turns = _by_step(decoder.cross_rope(position_SR))
        drafted = []
        for attend, text_turn, memory_turn in zip(attends, text_turns, memory_turns, strict=True):
            states_1RE = decoder.run_self_attention(parts.embed(token_R)[None], text_turn, attend)
            states_1RE = decoder.run_cross_attention(states_1RE, memory_turn, ask)
            token_R = parts.head.best(parts.drafter.exit(states_1RE, 0)[0])
            drafted.append(token_R)
        ids = torch.cat(drafted).tolist()
        return [ids[place :: len(row_R)] for place in range(len(row_R))]

    def _on_device(
        self, row_R: Integers, root_R: Integers, position_SR: Integers
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The roots' ids; each draft step's positions, and SA's slots of them; on the device."""
        slots_SR = self._text.slots_of(row_R, position_SR)
        host_XR = torch.from_numpy(np.concatenate((root_R[None], position_SR, slots_SR)))
        sizes = (1, len(position_SR), len(slots_SR))
        token_1R, positions, slots = host_XR.to(self._parts.capture.device).split(sizes)
        return token_1R[0], positions, slots

    def _attends(
        self, row_R: Integers, slots_SR: Tensor, length_XR: Integers
    ) -> Iterator[PagedAttend]:
        """CA's of all draft steps, then SA's of each.

        Args:
            row_R: places in the batch.
            slots_SR: where SA's keys and values go.
            length_XR: tokens of each row that CA reads, then that each of SA's steps reads, int32.
        """
        parts, text, memory = self._parts, self._text, self._memory
        num_reqs, longest = self._runner.input_batch.num_reqs, int(length_XR[0].max())
        known_R, *lengths = torch.from_numpy(length_XR).unbind()
        slots = slots_SR.unbind()
        queries = memory.queries(row_R, num_reqs)
        # What may be read of the memory stays the same, and no key goes there.
        yield PagedAttend(parts.memory, memory.metadata(queries, slots[0], known_R, longest))
        if text is not memory:
            queries = text.queries(row_R, num_reqs)
        for step, (slots_R, lengths_R) in enumerate(zip(slots, lengths, strict=True), start=1):
            metadata = text.metadata(queries, slots_R, lengths_R, longest + step)
            yield PagedAttend(parts.text, metadata, slots_R)


def _by_step(cos_sin: CosSin) -> Iterable[CosSin]:
    """(S, 1, R, D) each -> S pairs of (1, 1, R, D)."""
    cos_S1RD, sin_S1RD = cos_sin
    return zip(cos_S1RD.split(1), sin_S1RD.split(1), strict=True)
