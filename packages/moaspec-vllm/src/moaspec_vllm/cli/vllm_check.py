"""`moaspec vllm-check`: tries a drafter inside the vLLM of this machine."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from moaspec_core.cli.options import MODEL, Json, with_options
from moaspec_core.cli.terminal import console
from moaspec_core.cli.terminal.status import loading, status
from moaspec_core.cli.terminal.table import Table, show_table
from moaspec_core.errors import InputError, ServingError
from moaspec_vllm.cli.vllm_config import DrafterName, DraftLength, TargetName

NUM_TEXTS = 20
NEW_TOKENS = 64
LAST_LINES = 4000  # characters of a failed engine's log that are shown


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
    asks for first: versions, backend, dtype, failures. With float32 all texts must be equal, else
    the exit code is 1; in 16 bits they may part at near ties.

    Example: moaspec vllm-check smollm2-135m --dtype float32 --requests 1,8
    """
    numbers = _numbers(requests)
    further = _further(engine)
    with loading(drafter):
        from moaspec.evaluate.prompt_suites import read_prompts
        from moaspec.target.registry import find_weights
        from moaspec_vllm import hooks
        from moaspec_vllm.cli.vllm_config import recorded_target, usable_config
        from moaspec_vllm.vllm_settings import VLLMServeSettings

        hooks.require_version()
        config = usable_config(drafter)
        weights = find_weights(recorded_target(drafter, config) if model is None else model)
    drafted = VLLMServeSettings(
        model=weights, drafter=drafter, num_speculative_tokens=num_speculative_tokens
    ).engine_arguments
    # Steps of both engines are compared, so each step drafts.
    schedule = [[1, 1 << 16, num_speculative_tokens]]
    drafted["speculative_config"]["num_speculative_tokens_per_batch_size"] = schedule
    conversations = [*read_prompts("bundled"), *read_prompts("bundled-code")]
    turns = [turn for prompt in conversations for turn in prompt.turns]
    prompts = [*turns, *(f"{turn} Answer in one sentence." for turn in turns)][:NUM_TEXTS]
    common = {"dtype": dtype, "seed": 0, "max_num_seqs": max(NUM_TEXTS, *numbers)} | further
    answers = {}
    for name, arguments in (("plain", {"model": weights}), ("drafted", drafted)):
        asked = {
            "arguments": arguments | common,
            "prompts": prompts,
            "tokens": NEW_TOKENS,
            "requests": numbers,
        }
        with status(f"Running vLLM, {name}"):
            answers[name] = _run(asked)
    report = _report(drafter, weights, hooks.installed_version(), answers)
    if as_json:
        console.out.print_json(json.dumps(report))
    else:
        _show(report)
    texts = report["texts"]
    if report["engine"]["dtype"] == "float32" and texts["equal"] < texts["compared"]:
        raise typer.Exit(1)


def _numbers(requests: str) -> list[int]:
    try:
        numbers = [int(part) for part in requests.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise InputError(f"--requests takes numbers from 1 on, as in 1,8,64; got {requests!r}.")
    return numbers


def _further(engine: str) -> dict[str, Any]:
    try:
        found = json.loads(engine)
    except json.JSONDecodeError as error:
        raise InputError(f"--engine is no JSON: {error}.") from error
    if not isinstance(found, dict):
        raise InputError(
            f'--engine takes an object, as in {{"max_model_len": 2048}}; got {engine}.'
        )
    return found


def _run(asked: dict[str, Any]) -> dict[str, Any]:
    """The answer of an engine in a process of its own, which frees the GPU when it ends."""
    with tempfile.TemporaryDirectory() as folder:
        request, answer = Path(folder) / "request.json", Path(folder) / "answer.json"
        request.write_text(json.dumps(asked))
        done = subprocess.run(  # noqa: S603 - this package
            [sys.executable, "-m", "moaspec_vllm.engine_check", str(request), str(answer)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if not answer.exists():
            raise ServingError(f"vLLM did not run:\n{done.stdout[-LAST_LINES:]}")
        found: dict[str, Any] = json.loads(answer.read_text())
        return found


def _report(drafter: str, target: str, version: str, answers: dict[str, Any]) -> dict[str, Any]:
    plain, drafted = answers["plain"], answers["drafted"]
    pairs = list(zip(plain["texts"], drafted["texts"], strict=True))
    # Where the others part: at a near tie late in a text, or by an error at its beginning.
    parted = [
        next(i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b)
        for pair in pairs
        if pair[0] != pair[1]
    ]
    steps = [
        {
            "requests": one["requests"],
            "plain_ms": round(one["step_ms"], 3),
            "drafted_ms": round(two["step_ms"], 3),
            "tau": round(two["tokens_per_step"], 3),
            "speed_up": round(two["tokens_per_step"] * one["step_ms"] / two["step_ms"], 3),
        }
        for one, two in zip(plain["steps"], drafted["steps"], strict=True)
    ]
    return {
        "drafter": drafter,
        "target": target,
        "versions": {"vllm": version, "python": platform.python_version(), **_own_version()},
        "engine": drafted["engine"],
        "texts": {"compared": len(pairs), "equal": len(pairs) - len(parted), "parted_at": parted},
        "steps": steps,
    }


def _own_version() -> dict[str, str]:
    from moaspec_core import __version__

    return {"moaspec": __version__}


def _show(report: dict[str, Any]) -> None:
    facts = report["versions"] | report["engine"]
    console.out.print(f"{report['drafter']} for {report['target']}")
    for name, value in facts.items():
        console.out.print(f"  {name}: {value}")
    texts = report["texts"]
    console.out.print(f"{texts['equal']} of {texts['compared']} texts are plain vLLM's.")
    if texts["parted_at"]:
        console.out.print(f"The others part after these tokens: {texts['parted_at']}")
    heads = ("requests", "plain ms", "with drafts ms", "tau", "speed-up")
    rows = [tuple(str(value) for value in one.values()) for one in report["steps"]]
    show_table(Table(heads, rows, "steps, median"))
