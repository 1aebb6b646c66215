"""`moaspec eval` and `moaspec demo`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from moaspec.cli import console
from moaspec.cli.generate import choose_drafter, describe
from moaspec.cli.options import MODEL
from moaspec.cli.tables import show
from moaspec.decode import load_drafter, start
from moaspec.errors import InputError
from moaspec.evaluate import (
    Method,
    Parts,
    Prompt,
    Report,
    Settings,
    Store,
    measure,
    needed_checkpoints,
    parse_methods,
    read_prompts,
)
from moaspec.evaluate.report import surroundings
from moaspec.evaluate.runner import Encode
from moaspec.evaluate.store import prepare
from moaspec.target import Target, load_target

DEFAULT_METHODS = "hf,plain,moa"


app = typer.Typer(no_args_is_help=False)


@app.callback(invoke_without_command=True)
def evaluate(
    context: typer.Context,
    suite: Annotated[
        str, typer.Option(help="bundled, paper, spec-bench, a JSONL file or a directory of them.")
    ] = "bundled",
    methods: Annotated[
        str, typer.Option(help="Methods to time, commas between; see docs/evaluation.md.")
    ] = DEFAULT_METHODS,
    tau_only: Annotated[
        str,
        typer.Option(help="Methods of which only tau is wanted: decoded in batches, not timed."),
    ] = "",
    limit: Annotated[
        int | None, typer.Option(help="Prompts per suite, spread over its categories.")
    ] = None,
    turns: Annotated[int | None, typer.Option(help="Turns per conversation; all.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per answer.")] = 128,
    repeats: Annotated[int, typer.Option(help="Decodings of each prompt by each method.")] = 1,
    batch: Annotated[
        int, typer.Option(help="Prompts decoded together; above 1, speed is throughput.")
    ] = 1,
    system: Annotated[
        str, typer.Option(help="System prompt: default (the template's own), none, or a text.")
    ] = "default",
    model: Annotated[str, typer.Option(help="Target: alias, directory or hub id.")] = MODEL,
    drafter: Annotated[str | None, typer.Option(help="Of moa: alias, directory or hub id.")] = None,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(help="Of another kind of method: KIND=DIR, for example hf-assisted=DIR."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory for results; the same command resumes what is there."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure decoding methods side by side, and whether their texts are equal.

    Example: moaspec eval --suite prompts/ --limit 20 --dtype bfloat16 --threads 2 --out results
    """
    if context.invoked_subcommand is not None:
        return
    for name, value in (("--limit", limit), ("--turns", turns)):
        if value is not None and value < 1:
            raise InputError(f"{name} must be at least 1, got {value}.")
    settings = Settings(max_new_tokens=max_new_tokens, repeats=repeats, batch=batch)
    prompts = read_prompts(suite, limit=limit, max_turns=turns)
    if out is not None:
        prepare(out)
    console.set_threads(threads)
    console.quiet_libraries()
    sources = Sources(model, drafter, _checkpoints(checkpoint or []), dtype, device)
    timed, untimed = _names(methods), _names(tau_only)
    with console.err.status(f"Loading {model}"):
        loaded = load_methods([*timed, *untimed], sources)
    facts = {**asdict(settings), **asdict(sources), "system": system, **surroundings()}
    report = _measured(
        loaded[: len(timed)],
        prompts,
        settings,
        tau_only=loaded[len(timed) :],
        store=Store(out, facts),
        system=system,
    )
    result = {"settings": facts, "suite": suite, **report.as_json()}
    if out is not None:
        (out / "report.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if as_json:
        console.out.print(json.dumps(result), markup=False)
    else:
        show(report)
    if not report.lossless:
        raise typer.Exit(1)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _checkpoints(options: Sequence[str]) -> dict[str, str]:
    pairs = [option.partition("=") for option in options]
    wrong = [option for option, pair in zip(options, pairs, strict=True) if not pair[2]]
    if wrong:
        raise InputError(f"--checkpoint must be KIND=DIR, got {wrong[0]!r}.")
    return {kind: path for kind, _, path in pairs}


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
        methods = load_methods(_names(DEFAULT_METHODS), Sources(MODEL, dtype=dtype))
    prompts = read_prompts("bundled", limit=3)
    console.out.print(f"[bold]{prompts[0].turns[0]}[/]")
    console.out.print("[dim]green: drafted and accepted; plain: the target's own choice[/]\n")
    _stream_one(methods[-1], prompts[0], max_new_tokens)
    report = _measured(methods, prompts, Settings(max_new_tokens=max_new_tokens))
    show(report)
    if not report.lossless:
        raise typer.Exit(1)


@dataclass(frozen=True)
class Sources:
    """What to load."""

    model: str
    drafter: str | None = None
    checkpoints: Mapping[str, str] = field(default_factory=dict)
    dtype: str = "float32"
    device: str = "cpu"


def load_methods(names: Sequence[str], sources: Sources) -> list[Method]:
    """The target, what the methods need beside it, and the methods."""
    target = load_target(sources.model, dtype=sources.dtype, device=sources.device)
    return parse_methods(
        names,
        Parts(
            target=target,
            checkpoints=_load_checkpoints(needed_checkpoints(names), sources, target),
            stock=lambda: load_target(
                sources.model, dtype=sources.dtype, device=sources.device, packed=False
            ),
        ),
    )


def _load_checkpoints(kinds: set[str], sources: Sources, target: Target) -> dict[str, Any]:
    """Drafters by kind of method; another target where transformers drafts with one."""
    loaded: dict[str, Any] = {}
    if "moa" in kinds:
        loaded["moa"] = choose_drafter(sources.drafter, sources.model, target)
    for kind, path in sources.checkpoints.items():
        if kind == "hf-assisted":
            loaded[kind] = load_target(
                path, dtype=sources.dtype, device=sources.device, packed=False
            )
        elif kind in kinds:
            loaded[kind] = load_drafter(path, target=target)
    return loaded


def _stream_one(method: Method, prompt: Prompt, max_new_tokens: int) -> None:
    target = method.target
    prompt_ids = console.chat_ids(target, prompt.turns[0])
    engine, (result,) = start(
        target, [prompt_ids], drafter=method.drafter, max_new_tokens=max_new_tokens
    )
    printer = console.TokenPrinter(target)
    stopped = console.show_events(engine.run(), printer)
    printer.close()
    console.out.print(describe(result) + "\n", style="dim")
    if stopped:
        raise typer.Exit(130)


def _measured(
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    settings: Settings,
    *,
    tau_only: Sequence[Method] = (),
    store: Store | None = None,
    system: str = "default",
) -> Report:
    columns = (
        TextColumn("measuring"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    total = (len(methods) + len(tau_only)) * sum(len(prompt.turns) for prompt in prompts)
    with Progress(*columns, console=console.err, transient=True) as bar:
        task = bar.add_task("", total=total)
        return measure(
            methods,
            prompts,
            chat_encoder(methods[0].target, system),
            settings,
            tau_only=tau_only,
            store=store,
            advance=lambda: bar.advance(task),
        )


def chat_encoder(target: Target, system: str) -> Encode:
    """How turns and answers become prompt ids."""
    first = {"none": [{"role": "system", "content": ""}], "default": []}.get(
        system, [{"role": "system", "content": system}]
    )

    def encode(turns: Sequence[str], answers: Sequence[Sequence[int]]) -> list[int]:
        messages = list(first)
        tokenizer: Any = target.tokenizer
        for turn, answer in zip_longest(turns, answers):
            messages.append({"role": "user", "content": turn})
            if answer is not None:
                text = tokenizer.decode(answer, skip_special_tokens=True)
                messages.append({"role": "assistant", "content": text})
        return console.message_ids(target, messages)

    return encode
