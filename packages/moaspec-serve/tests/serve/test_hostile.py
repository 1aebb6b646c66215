"""Bodies, keys, paths and connections that nobody should send: right status, living server."""

from __future__ import annotations

import contextlib
import gzip
import json
import select
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

import serving
from moaspec_core.support import limits
from moaspec_serve import guard, uvicorn_server
from moaspec_serve.guard import GuardSettings
from moaspec_serve.server_context import ServeSettings
from serving import MODEL, Served, say

KEY = "a-secret-key"
LARGEST = 100_000
CHAT = "/v1/chat/completions"
GOOD: dict[str, Any] = {"model": MODEL, "messages": say("hello"), "max_tokens": 2, "seed": 1}


@pytest.fixture(scope="module")
def strict() -> Iterator[Served]:
    with guarding() as running:
        yield running


@contextmanager
def guarding(*, body_timeout_s: float = 60.0, send_timeout_s: float = 60.0) -> Iterator[Served]:
    """A guarded server. Its time limits hold on a busy machine too."""
    guarded = GuardSettings(api_keys=(KEY,), hosts=("127.0.0.1", "localhost"))
    settings = ServeSettings(
        guarded=guarded, send_timeout_s=send_timeout_s, cors_origins=("http://app",)
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(limits, "MAX_BODY_BYTES", LARGEST)
        patched.setattr(guard, "BODY_TIMEOUT_S", body_timeout_s)
        with serving.serving(serving.source(active=4, waiting=2), settings) as running:
            yield running


@pytest.fixture(autouse=True)
def http(strict: Served) -> Iterator[httpx.Client]:
    with strict.http(headers={"Authorization": f"Bearer {KEY}"}) as client:
        yield client
        alive = client.post(CHAT, json=GOOD)  # after all earlier requests
        assert alive.status_code == 200, alive.text


def error(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error of an answer in OpenAI's shape."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body: dict[str, Any] = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "header", ["", "Bearer wrong", "Basic x", "Bearer \u00e9", f"Bearer {KEY}x"]
)
def test_wrong_keys(strict: Served, header: str) -> None:
    wrong = {b"Authorization": header.encode()}
    with strict.http() as client:
        for path in ("/v1/models", CHAT, "/v1", "/v1/", "/v1/none", "/metrics", "/v1/../v1/models"):
            answer = client.get(path, headers=wrong)
            assert error(answer, 401)["code"] == "invalid_api_key"
            assert KEY not in answer.text
        assert client.get("/health", headers=wrong).status_code == 200
        assert client.get("/", headers=wrong).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"model": NaN}',
        b"[" * 50_000,
        json.dumps({**GOOD, "temperature": float("nan")}).encode(),
        json.dumps({**GOOD, "temperature": float("inf")}).encode(),
        json.dumps({**GOOD, "max_tokens": -1}).encode(),
        json.dumps({**GOOD, "seed": 10**30}).encode(),
        json.dumps({**GOOD, "messages": []}).encode(),
        json.dumps({**GOOD, "messages": [{"role": "user"}]}).encode(),
        json.dumps({**GOOD, "messages": [{"role": "king", "content": "x"}]}).encode(),
        json.dumps({**GOOD, "stop": [""]}).encode(),
        json.dumps({**GOOD, "stop": ["x"] * 99}).encode(),
        json.dumps({**GOOD, "n": 0}).encode(),
        json.dumps({**GOOD, "logit_bias": {"-1": 1}}).encode(),
        json.dumps({**GOOD, "logit_bias": {"99999": 1}}).encode(),
        json.dumps({**GOOD, "top_logprobs": 2}).encode(),
        json.dumps({**GOOD, "tool_choice": "required"}).encode(),
        json.dumps({**GOOD, "messages": say("x" * 5000)}).encode(),
        json.dumps({**GOOD, "messages": say("\ud800")}).encode(),
    ],
)
def test_bad_bodies(http: httpx.Client, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    error(http.post(CHAT, content=body, headers=headers), 400)


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "variables",
    [
        {"chat_template": ENDLESS},
        {"tokenize": False},
        {"tools": "x"},
        {"messages": "x"},
        {"self": "x"},
        {"conversation": "x"},
        {"return_tensors": "pt"},
        {"kwargs": "x"},
    ],
    ids=str,
)
def test_a_template_is_the_servers(http: httpx.Client, variables: dict[str, Any]) -> None:
    """Clients set variables of the template, but neither the template nor its rendering."""
    answer = http.post(CHAT, json={**GOOD, "chat_template_kwargs": variables}, timeout=60)
    assert error(answer, 400)["param"] == "chat_template_kwargs"
    fine = {"enable_thinking": False, "date_string": "today"}
    assert http.post(CHAT, json={**GOOD, "chat_template_kwargs": fine}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, GOOD | {"messages": [{"role": "user", "content": "half \ud800"}]}),
        (CHAT, GOOD | {"stop": "\udfff"}),
        ("/v1/completions", {"model": MODEL, "prompt": "\ud800"}),
        ("/v1/completions", {"model": MODEL, "prompt": ["whole", "\udfff"]}),
        ("/v1/responses", {"model": MODEL, "input": "\ud800"}),
    ],
)
def test_half_characters_in_texts(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    headers = {"Content-Type": "application/json"}
    answer = http.post(path, content=json.dumps(body).encode(), headers=headers)
    message = error(answer, 400)["message"]
    assert "surrogate" in message or "unicode string" in message  # pydantic's of a stop string


@pytest.mark.parametrize("schema", [{"description": "\ud800"}, {"properties": {"\ud800": {}}}])
def test_half_characters_in_schemas(http: httpx.Client, schema: dict[str, Any]) -> None:
    def post(path: str, body: dict[str, Any]) -> httpx.Response:
        headers = {"Content-Type": "application/json"}
        return http.post(path, content=json.dumps(body).encode(), headers=headers)

    tool = {"type": "function", "name": "f", "parameters": schema}
    asked = {"model": MODEL, "input": "hi", "max_output_tokens": 4, "tool_choice": "none"}
    assert "surrogate" in error(post("/v1/responses", {**asked, "tools": [tool]}), 400)["message"]
    wanted = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}
    error(post(CHAT, {**GOOD, "response_format": wanted}), 400)


def test_a_failure_ends_no_connection(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next request of the same client is as good as any."""

    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    with served.http() as client:
        with monkeypatch.context() as patch:
            patch.setattr("moaspec_serve.openai.chat_input.PreparedChat.jobs", fail)
            error(client.post(CHAT, json=GOOD), 500)
        assert client.post(CHAT, json=GOOD).status_code == 200


def test_messages_say_what_to_do(http: httpx.Client) -> None:
    stops = http.post(CHAT, json={**GOOD, "stop": ["x"] * 65})
    assert "at most 64" in error(stops, 400)["message"]
    untyped = http.post(CHAT, content=json.dumps(GOOD), headers={"Content-Type": "text/plain"})
    assert "Content-Type: application/json" in error(untyped, 400)["message"]


@pytest.mark.slow
def test_huge_limits_are_cut_to_the_context(http: httpx.Client) -> None:
    answer = http.post(CHAT, json={**GOOD, "max_tokens": 10**30, "stop": ["e", "a", "o", "x"]})
    assert answer.status_code == 200


def test_other_kinds_of_bodies(http: httpx.Client) -> None:
    error(http.post(CHAT, data={"model": MODEL}), 400)
    error(http.post(CHAT, content=json.dumps(GOOD), headers={"Content-Type": "text/plain"}), 400)


def test_oversized_bodies(http: httpx.Client) -> None:
    assert "100000" in error(http.post(CHAT, content=b"x" * (LARGEST + 1)), 413)["message"]

    def pieces() -> Iterator[bytes]:
        for _ in range(LARGEST // 1000 + 2):
            yield b"x" * 1000

    error(http.post(CHAT, content=pieces()), 413)


def test_bodies_of_very_many_values(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_JSON_VALUES", 200)
    many = {**GOOD, "stop": ["x"] * 201}
    assert "JSON values" in error(http.post(CHAT, json=many), 413)["message"]
    assert http.post(CHAT, json={**GOOD, "user": '"\\",[' * 201}).status_code == 200


def raw(served: Served, text: bytes) -> bytes:
    """Send bytes and read until the server closes or has answered."""
    port = int(served.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        connection.sendall(text)
        return connection.recv(65536)


def head(path: str, *more: str, host: str = "127.0.0.1") -> bytes:
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", f"Authorization: Bearer {KEY}", *more]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


@pytest.mark.parametrize("text", [b"", b"GET / HT", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"])
def test_heads_that_never_come(
    strict: Served, monkeypatch: pytest.MonkeyPatch, text: bytes
) -> None:
    monkeypatch.setattr(uvicorn_server, "HEAD_TIMEOUT_S", 0.3)
    assert raw(strict, text) == b""


@pytest.mark.slow
def test_heads_that_never_come_after_an_answer(
    strict: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    port = int(strict.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        for _ in range(2):
            connection.sendall(whole)
            answer = b""
            while not answer.endswith(b'"ok"}'):
                piece = connection.recv(65536)
                assert piece, "an idle connection may stay"
                answer += piece
            # Not before a whole head has come: connecting may take longer.
            monkeypatch.setattr(uvicorn_server, "HEAD_TIMEOUT_S", 0.3)
            time.sleep(0.5)
        connection.sendall(whole[:9])
        assert connection.recv(65536) == b""


@pytest.mark.slow
def test_bodies_that_never_come() -> None:
    begun = head(CHAT, "Content-Type: application/json", "Content-Length: 50") + b"{"
    with guarding(body_timeout_s=0.5) as served:
        assert raw(served, begun).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    "text",
    [
        b"\x00\x01\x02\r\n\r\n",
        head(CHAT, "Content-Length: -5"),
        head(CHAT, "Content-Length: 1", "Transfer-Encoding: chunked") + b"zz\r\n",
        head("/" + "a" * 70_000),
    ],
)
def test_broken_requests(strict: Served, text: bytes) -> None:
    assert raw(strict, text).split(b" ")[1][:1] == b"4"


def get(target: str, *more: str, method: str = "GET", host: str = "127.0.0.1") -> bytes:
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}", "Connection: close", *more]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


BODY = json.dumps(GOOD).encode()
POSTED = ("Content-Type: application/json", f"Authorization: Bearer {KEY}", "Connection: close")
LENGTH = f"Content-Length: {len(BODY)}"
ODD = {
    "absolute": get("http://127.0.0.1/v1/models", f"Authorization: Bearer {KEY}"),
    "absolute, with a port and a query": get(
        "HTTP://127.0.0.1:80/v1/models?a=http://x/", f"Authorization: Bearer {KEY}", host="other"
    ),
    "absolute, without a path": get("http://127.0.0.1"),
    "blank lines": b"\r\n\r\n" + get("/v1/models", f"Authorization: Bearer {KEY}"),
    "tab": get("/v1/models", f"Authorization: Bearer\t{KEY}"),
    "spaces": get("/v1/models", f"AUTHORIZATION:  bearer  \t {KEY}  "),
    "query": get("/v1/models?api-version=1", f"Authorization: BEARER {KEY}"),
    "port": get("/v1/models", f"Authorization: Bearer {KEY}", host="127.0.0.1:8000"),
    "the root's dot": get("/health", host="localhost.:8000"),
    "capitals": get("/health", host="LOCALHOST"),
    "HTTP/1.0 without a host": b"GET /health HTTP/1.0\r\n\r\n",
    "a slash at the end": get("/v1/models/", f"Authorization: Bearer {KEY}"),
    "head": get("/v1/models", f"Authorization: Bearer {KEY}", method="HEAD"),
    "expectation": head(CHAT, *POSTED, LENGTH, "Expect: 100-continue") + BODY,
    "chunks": head(CHAT, *POSTED, "Transfer-Encoding: chunked")
    + b"%x;name=value\r\n%b\r\n0\r\nTrailer: x\r\n\r\n" % (len(BODY), BODY),
}


@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
def test_forms_that_a_server_must_take(strict: Served, text: bytes) -> None:
    answer = whole(strict, text).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200"), answer[:300]


def whole(strict: Served, text: bytes) -> bytes:
    """The whole answer to a request after which the connection is closed."""
    port = int(strict.url.rpartition(":")[2])
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        connection.sendall(text)
        while piece := connection.recv(65536):
            answer += piece
    return answer


def test_options_of_the_whole_server(strict: Served) -> None:
    answer = whole(strict, get("*", method="OPTIONS"))
    assert answer.startswith(b"HTTP/1.1 204")
    assert b"allow: DELETE, GET, HEAD, OPTIONS, POST\r\n" in answer


def test_blank_lines_between_pipelined_requests(strict: Served) -> None:
    """Old clients send a line end behind a body."""
    posted = head(CHAT, *POSTED[:2], LENGTH) + BODY
    requests = posted + b"\r\n" + posted + b"\n\r\n\n" + get("/health")
    assert whole(strict, requests).count(b"HTTP/1.1 200") == 3


def test_blank_lines_of_their_own(strict: Served) -> None:
    """A packet of nothing else is not the end of the connection, also between two requests."""
    port = int(strict.url.rpartition(":")[2])
    request = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        for _ in range(2):
            connection.sendall(b"\r\n")
            connection.sendall(request)
            answer = b""
            while not answer.endswith(b'"ok"}'):
                piece = connection.recv(65536)
                assert piece, answer
                answer += piece


@pytest.mark.parametrize(
    "text",
    [
        get("http://evil.example/v1/models", f"Authorization: Bearer {KEY}"),
        get("http://user@127.0.0.1/v1/models", f"Authorization: Bearer {KEY}"),
        get("/v1/models", f"Authorization: Bearer {KEY}", "Host: 127.0.0.1"),
        get("/health", host=""),
        b"GET /health HTTP/1.0\r\nHost: evil.example\r\n\r\n",
    ],
)
def test_forms_that_a_server_must_refuse(strict: Served, text: bytes) -> None:
    assert whole(strict, text).startswith(b"HTTP/1.1 400")


def test_foreign_hosts(strict: Served) -> None:
    refused = whole(strict, head(CHAT, host="evil.example:80"))
    assert refused.startswith(b"HTTP/1.1 400")
    assert b"evil.example" in refused
    assert b"--allow-host" in refused
    assert not raw(strict, head("/v1/models", host="127.0.0.1:99")).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "path",
    [
        "/../app.py",
        "/..%2fapp.py",
        "/%2e%2e/app.py",
        "/....//app.py",
        "/..%5capp.py",
        "//etc/passwd",
        "/%00",
        "/page/../../app.py",
        "/index.html%00.js",
        "/nothing",
    ],
)
def test_path_tricks(strict: Served, path: str) -> None:
    request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode()
    answer = raw(strict, request)
    assert answer.split(b" ")[1] in (b"404", b"400")
    assert b"import" not in answer
    assert b"root:" not in answer


def test_unknown_paths_and_methods(http: httpx.Client) -> None:
    error(http.post("/v1/embeddings", json={}), 404)
    paths = {CHAT: "POST", "/v1/responses/resp_1": "DELETE, GET", "/": "GET, HEAD"}
    for path, methods in paths.items():
        answer = http.put(path)
        error(answer, 405)
        assert answer.headers["allow"] == methods
    error(http.post("/v1/moaspec/link", json={"cut": True}), 404)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/chat/completions"),
        ("POST", "/api/chat"),
        ("POST", "//v1/chat/completions"),
        ("GET", "/models"),
        ("GET", "/nothing.js"),
    ],
)
def test_base_urls_without_v1(http: httpx.Client, method: str, path: str) -> None:
    told = error(http.request(method, f"{http.base_url}{path}"), 404)["message"]
    assert f"no {path} here" in told
    assert "end in /v1" in told


QUESTION = json.dumps({"model": MODEL, "messages": say("é")}, ensure_ascii=False)


@pytest.mark.parametrize(
    ("body", "headers", "status", "message"),
    [
        (
            gzip.compress(QUESTION.encode()),
            {"Content-Encoding": "gzip"},
            415,
            "'gzip' are not read",
        ),
        (gzip.compress(QUESTION.encode()), {}, 400, "no text in UTF-8: byte 0x8b at 1"),
        (QUESTION.encode("latin-1"), {}, 400, "no text in UTF-8: byte 0xe9"),
        (
            QUESTION.replace('"model"', f'"seed": {"1" * 5000}, "model"'),
            {},
            400,
            "over 4300 digits",
        ),
    ],
    ids=["encoding", "gzip", "latin-1", "digits"],
)
def test_bodies_that_cannot_be_parsed(
    http: httpx.Client, body: str | bytes, headers: dict[str, str], status: int, message: str
) -> None:
    headers = {"Content-Type": "application/json", **headers}
    answer = http.post(CHAT, content=body, headers=headers)
    assert message in error(answer, status)["message"]


def test_foreign_origins(http: httpx.Client) -> None:
    ask = {"Access-Control-Request-Method": "POST"}
    allowed = http.options(CHAT, headers={"Origin": "http://app", **ask})
    assert allowed.headers["access-control-allow-origin"] == "http://app"
    refused = http.options(CHAT, headers={"Origin": "http://evil", **ask})
    assert "access-control-allow-origin" not in refused.headers


def wait_until_busy(served: Served, connection: socket.socket) -> None:
    """Until what was asked on a connection is decoded; fails by what was answered instead."""
    while not served.source.load.active:
        if select.select([connection], [], [], 0)[0]:
            answer = connection.recv(200, socket.MSG_PEEK)
            assert answer.startswith(b"HTTP/1.1 200"), answer
        time.sleep(0.01)


def wait_until_idle(served: Served) -> None:
    while served.source.load.active + served.source.load.waiting:
        time.sleep(0.05)


def test_dropped_connections(strict: Served) -> None:
    for stream in (False, True):
        body = json.dumps({**GOOD, "max_tokens": 1900, "stream": stream}).encode()
        length = f"Content-Length: {len(body)}"
        port = int(strict.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
            connection.sendall(head(CHAT, "Content-Type: application/json", length) + body)
            wait_until_busy(strict, connection)
        wait_until_idle(strict)


def test_too_many_requests(strict: Served, http: httpx.Client) -> None:
    ends = dict.fromkeys(map(str, serving.target().stop_token_ids), -100)  # the first came early
    long = {**GOOD, "n": 4, "max_tokens": 1900, "stream": True, "logit_bias": ends}
    with http.stream("POST", CHAT, json=long) as stream:
        texts = stream.iter_bytes()  # held: a dropped iterator closes the connection
        next(texts)
        answer = http.post(CHAT, json={**GOOD, "n": 3})
        refused, after_s = error(answer, 429), answer.headers["retry-after"]
        assert refused["type"] == "rate_limit_error"
        assert "--max-active" in refused["message"]
        assert f"Try again in {after_s} s" in refused["message"]
    wait_until_idle(strict)


def test_requests_that_never_fit(http: httpx.Client) -> None:
    """Waiting would not help, so the error does not ask to try again."""
    answer = http.post(CHAT, json={**GOOD, "n": 7})
    assert "ask for fewer" in error(answer, 400)["message"]
    assert "retry-after" not in answer.headers


@pytest.mark.slow
def test_slow_readers_hold_nobody_up() -> None:
    everything = dict.fromkeys(("sources", "tree", "stats"), True)
    body = json.dumps(
        {**GOOD, "max_tokens": 250, "stream": True, "n": 2, "moaspec": everything}
    ).encode()
    with (
        guarding(send_timeout_s=1.0) as served,
        served.http(headers={"Authorization": f"Bearer {KEY}"}) as http,
        socket.socket() as connection,
    ):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.connect(("127.0.0.1", int(served.url.rpartition(":")[2])))
        length = f"Content-Length: {len(body)}"
        connection.sendall(head(CHAT, "Content-Type: application/json", length) + body)
        wait_until_busy(served, connection)
        assert http.post(CHAT, json=GOOD).status_code == 200
        wait_until_idle(served)


def test_metrics_have_no_text(http: httpx.Client) -> None:
    secret = "Ottokar"
    http.post(CHAT, json={**GOOD, "messages": say(secret), "user": secret})
    text = http.get("/metrics").text
    assert 'moaspec_requests_total{endpoint="chat",outcome="done"}' in text
    assert "moaspec_active_texts 0.0" in text
    assert 'moaspec_owner_active_texts{owner="requests"} 0.0' in text
    assert 'moaspec_owner_read_tokens_total{owner="requests"}' in text
    assert "moaspec_rows_set_back_total 0.0" in text
    assert "moaspec_steps_total" in text
    assert secret not in text


def test_page_may_load_nothing_from_elsewhere(http: httpx.Client) -> None:
    answer = http.get("/")
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert answer.headers["content-type"].startswith("text/html")


def test_connections_of_one_address_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_HTTP_CONNECTIONS_PER_ADDRESS", 3)
    with serving.serving(serving.source(drafter=False)) as served:
        where = ("127.0.0.1", int(served.url.rpartition(":")[2]))
        ask = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        held = []
        for _ in range(3):
            one = socket.create_connection(where, timeout=60)
            one.sendall(ask)
            assert one.recv(1000).startswith(b"HTTP/1.1 200")
            held.append(one)
        more = socket.create_connection(where, timeout=60)
        with more, contextlib.suppress(ConnectionError):
            more.sendall(ask)
            assert more.recv(1000) == b""
        for one in held:
            one.close()


def test_bodies_of_one_client_take_its_part_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of requests that never end; others are served meanwhile."""
    monkeypatch.setattr(limits, "MAX_BODIES_BYTES", 100_000)
    guarded = GuardSettings(api_keys=(KEY, "two"))
    with serving.serving(serving.source(), ServeSettings(guarded=guarded)) as served:
        where = ("127.0.0.1", int(served.url.rpartition(":")[2]))
        with contextlib.ExitStack() as held:
            for _ in range(3):
                one = held.enter_context(socket.create_connection(where, timeout=60))
                one.sendall(head(CHAT, "Content-Length: 50000") + b" " * 40_000)
            answer = one.makefile("rb").read()  # the last one's
            assert b" 429 " in answer
            assert f"retry-after: {guard.BODY_TIMEOUT_S:g}".encode() in answer
            assert b"of this server's requests have 100000 bytes" in answer
            with served.http() as http:
                http.headers["Authorization"] = "Bearer two"
                assert http.post(CHAT, json={**GOOD, "max_tokens": 1}).status_code == 200
        wait_until_idle(served)


def test_connections_beyond_all_are_refused_and_earlier_ones_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else one client's connections would stop those of all others."""
    monkeypatch.setattr(limits, "MAX_HTTP_CONNECTIONS", 3)
    with serving.serving(serving.source(drafter=False)) as served, contextlib.ExitStack() as held:
        clients = [held.enter_context(served.http()) for _ in range(4)]
        assert [one.get("/health").status_code for one in clients] == [200, 200, 200, 503]
        refused = clients[3].get("/v1/models")
        assert "3 connections, as many as it takes" in error(refused, 503)["message"]
        assert int(refused.headers["retry-after"]) > 0
        assert clients[0].get("/health").status_code == 200
        clients[0].close()
        time.sleep(0.1)
        assert clients[3].get("/health").status_code == 200


@pytest.mark.slow
def test_wrong_keys_are_answered_late(strict: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WRONG_TOKEN_S", 1.0)
    with strict.http() as client:
        started = time.monotonic()
        error(client.get("/v1/models", headers={"Authorization": "Bearer wrong"}), 401)
        assert time.monotonic() - started >= 0.9
