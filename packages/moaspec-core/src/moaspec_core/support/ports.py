"""Addresses of servers, and binding them before a model is loaded."""

import errno
import os
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from moaspec_core.errors import InputError
from moaspec_core.support.causes import system_reason

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(\d{1,5})")


def split_address(address: str, *, option: str) -> tuple[str, int]:
    """Split HOST:PORT, IPv6 addresses lose their brackets; InputError for another form."""
    found = _ADDRESS.fullmatch(address)
    if found is None or int(found[2]) >= 2**16:
        raise InputError(
            f"{option} must be HOST:PORT, such as 127.0.0.1:50051 or [::1]:50051, got {address!r}."
        )
    return found[1].strip("[]"), int(found[2])


def server_url(server: str, *, tls: bool = False) -> str:
    """The URL of a target server.

    Args:
        server: ws://HOST:PORT, wss://HOST:PORT or HOST:PORT.
        tls: whether HOST:PORT alone is a server with TLS.

    Raises:
        InputError: another form.
    """
    scheme, separator, _ = server.partition("://")
    if separator and scheme.lower() in ("ws", "wss"):
        return server
    if scheme.lower().startswith("grpc"):
        raise InputError(
            f"{server!r} is an address of gRPC, which servers no longer speak. Use ws://HOST:PORT, "
            "or wss://HOST:PORT with TLS."
        )
    if separator:
        raise InputError(
            f"A server is ws://HOST:PORT, wss://HOST:PORT or HOST:PORT, got {server!r}."
        )
    if split_address(server, option="--server")[1] == 0:
        raise InputError(f"--server must name a port, got {server!r}.")
    return f"{'wss' if tls else 'ws'}://{server}"


def joined_address(host: str, port: int | str) -> str:
    """HOST:PORT, where IPv6 addresses get brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind(host: str, port: int, *, option: str = "--port") -> socket.socket:
    """A socket bound to an address, not listening yet; meanwhile no other can be bound to it.

    Args:
        port: 0 takes a free one.

    Raises:
        InputError: the address cannot be used.
    """
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, number)
    except (OSError, UnicodeError) as error:
        raise _refusal(host, port, "host", error) from error
    try:
        try:
            listener.bind(address)
        except OSError:
            reuse_address(listener)
            listener.bind(address)
            reuse_address(listener, allowed=False)
    except OSError as error:
        listener.close()
        other = "host" if error.errno == errno.EADDRNOTAVAIL else option
        raise _refusal(host, port, other, error) from error
    return listener


def reuse_address(listener: socket.socket, *, allowed: bool = True) -> None:
    """Before it listens: its connections in TIME_WAIT will not keep the port from its successor.

    On Windows they never do, and this option would let another program take the port.
    """
    if os.name == "posix":
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, allowed)


@contextmanager
def reserved(addresses: dict[str, tuple[str, int | None]]) -> Iterator[None]:
    """Hold ports while a model loads, for servers that bind by themselves afterwards.

    Args:
        addresses: host and port by option; None and 0 need nothing.

    Raises:
        InputError: one cannot be used, or two are the same.
    """
    with ExitStack() as stack:
        for option, (host, port) in addresses.items():
            if port:
                stack.enter_context(bind(host, port, option=option))
        yield


def _refusal(host: str, port: int, other: str, error: OSError | UnicodeError) -> InputError:
    reason = system_reason(error)
    return InputError(f"Cannot listen on {host}:{port}: {reason}. Choose another {other}.")
