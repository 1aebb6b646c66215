"""The server's side of the protocol, whatever carries its frames."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from moaspec.decode.sampling import SamplingParams
from moaspec.decode.verifier import LocalVerifier
from moaspec.errors import InputError, LinkError, MoaSpecError, RefusedError, WireError
from moaspec.model import MoADrafter
from moaspec.model.checkpoint import check_target
from moaspec.remote import identity, wire
from moaspec.remote import target_pb2 as pb
from moaspec.remote.alone import decode_alone
from moaspec.remote.layout import Layout, WireEncoder
from moaspec.remote.observe import Observer
from moaspec.remote.records import Asked
from moaspec.remote.sessions import Drafted, Opening, ServerSession
from moaspec.remote.shared import PassOptions, SharedVerifier
from moaspec.remote.store import ForeignSessionError, NoRoomError, SessionStore, StoreOptions
from moaspec.remote.stream import Stream
from moaspec.remote.transport import Connection
from moaspec.target import Target

if TYPE_CHECKING:
    from moaspec.decode.grammar import Grammars

MOST_LAYERS = 3
"""Largest N for drafters that were not trained for a certain one; the paper's largest."""

log = logging.getLogger(__name__)

BUSY_RETRY_S = 0.5
"""When a device that found no room may ask again."""


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """Limits of a service.

    Attributes:
        max_tokens: longest text, prompt included; None takes the target's context.
        max_cache_bytes: keys and values of all sessions at their longest; fewer sessions are
            accepted where more would not fit.
        max_messages_per_s: of one connection, averaged over `burst_s`.
        burst_s: see above.
        silent_s: a connection that says nothing for so long is closed; devices send heartbeats.
        send_timeout_s: how long a device may take to read one message.
        sessions: how many sessions there may be.
        passes: what one pass of the target may hold.
    """

    max_tokens: int | None = None
    max_cache_bytes: int = 8 << 30
    max_messages_per_s: float = 200.0
    burst_s: float = 5.0
    silent_s: float = 10.0
    send_timeout_s: float = 10.0
    sessions: StoreOptions = field(default_factory=StoreOptions)
    passes: PassOptions = field(default_factory=PassOptions)


class TargetService:
    """Verifies the drafts of many devices with one target.

    Args:
        target: decides.
        drafter: whose encoder runs here; None gives devices no activations.
        options: limits.
        observer: counts what happens.

    Raises:
        MismatchError: the drafter belongs to another target.
    """

    def __init__(
        self,
        target: Target,
        drafter: MoADrafter | None = None,
        options: ServiceOptions | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.target, self.options = target, options or ServiceOptions()
        self.observer = observer or Observer()
        self._drafter = drafter
        self._config = None if drafter is None else drafter.config
        self._layers = (0,) if drafter is None else _layers(drafter, target.num_layers)
        self._fingerprint = "" if drafter is None else identity.fingerprint(drafter)
        self.verifier = LocalVerifier(target, self._encoder(drafter))
        self.shared = SharedVerifier(self.verifier, self.options.passes)
        self.sessions = SessionStore(self._room(), make=self._make, drop=self._drop)
        self.draining = self._stopped = False
        self._connections: set[Stream] = set()
        self._limits = wire.Limits(target.vocab_size, self._max_tokens)
        self._grammars: Grammars | None = None  # made when a device first asks for one
        self._streams: dict[bytes, Stream] = {}
        self._work: dict[bytes, asyncio.Task[None]] = {}
        self._next: dict[bytes, Opening | Drafted] = {}
        self._show()

    def _show(self) -> None:
        """What can be read off at any time."""
        counts = self.shared.counts
        for name, what, read in (
            ("sessions", "Sessions that are held", lambda: len(self.sessions)),
            ("connections", "Connections attached to one", lambda: len(self._streams)),
            ("evicted", "Sessions forgotten to make room", lambda: self.sessions.evicted),
            ("waiting", "Requests that no pass has taken", lambda: self.shared.num_waiting),
            ("cache_bytes", "Keys and values held", lambda: self.verifier.cache.num_bytes),
            ("record_bytes", "Activations held", self.record_bytes),
            ("passes", "Passes of the target", lambda: counts.passes),
            ("pass_rows", "Rows of all passes", lambda: counts.rows),
            ("pass_tokens", "Tokens of all passes", lambda: counts.tokens),
            ("pass_seconds", "Seconds of all passes", lambda: counts.seconds),
        ):
            self.observer.gauge(name, what).set_function(read)

    def record_bytes(self) -> int:
        """Memory of activations that devices may still ask for."""
        return sum(s.records.num_bytes for s in self.sessions if s.records is not None)

    def _room(self) -> StoreOptions:
        """As many sessions as were asked for, or as many as fit into the memory for them."""
        per_token = self.target.num_layers * self.target.identity.kv_size
        per_session = per_token * self.target.dtype.itemsize * self._max_tokens
        fit = max(1, self.options.max_cache_bytes // per_session)
        asked = self.options.sessions
        return replace(asked, max_sessions=min(asked.max_sessions, fit))

    def _encoder(self, drafter: MoADrafter | None) -> Any:
        if drafter is None:
            return None
        check_target(drafter.config, None, self.target.identity, where="drafter")
        return WireEncoder(drafter, max(self._layers), self.target.num_kv_heads)

    @property
    def _max_tokens(self) -> int:
        most = self.target.max_positions
        return most if self.options.max_tokens is None else min(most, self.options.max_tokens)

    @property
    def limits(self) -> wire.Limits:
        """What messages may hold."""
        return self._limits

    @property
    def num_streams(self) -> int:
        """Connections that are attached to a session."""
        return len(self._streams)

    def describe(self) -> pb.Description:
        """Who this server is and what it can do."""
        return pb.Description(
            protocol=identity.PROTOCOL,
            target=identity.to_message(self.target.identity),
            drafter=self._fingerprint,
            law=identity.LAW,
            num_target_layers=self._layers,
            max_tokens=self._max_tokens,
            max_drafted=wire.MAX_DRAFTED,
            name=self.target.name,
        )

    def _make(self, name: bytes, owner: str) -> ServerSession:
        return ServerSession(
            name=name,
            owner=owner,
            row=self.shared.lease(),
            shared=self.shared,
            switches=self.target.rope_switches,
            max_tokens=self._max_tokens,
        )

    def _drop(self, session: ServerSession) -> None:
        self._next.pop(session.name, None)
        task = self._work.pop(session.name, None)
        if task is not None:
            task.cancel()
        self.shared.close(session.row)
        if not len(self.sessions):
            self.shared.when_idle(self.verifier.release)

    async def converse(self, owner: str, connection: Connection) -> None:
        """Serve one connection until it ends, whatever comes over it.

        Args:
            owner: whose credentials the connection has.
            connection: carries frames.

        Raises:
            LinkError: it broke.
            WireError: the device sent what no device sends; it was told so.
            RefusedError: the device cannot be served; it was told why.
        """
        stream = Stream(
            connection,
            send_timeout_s=self.options.send_timeout_s,
            on_sent=self.observer.sent,
        )
        if self._stopped:
            raise LinkError("The server has stopped.")
        self._connections.add(stream)
        sending = asyncio.create_task(stream.run())
        reading = asyncio.create_task(self._read(owner, stream))
        try:
            await asyncio.wait((sending, reading), return_when=asyncio.FIRST_COMPLETED)
            await (reading if reading.done() else sending)
        except (WireError, RefusedError, ForeignSessionError) as error:
            self.observer.refused(type(error).__name__)
            self._tell(stream, pb.Problem(kind=pb.Problem.REFUSED, message=str(error)))
            await stream.flush(1.0)
            raise
        finally:
            self._connections.discard(stream)
            self._detach(stream)
            for task in (sending, reading):
                task.cancel()
            await asyncio.gather(sending, reading, return_exceptions=True)

    async def _read(self, owner: str, stream: Stream) -> None:
        allowance = self.options.max_messages_per_s * self.options.burst_s
        last = time.monotonic()
        while True:
            frame = await self._receive(stream.connection)
            self.observer.received(len(frame))
            now = time.monotonic()
            full = self.options.max_messages_per_s * self.options.burst_s
            allowance = min(full, allowance + (now - last) * self.options.max_messages_per_s) - 1
            last = now
            if allowance < 0:
                raise RefusedError(
                    f"More than {self.options.max_messages_per_s:g} messages a second."
                )
            self._handle(owner, stream, wire.parse_client(frame))

    async def _receive(self, connection: Connection) -> bytes:
        try:
            async with asyncio.timeout(self.options.silent_s):
                return await connection.receive()
        except TimeoutError as error:
            raise LinkError(f"The device said nothing for {self.options.silent_s:g} s.") from error

    def _handle(self, owner: str, stream: Stream, message: pb.ClientMessage) -> None:
        """One message of a device."""
        if stream.name not in (None, message.session):
            raise RefusedError("A connection carries one session; open another for this one.")
        stream.name = message.session
        if message.HasField("heartbeat"):
            self._say(stream, message, pb.ServerMessage(heartbeat=message.heartbeat))
            return
        session = self.sessions.find(message.session, owner)
        if message.HasField("open"):
            self._open(owner, stream, session, message)
        elif message.HasField("close"):
            if session is not None:
                self.sessions.remove(session)
        elif session is None or message.turn > session.turn:
            self._say(stream, message, _problem(pb.Problem.LOST, "There is no such session."))
        elif message.turn == session.turn:
            self._attach(stream, session)
            self._go_on(stream, session, message)

    def _open(
        self,
        owner: str,
        stream: Stream,
        session: ServerSession | None,
        message: pb.ClientMessage,
    ) -> None:
        opening = self._opening(message)
        if session is not None and message.turn < session.turn:
            return
        if self.draining:
            self._say(stream, message, _problem(pb.Problem.DRAINING, "The server is stopping."))
            return
        if session is None:
            try:
                session = self.sessions.create(message.session, owner)
            except NoRoomError as error:
                self._say(stream, message, _problem(pb.Problem.BUSY, str(error), BUSY_RETRY_S))
                return
        self._attach(stream, session)
        self._put(session, opening)

    def _go_on(self, stream: Stream, session: ServerSession, message: pb.ClientMessage) -> None:
        """Messages of a session's current turn."""
        if message.HasField("draft"):
            draft = message.draft
            self._put(session, Drafted(session.turn, draft.base, wire.tree_of(draft, self._limits)))
        elif message.HasField("resume"):
            held = wire.runs_of(message.resume.held, self._limits)
            if session.records is not None:
                session.hold(Asked(session.records.layout, held))
            if session.decided and message.resume.base <= len(session.token_ids):
                self._answer(session, message.resume.base)
            stream.more()
        elif message.HasField("fetch") and session.records is not None:
            for start, stop in wire.runs_of(message.fetch.ranges, self._limits):
                session.records.sent.discard(start, stop)
            stream.more()

    def _opening(self, message: pb.ClientMessage) -> Opening:
        """Check everything that a turn asks for.

        Raises:
            WireError: values out of range.
            RefusedError: another model, or one that this server has not.
        """
        asked = message.open
        if (asked.protocol, asked.law) != (identity.PROTOCOL, identity.LAW):
            raise RefusedError(
                f"The device speaks protocol {asked.protocol} with law {asked.law}, this server "
                f"{identity.PROTOCOL} with {identity.LAW}. Update the older one."
            )
        target = identity.from_message(asked.target)
        if wrong := identity.difference(target, self.target.identity):
            raise RefusedError(f"The device drafts for another target: {wrong}.")
        most = self._max_tokens - 1
        ids = wire.tokens_of(asked.token_ids, self._limits, least=1, most=most)
        if not 1 <= asked.prompt_length <= len(ids) or message.turn < 1:
            raise WireError("A turn has a number from 1 on, and a prompt within its text.")
        sampling = self._sampling(asked.sampling, asked.prompt_length)
        return Opening(message.turn, ids, asked.prompt_length, sampling, self._asked(asked))

    def _sampling(self, message: pb.Sampling, prompt_length: int) -> SamplingParams:
        """Settings of a message, its grammar as a logits processor.

        Raises:
            WireError: values out of range.
            RefusedError: a grammar that cannot be compiled here.
        """
        sampling = wire.sampling_of(message, self._limits)
        if not message.grammar:
            return sampling
        try:
            from moaspec.decode.grammar import Grammars
        except ImportError as error:
            raise RefusedError(f"This server has no grammars: {error.name} is missing.") from error
        self._grammars = self._grammars or Grammars(
            self.target.tokenizer,
            vocab_size=self.target.vocab_size,
            stop_token_ids=self.target.stop_token_ids,
        )
        try:
            processor = self._grammars.processor(message.grammar, prompt_length)
        except InputError as error:
            raise RefusedError(str(error)) from error
        return replace(sampling, processors=(processor,))

    def _asked(self, asked: pb.Open) -> Asked | None:
        """The activations that a device wants."""
        if not asked.drafter:
            return None
        if asked.drafter != self._fingerprint or self._config is None:
            have = self._fingerprint[:12] or "none"
            raise RefusedError(
                f"The device's drafter ({asked.drafter[:12]}) is not the one whose encoder runs "
                f"here ({have}). Export the device bundle anew from the server's drafter."
            )
        if asked.num_target_layers not in self._layers:
            raise RefusedError(
                f"N={asked.num_target_layers} is not among {list(self._layers)} of this drafter."
            )
        layout = Layout.of(
            self._config,
            wire.codec_of(asked.codec),
            asked.num_target_layers,
            self.target.head_dim,
        )
        return Asked(layout, wire.runs_of(asked.held, self._limits))

    def _attach(self, stream: Stream, session: ServerSession) -> None:
        """From now on this session's answers go out here, and nowhere else."""
        old = self._streams.get(session.name)
        if old is stream and stream.session is session:
            return
        if old is not None and old is not stream:
            old.session = None
            old.stop(LinkError("The device came back on another connection."))
        stream.session = session
        self._streams[session.name] = stream
        self.sessions.attached.add(session.name)

    def _detach(self, stream: Stream) -> None:
        session = stream.session
        if session is not None and self._streams.get(session.name) is stream:
            del self._streams[session.name]
            self.sessions.attached.discard(session.name)

    def _put(self, session: ServerSession, work: Opening | Drafted) -> None:
        """Let a session do something; of what comes while it is busy, the latest counts."""
        self._next[session.name] = work
        if session.name not in self._work:
            task = asyncio.create_task(self._run(session))
            self._work[session.name] = task

    async def _run(self, session: ServerSession) -> None:
        """Work on what a session asks for until it asks for nothing more."""
        try:
            while (work := self._next.pop(session.name, None)) is not None:
                await self._do(session, work)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - a session that fails must not hang its device
            self._fail(session, error)
        finally:
            if self._work.get(session.name) is asyncio.current_task():
                del self._work[session.name]

    def _do(self, session: ServerSession, work: Opening | Drafted) -> Coroutine[Any, Any, None]:
        if isinstance(work, Opening):
            return self._begin(session, work)
        return self._verify(session, work)

    async def _begin(self, session: ServerSession, opening: Opening) -> None:
        if opening.turn < session.turn:
            return
        if not session.knows(opening):
            session.begin(opening)
        elif opening.asked is not None:
            session.hold(opening.asked)
        stream = self._streams.get(session.name)
        if stream is not None:
            stream.more()
        if not session.decided:
            with self.observer.work("prefill"):
                await self._reading(session)
        self._answer(session, len(opening.token_ids))

    async def _reading(self, session: ServerSession) -> None:
        async for _ in session.read():
            stream = self._streams.get(session.name)
            if stream is not None:
                stream.more()

    async def _verify(self, session: ServerSession, drafted: Drafted) -> None:
        committed = len(session.token_ids)
        if drafted.turn != session.turn:
            return
        if drafted.base > committed or not session.decided:
            self._problem(session, pb.Problem.LOST, "The text here is shorter.")
            return
        if drafted.base < max(1, committed):
            self._answer(session, drafted.base)
            return
        if committed >= self._max_tokens:
            self._problem(session, pb.Problem.REFUSED, f"Texts end at {self._max_tokens} tokens.")
            return
        with self.observer.work("verify"):
            activations = await session.verify(drafted.tree)
        self.observer.verified(len(drafted.tree.tokens), len(session.token_ids) - committed)
        self._answer(session, committed, activations)

    def _answer(
        self, session: ServerSession, base: int, activations: pb.Activations | None = None
    ) -> None:
        stream = self._streams.get(session.name)
        if stream is None:
            if session.records is not None and activations is not None:
                stop = activations.start + activations.count
                session.records.sent.discard(activations.start, stop)
            return
        verdict = session.answer(base, activations)
        stream.answer(pb.ServerMessage(session=session.name, turn=session.turn, verdict=verdict))

    def _problem(self, session: ServerSession, kind: pb.Problem.Kind, message: str) -> None:
        stream = self._streams.get(session.name)
        if stream is not None:
            problem = pb.Problem(kind=kind, message=message)
            stream.answer(
                pb.ServerMessage(session=session.name, turn=session.turn, problem=problem)
            )

    def _fail(self, session: ServerSession, error: Exception) -> None:
        """A pass failed for this session alone; its device may open it anew."""
        # Never the message of a library's error: it might quote the text.
        log.error("A session failed: %s", type(error).__name__)
        self.observer.failed(type(error).__name__)
        told = str(error) if isinstance(error, MoaSpecError) else "The pass failed."
        self._problem(session, pb.Problem.REFUSED, told)
        self.sessions.remove(session)

    @staticmethod
    def _tell(stream: Stream, problem: pb.Problem) -> None:
        stream.answer(pb.ServerMessage(session=stream.name or b"", problem=problem))

    @staticmethod
    def _say(stream: Stream, to: pb.ClientMessage, answer: pb.ServerMessage) -> None:
        answer.session, answer.turn = to.session, to.turn
        stream.answer(answer)

    async def generate(
        self, _owner: str, request: pb.GenerateRequest
    ) -> AsyncGenerator[pb.Generated]:
        """The server alone.

        Raises:
            WireError: values out of range.
            NoRoomError: too many texts at once.
        """
        wire.tokens_of(request.token_ids, self._limits, least=1, most=self._max_tokens - 1)
        sampling = self._sampling(request.sampling, len(request.token_ids))
        if self.draining or self.shared.num_rows >= self._room().max_sessions:
            raise NoRoomError("There is no room for another text; try again later.")
        work = decode_alone(self.shared, self.target, self._drafter, request, sampling)
        async with contextlib.aclosing(work) as messages:
            async for message in messages:
                yield message

    def sweep(self) -> None:
        """Forget sessions that were idle for too long."""
        self.sessions.sweep()

    async def drain(self, timeout_s: float) -> None:
        """Take no new turns, let running passes end, and tell devices to go elsewhere."""
        self.draining = True
        for name, stream in list(self._streams.items()):
            message = _problem(pb.Problem.DRAINING, "The server is stopping.")
            message.session = name
            stream.answer(message)
        if self._work:
            await asyncio.wait(list(self._work.values()), timeout=timeout_s)
        streams = list(self._streams.values())
        await asyncio.gather(*(stream.flush(timeout_s) for stream in streams))

    async def stop(self) -> None:
        """End all connections and forget all sessions."""
        self._stopped = True
        for stream in self._connections:
            stream.stop(LinkError("The server has stopped."))
        for session in self.sessions:
            self.sessions.remove(session)
        await self.shared.stop()


def _problem(kind: pb.Problem.Kind, message: str, retry_s: float = 0.0) -> pb.ServerMessage:
    return pb.ServerMessage(problem=pb.Problem(kind=kind, message=message, retry_s=retry_s))


def _layers(drafter: MoADrafter, num_layers: int) -> tuple[int, ...]:
    """The N that devices may ask for: those with an exit; without exits any, within reason."""
    recorded = drafter.config.num_target_layers
    if drafter.exits:
        return tuple(recorded)
    return tuple(range(min(num_layers, max(*recorded, MOST_LAYERS)) + 1))
