"""Proxies of the environment: never for this machine, and named where they cannot be used."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from lying_http import ABOUT, lying, whole
from moaspec.cli.chat_client import ServedChat
from moaspec.http_client import HttpClient
from moaspec.hub import cached_if_offline
from moaspec_core.errors import HubError, InputError
from moaspec_core.support import proxies
from moaspec_core.support.proxies import proxy_for, require_proxies
from moaspec_train.dataset.endpoint_client import Endpoint

AWAY = "http://models.example:8000"
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http", "https", "all", "no"):
        monkeypatch.delenv(f"{name}_proxy", raising=False)
        monkeypatch.delenv(f"{name.upper()}_PROXY", raising=False)


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"])
@pytest.mark.parametrize("value", [NOWHERE, "socks://127.0.0.1:7890/", "socks5://x:1", "::", "a b"])
@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "127.8.9.10", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "localhost"),
        *("LocalHost", "localhost.", "a.b.localhost"),
    ],
)
def test_this_machine_is_asked_directly(
    host: str, value: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert proxy_for(f"http://{host}:8000") is None


def test_a_server_of_this_machine_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks://127.0.0.1:7890/")
    monkeypatch.setenv("http_proxy", NOWHERE)
    with lying(lambda _: whole(ABOUT)) as url:
        served = ServedChat(url)
        served.close()
        port = url.rpartition(":")[2]
        ServedChat(f"http://localhost:{port}").close()


def test_the_proxy_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    with lying(lambda _: whole(ABOUT), asked) as url:
        monkeypatch.setenv("HTTP_PROXY", url.removeprefix("http://"))
        ServedChat(AWAY).close()
    assert asked == [f"GET {AWAY}/v1/moaspec HTTP/1.1"]


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"])
@pytest.mark.parametrize(
    ("value", "advice"),
    [
        ("socks://127.0.0.1:7890/", "pip install socksio"),
        ("socks5://user:secret@h:1", "pip install socksio"),
        ("socks5h://h:1", "pip install socksio"),
        ("ftp://h:1", "http://HOST:PORT"),
        ("http://h:notaport", "http://HOST:PORT"),
        ("http://h:99999", "NO_PROXY"),
        ("http://[::1", "http://HOST:PORT"),
        ("http://", "http://HOST:PORT"),
        ("h h:80", "http://HOST:PORT"),
        (":7890", "http://HOST:PORT"),
    ],
)
def test_a_proxy_that_cannot_be_used_is_named(
    value: str, advice: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxies, "find_spec", lambda _: None)
    monkeypatch.setenv(variable, value)
    for use in (
        lambda: ServedChat(AWAY),
        lambda: Endpoint(url=AWAY),
        require_proxies,
    ):
        with pytest.raises(InputError) as caught:
            use()
        assert f"${variable}" in str(caught.value)
        assert advice in str(caught.value)
        assert "secret" not in str(caught.value)
    with pytest.raises(HubError, match=rf"\${variable}"):
        cached_if_offline("nobody/nothing-at-all")


@pytest.mark.parametrize("scheme", ["socks", "socks5"])
def test_socks_with_its_package(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxies, "find_spec", lambda _: object())
    monkeypatch.setenv("all_proxy", f"{scheme}://h:1080")
    proxy = proxy_for(AWAY)
    assert proxy is not None
    assert proxy.url == "socks5://h:1080"


@pytest.mark.parametrize(
    ("excepted", "url", "direct"),
    [
        ("*", AWAY, True),
        ("models.example", AWAY, True),
        ("MODELS.example", AWAY, True),
        (".example", AWAY, True),
        ("*.example", AWAY, True),
        ("example", AWAY, True),
        ("xample", AWAY, False),
        ("other, models.example", AWAY, True),
        ("other models.example", AWAY, True),
        ("models.example:8000", AWAY, True),
        ("models.example:80", AWAY, False),
        ("http://models.example", AWAY, True),
        ("10.0.0.0/8", "http://10.1.2.3", True),
        ("10.0.0.0/8", "http://11.1.2.3", False),
        ("10.1.2.3", "http://10.1.2.3:8000", True),
        ("10.1.2.3", "http://110.1.2.3", False),
        ("[fd00::1]:8000", "http://[fd00::1]:8000", True),
        ("fd00::/8", "http://[fd00::1]", True),
        ("", AWAY, False),
        (" , ,", AWAY, False),
        ("[", AWAY, False),
    ],
)
@pytest.mark.parametrize("variable", ["no_proxy", "NO_PROXY"])
def test_exceptions(
    excepted: str, url: str, direct: bool, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "proxy.example:3128")
    monkeypatch.setenv(variable, excepted)
    proxy = proxy_for(url)
    assert (proxy is None) == direct
    assert direct or str(proxy) == "'http://proxy.example:3128' of $HTTP_PROXY"


def test_the_proxy_of_a_broken_way_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://me:secret@127.0.0.1:9")

    async def ask() -> None:
        server = HttpClient("--url", AWAY, connect_s=60)
        try:
            assert "'http://127.0.0.1:9' of $HTTP_PROXY" in str(server)
            assert "secret" not in str(server)
            await server.ask("GET", "/", most=1, s=60)
        finally:
            await server.close()

    with pytest.raises(httpx.TransportError):
        asyncio.run(ask())


def test_https_has_a_variable_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://one:1")
    monkeypatch.setenv("https_proxy", "http://two:2")
    found = proxy_for("https://models.example")
    assert found is not None
    assert found.url == "http://two:2"
    monkeypatch.setenv("https_proxy", "")
    assert proxy_for("https://models.example") is None
