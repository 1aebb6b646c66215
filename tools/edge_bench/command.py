"""The command `moaspec edge-bench`; `moaspec_core.cli.checkout` adds it in a checkout."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from moaspec.evaluate.prompt_suites import read_prompts
from moaspec_core.bundled import bundled_drafters
from moaspec_core.cli.options import MODEL, Json, Model
from moaspec_core.cli.terminal import console
from moaspec_core.cli.terminal.progress_bar import ProgressBar
from moaspec_core.cli.terminal.status import loading
from moaspec_core.cli.terminal.table import Table, show_table
from moaspec_core.errors import InputError
from moaspec_core.support.extras import require
from moaspec_core.support.paths import require_writable_file

if TYPE_CHECKING:
    from edge_bench.bench import EdgeSettings

COLUMNS = (
    "mode",
    *("speed", "tokens/s", "ms/token", "by formula", "off", "pays", "over plain"),
    *("passes/token", "bytes up/token", "bytes down/token", "first token, ms (mean)", "text"),
)
CUT_TIMES = {
    "noticed_s": "noticed",
    "next_s": "next token",
    "back_s": "back",
    "back_limit_s": "at most",
}
TERMINATED = 128 + signal.SIGTERM
AGREEMENT = 0.75  # share of right drafts of replay
ALONE = 24  # tokens without a link, after a cut
T = TypeVar("T")


def edge_bench(
    model: Model = MODEL,
    drafter: Annotated[
        str | None,
        typer.Option(help="Drafter: alias, directory or hub id; default: the bundled one."),
    ] = None,
    link: Annotated[
        str, typer.Option(help="none, lan, 4g, 5g, commas between; a jitter model after a colon.")
    ] = "lan,5g,4g",
    modes: Annotated[str, typer.Option(help="plain, server, sync, ahead.")] = (
        "plain,server,sync,ahead"
    ),
    drafters: Annotated[str, typer.Option(help="moa, replay.")] = "moa,replay",
    num_target_layers: Annotated[
        str | None,
        typer.Option(help="The N of moa, commas between; default: the drafter's first."),
    ] = None,
    server_speed: Annotated[
        str, typer.Option(help="How many times the device's the server's speed is.")
    ] = "3",
    pass_ms: Annotated[float, typer.Option(help="Least time of a server's pass.")] = 0.0,
    limit: Annotated[int, typer.Option(help="Prompts of those in the package.", min=1)] = 3,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per prompt.", min=1)] = 64,
    cut_after: Annotated[
        int | None, typer.Option(help="Cut the link after this many tokens, instead of timing.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File for the JSON.")] = None,
    as_json: Json = False,
) -> None:
    """Measure client-server decoding.

    Compares it with its alternatives over emulated links, on Linux, as root. Server and device are
    processes of their own, of one CPU thread each, in network namespaces with a relay between them
    that delays, loses and limits real packets. Beside each measurement stands what the formula of
    docs/remote.md predicts, and whether the case pays beside plain streaming by it. `speed` is the
    server's over the device's; passes and bytes are per token.

    Example: moaspec edge-bench --link lan,4g --drafter smollm2-135m-n3 --out edge.json
    """
    require("`moaspec edge-bench`", "moaspec-edge[server]")
    name = drafter or (model if model in bundled_drafters() else None)
    if name is None:
        raise InputError(f"No drafter is bundled for {model}; name one with --drafter.")
    if out is not None:
        require_writable_file("--out", out)
    layers: tuple[int, ...] = ()  # the drafter's first
    if num_target_layers is not None:
        layers = _numbers("--num-target-layers", num_target_layers, int)
    speeds = _numbers("--server-speed", server_speed, float)
    with loading(model):
        from edge_bench.bench import EdgeSettings
        from moaspec.backends.load import chosen_dtype
        from moaspec_edge.device.bundle import export_bundle
    # Leave through the context managers, which end processes and remove namespaces.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    with tempfile.TemporaryDirectory() as scratch:
        bundles = {"moa": str(Path(scratch) / "bundle")}
        settings = EdgeSettings(
            model=model,
            drafter=name,
            bundles=bundles,
            prompts=tuple(prompt.turns[0] for prompt in read_prompts("bundled", limit=limit)),
            links=tuple(_list(link)),
            modes=tuple(_list(modes)),
            drafters=tuple(_list(drafters)),
            num_target_layers=layers or (0,),
            server_speeds=speeds,
            agreement=AGREEMENT,
            pass_s=pass_ms / 1e3,
            max_new_tokens=max_new_tokens,
        )
        with console.err.status("Exporting the device bundle"):
            most = max(layers, default=None)
            export_bundle(model, name, bundles["moa"], num_target_layers=most)
            known = _known(bundles["moa"], layers)
        with loading(model):  # kernels are compiled once all names are known to be right
            settings = replace(settings, num_target_layers=known, dtype=chosen_dtype("auto"))
        report = _run(settings, cut_after)
    if as_json:
        console.out.print(json.dumps(report))
    elif cut_after is None:
        _show(report)
    else:
        show_table(_cuts_table(report))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if report["interrupted"]:
        console.warn("Stopped: these are the cases before.")
        raise typer.Exit(130)


def _run(settings: EdgeSettings, cut_after: int | None) -> dict[str, Any]:
    """Measure with a progress bar of cases."""
    from edge_bench.bench import run_edge_bench
    from edge_bench.cut_bench import run_cut_bench

    begun = count()
    with ProgressBar("") as bar:

        def begin(name: str, total: int) -> None:
            bar.update(description=name, total=total, completed=next(begun))

        if cut_after is None:
            return run_edge_bench(settings, begin)
        return run_cut_bench(settings, after=cut_after, alone=ALONE, advance=begin)


def _known(bundle: str, layers: tuple[int, ...]) -> tuple[int, ...]:
    """These N, if the bundle's drafter has them all; for none, its own first.

    Raises:
        InputError: it lacks one.
    """
    from moaspec_edge.device.bundle import load_device

    device = load_device(bundle)
    for layer in layers:
        device.drafting(layer)
    return layers or (device.info.drafter["num_target_layers"][0],)


def _list(text: str) -> list[str]:
    return [one.strip() for one in text.split(",") if one.strip()]


def _numbers(option: str, text: str, kind: Callable[[str], T]) -> tuple[T, ...]:
    """Numbers with commas between.

    Raises:
        InputError: something else, or none.
    """
    try:
        found = tuple(kind(one) for one in _list(text))
    except ValueError:
        found = ()
    if not found:
        raise InputError(f"{option} takes numbers with commas between, such as 1,3; got {text!r}.")
    return found


def _show(report: dict[str, Any]) -> None:
    for name, found in report["links"].items():
        show_table(_link_table(name, found))
        console.out.print()


def _link_table(name: str, found: dict[str, Any]) -> Table:
    """A row per case."""
    times = f"round trip {1e3 * found['rtt_s']:.1f} ms, pass {1e3 * found['pass_s']:.0f} ms"
    return Table(COLUMNS, [_cells(row) for row in found["rows"]], f"{name}: {times}")


def _cells(row: dict[str, Any]) -> list[str]:
    measured = row["measured"]
    first = sum(measured["first_token_s"]) / len(measured["first_token_s"])
    return [
        row["name"],
        f"{row['server_speed']:g}",
        f"{measured['tokens_per_s']:.1f}",
        f"{1e3 * row['per_token_s']:.1f}",
        f"{1e3 * row['predicted_s']:.1f}",
        f"{100 * row['off']:+.0f}%",
        "yes" if row["pays"] else "no",
        f"{row['over_plain']:.2f}",
        f"{measured['passes_per_token']:.2f}",
        f"{measured['bytes_up_per_token']:.0f}",
        f"{measured['bytes_down_per_token']:.0f}",
        f"{1e3 * first:.0f}",
        "same" if row["same_text"] else "differs",
    ]


def _cuts_table(report: dict[str, Any]) -> Table:
    """A row per cut of a link."""
    title = "times in seconds; before and after the cut in tokens/s"
    last = ("before", "after", "alone", "kept", "agrees", "text")
    headings = ("link", *CUT_TIMES.values(), *last)
    rows = [
        (
            name,
            *(_number(cut[key], "{:.2f}") for key in CUT_TIMES),
            *(_number(cut[key], "{:.1f}") for key in ("before_per_s", "after_per_s")),
            str(len(cut["alone"])),
            str(cut["kept"]),
            _number(cut["agreement"], "{:.2f}"),
            "same" if cut["same_text"] else "differs",
        )
        for name, cuts in report["links"].items()
        for cut in cuts
    ]
    return Table(headings, rows, title, grouped=True)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
