"""`moaspec data synth | regenerate | stats | overlap`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from moaspec.data.conversations import ReadReport, read_conversations
from moaspec.data.rows import require_outside
from moaspec_core.cli.options import GenerationConfig, TopP, generation_defaults, with_options
from moaspec_core.cli.terminal import console
from moaspec_core.cli.terminal.status import status
from moaspec_core.errors import DataError, InputError
from moaspec_train.cli.data_studies import overlap, stats
from moaspec_train.cli.row_options import MalformedRows, Skip, Sources, tell_unused
from moaspec_train.cli.writing_options import (
    EndpointOptions,
    KeepingOptions,
    WritingOptions,
    read_spec,
)
from moaspec_train.cli.writing_progress import WritingProgress
from moaspec_train.dataset.journal import Journal

if TYPE_CHECKING:
    from moaspec_train.dataset.response_writer import Writer

app = typer.Typer(name="data", help="Write and inspect training data.", no_args_is_help=True)
SAMPLES_PER_PROMPT = 20  # of `data synth`, on average, before it gives up
WITHOUT_SYSTEM = 0.5  # share of conversations that get no system prompt

Temperature = Annotated[float, "0: greedy."]


@app.command("synth")
@with_options
def synth_command(
    context: typer.Context,
    *,
    options: WritingOptions,
    num: Annotated[int, "Number of different prompts."] = 1000,
    max_new_tokens: Annotated[int, "Tokens of a prompt; longer ones are dropped."] = 128,
    temperature: Temperature = 1.0,
    top_p: TopP = 0.95,
    seed: Annotated[int, "Another seed gives other prompts."] = 0,
) -> None:
    """Let the target write prompts.

    No data set is needed. Samples that do not end, or repeat a prompt, are discarded; the command
    gives up after 20 samples for each prompt. Run it again to continue after a stop.

    Example: moaspec data synth --num 2000 --out prompts.jsonl
    """
    if num < 1:
        raise InputError(f"--num must be at least 1, got {num}.")
    writing, seconds = options.checked(
        context, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed
    )
    systems = options.systems()
    target, module = options.load()

    from moaspec_train.dataset.response_writer import ResponseWriter
    from moaspec_train.dataset.synth import PromptGenerator, synth

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
        settings |= options.recorded(writer.target)
        with (
            Journal(options.out, settings) as journal,
            bar.stoppable(journal, lambda: writer.finished),
        ):
            bar.resume(journal.rows)
            limit = SAMPLES_PER_PROMPT * num
            synth(writer, generator, journal, num, max_samples=limit, report=report)
    console.out.print(f"{journal.rows} rows in {journal.path}")


@app.command("regenerate")
@with_options
def regenerate_command(
    context: typer.Context,
    sources: Sources,
    *,
    options: WritingOptions,
    elsewhere: EndpointOptions,
    keeping: KeepingOptions,
    max_new_tokens: Annotated[int, "Tokens of a response."] = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = None,
    seed: Annotated[int, "Seed of sampling and of the choice of system prompts."] = 0,
    generation_config: GenerationConfig = "auto",
    limit: Annotated[int | None, "Read only this many conversations."] = None,
    skip_malformed: Skip = False,
) -> None:
    """Let the target write responses.

    Run the command again to continue after a stop. With --endpoint servers decode, and no weights
    are loaded here.

    Example: moaspec data regenerate prompts.jsonl --out responses.jsonl.gz --max-new-tokens 256;
    moaspec data regenerate prompts.jsonl --out responses.jsonl --keep states --keep-for drafter
    """
    if limit is not None and limit < 1:
        raise InputError(f"--limit must be at least 1, got {limit}.")
    writing, seconds = options.checked(
        context, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed
    )
    require_outside(options.out, sources)
    systems = options.systems()
    malformed, report = MalformedRows(skip=skip_malformed), ReadReport()
    rows = read_conversations(sources, malformed, report)
    with status("Reading rows"):
        found = list(islice(rows, limit and min(limit, sys.maxsize)))
    endpoints = elsewhere.checked(options)
    keeping.checked(options, elsewhere=bool(endpoints))
    defaults = generation_defaults(generation_config)
    spec = read_spec(options.model, generation_config=defaults, **options.replaced)
    from moaspec_train.dataset.regenerate import (
        check_prompts,
        fingerprint,
        regenerate,
        short_prompt,
        with_system_prompts,
    )

    found = with_system_prompts(found, systems, without=WITHOUT_SYSTEM, seed=seed)
    with status("Checking prompts"):
        conversations = check_prompts(spec, found, malformed)
    if not conversations:
        raise DataError(
            "No usable prompts: every source was empty or its rows malformed. Name other sources."
        )
    make: Callable[..., Writer]
    if not endpoints:
        from moaspec_train.dataset.response_writer import ResponseWriter

        target, drafter = options.load(defaults)
        make = partial(ResponseWriter, target, drafter, writing, keeper=keeping.load(target))
    else:
        from moaspec_train.dataset.endpoint_writer import EndpointWriter

        make = partial(EndpointWriter, spec, endpoints, writing, tell=console.warn)
    with (
        WritingProgress("conversations", len(conversations), seconds) as bar,
        make(advance=bar.add) as writer,
    ):
        writer.connect(short_prompt(spec, conversations))
        settings = writer.settings(prompts=fingerprint(conversations), drafter=options.drafter)
        settings |= options.recorded(writer.target)
        with (
            Journal(options.out, settings) as journal,
            bar.stoppable(journal, lambda: writer.finished),
        ):
            done = journal.groups * writing.group_size + len(journal.kept)
            bar.resume(min(done, len(conversations)))
            regenerate(writer, conversations, journal)
    console.out.print(f"{journal.rows} rows in {journal.path}")
    malformed.tell()
    tell_unused(report)


app.command("stats")(stats)
app.command("overlap")(overlap)
