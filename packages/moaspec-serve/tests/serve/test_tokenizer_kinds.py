"""Completions and log-probabilities with tokenizers of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

import serving
import tiny
import tokenizer_kinds
from moaspec.target.target import Target
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_core.policy.policies import DraftSettings
from moaspec_core.sampling.incremental_text import TokenBytes
from moaspec_serve.sources.local_source import LocalSource

PROMPT = "the x is"
TOKENS = 12
PADDED = 8
"""Rows of the embedding that are no tokens."""


def _target(tokenizer: Any) -> Target:
    """One that writes words with and without spaces, and parts of characters."""
    padded = len(tokenizer) + PADDED
    return tiny.fresh_target(tokenizer=tokenizer, vocab_size=padded, max_position_embeddings=128)


@pytest.fixture(params=tokenizer_kinds.KINDS)
def setting(request: pytest.FixtureRequest) -> Iterator[tuple[OpenAI, Any]]:
    tokenizer = tokenizer_kinds.KINDS[request.param]()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %} is"
    source = LocalSource(_target(tokenizer), name="m", shaping=DraftSettings(Chain(2)))
    with serving.serving(source) as served:
        yield served.openai(), tokenizer


def _whole(tokenizer: Any) -> dict[str, float]:
    """A bias against tokens that are no text, which a random model would write, too."""
    own = TokenBytes(tokenizer)
    parts = [token for token in range(len(tokenizer)) if own(token)[:1] >= b"\x80"]
    padding = range(len(tokenizer), len(tokenizer) + PADDED)
    split = [token for token in parts if own(token) != "é".encode()]
    return {str(token): -100.0 for token in (*split, *padding)}


def _ask(client: OpenAI, **options: Any) -> Any:
    settings: dict[str, Any] = {"prompt": PROMPT, "max_tokens": TOKENS, "seed": 3, "logprobs": 5}
    return client.completions.create(model="m", **settings | options)


def test_text_continues_the_prompt(setting: tuple[OpenAI, Any]) -> None:
    client, tokenizer = setting
    for seed in range(2):
        asked: dict[str, Any] = {"seed": seed, "logit_bias": _whole(tokenizer)}
        answer = _ask(client, **asked)
        logprobs: Any = answer.choices[0].logprobs
        text = answer.choices[0].text
        assert b"".join(map(bytes, logprobs.bytes)) == text.encode()
        assert "".join(logprobs.tokens) == text
        assert len(logprobs.tokens) == len(logprobs.text_offset) == len(logprobs.token_logprobs)
        for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
            assert text[offset:].startswith(token)
        chunks = list(_ask(client, **asked, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == text
        offsets = [i for c in chunks for i in c.choices[0].logprobs.text_offset]
        assert offsets == logprobs.text_offset
        echoed = _ask(client, **asked, echo=True, logprobs=None).choices[0].text
        assert echoed == PROMPT + text
        ids = tokenizer(PROMPT)["input_ids"]
        assert _ask(client, **asked, prompt=ids).choices[0].text == text


def test_alternatives_are_entries_of_their_own(setting: tuple[OpenAI, Any]) -> None:
    client, tokenizer = setting
    ids = tokenizer.convert_tokens_to_ids(["\u2581true", "\u0120true", "true", "##true"])
    bias = {str(token): 50.0 for token in ids if token != tokenizer.unk_token_id and token}
    logprobs = _ask(client, logit_bias=bias, temperature=0).choices[0].logprobs
    assert set(logprobs.tokens) <= {" true", "true"}
    assert all(len(top) >= 4 for top in logprobs.top_logprobs)


def test_chats_report_bytes_of_every_token(setting: tuple[OpenAI, Any]) -> None:
    client, tokenizer = setting
    answer = client.chat.completions.create(
        model="m",
        messages=serving.say("the x"),  # type: ignore[arg-type]
        max_tokens=TOKENS,
        seed=5,
        logprobs=True,
        top_logprobs=3,
        logit_bias=_whole(tokenizer),  # type: ignore[arg-type]
    )
    content: Any = answer.choices[0].logprobs
    data = b"".join(bytes(one.bytes) for one in content.content)
    assert data.decode() == answer.choices[0].message.content
    for one in content.content:
        assert len({top.token for top in one.top_logprobs}) == 3


def test_a_turn_begins_as_transformers_decodes_it(setting: tuple[OpenAI, Any]) -> None:
    """Its tokens alone; where a message is continued, the space stays."""
    client, tokenizer = setting
    ids = tokenizer.convert_tokens_to_ids(["\u2581Paris", "\u0120Paris", "Paris"])
    word = next(token for token in ids if token not in (None, tokenizer.unk_token_id))
    asked: dict[str, Any] = {
        "model": "m",
        "messages": serving.say("the x"),
        "max_tokens": 2,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
        "logit_bias": {str(word): 100.0},
    }
    answer = client.chat.completions.create(**asked)
    text = tokenizer.decode([word, word])
    assert answer.choices[0].message.content == text
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    found: Any = answer.choices[0].logprobs
    assert b"".join(bytes(one.bytes) for one in found.content).decode() == text
    assert len({top.token for top in found.content[0].top_logprobs}) == 2
    response = client.responses.create(
        model="m",
        input="the x",
        max_output_tokens=2,
        temperature=0,
        extra_body={"logit_bias": asked["logit_bias"]},
    )
    assert response.output_text == text
    more = {"continue_final_message": True, "add_generation_prompt": False}
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    said = client.chat.completions.create(**asked, extra_body=more).choices[0].message.content
    continued = client.completions.create(
        model="m", prompt="the x", max_tokens=2, temperature=0, logit_bias=asked["logit_bias"]
    )
    assert said == continued.choices[0].text
