"""A server whose drafter learns: versions change between rounds, and no text changes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import generate_latest

import ruled_target
import tiny
from moaspec.backends.fast_moa_proposer import FastMoAProposer
from moaspec.backends.fast_target import accelerate
from moaspec.generation.drafters import load_drafter
from moaspec.generation.local_engine import local_parts
from moaspec.model.checkpoint.moa_checkpoint import fingerprint, save_drafter
from moaspec.model.moa import MoADrafter
from moaspec.target.target import Target
from moaspec_core.cli.options import LoadOptions
from moaspec_core.drafting.draft_tree import Tree
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_core.engine.engine import Engine
from moaspec_core.errors import CorruptCheckpointError, InputError
from moaspec_core.policy.policies import DraftSettings
from moaspec_core.sampling.params import GREEDY, SamplingParams
from moaspec_core.tokens.token_rules import TokenRules
from moaspec_edge.cli.learning import announce, learning_from_texts
from moaspec_edge.cli.target_server import _check_engine
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol import wire
from moaspec_edge.server.service import TargetService
from moaspec_serve.metrics import Metrics
from moaspec_serve.sources.local_source import LocalSource
from moaspec_serve.sources.source import Job, Update
from moaspec_train.cli.learning import with_learning
from moaspec_train.continual import ContinualTrainer, newest_version
from moaspec_train.learning_process import (
    MAX_WAITING_TEXTS,
    LearningProcess,
    LearningSettings,
    LearningStatus,
)


def other_decoder(of: Target, drafter: MoADrafter, **options: Any) -> MoADrafter:
    """A version of the drafter: the same encoder, another decoder."""
    made = tiny.random_drafter(of, seed=9, **options)
    made.to(next(drafter.parameters()).dtype)
    made.encoder.load_state_dict(drafter.encoder.state_dict())
    return made


@pytest.mark.parametrize(("family", "layers"), [("llama", 0), ("llama", 2), ("kernels", 0)])
def test_a_version_joins_between_two_rounds(family: str, layers: int) -> None:
    """From then on it drafts as one that has read the text from its start."""
    of = tiny.kernel_target() if family == "kernels" else tiny.target(family)
    if family == "kernels":
        accelerate(of)  # so that a token has the same bits in any pass
    old = tiny.random_drafter(of, exits=(layers,)).to(of.dtype)
    new = other_decoder(of, old, exits=(layers,))
    prompt, shape = tiny.PROMPTS[1], Tree(3, 2, 5)
    engine, proposer = started(of, old, prompt, shape)
    texts = [token for _ in range(5) for event in engine.step() for token in event.token_ids]
    before, _ = started(of, old, [*prompt, *texts[:-1]], shape)
    fresh, _ = started(of, new, [*prompt, *texts[:-1]], shape)
    proposer.adopt(new)
    drafted = [trees_of(one) for one in (engine, fresh, before)]
    assert drafted[0] == drafted[1] != drafted[2]
    list(engine.run())
    written = engine.result(0).token_ids
    plain = Engine(local_parts(of)[0], target=of)
    plain.add(prompt, max_new_tokens=24, shape=None)
    list(plain.run())
    assert written == plain.result(0).token_ids


def started(
    of: Target, drafter: MoADrafter, prompt: Sequence[int], shape: Tree
) -> tuple[Engine, FastMoAProposer]:
    """An engine with this prompt."""
    verifier, proposer = local_parts(of, drafter)
    assert isinstance(proposer, FastMoAProposer)
    engine = Engine(verifier, proposer, target=of)
    engine.add(prompt, max_new_tokens=24, shape=shape)
    return engine, proposer


def trees_of(engine: Engine) -> tuple[Any, Any]:
    """The drafts of the next round; a prompt is read before it."""
    (event,) = engine.step()
    if event.tree is None or not event.tree.tokens:
        (event,) = engine.step()
    assert event.tree is not None
    return event.tree.tokens, event.tree.parents


class Offered(LearningProcess):
    """Takes texts and starts no process."""

    def __init__(self, directory: Path) -> None:
        super().__init__(
            LearningSettings(target="t", dtype="float32", initial="i", directory=directory)
        )
        self.texts: list[tuple[Sequence[int], Sequence[int]]] = []

    def start(self, on_version: Any) -> None:
        self.on_version = on_version

    def offer(self, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> None:
        self.texts.append((tuple(prompt_ids), tuple(response_ids)))

    def close(self) -> None:
        pass


async def generated(source: LocalSource, *jobs: Job) -> list[tuple[int, ...]]:
    """The texts of jobs, one after another."""
    texts = []
    for job in jobs:
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        tokens: list[int] = []

        def report(
            _: int, news: Update | Exception, ended: Any = ended, tokens: list[int] = tokens
        ) -> None:
            assert isinstance(news, Update), news
            tokens.extend(news.token_ids)
            if news.stop_reason is not None:
                ended.set_result(None)

        source.submit([job], report)
        await ended
        texts.append(tuple(tokens))
    return texts


def job(prompt: Sequence[int], **sampling: Any) -> Job:
    return Job(
        prompt_ids=tuple(prompt),
        max_new_tokens=tiny.NEW_TOKENS,
        sampling=SamplingParams(**sampling),
    )


@pytest.mark.parametrize(
    "leading",
    [
        {"logit_bias": {5: 2.0}},
        {"rules": TokenRules(suppress_tokens=(5,))},
        {"repetition_penalty": 1.2},
    ],
)
def test_only_texts_that_the_target_chose_freely_are_offered(
    leading: dict[str, Any], tmp_path: Path
) -> None:
    of = tiny.fresh_target(tokenizer=tiny.tokenizer())
    learning = Offered(tmp_path)
    source = LocalSource(of, tiny.random_drafter(of), learning=learning)

    async def run() -> list[tuple[int, ...]]:
        await source.start()
        try:
            return await generated(source, job(tiny.PROMPTS[0]), job(tiny.PROMPTS[1], **leading))
        finally:
            await source.close()

    texts = asyncio.run(run())
    assert learning.texts == [(tiny.PROMPTS[0], texts[0])]


def test_a_target_server_passes_on_texts_and_adopts_versions(tmp_path: Path) -> None:
    of = tiny.fresh_target(tokenizer=tiny.tokenizer())
    first = tiny.random_drafter(of)
    version = other_decoder(of, first)
    save_drafter(version, tmp_path / "version-1")
    service, learning = TargetService(of, first), Offered(tmp_path)
    request = pb.GenerateRequest(
        token_ids=tiny.PROMPTS[0],
        sampling=wire.sampling_message(GREEDY),
        max_new_tokens=6,
        speculate=True,
    )

    async def run() -> list[int]:
        announce(service, learning)
        assert service.capabilities.describe().newest == ""
        async with learning_from_texts(service, learning):
            await asyncio.to_thread(learning.on_version, tmp_path / "version-1")
            await asyncio.sleep(0)
            assert service.capabilities.describe().newest == fingerprint(version)
            texts = service.generate("me", request)
            return [token async for one in texts for token in one.token_ids]

    text = asyncio.run(run())
    assert learning.texts == [(tiny.PROMPTS[0], tuple(text))]
    exposed = generate_latest(service.observer.registry).decode()
    assert "learning_version 0.0" in exposed
    assert "learning_running 1.0" in exposed


@pytest.mark.parametrize("drafter", [None, "oracle"])
def test_other_drafters_are_refused(drafter: str | None, tmp_path: Path) -> None:
    of = tiny.target()
    proposer = None if drafter is None else tiny.ReplayDrafting([tiny.PROMPTS[0]])
    with pytest.raises(InputError, match="Only Mixture-of-Attentions drafters learn"):
        LocalSource(of, proposer, learning=Offered(tmp_path))


def test_learning_needs_a_drafter_and_our_engine(tmp_path: Path) -> None:
    asked = LoadOptions(model=str(tmp_path / "other"))
    with pytest.raises(InputError, match="no drafter is bundled"), ExitStack() as held:
        with_learning(asked, tmp_path, held.enter_context)
    with pytest.raises(InputError, match="for --engine torch"):
        _check_engine("vllm", asked, tmp_path, ranks=1)


def test_texts_are_dropped_while_the_process_is_busy(tmp_path: Path) -> None:
    settings = LearningSettings(target="t", dtype="float32", initial="i", directory=tmp_path)
    process = LearningProcess(settings)
    for _ in range(MAX_WAITING_TEXTS + 3):
        process.offer((1,), (2,))
    status = process.status
    assert (status.offered, status.dropped) == (MAX_WAITING_TEXTS + 3, 3)


def test_a_process_that_never_began_is_closed(tmp_path: Path) -> None:
    """As where the server's port is taken; texts that come late are dropped."""
    settings = LearningSettings(target="t", dtype="float32", initial="i", directory=tmp_path)
    process = LearningProcess(settings)
    process.close()
    process.offer((1,), (2,))
    assert process.status == LearningStatus(running=False, offered=1, dropped=1)
    assert process._texts.empty()


def test_versions_of_another_drafter_do_not_draft(tmp_path: Path) -> None:
    """The drafter that the user named would be replaced by them without a word."""
    of = ruled_target.target()
    initial = ruled_target.save_initial(tmp_path / "initial")
    save_drafter(tiny.random_drafter(of, seed=5), tmp_path / "other")
    trainer = ContinualTrainer(of, initial, tmp_path / "learned")
    trainer._save()

    def process(name: str) -> LearningProcess:
        asked = LoadOptions(model="target", drafter=str(tmp_path / name))
        with ExitStack() as held:
            _, learning = with_learning(asked, tmp_path / "learned", held.enter_context)
        assert learning is not None
        return learning

    process("initial").check(of)
    service = TargetService(of, tiny.random_drafter(of))
    announce(service, process("initial"))
    assert service.capabilities.describe().newest == ""  # there is none but the initial one
    with pytest.raises(InputError, match=r"versions of another drafter than .*other"):
        announce(service, process("other"))


def test_a_version_with_a_changed_byte_does_not_draft(tmp_path: Path) -> None:
    of, initial = ruled_target.target(), ruled_target.save_initial(tmp_path / "initial")
    learned = tmp_path / "learned"
    trainer = ContinualTrainer(of, initial, learned)
    trainer._add_version()
    trainer._save()
    settings = LearningSettings(
        target="t", dtype="float32", initial=str(initial), directory=learned
    )
    process = LearningProcess(settings)
    process.check(of)
    file = learned / "version-1" / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-8] + bytes([whole[-8] ^ 64]) + whole[-7:])
    with pytest.raises(CorruptCheckpointError, match="not those that were written"):
        process.check(of)


@pytest.mark.slow
def test_a_process_that_fails_is_reported_and_harms_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    missing = str(tmp_path / "missing")
    process = LearningProcess(
        LearningSettings(target=missing, dtype="float32", initial="i", directory=tmp_path / "d")
    )
    process.start(lambda _: None)
    process.offer((1,), (2,))
    process._thread.join()
    assert not process.status.running
    assert "learns no more" in caplog.text
    assert missing in caplog.text
    process.offer((1,), (2,))
    assert process._texts.empty()
    process.close()


BUSY_SERVER = """
import sys, threading
from pathlib import Path
from moaspec_train import learning_process

class Busy(learning_process.ContinualTrainer):
    def add(self, *_):
        print("in a step", flush=True)
        threading.Event().wait()

learning_process.ContinualTrainer = Busy  # also in the second process, which imports this file

if __name__ == "__main__":
    target, initial, directory = sys.argv[1:]
    settings = learning_process.LearningSettings(
        target=target, dtype="float32", initial=initial, directory=Path(directory)
    )
    learning = learning_process.LearningProcess(settings)
    learning.start(print)
    learning.offer((1,), (2,))
    threading.Event().wait()
"""


@pytest.mark.slow
def test_the_process_ends_with_a_killed_server_in_the_middle_of_a_step(tmp_path: Path) -> None:
    """Otherwise the next server could not learn in the directory until a cycle has ended."""
    script, settings = tmp_path / "busy_server.py", ruled_target.saved_settings(tmp_path)
    script.write_text(BUSY_SERVER)
    arguments = settings.target, settings.initial, str(settings.directory)
    command = [sys.executable, str(script), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "in a step\n"
        server.kill()
        assert server.stdout.read() == ""  # once both processes have ended


@pytest.mark.slow
def test_a_served_domain_is_learned(tmp_path: Path) -> None:
    """From texts that are served to a version that drafts, and to the next start of the server."""
    of, settings = ruled_target.target(), ruled_target.saved_settings(tmp_path)
    first = load_drafter(settings.newest(), target=of)
    learning, adopted = LearningProcess(settings), threading.Event()
    source = LocalSource(of, first, shaping=DraftSettings(Chain(4)), learning=learning)
    start = learning.start

    def watched(on_version: Any) -> None:
        def adopt(directory: Path) -> None:
            on_version(directory)
            adopted.set()

        start(adopt)

    learning.start = watched  # type: ignore[method-assign]

    async def run() -> None:
        await source.start()
        try:
            for prompt, text in ruled_target.stream():
                assert await generated(source, job(prompt)) == [text]
                while learning._texts.qsize() > MAX_WAITING_TEXTS // 2:
                    await asyncio.sleep(0.05)
            while not adopted.is_set():
                await asyncio.sleep(0.05)
                assert learning.status.running
            for prompt, text in ruled_target.stream()[:8]:
                assert await generated(source, job(prompt)) == [text]
            exposed = Metrics(source).text().decode()
            assert f"moaspec_learning_version {learning.status.version}.0" in exposed
            assert "moaspec_learning_running 1.0" in exposed
        finally:
            await source.close()

    asyncio.run(run())
    assert learning.status.accepted >= 1
    assert learning.status.version >= 1
    assert learning.status.dropped == 0
    newest = newest_version(settings.directory)
    assert settings.newest() == str(newest)
    assert LearningProcess(settings).status.version == learning.status.version
    adopted_module = source._drafting.module  # type: ignore[union-attr]
    assert not torch.equal(
        adopted_module.decoder.self_attention.mlp.down_proj.weight,
        first.decoder.self_attention.mlp.down_proj.weight,
    )
