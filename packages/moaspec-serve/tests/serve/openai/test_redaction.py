"""Private text of requests: the target sees placeholders, clients see their text."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

import edges
import serving
from moaspec_core.chat.call_reader import Call
from moaspec_core.privacy.vault import Vault
from moaspec_edge.protocol.transport import Connection
from moaspec_serve.openai.chat_input import ChatInput
from moaspec_serve.openai.redaction import AnswerRestorer, RequestRedactor
from moaspec_serve.server_context import ServeSettings
from moaspec_serve.sources.source import Cancel, Job, LinkState, Load, Report, TextSource, Update
from moaspec_serve.sources.text_writer import Piece
from serving import LONGEST, MODEL, Served

pytestmark = pytest.mark.usefixtures("patient_link")

SECRETS = ('Ada "Countess" Lovelace', "ada@example.org", "4111 1111 1111 1111")
TEXT = f"I am <private>{SECRETS[0]}</private>, mail {SECRETS[1]}, card {SECRETS[2]}."
PLAIN = f"I am {SECRETS[0]}, mail {SECRETS[1]}, card {SECRETS[2]}."


def say(text: str) -> Any:
    return serving.say(text)


SETTINGS = ServeSettings(make_vault=Vault)


class Parrot(TextSource):
    """A source that repeats its prompt, one byte at a time; and what it was given."""

    def __init__(self) -> None:
        self.info = serving.source().info
        self.jobs: list[Job] = []

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def submit(self, jobs: Sequence[Job], report: Report) -> Cancel:
        self.jobs += jobs
        for index, job in enumerate(jobs):
            for token in (token for token in job.prompt_ids if token < serving.START):
                report(index, Update(token_ids=(token,), sources=("target",)))
            report(index, Update(stop_reason="stop_token"))

        async def cancel() -> None: ...

        return cancel

    load = Load()
    link: LinkState | None = None
    learning = steps = None

    def cut(self, cut: bool) -> bool:
        return cut and False

    @property
    def seen(self) -> str:
        """All that left for the target, of the last request."""
        job = self.jobs[-1]
        tokens: Any = self.info.tokenizer
        grammar = "" if job.grammar is None else job.grammar.text
        return "\n".join([tokens.decode(job.prompt_ids), *job.stop, grammar])


@pytest.fixture(scope="module")
def parrot() -> Parrot:
    return Parrot()


@pytest.fixture(scope="module")
def client(parrot: Parrot) -> Iterator[openai.OpenAI]:
    with serving.serving(parrot, SETTINGS) as served:
        yield served.openai()


def check_hidden(seen: str, *secrets: str) -> None:
    for secret in secrets or SECRETS:
        assert secret not in seen
        assert json.dumps(secret)[1:-1] not in seen


@pytest.mark.parametrize("stream", [True, False])
def test_chats(client: openai.OpenAI, parrot: Parrot, *, stream: bool) -> None:
    messages: Any = [
        {"role": "system", "content": f"Help {SECRETS[0]}."},
        {"role": "user", "content": [{"type": "text", "text": TEXT}]},
    ]
    extra = {"moaspec": {"sources": True}}
    answer: Any = client.chat.completions.create(
        model=MODEL, messages=messages, stream=stream, extra_body=extra
    )
    chunks = list(answer) if stream else [answer]
    said = [one.delta if stream else one.message for chunk in chunks for one in chunk.choices]
    text = "".join(one.content or "" for one in said)
    assert PLAIN in text
    assert f"Help {SECRETS[0]}." in text
    check_hidden(parrot.seen)
    extension = [chunk.moaspec for chunk in chunks if getattr(chunk, "moaspec", None)]
    choices = extension if stream else extension[0]["choices"]
    assert "".join(piece["text"] for one in choices for piece in one["pieces"]) == text


@pytest.mark.parametrize("stream", [True, False])
def test_completions(client: openai.OpenAI, parrot: Parrot, *, stream: bool) -> None:
    answer: Any = client.completions.create(
        model=MODEL, prompt=[TEXT, f"again {SECRETS[0]}"], stream=stream
    )
    chunks = list(answer) if stream else [answer]
    texts = ["", ""]
    for one in itertools.chain.from_iterable(chunk.choices for chunk in chunks):
        texts[one.index] += one.text
    assert texts == [PLAIN, f"again {SECRETS[0]}"]
    for job in parrot.jobs[-2:]:
        check_hidden(parrot.info.tokenizer.decode(job.prompt_ids))


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_responses_and_what_is_stored_of_them(
    client: openai.OpenAI, parrot: Parrot, *, stream: bool
) -> None:
    def ask(text: str, **options: Any) -> Any:
        answer: Any = client.responses.create(model=MODEL, input=text, stream=stream, **options)
        return list(answer)[-1].response if stream else answer

    first = ask(TEXT)
    assert PLAIN in first.output_text
    assert PLAIN in client.responses.retrieve(first.id).output_text
    before = parrot.seen
    second = ask("Who am I, ADA COUNTESS LOVELACE?", previous_response_id=first.id)
    assert "ADA COUNTESS LOVELACE" in second.output_text
    check_hidden(parrot.seen, *SECRETS, "ADA COUNTESS LOVELACE")
    # The session that holds the first turn is used for the second one.
    assert parrot.seen.startswith(before.removesuffix("<|start|>assistant\n\n"))


def test_calls_and_their_results_in_messages(client: openai.OpenAI, parrot: Parrot) -> None:
    arguments = json.dumps({"who": SECRETS[0], "number": 4111111111111111, "Zo\u00eb": "Zo\u00eb"})
    function = {"name": "write", "arguments": arguments}
    call = {"id": "call_ada@example.org", "type": "function", "function": function}
    messages: Any = [
        {"role": "user", "content": f"{TEXT} <private>Zo\u00eb</private>"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": '{"to": "Zo\\u00eb"}', "tool_call_id": call["id"]},
    ]
    client.chat.completions.create(model=MODEL, messages=messages)
    check_hidden(parrot.seen, *SECRETS, "4111111111111111", "Zo\u00eb", "Zo\\u00eb")


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_answers_in_json_and_calls(*, stream: bool) -> None:
    """The values that a grammar allows are hidden in it and restored as JSON."""
    schema = {
        "type": "object",
        "properties": {"who": {"const": SECRETS[0]}, "to": {"enum": [SECRETS[1]]}},
        "required": ["who", "to"],
        "additionalProperties": False,
    }
    tool: Any = {"type": "function", "function": {"name": "write", "parameters": schema}}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    asked: dict[str, Any] = {"model": MODEL, "messages": say(TEXT), "stream": stream}
    with serving.serving(serving.source(), SETTINGS) as served:
        create: Any = served.openai().chat.completions.create
        told = create(**asked, response_format=wanted, max_tokens=200)
        called = create(**asked, tools=[tool], tool_choice="required", max_tokens=200)
        chunks = [[*told], [*called]] if stream else [[told], [called]]
    said = [
        [one.delta if stream else one.message for c in cs for one in c.choices] for cs in chunks
    ]
    right = {"who": SECRETS[0], "to": SECRETS[1]}
    assert json.loads("".join(one.content or "" for one in said[0])) == right
    calls = [call for one in said[1] for call in one.tool_calls or ()]
    assert json.loads(calls[0].function.arguments) == right


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"logprobs": True}, "logprobs"),
        ({"extra_body": {"return_token_ids": True}}, "return_token_ids"),
        ({"stop": "_1]"}, "stop string"),
        ({"messages": say("<private>Ada")}, "never closed"),
        ({"messages": say("<Private reason=x>Ada</private>")}, "looks like a mark"),
        ({"tools": {"pattern": "ada@example.org"}}, "pattern"),
        ({"tools": {"properties": {"ada@example.org": {}}}}, "name"),
        ({"tools": {"const": 4111111111111111}}, "number"),
        ({"extra_body": {"chat_template_kwargs": {"ada@example.org": 1}}}, "variable|name"),
        ({"messages": say("a" * 300_000)}, "characters"),
    ],
)
def test_what_cannot_be_hidden_is_refused(
    client: openai.OpenAI, options: dict[str, Any], reason: str
) -> None:
    if "tools" in options:
        function = {"name": "write", "parameters": {"type": "object", **options["tools"]}}
        options = {"tools": [{"type": "function", "function": function}]}
    with pytest.raises(openai.BadRequestError, match=reason):
        client.chat.completions.create(**{"model": MODEL, "messages": say(TEXT), **options})


def test_token_ids(client: openai.OpenAI, parrot: Parrot) -> None:
    tokens: Any = parrot.info.tokenizer
    create: Any = client.completions.create
    assert create(model=MODEL, prompt=tokens("hello")["input_ids"]).choices[0].text == "hello"
    for text in ("to ada@example.org", "ada@exa<|end|>mple.org", "<private>Ada</private>"):
        with pytest.raises(openai.BadRequestError, match="token ids"):
            create(model=MODEL, prompt=[tokens(text)["input_ids"]])


def test_stop_strings_are_hidden_like_the_text(client: openai.OpenAI, parrot: Parrot) -> None:
    client.chat.completions.create(model=MODEL, messages=say(TEXT), stop=[SECRETS[1]])
    assert parrot.jobs[-1].stop == ("[EMAIL_1]",)


def test_logprobs_of_requests_without_private_text(client: openai.OpenAI) -> None:
    assert client.chat.completions.create(model=MODEL, messages=say("hello"), logprobs=True)


# Over the link


class Recorder:
    """A transport that keeps every frame that the device sends."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.frames = inner, list[bytes]()

    async def connect(self) -> Connection:
        connection = await self._inner.connect()
        send = connection.send

        async def keep(frame: bytes) -> None:
            self.frames.append(bytes(frame))
            await send(frame)

        connection.send = keep
        return connection


def recorded(text: str, settings: ServeSettings) -> bytes:
    """All frames of a chat of two turns, a completion and a response."""
    edge = edges.Edge()
    recorder = Recorder(edge.source._transport)
    edge.source._transport = recorder
    with serving.serving(edge.source, settings) as served:
        ask(served, text)
    return b"".join(recorder.frames)


def ask(served: Served, text: str) -> None:
    client = served.openai()
    options: dict[str, Any] = {"model": MODEL, "temperature": 0}
    first = client.chat.completions.create(
        messages=say(text), max_tokens=LONGEST, stop=["ada@example.org"], **options
    )
    turns: Any = [*say(text), {"role": "assistant", "content": first.choices[0].message.content}]
    client.chat.completions.create(messages=[*turns, *say(PLAIN)], max_tokens=4, **options)
    client.completions.create(prompt=text, max_tokens=4, **options)
    client.responses.create(input=text, max_output_tokens=4, **options)


def numbers(secret: str) -> list[bytes]:
    """A part of the text, and its token ids in the ways of the wire."""
    tokens: Any = serving.target().tokenizer
    part = secret[: len(secret) // 2 + 1]
    ids = tokens(part)["input_ids"]
    fixed = [b"".join(one.to_bytes(width, "little") for one in ids) for width in (1, 2, 4, 8)]
    varints = b"".join(
        bytes([one]) if one < 128 else bytes([one % 128 + 128, one // 128]) for one in ids
    )
    return [part.encode(), *fixed, varints]


ODD = [
    ("<private>", "</private>"),
    ("<PR\u0131VATE >", "</ private>"),
    ("&lt;private&gt;", "&lt;/private&gt;"),
    ("\uff1cprivate\uff1e", "\u2039/private\u203a"),
    ("<pri\u200bv\u00adate>", "</priv\u0430te>"),
]


@pytest.mark.slow
@pytest.mark.parametrize("marks", ODD)
def test_no_private_byte_is_in_any_frame(marks: tuple[str, str]) -> None:
    text = TEXT.replace("<private>", marks[0]).replace("</private>", marks[1])
    sent = recorded(text, SETTINGS)
    assert len(sent) > 500
    for secret in SECRETS:
        assert not [form for form in numbers(secret) if form in sent]


@pytest.mark.slow
def test_the_search_finds_what_is_not_hidden() -> None:
    sent = recorded(PLAIN, ServeSettings())
    for secret in SECRETS:
        assert [form for form in numbers(secret) if form in sent]


# Restoring


@given(st.lists(st.integers(1, 9), max_size=40), st.booleans())
def test_pieces_restore_as_the_whole(cuts: list[int], as_json: bool) -> None:
    hiding = RequestRedactor(lambda: Vault(()), 10_000, 1000)
    asked = hiding.hide(
        ChatInput(messages=[{"role": "user", "content": f"<private>{SECRETS[0]}</private>"}])
    )
    text = f"to {asked.messages[0]['content']}, [PRIVATE_9 [[PRIVATE_1]] [PRIVATE_1][PRIVATE_1 [X"
    restorer = hiding.restorer(as_json=as_json)
    found, place = list[Piece](), 0
    for size in [*cuts, len(text)]:
        last = size == len(text)
        found += restorer.take([Piece(text[place : place + size], 1, "target")], last=last)
        place += size
    value = json.dumps(SECRETS[0])[1:-1] if as_json else SECRETS[0]
    assert "".join(piece.text for piece in found) == text.replace("[PRIVATE_1]", value)
    assert len(found) == len(cuts) + 1


def test_calls_stay_json() -> None:
    vault = Vault(())
    vault.hide(f"<private>{SECRETS[0]}</private>")
    restored = AnswerRestorer(vault, str).restore_call(
        Call("a", '{"x": ["\\u005bPRIVATE_1]"]}', "1")
    )
    assert json.loads(restored.arguments) == {"x": [SECRETS[0]]}
    assert AnswerRestorer(vault, str).restore_call(Call("a", '{"x":1}', "1")).arguments == '{"x":1}'
