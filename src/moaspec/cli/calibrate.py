"""`moaspec calibrate`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from moaspec.cli import console
from moaspec.cli.generate import choose_drafter
from moaspec.cli.options import MODEL, Quantize
from moaspec.decode import Chain, CostTable
from moaspec.decode.cost import PRIOR, Acceptance, chain_speedups
from moaspec.errors import InputError
from moaspec.model import MoADrafter
from moaspec.target import load_target


def calibrate(
    model: Annotated[str, typer.Option(help="Target: alias, directory or hub id.")] = MODEL,
    drafter: Annotated[str | None, typer.Option(help="Alias, directory or hub id.")] = None,
    num_target_layers: Annotated[
        int | None, typer.Option(help="N, target layers that the drafter reuses.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    quantize: Quantize = None,
    device: Annotated[str, typer.Option(help="A torch device.")] = "cpu",
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure what each part of a round costs here, so that --tree auto knows what pays.

    The result is kept for this machine, target, drafter, dtype, --quantize, device and number of
    threads, and replaces an earlier one. Let nothing else run meanwhile.

    Example: moaspec calibrate --dtype bfloat16 --threads 2
    """
    console.set_threads(threads)
    console.quiet_libraries()
    with console.status(f"Loading {model}"):
        target = load_target(model, dtype=dtype, device=device, quantize=quantize)
        module = choose_drafter(drafter, model, target)
    if module is not None and not isinstance(module, MoADrafter):
        raise InputError(
            f"{drafter} is a baseline: only Mixture-of-Attentions drafters are measured, because "
            "only they draft by cost. Name one, or leave --drafter out."
        )
    costs = console.measure(target, module, num_target_layers=num_target_layers)
    if as_json:
        console.out.print(json.dumps(asdict(costs)))
        return
    _show(costs, PRIOR if module is None else module.config.acceptance or PRIOR)


def _show(costs: CostTable, prior: tuple[tuple[float, ...], ...]) -> None:
    table = Table("milliseconds", *map(str, costs.tokens), title="tokens in a pass")
    for context, line in zip(costs.contexts, costs.pass_s, strict=True):
        table.add_row(f"target after {context} tokens", *_milliseconds(line))
    table.add_row("head and choice", *_milliseconds(costs.head_s))
    if costs.widths:
        table.add_row("encoding them", *_milliseconds(costs.encode_s))
    console.out.print(table)
    if not costs.widths:
        return
    steps = ", ".join(
        f"{width}: {s}" for width, s in zip(costs.widths, _milliseconds(costs.step_s), strict=True)
    )
    console.out.print(
        f"drafting: {1000 * costs.root_s:.1f} for the first level, then by nodes in it: {steps}"
    )
    speedups = chain_speedups(costs, Acceptance(prior).rates, costs.contexts[0])
    length = int(speedups.argmax())
    console.out.print(
        "auto will draft as far as it pays: by the rates that the checkpoint records "
        f"{Chain(length + 1)} alone would bring {speedups[length]:.2f}x.",
        style="dim",
    )


def _milliseconds(seconds: tuple[float, ...]) -> list[str]:
    return [f"{1000 * s:.1f}" for s in seconds]
