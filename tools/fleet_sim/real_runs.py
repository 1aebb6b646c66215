"""Real servers and real sessions, to hold the simulation against: `run` and `run_skipping`.

Each server is a process with `TargetService` and its listeners. Devices are sessions in threads of
one process, because a draft step blocks. They draft what a trace says, and a step takes a set time.
The target is tiny, and its passes last as long as the cost table says, times `scale`: two cores
cannot run three targets at once, and their passes would say more of the machine than of the
schedule. With `model`, a server runs a real target instead.

`run_skipping` has all of them in one event loop whose clock skips waiting. That leaves out what
Python takes, and needs no quiet machine.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import moaspec
from fleet_sim.simulation import Fleet, Measured, SkippingLoop, pass_s, simulated_clock
from fleet_sim.traces import Trace
from moaspec import Target
from moaspec.engine.recurrent_verifier import local_verifier
from moaspec_core.drafting.draft_tree import DraftTree, Tree
from moaspec_core.drafting.protocols import TextProposer, VerifyRequest, VerifyResult
from moaspec_core.engine.engine import run_now
from moaspec_core.policy.cost_model import CostTable
from moaspec_core.policy.policies import DraftSettings
from moaspec_edge.device.local_parts import LocalDevice
from moaspec_edge.device.remote_session import RemoteOptions, RemoteSession
from moaspec_edge.device.server_text import RemoteText
from moaspec_edge.emulation import LinkProfile, ShapedTransport
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol.transport import InProcessTransport
from moaspec_edge.protocol.websocket_transport import WebSocketTransport
from moaspec_edge.protocol.wire import chain
from moaspec_edge.server.capabilities import EngineCapabilities
from moaspec_edge.server.listeners.websocket_server import ServerOptions, TargetServer
from moaspec_edge.server.service import ServiceOptions, TargetService
from moaspec_edge.server.session_store import StoreOptions

MAX_TOKENS = 1024


def tiny_target() -> Target:
    """The same random model in every process."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=256,
        max_position_embeddings=MAX_TOKENS,
        eos_token_id=None,
    )
    return Target(LlamaForCausalLM(config).eval(), None, name="tiny")


def scaled(costs: CostTable, scale: float) -> CostTable:
    """A machine that is so many times slower."""
    content = asdict(costs)
    for name in ("pass_s", "head_s", "step_s", "encode_s", "logits_s"):
        content[name] = (scale * np.array(content[name])).tolist()
    for name in ("plain_rest_s", "draft_rest_s", "root_s", "row_s"):
        content[name] *= scale
    return table(content)


class SlowedPasses:
    """A verifier whose passes last as long as a cost table says; without one, as long as they take.

    Attributes:
        own_s: CPU time of the passes.
        passes: see `Measured`, by the clock of the machine.
    """

    capabilities = EngineCapabilities()

    def __init__(self, target: Target, costs: CostTable | None) -> None:
        self._inner, self._costs = local_verifier(target, None), costs
        self.own_s, self.passes = 0.0, list[tuple[float, int]]()

    async def verify(self, requests: Sequence[VerifyRequest]) -> list[VerifyResult]:
        """See `Verifier`; runs in a thread of its own."""
        started_s, cpu_s = time.monotonic(), time.thread_time()
        self.passes.append((started_s, len(requests)))
        results = run_now(self._inner.verify(requests))
        self.own_s += time.thread_time() - cpu_s
        if self._costs is not None:
            left_s = pass_s(self._costs, requests) - (time.monotonic() - started_s)
            time.sleep(max(0.0, left_s))
        return results

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def serve(setting: dict[str, Any]) -> None:
    """A server process: prints its address, runs until its input ends, prints its CPU times."""
    torch.set_num_threads(1)
    costs, model, sessions = table(setting["costs"]), setting["model"], setting["devices"]
    target = tiny_target() if model is None else moaspec.load_target(model)
    slowed: Any = SlowedPasses(target, costs if model is None else None)
    stores = StoreOptions(max_sessions=sessions, max_sessions_per_owner=sessions)
    limits = ServiceOptions(sessions=stores, max_tokens=MAX_TOKENS)
    shaping = DraftSettings(costs=costs, prior=[[setting["rate"]]])
    service = TargetService(target, None, limits, engine=slowed, shaping=shaping)

    async def run() -> None:
        async with TargetServer(service, ServerOptions(port=0)) as server:
            print(server.url, flush=True)
            await asyncio.to_thread(sys.stdin.read)
            spent_s, rows = time.process_time() - start_s - slowed.own_s, service.shared.counts.rows
            print(json.dumps({"passes": slowed.passes, "row_s": spent_s / max(1, rows)}))

    start_s = time.process_time()
    asyncio.run(run())


def table(content: dict[str, Any]) -> CostTable:
    """A cost table out of JSON."""
    lists = {k: tuple(v) if isinstance(v, list) else v for k, v in content.items()}
    return CostTable(**lists | {"pass_s": tuple(map(tuple, content["pass_s"]))})


class Traced(TextProposer):
    """Drafts known texts, as many tokens right as a trace says.

    Args:
        texts: see `known_texts`.
        spend: called with the number of drafts of a call, to let time pass.
    """

    def __init__(
        self,
        texts: Sequence[tuple[list[int], list[int], Trace]],
        spend: Callable[[int], object],
    ) -> None:
        self._texts, self._spend = texts, spend

    def draft(self, token_ids: Sequence[int], shape: Tree) -> DraftTree:
        """See `TextProposer`."""
        self._spend(shape.depth)
        text = list(token_ids)
        for prompt, answer, trace in self._texts:
            place = len(text) - len(prompt) - 1
            if 0 <= place < len(trace.right) and text == [*prompt, *answer[: place + 1]]:
                coming = answer[place + 1 : place + 1 + shape.depth]
                right = trace.right[place]
                return chain([t if i < right else t ^ 1 for i, t in enumerate(coming)])
        return DraftTree()


@dataclass
class Real:
    """What a real run had.

    Attributes:
        found: see `Measured`; times count from the start of the devices.
        row_s: a server's CPU time for a row, besides its pass.
        turn_s: the devices' CPU time for a round.
    """

    found: Measured = field(default_factory=Measured)
    row_s: float = 0.0
    turn_s: float = 0.0


def known_texts(
    target: Target, traces: Sequence[Trace]
) -> list[tuple[list[int], list[int], Trace]]:
    """A prompt for each trace, and the target's answer."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for trace in traces:
        prompt = torch.randint(5, 250, (trace.prompt,), generator=generator).tolist()
        most = len(trace.right)
        answer = moaspec.generate(target, prompt, max_new_tokens=most, stop_token_ids=())
        found.append((prompt, answer.token_ids, trace))
    return found


@dataclass
class Players:
    """Devices in threads.

    Attributes:
        urls: of the servers; a device stays with one.
        target: of them.
        texts: to write, in turn.
        mode: see `Mode`.
        devices: number of them.
        step_s: of a drafted token.
        seconds: how long they write; each ends its first text.
    """

    urls: Sequence[str]
    target: Target
    texts: Sequence[tuple[list[int], list[int], Trace]]
    mode: str
    devices: int
    step_s: float
    seconds: float
    pieces: list[tuple[float, float, int, bool]] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)

    def play(self) -> Real:
        """Let them write."""
        self.start_s, cpu_s = time.monotonic(), time.process_time()
        threads = [threading.Thread(target=self._thread, args=(i,)) for i in range(self.devices)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]
        turn_s = (time.process_time() - cpu_s) / max(1, len(self.pieces))
        return Real(Measured(self.pieces), turn_s=turn_s)

    def _thread(self, number: int) -> None:
        try:
            asyncio.run(self._device(number))
        except BaseException as error:  # noqa: BLE001 - raised in the main thread
            self.errors.append(error)

    async def _device(self, number: int) -> None:
        transport = WebSocketTransport(self.urls[number % len(self.urls)])
        device = LocalDevice(
            self.target, Traced(self.texts, lambda drafts: time.sleep(drafts * self.step_s))
        )
        options = RemoteOptions(draft_ahead=self.mode == "ahead")
        await self._write(number, RemoteSession(device, transport, options), RemoteText(transport))

    async def _write(self, number: int, session: RemoteSession, alone: RemoteText) -> None:
        """Write one text after another: by the session, or in plain mode by the server alone."""
        source: Any = alone if self.mode == "plain" else session
        await asyncio.sleep(number / self.devices * 2.0)
        for turn in itertools.count(number):
            if turn > number and self.now_s() >= self.seconds:
                break
            prompt, answer, _ = self.texts[turn % len(self.texts)]
            stream = source.stream(prompt, max_new_tokens=len(answer), stop_token_ids=())
            async with aclosing(stream):
                text = await self._read(stream, whole=turn == number)
            assert text == answer[: len(text)], "the text is not the target's"
        await session.close()

    async def _read(self, stream: Any, *, whole: bool) -> list[int]:
        """A text, whose pieces are noted, or what the time allows of it."""
        text, at_s = list[int](), None
        async for event in stream:
            now_s = self.now_s()
            text += event.token_ids
            if at_s is not None:
                self.pieces.append((now_s, now_s - at_s, len(event.token_ids), False))
            at_s = now_s
            if now_s >= self.seconds and not whole:
                break
        return text

    def now_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start_s


def run(
    traces: Sequence[Trace],
    costs: CostTable,
    *,
    mode: str,
    devices: int,
    servers: int,
    step_s: float,
    seconds: float,
    rate: float,
    model: str | None = None,
) -> Real:
    """Start servers, let devices write, and stop the servers."""
    torch.set_num_threads(1)
    target = tiny_target() if model is None else moaspec.load_target(model)
    texts = known_texts(target, traces)
    setting = {"costs": asdict(costs), "devices": devices, "model": model, "rate": rate}
    with ExitStack() as stack:
        running = [stack.enter_context(_server(setting)) for _ in range(servers)]
        urls = [str(one.stdout.readline()).strip() for one in running if one.stdout]
        players = Players(urls, target, texts, mode, devices, step_s, seconds)
        real = players.play()
        told = [json.loads(one.communicate()[0].splitlines()[-1]) for one in running]
    real.found.passes = [(at - players.start_s, n) for one in told for at, n in one["passes"]]
    real.row_s = sum(one["row_s"] for one in told) / servers
    return real


@contextmanager
def _server(setting: dict[str, Any]) -> Any:
    code = (
        "import sys, json; sys.path.insert(0, sys.argv[2]); "
        "from fleet_sim.real_runs import serve; serve(json.loads(sys.argv[1]))"
    )
    tools = str(Path(__file__).resolve().parents[1])
    command = [sys.executable, "-c", code, json.dumps(setting), tools]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            if psutil.pid_exists(process.pid):
                process.kill()


class SkippingPlayers(Players):
    """Devices in an event loop whose clock skips waiting, in plain or sync mode."""

    link: LinkProfile
    services: list[TargetService]
    passes: list[tuple[float, int]]

    async def run(self) -> Measured:
        """Let them write, and stop the services."""
        self.start_s = time.monotonic()
        await asyncio.gather(*(self._skipping(i) for i in range(self.devices)))
        for service in self.services:
            await service.stop()
        return Measured(self.pieces, self.passes)

    async def _skipping(self, number: int) -> None:
        drafted_s = [0.0]

        def spend(drafts: int) -> None:
            drafted_s[0] += drafts * self.step_s

        service = self.services[number % len(self.services)]
        transport = ShapedTransport(InProcessTransport(service), self.link)
        device = LocalDevice(self.target, Traced(self.texts, spend))
        session = RemoteSession(device, transport, RemoteOptions(draft_ahead=False))
        session._ahead._clock = lambda: drafted_s[0]
        verify, until_s = session._verifier.verify, 0.0

        async def after_drafting(requests: Sequence[VerifyRequest]) -> list[VerifyResult]:
            nonlocal until_s
            await asyncio.sleep(drafted_s[0] - until_s)
            until_s = drafted_s[0]
            return await verify(requests)

        session._verifier.verify = after_drafting  # type: ignore[method-assign]

        async def generate(asked: pb.GenerateRequest) -> AsyncIterator[pb.Generated]:
            await asyncio.sleep(self.link.delay_s)
            async with aclosing(service.generate("local", asked)) as messages:
                async for message in messages:
                    yield message

        alone: Any = SimpleNamespace(generate=generate)
        await self._write(number, session, RemoteText(alone))


def run_skipping(fleet: Fleet) -> Measured:
    """Real services of a fleet, in sync mode with real sessions, without waiting."""
    target = tiny_target()
    texts = known_texts(target, fleet.traces)
    seconds = fleet.warm_s + fleet.seconds

    async def run() -> Measured:
        with simulated_clock():
            players = SkippingPlayers(
                [""], target, texts, fleet.mode, fleet.devices, fleet.step_s, seconds
            )
            players.link, players.passes = fleet.link, []
            players.services = [
                _skipping_service(target, fleet, players.passes) for _ in range(fleet.servers)
            ]
            return await players.run()

    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        return runner.run(run())


def _skipping_service(
    target: Target, fleet: Fleet, passes: list[tuple[float, int]]
) -> TargetService:
    stores = StoreOptions(max_sessions=fleet.devices, max_sessions_per_owner=fleet.devices)
    shaping = DraftSettings(costs=fleet.costs, prior=[[fleet.rate]])
    limits = ServiceOptions(sessions=stores, max_tokens=MAX_TOKENS)
    service = TargetService(target, None, limits, shaping=shaping)

    async def slowed(requests: list[VerifyRequest]) -> list[VerifyResult | Exception]:
        passes.append((time.monotonic(), len(requests)))
        await asyncio.sleep(pass_s(fleet.costs, requests) + len(requests) * fleet.row_s)
        return service.shared._decide(requests)

    service.shared._pass = slowed  # type: ignore[method-assign]
    return service
