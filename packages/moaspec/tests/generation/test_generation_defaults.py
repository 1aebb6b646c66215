"""What a model's `generation_config.json` asks for holds where nothing else is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import moaspec
import tiny
from moaspec.target.target import Target
from moaspec_core.engine.generate_options import sampling_params
from moaspec_core.errors import InputError
from moaspec_core.sampling.generation_defaults import GenerationDefaults, without_defaults
from moaspec_core.tokens.token_rules import TokenRules

NEW_TOKENS = 16
SURPRISES: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "suppress_tokens": {"suppress_tokens": list(range(0, 60, 2))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(30))},
    "bad_words_ids": {"bad_words_ids": [[token] for token in range(20)]},
    "bad_words_ids of several": {"bad_words_ids": "pairs"},
    "several EOS": {"eos_token_id": "two"},
    "one EOS": {"eos_token_id": "one"},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "min_length": {"eos_token_id": "two", "min_length": 15},
    "min_new_tokens": {"eos_token_id": "two", "min_new_tokens": 9},
    "forced_bos_token_id": {"forced_bos_token_id": 7},
    "forced_eos_token_id": {"forced_eos_token_id": 9, "eos_token_id": 9},
    "exponential_decay": {"eos_token_id": 9, "exponential_decay_length_penalty": (3, 1.7)},
    "sequence_bias": {"sequence_bias": [[[5], 9.0], [[6], -3.0]]},
    "remove_invalid_values": {"remove_invalid_values": True},
    "sampling": {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.8},
    "all together": {
        "repetition_penalty": 1.1,
        "no_repeat_ngram_size": 3,
        "suppress_tokens": [1, 2],
        "bad_words_ids": [[4], [5, 9]],
        "eos_token_id": "two",
        "min_new_tokens": 5,
    },
}


def _surprising(**asked: Any) -> Target:
    """A target of such defaults; what they forbid is what it would have written."""
    model = tiny.model("llama")
    plain = tiny.own_text(Target(model, None, name="plain"), tiny.PROMPTS[0], NEW_TOKENS)
    if asked.get("bad_words_ids") == "pairs":
        asked["bad_words_ids"] = [list(pair) for pair in zip(plain[::3], plain[1::3], strict=False)]
    ends = {"one": plain[6], "two": [plain[6], plain[3]]}
    if isinstance(asked.get("eos_token_id"), str):
        asked["eos_token_id"] = ends[asked["eos_token_id"]]
    model.generation_config = GenerationConfig(**asked)
    return Target(model, None, name="surprising")


def _expected(target: Target, prompt: tuple[int, ...]) -> list[int]:
    return tiny.own_text(target, prompt, NEW_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("name", SURPRISES)
def test_greedy_text_is_transformers(name: str) -> None:
    target = _surprising(**SURPRISES[name])
    texts = [_expected(target, prompt) for prompt in tiny.PROMPTS]
    whole = [[*prompt, *text] for prompt, text in zip(tiny.PROMPTS, texts, strict=True)]
    for drafter in (None, tiny.ReplayDrafting(whole, wrong_from=3), tiny.random_drafter(target)):
        results = moaspec.generate(
            target, tiny.PROMPTS, drafter=drafter, max_new_tokens=NEW_TOKENS, tree="tree:3,2,6"
        )
        assert [one.token_ids for one in results] == texts
    one = (33,)
    got = moaspec.generate(target, one, max_new_tokens=NEW_TOKENS)
    assert got.token_ids == _expected(target, one)


@pytest.mark.parametrize("name", ["all together", "forced_eos_token_id"])
def test_sessions_and_streams_honour_the_same(name: str) -> None:
    target = _surprising(**SURPRISES[name])
    prompt = tiny.PROMPTS[1]
    expected = moaspec.generate(target, prompt, max_new_tokens=12).token_ids
    events = moaspec.stream(target, prompt, max_new_tokens=12)
    assert [token for event in events for token in event.token_ids] == expected
    session = moaspec.Session(target)
    assert session.generate(prompt, max_new_tokens=12).token_ids == expected
    longer = [*prompt, *expected, 3]
    again = moaspec.generate(target, longer, max_new_tokens=12).token_ids
    assert session.generate(longer, max_new_tokens=12).token_ids == again


def test_the_hook_applies_them_once() -> None:
    target = _surprising(repetition_penalty=1.3, suppress_tokens=[1, 2, 3])
    ids = torch.tensor([tiny.PROMPTS[1]])
    hook = moaspec.custom_generate(None)
    asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 15}
    got = target.model.generate(**asked, do_sample=False, custom_generate=hook)
    assert got.tolist() == target.model.generate(**asked, do_sample=False).tolist()


def test_what_is_said_goes_before_the_defaults() -> None:
    target = _surprising(repetition_penalty=1.3, suppress_tokens=list(range(0, 60, 2)))
    plain = Target(tiny.model("llama"), None, name="plain")
    prompt = tiny.PROMPTS[1]
    expected = moaspec.generate(plain, prompt, max_new_tokens=15).token_ids
    without = moaspec.generate(target, prompt, max_new_tokens=15, generation_config=None)
    assert without.token_ids == expected
    said = moaspec.generate(
        target, prompt, max_new_tokens=15, repetition_penalty=1.0, rules=TokenRules()
    )
    assert said.token_ids == expected
    target.model.generation_config = without_defaults(target.model.generation_config)
    bare = Target(target.model, None, name="bare")
    assert moaspec.generate(bare, prompt, max_new_tokens=15).token_ids == expected


def test_sampling_settings_hold_where_text_is_sampled() -> None:
    config = GenerationConfig(do_sample=True, temperature=0.6, top_k=20, top_p=0.9)
    defaults = GenerationDefaults.of(config, 64)
    assert defaults.temperature == 0.6
    greedy = sampling_params({}, defaults)
    assert (greedy.temperature, greedy.top_k, greedy.top_p) == (0.0, 0, 1.0)
    sampled = sampling_params({"temperature": 0.5, "top_p": None, "seed": 1}, defaults)
    assert (sampled.temperature, sampled.top_k, sampled.top_p) == (0.5, 20, 0.9)
    said = sampling_params({"temperature": 0.5, "top_k": 0, "top_p": 1.0, "seed": 1}, defaults)
    assert (said.top_k, said.top_p) == (0, 1.0)
    assert defaults.words == "temperature 0.6, top_k 20, top_p 0.9"
    limited = GenerationDefaults.of(GenerationConfig(max_new_tokens=9, bad_words_ids=[[1]]), 64)
    assert limited.words == "bad_words_ids ((1,),), max_new_tokens (not used)"
    unsampled = GenerationDefaults.of(GenerationConfig(temperature=0.6, top_k=20), 64)
    assert unsampled.temperature is None
    assert sampling_params({"temperature": 0.5, "seed": 1}, unsampled).top_k == 0
    alone = GenerationDefaults.of(GenerationConfig(do_sample=True), 64)
    assert (alone.temperature, alone.words) == (1.0, "temperature 1")


@pytest.mark.parametrize(
    "asked",
    [
        {"num_beams": 4},
        {"stop_strings": ["x"]},
        {"guidance_scale": 1.5},
        {"sequence_bias": [[[1, 2], 3.0]]},
        {"suppress_tokens": [64]},
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(asked: dict[str, Any]) -> None:
    target = _surprising(**asked)
    with pytest.raises(InputError, match=r"--generation-config none") as caught:
        moaspec.generate(target, tiny.PROMPTS[0])
    name = "outside the vocabulary" if "suppress_tokens" in asked else next(iter(asked))
    assert name in str(caught.value)
    assert moaspec.generate(target, tiny.PROMPTS[0], generation_config=None).token_ids


def test_what_only_sampling_has_is_refused_there_alone() -> None:
    target = _surprising(do_sample=True, typical_p=0.9)
    assert moaspec.generate(target, tiny.PROMPTS[0]).token_ids
    with pytest.raises(InputError, match="typical_p"):
        moaspec.generate(target, tiny.PROMPTS[0], temperature=1.0)


def test_no_other_value_names_defaults() -> None:
    with pytest.raises(InputError, match="generation_config must be"):
        moaspec.generate(tiny.target(), tiny.PROMPTS[0], generation_config="vllm")  # type: ignore[call-overload]
