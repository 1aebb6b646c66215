"""Shutdown of a server: answers may finish, and unfinished ones end with an error."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

import serving
from commands import text_target
from edges import Edge
from free_port import free_port
from moaspec_serve.sources.source import TextSource
from moaspec_serve.uvicorn_server import CHUNK_BYTES, FREE_CHUNKS
from serving import LONGEST, MODEL, Served, own_text, say

pytestmark = pytest.mark.usefixtures("patient_link")

Ask = Callable[[Served, int], Any]


@pytest.fixture
def ask() -> Iterator[Ask]:
    """Streams whose client outlives the server."""
    clients: list[OpenAI] = []

    def stream(served: Served, max_tokens: int) -> Any:
        clients.append(OpenAI(base_url=served.api, api_key="none", max_retries=0, timeout=300))
        messages: Any = say("hello")
        return clients[-1].chat.completions.create(
            model=MODEL, messages=messages, max_tokens=max_tokens, temperature=0, stream=True
        )

    yield stream
    for client in clients:
        client.close()


@pytest.mark.parametrize("make", [serving.source, lambda: Edge().source])
def test_unfinished_answers_end_with_an_error(ask: Ask, make: Callable[[], TextSource]) -> None:
    source = make()
    with serving.serving(source, grace_s=0.2) as served:
        stream = ask(served, 1900)
        next(stream)
        ended: list[str] = []

        def read() -> None:
            try:
                for _ in stream:
                    pass
            except openai.APIError as error:
                ended.append(str(error))

        reader = threading.Thread(target=read)
        reader.start()
        while not source.load.active:
            time.sleep(0.01)
    reader.join(120)
    assert ended == ["The server is shutting down."]


@pytest.mark.slow
def test_answers_that_are_under_way_may_end(ask: Ask) -> None:
    with serving.serving(serving.source(), grace_s=60) as served:
        stream = ask(served, LONGEST)
        chunks = [next(stream)]
    chunks += stream
    text = "".join(one.delta.content or "" for chunk in chunks for one in chunk.choices)
    assert text == own_text("hello")


@pytest.mark.slow
def test_the_command_from_start_to_sigterm(tmp_path: Path) -> None:
    target = text_target()
    target.model.save_pretrained(tmp_path)
    assert target.tokenizer is not None
    target.tokenizer.save_pretrained(tmp_path)
    port = free_port()
    arguments = ["serve", "--model", str(tmp_path), "--drafter", "none", "--port", str(port)]
    server = subprocess.Popen(
        [sys.executable, "-m", "moaspec", *arguments, "--threads", "1"],
        env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
    )
    try:
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=60) as http:
            deadline = (
                time.monotonic() + 240
            )  # loading takes a few seconds, and longer on a busy machine
            while not answers(http):
                assert server.poll() is None, "the command ended"
                assert time.monotonic() < deadline
                time.sleep(0.1)
            assert "<title>moaspec" in http.get("/").text
        server.send_signal(signal.SIGTERM)
        assert server.wait(120) == 0
    finally:
        server.kill()


def answers(http: httpx.Client) -> bool:
    try:
        return http.get("/health").status_code == 200
    except httpx.ConnectError:
        return False


def test_a_body_of_many_small_chunks_is_refused_and_of_some_is_not() -> None:
    """Each chunk takes as long as a kilobyte, whether or not a key was sent."""
    with serving.serving(serving.source(drafter=False)) as served, served.http() as http:

        def post(chunks: Iterable[bytes]) -> httpx.Response:
            headers = {"content-type": "application/json"}
            return http.post("/v1/completions", content=iter(chunks), headers=headers)

        body = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 1}).encode()
        pieces = [body[i : i + 1] for i in range(len(body))]
        assert post([*pieces, *[b" "] * (FREE_CHUNKS - len(pieces) - 1)]).status_code == 200
        assert post([body, *[b" " * CHUNK_BYTES] * (2 * FREE_CHUNKS)]).status_code == 200
        with suppress(httpx.WriteError):  # where the client is still writing
            assert post([*pieces, *[b" "] * 2 * FREE_CHUNKS]).status_code == 400
        assert post([body]).status_code == 200
