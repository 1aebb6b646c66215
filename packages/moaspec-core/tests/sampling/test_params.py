"""Settings: what is refused, and what they imply."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

import moaspec
import tiny
from moaspec import SamplingParams
from moaspec.sampling import kernels
from moaspec_core.errors import InputError
from moaspec_core.sampling.params import SETTINGS, SamplingOptions

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "warm"),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", True),
        ("choice", -1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("presence_penalty", math.inf),
        ("frequency_penalty", None),
        ("logit_bias", {-1: 0.5}),
        ("logit_bias", {"a": 0.5}),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: 10**400}),
        ("logit_bias", {True: 1.0}),
        ("temperature", 10**400),
        ("logit_bias", None),
        ("logit_bias", [1]),
        ("processors", (3,)),
        ("processors", None),
        ("processors", lambda _, logits_V: logits_V),
    ],
)
def test_values_outside_their_range(name: str, value: Any) -> None:
    with pytest.raises(InputError, match="processor" if name == "processors" else name):
        SamplingParams(**{name: value})


def test_whole_numbers_beyond_64_bits_are_numbers() -> None:
    options: dict[str, Any] = {"logit_bias": {5: -(10**20)}, "presence_penalty": 10**20}
    result = moaspec.generate(tiny.target(), [1, 2], max_new_tokens=4, **options)
    assert 5 not in result.token_ids
    assert len(set(result.token_ids)) == len(result.token_ids)


def test_a_bias_on_tokens_that_do_not_exist() -> None:
    with pytest.raises(InputError, match="token id 64"):
        moaspec.generate(tiny.target(), [1], logit_bias={tiny.VOCAB: 1.0})


def test_every_setting_is_an_option() -> None:
    settings = {one.name for one in fields(SamplingParams)} - {"processors"}
    assert set(SamplingOptions.__annotations__) == settings
    assert set(SETTINGS) <= settings


def test_kernels_know_the_filters_or_leave_them_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels.supported(SamplingParams(top_k=3, top_p=0.5, min_p=0.1, temperature=2.0))
    monkeypatch.setattr(kernels, "_UNKNOWN", ["min_p"])
    assert not kernels.supported(SamplingParams(min_p=0.1))
    assert kernels.supported(SamplingParams(top_k=3))


def test_a_seed_is_drawn_once_and_given_back() -> None:
    options: dict[str, Any] = {"temperature": 1.5, "max_new_tokens": 8}
    first, second = moaspec.generate(tiny.target(), tiny.PROMPTS[:2], **options)
    assert first.seed is not None
    assert first.seed == second.seed
    again = moaspec.generate(tiny.target(), tiny.PROMPTS[0], seed=first.seed, **options)
    assert again.token_ids == first.token_ids
    assert moaspec.generate(tiny.target(), tiny.PROMPTS[0], **options).seed != first.seed


def test_greedy_decoding_has_no_seed_of_its_own() -> None:
    assert moaspec.generate(tiny.target(), [1], max_new_tokens=1).seed is None
    assert moaspec.generate(tiny.target(), [1], max_new_tokens=1, seed=4).seed == 4


def test_what_settings_imply() -> None:
    assert SamplingParams(top_k=3, top_p=0.5).takes_argmax
    assert not SamplingParams(temperature=0.1).takes_argmax
    assert not SamplingParams(frequency_penalty=0.1).takes_argmax
    assert not SamplingParams(logit_bias={1: 2.0}).takes_argmax


def test_several_choices() -> None:
    options: dict[str, Any] = {"temperature": 1.5, "seed": 1, "max_new_tokens": 6}
    prompts = [list(prompt) for prompt in tiny.PROMPTS[:2]]
    results: Any = moaspec.generate(tiny.target(), prompts, num_choices=3, **options)
    assert [len(choices) for choices in results] == [3, 3]
    texts = [tuple(result.token_ids) for choices in results for result in choices]
    assert len(set(texts)) == 6
    single: Any = moaspec.generate(tiny.target(), prompts[1], num_choices=3, **options)
    assert [tuple(result.token_ids) for result in single] == texts[3:]
    one = moaspec.generate(tiny.target(), prompts[1], **options)
    assert tuple(one.token_ids) == texts[3]
    events = list(moaspec.stream(tiny.target(), prompts[1], num_choices=3, **options))
    assert {event.handle for event in events} == {0, 1, 2}


@pytest.mark.parametrize("number", [0, 1.5, 10**11])
def test_numbers_of_choices_that_are_none(number: Any) -> None:
    with pytest.raises(InputError, match="num_choices"):
        moaspec.generate(tiny.target(), [1], num_choices=number)


@pytest.mark.parametrize("seed", [np.int64(5), np.uint64(5), torch.tensor(5)], ids=repr)
def test_seeds_of_other_libraries(seed: Any) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "max_new_tokens": 6}
    result = moaspec.generate(tiny.target(), tiny.PROMPTS[0], seed=seed, **options)
    assert type(result.seed) is int
    assert result == replace(
        moaspec.generate(tiny.target(), tiny.PROMPTS[0], seed=5, **options), timing=result.timing
    )


def test_options_that_are_none_are_left_out() -> None:
    names = ("logit_bias", "logits_processors", "stop", "stop_token_ids", "seed")
    nothing: dict[str, Any] = dict.fromkeys(names)
    result = moaspec.generate(tiny.target(), tiny.PROMPTS[0], max_new_tokens=4, **nothing)
    assert tuple(result.token_ids) == tiny.own_texts("llama")[0][:4]


def test_a_bare_processor_is_refused() -> None:
    bare: Any = lambda _, logits_V: logits_V  # noqa: E731
    with pytest.raises(InputError, match="in a list"):
        moaspec.generate(tiny.target(), [1], logits_processors=bare)
