"""Responses of a server: the target's own tokens or no row, and none lost or doubled."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

import chat_tokenizers
import serving
import tiny
from endpoints import Fields, completion, fake, moaspec_server
from lying_http import OK, endless, lying, whole
from moaspec.data.conversations import Conversation
from moaspec.target.spec import TargetSpec
from moaspec.target.target import Target
from moaspec_core.errors import InputError, MoaSpecError, ServerError
from moaspec_serve.guard import GuardSettings
from moaspec_serve.server_context import ServeSettings
from moaspec_train.dataset import endpoint_client, endpoint_writer
from moaspec_train.dataset.endpoint_answers import NO_END, OTHER_TEXT, OTHER_TOKENS
from moaspec_train.dataset.endpoint_client import Endpoint
from moaspec_train.dataset.endpoint_writer import EndpointWriter
from moaspec_train.dataset.journal import Journal
from moaspec_train.dataset.regenerate import fingerprint, regenerate
from moaspec_train.dataset.response_writer import ResponseWriter, WriterOptions

TALKS = [
    chat_tokenizers.talk("w20"),
    chat_tokenizers.talk("w21 w22", "w50 w51", "w23", "w52", "w24 w25"),
    chat_tokenizers.talk("w26 w27 w28", system="w12 w13"),
    Conversation(where="here:4", name="ids", prompt_ids=(40, 41, 42)),
    chat_tokenizers.talk("w29", "w53"),
]
Row = dict[str, Any]


def options(**changes: Any) -> WriterOptions:
    values = {"max_new_tokens": 12, "batch_size": 2, "group_size": 3} | changes
    return WriterOptions(**values)


def write(
    target: TargetSpec,
    url: str,
    path: Path,
    *,
    conversations: Sequence[Conversation] = TALKS,
    endpoint: Fields | None = None,
    **changes: Any,
) -> tuple[list[Row], EndpointWriter]:
    shared = {"first_delay_s": 0.0, "at_once": 2, **(endpoint or {})}
    places = [Endpoint(**{"url": one, **shared}) for one in url.split(",")]
    with EndpointWriter(target, places, options(**changes)) as writer:
        writer.connect((20, 21))
        settings = writer.settings(prompts=fingerprint(conversations))
        with Journal(path, settings) as journal:
            regenerate(writer, conversations, journal)
    return [json.loads(line) for line in path.read_text().splitlines()], writer


def written_here(target: Target, path: Path, conversations: Sequence[Conversation]) -> bytes:
    writer = ResponseWriter(target, None, options())
    with Journal(path, writer.settings()) as journal:
        regenerate(writer, conversations, journal)
    return path.read_bytes()


@pytest.fixture(scope="module")
def target() -> Target:
    """With this seed turns end at a stop token and at the limit."""
    return chat_tokenizers.target(seed=7)


@pytest.fixture(scope="module")
def byte_target() -> Target:
    """Writes letters, and ends its turns after a few."""
    of = tiny.fresh_target(
        tokenizer=serving.tokenizer(),
        vocab_size=serving.VOCAB,
        max_position_embeddings=256,
        eos_token_id=serving.END,
    )
    head: Any = of.model.get_output_embeddings()
    end = head.weight[serving.END].clone()
    head.weight[94:] = 0  # bytes behind "~", which alone are no characters
    head.weight[serving.END] = 1.3 * end
    return of


ONE = [Conversation(where="here:1", prompt_ids=(20, 21, 22))]


def test_rows_are_those_written_here(target: Target, tmp_path: Path) -> None:
    """Ids, stop reasons and messages, with turns that follow the target's own earlier ones."""
    expected = written_here(target, tmp_path / "here.jsonl", TALKS)
    with moaspec_server(target) as url:
        _, writer = write(target, url, tmp_path / "a.jsonl")
        write(target, f"{url}/v1/", tmp_path / "b.jsonl", endpoint={"at_once": 7})
    assert (tmp_path / "a.jsonl").read_bytes() == expected
    assert (tmp_path / "b.jsonl").read_bytes() == expected
    assert not writer.dropped


def test_texts_are_read_back(
    byte_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a server that gives no ids; the token that ends a turn is no part of its text."""
    talks = [chat_tokenizers.talk(text) for text in ("one", "two", "three", "four")]
    expected = written_here(byte_target, tmp_path / "here.jsonl", talks)
    monkeypatch.setattr(endpoint_writer, "WITH_IDS", {})
    with moaspec_server(byte_target) as url:
        rows, writer = write(byte_target, url, tmp_path / "a.jsonl", conversations=talks)
    assert (tmp_path / "a.jsonl").read_bytes() == expected
    assert "stop_token" in {row["stop_reason"] for row in rows}
    assert not writer.dropped


def test_full_context_ends_a_text(tmp_path: Path) -> None:
    of = chat_tokenizers.target(seed=7, max_position_embeddings=16)
    talks = [TALKS[0], TALKS[3]]
    expected = written_here(of, tmp_path / "here.jsonl", talks)
    with moaspec_server(of) as url:
        rows, _ = write(of, url, tmp_path / "a.jsonl", conversations=talks)
    assert "context" in {row["stop_reason"] for row in rows}
    assert (tmp_path / "a.jsonl").read_bytes() == expected


def test_sampled_texts_differ_and_can_be_repeated(target: Target, tmp_path: Path) -> None:
    with moaspec_server(target) as url:
        sampled: Fields = {"conversations": [TALKS[0]] * 4, "temperature": 1.0, "top_p": 0.9}
        rows, _ = write(target, url, tmp_path / "a.jsonl", **sampled)
        again, _ = write(target, url, tmp_path / "b.jsonl", **sampled, endpoint={"at_once": 1})
        other, _ = write(target, url, tmp_path / "c.jsonl", **sampled, seed=1)
    assert len({tuple(row["response_ids"]) for row in rows}) == 4
    assert again == rows != other


@pytest.mark.parametrize("stop", [1, 2, 4, 5])
def test_interrupted_and_continued(stop: int, target: Target, tmp_path: Path) -> None:
    expected = written_here(target, tmp_path / "here.jsonl", TALKS)
    path, finished = tmp_path / "a.jsonl", []

    def advance(_: int, conversations: int) -> None:
        finished.extend([1] * conversations)
        if conversations and len(finished) == stop:
            signal.raise_signal(signal.SIGINT)

    def run(url: str) -> None:
        places, chosen = [Endpoint(url=url, at_once=2)], options(group_size=1)
        with EndpointWriter(target, places, chosen, advance=advance) as writer:
            writer.connect((20, 21))
            with Journal(path, writer.settings(prompts=fingerprint(TALKS))) as journal:
                regenerate(writer, TALKS, journal)

    with moaspec_server(target) as url:
        with pytest.raises(KeyboardInterrupt):
            run(url)
        begun = path.read_bytes()
        assert expected.startswith(begun)
        write(target, url, path, group_size=1)
    assert path.read_bytes() == expected


def test_key_and_name_of_the_model(target: Target, tmp_path: Path) -> None:
    with moaspec_server(target, ServeSettings(guarded=GuardSettings(api_keys=("secret",)))) as url:
        rows, _ = write(
            target, url, tmp_path / "a.jsonl", endpoint={"key": "secret", "model": "tiny"}
        )
        assert rows
        with pytest.raises(ServerError, match="401"):
            write(target, url, tmp_path / "b.jsonl")


def test_one_of_several_models_must_be_named(target: Target, tmp_path: Path) -> None:
    asked: list[Fields] = []

    def answer(fields: Fields) -> tuple[int, Any]:
        asked.append(fields)
        return completion("w30", token_ids=[30, chat_tokenizers.END])

    with fake(answer, [{"id": "a"}, {"id": "b", "max_model_len": 9}]) as url:
        with pytest.raises(InputError, match=r"a, b.*--endpoint-model"):
            write(target, url, tmp_path / "a.jsonl", conversations=ONE)
        rows, _ = write(
            target, url, tmp_path / "a.jsonl", conversations=ONE, endpoint={"model": "b"}
        )
    assert rows[0]["response_ids"] == [30, chat_tokenizers.END]
    assert asked[-1]["model"] == "b"
    assert asked[-1]["max_tokens"] == 9 - 3
    assert asked[-1]["key"] is None
    assert "seed" not in asked[-1]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        # vLLM's form; what a server goes on with after the end of a turn is left out.
        (completion("w30 w31", token_ids=[30, 31, 1]), [30, 31, 1]),
        (completion("w30 w31 w32", token_ids=[30, 31, 1, 32]), [30, 31, 1]),
        (completion("w30 w31", token_ids=[30, 31]), [30, 31, 1]),
        (completion("w30 w31", "length", token_ids=[30, 31]), [30, 31]),
        (completion("w30 w31", token_ids=[30, 32, 1]), None),
        (completion("w30", token_ids=[30, 99]), None),
        (completion("w30", token_ids=[30, 0]), None),
        (completion("w30", "content_filter", token_ids=[30]), None),
        (completion("w30", token_ids=[30, 1], usage={"prompt_tokens": 4}), None),
        (completion("w30", token_ids=[30, 1], usage={"prompt_tokens": 3}), [30, 1]),
    ],
)
def test_ids_of_a_server(
    answer: tuple[int, Any], expected: list[int] | None, target: Target, tmp_path: Path
) -> None:
    """A row has the target's tokens, or it is left out and counted."""
    answers = [completion("w30", token_ids=[30, 1]), answer]
    with fake(lambda _: answers.pop(0)) as url:
        rows, writer = write(target, url, tmp_path / "a.jsonl", conversations=ONE)
    assert [row["response_ids"] for row in rows] == ([] if expected is None else [expected])
    assert writer.dropped.total() == (expected is None)


@pytest.mark.parametrize(
    ("text", "finish", "tokens", "expected"),
    [
        ("abc", "stop", 3, "abc<|end|>"),
        ("abc", "stop", 4, "abc<|end|>"),  # counted with the end
        ("abc", "stop", None, "abc<|end|>"),
        ("abc", "length", 3, "abc"),
        ("abc", "length", 4, None),  # no end that may not have been counted
        ("ab\ufffd", "length", None, None),  # half of a character
        ("abc", "stop", 2, None),  # the target has written other tokens of this text
        ("ab<|end|>c", "stop", None, None),
    ],
)
def test_texts_of_a_server(
    text: str,
    finish: str,
    tokens: int | None,
    expected: str | None,
    byte_target: Target,
    tmp_path: Path,
) -> None:
    answers = [completion("a"), completion(text, finish, {"completion_tokens": tokens})]
    tokenizer: Any = byte_target.tokenizer
    with fake(lambda _: answers.pop(0)) as url:
        talk = [chat_tokenizers.talk("one")]
        rows, writer = write(byte_target, url, tmp_path / "a.jsonl", conversations=talk)
    found = [tokenizer.decode(row["response_ids"]) for row in rows]
    assert found == ([] if expected is None else [expected])
    assert list(writer.dropped) == ([OTHER_TOKENS] if expected is None else [])


def test_a_dropped_turn_ends_its_conversation(target: Target, tmp_path: Path) -> None:
    """Turns before it stay."""
    answers = [completion("w30", token_ids=[30, 1])] * 2 + [completion("w30", token_ids=[31, 1])]
    with fake(lambda _: answers.pop(0)) as url:
        rows, writer = write(target, url, tmp_path / "a.jsonl", conversations=TALKS[1:2])
    assert [row["turn"] for row in rows] == [0]
    assert dict(writer.dropped) == {OTHER_TEXT: 1}


@pytest.mark.parametrize("adds_bos", [False, True])
def test_servers_that_take_only_texts(adds_bos: bool, byte_target: Target, tmp_path: Path) -> None:
    """Some put a BOS token before texts, which then must not hold it."""
    tokenizer = serving.tokenizer()
    tokenizer.bos_token = "<|start|>"
    of = TargetSpec(byte_target.config, tokenizer, name="bytes", dtype=torch.float32)
    prompts: list[str] = []

    def answer(fields: Fields) -> tuple[int, Any]:
        if not isinstance(fields["prompt"], str) or "return_token_ids" in fields:
            return 422, {"detail": "no such thing"}
        prompts.append(fields["prompt"])
        read = len(tokenizer(fields["prompt"])["input_ids"]) + adds_bos
        return completion("abc", usage={"prompt_tokens": read})

    with fake(answer) as url, EndpointWriter(of, [Endpoint(url=url)], options()) as writer:
        writer.connect((serving.START, 20, 21))
        task = [Conversation(where="here:1", prompt_ids=(serving.START, 30, 31))]
        with Journal(tmp_path / "a.jsonl", writer.settings()) as journal:
            regenerate(writer, task, journal)
    row = json.loads((tmp_path / "a.jsonl").read_text())
    assert row["prompt_ids"] == [serving.START, 30, 31]
    assert prompts[-1].startswith("<|start|>") != adds_bos


def test_busy_servers_are_asked_again(target: Target, tmp_path: Path) -> None:
    good = completion("w30", token_ids=[30, 1])
    answers = [(503, {"error": "loading"}), good, (429, b""), (500, b"oops"), (502, b""), good]
    with fake(lambda _: answers.pop(0)) as url:
        rows, _ = write(target, url, tmp_path / "a.jsonl", conversations=ONE)
    assert len(rows) == 1
    assert not answers


def test_a_long_answer_may_fail_once(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of the request that fails first does not count."""
    monkeypatch.setattr(endpoint_client, "PATIENCE_S", 0.0)
    good = completion("w30", token_ids=[30, 1])
    answers = [good, (503, {"error": "restarting"}), good]
    with fake(lambda _: answers.pop(0)) as url:
        rows, _ = write(target, url, tmp_path / "a.jsonl", conversations=ONE)
    assert len(rows) == 1


def test_a_server_may_not_ask_for_attempts_without_a_pause(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    def asked(answer: httpx.Response) -> float | None:
        return after_s(httpx.Response(answer.status_code, headers={"Retry-After": "0"}))

    after_s = endpoint_client._retry_after_s
    monkeypatch.setattr(endpoint_client, "_retry_after_s", asked)
    # Of this module alone: other loops of the process sleep, too.
    monkeypatch.setattr(endpoint_client, "asyncio", SimpleNamespace(sleep=sleep))
    good = completion("w30", token_ids=[30, 1])
    answers = [good, (429, b""), (429, b""), good]
    with fake(lambda _: answers.pop(0)) as url:
        endpoint: Fields = {"first_delay_s": 0.5}
        write(target, url, tmp_path / "a.jsonl", conversations=ONE, endpoint=endpoint)
    assert pauses == [0.5, 0.5]


def test_a_server_that_stays_away_stops_the_run(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_client, "PATIENCE_S", 0.0)
    with pytest.raises(ServerError, match="has not answered"):
        write(target, "http://127.0.0.1:1", tmp_path / "a.jsonl")


def test_the_first_answer_may_end_within_a_character(byte_target: Target, tmp_path: Path) -> None:
    """It only shows how prompts are to be sent."""
    answers = [completion("\ufffd", "length", {"completion_tokens": 4}), completion("abc")]
    with fake(lambda _: answers.pop(0)) as url:
        talk = [chat_tokenizers.talk("one")]
        rows, _ = write(byte_target, url, tmp_path / "a.jsonl", conversations=talk)
    assert len(rows) == 1


def test_refusals_of_single_requests_are_counted(target: Target, tmp_path: Path) -> None:
    """Of all requests, they stop the run."""
    talks = [chat_tokenizers.talk(f"w{i}") for i in range(20, 50)]
    good = completion("w30", token_ids=[30, 1])

    def some(fields: Fields) -> tuple[int, Any]:
        return (400, {"error": {"message": "too long"}}) if 25 in fields["prompt"] else good

    with fake(some) as url:
        rows, writer = write(target, url, tmp_path / "a.jsonl", conversations=talks)
    assert len(rows) == len(talks) - 1
    assert dict(writer.dropped) == {"the server refuses the request with 400: too long": 1}

    def all_but_first(fields: Fields) -> tuple[int, Any]:
        return good if fields["prompt"] == [20, 21] else (400, b"no")

    with fake(all_but_first) as url, pytest.raises(ServerError, match="20 successive requests"):
        write(target, url, tmp_path / "b.jsonl", conversations=talks)


@pytest.mark.parametrize("body", [b"no JSON", [], {"choices": []}, {"object": "error"}])
def test_what_is_no_completion_is_refused(body: Any, target: Target, tmp_path: Path) -> None:
    with fake(lambda _: (200, body)) as url, pytest.raises(ServerError):
        write(target, url, tmp_path / "a.jsonl")


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions"])
@pytest.mark.parametrize("head", [OK + b"\r\n", OK, b"HTTP/1.1 400 No\r\n\r\n"])
def test_answers_without_end(
    path: str, head: bytes, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_client, "MAX_ANSWER_BYTES", 2 << 20)
    monkeypatch.setattr(endpoint_client, "PATIENCE_S", 0.0)
    models = b'{"data": [{"id": "m"}]}'

    def lie(asked: str) -> Iterable[bytes]:
        return endless(b"a: b\r\n" * 10_000, head) if asked == path else whole(models)

    with lying(lie) as url, pytest.raises((ServerError, InputError), match=url):
        write(target, url, tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    "answer",
    [
        {"usage": "x"},
        {"usage": [1]},
        {"usage": {"prompt_tokens": [3]}},
        {"usage": {"completion_tokens": True}},
        {"choices": ["x"]},
        {"choices": [{"text": 5}]},
        {"choices": [{"text": "w30", "finish_reason": ["stop"], "token_ids": [30]}]},
        {"choices": [{"text": "w30", "finish_reason": "stop", "token_ids": [True, 1]}]},
        {"choices": [{"text": "\ud800", "finish_reason": "stop"}]},
    ],
)
def test_answers_of_another_form_are_dropped(
    answer: Fields, target: Target, tmp_path: Path
) -> None:
    good = completion("w30", token_ids=[30, 1])
    answers = [good, (200, good[1] | answer)]
    with fake(lambda _: answers.pop(0)) as url:
        rows, writer = write(target, url, tmp_path / "a.jsonl", conversations=ONE)
    assert not rows
    (reason,) = writer.dropped
    assert reason.startswith("the server's answer is no completion (")


@pytest.mark.parametrize("length", [-5, 0, True, "9"])
def test_lists_of_models_of_another_form(length: Any, target: Target, tmp_path: Path) -> None:
    """They are needed only where no model is named."""
    good = completion("w30", token_ids=[30, 1])
    with fake(lambda _: good, [{"id": "m", "max_model_len": length}]) as url:
        with pytest.raises(InputError, match=r"max_model_len: Input should.*--endpoint-model"):
            write(target, url, tmp_path / "a.jsonl", conversations=ONE)
        named: Fields = {"model": "m"}
        rows, _ = write(target, url, tmp_path / "a.jsonl", conversations=ONE, endpoint=named)
    assert len(rows) == 1


def test_another_models_tokens_are_refused_first(target: Target, tmp_path: Path) -> None:
    def answer(_: Fields) -> tuple[int, Any]:
        return completion("something else", token_ids=[30, 1])

    with fake(answer) as url, pytest.raises(ServerError, match="--model the server's tokenizer"):
        write(target, url, tmp_path / "a.jsonl")
    assert not (tmp_path / "a.jsonl").exists()


def test_ends_that_the_target_does_not_know(target: Target, tmp_path: Path) -> None:
    answers = [completion("w30", token_ids=[30, 1]), completion("w30", token_ids=[30, 0])]
    with fake(lambda _: answers.pop(0)) as url:
        _, writer = write(target, url, tmp_path / "a.jsonl", conversations=ONE)
    assert dict(writer.dropped) == {NO_END: 1}


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://a", "http://", "http://a:x"])
def test_urls_are_checked(url: str) -> None:
    with pytest.raises(MoaSpecError, match="--endpoint"):
        Endpoint(url=url)


def test_an_answer_that_takes_too_long_ends_the_run_and_is_not_asked_for_again(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_client, "ANSWER_S", 0.5)
    asked, ended = list[Fields](), threading.Event()

    def answer(fields: Fields) -> tuple[int, Any]:
        asked.append(fields)
        ended.wait()
        return completion("w30")

    with fake(answer) as url:
        try:
            with pytest.raises(ServerError, match=r"within 0.5 s, and .* not sent again.*--batch"):
                write(target, url, tmp_path / "a.jsonl", conversations=ONE)
        finally:
            ended.set()
    assert len(asked) == 1


def test_two_servers_share_the_conversations(target: Target, tmp_path: Path) -> None:
    """The rows are those of one; both are asked."""
    expected = written_here(target, tmp_path / "here.jsonl", TALKS * 4)
    with moaspec_server(target) as first, moaspec_server(target) as second:
        _, writer = write(
            target, f"{first},{second}", tmp_path / "a.jsonl", conversations=TALKS * 4
        )
        counts = [server.client.pace.running for server in writer._servers]
    assert (tmp_path / "a.jsonl").read_bytes() == expected
    assert counts == [0, 0]


def test_a_lost_server_leaves_its_conversations_to_the_others(
    target: Target, tmp_path: Path
) -> None:
    """The last one's loss ends the run."""
    talks, asked, good = TALKS[:1] * 20, [0, 0], completion("w30", token_ids=[30, 1])

    def dies(after: int, number: int) -> Any:
        def answer(_: Fields) -> tuple[int, Any]:
            asked[number] += 1
            return (404, {"error": "unloaded"}) if asked[number] > after else good

        return answer

    with fake(dies(3, 0)) as first, fake(dies(1000, 1)) as second:
        rows, _ = write(target, f"{first},{second}", tmp_path / "a.jsonl", conversations=talks)
    assert len(rows) == 20
    assert asked[1] > 15
    asked[:] = [-1, -4]
    with fake(dies(0, 0)) as first, fake(dies(0, 1)) as second:
        urls = f"{first},{second}"
        with pytest.raises(ServerError, match="unloaded"):
            write(target, urls, tmp_path / "b.jsonl", conversations=talks)


def test_a_long_answer_does_not_keep_a_server_idle(target: Target, tmp_path: Path) -> None:
    """All other conversations are answered while the first one's answer is under way."""
    talks = [chat_tokenizers.talk(f"w{20 + i}") for i in range(30)]
    others, good = threading.Semaphore(0), completion("w30", token_ids=[30, 1])

    def answer(fields: Fields) -> tuple[int, Any]:
        if 20 in fields["prompt"] and fields["max_tokens"] > endpoint_writer.PROBE_TOKENS:
            for _ in talks[1:]:
                assert others.acquire(timeout=60)
        else:
            others.release()
        return good

    with fake(answer) as url:
        place = [Endpoint(url=url, at_once=2)]
        with EndpointWriter(target, place, options(group_size=3)) as writer:
            writer.connect((21, 22))
            others.acquire()
            with Journal(tmp_path / "a.jsonl", writer.settings()) as journal:
                regenerate(writer, talks, journal)
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 30
