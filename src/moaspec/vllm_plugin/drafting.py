"""The drafter's two halves on vLLM's batch: encode what is verified, draft a chain per request.

Legend: R requests, N tokens, S drafted tokens of each request, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed import tensor_model_parallel_all_gather

from moaspec.model import MoADrafter
from moaspec.vllm_plugin.caches import CacheGroup, PagedLayer
from moaspec.vllm_plugin.capture import Integers, KVCapture, verified_index
from moaspec.vllm_plugin.head import DraftHead


@dataclass(frozen=True, kw_only=True)
class Roots:
    """The newest tokens of some requests: verified themselves, their activations not yet there.

    Attributes:
        rows: the requests' places in the batch.
        tokens: ids.
        positions: theirs, and so how many tokens before each have activations.
    """

    rows: Integers
    tokens: Integers
    positions: Integers


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What drafting is made of, all of it on this rank.

    Attributes:
        drafter: as it runs fastest here, see `packed_copy`.
    """

    drafter: MoADrafter
    embed: Callable[[Tensor], Tensor]
    head: DraftHead
    text: PagedLayer
    memory: PagedLayer
    capture: KVCapture


class Drafting:
    """A drafter on vLLM's caches.

    Args:
        parts: what it is made of.
        runner: vLLM's model runner, its caches allocated.
    """

    def __init__(self, parts: Parts, runner: Any) -> None:
        self._parts, self._runner = parts, runner
        self._text = CacheGroup(runner, parts.text)
        # Of one size, both have their tokens at the same slots.
        alike = parts.memory.name in self._text.group.layer_names
        self._memory = self._text if alike else CacheGroup(runner, parts.memory)

    def room(self, positions_R: Integers) -> Integers:
        """Tokens that may be drafted below each request's position before its slots end."""
        count = len(positions_R)
        return np.minimum(self._text.room(count), self._memory.room(count)) - positions_R

    def encode(self, lengths_R: Integers | None = None) -> None:
        """Write what later drafts read of the step's tokens.

        Args:
            lengths_R: how many of each request's tokens are verified and have activations; as many
                as it has, or more, where all that the step computed are. None: all are of all.
        """
        parts, runner = self._parts, self._runner
        num_reqs = runner.input_batch.num_reqs
        starts = runner.query_start_loc.np[: num_reqs + 1]
        total, chosen = int(starts[-1]), None
        if lengths_R is not None:
            known_R = runner.input_batch.num_computed_tokens_cpu[:num_reqs]
            chosen = verified_index(starts, lengths_R - known_R)
        kept: slice | Tensor = slice(0, total)
        if chosen is not None and num_reqs == 1:
            kept = slice(0, len(chosen))
        elif chosen is not None:
            kept = torch.from_numpy(chosen).to(runner.positions.device)
        position_N, ids_N = runner.positions[kept], runner.input_ids.gpu[kept]
        read_NLK = parts.capture.read(kept, tensor_model_parallel_all_gather)
        states_1NE = parts.drafter.aggregate(read_NLK[None])
        slots_N = self._memory.slots(kept)
        parts.memory.write(*parts.drafter.project_kv(states_1NE, position_N[None]), slots_N)
        speaker, embeddings_1NE = parts.drafter.speaker, parts.embed(ids_N)[None]
        if self._text is not self._memory:
            slots_N = self._text.slots(kept)
        parts.text.write(*speaker.remember_text(embeddings_1NE, position_N[None]), slots_N)

    def draft(self, roots: Roots, depth: int) -> list[list[int]]:
        """A chain of `depth` tokens below each root."""
        parts, num_reqs = self._parts, self._runner.input_batch.num_reqs
        longest = int(roots.positions.max())
        ahead_SR = roots.positions + np.arange(depth)[:, None]
        lengths_SR = torch.from_numpy((ahead_SR + 1).astype(np.int32))
        host_XR = torch.from_numpy(np.vstack((roots.rows, roots.tokens, ahead_SR)))
        facts_XR = host_XR.to(parts.capture.device)
        rows_R, token_R, position_SR = facts_XR[0], facts_XR[1], facts_XR[2:]
        text = self._text.blocks(rows_R, num_reqs)
        memory = text if self._memory is self._text else self._memory.blocks(rows_R, num_reqs)
        slots_SR = text.slots(position_SR)
        # What may be read of the memory stays the same, and no key goes there.
        reading = self._memory.metadata(
            self._memory.rows(memory, slots_SR[0]), lengths_SR[0] - 1, longest
        )
        ask = partial(parts.memory.read, metadata=reading)
        rows, drafted = self._text.rows(text, slots_SR[0]), []
        speaker = parts.drafter.speaker
        for step, (position_R, lengths_R) in enumerate(zip(position_SR, lengths_SR, strict=True)):
            rows.slot_mapping = slots_SR[step]
            own = self._text.metadata(rows, lengths_R, longest + step + 1)
            attend = partial(self._attend, slots_R=rows.slot_mapping, metadata=own)
            states_1RE = speaker.read_text(parts.embed(token_R)[None], position_R[None], attend)
            states_1RE = speaker.read_memory(states_1RE, position_R[None], ask)
            token_R = parts.head.best(parts.drafter.exit(states_1RE, 0)[0])
            drafted.append(token_R)
        return torch.stack(drafted, dim=1).tolist()

    def _attend(
        self,
        query_1HRD: Tensor,
        key_1CRD: Tensor,
        value_1CRD: Tensor,
        *,
        slots_R: Tensor,
        metadata: Any,
    ) -> Tensor:
        """SA: each token's own key and value are stored, then all of its text's are read."""
        self._parts.text.write(key_1CRD, value_1CRD, slots_R)
        return self._parts.text.read(query_1HRD, metadata)
