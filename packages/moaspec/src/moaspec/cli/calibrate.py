"""`moaspec calibrate`: measures the costs of passes and drafts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from moaspec.cli.loading import load
from moaspec.cli.report_tables import in_ms
from moaspec_core.cli.options import (
    MODEL,
    Device,
    DrafterName,
    Dtype,
    Json,
    LoadOptions,
    Model,
    Quantize,
    Threads,
    with_options,
)
from moaspec_core.cli.terminal import console
from moaspec_core.cli.terminal.interrupts import deferred_interrupts
from moaspec_core.cli.terminal.status import measuring
from moaspec_core.cli.terminal.table import Table, show_table
from moaspec_core.errors import InputError

if TYPE_CHECKING:
    from moaspec.calibration.choose_layers import LayersOption
    from moaspec_core.policy.cost_model import CostTable

BUSY = (
    "Other processes used the CPU meanwhile, so these costs are too high. They are used until a "
    "command that drafts by them finds the CPU free and measures again."
)
KEPT = (
    "Other processes used the CPU meanwhile, so this measurement is dropped. Shown are the earlier "
    "costs, which were measured while the CPU was free; they are still used."
)


@with_options
def calibrate(
    *,
    model: Model = MODEL,
    drafter: DrafterName = None,
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    threads: Threads = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Measure the costs of a round.

    --tree auto chooses drafts by these costs. They are kept for this machine, target, drafter,
    dtype, --quantize, device and number of threads, and replace earlier ones. A drafter with
    several N is measured with each, and --tree auto takes the best.

    Run nothing else meanwhile. Costs measured while other processes use the CPU replace no others,
    and the next command that drafts while the CPU is free measures again.

    Example: moaspec calibrate --threads 2
    """
    asked = LoadOptions(model, drafter, dtype, quantize, threads=threads)
    target, module = load(asked, device=device)
    from moaspec.calibration.choose_layers import layers_options
    from moaspec.calibration.measure_costs import calibrate as measure
    from moaspec.calibration.measure_costs import stored_costs
    from moaspec.model.moa import MoADrafter

    if module is not None and not isinstance(module, MoADrafter):
        raise InputError(
            f"Only Mixture-of-Attentions drafters are measured, because only they draft by cost, "
            f"and {drafter} is another. Name one, or leave --drafter out."
        )
    if target.crowded:
        said = "Other processes use the CPU: the costs will be too high. Better stop them first."
        console.warn(said)
    with measuring() as advance, deferred_interrupts() as stopped:
        measured = measure(target, module, advance=advance, stopped=lambda: bool(stopped))
    costs = stored_costs(target, module) or measured
    options = [] if module is None else layers_options(target, module)
    if as_json:
        console.out.print(json.dumps(_facts(costs, options)))
    else:
        _show(costs, options)
    if measured.busy:
        console.warn(BUSY if costs.busy else KEPT)
    if stopped:
        said = "Stopped: the turns before are kept; they are fewer, so the costs are rougher."
        console.warn(said)
        raise typer.Exit(130)


def _facts(costs: CostTable, options: Sequence[LayersOption]) -> dict[str, Any]:
    """The costs that --tree auto uses, and the expected speed-up with each N."""
    from moaspec.calibration.choose_layers import best_option

    if not options:
        return asdict(costs)
    chosen = best_option(options)
    return {
        **asdict(chosen.costs or costs),
        "num_target_layers": chosen.num_target_layers,
        "speedups": {option.num_target_layers: option.speedup for option in options},
    }


def _show(costs: CostTable, options: Sequence[LayersOption]) -> None:
    show_table(_passes_table(costs, options))
    drafted = [option for option in options if option.costs is not None]
    if drafted:
        console.out.print()
        show_table(_drafting_table(drafted))
    if options:
        _show_promises(options)


def _passes_table(costs: CostTable, options: Sequence[LayersOption]) -> Table:
    """Times of the target and the drafter's encoder, by the tokens of a pass."""
    lines = [
        *zip((f"target after {n} tokens" for n in costs.contexts), costs.pass_s, strict=True),
        ("head and choice", costs.head_s),
        *(
            (f"{_prefix(option, options)}encoding them", option.costs.encode_s)
            for option in options
            if option.costs is not None
        ),
    ]
    rows = [(name, *map(in_ms, line)) for name, line in lines]
    return Table(("tokens in a pass", *map(str, costs.tokens)), rows, "milliseconds")


def _drafting_table(options: Sequence[LayersOption]) -> Table:
    """Times of the levels of a draft, by their nodes."""
    widths = sorted({width for option in options if option.costs for width in option.costs.widths})
    rows = [
        (
            f"{_prefix(option, options)}drafting",
            *map(in_ms, (option.costs.root_s, *map(option.costs.step_s_of, widths))),
        )
        for option in options
        if option.costs
    ]
    return Table(("nodes in a level", "first level", *map(str, widths)), rows, "milliseconds")


def _show_promises(options: Sequence[LayersOption]) -> None:
    from moaspec.calibration.choose_layers import best_option

    for option in options:
        console.print_wrapped(f"{_prefix(option, options)}{_promise(option)}", "dim")
    chosen = best_option(options)
    with_n = f" with N = {chosen.num_target_layers}" if len(options) > 1 else ""
    _, speedup = chosen.best_chain or (0, 0.0)
    decision = (
        f"auto will decode plainly: drafts{with_n} do not pay here ({speedup:.2f}x), unless a text "
        "accepts more of them than expected."
    )
    if speedup > 1:
        decision = f"auto will draft{with_n} as far as it pays: about {speedup:.2f}x is expected."
    console.print_wrapped(decision, "dim")


def _prefix(one: LayersOption, options: Sequence[LayersOption]) -> str:
    """The beginning of a line on one N of several."""
    return f"N = {one.num_target_layers}: " if len(options) > 1 else ""


def _promise(one: LayersOption) -> str:
    from moaspec_core.drafting.tree_shapes import Chain

    if one.best_chain is None:
        return "not measured"
    length, speedup = one.best_chain
    rates = "by the rates that the checkpoint records"
    if not one.recorded:
        rates = "the checkpoint records no rates; by those of other drafts"
    return f"{rates} {Chain(length)} alone would bring {speedup:.2f}x"
