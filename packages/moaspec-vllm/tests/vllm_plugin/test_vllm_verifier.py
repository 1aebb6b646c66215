"""Devices whose drafts vLLM verifies get the text of a local target with all settings.

One engine answers all questions, because it takes seconds to start.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from typing import Any

import pytest

import moaspec
import tiny
import vllm_serving as serving
from links import Faults, FaultyTransport
from moaspec import Chain, Tree
from moaspec.generation.drafters import load_drafter
from moaspec.model.moa import MoADrafter
from moaspec.target.registry import read_target_spec
from moaspec.target.target import Target
from moaspec_core.drafting.draft_tree import DraftTree
from moaspec_core.drafting.protocols import VerifyRequest
from moaspec_edge.device.local_parts import LocalDevice
from moaspec_edge.device.remote_session import RemoteOptions, RemoteSession
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol.transport import InProcessTransport
from moaspec_edge.server.service import ServiceOptions, TargetService, wire_encoder
from moaspec_edge.server.session_store import StoreOptions
from moaspec_vllm.vllm_settings import VLLMVerifierSettings

pytest.importorskip("vllm", reason="vLLM is not installed; `make test-vllm` installs it")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

MOST = 200
"""Tokens of the longest text."""
OPTIONS = ServiceOptions(max_tokens=MOST, sessions=StoreOptions(max_sessions=8))
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_p": 0.9, "seed": 3},
    "penalties": {
        "temperature": 1.0,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "seed": 4,
    },
    "bias": {"logit_bias": {5: -100.0, 7: 2.0}},
}
LONG = [3 + i % 60 for i in range(90)]
"""Read in stretches, none of which is a whole number of vLLM's blocks."""


@pytest.fixture(autouse=True)
def _small_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are read in several, and idle sessions make room at once."""
    monkeypatch.setattr("moaspec_edge.server.shared_verifier.PREFILL_TOKENS", 24)
    monkeypatch.setattr("moaspec_edge.server.session_store.CONNECTED_BUSY_S", 0.0)


class Served:
    """A target here, the same one inside vLLM, and a drafter for both."""

    def __init__(self, models: serving.Models, engine: Any, drafter: MoADrafter) -> None:
        self.target: Target = models.target
        self.engine, self.drafter = engine, drafter
        self.info = read_target_spec(models.path, dtype="float32")

    def service(self) -> TargetService:
        """A new one, on the same engine."""
        return TargetService(self.info, self.drafter, OPTIONS, engine=self.engine)

    def session(self, transport: Any, draft: Tree, **options: Any) -> RemoteSession:
        """A session of a device."""
        remote = RemoteOptions(draft=draft, **options)
        return RemoteSession(LocalDevice(self.target, self.drafter), transport, remote)

    def local(self, prompt: list[int], **options: Any) -> list[int]:
        """Token ids of plain decoding."""
        return moaspec.generate(self.target, prompt, stop_token_ids=(), **options).token_ids

    def verify(self, *requests: VerifyRequest) -> list[Any]:
        """One call, as the service makes them."""
        return asyncio.run(self.engine.verify(requests))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    models = serving.write_models(tmp_path_factory.mktemp("models"))
    data = read_target_spec(models.path, dtype="float32")
    drafter = load_drafter(models.taught, target=models.target)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from moaspec_vllm.vllm_verifier import VLLMVerifier

    options = VLLMVerifierSettings(
        model=str(models.path),
        dtype="float32",
        max_rows=8,
        max_tokens=MOST,
        token_bytes=data.num_layers * data.identity.kv_size * 4,
        max_drafted=6,
        extra_arguments={"enforce_eager": True, "seed": 0},
    )
    engine: Any = VLLMVerifier(options, wire_encoder(drafter, data))
    yield Served(models, engine, drafter)
    engine.shutdown()


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("layers", [0, 1])
def test_texts_are_the_local_ones(served: Served, setting: str, layers: int) -> None:
    """Several devices at once, each for several turns; one of them drafts trees."""
    options = SETTINGS[setting] | {"max_new_tokens": 24}
    prompts = [*(list(one) for one in tiny.PROMPTS), LONG]
    shapes: list[Tree] = [Chain(3), Chain(9), Tree(2, 2, 4), Chain(1), Chain(4)]

    async def device(service: TargetService, prompt: list[int], shape: Tree) -> None:
        remote = served.session(InProcessTransport(service), shape, num_target_layers=layers)
        for _ in range(2):
            result = await remote.generate(prompt, stop_token_ids=(), **options)
            assert result.token_ids == served.local(prompt, **options)
            prompt = [*prompt, *result.token_ids[:-3], 11]
        await remote.close()

    async def all_of_them() -> None:
        service = served.service()
        await asyncio.gather(
            *(device(service, prompt, shape) for prompt, shape in zip(prompts, shapes, strict=True))
        )
        await service.stop()
        assert served.engine.cache_bytes == 0

    run(all_of_them())


def test_drafts_are_accepted_as_by_a_local_target(served: Served) -> None:
    async def work() -> None:
        service = served.service()
        own = TargetService(served.target, served.drafter, OPTIONS)
        rounds = []
        for one in (service, own):
            remote = served.session(InProcessTransport(one), Chain(3), draft_ahead=False)
            result = await remote.generate(tiny.PROMPTS[0], max_new_tokens=24, stop_token_ids=())
            rounds.append(result.num_rounds)
            await remote.close()
            await one.stop()
        assert rounds[0] == rounds[1] < 16

    run(work())


def test_a_session_may_return_to_an_earlier_text(served: Served) -> None:
    """Its blocks are still cached, but their features were dropped."""
    first, second = [*LONG, 5, 6], [*LONG[:5], *range(3, 60)]

    async def work() -> None:
        service = served.service()
        remote = served.session(InProcessTransport(service), Chain(3))
        for prompt in (first, second, first, [*first[:70], 9], first):
            result = await remote.generate(prompt, max_new_tokens=12, stop_token_ids=())
            assert result.token_ids == served.local(prompt, max_new_tokens=12)
        assert remote.stats.reopened == 0
        await remote.close()
        await service.stop()

    run(work())


def test_a_step_that_fails_costs_time_and_nothing_else(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when memory runs out: what was under way in vLLM is begun anew."""
    engine = served.engine._engine
    step = engine.step
    calls: list[None] = []

    def sometimes() -> Any:
        calls.append(None)
        if len(calls) % 7 == 0:
            raise RuntimeError("out of memory")
        return step()

    monkeypatch.setattr(engine, "step", sometimes)

    async def device(service: TargetService, prompt: list[int]) -> None:
        remote = served.session(InProcessTransport(service), Chain(3))
        result = await remote.generate(prompt, max_new_tokens=20, stop_token_ids=())
        assert result.token_ids == served.local(prompt, max_new_tokens=20)
        await remote.close()

    async def work() -> None:
        service = served.service()
        await asyncio.gather(*(device(service, list(prompt)) for prompt in tiny.PROMPTS[:3]))
        await service.stop()

    run(work())


def test_texts_of_the_server_alone_end_at_its_limit(served: Served) -> None:
    async def work() -> None:
        service = served.service()
        sampling = pb.Sampling(top_p=1.0, repetition_penalty=1.0)
        request = pb.GenerateRequest(token_ids=[*LONG, *LONG], max_new_tokens=60, sampling=sampling)
        text = [t async for one in service.generate("me", request) for t in one.token_ids]
        assert text == served.local([*LONG, *LONG], max_new_tokens=MOST - 2 * len(LONG))
        await service.stop()

    run(work())


def test_a_cache_that_does_not_fit_is_refused_in_a_sentence(served: Served) -> None:
    from moaspec_core.errors import ServingError
    from moaspec_vllm.vllm_verifier import VLLMVerifier

    verifier = served.engine
    options = replace(verifier._options, max_rows=10**9)
    with pytest.raises(ServingError, match="fewer or shorter"):
        VLLMVerifier(replace(options, extra_arguments={"load_format": "nonsense"}))
    verifier._options, own = options, verifier._options
    with pytest.raises(ServingError, match="Ask for fewer or shorter ones"):
        verifier._require_room()
    verifier._options = own


def test_cuts_and_a_bad_link_change_nothing(served: Served) -> None:
    async def work() -> None:
        service = served.service()
        faults = Faults(loss=0.05, twice=0.2, delay_s=0.01, cut_after=(9, 14, 12))
        transport = FaultyTransport(lambda: InProcessTransport(service), faults, seed=1)
        remote = served.session(transport, Chain(3))
        for prompt in (list(tiny.PROMPTS[1]), LONG):
            options: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.8, "seed": 9}
            result = await remote.generate(prompt, stop_token_ids=(), **options)
            assert result.token_ids == served.local(prompt, **options)
        assert remote.stats.cuts >= 2
        await remote.close()
        await service.stop()

    run(work())


def test_more_devices_than_rows_and_texts_to_the_limit(served: Served) -> None:
    async def device(service: TargetService, number: int) -> None:
        prompt = [3 + number, *LONG]
        remote = served.session(InProcessTransport(service), Chain(4))
        most = MOST - len(prompt)
        result = await remote.generate(prompt, max_new_tokens=most, stop_token_ids=())
        assert result.token_ids == served.local(prompt, max_new_tokens=most)
        await remote.close()

    async def work() -> None:
        service = served.service()
        async with asyncio.timeout(600):
            await asyncio.gather(*(device(service, number) for number in range(11)))
        await service.stop()

    run(work())


def test_a_row_that_fails_harms_no_other(served: Served) -> None:
    """A processor that breaks, in the same step as an honest row; both go on afterwards."""
    prompt, other = tuple(tiny.PROMPTS[0]), tuple(tiny.PROMPTS[2])

    def breaks(*_: Any) -> Any:
        raise RuntimeError("out of luck")

    good = VerifyRequest(0, 0, prompt, prompt_length=len(prompt))
    (first,) = served.verify(good)
    from moaspec_core.sampling.params import SamplingParams

    bad = VerifyRequest(1, 0, other, sampling=SamplingParams(processors=(breaks,)), prompt_length=2)
    going_on = VerifyRequest(0, len(prompt), (first.next_token,), DraftTree((5,), (-1,)))
    with pytest.raises(Exception, match="luck"):
        served.verify(going_on, bad)
    (again,) = served.verify(going_on)
    local = served.local(list(prompt), max_new_tokens=2)
    assert [first.next_token, served_token(again)] == local
    (whole,) = served.verify(VerifyRequest(1, 0, other, prompt_length=len(other)))
    assert [whole.next_token] == served.local(list(other), max_new_tokens=1)
    served.engine.release()


def served_token(verdict: Any) -> int:
    """The token after the root, whether it was drafted or not."""
    return 5 if verdict.accepted else int(verdict.next_token)
