"""The drafter on vLLM's batch: encode verified tokens, then draft a chain for each request.

A token is encoded in the step that computes it, if that step's requests are to be drafted for. Else
its keys and values wait in vLLM's cache: requests that nobody drafts for cost nothing.

Nothing here loops over requests. What a step needs of them, positions and cache slots, goes to the
device in one transfer; the drafts come back in one.

Legend: R requests, N tokens, S draft steps, D head dim, E hidden size, M blocks of a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
ENCODE_STEP = 2048  # tokens that a step encodes at most; the rest waits for the next steps


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


@dataclass(frozen=True)
class Tokens:
    """Tokens of requests: rows of the batch and positions in their texts, (N,) each."""

    row_N: Integers
    position_N: Integers

    def __len__(self) -> int:
        return len(self.row_N)

    def first(self, most: int) -> Tokens:
        return Tokens(self.row_N[:most], self.position_N[:most])

    def rest(self, most: int) -> Integers:
        """Rows of the tokens after the first ones."""
        return self.row_N[most:]


@dataclass(frozen=True)
class Backlog:
    """Tokens that the drafter lacks of some requests.

    Attributes:
        rows_R: the requests, in the order in which they are encoded.
        length_R: number of tokens of each that the target has computed and verified.
        unread: tokens without keys and values of CA.
        unseen: tokens without those of SA.
    """

    rows_R: Integers
    length_R: Integers
    unread: Tokens
    unseen: Tokens

    def first(self, most: int) -> Backlog:
        """Return the part that one step encodes, with the requests that are complete after it."""
        left = np.concatenate((self.unread.rest(most), self.unseen.rest(most)))
        done_R = ~np.isin(self.rows_R, left)
        return Backlog(
            self.rows_R[done_R],
            self.length_R[done_R],
            self.unread.first(most),
            self.unseen.first(most),
        )


@dataclass(frozen=True)
class SentStep:
    """What a step encodes and drafts, on the device; int64.

    Attributes:
        backlog: the tokens, on the host.
        unread: position, slot in the target's cache and slot in CA's, (3, N).
        unseen: row, position, slot in SA's cache and token id, (4, N).
        rows_R, position_R: the requests that are drafted for, and positions of their newest tokens,
            on the host.
        requests: row, id and position of the newest token, first block that CA reads, (4, R).
        position_SR: of the token before each draft.
        slots_SR: of these tokens in SA's cache.
    """

    backlog: Backlog
    unread: Tensor
    unseen: Tensor
    rows_R: Integers
    position_R: Integers
    requests: Tensor
    position_SR: Tensor
    slots_SR: Tensor


class Sender:
    """Sends integers of the host to the device, all of a step in one transfer.

    The memory is pinned where there is a GPU, and used again by the next step: vLLM waits for each
    step's tokens before it, so the transfer has ended.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._grow(4096)

    def _grow(self, size: int) -> None:
        pinned = self._device.type == "cuda"
        self._host = torch.empty(size, dtype=torch.int64, pin_memory=pinned)
        self._numbers = self._host.numpy()

    def send(self, *parts: Integers) -> list[Tensor]:
        """Return the numbers on the device, int64, in their shapes."""
        total = sum(part.size for part in parts)
        if total > len(self._numbers):
            self._grow(2 * total)
        np.concatenate([part.ravel() for part in parts], out=self._numbers[:total])
        sent = self._host[:total].to(self._device, non_blocking=True)
        pieces = sent.split([part.size for part in parts])
        return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


class PagedDrafter:
    """A drafter that uses vLLM's caches.

    Args:
        parts: the drafter and its connections.
        runner: vLLM's model runner, its caches allocated.

    Attributes:
        start_R: position of each request's first token in the latest pass of the target.
        stop_R: position after its last one.

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
        most = runner.max_num_reqs
        self._self_encoded = EncodedTokens(own.num_blocks, own.block_size, most)
        self._cross_encoded = EncodedTokens(cross.num_blocks, cross.block_size, most)
        self._window = parts.drafter.config.prompt_window
        self._names = list[str]()
        self._sender = Sender(self.device)
        self.start_R = self.stop_R = np.zeros(0, np.int64)

    @property
    def device(self) -> torch.device:
        return self._reader.device

    @property
    def block_size(self) -> int:
        """Slots of a block of SA's cache."""
        return self._self_group.block_size

    def fits(self, rows_R: Integers, stop_R: Integers) -> Integers:
        """Whether each request has slots for its first tokens up to `stop`."""
        kept_R: Integers = self._self_group.keeps(rows_R, stop_R)
        return kept_R & self._cross_group.keeps(rows_R, stop_R)

    def note_pass(self) -> None:
        """Note which tokens the target has computed in this step, and which blocks it began."""
        batch = self._runner.input_batch
        number = batch.num_reqs
        self._follow(batch.req_ids[:number])
        query_R = self._runner.query_start_loc.np[: number + 1]
        self.start_R = batch.num_computed_tokens_cpu[:number].astype(np.int64)
        self.stop_R = self.start_R + query_R[1:] - query_R[:-1]
        self._self_encoded.forget(self._self_group.blocks, self.start_R, self.stop_R)
        self._cross_encoded.forget(self._cross_group.blocks, self.start_R, self.stop_R)

    def _follow(self, names: list[str]) -> None:
        """Follow requests that vLLM has moved to other rows since the last step."""
        if names == self._names:
            return
        place = {name: row for row, name in enumerate(self._names)}
        before_R = np.array([place.get(name, -1) for name in names], np.int64)
        self._self_encoded.follow(before_R)
        self._cross_encoded.follow(before_R)
        self._names = names

    def backlog(self, rows_R: Integers, length_R: Integers) -> Backlog:
        """Tokens that are not encoded of the first `length` ones of each request."""
        blocks_RM = self._cross_group.blocks
        missing = self._cross_encoded.missing(blocks_RM, rows_R, length_R)
        if self._window:
            # A new prompt, or a request that was not drafted for: CA reads its last tokens only.
            number_R = np.bincount(missing[0], minlength=len(blocks_RM))[rows_R]
            long_R = number_R >= self._window
            if long_R.any():
                first_R = (length_R - self._window).clip(min=0) // self._cross_group.block_size
                self._cross_encoded.start_at(rows_R[long_R], first_R[long_R])
                missing = self._cross_encoded.missing(blocks_RM, rows_R, length_R)
        unseen = self._self_encoded.missing(self._self_group.blocks, rows_R, length_R)
        return Backlog(rows_R, length_R, Tokens(*missing), Tokens(*unseen))

    def send(
        self, backlog: Backlog, rows_R: Integers, position_R: Integers, depth: int
    ) -> SentStep:
        """Send what a step encodes and drafts to the device.

        Args:
            backlog: tokens to encode.
            rows_R: requests to draft for, ascending.
            position_R: positions of their newest tokens, so the number of earlier ones, which are
                encoded in this step at the latest.
            depth: number of draft steps.
        """
        unread, unseen = backlog.unread, backlog.unseen
        ids = self._runner.input_batch.token_ids_cpu
        position_SR = position_R + np.arange(depth)[:, None]
        unread_3N, unseen_4N, requests_4R, sent_position_SR, slots_SR = self._sender.send(
            np.stack(
                (
                    unread.position_N,
                    self._target_group.slots_of(unread.row_N, unread.position_N),
                    self._cross_group.slots_of(unread.row_N, unread.position_N),
                )
            ),
            np.stack(
                (
                    unseen.row_N,
                    unseen.position_N,
                    self._self_group.slots_of(unseen.row_N, unseen.position_N),
                    ids[unseen.row_N, unseen.position_N],
                )
            ),
            np.stack(
                (rows_R, ids[rows_R, position_R], position_R, self._cross_encoded.first_R[rows_R])
            ),
            position_SR,
            self._self_group.slots_of(rows_R, position_SR),
        )
        return SentStep(
            backlog=backlog,
            unread=unread_3N,
            unseen=unseen_4N,
            rows_R=rows_R,
            position_R=position_R,
            requests=requests_4R,
            position_SR=sent_position_SR,
            slots_SR=slots_SR,
        )

    def encode(self, step: SentStep) -> None:
        """Write the drafter's keys and values of the step's backlog."""
        backlog = step.backlog
        for part_3N in step.unread.split(ENCODE_CHUNK, dim=1):
            self._encode_target(*part_3N)
        # All layers of SA but the last take each token for a request.
        most = ENCODE_CHUNK if len(self._parts.text_layers) == 1 else self._runner.max_num_reqs
        for start, part_4N in enumerate(step.unseen.split(most, dim=1)):
            chosen = slice(start * most, (start + 1) * most)
            own = Tokens(backlog.unseen.row_N[chosen], backlog.unseen.position_N[chosen])
            self._encode_text(own, *part_4N)
        for encoded, group, tokens in (
            (self._cross_encoded, self._cross_group, backlog.unread),
            (self._self_encoded, self._self_group, backlog.unseen),
        ):
            encoded.add(group.blocks, tokens.row_N, tokens.position_N)
            encoded.complete(backlog.rows_R, backlog.length_R)

    def _encode_target(self, position_N: Tensor, read_N: Tensor, slots_N: Tensor) -> None:
        """Write CA's keys and values of tokens, read at their slots in the target's cache."""
        if not len(position_N):
            return
        kv_NLK = self._reader.read(read_N, tensor_model_parallel_all_gather)
        key_value = self._parts.drafter.encode(kv_NLK[None], position_N[None])
        self._parts.cross_attention.write(*key_value, slots_N)

    def _encode_text(
        self, tokens: Tokens, row_N: Tensor, position_N: Tensor, slots_N: Tensor, ids_N: Tensor
    ) -> None:
        """Write SA's keys and values of tokens."""
        if not len(tokens):
            return
        parts, decoder = self._parts, self._parts.drafter.decoder
        cos_sin, x_1NE = decoder.self_rope(position_N[None]), parts.embed(ids_N)[None]
        *before, last = zip(decoder.text_layers, parts.text_layers, strict=True)
        if before:
            # Each token reads its text up to itself, like a draft of its own.
            group, none_N = self._self_group, np.zeros(len(tokens), np.int64)
            queries = group.queries(tokens.row_N, row_N, none_N, row_N)
            lengths_N = (position_N + 1).int()
            metadata = group.metadata(queries, slots_N, lengths_N, tokens.position_N + 1)
            for layer, paged in before:
                x_1NE = layer(x_1NE, cos_sin, PagedAttend(paged, metadata, slots_N))
        layer, paged = last
        paged.write(*layer.keys_values(x_1NE, cos_sin), slots_N)

    def draft(self, step: SentStep) -> list[list[int]]:
        """Draft a chain after the newest token of the step's requests.

        These tokens have no activations yet.
        """
        parts, decoder = self._parts, self._parts.drafter.decoder
        cross_attend, self_attends = self._attends(step)
        self_rope = _by_step(decoder.self_rope(step.position_SR))
        cross_rope = _by_step(decoder.cross_rope(step.position_SR))
        token_R, drafted = step.requests[1], []
        for attends, self_cos_sin, cross_cos_sin in zip(
            self_attends, self_rope, cross_rope, strict=True
        ):
            states_1RE = decoder.run_self_attention(
                parts.embed(token_R)[None], self_cos_sin, attends
            )
            states_1RE = decoder.run_cross_attention(states_1RE, cross_cos_sin, cross_attend)
            token_R = parts.head.best(parts.drafter.adapt(states_1RE, 0)[0])
            drafted.append(token_R)
        chains: list[list[int]] = torch.stack(drafted, dim=1).tolist()
        return chains

    def _attends(self, step: SentStep) -> tuple[PagedAttend, list[list[PagedAttend]]]:
        """The attention of CA, used in all draft steps, and that of SA's layers for each step."""
        parts, cross_group, own_group = self._parts, self._cross_group, self._self_group
        row_R, _, position_R, first_R = step.requests
        # CA reads the same tokens in all steps and stores no keys.
        host_first_R = self._cross_encoded.first_R[step.rows_R]
        size, slots = cross_group.block_size, step.slots_SR.unbind()
        queries = cross_group.queries(step.rows_R, row_R, host_first_R, first_R)
        metadata = cross_group.metadata(
            queries,
            slots[0],
            (position_R - first_R * size).int(),
            step.position_R - host_first_R * size,
        )
        cross = PagedAttend(parts.cross_attention, metadata)
        queries = own_group.queries(step.rows_R, row_R, np.zeros_like(step.rows_R), first_R)
        steps = []
        lengths_SR = (step.position_SR + 1).int().unbind()
        for number, (slots_R, lengths_R) in enumerate(zip(slots, lengths_SR, strict=True), start=1):
            metadata = own_group.metadata(queries, slots_R, lengths_R, step.position_R + number)
            steps.append([PagedAttend(layer, metadata, slots_R) for layer in parts.text_layers])
        return cross, steps


def _by_step(cos_sin: CosSin) -> Iterable[CosSin]:
    """(S, 1, R, D) each -> S pairs of (1, 1, R, D)."""
    cos_S1RD, sin_S1RD = cos_sin
    return zip(cos_S1RD.split(1), sin_S1RD.split(1), strict=True)
