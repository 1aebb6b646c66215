"""Inside a real vLLM: its text equals that of plain vLLM for all drafters and schedules.

Each engine takes seconds to start, so one engine answers several questions.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
import vllm_serving as serving
from moaspec import Chain, generate
from moaspec.evaluate.correctness.equality import judge
from moaspec.generation.drafters import load_drafter
from moaspec.model.checkpoint.published import save_published
from vllm_serving import Models

pytest.importorskip("vllm", reason="vLLM is not installed; `make test-vllm` installs it")
pytestmark = [
    pytest.mark.slow,
    # Libraries that vLLM imports warn about one another.
    pytest.mark.filterwarnings("default"),
]

CROWDED: dict[str, Any] = {
    "max_num_batched_tokens": 48,  # longer prompts are read in chunks
    "max_num_seqs": 32,
    "block_size": 32,
    "num_gpu_blocks_override": 16,  # 32 requests want three each
    "enable_prefix_caching": True,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return serving.write_models(tmp_path_factory.mktemp("models"))


def crowd() -> tuple[list[list[int]], list[int]]:
    """Prompts of 3 to 90 tokens, many with a common prefix, and the length of each answer."""
    chance = random.Random(0)
    shared = [chance.randrange(tiny.VOCAB) for _ in range(70)]
    prompts = [
        [
            *shared[: chance.choice((0, 0, 40, 70))],
            *(chance.randrange(tiny.VOCAB) for _ in range(chance.randrange(3, 20))),
        ]
        for _ in range(40)
    ]
    return prompts, [chance.randrange(2, 60) for _ in prompts]


def test_texts_are_those_of_plain_vllm_under_chunks_hits_and_preemption(models: Models) -> None:
    prompts, lengths = crowd()
    with serving.engine(models, None) as plain:
        expected = serving.texts(plain, prompts, lengths, concurrency=8)
    for drafter in (models.random, models.taught):
        with serving.engine(models, drafter, **CROWDED) as llm:
            for concurrency in (32, 8, 1):
                got = serving.texts(llm, prompts, lengths, concurrency=concurrency)
                assert got == expected, concurrency
            assert serving.counter(llm, "num_preemptions") > 0
            assert serving.counter(llm, "prefix_cache_hits") > 0
            assert serving.counter(llm, "spec_decode_num_drafts") > 0


def test_a_temperature_spoils_no_text_of_its_step(models: Models) -> None:
    """Drafts wait to be verified when it comes, and vLLM fills in some of its own.

    It does so for a prompt whose blocks are found but for the last token, and for all requests
    where a text is near the model's limit.
    """
    prompts, lengths = crowd()
    again = [*prompts[0], *range(33)][:33]
    prompts[1::5] = [again] * len(prompts[1::5])
    lengths[11] = serving.ENGINE["max_model_len"] - len(again)
    sampled = range(1, len(prompts), 2)
    with serving.engine(models, None) as plain:
        expected = serving.texts(plain, prompts, lengths, concurrency=8)
    changes: dict[str, Any] = {"block_size": 32, "enable_prefix_caching": True}
    with serving.engine(models, models.taught, **changes) as llm:
        for concurrency in (8, 1):
            got = serving.texts(llm, prompts, lengths, concurrency=concurrency, sampled=sampled)
            assert got == expected
        assert serving.counter(llm, "prefix_cache_hits") > 0
        assert serving.counter(llm, "spec_decode_num_accepted_tokens") > 0


def test_drafts_are_those_of_moaspecs_own_chain(models: Models) -> None:
    lengths = [tiny.NEW_TOKENS] * len(tiny.PROMPTS)
    drafter = load_drafter(models.taught, target=models.target)
    own = [
        generate(
            models.target,
            prompt,
            drafter=drafter,
            max_new_tokens=tiny.NEW_TOKENS,
            tree=Chain(serving.DRAFT_TOKENS),
            free_branches=False,
        )
        for prompt in tiny.PROMPTS
    ]
    with serving.engine(models, models.taught) as llm:
        got = serving.texts(llm, tiny.PROMPTS, lengths, concurrency=4)
        rounds = serving.counter(llm, "spec_decode_num_drafts")
    assert got == [result.token_ids for result in own]
    # vLLM counts a last draft that the text's end cuts off as a round, as this count does.
    assert rounds == sum(result.num_rounds for result in own)
    assert rounds < 0.6 * sum(lengths)


def test_fewer_tokens_are_drafted_for_more_requests(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option of vLLM's says how many; its scheduler would not tell a custom class.

    The rejection sampler, slower than vLLM's plain sampler, runs only in steps with drafts.
    """
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    from moaspec_vllm.paged_drafter.vllm_drafting import PagedDrafter

    draft, asked = PagedDrafter.draft, set()
    reject, rejected = RejectionSampler.forward, list[bool]()

    def sampled(self: Any, metadata: Any, *others: Any) -> Any:
        rejected.append(any(metadata.num_draft_tokens))
        return reject(self, metadata, *others)

    def noted(self: Any, step: Any) -> Any:
        asked.add((len(step.rows_R), step.depth))
        return draft(self, step)

    monkeypatch.setattr(PagedDrafter, "draft", noted)
    monkeypatch.setattr(RejectionSampler, "forward", sampled)
    speculative = serving.arguments(models, models.taught)["speculative_config"]
    schedule = {"num_speculative_tokens_per_batch_size": [(1, 1, 3), (2, 2, 1), (3, 3, 0)]}
    changes = {"speculative_config": speculative | schedule}
    prompts, lengths = tiny.PROMPTS[:3], [6, 12, 24]
    with serving.engine(models, None) as plain:
        expected = serving.texts(plain, prompts, lengths, concurrency=3)
    with serving.engine(models, models.taught, draft_up_to=None, **changes) as llm:
        assert serving.texts(llm, prompts, lengths, concurrency=3) == expected
    assert asked == {(1, 3), (2, 1)}
    asked.clear()
    # Moaspec's own option, which leaves vLLM its full CUDA graphs.
    with serving.engine(models, models.taught, draft_up_to=2) as llm:
        assert serving.texts(llm, prompts, lengths, concurrency=3) == expected
    assert asked == {(1, 3), (2, 3)}
    assert rejected
    assert all(rejected)
    with (
        pytest.raises(Exception, match="leave one out"),
        serving.engine(models, models.taught, draft_up_to=2, **changes),
    ):
        pass


def test_texts_stay_where_the_load_decides_what_is_drafted(models: Models) -> None:
    lengths = [tiny.NEW_TOKENS] * len(tiny.PROMPTS)
    with serving.engine(models, None) as plain:
        expected = serving.texts(plain, tiny.PROMPTS, lengths, concurrency=4)
    with serving.engine(models, models.taught, draft_up_to=None) as llm:
        for _ in range(4):  # long enough for each length to be tried
            assert serving.texts(llm, tiny.PROMPTS, lengths, concurrency=4) == expected


def test_tokens_that_were_skipped_are_encoded_later(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts after steps without any are those of a run that drafts in every step.

    A step encodes few tokens here, so that a prompt takes several. A drafter that is never right
    drafts after every token.
    """
    from moaspec_vllm import proposer
    from moaspec_vllm.paged_drafter.vllm_drafting import PagedDrafter

    step, draft, steps = proposer.VLLMMoAProposer._step, PagedDrafter.draft, Counter[str]()
    drafts: dict[tuple[int, ...], list[int]] = {}

    def noted(self: Any, sent: Any) -> Any:
        found = draft(self, sent)
        ids = self._runner.input_batch.token_ids_cpu
        positions = self._inputs.requests(sent.size, sent.depth)[2, : len(sent.rows_R)].tolist()
        for row, position, chain in zip(sent.rows_R, positions, found, strict=True):
            text = tuple(ids[row, : position + 1].tolist())
            assert drafts.setdefault(text, chain) == chain
            steps[str(text in seen)] += 1
        return found

    def sometimes(self: Any, *arguments: Any) -> Any:
        steps["all"] += 1
        return step(self, *arguments) if steps["all"] % 7 < 4 else None

    lengths = [tiny.NEW_TOKENS] * len(tiny.PROMPTS)
    monkeypatch.setattr(PagedDrafter, "draft", noted)
    seen: set[tuple[int, ...]] = set()
    with serving.engine(models, models.random) as llm:
        expected = serving.texts(llm, tiny.PROMPTS, lengths, concurrency=4)
        seen |= drafts.keys()
        monkeypatch.setattr(proposer.VLLMMoAProposer, "_step", sometimes)
        monkeypatch.setattr(proposer, "ENCODE_STEP", 5)
        assert serving.texts(llm, tiny.PROMPTS, lengths, concurrency=4) == expected
    assert steps["True"] > 5


def test_all_requests_of_a_step_are_drafted_for_or_none(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mixed batch would leave the CUDA graph of passes with equally many tokens in each row."""
    from moaspec_vllm import proposer

    propose, steps = proposer.VLLMMoAProposer.propose, Counter[str]()

    def watched(self: Any, sampled: Any, numbers: Any, *rest: Any, **named: Any) -> Any:
        drafts = propose(self, sampled, numbers, *rest, **named)
        # Rows of unfinished prompts are read on in the next step, which is mixed anyway.
        lengths = {len(one) for one, new in zip(drafts, sampled, strict=True) if new}
        steps["mixed"] += len(lengths) > 1
        steps["drafted"] += lengths == {serving.DRAFT_TOKENS}
        return drafts

    prompts, lengths = crowd()
    monkeypatch.setattr(proposer.VLLMMoAProposer, "propose", watched)
    monkeypatch.setattr(proposer, "ENCODE_STEP", 40)
    with serving.engine(models, None) as plain:
        expected = serving.texts(plain, prompts, lengths, concurrency=8)
    with serving.engine(models, models.taught, **CROWDED | {"num_gpu_blocks_override": 128}) as llm:
        assert serving.texts(llm, prompts, lengths, concurrency=8) == expected
    assert steps["mixed"] == 0
    assert steps["drafted"] > 10


@pytest.mark.parametrize("eager", [True, False])
def test_bf16_engines_draft_with_the_targets_backend_and_dtype(models: Models, eager: bool) -> None:
    """Each token is the target's choice: the best one, or nearer to it than bf16 rounds.

    So is each of plain vLLM's, whose texts part from these at such ties: a batch of another size
    rounds otherwise.
    """
    lengths = [tiny.NEW_TOKENS] * len(tiny.PROMPTS)
    changes: dict[str, Any] = {"dtype": "bfloat16", "enforce_eager": eager}
    with serving.engine(models, None, **changes) as llm:
        expected = serving.texts(llm, tiny.PROMPTS, lengths, concurrency=4)
    target = tiny.fresh_target(**serving.SIZES)
    target.model.to(torch.bfloat16)
    with serving.engine(models, models.taught, **changes) as llm:
        got = serving.texts(llm, tiny.PROMPTS, lengths, concurrency=4)
        verdicts = [
            judge(target, *texts, max_new_tokens=tiny.NEW_TOKENS, stop_token_ids=())
            for texts in zip(tiny.PROMPTS, expected, got, strict=True)
        ]
        assert all(verdict.lossless for verdict in verdicts), verdicts
        assert serving.tau(llm) > 1.2
        core = llm.llm_engine.engine_core.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner
        target, *_ = runner.drafter._parts.target_layers
        own = [*runner.drafter._parts.text_layers, runner.drafter._parts.cross_attention]
        for layer in own:
            assert layer.attention.attn_backend is target.attn_backend
            assert layer.attention.kv_cache.dtype == torch.bfloat16
            assert layer.attention.impl.num_kv_heads == layer.heads[1]
        with torch.inference_mode():
            runner.drafter.profile()


@pytest.mark.parametrize("form", ["raw", "vllm"])
def test_published_forms_load(models: Models, tmp_path: Path, form: Any) -> None:
    of = models.target
    taught = tiny.taught_drafter(of, [tiny.own_text(of, prompt) for prompt in tiny.PROMPTS])
    save_published(taught, tmp_path, form, target=of.identity, context=of.config)
    lengths = [tiny.NEW_TOKENS] * len(tiny.PROMPTS)
    with serving.engine(models, tmp_path) as llm:
        serving.texts(llm, tiny.PROMPTS, lengths, concurrency=4)
        assert serving.tau(llm) > 1.5


def test_a_failing_drafter_never_fails_requests(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moaspec_vllm.paged_drafter.vllm_drafting import PagedDrafter
    from moaspec_vllm.proposer import FAILURES

    with serving.engine(models, None) as plain:
        expected = serving.texts(plain, tiny.PROMPTS, [16] * 4, concurrency=4)
    draft, encode, calls = PagedDrafter.draft, PagedDrafter.encode, Counter[str]()

    def sometimes(name: str, call: Any) -> Any:
        def run(*arguments: Any) -> Any:
            calls[name] += 1
            if calls[name] % 3 == 0:
                raise RuntimeError("out of luck")
            return call(*arguments)

        return run

    monkeypatch.setattr(PagedDrafter, "draft", sometimes("draft", draft))
    monkeypatch.setattr(PagedDrafter, "encode", sometimes("encode", encode))
    before = FAILURES._value.get()
    with serving.engine(models, models.taught) as llm:
        assert serving.texts(llm, tiny.PROMPTS, [16] * 4, concurrency=4) == expected
        assert serving.counter(llm, "spec_decode_num_drafts") > 0
    assert FAILURES._value.get() > before


def test_drafts_end_after_failures_in_a_row(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moaspec_vllm import proposer
    from moaspec_vllm.paged_drafter.vllm_drafting import PagedDrafter

    calls = Counter[str]()

    def fail(*_: Any) -> Any:
        calls["encode"] += 1
        raise RuntimeError("out of luck")

    monkeypatch.setattr(PagedDrafter, "encode", fail)
    with serving.engine(models, None) as plain:
        expected = serving.texts(plain, tiny.PROMPTS, [16] * 4, concurrency=4)
    with serving.engine(models, models.taught) as llm:
        assert proposer.ACTIVE._value.get() == 1
        assert serving.texts(llm, tiny.PROMPTS, [16] * 4, concurrency=4) == expected
        assert serving.counter(llm, "spec_decode_num_drafts") == 0
    assert calls["encode"] == proposer.MAX_FAILURES
    assert proposer.ACTIVE._value.get() == 0


def test_vllm_check_reports_texts_steps_and_backends(models: Models) -> None:
    from moaspec_vllm import engine_check

    prompts = [list(prompt) for prompt in tiny.PROMPTS]
    with serving.engine(models, models.taught) as llm:
        assert [len(text) for text in engine_check._texts(llm, prompts, 8)] == [8] * 4
        one, two = (engine_check._steps(llm, prompts, number, 12) for number in (1, 2))
        facts = engine_check._facts(llm) | engine_check._drafter_facts(llm)
    assert one["step_ms"] > 0
    assert one["tokens_per_step"] > 1.2
    assert (two["requests"], two["steps"]) == (2, 12)
    assert facts["backend"] == facts["drafter backend"] == "CPU_ATTN"
    assert (facts["dtype"], facts["drafter cache"]) == ("float32", "float32")
    assert facts["drafts at the end"]


def test_a_calibration_that_fails_means_no_drafts(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moaspec_vllm import proposer

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(proposer, "measure", fail)
    with serving.engine(models, models.taught, draft_up_to=None) as llm:
        assert proposer.ACTIVE._value.get() == 0
        texts = serving.texts(llm, tiny.PROMPTS, [16] * 4, concurrency=4)
        assert [len(text) for text in texts] == [16] * 4


@pytest.mark.parametrize(
    ("ranks", "error"), [(2, RuntimeError("one rank")), (1, torch.AcceleratorError("lost"))]
)
def test_failures_that_cannot_be_survived_end_vllm(ranks: int, error: Exception) -> None:
    """Other ranks would wait for ever, and a lost accelerator computes nothing."""
    from types import SimpleNamespace

    from moaspec_vllm.proposer import VLLMMoAProposer

    proposer: Any = VLLMMoAProposer.__new__(VLLMMoAProposer)
    proposer._failed = 0
    proposer.vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks)
    )
    with pytest.raises(type(error)), proposer._failures():
        raise error


def whole_temperatures(
    x: Any, counts: Any, _: int, replace_from: int = 0, replace_to: int = 0
) -> Any:
    """What vLLM's CPU build should have done: each request's value for each of its tokens."""
    x = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return x.repeat_interleave(counts.diff(prepend=counts.new_zeros(1)).long())


@pytest.mark.parametrize("mended", [False, True])
def test_sampled_text_has_the_targets_distribution(
    models: Models, monkeypatch: pytest.MonkeyPatch, mended: bool
) -> None:
    """Two tokens of many texts against the exact distribution, at a temperature that spreads them.

    Where vLLM verifies at no request's temperature, nothing is drafted; with that mended, drafts
    are accepted and rejected.
    """
    from vllm import SamplingParams
    from vllm.v1.sample import rejection_sampler

    if mended:
        monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", whole_temperatures)
    prompt, count = list(tiny.PROMPTS[1]), 3000
    settings = SamplingParams(temperature=1.0, max_tokens=3, n=count, seed=None, ignore_eos=True)
    with serving.engine(models, models.taught, max_num_seqs=64) as llm:
        (output,) = llm.generate([{"prompt_token_ids": prompt}], settings, use_tqdm=False)
        if mended:
            assert serving.counter(llm, "spec_decode_num_accepted_tokens") > 0
    pairs = Counter(tuple(one.token_ids[1:3]) for one in output.outputs)
    distribution = _distribution_of_pairs(models, prompt)
    observed = torch.zeros_like(distribution)
    for (second, third), number in pairs.items():
        observed[second, third] = number
    # Cells that expect fewer than 5 are pooled, as the chi-squared approximation asks for.
    expected = (distribution * count).flatten()
    large = expected >= 5
    cells = torch.cat((observed.flatten()[large], observed.flatten()[~large].sum()[None]))
    means = torch.cat((expected[large], expected[~large].sum()[None]))
    statistic, freedom = float(((cells - means) ** 2 / means).sum()), len(means) - 1
    # Five standard deviations of a chi-squared variable: a false alarm in about a million runs.
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def _distribution_of_pairs(models: Models, prompt: list[int]) -> torch.Tensor:
    """P(second token, third token) after a prompt, summed over the first: (V, V)."""
    model, vocab = models.target.model, tiny.VOCAB

    def after(prefixes: torch.Tensor) -> torch.Tensor:
        return model(prefixes).logits[:, -1].double().softmax(-1)

    with torch.inference_mode():
        start = torch.tensor([prompt])
        first_V = after(start)[0]
        tokens = torch.arange(vocab)[:, None]
        one = torch.cat((start.expand(vocab, -1), tokens), dim=1)
        second_VV = after(one) * first_V[:, None]
        distribution = torch.zeros(vocab, vocab, dtype=torch.float64)
        for first in range(vocab):
            two = torch.cat((one[first].expand(vocab, -1), tokens), dim=1)
            distribution += second_VV[first][:, None] * after(two)
    return distribution


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_cache_dtype": "fp8"}, "quantised key-value cache"),
        ({"worker_cls": "auto"}, "--worker-cls"),
        ({"scheduler_cls": None}, "--scheduler-cls"),
        ({"additional_config": {}}, "which drafter"),
        ({"additional_config": {"moaspec": {"drafter": "d", "draft_upto": 2}}}, "draft_upto"),
        ({"logits_processors": ["builtins:dict"]}, "logits processors"),
        (
            {
                "kv_transfer_config": {
                    "kv_connector": "ExampleConnector",
                    "kv_role": "kv_both",
                }
            },
            "KV connector",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_at_start(
    models: Models, changes: dict[str, Any], reason: str
) -> None:
    with (
        pytest.raises(Exception, match=reason),
        serving.engine(models, models.random, **changes),
    ):
        pass


def test_a_drafter_of_another_target_is_refused_at_start(models: Models, tmp_path: Path) -> None:
    from moaspec.model.checkpoint.moa_checkpoint import save_drafter

    other = tiny.fresh_target(num_hidden_layers=5, **serving.SIZES)
    save_drafter(tiny.random_drafter(other), tmp_path)
    with pytest.raises(Exception, match="num_layers is 5"), serving.engine(models, tmp_path):
        pass
