"""The two processes of an edge bench: a server, and a device that decodes through it.

`python -m edge_bench.processes server|device JSON` says a line of JSON when it is ready,
and then answers each line of JSON on standard input by one on standard output, until that ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from transformers.utils import logging

from edge_bench.case import Case, drafter_name
from edge_bench.cutting import cut_and_return
from edge_bench.measure import measure_case, round_trip_s
from eval_studies.cut_quality import score_text
from eval_studies.pass_costs import pass_s
from moaspec.backends.load import load_target
from moaspec.generation.drafters import load_drafter
from moaspec.target.target import Target
from moaspec_core.chat.chat_template import ChatTemplate
from moaspec_core.drafting.protocols import Proposer, RequestText
from moaspec_core.drafting.tree_shapes import Chain
from moaspec_edge.device.bundle import load_device
from moaspec_edge.device.device_parts import Device
from moaspec_edge.device_onnx.manifest import is_onnx_bundle
from moaspec_edge.protocol.websocket_transport import WebSocketTransport
from moaspec_edge.server.listeners.websocket_server import ServerOptions, TargetServer
from moaspec_edge.server.service import ServiceOptions, TargetService
from moaspec_edge.server.shared_verifier import PassOptions

Say = Callable[[dict[str, Any]], None]
Hear = Callable[[], Awaitable[dict[str, Any] | None]]
_NATURAL_STEPS, _NATURAL_REPEATS = 8, 5


class ServerSide:
    """Holds the target, and gives its opinion on texts.

    Args:
        target: the model.
        pass_s: the least time of a pass.
    """

    def __init__(self, target: Target, pass_s: float = 0.0) -> None:
        self._target, self._pass_s = target, pass_s

    async def answer(self, job: dict[str, Any]) -> dict[str, Any]:
        """Seconds of a plain pass, or what the target thinks of a text that follows another."""
        if job["do"] == "pass":
            return {"pass_s": max(self._pass_s, pass_s(self._target, 1, job["context"], 1))}
        likelihood, agreement = score_text(self._target, job["seen"], job["text"])
        return {"log_likelihood": likelihood, "agreement": agreement}


class DeviceSide:
    """Decodes through a link.

    Args:
        devices: by kind of drafter.
        address: URL of the server.
        prompts: texts.
    """

    def __init__(self, devices: dict[str, Device], address: str, prompts: list[str]) -> None:
        self._devices, self._address = devices, address
        self._transport = WebSocketTransport(address)
        self._prompts = [prompt_ids(devices["moa"].target.tokenizer, prompt) for prompt in prompts]
        self._texts: list[list[int]] = []

    async def answer(self, job: dict[str, Any], ask: Callable[[str], Awaitable[float]]) -> Any:
        """Measure what a job names.

        Args:
            job: see the branches.
            ask: has something done to the link; returns when it was done.
        """
        if job["do"] == "ping":
            return {"rtt_s": await round_trip_s(self._address)}
        if job["do"] == "steps":
            return natural_steps(self._devices, job["num_target_layers"])
        case = Case(**job["case"])
        device = self._devices["moa" if case.drafter == "replay" else case.drafter]
        if job["do"] == "cut":
            return [
                await cut_and_return(case, device, self._transport, prompt, ask=ask, **job["cut"])
                for prompt in self._prompts
            ]
        found = await measure_case(
            case,
            device,
            self._transport,
            self._prompts,
            max_new_tokens=job["max_new_tokens"],
            texts=self._texts,
        )
        if case.mode == "plain":
            self._texts = found.texts
        return found.as_json()


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """A user's turn in the chat template, where there is one."""
    if not tokenizer.chat_template:
        return list(tokenizer(text)["input_ids"])
    template = ChatTemplate(tokenizer)
    return template.tokenize(template.rendered([{"role": "user", "content": text}]))


def natural_steps(
    devices: Mapping[str, Device], num_target_layers: Sequence[int]
) -> dict[str, float]:
    """`natural_step_s` of every kind of drafter, by names of `drafter_name`."""
    kinds = {drafter_name("moa", n): devices["moa"].drafting(n) for n in num_target_layers}
    kinds |= {kind: device.drafting(None) for kind, device in devices.items() if kind != "moa"}
    return {name: natural_step_s(drafter) for name, drafter in kinds.items()}


def natural_step_s(drafter: Proposer) -> float:
    """Median seconds of a draft step as fast as this machine can."""
    times = []
    for repeat in range(_NATURAL_REPEATS + 1):
        started = time.perf_counter()
        drafter.propose([RequestText(0, [1] * (16 + repeat))], Chain(_NATURAL_STEPS))
        times.append((time.perf_counter() - started) / _NATURAL_STEPS)
    return sorted(times[1:])[_NATURAL_REPEATS // 2]


async def serve(settings: dict[str, Any], say: Say, hear: Hear) -> None:
    """Run the process of the server."""
    target = load_target(settings["model"], dtype=settings["dtype"])
    drafter = load_drafter(settings["drafter"], target=target)
    options = ServiceOptions(passes=PassOptions(min_pass_s=settings["pass_s"]))
    side = ServerSide(target, settings["pass_s"])
    where = ServerOptions(host=settings["host"], port=0)
    async with TargetServer(TargetService(target, drafter, options), where) as server:
        say({"address": server.url})
        while (job := await hear()) is not None:
            say(await side.answer(job))


def load(bundle: str) -> Device:
    """A device of either kind of bundle."""
    if not is_onnx_bundle(bundle):
        return load_device(bundle)
    from moaspec_edge.device_onnx.onnx_device import OnnxDevice

    return OnnxDevice(bundle)


async def decode(settings: dict[str, Any], say: Say, hear: Hear) -> None:
    """Run the process of the device."""
    devices = {kind: load(path) for kind, path in settings["bundles"].items()}
    side = DeviceSide(devices, settings["address"], settings["prompts"])

    async def ask(what: str) -> float:
        say({"ask": what})
        done = await hear()
        assert done is not None, "the bench ends only after its workers"
        return float(done["at"])

    say({"devices": {kind: asdict(device.target.identity) for kind, device in devices.items()}})
    while (job := await hear()) is not None:
        say({"answer": await side.answer(job, ask)})


def main(role: str, settings: dict[str, Any]) -> None:
    """One process, over its standard streams."""
    torch.set_num_threads(settings["threads"])
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    def say(value: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()

    async def hear() -> dict[str, Any] | None:
        line = await asyncio.to_thread(sys.stdin.readline)
        return json.loads(line) if line else None

    work = {"server": serve, "device": decode}[role]
    asyncio.run(work(settings, say, hear))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
