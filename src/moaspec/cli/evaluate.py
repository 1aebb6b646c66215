"""`moaspec eval` and `moaspec demo`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from moaspec.cli import console
from moaspec.cli.generate import MODEL, choose_drafter, describe
from moaspec.decode import acceptance_by_depth, local_engine
from moaspec.errors import InputError
from moaspec.evaluate import Method, Prompt, Report, measure, parse_methods, read_prompts
from moaspec.evaluate.equality import NEAR_TIE
from moaspec.target import load_target

DEFAULT_METHODS = "hf,plain,moa"


def evaluate(
    suite: Annotated[
        str, typer.Option(help="bundled, a JSONL file or a directory of them.")
    ] = "bundled",
    methods: Annotated[
        str,
        typer.Option(
            help="hf, plain, moa, moa@chain:4, moa@tree:6x8x62, moa@auto+copy; commas between."
        ),
    ] = DEFAULT_METHODS,
    limit: Annotated[int | None, typer.Option(help="Prompts per suite.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 128,
    model: Annotated[str, typer.Option(help="Target: alias, directory or hub id.")] = MODEL,
    drafter: Annotated[str | None, typer.Option(help="Alias, directory or hub id.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for report.json.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure decoding methods side by side, and whether their texts are equal.

    Example: moaspec eval --suite prompts/ --limit 20 --dtype bfloat16 --threads 2 --out results
    """
    if max_new_tokens < 1 or (limit is not None and limit < 1):
        raise InputError("--max-new-tokens and --limit must be at least 1.")
    prompts = read_prompts(suite, limit=limit)
    console.set_threads(threads)
    console.quiet_libraries()
    with console.err.status(f"Loading {model}"):
        names = [name.strip() for name in methods.split(",") if name.strip()]
        chosen = _load_methods(names, model, drafter, dtype)
    _calibrate(chosen)
    report = _measured(chosen, prompts, max_new_tokens)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "report.json").write_text(json.dumps(report.as_json(), indent=1) + "\n")
    if as_json:
        console.out.print(json.dumps(report.as_json()), markup=False)
    else:
        show(report)
    if not all(outcome.lossless for outcome in report.outcomes):
        raise typer.Exit(1)


def demo(
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 64,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
) -> None:
    """Show speculative generation on a real model next to plain decoding.

    Example: moaspec demo
    """
    console.set_threads(threads)
    console.quiet_libraries()
    with console.err.status(f"Loading {MODEL} (the first time its weights are unpacked, 30 s)"):
        methods = _load_methods(DEFAULT_METHODS.split(","), MODEL, None, dtype)
    _calibrate(methods)
    prompts = read_prompts("bundled", limit=3)
    console.out.print(f"[bold]{prompts[0].text}[/]")
    console.out.print("[dim]green: drafted and accepted; plain: the target's own choice[/]\n")
    _stream_one(methods[-1], prompts[0], max_new_tokens)
    report = _measured(methods, prompts, max_new_tokens)
    show(report)
    if not all(outcome.lossless for outcome in report.outcomes):
        raise typer.Exit(1)


def _calibrate(methods: Sequence[Method]) -> None:
    """Measure the machine once if a method leaves the shape to it."""
    for method in methods:
        if method.shape == "auto":
            console.shaping(method.target, method.drafter)


def _load_methods(
    names: Sequence[str], model: str, drafter: str | None, dtype: str
) -> list[Method]:
    target = load_target(model, dtype=dtype)
    needed = any(name.startswith("moa") for name in names)
    return parse_methods(
        names,
        target,
        choose_drafter(drafter, model, target) if needed else None,
        stock=lambda: load_target(model, dtype=dtype, packed=False),
    )


def _stream_one(method: Method, prompt: Prompt, max_new_tokens: int) -> None:
    target = method.target
    engine = local_engine(target, method.drafter)
    shaping = console.shaping(target, method.drafter)
    handle = engine.add(
        console.chat_ids(target, prompt.text),
        max_new_tokens=max_new_tokens,
        stop_token_ids=target.stop_token_ids,
        shape=shaping.policy(),
        free_branches=shaping.branches(),
    )
    result = engine.result(handle)
    printer = console.TokenPrinter(target)
    while engine.num_active:
        for event in engine.step():
            printer.show(event)
    printer.close()
    console.out.print(describe(result) + "\n", style="dim")


def _measured(methods: Sequence[Method], prompts: Sequence[Prompt], max_new_tokens: int) -> Report:
    columns = (
        TextColumn("measuring"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console.err, transient=True) as bar:
        task = bar.add_task("", total=len(methods) * len(prompts))
        return measure(
            methods,
            prompts,
            lambda text: console.chat_ids(methods[0].target, text),
            max_new_tokens=max_new_tokens,
            advance=lambda: bar.advance(task),
        )


def show(report: Report) -> None:
    """Print the table, and what its last column means."""
    facts = report.as_json()
    title = (
        f"{facts['target']}, {facts['dtype']}, {facts['threads']} threads, greedy, "
        f"{len(report.prompts)} prompts"
    )
    table = Table(title=title)
    table.add_column("method", no_wrap=True)
    for heading in ("tokens/s", f"speed-up over {report.baseline}", "tau"):
        table.add_column(heading)
    table.add_column("acceptance by depth")
    table.add_column(f"tokens equal to {report.baseline}'s")
    for outcome in report.outcomes:
        speedup = report.speedup(outcome)
        kinds = [item.kind for item in outcome.equality]
        equal = f"{kinds.count('identical')} of {len(kinds)}"
        if ties := kinds.count("near_tie"):
            equal += f", {ties} part at a tie"
        if wrong := kinds.count("different"):
            equal += f", {wrong} DIFFERENT"
        table.add_row(
            outcome.method.name,
            f"{outcome.tokens_per_s:.1f}",
            "not shown: texts differ" if speedup is None else f"{speedup:.2f}x",
            "" if outcome.tau is None else f"{outcome.tau:.2f}",
            " ".join(f"{share:.0%}" for share in acceptance_by_depth(outcome.results)),
            equal,
        )
    console.out.print(table)
    tie = NEAR_TIE[report.outcomes[0].method.target.dtype]
    console.out.print(
        "Equal means: the same token ids; or the first difference sits where the target's own "
        f"best logits are closer than {tie:g}, so that rounding decides between them, as it also "
        "does between two plain decodings whose passes have different widths.",
        style="dim",
    )
    multiple = report.by_suite(report.outcomes[0])
    if len(multiple) > 1:
        _show_suites(report, list(multiple))


def _show_suites(report: Report, suites: list[str]) -> None:
    table = Table()
    table.add_column("tau by suite", no_wrap=True)
    for suite in suites:
        table.add_column(suite)
    for outcome in report.outcomes:
        parts = report.by_suite(outcome)
        if outcome.tau is not None:
            table.add_row(outcome.method.name, *(f"{parts[s].tau or 0:.2f}" for s in suites))
    console.out.print(table)
