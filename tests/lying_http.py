"""HTTP servers that lie: they answer a path with any bytes, honest HTTP or not."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

Lie = Callable[[str], Iterable[bytes]]
"""The bytes that answer a path; they may never end."""

OK = b"HTTP/1.1 200 OK\r\n"
ABOUT = b'{"model": "m", "mode": "local"}'


@contextmanager
def lying(lie: Lie, asked: list[str] | None = None) -> Iterator[str]:
    """Serve until the end of the context; yields the URL.

    Args:
        asked: gets the request lines.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    held: list[socket.socket] = []

    def answer(connection: socket.socket) -> None:
        with suppress(OSError, ValueError):
            first = _request(connection)
            if asked is not None:
                asked.append(first)
            for part in lie(first.split()[1]):
                connection.sendall(part)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                held.append(connection)
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for connection in held:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        thread.join()


def _request(connection: socket.socket) -> str:
    """Read a request; returns its first line."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += _received(connection)
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").lower().split("\r\n")
    length = next((int(one.split(":")[1]) for one in lines if one.startswith("content-length")), 0)
    while len(body) < length:
        body += _received(connection)
    return head.decode("latin-1").split("\r\n")[0]


def _received(connection: socket.socket) -> bytes:
    data = connection.recv(1 << 16)
    if not data:
        raise ValueError("The client has left.")
    return data


def whole(body: bytes, *headers: bytes) -> list[bytes]:
    """An honest answer."""
    lines = [*headers, b"Connection: close", b"Content-Length: %d" % len(body), b"", b""]
    return [OK, b"\r\n".join(lines), body]


def endless(part: bytes, head: bytes = OK + b"\r\n") -> Iterator[bytes]:
    """An answer without an end."""
    return itertools.chain([head], itertools.repeat(part))


def chat(*lines: bytes) -> Lie:
    """A server of moaspec whose answers to a chat are these lines."""
    return lambda path: whole(ABOUT) if path == "/v1/moaspec" else [OK + b"\r\n", *lines]
