"""`moaspec eval --endpoints`: two servers side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from moaspec_core.cli import options
from moaspec_core.cli.terminal import console
from moaspec_core.cli.terminal.progress_bar import ProgressBar
from moaspec_core.cli.terminal.table import Table, show_table
from moaspec_core.errors import ServerError

if TYPE_CHECKING:
    from moaspec.evaluate.prompt_suites import Prompt
    from moaspec.evaluate.served.asked_server import AskedServer
    from moaspec.evaluate.served.endpoint_race import CategoryResult, EndpointAnswer

FILE = "endpoints.json"
HEADINGS = (
    "category",
    "prompts",
    "tokens/s A",
    "tokens/s B",
    "B by A",
    "tau A",
    "tau B",
    "accepted A",
    "accepted B",
    "same text",
)


def compare_endpoints(
    urls: Sequence[str],
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    out: Path | None,
    *,
    as_json: bool,
) -> None:
    """Ask, print and write `FILE`; what was answered is kept if a server breaks off."""
    if out is not None:
        from moaspec.evaluate.results_store import make_results_directory

        make_results_directory(out)
    from moaspec.evaluate.served.asked_server import AskedServer
    from moaspec.evaluate.served.endpoint_race import by_category

    servers = [AskedServer(url, key=options.sent_api_key()) for url in urls]
    answers, stopped = _answers(servers, prompts, max_new_tokens)
    found = by_category(answers)
    info = {
        "endpoints": [
            {"url": url, "owner": server.owner, "model": server.model}
            for url, server in zip(urls, servers, strict=True)
        ],
        "max_new_tokens": max_new_tokens,
        "complete": stopped is None,
        "categories": [asdict(one) for one in found],
        "answers": [asdict(one) for one in answers],
    }
    if out is not None:
        from moaspec.evaluate.results_store import write_whole

        write_whole(out / FILE, json.dumps(info, indent=1) + "\n")
    _show(info, found, as_json=as_json)
    if isinstance(stopped, ServerError):
        raise stopped
    if stopped is not None:
        raise typer.Exit(130)


def _answers(
    servers: Sequence[AskedServer], prompts: Sequence[Prompt], max_new_tokens: int
) -> tuple[list[EndpointAnswer], BaseException | None]:
    """The answers, and what ended them early: an interrupt, or a server after its first answer."""
    from moaspec.evaluate.served.endpoint_race import race
    from moaspec.http_client import BlockingLoop

    answers: list[EndpointAnswer] = []

    async def work(bar: ProgressBar) -> None:
        for server in servers:
            await server.meet()
        async for answer in race(servers, prompts, max_new_tokens):
            answers.append(answer)
            bar.advance()

    loop = BlockingLoop()
    try:
        with ProgressBar("measuring", len(prompts) * len(servers)) as bar:
            loop.run(work(bar))
    except KeyboardInterrupt as interrupt:
        console.warn(f"Stopped after {len(answers)} answers.")
        return answers, interrupt
    except ServerError as error:
        if not answers:
            raise
        return answers, error
    finally:
        for server in servers:
            loop.run(server.close())
        loop.close()
    return answers, None


def _show(info: dict[str, Any], found: Sequence[CategoryResult], *, as_json: bool) -> None:
    if as_json:
        console.out.print(json.dumps(info))
    else:
        for letter, one in zip("AB", info["endpoints"], strict=True):
            console.print_wrapped(f"{letter}: {one['url']} ({one['owner']}, {one['model']})")
        show_table(Table(HEADINGS, [_row(one) for one in found]))


def _row(one: CategoryResult) -> tuple[str, ...]:
    numbers: list[Any] = [*one.tokens_per_second, one.ratio, *one.tau, *one.acceptance]
    forms = (".1f", ".1f", ".2f", ".2f", ".2f", ".2f", ".2f")
    shown = ("-" if n is None else format(n, form) for n, form in zip(numbers, forms, strict=True))
    return (one.category, str(one.prompts), *shown, f"{one.same_texts} of {one.prompts}")
