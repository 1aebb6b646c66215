"""The drafter on vLLM's batch: encode verified tokens, then draft a chain for each request.

A token is encoded in the step that computes it, if that step's requests are to be drafted for. Else
its keys and values wait in vLLM's cache: requests that nobody drafts for cost nothing.

Nothing here loops over requests. What a step needs of them, positions and cache slots, goes to the
device in one transfer (`StepInputs`); the drafts come back in one. In between two parts run,
encoding and drafting, which touch nothing but the device, so each is a CUDA graph (`StepGraphs`).

Legend: R requests, N tokens, S draft steps, D head dim, E hidden size, M blocks of a request.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.v1.attention.backend import AttentionCGSupport

from moaspec.model.layers import CosSin
from moaspec.model.moa import MoADrafter
from moaspec_core.errors import ServingError
from moaspec_vllm.paged_drafter.cache_reader import CacheReader, HeadShare, require_kept
from moaspec_vllm.paged_drafter.caches import CacheGroup, PagedAttend, PagedLayer
from moaspec_vllm.paged_drafter.encoded_tokens import EncodedTokens, Integers
from moaspec_vllm.paged_drafter.step_graphs import StepGraphs
from moaspec_vllm.paged_drafter.step_inputs import REQUEST_FIELDS, StepInputs
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
        if len(self.unread) <= most and len(self.unseen) <= most:
            return self
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
    """What a step encodes and drafts; the numbers are in `StepInputs`.

    Attributes:
        backlog: the tokens to encode.
        rows_R: the requests to draft for.
        size: their number, with pads up to that of a graph.
        depth: number of draft steps.
        graph_tokens: number of tokens, with pads, of the graph that encodes; 0: none is that large.
        longest: length of the longest text up to its last draft.
    """

    backlog: Backlog
    rows_R: Integers
    size: int
    depth: int
    graph_tokens: int
    longest: int

    @property
    def num_unread(self) -> int:
        """Tokens to encode for CA, pads included."""
        return self.graph_tokens or len(self.backlog.unread)

    @property
    def num_unseen(self) -> int:
        """Tokens to encode for SA, pads included."""
        return self.graph_tokens or len(self.backlog.unseen)


class PagedDrafter:
    """A drafter that uses vLLM's caches.

    Args:
        parts: the drafter and its connections.
        runner: vLLM's model runner, its caches allocated.
        max_depth: most draft steps.

    Attributes:
        start_R: position of each request's first token in the latest pass of the target.
        stop_R: position after its last one.

    Raises:
        ServingError: the target's keys and values cannot be read from its caches.
    """

    def __init__(self, parts: DrafterParts, runner: Any, *, max_depth: int) -> None:
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
        self._window = parts.drafter.config.prompt_window
        self._cross_encoded = EncodedTokens(cross.num_blocks, cross.block_size, most)
        # With the same blocks, CA and SA lack the same tokens.
        alike = own.group.kv_cache_group_id == cross.group.kv_cache_group_id and not self._window
        self._self_encoded = (
            self._cross_encoded if alike else EncodedTokens(own.num_blocks, own.block_size, most)
        )
        self._names = list[str]()
        self.max_step = max(ENCODE_STEP, most * (1 + max_depth))
        self._inputs = StepInputs(
            self.device, max_requests=most, max_depth=max_depth, max_tokens=self.max_step
        )
        self._drafts = torch.zeros(most * max_depth, dtype=torch.int64, device=self.device)
        config, longest = runner.vllm_config, int(runner.max_model_len) + max_depth
        self._draft_graphs = StepGraphs(self._draft, config, longest=longest)
        self._encode_graphs = StepGraphs(self._encode, config, longest=longest)
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
        if self._self_group.table is self._cross_group.table:
            return kept_R
        return kept_R & self._cross_group.keeps(rows_R, stop_R)

    @property
    def _encoded(self) -> list[tuple[EncodedTokens, CacheGroup]]:
        """The encoded tokens of each cache group."""
        cross = (self._cross_encoded, self._cross_group)
        if self._self_encoded is self._cross_encoded:
            return [cross]
        return [cross, (self._self_encoded, self._self_group)]

    def note_pass(self) -> None:
        """Note which tokens the target has computed in this step, and which blocks it began."""
        batch = self._runner.input_batch
        number = batch.num_reqs
        self._follow(batch.req_ids[:number])
        query_R = self._runner.query_start_loc.np[: number + 1]
        self.start_R = batch.num_computed_tokens_cpu[:number].astype(np.int64)
        self.stop_R = self.start_R + query_R[1:] - query_R[:-1]
        for encoded, group in self._encoded:
            encoded.forget(group.blocks, self.start_R, self.stop_R)

    def _follow(self, names: list[str]) -> None:
        """Follow requests that vLLM has moved to other rows since the last step."""
        if names == self._names:
            return
        place = {name: row for row, name in enumerate(self._names)}
        before_R = np.array([place.get(name, -1) for name in names], np.int64)
        for encoded, _ in self._encoded:
            encoded.follow(before_R)
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
        unread = Tokens(*missing)
        if self._self_encoded is self._cross_encoded:
            return Backlog(rows_R, length_R, unread, unread)
        unseen = self._self_encoded.missing(self._self_group.blocks, rows_R, length_R)
        return Backlog(rows_R, length_R, unread, Tokens(*unseen))

    def send(
        self, backlog: Backlog, rows_R: Integers, position_R: Integers, depth: int
    ) -> SentStep:
        """Send what a step encodes and drafts to the device.

        Args:
            backlog: tokens to encode, at most `max_step` for each of CA and SA.
            rows_R: requests to draft for, ascending.
            position_R: positions of their newest tokens, so the number of earlier ones, which are
                encoded in this step at the latest.
            depth: number of draft steps.
        """
        unread, unseen = backlog.unread, backlog.unseen
        tokens = max(len(unread), len(unseen))
        step = SentStep(
            backlog=backlog,
            rows_R=rows_R,
            size=self._draft_graphs.padded(len(rows_R), depth) or len(rows_R),
            depth=depth,
            graph_tokens=self._encode_graphs.padded(tokens, 0),
            longest=max(
                int(position_R.max(initial=0)) + depth, int(unseen.position_N.max(initial=0)) + 1
            ),
        )
        ids = self._runner.input_batch.token_ids_cpu
        if step.size:
            self._write_requests(ids, step, position_R)
        if tokens:
            self._write_tokens(ids, step)
        self._inputs.send((step.size, depth), (step.num_unread, step.num_unseen))
        return step

    def _write_requests(self, ids: Integers, step: SentStep, position_R: Integers) -> None:
        rows_R, depth = step.rows_R, step.depth
        numbers = self._inputs.write_requests(len(rows_R), step.size, depth)
        numbers[0], numbers[1], numbers[2] = rows_R, ids[rows_R, position_R], position_R
        numbers[3] = self._cross_encoded.first_R[rows_R]
        position_SR = position_R + np.arange(depth)[:, None]
        numbers[REQUEST_FIELDS : REQUEST_FIELDS + depth] = position_SR
        numbers[REQUEST_FIELDS + depth :] = self._self_group.slots_of(rows_R, position_SR)

    def _write_tokens(self, ids: Integers, step: SentStep) -> None:
        unread, unseen = step.backlog.unread, step.backlog.unseen
        unread_3N, unseen_4N = self._inputs.write_tokens(
            (len(unread), len(unseen)), (step.num_unread, step.num_unseen)
        )
        slots_N = self._cross_group.slots_of(unread.row_N, unread.position_N)
        unread_3N[0], unread_3N[2] = unread.position_N, slots_N
        unread_3N[1] = (
            slots_N
            if self._target_group.table is self._cross_group.table
            else self._target_group.slots_of(unread.row_N, unread.position_N)
        )
        unseen_4N[0], unseen_4N[1] = unseen.row_N, unseen.position_N
        unseen_4N[2] = (
            slots_N
            if unseen is unread  # in the same blocks
            else self._self_group.slots_of(unseen.row_N, unseen.position_N)
        )
        unseen_4N[3] = ids[unseen.row_N, unseen.position_N]

    def encode(self, step: SentStep) -> None:
        """Write the drafter's keys and values of the step's backlog."""
        if step.graph_tokens:
            self._encode_graphs(step.graph_tokens, 0, step.longest)
        else:
            unread_3N, unseen_4N = self._inputs.tokens(step.num_unread, step.num_unseen)
            for part_3N in unread_3N.split(ENCODE_CHUNK, dim=1):
                self._encode_target(*part_3N.unbind())
            for part_4N in unseen_4N.split(self._text_chunk, dim=1):
                self._encode_text(*part_4N.unbind(), longest=step.longest)
        backlog = step.backlog
        parts = (backlog.unread, backlog.unseen)
        for (encoded, group), tokens in zip(self._encoded, parts, strict=False):
            encoded.add(group.blocks, tokens.row_N, tokens.position_N)
            encoded.complete(backlog.rows_R, backlog.length_R)

    @property
    def _text_chunk(self) -> int:
        """Tokens that SA encodes at once: all layers but the last take each for a request."""
        return ENCODE_CHUNK if len(self._parts.text_layers) == 1 else int(self._runner.max_num_reqs)

    def _encode(self, size: int, _: int, longest: int) -> Tensor:
        """Encode as many tokens for CA as for SA; a `Part`, whose result is not needed."""
        unread_3N, unseen_4N = self._inputs.tokens(size, size)
        self._encode_target(*unread_3N.unbind())
        self._encode_text(*unseen_4N.unbind(), longest=longest)
        return unread_3N

    def _encode_target(self, position_N: Tensor, read_N: Tensor, slots_N: Tensor) -> None:
        """Write CA's keys and values of tokens, read at their slots in the target's cache."""
        if not len(position_N):
            return
        kv_NLK = self._reader.read(read_N, tensor_model_parallel_all_gather)
        key_value = self._parts.drafter.encode(kv_NLK[None], position_N[None])
        self._parts.cross_attention.write(*key_value, slots_N)

    def _encode_text(
        self, row_N: Tensor, position_N: Tensor, slots_N: Tensor, ids_N: Tensor, *, longest: int
    ) -> None:
        """Write SA's keys and values of tokens."""
        if not len(row_N):
            return
        parts, decoder = self._parts, self._parts.drafter.decoder
        cos_sin, x_1NE = decoder.self_rope(position_N[None]), parts.embed(ids_N)[None]
        *before, last = zip(decoder.text_layers, parts.text_layers, strict=True)
        if before:
            # Each token reads its text up to itself, like a draft of its own.
            queries = self._self_group.queries(row_N, None, longest)
            metadata = self._self_group.metadata(queries, slots_N, (position_N + 1).int())
            for layer, paged in before:
                x_1NE = layer(x_1NE, cos_sin, PagedAttend(paged, metadata, slots_N))
        layer, paged = last
        paged.write(*layer.keys_values(x_1NE, cos_sin), slots_N)

    def draft(self, step: SentStep) -> list[list[int]]:
        """Draft a chain after the newest token of the step's requests.

        These tokens have no activations yet.
        """
        drafts_RS = self._draft_graphs(step.size, step.depth, step.longest)
        chains: list[list[int]] = drafts_RS[: len(step.rows_R)].tolist()
        return chains

    def _draft(self, size: int, depth: int, longest: int) -> Tensor:
        """Draft for `size` requests, a `Part`: (R, S)."""
        parts, decoder = self._parts, self._parts.drafter.decoder
        numbers = self._inputs.requests(size, depth)
        row_R, token_R, position_R, first_R = numbers[:REQUEST_FIELDS]
        position_SR, slots_SR = numbers[REQUEST_FIELDS:].split(depth)
        # CA reads the same tokens in all steps and stores no keys.
        group = self._cross_group
        queries = group.queries(row_R, first_R if self._window else None, longest)
        lengths_R = (position_R - first_R * group.block_size).int()
        metadata = group.metadata(queries, slots_SR[0], lengths_R)
        cross_attend = PagedAttend(parts.cross_attention, metadata)
        group = self._self_group
        if self._window or group.table is not self._cross_group.table:
            queries = group.queries(row_R, None, longest)
        self_rope = _by_step(decoder.self_rope(position_SR))
        cross_rope = _by_step(decoder.cross_rope(position_SR))
        steps = zip(slots_SR, (position_SR + 1).int(), self_rope, cross_rope, strict=True)
        drafted = []
        for slots_R, lengths_R, self_cos_sin, cross_cos_sin in steps:
            metadata = group.metadata(queries, slots_R, lengths_R)
            attends = [PagedAttend(layer, metadata, slots_R) for layer in parts.text_layers]
            states_1RE = decoder.run_self_attention(
                parts.embed(token_R)[None], self_cos_sin, attends
            )
            states_1RE = decoder.run_cross_attention(states_1RE, cross_cos_sin, cross_attend)
            token_R = parts.head.best(parts.drafter.adapt(states_1RE, 0)[0])
            drafted.append(token_R)
        drafts_RS = self._drafts[: size * depth].view(size, depth)
        return torch.stack(drafted, dim=1, out=drafts_RS)

    def capture(self, depths: Collection[int]) -> None:
        """Capture CUDA graphs, inside `capturing`, for the sizes that vLLM captures.

        Args:
            depths: numbers of draft steps.
        """
        groups = [self._self_group.group, self._cross_group.group]
        if any(_never_captured(group, self._runner.vllm_config) for group in groups):
            return
        sizes = self._runner.compilation_config.cudagraph_capture_sizes
        most = self._runner.max_num_reqs
        # vLLM's sizes are multiples of a draft's length plus one.
        requests = {1, 2, most, *(size for size in sizes if size < most)}
        tokens = {1, 2, *(size for size in sizes if size <= self._text_chunk)}
        for depth in sorted(depths):
            for size in sorted(requests, reverse=True):
                self._inputs.write_requests(0, size, depth)
                self._inputs.send((size, depth), (0, 0))
                self._draft_graphs.capture(size, depth)
        for size in sorted(tokens, reverse=True):
            self._inputs.write_tokens((0, 0), (size, size))
            self._inputs.send((0, 0), (size, size))
            self._encode_graphs.capture(size, 0)

    @property
    def num_graphs(self) -> int:
        """CUDA graphs that were captured."""
        return self._draft_graphs.number + self._encode_graphs.number

    def drop_graphs(self) -> None:
        """Run without CUDA graphs from now on."""
        self._draft_graphs.clear()
        self._encode_graphs.clear()


def _never_captured(group: Any, config: Any) -> bool:
    """Whether the attention backend of a group of layers does not run in CUDA graphs."""
    builder = group.get_metadata_builder()
    support = builder.get_cudagraph_support(config, group.kv_cache_spec)
    return bool(support == AttentionCGSupport.NEVER)


def _by_step(cos_sin: CosSin) -> Iterable[CosSin]:
    """(S, 1, R, D) each -> S pairs of (1, 1, R, D)."""
    cos_S1RD, sin_S1RD = cos_sin
    return zip(cos_S1RD.split(1), sin_S1RD.split(1), strict=True)
