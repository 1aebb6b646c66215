"""A device's link to its server: connects, detects a dead connection, and connects again.

A link is up after the first message of a connection. Every message shows that the link works;
heartbeats cause at least one every half second.
"""

import asyncio
import contextlib
from collections.abc import Callable

from moaspec_core.errors import LinkError, MoaSpecError, RefusedError, WireError
from moaspec_core.support.tasks import end_tasks
from moaspec_edge.device.events import LinkState, LinkStats, now
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol import wire
from moaspec_edge.protocol.fleet import AVOID_S, MAX_LATE, Route
from moaspec_edge.protocol.transport import Connection

HEARTBEAT_S = 0.5
"""Seconds between two heartbeats, which are the longest silence of an idle link."""

DEAD_AFTER_S = 0.9
"""Seconds of silence after which the link is dead. The answer to a heartbeat may be 0.4 s late,
twice what a lost packet takes, and readers wait for less than a second."""

BACKOFF_S, MAX_BACKOFF_S = 0.2, 1.0
"""First and longest time, in seconds, from the start of a failed attempt to that of the next."""

CONNECT_S = 1.0
"""Seconds that an attempt may take; more after `MAX_LATE` attempts that took too long."""

MAX_LIMIT_FACTOR = 6
"""Of `CONNECT_S`: enough for long round trips and busy servers. While packets are lost, the system
repeats the first one less and less often, by then every 3 s."""

FAREWELL_S = 0.5
"""Time for a link that is closed to send queued messages."""

LATE_S = 0.2
"""A timer that fires this late shows that the device was suspended, not that the link is dead."""


class ServerLink:
    """Keeps one connection.

    Args:
        session: random bytes that name the session, set in every message.
        on_message: called with every message but heartbeats.
        on_connect: called for a new connection; what it sends precedes all other messages.
        on_change: called for a new state and for a refusal.

    Attributes:
        stats: with the current state of the link.
        refused: why the session cannot go on, with the server's name; None if it can.
        fault: why there is no link, or was none; "" if that is not known.
    """

    def __init__(
        self,
        route: Route,
        session: bytes,
        stats: LinkStats,
        *,
        on_message: Callable[[pb.ServerMessage], None],
        on_connect: Callable[[], None],
        on_change: Callable[[], None],
    ) -> None:
        self._route, self.stats = route, stats
        self._session = session
        self._on_message, self._on_connect = on_message, on_connect
        self._on_change = on_change
        self._outgoing: asyncio.Queue[pb.ClientMessage] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._connection: Connection | None = None
        self._heard_s = 0.0
        self._late = 0  # attempts, one after another, that took too long
        self._number = 0
        self._beats: dict[int, float] = {}
        self._renew = self._moving = self._closing = False
        self.refused: Exception | None = None
        self.fault = ""

    @property
    def server(self) -> str:
        """The server of the latest attempt, for messages."""
        return self._route.address or "the server"

    @property
    def connected(self) -> bool:
        """Whether there is a connection, even if no message has come yet."""
        return self._connection is not None

    def start(self) -> None:
        """Start to connect, unless that is done already."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    def send(self, message: pb.ClientMessage) -> None:
        """Send a message; without a connection it is dropped."""
        if self._connection is not None:
            message.session = self._session
            self._outgoing.put_nowait(message)

    def leave(self, seconds: float, *, anyway: bool) -> None:
        """Connect to another server; this one is tried last for some time.

        Args:
            seconds: for which this server comes last.
            anyway: whether to replace it even if no other server is known.
        """
        self._moving = self._route.leave(seconds)
        self._renew = self._renew or self._moving or anyway

    async def close(self) -> None:
        """Send queued messages for a short time, then close the link."""
        self._closing = True
        if self._task is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FAREWELL_S):
                    await self._outgoing.join()
            await end_tasks(self._task)
            self._task = None
        self._set("closed")

    def _set(self, state: LinkState) -> None:
        if state != self.stats.state:
            self.stats.state = state
            self._on_change()

    async def _run(self) -> None:
        try:
            await self._keep_connected()
        except Exception as error:  # noqa: BLE001 - waiting requests raise it
            known = isinstance(error, MoaSpecError)
            self.refuse(error if known else RefusedError(f"The session failed: {error!r}"))

    async def _keep_connected(self) -> None:
        """Open one connection after another, with pauses, until the server refuses."""
        pause_s = BACKOFF_S
        while self.refused is None:
            started = now()
            was_up = await self._connect_once()
            # The pause is reset only after a connection that lasted.
            if was_up and now() - started > MAX_BACKOFF_S:
                pause_s = BACKOFF_S
            if self._moving:
                self._moving = False
                continue
            # The time of a failed attempt counts as pause.
            await asyncio.sleep(max(0.0, pause_s - (0.0 if was_up else now() - started)))
            pause_s = min(2 * pause_s, MAX_BACKOFF_S)

    async def _connect_once(self) -> bool:
        """Open one connection and use it until it ends; returns whether it was ever up."""
        factor = min(2 ** max(0, self._late - MAX_LATE + 1), MAX_LIMIT_FACTOR)
        try:
            async with asyncio.timeout(factor * CONNECT_S):
                connection = await self._route.connect()
        except LinkError as error:
            self.fault = str(error)
            return False
        except TimeoutError:
            self.fault = "The server has not answered in time."
            self._late += 1
            return False
        try:
            return await self._use_connection(connection)
        finally:
            self._connection = None
            self._outgoing = asyncio.Queue()
            await connection.close()

    def refuse(self, error: Exception) -> None:
        """Stop trying: the server refuses this session, or breaks the protocol."""
        if self._route.address:
            error.args = (f"{self._route.address}: {error}",)
        self.refused = error
        self._on_change()

    async def _use_connection(self, connection: Connection) -> bool:
        """Use a connection until it breaks, falls silent or is replaced."""
        self._connection, self._heard_s, self._renew = connection, now(), False
        self._beats.clear()
        self._on_connect()
        tasks = [
            asyncio.create_task(work)
            for work in (self._receive(connection), self._send(connection), self._send_heartbeats())
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            was_up = self.stats.state == "up"
            ended = await end_tasks(*tasks)
            self._lost(was_up)
        if not was_up:  # a server, or a proxy before it, that accepts connections and says nothing
            self._route.leave(AVOID_S)
            self.fault = "The server accepts connections and says nothing."
        for error in ended:
            if isinstance(error, LinkError):
                self.fault = str(error)
            if isinstance(error, Exception) and not isinstance(error, LinkError):
                raise error
        return was_up

    def _lost(self, was_up: bool) -> None:
        if was_up and not self._closing:
            self.stats.cuts += 1
            self.stats.noticed_s, self.stats.down_s = now() - self._heard_s, now()
            self._set("down")

    async def _receive(self, connection: Connection) -> None:
        while True:
            frame = await connection.receive()
            self._heard_s = now()
            self.stats.bytes_down += len(frame)
            message = wire.parse(frame, pb.ServerMessage())
            if message.session not in (self._session, b""):
                raise WireError("The server speaks of a session that is not this one.")
            if self.stats.state != "up":
                self.stats.reconnects += self.stats.state == "down"
                self.stats.up_s = now()
                self._late = 0
                self._set("up")
            if message.HasField("heartbeat"):
                self._note_round_trip(message.heartbeat.number)
            else:
                self._on_message(message)

    def _note_round_trip(self, number: int) -> None:
        sent_s, rtt_s = self._beats.pop(number, None), self.stats.rtt_s
        if sent_s is not None:
            took_s = now() - sent_s
            self.stats.rtt_s = took_s if rtt_s is None else 0.8 * rtt_s + 0.2 * took_s

    async def _send(self, connection: Connection) -> None:
        outgoing = self._outgoing
        while True:
            frame = (await outgoing.get()).SerializeToString()
            await connection.send(frame)
            self.stats.bytes_up += len(frame)
            outgoing.task_done()

    async def _send_heartbeats(self) -> None:
        """Send heartbeats; return if the link is silent for too long or is replaced."""
        tick_s = HEARTBEAT_S / 10
        next_s = woke_s = now()
        while not self._renew:
            late = now() - woke_s > tick_s + LATE_S
            if late:
                # Messages that came while the device was suspended are not read yet.
                self._heard_s = max(self._heard_s, now() - DEAD_AFTER_S / 2)
            elif now() - self._heard_s > DEAD_AFTER_S:
                return
            if now() >= next_s:
                next_s = now() + HEARTBEAT_S
                self._ping()
            woke_s = now()
            await asyncio.sleep(tick_s)

    def _ping(self) -> None:
        self._number += 1
        self._beats[self._number] = now()
        if len(self._beats) > 64:
            del self._beats[next(iter(self._beats))]
        self.send(pb.ClientMessage(heartbeat=pb.Heartbeat(number=self._number)))
