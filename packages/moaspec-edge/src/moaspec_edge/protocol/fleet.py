"""Several servers as one: chooses the server of each text, and avoids servers for some time.

A hash of a text's first tokens decides the order in which it tries the servers. So texts with one
long beginning meet on the server that has read it. Balancing by load is left to proxies.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from moaspec_core.errors import InputError, LinkError
from moaspec_core.sampling.token_ids import common_length
from moaspec_core.support.ports import server_url
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol.transport import Connection, ServerTransport, Transport
from moaspec_edge.protocol.websocket_transport import WebSocketTransport
from moaspec_edge.server.auth import Credentials

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

MakeTransport = Callable[[str, str], Transport]
"""(address, affinity) -> the transport to a server, which shows load balancers the `affinity` of a
text.

InputError: the address or the credentials cannot be used."""


class Fleet:
    """Servers of one target; a `ServerTransport`, and a `Transport` for each session (`route`).

    Args:
        addresses: of the servers, as the user gave them.
        make: makes the transport to one of them; it may make no calls but `connect` if nothing
            else is called.

    Raises:
        InputError: there is no address, or see `MakeTransport`.
    """

    def __init__(self, addresses: Sequence[str], make: MakeTransport) -> None:
        if not addresses:
            raise InputError("A fleet has at least one address.")
        self.addresses, self._make = tuple(dict.fromkeys(addresses)), make
        self._avoided: dict[str, float] = {}
        for address in self.addresses:
            make(address, "")

    @staticmethod
    def at(addresses: Sequence[str], credentials: Credentials | None = None) -> Fleet:
        """The fleet at some addresses.

        Args:
            addresses: ws://HOST:PORT or wss://HOST:PORT; HOST:PORT alone is one of these, with TLS
                where the credentials name a CA.

        Raises:
            InputError: an address or the credentials cannot be used.
        """
        tls = credentials is not None and credentials.ca is not None

        def make(address: str, affinity: str) -> Transport:
            return WebSocketTransport(address, credentials, affinity=affinity)

        return Fleet([server_url(one, tls=tls) for one in addresses], make)

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
        return (
            f"No link to {', '.join(self.addresses)}; trying again. Does `moaspec target-server` "
            "run there? Ctrl-C ends, --give-up-s limits the wait."
        )

    def route(self) -> Route:
        return Route(self)

    def transport(self, server: str, key: bytes) -> Transport:
        """The transport of a text to a server."""
        return self._make(server, key.hex())

    def avoid(self, server: str, seconds: float) -> None:
        """Let a server come last for some time."""
        at = time.monotonic()
        self._avoided = {one: until for one, until in self._avoided.items() if until > at}
        self._avoided[server] = at + seconds

    def avoids(self, server: str) -> bool:
        return self._avoided.get(server, 0.0) > time.monotonic()

    def ranked(self, key: bytes, own: str | None = None) -> list[str]:
        """The addresses of all servers, in the order of a text's attempts.

        Args:
            key: of the text; decides which server is the first.
            own: the server that knows the text; it comes first, unless it is avoided.
        """
        first = int.from_bytes(key) % len(self.addresses)

        def rank(server: str) -> tuple[float, bool]:
            return self._avoided[server] if self.avoids(server) else 0.0, server != own

        return sorted(self.addresses[first:] + self.addresses[:first], key=rank)

    async def connect(self) -> Connection:
        """Connect to a server for no text in particular."""
        return await self.route().connect()

    async def describe(self) -> pb.Description:
        """Ask the first server that answers."""
        error = LinkError("There is no server.")
        for server in self.ranked(b""):
            try:
                return await self._calls(server, b"").describe()
            except LinkError as broken:
                error = broken
                self.avoid(server, AVOID_S)
        raise error

    async def weights(self, packing: str = "") -> AsyncGenerator[pb.Weights]:
        """The weights of the first server; `describe` avoids broken ones."""
        calls = self._calls(self.ranked(b"")[0], b"")
        async with contextlib.aclosing(calls.weights(packing)) as pieces:
            async for piece in pieces:
                yield piece

    async def generate(self, request: pb.GenerateRequest) -> AsyncGenerator[pb.Generated]:
        """Let a server decode alone.

        If it fails, the next one writes the text again, and known tokens are left out.
        """
        key, written = key_of(request.token_ids), list[int]()
        error = LinkError("There is no server.")
        for server in self.ranked(key):
            messages = self._calls(server, key).generate(request)
            try:
                async with contextlib.aclosing(_after(written, messages)) as rest:
                    async for message in rest:
                        written += message.token_ids
                        yield message
                return
            except LinkError as broken:
                error = broken
                self.avoid(server, AVOID_S)
        raise error

    def _calls(self, server: str, key: bytes) -> ServerTransport:
        transport: ServerTransport = self.transport(server, key)  # type: ignore[assignment]
        return transport


class Route:
    """The transport of one session: leads to the server of its text, or to the next.

    A session stays with its server, also after a cut, until that server drains, has no room or
    cannot be reached.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._key = fleet, b""
        self._own: str | None = None
        self._tried: str | None = None
        self.address = ""  # of the server that was tried last; "" for one without an address
        self._late = 0
        self._servers: list[str] = []

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
        self._servers = self._fleet.ranked(self._key, self._own)
        error = LinkError("There is no server.")
        for server in self._servers:
            self._tried = self.address = server
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
