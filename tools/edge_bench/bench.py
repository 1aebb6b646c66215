"""Runs server, device and the link between them, and puts each case beside its prediction."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from types import TracebackType
from typing import Any, cast

from edge_bench import python_command
from edge_bench.case import MODES, Case, drafter_name
from edge_bench.formula import Mode, Round, pays, prediction
from edge_bench.namespaces import EmulatedLink, Side
from moaspec_core.drafting.tree_shapes import DEFAULT_TREE
from moaspec_core.errors import InputError, MoaSpecError
from moaspec_edge.emulation import PRESETS, LinkProfile, link_named
from moaspec_edge.protocol.codec import CodecName

LOCAL = "none"
"""The link that needs no emulation."""

CONTEXT = 128
"""Tokens before the plain pass that is timed by itself; about the middle of a text here."""

DRAFTERS = ("moa", "replay")


@dataclass(frozen=True, kw_only=True)
class EdgeSettings:
    """The settings of a benchmark.

    Attributes:
        model, drafter, dtype: of the server.
        bundles: device bundles by kind of drafter; "moa" is a must.
        prompts: texts of users.
        links: names of presets, with jitter models.
        modes: see `formula`.
        drafters: of `DRAFTERS`, what the device drafts with.
        num_target_layers: the N of "moa".
        server_speeds: how many times as fast the server is as the device; the paper's is 3.
        drafted: tokens per round; 0 lets the session choose.
        agreement: of "replay".
        pass_s: a pass of the server takes at least so long; 0 does not hold it.
        codec: of activations.
        max_new_tokens: of each prompt.
        threads: of torch, in each process.

    Raises:
        InputError: nothing to measure, an unknown link, mode or drafter, a speed below 1, a
            negative N, or a missing bundle.
    """

    model: str
    drafter: str
    bundles: dict[str, str]
    prompts: tuple[str, ...]
    dtype: str = "auto"
    links: tuple[str, ...] = ("lan", "4g", "5g")
    modes: tuple[str, ...] = MODES
    drafters: tuple[str, ...] = ("moa", "replay")
    num_target_layers: tuple[int, ...] = (0,)
    server_speeds: tuple[float, ...] = (3.0,)
    drafted: int = 4
    agreement: float = 0.75
    pass_s: float = 0.0
    codec: CodecName = "int8"
    max_new_tokens: int = 64
    threads: int = 1

    def __post_init__(self) -> None:
        lists = ("prompts", "links", "modes", "drafters", "num_target_layers", "server_speeds")
        if empty := [name for name in lists if not getattr(self, name)]:
            raise InputError(f"{', '.join(empty)}: at least one is needed, got none.")
        for name in self.links:
            link_named(name)
        for what, given, known in (
            ("mode", self.modes, MODES),
            ("drafter", self.drafters, DRAFTERS),
        ):
            if unknown := sorted(set(given) - set(known)):
                raise InputError(f"Unknown {what} {unknown[0]!r}; use {', '.join(known)}.")
        if wrong := [speed for speed in self.server_speeds if not 1 <= speed < inf]:
            raise InputError(f"server_speeds are numbers of at least 1, got {wrong[0]}.")
        if min(self.num_target_layers) < 0:
            raise InputError(f"num_target_layers are at least 0, got {self.num_target_layers}.")
        needed = {"moa", *self.drafters} - {"replay"}
        if missing := sorted(needed - set(self.bundles)):
            raise InputError(f"No device bundle for {missing[0]}; name one.")

    def cases(self, steps: dict[str, float]) -> Iterator[tuple[float, Case]]:
        """Server speed and case, in the order of the table.

        Args:
            steps: natural draft steps, by `drafter_name`; replayed drafts take as long as those of
                the first N.
        """
        first = steps[drafter_name("moa", self.num_target_layers[0])]
        for mode in self.modes:
            if mode in ("plain", "server"):
                yield 1.0, Case(mode=cast(Mode, mode), step_s=first, codec=self.codec)
        for speed in self.server_speeds:
            for drafter in self.drafters:
                for layers in self.num_target_layers if drafter == "moa" else (0,):
                    natural = steps.get(drafter_name(drafter, layers), first)
                    for mode in self.modes:
                        if mode in ("sync", "ahead"):
                            yield (
                                speed,
                                Case(
                                    mode=cast(Mode, mode),
                                    drafter=drafter,
                                    num_target_layers=layers,
                                    step_s=speed * natural,
                                    drafted=self.drafted,
                                    agreement=self.agreement,
                                    codec=self.codec,
                                ),
                            )


class Worker:
    """A process that answers lines of JSON.

    Raises:
        MoaSpecError: it ended; its messages are on standard error.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,  # a Ctrl-C is for the process that asks
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def read(self) -> Any:
        """Read the next line as JSON."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise MoaSpecError("A process of the bench ended; what it said is above.")
        return json.loads(line)

    def ask(self, job: dict[str, Any]) -> Any:
        """Send a job and wait for the answer."""
        self.write(job)
        return self.read()

    def write(self, value: dict[str, Any]) -> None:
        """Write a value as one line of JSON."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()


class Setup:
    """Server, device and link, all running.

    Args:
        settings: see `EdgeSettings`.
    """

    def __init__(self, settings: EdgeSettings) -> None:
        self.settings = settings
        self._stack = contextlib.ExitStack()
        self.link: EmulatedLink | None = None

    def __enter__(self) -> Setup:
        with contextlib.ExitStack() as stack:
            if set(self.settings.links) != {LOCAL}:
                self.link = stack.enter_context(EmulatedLink(PRESETS[LOCAL]))
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _start(self, stack: contextlib.ExitStack) -> None:
        settings = self.settings
        host = "127.0.0.1" if self.link is None else self.link.address
        info = {
            "model": settings.model,
            "drafter": settings.drafter,
            "dtype": settings.dtype,
            "pass_s": settings.pass_s,
            "threads": settings.threads,
            "host": host,
        }
        self.server = stack.enter_context(Worker(self._command("server", info)))
        info = {
            "bundles": settings.bundles,
            "address": self.server.read()["address"],
            "prompts": settings.prompts,
            "threads": settings.threads,
        }
        self.device = stack.enter_context(Worker(self._command("client", info)))
        self.device.read()
        job = {"do": "steps", "num_target_layers": settings.num_target_layers}
        self.steps: dict[str, float] = self.device.ask(job)["answer"]

    def _command(self, side: Side, info: dict[str, Any]) -> list[str]:
        role = "device" if side == "client" else side
        python = python_command("edge_bench.processes", role, json.dumps(info))
        return python if self.link is None else self.link.command(side, python)

    def shape(self, name: str) -> LinkProfile:
        """Be this link from now on; the connections that are there stay."""
        found = link_named(name)
        if self.link is not None:
            self.link.shape(found)
        return found

    def packets(self) -> list[int]:
        """Bytes on the wire so far, up and down; zeros where nothing is emulated."""
        return [0, 0] if self.link is None else self.link.stats()["bytes"]

    def cut(self, job: dict[str, Any]) -> list[dict[str, Any]]:
        """Have the device decode while the link is cut and mended as it asks."""
        assert self.link is not None, "only an emulated link can be cut"
        answer = self.device.ask(job)
        while "ask" in answer:
            {"cut": self.link.cut, "mend": self.link.mend}[answer["ask"]]()
            answer = self.device.ask({"at": time.monotonic()})
        found: list[dict[str, Any]] = answer["answer"]
        return found


def run_edge_bench(
    settings: EdgeSettings, advance: Callable[[str, int], None] = lambda *_: None
) -> dict[str, Any]:
    """Measure every case over every link.

    Args:
        settings: what.
        advance: told of what comes next, and of how many cases, for a progress display.

    Returns:
        Plain values: settings, natural draft steps, for each link its round trip and rows, and
        whether Ctrl-C ended it before all was measured.

    Raises:
        InputError: links cannot be emulated here.
        MoaSpecError: one of the processes ended.
        KeyboardInterrupt: it came before the first case was measured.
    """
    links: dict[str, Any] = {}
    with Setup(settings) as setup:
        interrupted = _measure_links(setup, links, advance)
        info = {"settings": asdict(settings), "steps": setup.steps, "links": links}
        return {**info, "interrupted": interrupted}


def _measure_links(
    setup: Setup, links: dict[str, Any], advance: Callable[[str, int], None]
) -> bool:
    """Fill `links`, case by case; True when Ctrl-C ended it."""
    try:
        for name in setup.settings.links:
            links[name] = _begun(setup, name)
            _measure_link(setup, name, links[name], advance)
    except KeyboardInterrupt:
        for name in [one for one, found in links.items() if not found["rows"]]:
            del links[name]
        if not links:
            raise
        return True
    return False


def _begun(setup: Setup, name: str) -> dict[str, Any]:
    """A link without rows: its round trip, and a pass of the server."""
    return {
        "link": asdict(setup.shape(name)),
        "rtt_s": setup.device.ask({"do": "ping"})["answer"]["rtt_s"],
        "pass_s": setup.server.ask({"do": "pass", "context": CONTEXT})["pass_s"],
        "rows": [],
    }


def _measure_link(
    setup: Setup, name: str, found: dict[str, Any], advance: Callable[[str, int], None]
) -> None:
    plain: dict[str, Any] | None = None
    cases = list(setup.settings.cases(setup.steps))
    if cases[0][1].mode != "plain":
        # Replay needs its text, and every prediction its pass.
        cases.insert(0, (1.0, replace(cases[0][1], mode="plain")))
    of = {"link": link_named(name), "rtt_s": found["rtt_s"], "pass_s": found["pass_s"]}
    for speed, case in cases:
        advance(f"{name}: {case.name}", len(cases) * len(setup.settings.links))
        before = setup.packets()
        job = {"do": "case", "case": asdict(case), "max_new_tokens": setup.settings.max_new_tokens}
        measured = setup.device.ask(job)["answer"]
        up, down = (after - b for after, b in zip(setup.packets(), before, strict=True))
        if setup.link is not None:
            measured |= {
                "bytes_up_per_token": up / max(1, measured["tokens"]),
                "bytes_down_per_token": down / max(1, measured["tokens"]),
            }
        plain = plain or measured
        found["rows"].append(measured_row(case, speed, measured, plain, **of))


def measured_row(
    case: Case,
    speed: float,
    measured: dict[str, Any],
    plain: dict[str, Any],
    *,
    link: LinkProfile,
    rtt_s: float,
    pass_s: float,
) -> dict[str, Any]:
    """The row of a case: its measurements beside the prediction."""
    per_token_s = 1.0 / measured["tokens_per_s"]
    rounds = max(1, measured["rounds"])
    moved = measured["bytes_up_per_token"] + measured["bytes_down_per_token"]
    of = Round(
        tokens=measured["tau"],
        drafted=measured["drafted"] / rounds
        if case.mode in ("sync", "ahead")
        else DEFAULT_TREE.depth,
        step_s=measured["step_s"] or case.step_s,
        pass_s=measured["pass_s"] or pass_s,
        rtt_s=rtt_s,
        transfer_s=8 * moved * measured["tau"] / link.bits_per_s if link.bits_per_s else 0.0,
        hits=measured["hits"],
        streamed=measured.get("streamed", 0) / rounds,
    )
    predicted_s = prediction(case.mode, of)
    return {
        "name": case.name,
        "server_speed": speed,
        "case": asdict(case),
        "measured": {k: v for k, v in measured.items() if k not in ("texts", "prompts")},
        "per_token_s": per_token_s,
        "predicted_s": predicted_s,
        "off": per_token_s / predicted_s - 1.0,
        "pays": pays(case.mode, of, pass_s),
        "over_plain": measured["tokens_per_s"] / plain["tokens_per_s"],
        "fewer_passes": 1.0 / measured["passes_per_token"],
        "same_text": measured["texts"] == plain["texts"],
        "round": asdict(of),
    }
