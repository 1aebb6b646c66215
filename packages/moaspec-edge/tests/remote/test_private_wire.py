"""Every byte that leaves the device is captured, and no private text is in it in any form.

A proxy on the way writes down what TCP carries, headers included. As WebSockets mask
messages, the messages themselves are searched too.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import urllib.parse
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import moaspec
import tiny
from moaspec_core.privacy.vault import Vault
from moaspec_edge.device.local_parts import LocalDevice
from moaspec_edge.device.remote_session import RemoteOptions, RemoteSession
from moaspec_edge.emulation import LinkProfile, ShapedTransport
from moaspec_edge.protocol.transport import Connection, Transport
from moaspec_edge.protocol.websocket_transport import WebSocketTransport
from moaspec_edge.server.listeners.websocket_server import ServerOptions, TargetServer
from moaspec_edge.server.service import TargetService

SECRETS = ("ada.lovelace@example.org", "+49 30 901820", "4111 1111 1111 1111", "Schroedinger")
TEXT = (
    "Mail ada.lovelace@example.org, call +49 30 901820, charge 4111 1111 1111 1111; "
    "the cat is <private>Schroedinger</private>."
)


def byte_tokenizer() -> Any:
    """One token per byte, so that every text has ids and every id a text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def forms(secret: str, ids: list[int]) -> Iterator[bytes]:
    """The ways in which a text could be on the wire; a hash counts as one."""
    raw = secret.encode()
    digits = "".join(one for one in secret if one.isalnum()).encode()
    for data in (raw, raw.lower(), raw[::-1], digits, secret.encode("utf-16-le")):
        yield data
        # Base64 of the middle of a longer text depends on where it begins.
        for shift in range(3):
            coded = base64.b64encode(b"." * shift + data)
            yield coded[4 if shift else 0 : len(coded) // 4 * 4 - 4]
        yield data.hex().encode()
        yield urllib.parse.quote(data).encode()
    yield bytes(ids)
    for width in (2, 4, 8):
        for order in ("little", "big"):
            yield b"".join(one.to_bytes(width, order) for one in ids)
    yield b"".join(_varint(one) for one in ids)
    yield " ".join(map(str, ids)).encode()
    packed = b"".join(one.to_bytes(4, "little") for one in ids)
    for data in (raw, packed, str(ids).encode()):
        for name in ("md5", "sha1", "sha256", "sha512", "blake2b"):
            digest = hashlib.new(name, data)
            yield digest.digest()[:8]
            yield digest.hexdigest()[:16].encode()


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number % 128 + 128)
        number //= 128
    return bytes([*found, number])


class Tap:
    """Keeps the frames that the device sends."""

    def __init__(self, inner: Transport, frames: list[bytes]) -> None:
        self._inner, self._frames = inner, frames

    async def connect(self) -> Connection:
        connection: Any = await self._inner.connect()
        write = connection.send

        async def send(frame: bytes) -> None:
            self._frames.append(frame)
            await write(frame)

        connection.send = send
        return cast(Connection, connection)


def captured(text: str, vault: Vault | None) -> tuple[bytes, str, Any]:
    """What leaves the device while this is answered, cut and return included; and the answer."""
    tokenizer = byte_tokenizer()
    target = tiny.fresh_target(tokenizer=tokenizer, vocab_size=256)
    drafter = tiny.random_drafter(target)
    frames, proxy = list[bytes](), Proxy()

    async def run() -> str:
        service = TargetService(target, drafter)
        async with TargetServer(service, ServerOptions(port=0)) as server, proxy.to(server):
            return await converse(WebSocketTransport(f"ws://127.0.0.1:{proxy.port}"))

    async def converse(inner: WebSocketTransport) -> str:
        transport = ShapedTransport(inner, LinkProfile(name="x", delay_s=0.001))
        options = RemoteOptions(draft=moaspec.Chain(2))
        session = RemoteSession(LocalDevice(target, drafter), Tap(transport, frames), options)
        sent = text if vault is None else vault.hide(text)
        ids = tokenizer(sent)["input_ids"]
        mending: asyncio.Task[None] | None = None
        async for _ in session.stream(ids, max_new_tokens=16, temperature=0.8, seed=1):
            if mending is None:
                transport.faults.cut, mending = True, asyncio.create_task(mend(session, transport))
        assert mending is not None
        await mending
        # The next turn: the whole conversation again, what the user sees of it included.
        shown = sent + tokenizer.decode(session.result.token_ids)
        shown = text + " " + (shown if vault is None else vault.restore(shown))
        again = shown if vault is None else vault.hide(shown)
        await session.generate(tokenizer(again)["input_ids"], max_new_tokens=4)
        await session.close()
        assert session.stats.cuts
        return shown

    shown = asyncio.run(run())
    sent = b"\n".join(frames)
    assert len(proxy.up) > len(sent)
    return sent + b"\n" + bytes(proxy.up), shown, tokenizer


async def mend(session: RemoteSession, transport: ShapedTransport) -> None:
    """Mend the link when the session has noticed the cut.

    Not at its next event: a session that was cut off before any activations came writes nothing.
    """
    while not session.stats.cuts:
        await asyncio.sleep(0.01)
    transport.faults.cut = False


class Proxy:
    """Carries TCP connections to a server.

    Attributes:
        up: every byte of the clients.
    """

    def __init__(self) -> None:
        self.up, self.port = bytearray(), 0
        self._ends: list[Any] = []
        self._carrying: set[asyncio.Task[Any] | None] = set()

    @contextlib.asynccontextmanager
    async def to(self, behind: TargetServer) -> AsyncIterator[None]:
        port = urllib.parse.urlsplit(behind.url).port

        async def accept(reader: Any, writer: Any) -> None:
            self._carrying.add(asyncio.current_task())
            back, there = await asyncio.open_connection("127.0.0.1", port)
            self._ends += [writer, there]
            await asyncio.gather(
                self._carry(reader, there, self.up), self._carry(back, writer, bytearray())
            )

        async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
            self.port = server.sockets[0].getsockname()[1]
            yield
            for end in self._ends:
                end.close()
            await asyncio.gather(*(task for task in self._carrying if task is not None))

    @staticmethod
    async def _carry(reader: Any, writer: Any, copy: bytearray) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                copy += data
                writer.write(data)
        writer.close()


@pytest.mark.slow
def test_nothing_private_leaves_the_device() -> None:
    sent, shown, tokenizer = captured(TEXT, Vault())
    assert len(sent) > 500
    for secret in SECRETS:
        assert secret in shown  # restored for the user
        for form in forms(secret, tokenizer(secret)["input_ids"]):
            assert form not in sent


@pytest.mark.slow
def test_the_search_finds_what_is_not_hidden() -> None:
    """Without a vault the same search does find the text: as token ids."""
    plain = TEXT.replace("<private>", "").replace("</private>", "")
    sent, _, tokenizer = captured(plain, None)
    for secret in SECRETS:
        ids = tokenizer(secret)["input_ids"]
        assert any(form in sent for form in forms(secret, ids))


@pytest.mark.parametrize("secret", SECRETS)
def test_placeholders_do_not_depend_on_what_they_hide(secret: str) -> None:
    """Not even a hash: other private text of the same kind has the same placeholder."""
    other = {"ada.lovelace@example.org": "bob@example.net", "Schroedinger": "Heisenberg"}
    other |= {"+49 30 901820": "+49 30 901821", "4111 1111 1111 1111": "5500 0000 0000 0004"}
    assert Vault().hide(TEXT) == Vault().hide(TEXT.replace(secret, other[secret]))
