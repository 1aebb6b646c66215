"""Texts that continue their prompts, whatever the tokenizer drops at the start of a text."""

from __future__ import annotations

import random
from typing import Any

import pytest

import moaspec
import tiny
import tokenizer_kinds
from moaspec_core.sampling.incremental_text import UNKNOWN, TextStream, TokenBytes, continuation

TOKENIZERS = {name: make() for name, make in tokenizer_kinds.KINDS.items()}


def _random_ids(tokenizer: Any, seed: int) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(len(tokenizer)) for _ in range(choose.randrange(1, 30))]


def _streamed(tokenizer: Any, after: list[int], token_ids: list[int]) -> str:
    stream = TextStream(tokenizer, skip_special_tokens=True, after=after)
    return "".join(map(stream.step, token_ids))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_continue_the_prompt(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    for seed in range(60):
        prompt = tokenizer("the x is")["input_ids"]
        ids = [token for token in _random_ids(tokenizer, seed) if token > 2]
        before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *ids])
        if UNKNOWN in whole:  # bytes that are no character, of which streams say less
            continue
        assert before + _streamed(tokenizer, prompt, ids) == whole
        assert before + continuation(tokenizer, prompt, ids) == whole
        own = TokenBytes(tokenizer)
        assert before.encode() + b"".join(map(own, ids)) == whole.encode()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_first_space_stays(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    whole = tokenizer("the x is true")["input_ids"]
    prompt = tokenizer("the x is")["input_ids"]
    if whole[: len(prompt)] != prompt:
        pytest.skip("this tokenizer reads letters here")
    assert _streamed(tokenizer, prompt, whole[len(prompt) :]) == " true"
    assert _streamed(tokenizer, [], whole[len(prompt) :]) in ("true", " true")


def test_a_prompt_may_end_within_a_character_or_in_special_tokens() -> None:
    for name in ("llama", "byte level"):
        tokenizer = TOKENIZERS[name]
        spelt = [f"<0x{byte:02X}>" for byte in "ö".encode()]
        if name == "byte level":
            spelt = ["Ã", "¶"]
        first, second = tokenizer.convert_tokens_to_ids(spelt)
        prompt = tokenizer("x")["input_ids"]
        assert _streamed(tokenizer, [*prompt, first], [second]) == "ö"
        special = tokenizer.eos_token_id
        truth = tokenizer(" true")["input_ids"][-1:]
        text = _streamed(tokenizer, [*prompt, *[special] * 40], truth)
        assert text == TokenBytes(tokenizer)(truth[0]).decode()


def test_tokens_have_names_of_their_own() -> None:
    for name in ("llama", "byte level", "unigram"):
        tokenizer = TOKENIZERS[name]
        own = TokenBytes(tokenizer)
        letter = tokenizer_kinds.byte_level().convert_ids_to_tokens(0) and (
            "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}" if name == "byte level" else "\u2581"
        )
        ids = tokenizer.convert_tokens_to_ids([f"{letter}true", "true"])
        assert [own.name(token) for token in ids] == [" true", "true"]
    assert TokenBytes(TOKENIZERS["llama"])(3 + 0xE2) == b"\xe2"
    assert TokenBytes(TOKENIZERS["llama"]).name(3 + 0xE2) == r"bytes:\xe2"
    assert TokenBytes(TOKENIZERS["llama"]).name(10**6) == "token_id:1000000"
    assert TokenBytes(TOKENIZERS["llama"]).name(2) == "</s>"


@pytest.mark.parametrize("name", ["llama", "unigram", "byte level"])
def test_stop_strings_may_begin_with_the_first_space(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    space = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}" if name == "byte level" else "\u2581"
    paris = tokenizer.convert_tokens_to_ids(f"{space}Paris")
    target = tiny.fresh_target(tokenizer=tokenizer, vocab_size=len(tokenizer))
    result = moaspec.generate(
        target,
        tokenizer("the x is")["input_ids"],
        logit_bias={paris: 1e4},
        stop=[" Paris"],
        max_new_tokens=5,
    )
    assert (result.stop_reason, result.token_ids) == ("stop_string", [paris])
