"""Two ranks, each with its own KV heads, as processes on this CPU."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

import moaspec
import tiny
import vllm_serving as serving
from moaspec import Chain
from moaspec.errors import RefusedError
from moaspec.generation.drafters import load_drafter
from moaspec.remote.device.local_parts import LocalDevice
from moaspec.remote.device.remote_session import RemoteOptions, RemoteSession
from moaspec.remote.protocol.transport import InProcessTransport
from moaspec.remote.server.service import ServiceOptions, TargetService, wire_encoder
from moaspec.remote.server.session_store import StoreOptions
from moaspec.target.registry import target_facts
from moaspec.vllm_plugin.vllm_settings import VLLMVerifierSettings

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


def test_two_ranks_verify_drafts_of_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts of several devices at once, and their number of rounds, are those of a local target."""
    from moaspec.vllm_plugin.vllm_verifier import VLLMVerifier

    models = serving.write_models(tmp_path)
    facts = target_facts(models.path, dtype="float32")
    drafter = load_drafter(models.taught, target=models.target)
    settings = VLLMVerifierSettings(
        model=str(models.path),
        dtype="float32",
        max_rows=4,
        max_tokens=64,
        token_bytes=facts.num_layers * facts.identity.kv_size * 4,
        num_kv_heads=facts.num_kv_heads,
        tensor_parallel_size=2,
        extra_arguments={"enforce_eager": True, "seed": 0},
    )
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.setenv(name, "0")  # the verifier changes them; tests that follow have theirs
    failed = threading.Event()
    encoder = wire_encoder(drafter, facts)
    engine: Any = VLLMVerifier(settings, encoder, on_failure=failed.set)
    options = ServiceOptions(max_tokens=64, sessions=StoreOptions(max_sessions=4))
    sampled = {"temperature": 0.9, "repetition_penalty": 1.2, "seed": 3}

    async def device(service: TargetService, prompt: tuple[int, ...], changes: Any) -> int:
        asked = {"max_new_tokens": tiny.NEW_TOKENS, "stop_token_ids": (), **changes}
        remote = RemoteSession(
            LocalDevice(models.target, drafter),
            InProcessTransport(service),
            RemoteOptions(draft=Chain(3), draft_ahead=False),
        )
        result = await remote.generate(list(prompt), **asked)
        assert result.token_ids == moaspec.generate(models.target, prompt, **asked).token_ids
        await remote.close()
        return result.num_rounds

    async def all_of_them() -> None:
        service = TargetService(facts, drafter, options, engine=engine)
        local = TargetService(models.target, drafter, options)
        for changes in ({}, sampled):
            rounds = [
                await asyncio.gather(*(device(one, prompt, changes) for prompt in tiny.PROMPTS))
                for one in (service, local)
            ]
            assert rounds[0] == rounds[1]
        with pytest.raises(RefusedError, match="several ranks"):
            await service.capabilities.with_grammar(moaspec.SamplingParams(), "x", 1, "me")
        await service.stop()
        await local.stop()

    try:
        asyncio.run(all_of_them())
        assert not failed.is_set()
        engine._engine.engine_core.engine_core.model_executor.workers[1].proc.kill()
        assert failed.wait(120)
    finally:
        engine.shutdown()
