"""Two ranks, each with its own KV heads, as processes on this CPU."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizers import decoders

import moaspec
import tiny
import vllm_serving as serving
from moaspec import Chain
from moaspec.generation.drafters import load_drafter
from moaspec.target.registry import read_target_spec
from moaspec_core.sampling.grammar import Grammars
from moaspec_edge.device.local_parts import LocalDevice
from moaspec_edge.device.remote_session import RemoteOptions, RemoteSession
from moaspec_edge.protocol.transport import InProcessTransport
from moaspec_edge.protocol.websocket_transport import WebSocketTransport
from moaspec_edge.server.service import ServiceOptions, TargetService, wire_encoder
from moaspec_edge.server.session_store import StoreOptions
from moaspec_vllm.vllm_settings import VLLMVerifierSettings

pytest.importorskip("vllm", reason="vLLM is not installed; `make test-vllm` installs it")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("patient_link"),
]
EAGER_SERVER = """
import functools
from moaspec_core.cli.entry import run
from moaspec_vllm import vllm_settings as settings
settings.VLLMVerifierSettings = functools.partial(
    settings.VLLMVerifierSettings, extra_arguments={"enforce_eager": True}
)
run()
"""
REGEX = r"(w1|w5|w7)(w9|w2|w4)+"


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
    with serving.engine(models, models.taught, draft_up_to=None, tensor_parallel_size=2) as llm:
        assert serving.texts(llm, tiny.PROMPTS, lengths, concurrency=4) == expected


def test_two_ranks_verify_drafts_of_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts of several devices at once, and their number of rounds, are those of a local target."""
    from moaspec_vllm.vllm_verifier import VLLMVerifier

    models = serving.write_models(tmp_path)
    data = read_target_spec(models.path, dtype="float32")
    drafter = load_drafter(models.taught, target=models.target)
    settings = VLLMVerifierSettings(
        model=str(models.path),
        dtype="float32",
        max_rows=4,
        max_tokens=64,
        token_bytes=data.num_layers * data.identity.kv_size * 4,
        num_kv_heads=data.num_kv_heads,
        tensor_parallel_size=2,
        extra_arguments={"enforce_eager": True, "seed": 0},
    )
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.setenv(name, "0")  # the verifier changes them; tests that follow have theirs
    failed = threading.Event()
    encoder = wire_encoder(drafter, data)
    engine: Any = VLLMVerifier(settings, encoder, on_failure=failed.set)
    options = ServiceOptions(max_tokens=64, sessions=StoreOptions(max_sessions=4))
    sampled = {"temperature": 0.9, "repetition_penalty": 1.2, "seed": 3}
    tokenizer = tiny.tokenizer()
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()  # which llguidance needs
    grammars = Grammars(tokenizer, vocab_size=tiny.VOCAB, stop_token_ids=(0,))
    grammar = grammars.lark("start: (<[1]> | <[5]> | <[7]>) (<[9]> | <[2]> | <[4]>)+")
    structured = {"temperature": 0.9, "seed": 3}

    async def device(service: TargetService, prompt: tuple[int, ...], changes: Any) -> int:
        asked = {"max_new_tokens": tiny.NEW_TOKENS, "stop_token_ids": (0,), **changes}
        if changes is structured:
            processor = grammar.processor(len(prompt))
            asked = {**asked, "logits_processors": (processor,)}
        remote = RemoteSession(
            LocalDevice(models.target, drafter),
            InProcessTransport(service),
            RemoteOptions(draft=Chain(3), draft_ahead=False),
        )
        result = await remote.generate(list(prompt), **asked)
        assert result.token_ids == moaspec.generate(models.target, prompt, **asked).token_ids
        if changes is structured:
            assert re.fullmatch(REGEX, "".join(f"w{token}" for token in result.token_ids if token))
        await remote.close()
        return result.num_rounds

    async def all_of_them() -> None:
        service = TargetService(data, drafter, options, engine=engine)
        local = TargetService(models.target, drafter, options)
        for one in (service, local):
            one.capabilities._grammars = grammars
        for changes in ({}, sampled, structured):
            rounds = [
                await asyncio.gather(*(device(one, prompt, changes) for prompt in tiny.PROMPTS))
                for one in (service, local)
            ]
            assert rounds[0] == rounds[1]
        await service.stop()
        await local.stop()

    try:
        asyncio.run(all_of_them())
        assert not failed.is_set()
        engine._engine.engine_core.engine_core.model_executor.workers[1].proc.kill()
        assert failed.wait(120)
    finally:
        engine.shutdown()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGKILL"])
def test_a_server_ends_as_asked_or_with_its_rank(tmp_path: Path, name: str) -> None:
    """A stop may reach all processes of its group, ranks first; a rank may also be killed."""
    import psutil

    models, number = serving.write_models(tmp_path), signal.Signals[name]
    command = [sys.executable, "-c", EAGER_SERVER, "target-server", "--model", str(models.path)]
    command += ["--drafter", str(models.taught), "--engine", "vllm", "--tensor-parallel-size", "2"]
    command += ["--port", "0", "--dtype", "float32", "--max-tokens", "64", "--max-sessions", "4"]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )
        try:
            assert server.stdout is not None
            first_line = server.stdout.readline()
            assert first_line, (tmp_path / "log").read_text()[-5000:]
            children = psutil.Process(server.pid).children()
            ranks = [one for one in children if "resource_tracker" not in " ".join(one.cmdline())]
            assert len(ranks) == 2
            if number is signal.SIGKILL:
                ranks[1].kill()
            else:
                for rank in ranks:
                    rank.send_signal(number)
                asyncio.run(_read(models, json.loads(first_line)["address"]))
                os.killpg(server.pid, number)
            code = server.wait(300)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
    told = (tmp_path / "log").read_text()
    dies = number is signal.SIGKILL
    assert (code, told.count("Draining"), "A process of vLLM has ended" in told) == (
        (1, 0, True) if dies else (0, 1, False)
    )


async def _read(models: serving.Models, address: str) -> None:
    remote = RemoteSession(
        LocalDevice(models.target, moaspec.NgramProposer()),
        WebSocketTransport(address),
    )
    result = await remote.generate(tiny.PROMPTS[0], max_new_tokens=8, stop_token_ids=())
    assert result.token_ids == tiny.own_text(models.target, tiny.PROMPTS[0], 8)
    await remote.close()
