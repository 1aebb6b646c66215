"""Decoding by the server alone, plain or with its own drafter, streamed.

It is the baseline of client-server decoding, and serves devices that have no bundle.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any, Unpack

from moaspec.drafting.fast_moa_proposer import FastMoAProposer
from moaspec.drafting.protocols import Proposer, VerifyRequest, VerifyResult
from moaspec.drafting.tree_shapes import DEFAULT_TREE
from moaspec.engine.engine import Engine
from moaspec.engine.result import Event, Source
from moaspec.generation.options import GenerateOptions, check_options, sampling_params, token_ids
from moaspec.model.moa import MoADrafter
from moaspec.remote.protocol import target_pb2 as pb
from moaspec.remote.protocol import wire
from moaspec.remote.protocol.activation_layout import ActivationParts
from moaspec.remote.protocol.transport import ServerTransport
from moaspec.remote.server.shared_verifier import SharedVerifier
from moaspec.sampling.params import GREEDY, SamplingParams
from moaspec.sampling.stop_strings import stop_strings
from moaspec.target.generation_defaults import NO_DEFAULTS, GenerationDefaults
from moaspec.target.spec import TargetSpec
from moaspec.target.target import Target

SOURCES: tuple[Source, ...] = ("target", "draft", "copy")
"""Their indices are the numbers on the wire."""


class LeasedSlot:
    """A `Verifier` of one row that a `SharedVerifier` leases; it encodes prompts in pieces."""

    def __init__(self, shared: SharedVerifier, owner: str, *, encode: bool) -> None:
        self._shared, self._encode, self._row = shared, encode, shared.lease(owner)

    async def verify(self, requests: Sequence[VerifyRequest]) -> list[VerifyResult]:
        """Verify one request; see `Verifier`."""
        (request,) = requests
        request = replace(request, cache_row=self._row, encode=self._encode)
        size, total = (
            self._shared.options.prefill_tokens,
            request.num_verified + len(request.new_tokens),
        )
        while len(request.new_tokens) > size:
            stretch = replace(
                request,
                new_tokens=request.new_tokens[:size],
                sampling=GREEDY,
                encode=False,
                text_length=total,
            )
            await self._shared.decide(stretch)
            request = replace(
                request,
                num_verified=request.num_verified + size,
                new_tokens=request.new_tokens[size:],
            )
        verdict, _ = await self._shared.decide(request)
        return [verdict]

    def close(self, row: int) -> None:
        """Do nothing: `release` returns the row in every case."""

    def release(self) -> None:
        """Return the row to the shared verifier."""
        self._shared.close(self._row)


class _ServerProposer(FastMoAProposer):
    """A proposer on the server that reads the features which the encoder makes for devices."""

    def append_features(self, row: int, features: ActivationParts) -> None:
        super().append_features(row, features[:2])


async def decode_alone(
    shared: SharedVerifier,
    target: TargetSpec,
    drafter: MoADrafter | None,
    request: pb.GenerateRequest,
    sampling: SamplingParams,
    *,
    owner: str,
    max_tokens: int,
) -> AsyncGenerator[pb.Generated]:
    """Decode a request to its end, or to the longest text; closing the generator stops it."""
    drafting: Proposer | None = None
    # Another engine that runs the weights lends no embedding and no head to draft with. No layers
    # are reused here, so a drafter that was trained for N > 0 only cannot draft.
    if (
        request.speculate
        and drafter is not None
        and 0 in drafter.config.num_target_layers
        and isinstance(target, Target)
    ):
        drafting = _ServerProposer(drafter, target, num_target_layers=0)
    row = LeasedSlot(shared, owner, encode=drafting is not None)
    try:
        engine = Engine(row, drafting, target=target, max_positions=max_tokens)
        engine.add(
            request.token_ids,
            max_new_tokens=request.max_new_tokens,
            stop_token_ids=request.stop_token_ids,
            stop=request.stop,
            shape=DEFAULT_TREE,
            sampling=sampling,
        )
        while engine.num_active:
            for event in await engine.astep():
                yield _generated(event)
    finally:
        row.release()


def _generated(event: Event) -> pb.Generated:
    sources = [SOURCES.index(source) for source in event.sources]
    reason = event.stop_reason or ""
    return pb.Generated(token_ids=event.token_ids, sources=sources, stop_reason=reason)


class RemoteText:
    """Text from a server that decodes by itself.

    Args:
        transport: leads to the server.
        stop_token_ids: ids that end a turn, unless `stream` is given others.
        defaults: the target's defaults of sampling, unless `stream` is given others.
    """

    def __init__(
        self,
        transport: ServerTransport,
        stop_token_ids: frozenset[int] = frozenset(),
        defaults: GenerationDefaults = NO_DEFAULTS,
    ) -> None:
        self._transport, self._stops, self._defaults = transport, stop_token_ids, defaults

    async def stream(
        self,
        prompt_ids: Sequence[int],
        *,
        speculate: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerator[Event]:
        """Yield verified tokens as they arrive.

        Args:
            prompt_ids: token ids.
            speculate: let the server's own drafter draft.
            **options: see `GenerateOptions`. The server decides what to draft; functions and
                log-probabilities are not transmitted.

        Raises:
            InputError: options out of range.
            LinkError: the link broke; the text cannot be resumed.
            RefusedError: the server refuses.
        """
        check_options(options, GenerateOptions)
        request = self._request(prompt_ids, options)
        request.speculate = speculate
        async with contextlib.aclosing(self._transport.generate(request)) as messages:
            async for message in messages:
                yield _event(message)

    def _request(self, prompt_ids: Sequence[int], options: GenerateOptions) -> pb.GenerateRequest:
        stops = options.get("stop_token_ids")
        return pb.GenerateRequest(
            token_ids=token_ids(prompt_ids),
            sampling=wire.sampling_message(self._sampling(options)),
            max_new_tokens=options.get("max_new_tokens", 64),
            stop_token_ids=self._stops if stops is None else stops,
            stop=stop_strings(options.get("stop", ())),
        )

    def _sampling(self, options: GenerateOptions) -> SamplingParams:
        wanted = options.get("generation_config", "auto") is not None
        return sampling_params(options, self._defaults if wanted else NO_DEFAULTS)


def _event(message: pb.Generated) -> Event:
    reason: Any = message.stop_reason or None
    sources = tuple(SOURCES[number] for number in message.sources)
    return Event(0, tuple(message.token_ids), sources, reason)
