"""The table of `moaspec train --dry-run`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from moaspec_core.cli.terminal.table import Table

if TYPE_CHECKING:
    from moaspec_train.reports.plan import GPUs, Plan
    from moaspec_train.run_config import TrainConfig

PLACES = {"publish": "published forms", "vllm": "vLLM", "device": "device bundle"}


def plan_table(
    plan: Plan, config: TrainConfig, gpus: GPUs | None, cpu_operations_per_s: float = 0.0
) -> Table:
    """The plan as a table of two columns.

    Args:
        gpus: that it will train on; None for a CPU.
        cpu_operations_per_s: of linear layers; 0 shows no time on a CPU.
    """
    rows = [
        ("drafter", f"{_count(plan.num_parameters)} parameters: {_counts(plan.parameters)}"),
        ("target", f"{config.target}, {_count(plan.target_parameters)} parameters"),
        *_memory(plan, gpus),
        *_disk(plan, config),
        *_time(plan, gpus, cpu_operations_per_s),
        *_places(plan),
    ]
    return Table(("", ""), rows)


def _memory(plan: Plan, gpus: GPUs | None) -> Iterator[tuple[str, str]]:
    from moaspec_train.reports.plan import GPUS

    total = sum(plan.memory.values())
    parts = ", ".join(f"{name} {_size(size)}" for name, size in plan.memory.items() if size)
    told = f"{_size(total)}: {parts} (of {plan.pass_tokens:,} tokens at most)"
    if gpus is None:
        yield "memory a process", told
        return
    room = GPUS[gpus.name][1]
    fits = "fits" if total < room else "DOES NOT FIT: lower pass_tokens"
    yield "GPU memory", f"{told}; {gpus.name} has {_size(room)}: {fits}"
    yield "host memory", f"{_size(plan.host_memory)} a process while it loads or saves"


def _disk(plan: Plan, config: TrainConfig) -> Iterator[tuple[str, str]]:
    frozen = config.frozen_lsa
    used = {"activation_cache": config.activation_cache and frozen < 1, "frozen_lsa": frozen > 0}
    for name, size in plan.cache_bytes_per_token.items():
        total = plan.cache_bytes.get(name)
        shown = f"{_size(1e6 * size)} a million" if total is None else f"{_size(total)} in all"
        is_on = "on" if used[name] else "off"
        yield f"disk, {name}", f"{is_on}: {size:,} bytes a token of the data, {shown}"
    yield (
        "disk, output",
        f"state {_size(plan.state_bytes)}, twice while it is saved; checkpoint "
        f"{_size(plan.checkpoint_bytes)}",
    )


def _time(plan: Plan, gpus: GPUs | None, cpu_operations_per_s: float) -> Iterator[tuple[str, str]]:
    from moaspec_train.reports.plan import UTILISATION

    most = " at most"
    if plan.data_tokens is not None:
        most = ""
        yield "data", f"{plan.data_tokens:,} tokens"
    yield (
        "tokens",
        f"{_count(plan.read_tokens)}{most} in {plan.steps:,} steps, {_count(plan.loss_tokens)} of "
        "them with loss",
    )
    if gpus is not None:
        yield (
            "time, by formula",
            f"{plan.hours(gpus.operations_per_s):,.1f} h on {gpus.count} x {gpus.name} at "
            f"{UTILISATION:.0%} of its bf16 operations ({plan.operations:.1e} in all)",
        )
    elif cpu_operations_per_s:
        yield (
            "time, by formula",
            f"at least {plan.hours(cpu_operations_per_s):,.1f} h on this CPU: "
            f"{plan.operations:.1e} operations, and linear layers do "
            f"{cpu_operations_per_s:.1e} a second at most",
        )


def _places(plan: Plan) -> Iterator[tuple[str, str]]:
    for place, problem in plan.problems.items():
        yield PLACES[place], "yes" if problem is None else f"no. {problem}"


def _counts(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {_count(number)}" for name, number in parts.items())


def _count(number: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            value = number / size
            return f"{value:.3g}{unit}" if value < 1e3 else f"{value:,.0f}{unit}"
    return f"{number:g}"


def _size(num_bytes: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes / 1e3:.3g} KB"
