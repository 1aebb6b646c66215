"""Text that a server decodes by itself: the baseline of client-server decoding."""

import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Unpack

from moaspec_core.engine.generate_options import (
    GenerateOptions,
    check_options,
    sampling_params,
    token_ids,
)
from moaspec_core.engine.request_state import Event
from moaspec_core.sampling.generation_defaults import NO_DEFAULTS, GenerationDefaults
from moaspec_core.sampling.params import SamplingParams
from moaspec_core.sampling.stop_strings import stop_strings
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol import wire
from moaspec_edge.protocol.transport import ServerTransport


class RemoteText:
    """Text from a server that decodes by itself.

    Args:
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
    sources = tuple(wire.SOURCES[number] for number in message.sources)
    return Event(0, tuple(message.token_ids), sources, reason)
