"""Seeded sampling: with any settings and seed, speculation never changes the text."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import LogitsProcessorList
from transformers.generation import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

import moaspec
import moaspec.generation.api
import tiny
from moaspec import Chain, GenerationResult, NgramProposer, OracleProposer, SamplingParams, Tree
from moaspec.generation.local_engine import local_engine
from moaspec.model.moa import MoADrafter
from moaspec.sampling.choose import next_tokens
from moaspec.sampling.processors import Prefix
from moaspec.target.target import Target
from moaspec_core.drafting.protocols import Proposer

pytestmark = pytest.mark.kernels

NEW_TOKENS = 14
RAGGED = (*tiny.PROMPTS, (2, 2, 9, 9, 2, 2))
SHAPES = (Chain(3), Tree(3, 3, 8))


def no_sum(prefix: Sequence[int], logits_V: Tensor) -> Tensor:
    """A processor that depends on the whole prefix: one token is forbidden, another wanted."""
    changed_V = logits_V.clone()
    changed_V[sum(prefix) % tiny.VOCAB] = -math.inf
    changed_V[(sum(prefix) + len(prefix)) % tiny.VOCAB] += 2.0
    return changed_V


SETTINGS = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(temperature=1.0, seed=1),
    "top_k": SamplingParams(temperature=0.8, top_k=5, seed=2),
    "top_p": SamplingParams(temperature=1.3, top_p=0.9, seed=3),
    "min_p": SamplingParams(temperature=1.2, min_p=0.1, seed=2**64 - 1),
    "repetition": SamplingParams(repetition_penalty=1.5),
    "presence": SamplingParams(temperature=0.7, presence_penalty=1.0, seed=4),
    "frequency": SamplingParams(frequency_penalty=-2.0),
    "bias": SamplingParams(temperature=1.0, logit_bias={3: -math.inf, 9: 3.0}, seed=5),
    "processor": SamplingParams(temperature=0.9, processors=(no_sum,), seed=6, choice=3),
    "everything": SamplingParams(
        temperature=0.9, top_k=30, top_p=0.95, min_p=0.02, repetition_penalty=1.2,
        presence_penalty=0.3, frequency_penalty=0.2, logit_bias={9: 1.5}, processors=(no_sum,),
        seed=7,
    ),
}  # fmt: skip
ROWS = [(RAGGED[i % len(RAGGED)], params) for i, params in enumerate(SETTINGS.values())]


def decode(
    target: Target,
    rows: Sequence[tuple[Sequence[int], SamplingParams]],
    drafter: MoADrafter | Proposer | None = None,
    shape: Tree = Chain(3),  # noqa: B008
    **options: Any,
) -> list[GenerationResult]:
    """All rows together in one engine, each with its own settings."""
    engine = local_engine(target, drafter, **options)
    handles = [
        engine.add(prompt, max_new_tokens=NEW_TOKENS, shape=shape, sampling=params)
        for prompt, params in rows
    ]
    results = [engine.result(handle) for handle in handles]
    while engine.num_active:
        engine.step()
    return results


def texts(results: Sequence[GenerationResult]) -> list[list[int]]:
    return [result.token_ids for result in results]


@functools.cache
def alone(family: str) -> list[list[int]]:
    """Each of ROWS decoded plainly and by itself: what everything else must equal."""
    return [texts(decode(tiny.target(family), [row]))[0] for row in ROWS]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_settings_change_the_text(family: str) -> None:
    """Otherwise equality would show nothing."""
    greedy = texts(decode(tiny.target(family), [(prompt, SamplingParams()) for prompt, _ in ROWS]))
    same = [name for name, a, b in zip(SETTINGS, alone(family), greedy, strict=True) if a == b]
    assert same == ["greedy"]


@pytest.mark.slow
@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("layers", [None, 0, 1, 2])
def test_a_ragged_batch_of_all_settings(family: str, layers: int | None) -> None:
    """Plain, and with a drafter that disagrees, for every N."""
    target = tiny.target(family)
    drafter = None if layers is None else tiny.random_drafter(target)
    for shape in SHAPES if drafter else SHAPES[:1]:
        results = decode(target, ROWS, drafter, shape, num_target_layers=layers)
        assert texts(results) == alone(family)


@pytest.mark.slow
@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("name", SETTINGS)
def test_one_row_at_a_time(family: str, name: str) -> None:
    """Every drafter, and a chain or a tree in turn."""
    target, index = tiny.target(family), list(SETTINGS).index(name)
    rows, expected = ROWS[index : index + 1], alone(family)[index : index + 1]
    known = [[*rows[0][0], *expected[0]]]
    drafter = tiny.random_drafter(target)
    for layers in (0, 1, 2):
        shape = SHAPES[(index + layers) % 2]
        assert texts(decode(target, rows, drafter, shape, num_target_layers=layers)) == expected
    for other in (NgramProposer(), OracleProposer(known, agreement=(0.9, 0.6))):
        assert texts(decode(target, rows, other, SHAPES[index % 2])) == expected


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_drafters_without_a_model(family: str, shape: Tree) -> None:
    target = tiny.target(family)
    known = [[*prompt, *text] for (prompt, _), text in zip(ROWS, alone(family), strict=True)]
    assert texts(decode(target, ROWS, NgramProposer(), shape)) == alone(family)
    replayed = decode(target, ROWS, OracleProposer(known, agreement=(0.9, 0.6)), shape)
    assert texts(replayed) == alone(family)
    # Long accepted paths are what this drafter is for: the other ones hardly have any.
    assert max(max(result.accept_lengths) for result in replayed) == shape.depth + 1


def test_the_same_seed_in_another_batch_and_with_another_thread_count() -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 12, "max_new_tokens": NEW_TOKENS}
    before = torch.get_num_threads()
    found = []
    for threads, prompts in ((1, RAGGED[:1]), (2, RAGGED[:1]), (2, RAGGED)):
        torch.set_num_threads(threads)
        found.append(moaspec.generate(tiny.target(), prompts, **options)[0].token_ids)
    torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]
    other = moaspec.generate(tiny.target(), RAGGED[0], **options | {"seed": 13})
    assert found[0] != other.token_ids


def test_repetition_penalty_is_that_of_transformers() -> None:
    ids = torch.tensor([tiny.PROMPTS[1]])
    output = tiny.target().model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=20,
        do_sample=False,
        repetition_penalty=1.4,
    )
    ours = moaspec.generate(
        tiny.target(), tiny.PROMPTS[1], max_new_tokens=20, repetition_penalty=1.4
    )
    assert ours.token_ids == output[0, ids.shape[1] :].tolist()


def test_log_probabilities_are_the_targets_own() -> None:
    target = tiny.target()
    prompt, params = RAGGED[2], SamplingParams(temperature=1.4, seed=8, logprobs=True)
    text = [*prompt, *texts(decode(target, [(prompt, params)]))[0]]
    (result,) = decode(
        target, [(prompt, params)], OracleProposer([text], agreement=0.8), Tree(3, 2, 6)
    )
    assert text == [*prompt, *result.token_ids]
    ids = torch.tensor([text])
    log_p = target.head(target.capture(ids, torch.ones_like(ids)).hidden_BTE[0]).log_softmax(-1)
    expected = log_p[:-1].gather(1, ids[0, 1:, None])[len(prompt) - 1 :, 0]
    assert_close(torch.tensor(result.logprobs), expected, **tiny.TOLERANCE)
    assert decode(target, [(prompt, SamplingParams())])[0].logprobs == []


def test_processors_never_see_a_rejected_branch() -> None:
    seen: list[tuple[int, ...]] = []

    def watch(prefix: Sequence[int], logits_V: Tensor) -> Tensor:
        seen.append(tuple(prefix))
        return logits_V

    params = SamplingParams(processors=(watch,))
    target = tiny.target()
    (result,) = decode(target, [(RAGGED[0], params)], tiny.random_drafter(target), Tree(3, 3, 8))
    whole = (*RAGGED[0], *result.token_ids)
    assert {prefix for prefix in seen if whole[: len(prefix)] != prefix} == set()
    assert len(seen) >= NEW_TOKENS


# Distribution

WORDS = 4
LENGTH = 3


def p_value(counts: Tensor, expected: Tensor) -> float:
    """Of Pearson's chi-square test; outcomes expected less than five times are taken together."""
    rare = expected < 5
    counts = torch.cat((counts[~rare], counts[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    if expected[-1] < 5:
        counts[-2], expected[-2] = counts[-2:].sum(), expected[-2:].sum()
        counts, expected = counts[:-1], expected[:-1]
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor(float(len(counts) - 1))
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


FALSE_ALARM = 1e-4
"""How often a right sampler would fail one of these tests, had the seeds not been fixed."""


def enumerated(target: Target, prompt: Sequence[int], processors: LogitsProcessorList) -> Tensor:
    """Probability of every continuation of LENGTH tokens, with transformers' own processors."""
    probability = torch.ones(1, dtype=torch.float64)
    ids = torch.tensor([list(prompt)])
    for _ in range(LENGTH):
        hidden_BTE = target.capture(ids, torch.ones_like(ids)).hidden_BTE
        scores: Any = processors(ids, target.head(hidden_BTE[:, -1]))
        probability = (probability[:, None] * scores.double().softmax(-1)).flatten()
        ids = ids.repeat_interleave(WORDS, 0)
        ids = torch.cat((ids, torch.arange(WORDS).repeat(len(ids) // WORDS)[:, None]), dim=1)
    return probability


@pytest.mark.parametrize("shape", [Chain(2), Tree(2, 2, 4)], ids=str)
def test_speculative_samples_have_the_targets_distribution(shape: Tree) -> None:
    target = tiny.fresh_target(vocab_size=WORDS, initializer_range=0.15)
    prompts, number = [[1, 2], [3, 0, 0, 3], [1], [2, 2, 1]], 150
    results = moaspec.generation.api.choices(
        target,
        prompts,
        drafter=tiny.random_drafter(target),
        tree=shape,
        temperature=1.1,
        top_p=0.9,
        repetition_penalty=1.3,
        seed=99,
        num_choices=number,
        max_new_tokens=LENGTH,
    )
    wanted: Any = [RepetitionPenaltyLogitsProcessor(1.3), TemperatureLogitsWarper(1.1)]
    processors = LogitsProcessorList([*wanted, TopPLogitsWarper(0.9)])
    powers = torch.tensor([WORDS**2, WORDS, 1])
    accepted = 0
    for prompt, samples in zip(prompts, results, strict=True):
        drawn = (torch.tensor(texts(samples)) * powers).sum(1)
        counts = torch.bincount(drawn, minlength=WORDS**LENGTH).double()
        expected = number * enumerated(target, prompt, processors)
        assert not counts[expected == 0].any()
        assert p_value(counts, expected) > FALSE_ALARM / len(prompts)
        accepted += sum(len(s.accept_lengths) < LENGTH - 1 for s in samples)
    # Both cases occur often: drafts that were accepted, and drafts that were not.
    assert 0.05 < accepted / (number * len(prompts)) < 0.95


def test_two_choices_of_a_prompt_are_independent() -> None:
    target = tiny.fresh_target(vocab_size=4, initializer_range=0.15)
    engine = local_engine(target)
    results = []
    for seed in range(800):
        for choice in range(2):
            params = SamplingParams(temperature=1.0, seed=seed, choice=choice)
            results.append(engine.result(engine.add([1, 2], max_new_tokens=1, sampling=params)))
    engine.step()
    pairs = torch.tensor(texts(results)).view(-1, 2)
    counts = torch.bincount(pairs[:, 0] * 4 + pairs[:, 1], minlength=16).double()
    ids = torch.tensor([[1, 2]])
    p = (
        target.head(target.capture(ids, torch.ones_like(ids)).hidden_BTE[0, -1])
        .double()
        .softmax(-1)
    )
    assert p_value(counts, len(pairs) * torch.outer(p, p).flatten()) > FALSE_ALARM


def test_next_tokens_of_mixed_rows() -> None:
    """Each row is decided as it would be alone."""
    torch.manual_seed(0)
    logits_NV = torch.randn(len(ROWS), tiny.VOCAB)
    prefixes = [Prefix(params, prompt, len(prompt)) for prompt, params in ROWS]
    together = next_tokens(logits_NV, prefixes)
    singly = [next_tokens(logits_NV[i : i + 1], prefixes[i : i + 1])[0] for i in range(len(ROWS))]
    assert together == singly


@pytest.mark.parametrize("temperature", [1e-201, 1e-310, 5e-324])
@pytest.mark.parametrize("shift", [0.0, -50.0], ids=["both signs", "all negative"])
def test_the_coldest_temperatures_take_the_best(temperature: float, shift: float) -> None:
    """Where logits / temperature would be infinite, or -inf for every token."""
    logits_NV = torch.randn(8, 50, generator=torch.Generator().manual_seed(3)) * 5 + shift
    sampling = SamplingParams(temperature=temperature, top_p=0.9, min_p=0.1, top_k=9, seed=1)
    prefixes = [Prefix(sampling, (1, 2, 3), 1)] * len(logits_NV)
    assert next_tokens(logits_NV, prefixes) == logits_NV.argmax(-1).tolist()


def test_the_coldest_temperatures_draft() -> None:
    result = moaspec.generate(
        tiny.target(), tiny.PROMPTS[0], drafter=tiny.agreeing_drafter("llama"), tree=Tree(3, 3, 8),
        temperature=5e-324, max_new_tokens=NEW_TOKENS,
    )  # fmt: skip
    assert tuple(result.token_ids) == tiny.own_texts("llama")[0][:NEW_TOKENS]
