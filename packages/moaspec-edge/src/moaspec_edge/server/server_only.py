"""Decoding by the server alone, plain or with its own drafter, streamed.

It is the baseline of client-server decoding, and serves devices that have no bundle.
"""

from collections.abc import AsyncGenerator, MutableSet, Sequence
from dataclasses import replace

from moaspec.backends.fast_moa_proposer import FastMoAProposer
from moaspec.drafting.kv_cache import KVCache
from moaspec.model.moa import MoADrafter
from moaspec.target.spec import TargetSpec
from moaspec.target.target import Target
from moaspec_core.drafting.protocols import Proposer, Verifier, VerifyRequest, VerifyResult
from moaspec_core.engine.engine import Engine
from moaspec_core.engine.request_state import Event
from moaspec_core.policy.policies import DraftSettings
from moaspec_core.sampling.params import SamplingParams
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol import wire
from moaspec_edge.server.shared_verifier import SharedVerifier


class LeasedSlot(Verifier):
    """A `Verifier` of one row that a `SharedVerifier` leases.

    Args:
        drafter: whose encoder the shared verifier has; None where nothing is drafted.
    """

    def __init__(self, shared: SharedVerifier, owner: str, drafter: MoADrafter | None) -> None:
        self._shared, self._encode = shared, drafter is not None
        self.prompt_window = 0 if drafter is None else drafter.config.prompt_window
        self._row = shared.lease(owner)

    async def verify(self, requests: Sequence[VerifyRequest]) -> list[VerifyResult]:
        (request,) = requests
        encode = self._encode and request.encode
        request = replace(request, cache_row=self._row, encode=encode)
        verdict, _ = await self._shared.decide(request)
        if verdict.features is None:
            return [verdict]
        key_1CTD, value_1CTD, _ = verdict.features  # as made for devices
        stop = request.num_verified + len(request.new_tokens) + len(verdict.accepted)
        features = (key_1CTD, value_1CTD, stop - key_1CTD.shape[2])
        return [replace(verdict, features=features)]

    def release(self) -> None:
        self._shared.close(self._row)


async def decode_alone(
    shared: SharedVerifier,
    target: TargetSpec,
    drafter: MoADrafter | None,
    request: pb.GenerateRequest,
    sampling: SamplingParams,
    *,
    shaping: DraftSettings,
    caches: MutableSet[KVCache],
    owner: str,
    max_tokens: int,
) -> AsyncGenerator[pb.Generated]:
    """Decode a request to its end, or to the longest text; closing the generator stops it.

    Args:
        caches: the drafter's are added.
    """
    drafting: Proposer | None = None
    # Another engine that runs the weights lends no embedding and no head to draft with. No layers
    # are reused here, so a drafter that was trained for N > 0 only cannot draft.
    if (
        request.speculate
        and drafter is not None
        and 0 in drafter.config.num_target_layers
        and isinstance(target, Target)
    ):
        drafting = FastMoAProposer(drafter, target, num_target_layers=0)
        caches |= {*drafting.caches}
    row = LeasedSlot(shared, owner, None if drafting is None else drafter)
    try:
        engine = Engine(row, drafting, target=target, max_positions=max_tokens)
        engine.add(
            request.token_ids,
            max_new_tokens=request.max_new_tokens,
            stop_token_ids=request.stop_token_ids,
            stop=request.stop,
            shape=shaping.policy(sampling),
            sampling=sampling,
        )
        while engine.num_active:
            for event in await engine.astep():
                yield _generated(event)
    finally:
        row.release()


def _generated(event: Event) -> pb.Generated:
    sources = [wire.SOURCES.index(source) for source in event.sources]
    reason = event.stop_reason or ""
    return pb.Generated(token_ids=event.token_ids, sources=sources, stop_reason=reason)
