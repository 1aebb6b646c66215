"""The commands `moaspec data stats` and `moaspec data overlap`."""

from __future__ import annotations

import dataclasses
import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moaspec.data.conversations import ReadReport, read_conversations
from moaspec.data.rows import read_rows, require_sources
from moaspec_core.cli.options import MODEL, Json, Model, with_options
from moaspec_core.cli.terminal import console
from moaspec_core.cli.terminal.interrupts import deferred_interrupts
from moaspec_core.cli.terminal.status import status
from moaspec_core.cli.terminal.table import Table, show_table
from moaspec_core.errors import InputError
from moaspec_core.support.paths import require_writable_file
from moaspec_train.cli.row_options import MalformedRows, Skip, Sources, tell_unused
from moaspec_train.cli.writing_options import read_spec

if TYPE_CHECKING:
    from moaspec.data.overlap import Overlap
    from moaspec.target.spec import TargetSpec
    from moaspec_train.dataset.statistics import Statistics

SHOWN_FINDINGS = 20
SHARED_WORDS = 8  # in a row that count as overlap


@with_options
def stats(
    sources: Sources,
    model: Model = MODEL,
    max_length: Annotated[
        int, typer.Option(help="Tokens of an example; longer ones are cut.", min=1)
    ] = 2048,
    skip_malformed: Skip = False,
    as_json: Json = False,
) -> None:
    """Count the tokens of training data.

    Prints lengths, coverage of trimmed vocabularies, and the size of the activation cache.

    Example: moaspec data stats responses.jsonl.gz
    """
    require_sources(sources)
    target = read_spec(model)
    malformed, report = MalformedRows(skip=skip_malformed), ReadReport()
    from moaspec_train.dataset.read_examples import read_examples
    from moaspec_train.dataset.statistics import statistics

    with status("Reading examples"), deferred_interrupts() as stopped:
        examples = read_examples(
            sources,
            vocab_size=target.vocab_size,
            max_length=max_length,
            tokenizer=target.tokenizer,
            stop_token_ids=target.stop_token_ids,
            on_malformed=malformed,
            report=report,
            stopped=lambda: bool(stopped),
        )
    info = statistics(examples, target.identity, always=target.stop_token_ids)
    if as_json:
        row = {**dataclasses.asdict(info), "cache_bytes": info.cache_bytes}
        row |= {"unused": vars(report), "complete": not stopped}
        console.out.print(json.dumps(row))
    else:
        _show(info)
        tell_unused(report)
    malformed.tell()
    _leave_if(bool(stopped))


@with_options
def overlap(
    sources: Sources,
    against: Annotated[
        list[str], typer.Option(help="File, or directory of files, with prompts to measure on.")
    ],
    model: Annotated[
        str | None, typer.Option(help="Target whose tokenizer decodes rows without text.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="New JSONL file for the rows without overlap.")
    ] = None,
    skip_malformed: Skip = False,
    as_json: Json = False,
) -> None:
    """Find rows that share words with prompts.

    The rows are training data, the prompts those of an evaluation, and eight words in a row count.
    Exit code 1 if there are any. With --out all other rows are written unchanged, and the exit code
    is 0.

    Example: moaspec data overlap responses.jsonl.gz --against prompts/ --out clean.jsonl
    """
    from moaspec.data.overlap import overlaps

    require_sources([*sources, *against])
    if out is not None and out.exists():
        raise InputError(f"{out} exists; name another file.")
    if out is not None:
        require_writable_file("--out", out)
    malformed = MalformedRows(skip=skip_malformed)
    target = read_spec(model) if model else None
    found: list[Overlap] = []
    stopped = True
    with suppress(KeyboardInterrupt), status("Comparing rows with the prompts"):
        for finding in overlaps(
            read_conversations(sources, malformed),
            read_conversations(against, malformed),
            size=SHARED_WORDS,
            decode=lambda ids: _decoded(target, ids),
        ):
            found.append(finding)
        stopped = False
    if as_json:
        rows = [dataclasses.asdict(finding) for finding in found]
        info = {"size": SHARED_WORDS, "overlaps": rows, "complete": not stopped}
        console.out.print(json.dumps(info))
    else:
        for finding in found[:SHOWN_FINDINGS]:
            console.print_wrapped(f"{finding.where} and {finding.against}: {finding.words}")
        said = f"{len(found)} rows share {SHARED_WORDS} words in a row with a prompt."
        console.print_wrapped(said)
    malformed.tell()
    _leave_if(stopped)
    if out is not None:
        _write_others(out, sources, {finding.where for finding in found})
    elif found:
        raise typer.Exit(1)


def _leave_if(stopped: bool) -> None:
    if stopped:
        said = "Stopped: this is what the rows before hold. Nothing is written."
        console.warn(said)
        raise typer.Exit(130)


def _write_others(out: Path, sources: list[str], left_out: set[str]) -> None:
    """The rows of these sources but some; malformed ones were told of before."""
    from moaspec.model.checkpoint.weight_files import replace_file

    def write(scratch: Path) -> None:
        with scratch.open("w", encoding="utf-8") as file:
            for source in sources:
                for row in read_rows(source, lambda _: None):
                    if row.where not in left_out:
                        # Tables hold dates, which JSON does not.
                        file.write(json.dumps(row.value, default=str) + "\n")

    replace_file(out, write)


def _decoded(target: TargetSpec | None, ids: tuple[int, ...]) -> str:
    if target is None or target.tokenizer is None:
        raise InputError("Some rows have token ids only: name the target with --model.")
    tokenizer: Any = target.tokenizer
    return tokenizer.decode(ids, skip_special_tokens=True)


def _show(info: Statistics) -> None:
    console.print_wrapped(
        f"{info.examples} examples with {info.responses} responses: {info.tokens} tokens, "
        f"{info.response_tokens} of them responses', {info.distinct_tokens} different ones."
    )
    lengths = ", ".join(f"{p}% up to {length}" for p, length in info.lengths.items())
    console.print_wrapped(f"Tokens of an example: {lengths}.")
    console.print_wrapped(
        f"The activation cache takes {info.cache_bytes / 1e9:.2f} GB "
        f"({info.bytes_per_token} bytes a token)."
    )
    headings = ("sizes.draft_vocab", "share of response tokens in it", "of held-out ones")
    held_out = info.held_out_coverage
    rows = [
        (str(size), f"{one:.2%}", f"{held_out[size]:.2%}" if size in held_out else "too few rows")
        for size, one in info.coverage.items()
    ]
    show_table(Table(headings, rows))
