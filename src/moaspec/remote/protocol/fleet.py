"""Several servers as one: chooses the server of each text, and avoids servers for some time.

A text's server is chosen by rendezvous hashing of its first tokens. So texts with one long
beginning meet on the server that has read it, and a change of the fleet moves only the texts of
the servers that come or go.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moaspec.errors import LinkError
from moaspec.remote.protocol import target_pb2 as pb
from moaspec.remote.protocol.transport import Connection, ServerTransport, Transport
from moaspec.sampling.token_ids import common_length
from moaspec.support.ports import split_address

if TYPE_CHECKING:
    from moaspec.remote.server.auth import Credentials

WEBSOCKETS = ("ws://", "wss://")

KEY_TOKENS = 64
"""First tokens that choose the server. Chat templates and short system prompts take fewer, so one
of these does not draw all texts to one server."""

AVOID_S = 10.0
"""Seconds for which a server that drains or cannot be reached is tried last."""

BUSY_S = 2.0
"""Seconds for which a server without room is tried last."""

MAX_LATE = 2
"""Attempts at a session's own server that may time out before another one is tried: a short cut of
the device's link should not lead to another server, which does not know the text."""

LATE_S = 0.3
"""Seconds after which the lookup of a name is late; an attempt to connect takes at most 1 s."""


@dataclass(frozen=True)
class Server:
    """One server of a fleet.

    Attributes:
        address: as the user gave it; TLS checks its name.
        ip: where the name has several addresses, one of them.
    """

    address: str
    ip: str = ""


MakeTransport = Callable[[Server, str], Transport]
"""(server, affinity) -> its transport, which shows load balancers the `affinity` of a text.

InputError: the address or the credentials cannot be used."""


class Fleet:
    """Servers of one target; a `ServerTransport`, and a `Transport` for each session (`route`).

    Args:
        addresses: of the servers. A name with several addresses of one family is as many servers.
        make: makes the transport to one of them; it may make no calls but `connect` if nothing
            else is called.

    Raises:
        InputError: see `MakeTransport`.
    """

    def __init__(self, addresses: Sequence[str], make: MakeTransport) -> None:
        self.addresses, self._make = tuple(addresses), make
        self._avoided: dict[Server, float] = {}
        self._lookups = _Lookups()
        for address in self.addresses:
            make(Server(address), "")

    @staticmethod
    def at(addresses: Sequence[str], credentials: Credentials | None = None) -> Fleet:
        """The fleet at some addresses.

        Args:
            addresses: HOST:PORT for gRPC, ws://HOST:PORT or wss://HOST:PORT for WebSockets.

        Raises:
            InputError: an address or the credentials cannot be used.
        """

        # A device imports the libraries of the transports that it uses.
        def make(server: Server, affinity: str) -> Transport:
            where = server.address, credentials
            if server.address.startswith(WEBSOCKETS):
                from moaspec.remote.protocol.websocket_transport import WebSocketTransport

                return WebSocketTransport(*where, ip=server.ip, affinity=affinity)
            from moaspec.remote.protocol.grpc_transport import GrpcTransport

            return GrpcTransport(*where, ip=server.ip, affinity=affinity)

        return Fleet(addresses, make)

    @staticmethod
    def of(transport: Transport) -> Fleet:
        """The fleet itself, or a fleet of one server."""
        if isinstance(transport, Fleet):
            return transport
        return Fleet([""], lambda *_: transport)

    def through(self, wrap: Callable[[Transport], Transport]) -> Fleet:
        """These servers behind transports that `wrap` returns."""
        return Fleet(self.addresses, lambda *server: wrap(self._make(*server)))

    @property
    def no_link(self) -> str:
        """The message to users while no server has answered yet."""
        websocket = any(one.startswith(WEBSOCKETS) for one in self.addresses)
        return (
            f"No link to {', '.join(self.addresses)}; trying again. Does `moaspec target-server"
            f"{' --websocket' * websocket}` run there? Ctrl-C ends, --give-up-s limits the wait."
        )

    def route(self) -> Route:
        return Route(self)

    def transport(self, server: Server, key: bytes) -> Transport:
        """The transport of a text to a server."""
        return self._make(server, key.hex())

    def avoid(self, server: Server, seconds: float) -> None:
        """Let a server come last for some time."""
        at = time.monotonic()
        self._avoided = {one: until for one, until in self._avoided.items() if until > at}
        self._avoided[server] = at + seconds

    def avoids(self, server: Server) -> bool:
        return self._avoided.get(server, 0.0) > time.monotonic()

    async def ranked(self, key: bytes, own: Server | None = None) -> list[Server]:
        """All servers, in the order of a text's attempts.

        Args:
            own: the server that knows the text; it comes first, unless it is avoided.
        """
        found: list[list[Server]] = []
        for late_s in (LATE_S, None):  # if all names are late, wait for them
            if not any(found):
                lookups = (self._lookups.servers(one, late_s) for one in self.addresses)
                found = await asyncio.gather(*lookups)

        def rank(server: Server) -> tuple[float, bool, bytes]:
            until_s = self._avoided[server] if self.avoids(server) else 0.0
            return until_s, server != own, _score(key, server)

        return sorted({server for one in found for server in one}, key=rank)

    async def connect(self) -> Connection:
        """Connect to a server for no text in particular."""
        return await self.route().connect()

    async def describe(self) -> pb.Description:
        """Ask the first server that answers."""
        error = LinkError("There is no server.")
        for server in await self.ranked(b""):
            try:
                return await self._calls(server, b"").describe()
            except LinkError as broken:
                error = broken
                self.avoid(server, AVOID_S)
        raise error

    async def weights(self, packing: str = "") -> AsyncGenerator[pb.Weights]:
        """The weights of the first server; `describe` avoids broken ones."""
        (server, *_) = await self.ranked(b"")
        async with contextlib.aclosing(self._calls(server, b"").weights(packing)) as pieces:
            async for piece in pieces:
                yield piece

    async def generate(self, request: pb.GenerateRequest) -> AsyncGenerator[pb.Generated]:
        """Let a server decode alone.

        If it fails, the next one writes the text again, and known tokens are left out.
        """
        key, written = key_of(request.token_ids), list[int]()
        error = LinkError("There is no server.")
        for server in await self.ranked(key):
            messages = self._calls(server, key).generate(request)
            try:
                async with contextlib.aclosing(_after(written, messages)) as further:
                    async for message in further:
                        written += message.token_ids
                        yield message
                return
            except LinkError as broken:
                error = broken
                self.avoid(server, AVOID_S)
        raise error

    def _calls(self, server: Server, key: bytes) -> ServerTransport:
        transport: ServerTransport = self.transport(server, key)  # type: ignore[assignment]
        return transport


class Route:
    """The transport of one session: leads to the server of its text, or to the next.

    A session stays with its server, also after a cut, until that server drains, has no room or
    cannot be reached.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._key = fleet, b""
        self._own: Server | None = None
        self._tried: Server | None = None
        self.address = ""  # of the server that was tried last; "" for one without an address
        self._late = 0
        self._servers: list[Server] = []

    def aim(self, token_ids: Sequence[int]) -> None:
        """Let the beginning of this text choose a server, when the next one is chosen."""
        self._key = key_of(token_ids)

    def leave(self, seconds: float) -> bool:
        """Avoid the server of the latest connection.

        Returns:
            Whether the next connection will lead to another server.
        """
        if self._own is not None:
            self._fleet.avoid(self._own, seconds)
        return not all(map(self._fleet.avoids, self._servers))

    async def connect(self) -> Connection:
        """Connect to the first server that can be reached."""
        self._judge_last()
        self._servers = await self._fleet.ranked(self._key, self._own)
        error = LinkError("There is no server.")
        for server in self._servers:
            self._tried, self.address = server, server.address
            try:
                connection = await self._fleet.transport(server, self._key).connect()
            except LinkError as broken:
                error = broken
                self._fleet.avoid(server, AVOID_S)
                self._tried = None
                continue
            self._own, self._tried, self._late = server, None, 0
            return connection
        raise error

    def _judge_last(self) -> None:
        """Avoid the server of an attempt that took too long, so that it was cancelled."""
        if self._tried is None:
            return
        self._late += 1
        if self._tried != self._own or self._late >= MAX_LATE:
            self._fleet.avoid(self._tried, AVOID_S)
            self._late = 0
        self._tried = None


def key_of(token_ids: Sequence[int]) -> bytes:
    """The hash of a text's beginning, 8 bytes."""
    first = ",".join(map(str, token_ids[:KEY_TOKENS]))
    return hashlib.blake2b(first.encode(), digest_size=8).digest()


def _score(key: bytes, server: Server) -> bytes:
    return hashlib.blake2b(key + f"{server.address} {server.ip}".encode(), digest_size=8).digest()


class _Lookups:
    """Looks names up, one lookup at a time for each address.

    A name server that does not answer blocks a lookup for long. So each runs in a daemon thread,
    which neither the event loop's executor nor the end of the process waits for.
    """

    def __init__(self) -> None:
        self._running: dict[str, Future[list[Server]]] = {}
        self._known: dict[str, list[Server]] = {}

    async def servers(self, address: str, late_s: float | None) -> list[Server]:
        """The servers of an address: one for each IP address, if it is a name with several.

        Args:
            late_s: after this time the last result is returned, or nothing if there is none; None
                waits for the lookup.
        """
        place = _name(address)
        if place is None:
            return [Server(address)]
        running = self._running.get(address)
        begins = running is None or running.done()
        if running is None or begins:
            running = self._running[address] = Future()
            running.set_running_or_notify_cancel()  # waiters that give up do not cancel it
            threading.Thread(
                target=_look_up, args=(running, address, *place), name="lookup", daemon=True
            ).start()
        try:
            async with asyncio.timeout(late_s):
                self._known[address] = await asyncio.wrap_future(running)
        except TimeoutError:
            # Without an IP address the transport looks up as well: once for each late lookup.
            return [one for one in self._known.get(address, ()) if one.ip or begins]
        return self._known[address]


def _name(address: str) -> tuple[str, int] | None:
    """The host and port of an address whose host needs a lookup."""
    if not address:
        return None
    place = address.partition("://")[2].partition("/")[0] or address
    host, port = place, 0
    with contextlib.suppress(Exception):
        host, port = split_address(place, option="server")
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host.strip("[]"))
        return None
    return None if host == "localhost" else (host, port)


def _look_up(found: Future[list[Server]], address: str, host: str, port: int) -> None:
    """Look up a name; `found` receives a server for each IP address of the preferred family.

    A name with one address is one server. A name that cannot be looked up is one server too, whose
    transport reports the fault.
    """
    ips: set[str] = set()
    with contextlib.suppress(OSError, UnicodeError):
        results = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        # The system puts families that this network does not reach last (RFC 6724).
        ips = {str(where[0]) for family, *_, where in results if family == results[0][0]}
    several = [Server(address, ip) for ip in sorted(ips)] if len(ips) > 1 else []
    found.set_result(several or [Server(address)])


async def _after(
    written: Sequence[int], messages: AsyncGenerator[pb.Generated]
) -> AsyncGenerator[pb.Generated]:
    """The messages of a text without the tokens that another server sent; LinkError for others."""
    known = list(written)
    async with contextlib.aclosing(messages):
        async for message in messages:
            same = min(len(known), len(message.token_ids))
            if common_length(known, message.token_ids) < same:
                raise LinkError("Another server writes another text.")
            del known[:same], message.token_ids[:same], message.sources[:same]
            if message.token_ids or message.stop_reason or not same:
                yield message
