"""`moaspec vllm-check`: tries a drafter inside the vLLM of this machine."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from moaspec_core.cli.options import MODEL, Json, with_options
from moaspec_core.cli.terminal import console
from moaspec_core.cli.terminal.status import loading, status
from moaspec_core.cli.terminal.table import Table, show_table
from moaspec_core.errors import InputError
from moaspec_vllm.cli.vllm_config import (
    DrafterName,
    DraftLength,
    TargetName,
    find_both,
    refuse_empty,
)

NUM_TEXTS = 20
NEW_TOKENS = 64
LAST_LINES = 4000  # characters of a failed engine's log that are shown
SET_HERE = (
    "model",
    "dtype",
    "seed",
    "speculative_config",
    "additional_config",
    "worker_cls",
    "scheduler_cls",
)
"""Arguments of `vllm.LLM` that this command chooses itself."""


@with_options
def vllm_check(
    drafter: DrafterName = MODEL,
    model: TargetName = None,
    num_speculative_tokens: DraftLength = 3,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], "Of the target; auto: vLLM's choice."
    ] = "auto",
    requests: Annotated[str, "Numbers of requests whose steps are timed."] = "1,8,64",
    engine: Annotated[
        str, "Further arguments of vllm.LLM as JSON, for both engines."
    ] = '{"max_model_len": 2048}',
    as_json: Json = False,
) -> None:
    """Try a drafter in this machine's vLLM.

    Two engines run one after the other, plain vLLM and vLLM with the drafter: 20 texts of each are
    compared, and steps are timed with drafts for all requests. The report has what a maintainer
    asks for first: versions, backend, dtype, graphs, failures. If an engine ends, the report has
    what was found until then.

    The exit code is 1 if an engine or the drafter failed, and if texts differ in float32; in 16
    bits they may part at near ties.

    Example: moaspec vllm-check smollm2-135m --dtype float32 --requests 1,8
    """
    refuse_empty({"DRAFTER": drafter, "--model": model})
    numbers = _numbers(requests)
    further = _further(engine, most=max(numbers))
    with loading(drafter):
        from moaspec.evaluate.prompt_suites import read_prompts
        from moaspec_vllm import hooks
        from moaspec_vllm.vllm_settings import VLLMServeSettings

        config, weights = find_both(drafter, model)
        hooks.require_version()
    common = {"dtype": dtype, "seed": 0, "max_num_seqs": max(NUM_TEXTS, *numbers)} | further
    drafted = VLLMServeSettings(
        model=weights,
        drafter=drafter,
        num_speculative_tokens=num_speculative_tokens,
        # Steps of both engines are compared, so each step drafts.
        draft_up_to=common["max_num_seqs"],
    ).engine_arguments
    conversations = [*read_prompts("bundled"), *read_prompts("bundled-code")]
    turns = [turn for prompt in conversations for turn in prompt.turns]
    prompts = [*turns, *(f"{turn} Answer in one sentence." for turn in turns)][:NUM_TEXTS]
    report: dict[str, Any] = {
        "drafter": drafter,
        "target": weights,
        "versions": _versions(hooks.installed_version()),
        "recorded_tau": _recorded_tau(config, num_speculative_tokens),
    }
    answers = _answers(
        {"plain": {"model": weights} | common, "drafted": drafted | common},
        {"prompts": prompts, "tokens": NEW_TOKENS, "requests": numbers},
    )
    report |= _report(answers)
    if as_json:
        console.out.print_json(json.dumps(report))
    else:
        _show(report)
    if failed := report.get("failed"):
        console.error(
            f"vLLM, {failed['engine']}, ended with exit code {failed['code']}; its whole log is "
            f"{failed['log']}. The last lines:\n{failed['last_lines']}"
        )
    if failed or not _holds(report):
        raise typer.Exit(1)


def _numbers(requests: str) -> list[int]:
    try:
        numbers = [int(part) for part in requests.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise InputError(f"--requests takes numbers from 1 on, as in 1,8,64; got {requests!r}.")
    return numbers


def _further(engine: str, *, most: int) -> dict[str, Any]:
    """Arguments of `--engine`; `most`: requests that a step must have room for."""
    try:
        found = json.loads(engine)
    except json.JSONDecodeError as error:
        raise InputError(f"--engine is no JSON: {error}.") from error
    if not isinstance(found, dict):
        raise InputError(
            f'--engine takes an object, as in {{"max_model_len": 2048}}; got {engine}.'
        )
    if chosen := [name for name in SET_HERE if name in found]:
        raise InputError(
            f"--engine cannot set {', '.join(chosen)}: this command chooses that, partly by its "
            "own options --model, --dtype, --num-speculative-tokens."
        )
    seats = found.get("max_num_seqs", most)
    if type(seats) is not int or seats < most:
        raise InputError(
            f"--engine has max_num_seqs {seats!r}, and --requests asks for {most} in a step."
        )
    return found


@dataclass(frozen=True)
class _Failure:
    """An engine that ended without an answer; its log is kept."""

    engine: str
    code: int
    log: Path

    def as_dict(self) -> dict[str, Any]:
        last = self.log.read_text(errors="replace")[-LAST_LINES:]
        return {
            "engine": self.engine,
            "code": self.code,
            "log": str(self.log),
            "last_lines": last,
        }


def _answers(
    engines: Mapping[str, dict[str, Any]], asked: Mapping[str, Any]
) -> dict[str, dict[str, Any] | _Failure]:
    """Answer of each engine, until one fails.

    Args:
        engines: arguments of each.
        asked: the questions to all of them.
    """
    answers = dict[str, dict[str, Any] | _Failure]()
    for name, arguments in engines.items():
        with status(f"Running vLLM, {name}"):
            answers[name] = _run(name, {"arguments": arguments, **asked})
        if isinstance(answers[name], _Failure):
            break
    return answers


def _run(name: str, asked: Mapping[str, Any]) -> dict[str, Any] | _Failure:
    """The answer of an engine in a process of its own, which frees the GPU when it ends."""
    log = Path(tempfile.gettempdir()) / f"vllm-check-{os.getpid()}-{name}.log"
    with tempfile.TemporaryDirectory() as folder:
        request, answer = Path(folder) / "request.json", Path(folder) / "answer.json"
        request.write_text(json.dumps(asked))
        with log.open("w") as stream:
            done = subprocess.run(  # noqa: S603 - this package
                [sys.executable, "-m", "moaspec_vllm.engine_check", str(request), str(answer)],
                stdout=stream,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if not answer.exists():
            return _Failure(name, done.returncode, log)
        found: dict[str, Any] = json.loads(answer.read_text())
    if found["engine"].get("failures"):
        found["engine"]["log"] = str(log)  # it has each failure's reason
    else:
        log.unlink()
    return found


def _report(answers: Mapping[str, dict[str, Any] | _Failure]) -> dict[str, Any]:
    """What the engines' answers say together; where one failed, what is known without it."""
    found: dict[str, Any] = {}
    known = {name: one for name, one in answers.items() if not isinstance(one, _Failure)}
    for one in answers.values():
        if isinstance(one, _Failure):
            found["failed"] = one.as_dict()
    if "plain" in known:
        found["plain_engine"] = known["plain"]["engine"]
        found["steps"] = [
            {"requests": one["requests"], "plain_ms": _rounded(one["step_ms"])}
            for one in known["plain"]["steps"]
        ]
    if len(known) == 2:
        plain, drafted = known["plain"], known["drafted"]
        found["engine"] = drafted["engine"]
        found["texts"] = _compared(plain["texts"], drafted["texts"])
        found["steps"] = [
            _step(*pair) for pair in zip(plain["steps"], drafted["steps"], strict=True)
        ]
    return found


def _compared(plain: list[list[int]], drafted: list[list[int]]) -> dict[str, Any]:
    """How many texts are equal, and where the others part.

    Near ties lie late in a text; an error shows at its beginning.
    """
    parted = [
        next(i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b)
        for pair in zip(plain, drafted, strict=True)
        if pair[0] != pair[1]
    ]
    return {"compared": len(plain), "equal": len(plain) - len(parted), "parted_at": parted}


def _step(plain: Mapping[str, Any], drafted: Mapping[str, Any]) -> dict[str, Any]:
    """Times of both engines' steps; None where one had no room for as many requests."""
    times = plain["step_ms"], drafted["step_ms"]
    tau = drafted["tokens_per_step"]
    measured = tau is not None and None not in times
    return {
        "requests": plain["requests"],
        "plain_ms": _rounded(times[0]),
        "drafted_ms": _rounded(times[1]),
        "tau": _rounded(tau),
        "speed_up": _rounded(tau * times[0] / times[1]) if measured else None,
    }


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 3)


def _holds(report: Mapping[str, Any]) -> bool:
    """Whether nothing failed, and texts are equal where they must be."""
    engine, texts = report["engine"], report["texts"]
    exact = engine["dtype"] == "float32"
    drafts = not engine["failures"] and engine["drafts at the end"]
    return drafts and (not exact or texts["equal"] == texts["compared"])


def _versions(vllm: str) -> dict[str, str]:
    """Versions of what takes part, and the GPUs with their driver."""
    from moaspec_core import __version__

    found = {"vllm": vllm, "moaspec": __version__, "python": platform.python_version()}
    if program := shutil.which("nvidia-smi"):
        fields = ["--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        done = subprocess.run(  # noqa: S603 - a fixed command
            [program, *fields], capture_output=True, text=True, check=False
        )
        found["gpus"] = "; ".join(done.stdout.split("\n")).strip("; ") or done.stderr.strip()
    return found


def _recorded_tau(config: Mapping[str, Any], length: int) -> float | None:
    """Tau of chains of this length by the rates that training recorded; None without any.

    The last rate counts for later depths, too.
    """
    from moaspec.model.checkpoint.moa_config import SECTION, recorded_config

    rates = recorded_config(dict(config)).acceptance_of(0) if SECTION in config else ()
    if not rates:
        return None
    first = [rates[min(depth, len(rates) - 1)][0] for depth in range(length)]
    return round(1 + sum(math.prod(first[:place]) for place in range(1, length + 1)), 2)


def _show(report: Mapping[str, Any]) -> None:
    console.out.print(f"{report['drafter']} for {report['target']}")
    plain, drafted = report.get("plain_engine", {}), report.get("engine", {})
    for name, value in (report["versions"] | (drafted or plain)).items():
        other = plain.get(name, value)
        console.out.print(f"  {name}: {value}" + (f" (plain: {other})" if other != value else ""))
    if texts := report.get("texts"):
        console.out.print(f"{texts['equal']} of {texts['compared']} texts are plain vLLM's.")
        if texts["parted_at"]:
            console.out.print(f"The others part after these tokens: {texts['parted_at']}")
    if report["recorded_tau"] is not None:
        console.out.print(f"tau by the rates that the drafter records: {report['recorded_tau']}")
    heads = ("requests", "plain ms", "with drafts ms", "tau", "speed-up")
    rows = [
        tuple("no room" if value is None else str(value) for value in one.values())
        for one in report.get("steps", [])
    ]
    if rows:
        show_table(Table(heads[: len(rows[0])], rows, "steps, median"))
