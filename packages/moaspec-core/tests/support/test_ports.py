"""Ports are taken before a model is loaded."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from moaspec_core.errors import InputError
from moaspec_core.support.ports import bind, reserved, reuse_address, server_url, split_address


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that another program uses."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


def test_a_port_in_use(taken: int) -> None:
    with pytest.raises(InputError, match=rf"127\.0\.0\.1:{taken}.*in use.*--port"):
        bind("127.0.0.1", taken)


def test_a_port_is_taken_while_its_server_still_loads() -> None:
    with bind("127.0.0.1", 0) as first, pytest.raises(InputError, match="in use"):
        bind("127.0.0.1", first.getsockname()[1])


def test_a_server_starts_again_at_once() -> None:
    """A connection that the server closed is in TIME_WAIT, and the next may be bound, alone."""
    with bind("127.0.0.1", 0) as listener:
        reuse_address(listener)
        listener.listen()
        address = listener.getsockname()
        with socket.create_connection(address) as client:
            listener.accept()[0].close()
            assert not client.recv(1)
    with bind(*address), pytest.raises(InputError, match="in use"):
        bind(*address)


@pytest.mark.parametrize("system", ["posix", "nt"])
def test_no_other_program_may_take_the_port(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows it could, with the option that elsewhere lets a server start again at once."""
    with monkeypatch.context() as patched:
        patched.setattr(os, "name", system)
        listener = bind("127.0.0.1", 0)
        reuse_address(listener)
    with listener:
        shared = listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
    assert bool(shared) == (system == "posix")


@pytest.mark.parametrize("host", ["192.0.2.1", f"{64 * 'a'}.example"])
def test_an_address_of_another_machine_or_of_none(host: str) -> None:
    with pytest.raises(InputError, match=rf"{host}:8000: .*another host"):
        bind(host, 8000)
    with pytest.raises(InputError, match="no-such-host"):
        bind("no-such-host.invalid", 8000)


def test_reserved_ports_are_named_by_their_options(taken: int) -> None:
    with (
        pytest.raises(InputError, match="--metrics-port"),
        reserved({"--port": ("127.0.0.1", 0), "--metrics-port": ("127.0.0.1", taken)}),
    ):
        pass


def test_reserved_ports_differ() -> None:
    with bind("127.0.0.1", 0) as found:
        port = found.getsockname()[1]
    same = {"--port": ("127.0.0.1", port), "--metrics-port": ("127.0.0.1", port)}
    with pytest.raises(InputError, match=r"in use.*--metrics-port"), reserved(same):
        pass


def test_reserved_ports_are_free_afterwards() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
    with reserved({"--port": ("127.0.0.1", port)}):
        pass
    with bind("127.0.0.1", port) as again:
        again.listen()
        with pytest.raises(InputError):
            bind("127.0.0.1", port)


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("example.org:65535", ("example.org", 65535)),
        ("[::1]:50051", ("::1", 50051)),
    ],
)
def test_addresses(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address, option="--server") == parts


@pytest.mark.parametrize("address", ["", "example.org", ":1", "a:65536", "http://a:1", "::1:1"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(InputError, match="--server must be HOST:PORT"):
        split_address(address, option="--server")


@pytest.mark.parametrize(
    ("server", "tls", "url"),
    [
        ("localhost:50051", False, "ws://localhost:50051"),
        ("[::1]:50051", True, "wss://[::1]:50051"),
        ("ws://localhost:1", True, "ws://localhost:1"),  # refused with the CA, by its name
        ("wss://example.org/prefix", False, "wss://example.org/prefix"),
    ],
)
def test_urls_of_servers(server: str, tls: bool, url: str) -> None:
    assert server_url(server, tls=tls) == url


@pytest.mark.parametrize(
    ("server", "why"),
    [
        ("grpc://example.org:50051", "address of gRPC.* Use ws://HOST:PORT, or wss://"),
        ("grpcs://example.org:50051", "address of gRPC"),
        ("http://example.org:50051", "A server is ws://HOST:PORT"),
        ("example.org", "--server must be HOST:PORT"),
        ("example.org:0", "must name a port"),
    ],
)
def test_servers_without_a_url(server: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        server_url(server)
