"""`moaspec chat --url` and servers that lie to it."""

from __future__ import annotations

import gzip
import itertools
import re
import resource
import sys
from collections.abc import Iterator

import pytest

from lying_http import ABOUT, OK, Lie, chat, endless, lying, whole
from moaspec.cli import chat_client as client
from moaspec.cli.chat_client import ServedChat
from moaspec_core.errors import InputError, ServerError

MAX_GROWTH_KIB = 400 << 10
"""Memory that a lie may cost; without limits it would be gigabytes."""
BIG = b"a" * (1 << 20)


def talk(url: str) -> list[dict[str, object]]:
    served = ServedChat(url)
    try:
        return list(served.stream([{"role": "user", "content": "hi"}], provisional=True))
    finally:
        served.close()


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (
        1 if sys.platform == "linux" else 1024
    )


NO_ABOUT: dict[str, Lie] = {
    "number": lambda _: whole(b"5"),
    "list": lambda _: whole(b"[]"),
    "numeric name": lambda _: whole(b'{"model": 5, "mode": "local"}'),
    "long name": lambda _: whole(b'{"model": "%s", "mode": "local"}' % (b"m" * 5000)),
    "no text": lambda _: whole(b"\xff\xfe"),
    "nesting": lambda _: whole(b"[" * 100_000),
    "huge integer": lambda _: whole(b"9" * 100_000),
    "page": lambda _: whole(b"<html>"),
    "nothing": lambda _: [],
    "no HTTP": lambda _: [b"SSH-2.0-OpenSSH_9.2\r\n"],
    "endless body": lambda _: endless(BIG),
    "endless chunks": lambda _: endless(
        b"100000\r\n" + BIG + b"\r\n", OK + b"Transfer-Encoding: chunked\r\n\r\n"
    ),
    "wrong length": lambda _: [OK + b"Content-Length: 50\r\n\r\n{}"],
    "huge length": lambda _: endless(BIG, OK + b"Content-Length: 999999999999999\r\n\r\n"),
    "endless headers": lambda _: endless(b"X-A: b\r\n", OK),
    "one long header": lambda _: endless(BIG, OK + b"X-A: "),
    "endless status": lambda _: endless(BIG, b"HTTP/1.1 200 "),
    "packed": lambda _: whole(gzip.compress(ABOUT), b"Content-Encoding: gzip"),
    "redirect": lambda _: [b"HTTP/1.1 302 Found\r\nLocation: http://192.0.2.1/\r\n\r\n"],
    "error without end": lambda _: endless(BIG, b"HTTP/1.1 500 No\r\n\r\n"),
    "escapes": lambda _: [
        b'HTTP/1.1 500 No\r\n\r\n{"error": {"message": "\\u001b[2J\\n' + BIG[:999]
    ],
}


@pytest.mark.parametrize("lie", NO_ABOUT)
def test_what_is_no_moaspec_server(lie: str) -> None:
    before = peak_kib()
    with lying(NO_ABOUT[lie]) as url, pytest.raises(ServerError) as caught:
        ServedChat(url)
    message = str(caught.value)
    assert url in message
    assert len(message) < 500
    assert message.isprintable()
    assert peak_kib() - before < MAX_GROWTH_KIB


@pytest.mark.parametrize("part", [b"HTTP/1.1 100 Continue\r\n\r\n", b""], ids=["1xx", "silence"])
def test_an_answer_that_never_begins(part: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ABOUT_S", 0.5)

    def stalls(_: str) -> Iterator[bytes]:
        yield from itertools.repeat(part)

    with lying(stalls) as url, pytest.raises(ServerError, match=f"{url}.*within"):
        ServedChat(url)


NO_CHUNKS = {
    "choices": b'data: {"choices": 5}\n\n',
    "choice": b'data: {"choices": [5]}\n\n',
    "no choices": b"data: {}\n\n",
    "content": b'data: {"choices": [{"delta": {"content": 5}}]}\n\n',
    "delta": b'data: {"choices": [{"delta": null}]}\n\n',
    "extension": b'data: {"choices": [], "moaspec": 5}\n\n',
    "pieces": b'data: {"choices": [], "moaspec": {"pieces": [{"text": 5, "source": "draft"}]}}\n\n',
    "source": b'data: {"choices": [], "moaspec": {"pieces": [{"text": "", "source": []}]}}\n\n',
    "stats": b'data: {"choices": [], "moaspec": {"stats": {"tokens": "x"}}}\n\n',
    "not a number": b'data: {"choices": [], "moaspec": {"stats": {"tau": NaN}}}\n\n',
    "list": b"data: [1]\n\n",
    "text": b"data: x\n\n",
    "bytes": b'data: {"choices": "\xff"}\n\n',
    "nesting": b"data: " + b'{"choices":[' * 50_000 + b"\n\n",
    "integer": b'data: {"choices": [], "moaspec": {"stats": {"tokens": %s}}}\n\n' % (b"9" * 10**5),
}


@pytest.mark.parametrize("lie", NO_CHUNKS)
def test_what_is_no_chunk(lie: str) -> None:
    with (
        lying(chat(NO_CHUNKS[lie])) as url,
        pytest.raises(ServerError, match=re.escape(url)) as got,
    ):
        talk(url)
    assert len(str(got.value)) < 500


@pytest.mark.parametrize("error", [b'"E"', b'{"message": "E"}', b'{"message": 5}', b"[5]", b"5"])
def test_errors_of_any_form_are_said(error: bytes) -> None:
    lie = chat(b'data: {"error": %s}\n\n' % error)
    with lying(lie) as url, pytest.raises(ServerError, match=f"{url} failed: .*[E5]"):
        talk(url)


@pytest.mark.parametrize(
    "part", [BIG, b"data: " + BIG, b": more\n" * 1000], ids=["line", "data", "comments"]
)
def test_a_stream_without_end(part: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_STREAM_BYTES", 32 << 20)
    before = peak_kib()

    def lie(path: str) -> Iterator[bytes]:
        return iter(whole(ABOUT)) if path == "/v1/moaspec" else endless(part)

    with lying(lie) as url, pytest.raises(ServerError, match=f"{url} sends more than"):
        talk(url)
    assert peak_kib() - before < MAX_GROWTH_KIB


@pytest.mark.parametrize(("limit", "content"), [("MAX_TEXT", b"x" * 100), ("MAX_EVENTS", b"")])
def test_an_answer_without_end(limit: str, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, limit, 500)
    event = b'data: {"choices": [{"delta": {"content": "%s"}}]}\n\n' % content

    def lie(path: str) -> Iterator[bytes]:
        return iter(whole(ABOUT)) if path == "/v1/moaspec" else endless(event)

    with lying(lie) as url, pytest.raises(ServerError, match=f"{url} does not end its answer"):
        talk(url)


def test_silence_within_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comments are no answer."""
    monkeypatch.setattr(client, "EVENT_S", 0.5)

    def lie(path: str) -> Iterator[bytes]:
        return iter(whole(ABOUT)) if path == "/v1/moaspec" else endless(b": wait\n\n")

    with lying(lie) as url, pytest.raises(ServerError, match=f"{url} has not answered"):
        talk(url)


@pytest.mark.parametrize("part", [b'data: {"choices": []}\n\n', b"<html>", b""])
def test_an_answer_that_stops_before_its_end(part: bytes) -> None:
    """A text that was cut is not shown as a whole one."""
    with (
        lying(chat(part)) as url,
        pytest.raises(ServerError, match=f"{url} ended its answer early"),
    ):
        talk(url)


def test_what_follows_the_end_is_not_read() -> None:
    first = b'data: {"choices":[{"delta":{"content":"a\\u2028","role":null}}],"x":1}\r\n\r\n'
    with lying(chat(first, b"data: [DONE]\n\n", b"data: {}\n\n")) as url:
        (chunk,) = talk(url)
    assert chunk == {"choices": [{"delta": {"content": "a\u2028"}}]}


def test_a_key_is_not_shown() -> None:
    with pytest.raises(ServerError) as caught:
        ServedChat("http://user:secret@127.0.0.1:1")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["http://[::1", "http://a:99999", "http://a b", "http://a..b", "//a", "x:0"]
)
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(InputError, match=r"--url .* is no URL"):
        ServedChat(url)
