"""The server's side of the protocol, for any kind of connection."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from weakref import WeakSet

from moaspec.drafting.kv_cache import KVCache
from moaspec.engine.local_verifier import client_rows, client_tokens
from moaspec.engine.recurrent_verifier import local_verifier
from moaspec.generation.renewal import QUIET_S, RENEWAL_S, Renew, Renewal
from moaspec.model.checkpoint.moa_config import check_target
from moaspec.model.moa import MoADrafter
from moaspec.target.spec import TargetSpec
from moaspec.target.target import Target
from moaspec_core.drafting.protocols import Verifier
from moaspec_core.engine.position_rules import PositionRules
from moaspec_core.errors import InputError, LinkError
from moaspec_core.policy.pass_budget import PassBudget
from moaspec_core.policy.policies import DraftSettings
from moaspec_core.sampling.params import GREEDY
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol import wire
from moaspec_edge.protocol.transport import Connection
from moaspec_edge.server import shared_verifier
from moaspec_edge.server.activation_records import WireEncoder
from moaspec_edge.server.auth import ANONYMOUS
from moaspec_edge.server.capabilities import Capabilities, EngineCapabilities, layers_offered
from moaspec_edge.server.conversation import Conversation
from moaspec_edge.server.device_weights import DeviceWeights
from moaspec_edge.server.pending_work import PendingWork
from moaspec_edge.server.response_stream import ResponseStream
from moaspec_edge.server.server_only import decode_alone
from moaspec_edge.server.server_session import OnText
from moaspec_edge.server.session_store import NoRoomError, Quota, SessionStore, StoreOptions
from moaspec_edge.server.shared_verifier import PassOptions, SharedVerifier
from moaspec_edge.server.telemetry import Telemetry

MIN_FITTING = 64
"""Tokens of one text that a cache must hold."""

WARM_TOKENS = 8
"""Tokens that a server decodes before it takes texts."""


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """Limits of a service.

    Attributes:
        max_tokens: length of the longest text with its prompt; None takes the target's context.
        max_cache_bytes: keys, values and states of all texts, activations that are kept for
            devices, and caches of the server's own drafters. Where rows do not take memory one by
            one (on GPUs), it limits the number of sessions: each may have its full length.
        sessions: limits of the number of sessions.
        passes: limits of one pass of the target.

    Raises:
        InputError: no prompt fits into `max_tokens`.
    """

    max_tokens: int | None = None
    max_cache_bytes: int = 8 << 30
    sessions: StoreOptions = field(default_factory=StoreOptions)
    passes: PassOptions = field(default_factory=PassOptions)

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 2:
            raise InputError(
                f"max_tokens must be at least 2, got {self.max_tokens}: a prompt and a token after "
                "it must fit."
            )

    def longest(self, target: TargetSpec) -> int:
        """Length of the longest text, in tokens."""
        most = target.max_positions
        return most if self.max_tokens is None else min(most, self.max_tokens)

    @staticmethod
    def token_bytes(target: TargetSpec) -> int:
        """Bytes of one token's keys and values."""
        return target.num_layers * target.identity.kv_size * target.dtype.itemsize

    def fitting_tokens(self, target: TargetSpec) -> int:
        """Length of the longest text that fits; InputError if none does."""
        fit = (self.max_cache_bytes - target.state_bytes) // self.token_bytes(target)
        if fit < MIN_FITTING:
            raise InputError(
                f"A cache of {self.max_cache_bytes / 2**30:.3f} GiB holds {max(0, fit)} tokens of "
                f"this target, and {MIN_FITTING} are needed. Give it more (--cache-gib)."
            )
        return fit

    def fitting(self, target: TargetSpec) -> StoreOptions:
        """Session limits, reduced to the number that fit at full length into `max_cache_bytes`."""
        per_session = self.token_bytes(target) * self.longest(target) + target.state_bytes
        fit = max(1, self.max_cache_bytes // per_session)
        return replace(self.sessions, max_sessions=min(self.sessions.max_sessions, fit))


class ServingEngine(Verifier, Protocol):
    """An inference engine that verifies in place of the target's own passes.

    With a drafter, it returns the features of `wire_encoder`.
    """

    @property
    def capabilities(self) -> EngineCapabilities:
        """Properties that devices are told."""
        ...

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values that are held."""
        ...

    def release(self) -> None:
        """Free the memory of all rows; none may be in use."""
        ...


class TargetService:
    """Verifies the drafts of many devices with one target.

    Args:
        target: the model that verifies; a whole `Target`, unless an engine runs its weights.
        drafter: its encoder runs here; None sends devices no activations.
        engine: runs the target; None runs the target in this process.
        shaping: its costs decide which drafts of devices and of `generate` are verified; None
            verifies all and lets `generate` draft `DEFAULT_TREE`.

    Raises:
        MismatchError: the drafter belongs to another target.
    """

    def __init__(
        self,
        target: TargetSpec,
        drafter: MoADrafter | None = None,
        options: ServiceOptions | None = None,
        observer: Telemetry | None = None,
        engine: ServingEngine | None = None,
        *,
        shaping: DraftSettings | None = None,
    ) -> None:
        self.target, self.options = target, options or ServiceOptions()
        self.observer = observer or Telemetry()
        self._drafter, shaping = drafter, shaping or DraftSettings()
        own = EngineCapabilities() if engine is None else engine.capabilities
        self.verifier: Any
        passes, follows_use = self.options.passes, False
        if engine is not None:
            self.verifier = engine
        else:
            assert isinstance(target, Target), "without an engine the target itself decides"
            encoder: Any = None if drafter is None else wire_encoder(drafter, target)
            self.verifier = local_verifier(target, encoder)
            follows_use = self.verifier.cache.follows_use
            passes = replace(
                passes,
                owner_rows=min(passes.owner_rows, client_rows(target.device)),
                owner_tokens=min(passes.owner_tokens, client_tokens(target.device)),
            )
        longest = self.options.longest(target)
        if follows_use:
            longest = min(longest, self.options.fitting_tokens(target))
        self.capabilities = Capabilities(target, drafter, longest, own)
        self._weights = DeviceWeights()
        self._caches: WeakSet[KVCache] = WeakSet()  # of drafters of `generate`
        self.shared = SharedVerifier(
            self.verifier,
            passes,
            self.verifier.release,
            _budget_of(shaping),
            max_bytes=self._cache_room if follows_use else None,
        )
        self._shaping = replace(shaping, beside=lambda: self.shared.num_recent_rows)
        self._room = self.options.sessions if follows_use else self.options.fitting(target)
        rules = PositionRules.of(target, self.capabilities.max_tokens)
        self.sessions = SessionStore(self._room, self.shared, rules)
        self.work = PendingWork(self.capabilities, self.observer, self.sessions.remove)
        self._connections: set[ResponseStream] = set()
        self._texts: set[asyncio.Future[None]] = set()
        self._quota = Quota(self._room.connections_of, "connections")
        self.draining = self._stopped = False
        self._register_gauges()

    def renew_costs(self, renew: Renew) -> None:
        """Measure costs while no request is there; to be called before the first request."""

        def adopt(found: DraftSettings) -> None:
            self._shaping, self.shared.budget = found, _budget_of(found)

        self.shared.when_idle(Renewal(renew, QUIET_S, RENEWAL_S), self._shaping, adopt)

    def _register_gauges(self) -> None:
        counts, most = self.shared.counts, self.max_sessions
        for name, what, read in (
            ("sessions", "Sessions that are held", lambda: len(self.sessions)),
            ("slots", "Texts that fit, of sessions and of the server alone", lambda: most),
            ("slots_used", "Slots of texts that are held", lambda: self.shared.num_rows),
            ("slots_used_ratio", "Their share of all", lambda: self.shared.num_rows / most),
            ("draining", "1 while no further turn is taken", lambda: float(self.draining)),
            ("connections", "Connections attached to one", lambda: len(self._streams())),
            ("evicted", "Sessions forgotten to make room", lambda: self.sessions.evicted),
            ("waiting", "Requests that no pass has taken", lambda: self.shared.num_waiting),
            ("cache_bytes", "Keys and values held", lambda: self.verifier.cache_bytes),
            ("rows_set_back", "Texts whose keys were dropped for room", self._rows_set_back),
            ("record_bytes", "Activations held", self._record_bytes),
            ("passes", "Passes of the target", lambda: counts.passes),
            ("pass_rows", "Rows of all passes", lambda: counts.rows),
            ("pass_tokens", "Tokens of all passes", lambda: counts.tokens),
            ("pass_seconds", "Seconds of all passes", lambda: counts.seconds),
        ):
            self.observer.gauge(name, what).set_function(read)
        self.observer.by_owner("slots_used", "Slots of each owner's texts", self.shared.owners)

    def listen(self, on_text: OnText) -> None:
        """Pass on all later texts that no request influences, at the end of a turn.

        Tokens that the target wrote past the end, before the device halted it, are left out.
        """
        stops = self.target.stop_token_ids

        def to_its_end(prompt: Sequence[int], text: Sequence[int]) -> None:
            ends = (place for place, token in enumerate(text, 1) if token in stops)
            on_text(prompt, text[: next(ends, None)])

        self.sessions.on_text = to_its_end

    def adopt(self, drafter: MoADrafter, version: str) -> None:
        """Take a new version of the drafter, with the same encoder; `version` is its fingerprint.

        Texts that begin from now on are drafted by it here; devices can fetch it by `Update`, and
        may go on drafting with earlier ones.
        """
        self._drafter = drafter
        self.capabilities.add_versions(version)

    async def device_weights(self, packing: str = "") -> tuple[str, bytes]:
        """The newest version of the drafter.

        Args:
            packing: form of the weights; see `DescribeRequest`.

        Returns:
            Its fingerprint, and the device's part of it. Both are empty while there is none but the
            initial drafter; there is no part in a form that this server does not know.
        """
        version, drafter = self.capabilities.newest, self._drafter
        if not version or drafter is None:
            return "", b""
        return version, await self._weights.of(drafter, version, packing)

    def _rows_set_back(self) -> int:
        return 0 if self.shared.room is None else self.shared.room.rows_set_back

    def _cache_room(self) -> int:
        """Bytes that rows of the target's cache may have now."""
        drafters = sum(cache.num_bytes for cache in list(self._caches))
        return self.options.max_cache_bytes - self._record_bytes() - drafters

    def _record_bytes(self) -> int:
        """Bytes of activations that are kept for devices."""
        return sum(s.records.num_bytes for s in self.sessions if s.records is not None)

    @property
    def max_sessions(self) -> int:
        """Largest number of texts held at once."""
        return self._room.max_sessions

    def _streams(self) -> list[ResponseStream]:
        """Streams of the sessions whose devices are connected."""
        return [session.stream for session in self.sessions if session.stream is not None]

    async def converse(self, owner: str, connection: Connection) -> None:
        """Serve one connection until it ends.

        Raises:
            LinkError: the connection broke.
            WireError: the device sent an invalid message; the device is told.
            RefusedError: the device cannot be served; the device is told why.
            NoRoomError: too many connections with these credentials.
        """
        if self._stopped:
            raise LinkError("The server has stopped.")
        with self._quota.one(owner):
            conversation = Conversation(self, owner, connection)
            self._connections.add(conversation.stream)
            try:
                await conversation.run()
            finally:
                self._connections.discard(conversation.stream)

    async def generate(
        self, owner: str, request: pb.GenerateRequest
    ) -> AsyncGenerator[pb.Generated]:
        """Decode a text by the server alone.

        Raises:
            WireError: a value is out of range.
            RefusedError: the grammar cannot be compiled.
            NoRoomError: too many texts at once, of these credentials or of all.
        """
        ids = self.capabilities.text(request.token_ids)
        sampling = wire.sampling_of(request.sampling, self.capabilities.limits)
        if self.draining:
            raise NoRoomError("The server is stopping; ask another one.")
        rows, own = self.shared.num_rows, self.shared.rows_of(owner)
        if rows >= self._room.max_sessions:
            raise NoRoomError(
                f"This server has {rows} texts, as many as it takes (--max-sessions)."
            )
        if own >= self._room.share_of(owner):
            raise NoRoomError(f"These credentials have {own} texts, as many as they may have.")
        with self._count_text():
            sampling = await self.capabilities.with_grammar(
                sampling, request.sampling.grammar, len(ids), owner
            )
            work = decode_alone(
                self.shared,
                self.target,
                self._drafter,
                request,
                sampling,
                shaping=self._shaping,
                caches=self._caches,
                owner=owner,
                max_tokens=self.capabilities.max_tokens,
            )
            written: list[int] = []
            async with contextlib.aclosing(work) as messages:
                async for message in messages:
                    written += message.token_ids
                    yield message
            if self.sessions.on_text is not None and not sampling.changes_logits:
                self.sessions.on_text(ids, written)

    @contextlib.contextmanager
    def _count_text(self) -> Iterator[None]:
        """Register a text that the server decodes alone, so that `drain` waits for it."""
        ended = asyncio.get_running_loop().create_future()
        self._texts.add(ended)
        try:
            yield
        finally:
            self._texts.discard(ended)
            ended.set_result(None)

    async def warm_up(self) -> None:
        """Decode a text, so that the first device waits for no kernel, graph or memory.

        What grammars share is made, too: no device waits for another's first grammar.
        """
        await self.capabilities.prepare_grammars()
        prompt = range(min(shared_verifier.PREFILL_TOKENS, self.capabilities.max_tokens // 2))
        request = pb.GenerateRequest(
            token_ids=[token % self.target.vocab_size for token in prompt],
            sampling=wire.sampling_message(GREEDY),
            max_new_tokens=WARM_TOKENS,
            speculate=True,
        )
        async for _ in self.generate(ANONYMOUS, request):
            pass

    async def drain(self, timeout_s: float) -> None:
        """Refuse new turns, let running passes end, and tell devices to leave."""
        self.draining = True
        for stream in self._streams():
            stream.problem(pb.Problem.DRAINING, "The server is stopping.")
        work = [session.task for session in self.sessions if session.task is not None]
        if work or self._texts:
            await asyncio.wait([*work, *self._texts], timeout=timeout_s)
        await asyncio.gather(*(stream.flush(timeout_s) for stream in self._streams()))

    async def stop(self) -> None:
        self._stopped = True
        for stream in self._connections:
            stream.stop(LinkError("The server has stopped."))
        for session in self.sessions:
            self.sessions.remove(session)
        await self.shared.stop()


def _budget_of(shaping: DraftSettings) -> PassBudget | None:
    return None if shaping.costs is None else PassBudget(shaping.costs, shaping.prior[0][0])


def wire_encoder(drafter: MoADrafter, target: TargetSpec) -> WireEncoder:
    """The drafter's encoder, for a server; MismatchError for a drafter of another target."""
    check_target(drafter.config, None, target.identity, where="drafter")
    most = max(layers_offered(drafter, target.num_reusable_layers))
    return WireEncoder(drafter, most, target.num_kv_heads)
