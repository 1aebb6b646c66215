"""The drafter's two halves on vLLM's batch: encode what is verified, draft a chain per request.

The layers are those of `moaspec.model`; only where keys and values live is vLLM's.

Legend: R requests, T tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.forward_context import set_forward_context

from moaspec.model import MoADrafter
from moaspec.vllm_plugin.caches import Blocks, CacheGroup, PagedLayer
from moaspec.vllm_plugin.capture import KVCapture, Run, index_of
from moaspec.vllm_plugin.head import DraftHead


@dataclass(frozen=True, kw_only=True)
class Root:
    """The newest token of a request: verified itself, its activations not yet there.

    Attributes:
        row: the request's place in the batch.
        token_id: the token.
        position: its position, and so how many tokens before it have activations.
    """

    row: int
    token_id: int
    position: int


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What drafting is made of, all of it on this rank."""

    drafter: MoADrafter
    target: Any
    head: DraftHead
    text: PagedLayer
    memory: PagedLayer
    capture: KVCapture
    vllm_config: Any


class Drafting:
    """A drafter on vLLM's caches.

    Args:
        parts: what it is made of.
        runner: vLLM's model runner, its caches allocated.
    """

    def __init__(self, parts: Parts, runner: Any) -> None:
        self._parts, self._runner = parts, runner
        self._text = CacheGroup(runner, parts.text)
        self._memory = CacheGroup(runner, parts.memory)

    def room(self, root: Root) -> int:
        """Tokens that may be drafted below this root before its request's slots end."""
        slots = min(self._text.room(root.row), self._memory.room(root.row))
        return slots - root.position

    def encode(self, verified: Sequence[int | None]) -> None:
        """Write what later drafts read of the step's tokens.

        Args:
            verified: per request, how many of its tokens are verified and have activations; None
                where all that the step computed are.
        """
        parts, runner = self._parts, self._runner
        runs = self._runs(verified)
        total, count = runs[-1].stop, sum(run.verified for run in runs)
        device = runner.positions.device
        chosen = slice(0, total) if count == total else index_of(runs, device)
        positions_1T = runner.positions[:total][chosen][None]
        states_1TE = parts.drafter.aggregate(
            parts.capture.read(chosen, tensor_model_parallel_all_gather)
        )
        memory = parts.drafter.project_kv(states_1TE, positions_1T)
        parts.memory.write(*memory, self._memory.slots(total)[chosen])
        embeddings_1TE = parts.target.embed_input_ids(runner.input_ids.gpu[:total][chosen])[None]
        text = parts.drafter.speaker.remember_text(embeddings_1TE, positions_1T)
        parts.text.write(*text, self._text.slots(total)[chosen])

    def _runs(self, verified: Sequence[int | None]) -> list[Run]:
        batch, starts = self._runner.input_batch, self._runner.query_start_loc.np
        runs = []
        for row, length in enumerate(verified):
            start, stop = int(starts[row]), int(starts[row + 1])
            known = int(batch.num_computed_tokens_cpu[row])
            runs.append(Run(start, stop, stop - start if length is None else length - known))
        return runs

    def draft(self, roots: Sequence[Root], depth: int) -> list[list[int]]:
        """A chain of `depth` tokens below each root."""
        parts, num_reqs = self._parts, self._runner.input_batch.num_reqs
        device = parts.capture.staged_NLGK.device
        rows_R = torch.tensor([root.row for root in roots], device=device)
        token_R = torch.tensor([root.token_id for root in roots], device=device)
        verified = [root.position for root in roots]
        position_R = torch.tensor(verified, device=device)
        text = self._text.blocks(rows_R, num_reqs)
        memory = self._memory.blocks(rows_R, num_reqs)
        reading = self._memory.metadata(memory, verified, memory.slots(position_R))
        drafted = []
        for step in range(depth):
            lengths = [position + step + 1 for position in verified]
            with self._context(text, lengths, position_R + step, reading):
                token_R = self._next(token_R, (position_R + step)[None])
            drafted.append(token_R)
        return torch.stack(drafted, dim=1).tolist()

    def _next(self, token_R: Tensor, position_1R: Tensor) -> Tensor:
        """One step of every chain: (R,) -> (R,)."""
        parts = self._parts
        embeddings_1RE = parts.target.embed_input_ids(token_R)[None]
        speaker = parts.drafter.speaker
        states = speaker.read_text(embeddings_1RE, position_1R, parts.text.attend)
        states = speaker.read_memory(states, position_1R, parts.memory.attend)
        return parts.head.best(parts.drafter.exit(states, 0)[0])

    @contextmanager
    def _context(
        self, text: Blocks, lengths: list[int], position_R: Tensor, reading: Any
    ) -> Iterator[None]:
        parts, slots_R = self._parts, text.slots(position_R)
        metadata = {
            parts.text.name: self._text.metadata(text, lengths, slots_R),
            parts.memory.name: reading,
        }
        with set_forward_context(
            metadata,
            parts.vllm_config,
            num_tokens=len(lengths),
            slot_mapping={parts.text.name: slots_R},
        ):
            yield
