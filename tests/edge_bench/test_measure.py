"""Cases measured through a real server, and the cut over the real protocol."""

from __future__ import annotations

import asyncio
import math
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import moaspec
import tiny
from bundles import save_bundle
from edge_bench.bench import EdgeSettings, measured_row, run_edge_bench
from edge_bench.case import MODES, Case
from edge_bench.cutting import _Log, cut_and_return
from edge_bench.measure import measure_case, round_trip_s
from edge_bench.processes import DeviceSide, ServerSide
from moaspec.backends.load import load_target
from moaspec.generation.drafters import load_drafter
from moaspec.target.target import Target
from moaspec_core.engine.request_state import Source
from moaspec_core.errors import InputError
from moaspec_edge.device.bundle import load_device
from moaspec_edge.device.events import RemoteEvent
from moaspec_edge.emulation import PRESETS, Faults, ShapedTransport
from moaspec_edge.protocol.websocket_transport import WebSocketTransport
from moaspec_edge.server.listeners.websocket_server import ServerOptions, TargetServer
from moaspec_edge.server.service import TargetService

PROMPTS = [list(prompt) for prompt in tiny.PROMPTS[:2]]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bundle(tmp_path_factory.mktemp("edge"), num_target_layers=(0, 1))


def served(bundle: Path, work: Callable[[str, Target], Awaitable[Any]]) -> Any:
    """What `work` makes of a server's address and its target."""

    async def run() -> Any:
        target = load_target(bundle.parent / "target")
        drafter = load_drafter(bundle.parent / "drafter", target=target)
        options = ServerOptions(host="127.0.0.1", port=0)
        async with TargetServer(TargetService(target, drafter), options) as server:
            return await asyncio.wait_for(work(server.url, target), 300)

    return asyncio.run(run())


CASES = [
    Case(mode="plain"),
    Case(mode="server"),
    Case(mode="sync", num_target_layers=1, drafted=3),
    Case(mode="ahead", drafted=0),
    Case(mode="ahead", drafter="replay", drafted=6, agreement=1.0, step_s=0.001),
]


@pytest.mark.slow
def test_all_cases_write_the_same_text(bundle: Path) -> None:
    async def work(address: str, target: Target) -> None:
        device, transport = load_device(bundle, dtype="float32"), WebSocketTransport(address)
        assert await round_trip_s(address) > 0
        expected = [one.token_ids for one in moaspec.generate(target, PROMPTS, max_new_tokens=20)]
        texts: list[list[int]] = []
        plain: dict[str, Any] = {}
        for case in CASES:
            found = await measure_case(
                case, device, transport, PROMPTS, max_new_tokens=20, texts=texts
            )
            assert found.texts == expected
            assert (found.tokens, found.later) == (40, 38)
            texts, data = found.texts, found.as_json()
            plain = plain or data
            row = measured_row(
                case, 3.0, data, plain, link=PRESETS["lan"], rtt_s=0.009, pass_s=0.001
            )
            assert row["same_text"]
            assert math.isfinite(row["off"])
            if case.mode == "plain":
                assert found.rounds == 38
            if case.drafter == "replay":
                assert found.step_s >= 0.001
                # All drafts are right: rounds of seven tokens, the last one of each text shorter.
                assert row["fewer_passes"] > 5

    served(bundle, work)


@pytest.mark.slow  # two processes of their own
def test_cases_before_ctrl_c(bundle: Path) -> None:
    given = EdgeSettings(
        model=str(bundle.parent / "target"),
        drafter=str(bundle.parent / "drafter"),
        bundles={"moa": str(bundle)},
        prompts=("w1 w2 w3",),
        dtype="float32",
        links=("none",),
        max_new_tokens=4,
        threads=1,
    )

    def advance(_: str, total: int) -> None:
        begun.append(total)
        if len(begun) == 2:
            signal.raise_signal(signal.SIGINT)

    begun: list[int] = []
    found = run_edge_bench(given, advance)
    assert found["interrupted"]
    assert [row["name"] for row in found["links"]["none"]["rows"]] == ["plain"]
    assert begun[0] == len(list(given.cases({"moa@0": 0.1})))


@pytest.mark.slow
def test_the_workers_answer(bundle: Path) -> None:
    async def work(address: str, target: Target) -> None:
        device = DeviceSide({"moa": load_device(bundle)}, address, ["w1 w2 w3"])

        async def ask(_: str) -> float:
            raise AssertionError

        assert (await device.answer({"do": "ping"}, ask))["rtt_s"] > 0
        steps = await device.answer({"do": "steps", "num_target_layers": [0, 1]}, ask)
        assert set(steps) == {"moa@0", "moa@1"}
        assert min(steps.values()) > 0
        job = {"do": "case", "case": {"mode": "plain"}, "max_new_tokens": 8}
        text = (await device.answer(job, ask))["texts"][0]
        opinion = await ServerSide(target).answer(
            {"do": "opinion", "seen": [1, 2, 3], "text": text}
        )
        assert opinion["agreement"] == 1.0
        assert (await ServerSide(target, 9.0).answer({"do": "pass", "context": 8}))["pass_s"] == 9.0

    served(bundle, work)


@pytest.mark.slow
def test_a_cut_over_the_real_protocol(bundle: Path) -> None:
    async def work(address: str, target: Target) -> dict[str, Any]:
        faults = Faults()
        transport = ShapedTransport(WebSocketTransport(address), PRESETS["none"], faults)

        async def ask(what: str) -> float:
            faults.cut = what == "cut"
            return asyncio.get_running_loop().time()

        case = Case(mode="ahead", drafted=2)
        found = await cut_and_return(
            case,
            load_device(bundle, dtype="float32"),
            transport,
            PROMPTS[0],
            ask=ask,
            after=6,
            alone=4,
            max_new_tokens=20,
        )
        (plain,) = moaspec.generate(target, PROMPTS[:1], max_new_tokens=20)
        assert found["text"] == plain.token_ids
        return found

    found = served(bundle, work)
    assert found["before"] >= 6
    assert len(found["alone"]) >= 4
    assert None not in (found["noticed_s"], found["next_s"], found["back_s"])


def test_tokens_of_an_outage_that_nobody_asked_for_count_too() -> None:
    """A device writes a limited number of tokens without a link and then waits for it."""
    log = _Log()
    sources: tuple[Source, ...] = ("draft",) * 3
    alone = RemoteEvent(
        start=4, token_ids=(5, 6, 7), sources=sources, num_provisional=3, link="down"
    )
    log.note(alone)
    log.cut_s = 1.0
    log.note(replace(alone, start=7, token_ids=(8,), sources=sources[:1], num_provisional=1))
    assert log.provisional == 4
    log.note(replace(alone, link="up", num_provisional=0))
    assert log.provisional == 0


# Settings


def settings(**changes: Any) -> EdgeSettings:
    names = {"model": "x", "drafter": "x"}
    values: dict[str, Any] = {**names, "bundles": {"moa": "b"}, "prompts": ("w1",)}
    return EdgeSettings(**values | changes)


@pytest.mark.parametrize(
    "wrong",
    [
        {"links": ("6g",)},
        {"modes": ("fast",)},
        {"drafters": ("oracle",)},
        {"server_speeds": (0.5,)},
        {"server_speeds": (float("nan"),)},
        {"num_target_layers": ()},
        {"num_target_layers": (0, -1)},
        {"prompts": ()},
    ],
)
def test_settings_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        settings(**wrong)


def test_the_grid() -> None:
    given = settings(num_target_layers=(0, 3), server_speeds=(1.0, 3.0))
    cases = list(given.cases({"moa@0": 0.01, "moa@3": 0.02}))
    # Plain and server once; per speed sync and ahead of two N and of replay.
    assert len(cases) == 2 + 2 * 2 * 3
    steps = [case.step_s for speed, case in cases if speed == 3.0]
    assert steps == pytest.approx([0.03, 0.03, 0.06, 0.06, 0.03, 0.03])
    assert [case.mode for _, case in cases[:2]] == list(MODES[:2])
