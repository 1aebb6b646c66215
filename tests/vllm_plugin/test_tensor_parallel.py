"""Two ranks, each with its own KV heads, as processes on this CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny
import vllm_serving as serving

pytest.importorskip("vllm", reason="vLLM is not installed; `make test-vllm` installs it")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


def test_two_ranks_write_and_accept_what_one_does(tmp_path: Path) -> None:
    models = serving.write_models(tmp_path)
    lengths = [tiny.NEW_TOKENS] * len(tiny.PROMPTS)
    with serving.engine(models, None) as plain:
        expected = serving.texts(plain, tiny.PROMPTS, lengths, concurrency=4)
    rounds = []
    for ranks in (1, 2):
        with serving.engine(models, models.taught, tensor_parallel_size=ranks) as llm:
            assert serving.texts(llm, tiny.PROMPTS, lengths, concurrency=4) == expected
            rounds.append(serving.counter(llm, "spec_decode_num_drafts"))
    assert rounds[0] == rounds[1] < 0.6 * sum(lengths)
    # Where the load decides, ranks measure different times and have to draft alike.
    speculative = serving.arguments(models, models.taught)["speculative_config"]
    del speculative["num_speculative_tokens_per_batch_size"]
    changes = {"tensor_parallel_size": 2, "speculative_config": speculative}
    with serving.engine(models, models.taught, **changes) as llm:
        assert serving.texts(llm, tiny.PROMPTS, lengths, concurrency=4) == expected
