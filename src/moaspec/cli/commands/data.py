"""`moaspec data synth | regenerate | stats | overlap`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moaspec.cli.options import MODEL, Json, Model, TopP, with_groups
from moaspec.cli.terminal import console
from moaspec.cli.terminal.interrupts import deferred_interrupts
from moaspec.cli.terminal.status import status
from moaspec.cli.terminal.table import Table, show_table
from moaspec.cli.terminal.writing_progress import WritingProgress
from moaspec.cli.writing_options import EndpointOptions, WritingOptions, endpoint_writer, load_spec
from moaspec.data.conversations import ReadReport, read_conversations
from moaspec.data.row_sources import read_records, refuse
from moaspec.errors import DataError, InputError
from moaspec.support.paths import require_writable_file
from moaspec.train.dataset.journal import Journal

if TYPE_CHECKING:
    from moaspec.target.spec import TargetSpec
    from moaspec.train.dataset.overlap import Overlap
    from moaspec.train.dataset.response_writer import Writer
    from moaspec.train.dataset.statistics import Statistics

app = typer.Typer(name="data", help="Write and inspect training data.", no_args_is_help=True)
SHOWN_FINDINGS = 20
SAMPLES_PER_PROMPT = 20  # of `data synth`, on average, before it gives up

Sources = Annotated[
    list[str],
    typer.Argument(
        help="Files (JSON lines, JSON, Parquet; compressed too), directories of them, or "
        "hub:OWNER/NAME, also with :CONFIGURATION and @SPLIT."
    ),
]
Temperature = Annotated[float, typer.Option(help="0: greedy.")]
Skip = Annotated[
    bool, typer.Option("--skip-malformed", help="Skip malformed rows, and count them.")
]


@app.command("synth")
@with_groups
def synth_command(
    *,
    options: WritingOptions,
    num: Annotated[int, typer.Option(help="Number of different prompts.")] = 1000,
    max_new_tokens: Annotated[
        int, typer.Option(help="Tokens of a prompt; longer ones are dropped.")
    ] = 128,
    temperature: Temperature = 1.0,
    top_p: TopP = 0.95,
    seed: Annotated[int, typer.Option(help="Another seed gives other prompts.")] = 0,
    max_samples: Annotated[
        int | None,
        typer.Option(help="Give up after this many samples; default: 20 for each prompt."),
    ] = None,
) -> None:
    """Let the target imagine prompts.

    No data set is needed. Samples that do not end, or repeat a prompt, are discarded. Run the
    command again to continue after a stop.

    Example: moaspec data synth --num 2000 --out prompts.jsonl
    """
    if num < 1 or (max_samples is not None and max_samples < 1):
        raise InputError(f"--num and --max-samples must be at least 1, got {num}, {max_samples}.")
    writing, seconds = options.checked(
        max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed
    )
    systems = options.systems()
    target, module = options.load()

    from moaspec.train.dataset.response_writer import ResponseWriter
    from moaspec.train.dataset.synth import PromptGenerator, synth

    generator = PromptGenerator(target, systems)
    with WritingProgress("prompts", num, seconds) as bar:
        writer = ResponseWriter(
            target,
            module,
            writing,
            stop_token_ids=generator.stop_token_ids,
            advance=lambda tokens, finished: show(tokens, finished),
        )

        def show(tokens: int, finished: int) -> None:
            """Count those of the present group, too; repeated prompts are found at its end."""
            first = journal.groups * writing.group_size
            group = [rows for number, rows in writer.finished.items() if number >= first]
            prompts = min(num, journal.rows + sum(map(bool, group)))
            report(prompts, first + len(group))
            bar.add(tokens, finished, done=prompts)

        def report(prompts: int, samples: int) -> None:
            bar.note(prompts, f"{samples - prompts} of {samples} samples discarded")

        settings = writer.settings(num=num, system_prompts=systems, drafter=options.drafter)
        with (
            Journal(options.out, settings) as journal,
            bar.stoppable(journal, lambda: writer.finished),
        ):
            bar.resume(journal.rows)
            limit = SAMPLES_PER_PROMPT * num if max_samples is None else max_samples
            synth(writer, generator, journal, num, max_samples=limit, report=report)
    _report(journal, None)


@app.command("regenerate")
@with_groups
def regenerate_command(
    sources: Sources,
    *,
    options: WritingOptions,
    elsewhere: EndpointOptions,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of a response.")] = 512,
    without_system: Annotated[
        float, typer.Option(help="Share of conversations that get no system prompt.")
    ] = 0.5,
    temperature: Temperature = 0.0,
    top_p: TopP = None,
    seed: Annotated[
        int, typer.Option(help="Seed of sampling and of the choice of system prompts.")
    ] = 0,
    limit: Annotated[int | None, typer.Option(help="Read only this many conversations.")] = None,
    skip_malformed: Skip = False,
) -> None:
    """Let the target write responses.

    Run the command again to continue after a stop. With --endpoint a server decodes, and no weights
    are loaded here.

    Example: moaspec data regenerate prompts.jsonl --out responses.jsonl.gz --max-new-tokens 256
    """
    if not 0 <= without_system <= 1 or (limit is not None and limit < 1):
        raise InputError("--without-system must lie in 0..1, and --limit be at least 1.")
    writing, seconds = options.checked(
        max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed
    )
    systems = options.systems()
    skipped = _Skipped() if skip_malformed else None
    on_malformed = skipped or refuse
    report = ReadReport()
    found = list(islice(read_conversations(sources, on_malformed, report), limit))
    endpoint = elsewhere.checked(
        drafter=options.drafter, threads=options.threads, adapter=options.adapter
    )
    target: TargetSpec
    opened: Callable[..., AbstractContextManager[Writer]]
    if endpoint is None:
        target, opened = options.writer(writing)
    else:
        target = load_spec(options.model, options.auto)
        opened = partial(endpoint_writer, target, endpoint, writing)

    from moaspec.train.dataset.regenerate import (
        check_prompts,
        fingerprint,
        regenerate,
        short_prompt,
        with_system_prompts,
    )

    found = with_system_prompts(found, systems, without=without_system, seed=seed)
    with status("Checking prompts"):
        conversations = check_prompts(target, found, on_malformed)
    if not conversations:
        raise DataError(
            "No usable prompts: every source was empty or its rows malformed. Name other sources."
        )
    with WritingProgress("conversations", len(conversations), seconds) as bar:
        tried = short_prompt(target, conversations)
        with opened(prompt_ids=tried, advance=bar.add) as writer:
            settings = writer.settings(prompts=fingerprint(conversations), drafter=options.drafter)
            with (
                Journal(options.out, settings) as journal,
                bar.stoppable(journal, lambda: writer.finished),
            ):
                done = journal.groups * options.group_size + len(journal.kept)
                bar.resume(min(done, len(conversations)))
                regenerate(writer, conversations, journal)
    _report(journal, skipped)
    _tell_unused(report)


@app.command("stats")
def stats_command(
    sources: Sources,
    model: Model = MODEL,
    max_length: Annotated[
        int, typer.Option(help="Tokens of an example; longer ones are cut.")
    ] = 2048,
    skip_malformed: Skip = False,
    as_json: Json = False,
) -> None:
    """Count the tokens of training data.

    Prints lengths, coverage of trimmed vocabularies, and the size of the activation cache.

    Example: moaspec data stats responses.jsonl.gz
    """
    target = load_spec(model, "auto")
    skipped, report = _Skipped() if skip_malformed else None, ReadReport()
    from moaspec.train.dataset.read_examples import read_examples
    from moaspec.train.dataset.statistics import statistics

    with status("Reading examples"), deferred_interrupts() as stopped:
        examples = read_examples(
            sources,
            vocab_size=target.vocab_size,
            max_length=max_length,
            tokenizer=target.tokenizer,
            stop_token_ids=target.stop_token_ids,
            on_malformed=skipped or refuse,
            report=report,
            stopped=lambda: bool(stopped),
        )
    facts = statistics(examples, target.identity, always=target.stop_token_ids)
    if as_json:
        row = {**dataclasses.asdict(facts), "cache_bytes": facts.cache_bytes}
        row |= {"unused": vars(report), "complete": not stopped}
        console.out.print(json.dumps(row))
    else:
        _show(facts)
        _tell_unused(report)
    _tell(skipped)
    _leave_if(bool(stopped))


@app.command("overlap")
def overlap_command(
    sources: Sources,
    against: Annotated[
        list[str], typer.Option(help="File, or directory of files, with prompts to measure on.")
    ],
    size: Annotated[
        int, typer.Option(help="Number of successive words that count as overlap.")
    ] = 8,
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

    The rows are training data, the prompts those of an evaluation. Exit code 1 if there are any.
    With --out all other rows are written unchanged, and the exit code is 0.

    Example: moaspec data overlap responses.jsonl.gz --against prompts/ --out clean.jsonl
    """
    from moaspec.train.dataset.overlap import overlaps

    if size < 1:
        raise InputError(f"--size must be at least 1, got {size}.")
    if out is not None and out.exists():
        raise InputError(f"{out} exists; name another file.")
    if out is not None:
        require_writable_file("--out", out)
    skipped = _Skipped() if skip_malformed else None
    on_malformed = skipped or refuse
    target = load_spec(model, "auto") if model else None
    found: list[Overlap] = []
    stopped = True
    with suppress(KeyboardInterrupt), status("Comparing rows with the prompts"):
        for finding in overlaps(
            read_conversations(sources, on_malformed),
            read_conversations(against, on_malformed),
            size=size,
            decode=lambda ids: _decoded(target, ids),
        ):
            found.append(finding)
        stopped = False
    if as_json:
        rows = [dataclasses.asdict(finding) for finding in found]
        facts = {"size": size, "overlaps": rows, "complete": not stopped}
        console.out.print(json.dumps(facts))
    else:
        for finding in found[:SHOWN_FINDINGS]:
            console.print_wrapped(f"{finding.where} and {finding.against}: {finding.words}")
        console.print_wrapped(f"{len(found)} rows share {size} words in a row with a prompt.")
    _tell(skipped)
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
                for record in read_records(source, lambda _: None):
                    if record.where not in left_out:
                        # Tables hold dates, which JSON does not.
                        file.write(json.dumps(record.value, default=str) + "\n")

    replace_file(out, write)


class _Skipped:
    """Counts malformed rows and shows the first few."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, error: DataError) -> None:
        self.count += 1
        if self.count <= 3:
            console.warn(f"Skipped: {error}")


def _decoded(target: TargetSpec | None, ids: tuple[int, ...]) -> str:
    if target is None or target.tokenizer is None:
        raise InputError("Some rows have token ids only: name the target with --model.")
    tokenizer: Any = target.tokenizer
    return tokenizer.decode(ids, skip_special_tokens=True)


def _report(journal: Journal, skipped: _Skipped | None) -> None:
    console.out.print(f"{journal.rows} rows in {journal.path}")
    _tell(skipped)


def _tell(skipped: _Skipped | None) -> None:
    if skipped is not None and skipped.count:
        console.warn(f"{skipped.count} malformed rows skipped.")


def _tell_unused(report: ReadReport) -> None:
    for line in report.lines():
        console.warn(line)


def _show(facts: Statistics) -> None:
    console.print_wrapped(
        f"{facts.examples} examples with {facts.responses} responses: {facts.tokens} tokens, "
        f"{facts.response_tokens} of them responses', {facts.distinct_tokens} different ones."
    )
    lengths = ", ".join(f"{p}% up to {length}" for p, length in facts.lengths.items())
    console.print_wrapped(f"Tokens of an example: {lengths}.")
    padding = ", ".join(f"{share:.1%} with {name}" for name, share in facts.padding.items())
    console.print_wrapped(f"Pads: {padding}.")
    console.print_wrapped(
        f"The activation cache takes {facts.cache_bytes / 1e9:.2f} GB "
        f"({facts.bytes_per_token} bytes a token)."
    )
    headings = ("sizes.draft_vocab", "share of response tokens in it", "of held-out ones")
    held_out = facts.held_out_coverage
    rows = [
        (str(size), f"{one:.2%}", f"{held_out[size]:.2%}" if size in held_out else "too few rows")
        for size, one in facts.coverage.items()
    ]
    show_table(Table(headings, rows))
