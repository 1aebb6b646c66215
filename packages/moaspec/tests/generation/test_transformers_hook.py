"""Transformers' `generate` with our loop gives what it gives with its own."""

from __future__ import annotations

import queue
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import moaspec
import tiny
from moaspec.target.decoder_layers import cache_argument
from moaspec_core.drafting.ngram_proposer import NgramProposer
from moaspec_core.errors import InputError, UnsupportedTargetError

pytestmark = pytest.mark.kernels

PAD, EOS, NEW = 1, 6, 16


def padded(prompts: Any = tiny.PROMPTS) -> dict[str, Tensor]:
    longest = max(map(len, prompts))
    ids = [[PAD] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def hook(family: str = "llama") -> Any:
    """Replay is right four times in five, so that tokens come in accepted paths and single."""
    texts = [[*p, *t] for p, t in zip(tiny.PROMPTS, tiny.own_texts(family), strict=True)]
    drafter = moaspec.OracleProposer(texts, agreement=0.8)
    return moaspec.custom_generate(drafter, tree="tree:3x2x6")


class Ban(LogitsProcessor):
    """Forbids the token before the last, and what `scores` it got stays as it was."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.scatter(1, input_ids[:, -2:-1], -torch.inf)


class Until(StoppingCriteria):
    """Ends each row at a token, and counts its calls: it must be called once per step."""

    def __init__(self, token: int) -> None:
        self.token, self.calls = token, 0

    def __call__(self, input_ids: Tensor, *_: Any, **__: Any) -> Any:
        self.calls += 1
        return input_ids[:, -1] == self.token


class FirstRow(StoppingCriteria):
    """One answer for the whole batch, as examples of transformers' users often have it."""

    def __call__(self, input_ids: Tensor, *_: Any, **__: Any) -> Any:
        return bool(input_ids[0, -1] == tiny.own_texts("llama")[0][3])


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.values: list[list[Any]] = []

    def put(self, value: Tensor) -> None:
        self.values.append(value.tolist())

    def end(self) -> None:
        self.values.append(["end"])


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "eos": {"eos_token_id": [EOS, 12], "pad_token_id": PAD},
    "eos_as_pad": {"eos_token_id": 12},
    "max_length": {"max_length": 20, "max_new_tokens": None},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": EOS, "pad_token_id": PAD},
    "no_repeat": {"no_repeat_ngram_size": 2, "bad_words_ids": [[3], [12, 9]]},
    "forced_eos": {"forced_eos_token_id": 2, "eos_token_id": 2, "pad_token_id": PAD},
    "by_row": {"prefix_allowed_tokens_fn": lambda row, ids: [row, 20 + row, int(ids[-1]) // 2]},
    "penalty_and_ban": {
        "repetition_penalty": 1.3,
        "logits_processor": LogitsProcessorList([Ban()]),
    },
    "until_with_eos": {
        "stopping_criteria": StoppingCriteriaList([Until(12)]),
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    },
    "until_without_eos": {"stopping_criteria": StoppingCriteriaList([Until(12)])},
    "first_row": {"stopping_criteria": StoppingCriteriaList([FirstRow()])},
    "no_time": {"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(0.0)])},
    "several": {"num_return_sequences": 1, "return_dict_in_generate": True},
    "configuration": {
        "generation_config": GenerationConfig(
            eos_token_id=[EOS, 12], pad_token_id=PAD, min_new_tokens=5, repetition_penalty=1.2
        )
    },
    "suppressed": {
        "suppress_tokens": [12, 3],
        "begin_suppress_tokens": [20],
        "sequence_bias": [[[9], 2.0], [[3, 4], -5.0]],
        "exponential_decay_length_penalty": (4, 1.5),
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    },
}


def both(family: str, **options: Any) -> tuple[Any, Any]:
    model, inputs = tiny.target(family).model, padded()
    options = {"max_new_tokens": NEW, "do_sample": False} | options
    return (
        model.generate(**inputs, **options),
        model.generate(**inputs, **options, custom_generate=hook(family)),
    )


@pytest.mark.parametrize("name", SETTINGS)
def test_greedy_batches_are_transformers_own(name: str) -> None:
    expected, got = both("llama", **SETTINGS[name])
    if isinstance(expected, GenerateDecoderOnlyOutput):
        assert isinstance(got, GenerateDecoderOnlyOutput)
        expected, got = expected.sequences, got.sequences
    assert torch.equal(got, expected)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family(family: str) -> None:
    """One prompt: in a padded batch transformers picks LongRoPE's factors for all rows at once."""
    model, options = tiny.target(family).model, {"max_new_tokens": NEW, "do_sample": False}
    ids = torch.tensor([tiny.PROMPTS[2]])
    expected = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, **options, custom_generate=hook(family)), expected)


def test_processors_are_not_asked_behind_eos() -> None:
    own = tiny.own_texts("llama")[0]
    last = own.index(own[5])
    longest = len(tiny.PROMPTS[0]) + last

    class Watch(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            assert input_ids.shape[1] <= longest
            return scores

    drafter = moaspec.OracleProposer([[*tiny.PROMPTS[0], *own]])
    got = tiny.target().model.generate(
        torch.tensor([tiny.PROMPTS[0]]),
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=[own[5], -1],
        pad_token_id=PAD,
        logits_processor=LogitsProcessorList([Watch()]),
        custom_generate=moaspec.custom_generate(drafter, tree="chain:6"),
    )
    assert got[0, len(tiny.PROMPTS[0]) :].tolist() == list(own[: last + 1])


class LateEos(EosTokenCriteria):
    """EOS counts only in longer texts."""

    def __call__(self, input_ids: Tensor, scores: Tensor, **options: Any) -> Any:
        late = input_ids.shape[1] >= len(tiny.PROMPTS[0]) + 10
        return super().__call__(input_ids, scores, **options) & late


def test_a_criterion_of_the_callers_own_decides_by_itself() -> None:
    own = tiny.own_texts("llama")[0]
    model, ids = tiny.target().model, torch.tensor([tiny.PROMPTS[0]])
    options: dict[str, Any] = {
        "max_new_tokens": NEW,
        "do_sample": False,
        "pad_token_id": PAD,
        "stopping_criteria": StoppingCriteriaList([LateEos([own[3], own[12]])]),
    }
    expected = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, **options, custom_generate=hook()), expected)


def test_constraints_by_prompt() -> None:
    """A function of the batch index is asked about its own row's text only."""
    wanted = [[11, 12, 13, 14, 15, 16], [21, 22, 23, 24, 25, 26]]
    inputs = padded(tiny.PROMPTS[:2])
    width = inputs["input_ids"].shape[1]

    def allowed(row: int, ids: Tensor) -> list[int]:
        done = ids[width:].tolist()
        assert done == wanted[row][: len(done)]
        return [wanted[row][len(done)]]

    texts = [[*p, *t] for p, t in zip(tiny.PROMPTS, wanted, strict=False)]
    got = tiny.target().model.generate(
        **inputs,
        prefix_allowed_tokens_fn=allowed,
        max_new_tokens=6,
        do_sample=False,
        custom_generate=moaspec.custom_generate(moaspec.OracleProposer(texts), tree="chain:3"),
    )
    assert got[:, width:].tolist() == wanted


@pytest.mark.parametrize(
    "warper",
    [
        TopPLogitsWarper(0.01, min_tokens_to_keep=4),
        MinPLogitsWarper(0.999, min_tokens_to_keep=4),
        TopPLogitsWarper(0.01, filter_value=-1.0),
        TopKLogitsWarper(1, filter_value=-1.0),
    ],
    ids=lambda warper: type(warper).__name__,
)
def test_warpers_of_the_callers_own_keep_their_settings(warper: LogitsProcessor) -> None:
    """They leave several tokens where their number alone would leave one."""
    texts = [
        sampled(
            None,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            seed=seed,
            max_new_tokens=1,
            logits_processor=LogitsProcessorList([warper]),
        )[0, -1].item()
        for seed in range(24)
    ]
    assert len(set(texts)) > 1


def test_criteria_are_called_once_per_step() -> None:
    expected, got = Until(99), Until(99)
    both("llama", stopping_criteria=StoppingCriteriaList([expected]))
    assert expected.calls == 2 * NEW
    tiny.target().model.generate(
        **padded(),
        max_new_tokens=NEW,
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([got]),
        custom_generate=hook(),
    )
    assert got.calls == NEW


def test_streamers_get_prompt_tokens_and_end() -> None:
    records = []
    for options in ({}, {"custom_generate": hook()}):
        streamer = Recorder()
        tiny.target().model.generate(
            **padded(),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=12,
            pad_token_id=PAD,
            streamer=streamer,
            **options,
        )
        records.append(streamer.values)
    assert records[0] == records[1]


def test_a_text_streamer() -> None:
    streamer = TextIteratorStreamer(tiny.tokenizer(), skip_prompt=True, timeout=0.0)
    ids = torch.tensor([tiny.PROMPTS[0]])
    tiny.target().model.generate(
        ids, max_new_tokens=4, do_sample=False, streamer=streamer, custom_generate=hook()
    )
    assert "".join(streamer).split() == [f"w{token}" for token in tiny.own_texts("llama")[0][:4]]
    with pytest.raises(queue.Empty):
        next(streamer)


def test_a_streamer_reaches_a_hook_that_others_call() -> None:
    """Through a function of the user's, which transformers calls in the hook's place."""
    streamer = TextIteratorStreamer(tiny.tokenizer(), skip_prompt=True, timeout=0.0)
    called = hook()
    tiny.target().model.generate(
        torch.tensor([tiny.PROMPTS[0]]),
        max_new_tokens=4,
        do_sample=False,
        streamer=streamer,
        custom_generate=lambda *arguments, **options: called(*arguments, **options),
    )
    assert "".join(streamer).split() == [f"w{token}" for token in tiny.own_texts("llama")[0][:4]]


def sampled(drafter: Any, **options: Any) -> Tensor:
    settings = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "max_new_tokens": NEW}
    ids: Tensor = tiny.target().model.generate(
        **padded(), **(settings | options), custom_generate=moaspec.custom_generate(drafter)
    )
    return ids


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 9, "min_p": 0.02}, {"typical_p": 0.8}, {"repetition_penalty": 1.3}]
)
def test_sampled_text_is_a_function_of_the_seed(options: dict[str, Any]) -> None:
    drafter = tiny.agreeing_drafter("llama")
    first = sampled(drafter, seed=3, **options)
    assert torch.equal(first, sampled(None, seed=3, **options))
    assert not torch.equal(first, sampled(None, seed=4, **options))


def test_sampled_text_is_that_of_our_generate() -> None:
    results = moaspec.generate(
        tiny.target(),
        tiny.PROMPTS,
        max_new_tokens=NEW,
        temperature=0.8,
        top_p=0.9,
        top_k=50,
        seed=3,
    )
    got = sampled(NgramProposer(), seed=3, top_k=50)[:, -NEW:].tolist()
    assert got == [result.token_ids for result in results]


def test_without_seed_torch_decides() -> None:
    torch.manual_seed(5)
    first, second = sampled(None), sampled(None)
    torch.manual_seed(5)
    assert torch.equal(sampled(None), first)
    assert not torch.equal(first, second)


def test_num_return_sequences_are_different_choices() -> None:
    model = tiny.target().model
    options: dict[str, Any] = {"do_sample": True, "top_k": 0, "max_new_tokens": NEW, "seed": 3}
    got = model.generate(
        torch.tensor([[5, 9, 2], [7, 1, 30]]),
        **options,
        num_return_sequences=3,
        custom_generate=moaspec.custom_generate(),
    )
    expected = moaspec.generate(
        tiny.target(),
        [[5, 9, 2], [7, 1, 30]],
        temperature=1.0,
        max_new_tokens=NEW,
        seed=3,
        num_choices=3,
    )
    flat = [choice.token_ids for one in expected for choice in one]  # type: ignore[attr-defined]
    assert got[:, 3:].tolist() == flat


def test_the_model_stays_as_it_is() -> None:
    model = tiny.model().eval()
    assert all(parameter.requires_grad for parameter in model.parameters())
    model.generate(
        torch.tensor([[5, 9, 2]]), max_new_tokens=2, do_sample=False, custom_generate=hook()
    )
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_row_at_the_contexts_end_is_padded() -> None:
    model = tiny.fresh_target(max_position_embeddings=14).model
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "custom_generate": hook()}
    got = model.generate(**padded(), **options, eos_token_id=63, pad_token_id=PAD)
    assert got.shape == (4, 20)
    assert got[2, 14:].tolist() == [PAD] * 6
    assert PAD not in got[0, 12:]
    with pytest.raises(InputError, match="pad_token_id"):
        model.generate(**padded(), **options)


def filled_cache() -> DynamicCache:
    cache = DynamicCache()
    model = tiny.target().model
    model(input_ids=torch.tensor([[5, 9]]), **{cache_argument(model): cache})
    return cache


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 2}, "beam"),
    "scores": ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
    "right_pads": ({"attention_mask": torch.tensor([[1, 1, 0]])}, "left"),
    "holes": ({"attention_mask": torch.tensor([[1, 0, 1]])}, "left"),
    "positions": ({"position_ids": torch.tensor([[3, 4, 5]])}, "position_ids"),
    "assistant": ({"assistant_model": tiny.target("llama").model}, "assistant_model"),
    "lookup": ({"prompt_lookup_num_tokens": 3}, "assisted"),
    "guidance": ({"guidance_scale": 1.5}, "FreeGuidance"),
    "embeddings": ({"inputs_embeds": torch.zeros(1, 3, 48)}, "inputs_embeds"),
    "filled_cache": ({cache_argument(tiny.target().model): filled_cache()}, "filled cache"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name: str) -> None:
    options, message = BAD[name]
    with pytest.raises(InputError, match=message):
        tiny.target().model.generate(
            torch.tensor([[5, 9, 2]]), max_new_tokens=2, **options, custom_generate=hook()
        )


def test_models_that_cannot_be_drafted_for() -> None:
    ids = torch.tensor([[5, 9, 2]])
    with pytest.raises(InputError, match="training mode"):
        tiny.model().train().generate(ids, max_new_tokens=2, custom_generate=hook())
    model = tiny.model().eval()
    model.set_attn_implementation("eager")
    with pytest.raises(UnsupportedTargetError, match="sdpa"):
        model.generate(ids, max_new_tokens=2, custom_generate=hook())
