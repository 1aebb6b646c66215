"""`moaspec check URL`: right servers pass, and planted faults are found and told apart."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

import chat_tokenizers
import endpoints
import serving
import tiny
from commands import Cli
from moaspec.target.target import Target

pytestmark = pytest.mark.slow

Fields = dict[str, Any]
Change = Callable[[str, Fields, Fields], Fields]
"""What a proxy answers, of the path, the request and the server's answer."""
ALWAYS = ("--limit", "4", "--max-new-tokens", "16", "--widths", "1,4", "--seed", "7", "--json")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the target of `serving`, for the reference."""
    return _saved(serving.target(), tmp_path_factory.mktemp("bytes") / "model")


def _saved(target: Target, path: Path) -> Path:
    assert target.tokenizer is not None
    target.model.save_pretrained(path)
    target.tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def served() -> Iterator[serving.Served]:
    with serving.serving(serving.source()) as found:
        yield found


@contextmanager
def proxy(url: str, change: Change, ask: Change | None = None) -> Iterator[str]:
    """A server that changes answers, or requests, of the one behind it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(httpx.get(url + self.path, timeout=60))

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            sent = asked if ask is None else ask(self.path, asked, {})
            if not sent:
                self._send(httpx.Response(422, content=b'{"error": "unexpected fields"}'))
                return
            answer = httpx.post(url + self.path, json=sent, timeout=60)
            if answer.status_code == httpx.codes.OK:
                changed = change(self.path, asked, answer.json())
                answer = httpx.Response(200, content=json.dumps(changed))
            self._send(answer)

        def _send(self, answer: httpx.Response) -> None:
            self.send_response(answer.status_code)
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, *_: Any) -> None:
            pass

    with endpoints.listening(Handler) as address:
        yield address


def checked(cli: Cli, url: str, model: Path, code: int, *more: str) -> dict[str, Any]:
    options = ("--model", str(model), "--dtype", "float32", *ALWAYS, *more)
    output = cli("check", url, *options)
    assert output.code == code, output.err + output.out
    found: dict[str, Any] = json.loads(output.out)
    return found


def as_it_is(_path: str, _asked: Fields, answer: Fields) -> Fields:
    return answer


def test_what_is_right_passes(
    cli: Cli, served: serving.Served, model: Path, tmp_path: Path
) -> None:
    found = checked(cli, served.url, model, 0, "--out", str(tmp_path / "report"))
    assert (found["verdict"], found["wrong"], found["faults"]) == ("right", 0, [])
    assert found["owner"] == "moaspec"
    legs = {leg["leg"]["name"]: leg for leg in found["legs"]}
    assert set(legs) == {
        "alone, cold",
        "alone, again",
        "4 at once",
        "alone, no drafts",
        "4 at once, no drafts",
        "chat, alone",
    }
    assert legs["alone, cold"]["speculation"]["drafted"] > 0
    assert legs["alone, no drafts"]["speculation"]["drafted"] == 0
    assert found["wrong_rate_bound"] == 3 / found["tokens"]
    written = json.loads((tmp_path / "report" / "check.json").read_text())
    assert written == found
    assert "**Right" in (tmp_path / "report" / "check.md").read_text()


class OneToken:
    """Changes one token of 2,000, and tells which."""

    def __init__(self) -> None:
        self.tokens, self.changed = 0, list[tuple[list[int], int]]()

    def __call__(self, path: str, asked: Fields, answer: Fields) -> Fields:
        if path != "/v1/completions":
            return answer
        ids = answer["choices"][0]["token_ids"]
        place = 2000 - 1 - self.tokens % 2000
        self.tokens += len(ids)
        if place < len(ids):
            ids[place] = (ids[place] + 1) % 256
            self.changed.append((asked["prompt"], place))
        return answer


def test_one_token_of_2000_is_found(cli: Cli, served: serving.Served, model: Path) -> None:
    planted = OneToken()
    with proxy(served.url, planted) as url:
        more = ("--limit", "24", "--max-new-tokens", "64")
        found = checked(cli, url, model, 1, *more)
    assert planted.tokens > 4000
    assert planted.changed
    faults = [(fault["request"]["body"]["prompt"], fault["token"]) for fault in found["faults"]]
    assert faults == planted.changed
    assert found["verdict"] == "wrong"
    assert all(fault["gap"] > fault["limit"] for fault in found["faults"])


def test_a_server_that_samples(cli: Cli, served: serving.Served, model: Path) -> None:
    def sampled(_path: str, asked: Fields, _answer: Fields) -> Fields:
        sampled.seed += 1  # type: ignore[attr-defined]
        return asked | {"temperature": 1.0, "seed": sampled.seed}  # type: ignore[attr-defined]

    sampled.seed = 0  # type: ignore[attr-defined]
    with proxy(served.url, as_it_is, sampled) as url:
        found = checked(cli, url, model, 1)
    assert any("does not repeat itself" in cause for cause in found["causes"])
    assert any("computes this model, and chooses wrongly" in cause for cause in found["causes"])


def test_only_in_batches(cli: Cli, served: serving.Served, model: Path) -> None:
    """A fault of wide batches is told apart from the server's arithmetic."""
    under_way, lock = [0], threading.Lock()

    def count(_path: str, asked: Fields, _answer: Fields) -> Fields:
        with lock:
            under_way[0] += 1
        return asked

    def change(_path: str, _asked: Fields, answer: Fields) -> Fields:
        with lock:
            wide, under_way[0] = under_way[0] > 1, under_way[0] - 1
        if wide:
            ids = answer["choices"][0]["token_ids"]
            ids[0] = (ids[0] + 1) % 256
        return answer

    with proxy(served.url, change, count) as url:
        found = checked(cli, url, model, 1)
    wrong = {leg["leg"]["name"]: leg["wrong"] for leg in found["legs"]}
    assert wrong["alone, cold"] == wrong["alone, again"] == wrong["chat, alone"] == 0
    assert wrong["4 at once"] > 0
    assert any(cause.startswith("4 at once: ") for cause in found["causes"])


def test_another_template(cli: Cli, model: Path) -> None:
    template = serving.CHATML.replace("<|start|>assistant\n", "<|start|>assistant\n\n")
    with serving.serving(serving.source(template=template)) as other:
        found = checked(cli, other.url, model, 1)
    assert any("reads another prompt" in cause for cause in found["causes"])
    assert any("Only chats are wrong" in cause for cause in found["causes"])
    assert {fault["leg"] for fault in found["faults"]} == {"chat, alone"}


def test_other_weights_are_not_judged(cli: Cli, served: serving.Served, tmp_path: Path) -> None:
    """Exit code 2: the reference is not what the server runs."""
    target = tiny.fresh_target(
        tokenizer=serving.tokenizer(),
        vocab_size=serving.VOCAB,
        max_position_embeddings=serving.CONTEXT,
        eos_token_id=serving.END,
    )
    for weight in target.model.parameters():
        if weight.dim() == 2:  # rounded to few steps, as by quantisation
            step = weight.data.abs().max() / 7
            weight.data = (weight.data / step).round() * step
    found = checked(cli, served.url, _saved(target, tmp_path / "rounded"), 2)
    assert found["verdict"] == "unknown"
    assert any("its weights are others" in cause for cause in found["causes"])


def without_ids(path: str, _asked: Fields, answer: Fields) -> Fields:
    """What a server of OpenAI's own fields gives."""
    for choice in answer["choices"]:
        choice.pop("token_ids", None)
        choice.pop("prompt_token_ids", None)
        if path.endswith("/chat/completions"):
            choice["logprobs"] = None
    return answer


def test_text_is_tokenised_again(cli: Cli, served: serving.Served, model: Path) -> None:
    """A text whose characters do not say its tokens is not judged, and never called wrong."""
    with proxy(served.url, without_ids) as url:
        output = cli("check", url, "--model", str(model), "--dtype", "float32", *ALWAYS)
    found = json.loads(output.out)
    assert found["wrong"] == 0
    unjudged = sum(leg["unjudged_texts"] for leg in found["legs"])
    assert unjudged > 0  # random bytes are seldom text
    assert output.code == (0 if found["tokens"] else 2)


def strict(_path: str, asked: Fields, _answer: Fields) -> Fields:
    """Refuse fields that OpenAI does not have."""
    return {} if {"return_token_ids", "repetition_penalty"} & set(asked) else asked


def test_a_server_without_ids_that_refuses_fields(cli: Cli, tmp_path: Path) -> None:
    """Whose text is certain: it has one token for each word."""
    words = chat_tokenizers.target(seed=7)
    model = _saved(words, tmp_path / "words")
    with endpoints.moaspec_server(words) as url, proxy(url, without_ids, strict) as plain:
        found = checked(cli, plain, model, 0)
    assert found["tokens"] > 0
    assert found["wrong"] == 0


def test_bad_input(cli: Cli, served: serving.Served, model: Path) -> None:
    def said(*options: str) -> str:
        output = cli("check", *options)
        assert output.code == 2
        return output.err

    assert "go with a server's URL" in said("--widths", "1")
    assert "--thorough does not go" in said(served.url, "--thorough")
    assert "must be numbers from 1" in said(served.url, "--widths", "0,x")
    assert "has no model 'other'" in said(served.url, "--server-model", "other")
    with endpoints.fake(lambda _: (200, {"choices": []}), models=({"id": "a"}, {"id": "b"})) as url:
        assert "Name the one to ask with --server-model" in said(url, "--model", str(model))
    assert "is no URL" in said("localhost")


def test_a_server_that_breaks_off(cli: Cli, served: serving.Served, model: Path) -> None:
    """What was judged is reported, and the exit code is not that of a wrong token."""
    gone = cli("check", "http://127.0.0.1:9", "--model", str(model), *ALWAYS)
    assert gone.code == 2
    assert "Not judged: The connection to" in gone.err
    asked = count(1)

    def ask(_path: str, fields: Fields, _answer: Fields) -> Fields:
        return fields if next(asked) < 8 else {}

    with proxy(served.url, as_it_is, ask) as url:
        found = checked(cli, url, model, 2)
    assert (found["complete"], found["wrong"]) == (False, 0)
    assert 0 < found["texts"] < 8


def test_ids_that_the_reference_lacks_are_not_judged(
    cli: Cli, served: serving.Served, model: Path
) -> None:
    """Those of a server with another tokenizer: exit code 1 would say that a token is wrong."""

    def other(_path: str, _asked: Fields, answer: Fields) -> Fields:
        for choice in answer.get("choices", ()):
            if choice.get("token_ids"):
                choice["token_ids"] = [10**12, *choice["token_ids"][1:]]
        return answer

    with proxy(served.url, other) as url:
        found = checked(cli, url, model, 2)
    assert (found["verdict"], found["tokens"]) == ("unknown", 0)


def test_drafts_are_counted_by_metrics(cli: Cli, served: serving.Served, model: Path) -> None:
    """Of a server whose answers do not tell, as vLLM's by default."""

    def untold(_path: str, _asked: Fields, answer: Fields) -> Fields:
        answer.get("usage", {}).pop("speculation", None)
        return {name: value for name, value in answer.items() if name != "metrics"}

    with proxy(served.url, untold) as url:
        found = checked(cli, url, model, 0)
    counts = {leg["leg"]["name"]: leg["speculation"] for leg in found["legs"]}
    assert counts["alone, cold"]["drafted"] > 0
    assert counts["alone, no drafts"]["drafted"] == 0
