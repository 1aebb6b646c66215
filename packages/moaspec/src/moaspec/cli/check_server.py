"""`moaspec check URL`: another server's texts against the model's own."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moaspec.evaluate.prompt_suites import read_prompts
from moaspec_core.cli import options
from moaspec_core.cli.prompts import chat_ids
from moaspec_core.cli.terminal import console
from moaspec_core.cli.terminal.progress_bar import ProgressBar
from moaspec_core.cli.terminal.status import loading
from moaspec_core.cli.terminal.table import Table, show_table
from moaspec_core.errors import InputError, ServerError

if TYPE_CHECKING:
    from moaspec.evaluate.served.server_check import AskedPrompt, ServerCheck
    from moaspec.target.target import Target

LIMIT, NEW_TOKENS = 8, 64
MAX_WIDTH, SEEDS = 256, 100_000
NEW_SHARES = (1, 2, 1, 4)
"""Every prompt has the limit of new tokens divided by one of these, in turn."""
LONG_EVERY, LONG_CHARACTERS = 4, 2400
"""Every fourth prompt comes after so much text of the others."""


@dataclass(frozen=True)
class ServerOptions:
    """Options of the check of a server."""

    server_model: Annotated[
        str | None, "With a URL: the server's name of the model, if it has several."
    ] = None
    widths: Annotated[str, "With a URL: requests at the same time, commas between."] = "1,4,16"
    seed: Annotated[
        int | None,
        "With a URL: number in the prompts, which makes their prefixes cold. Default: random.",
    ] = None
    out: Annotated[
        Path | None, "With a URL: directory for check.json and check.md, with all requests."
    ] = None

    @property
    def parsed_widths(self) -> list[int]:
        """InputError for widths that are no numbers."""
        try:
            found = [int(width) for width in self.widths.split(",")]
        except ValueError:
            found = []
        if not found or not all(1 <= width <= MAX_WIDTH for width in found):
            raise InputError(
                f"--widths {self.widths!r} must be numbers from 1 to {MAX_WIDTH}, as in 1,4,16."
            )
        return found


def check_server(
    url: str,
    asked: options.LoadOptions,
    given: ServerOptions,
    *,
    suite: str,
    limit: int | None,
    max_new_tokens: int | None,
    as_json: bool,
) -> None:
    """Check a server; exit code 1 where it is wrong, 2 where it or a part is not judged."""
    limit, new = limit or LIMIT, max_new_tokens or NEW_TOKENS
    widths = given.parsed_widths
    if asked.quantize is not None or asked.drafter is not None:
        raise InputError(
            "--quantize and --drafter do not go with a URL: the reference is the model as "
            "transformers computes it. Give --model what the server runs."
        )
    if given.out is not None:
        from moaspec.evaluate.results_store import make_results_directory

        make_results_directory(given.out)
    turns = [prompt.turns[0] for prompt in read_prompts(suite, limit=limit)]
    turns += islice(cycle(turns), max(0, limit - len(turns)))  # their numbers differ
    seed = secrets.randbelow(SEEDS) if given.seed is None else given.seed
    dtype = "bfloat16" if asked.dtype == "auto" else asked.dtype
    with loading(asked.model, asked.threads, None):
        from moaspec.backends.load import load_target
        from moaspec.evaluate.served.asked_server import AskedServer
        from moaspec.evaluate.served.judged_text import TextJudge
        from moaspec.evaluate.served.server_check import ServerCheck
        from moaspec.http_client import BlockingLoop

        server = AskedServer(url, given.server_model, options.sent_api_key())
        loop = BlockingLoop()
        try:
            loop.run(server.meet())  # before the model is loaded
            target = load_target(
                asked.model,
                dtype=dtype,
                packed=False,
                adapter=asked.adapter,
                tokenizer=asked.tokenizer,
                chat_template=asked.chat_template,
            )
            tokenizer: Any = target.tokenizer
            prompts = _prompts(target, turns, seed, new)
            check = ServerCheck(
                server,
                TextJudge(target),
                prompts,
                widths,
                has_template=bool(tokenizer and tokenizer.chat_template),
            )
            legs = loop.run(check.legs())
        except BaseException as error:
            loop.run(server.close())
            loop.close()
            if isinstance(error, ServerError):  # exit code 1 would say that a token is wrong
                raise InputError(f"Not judged: {error}") from error
            raise
    failure = None
    try:
        whole = _run(check, legs, loop)
    except ServerError as error:
        whole, failure = False, error
    finally:
        loop.run(server.close())
        loop.close()
    about = {
        "url": url.rstrip("/").removesuffix("/v1"),
        "owner": server.owner,
        "server_model": server.model,
        "reference": asked.model,
        "dtype": dtype,
        "seed": seed,
        "complete": whole,
    }
    _finish(check, about, given.out, as_json=as_json)
    if failure is not None:
        raise InputError(f"Only {len(check.answers)} texts are judged: {failure}") from failure
    if not whole:
        raise typer.Exit(130)


def _prompts(target: Target, turns: Sequence[str], seed: int, new: int) -> list[AskedPrompt]:
    from moaspec.evaluate.served.server_check import AskedPrompt

    made = []
    for number, turn in enumerate(turns):
        question = f"({seed}-{number}) {turn}"  # no cache knows it
        if number % LONG_EVERY == LONG_EVERY - 1:
            others = "\n".join(one for one in turns if one != turn)
            others = others[: min(LONG_CHARACTERS, target.max_positions // 4)]
            question = f"({seed}-{number}) {others}\n\n{turn}"
        ids = chat_ids(target, question)
        limit = max(1, new // NEW_SHARES[number % len(NEW_SHARES)])
        room = target.max_positions - len(ids)
        if room < 1:
            raise InputError(
                f"Prompt {number} has {len(ids)} tokens, and the model's context "
                f"{target.max_positions}. Give shorter prompts (--suite)."
            )
        made.append(AskedPrompt(question, tuple(ids), min(limit, room)))
    return made


def _run(check: ServerCheck, legs: Sequence[Any], loop: Any) -> bool:
    """Ask and judge everything; False after a Ctrl-C."""

    async def work(bar: ProgressBar) -> None:
        async for answer in check.run(legs):
            bar.update(text=answer.leg.name)
            bar.advance()

    with ProgressBar("checking", check.num_texts(legs)) as bar:
        try:
            loop.run(work(bar))
        except KeyboardInterrupt:
            console.warn(f"Stopped: {len(check.answers)} texts were checked.")
            return False
    return True


def _finish(check: ServerCheck, about: dict[str, Any], out: Path | None, *, as_json: bool) -> None:
    """Print and write the report."""
    from moaspec.evaluate.served import check_report
    from moaspec.evaluate.served.server_check import told_of

    if not check.answers:
        return
    result = check.result
    info = check_report.as_json(result, about)
    if out is not None:
        from moaspec.evaluate.results_store import write_whole

        write_whole(out / "check.json", json.dumps(info, indent=1) + "\n")
        write_whole(out / "check.md", check_report.markdown(result, about))
    if as_json:
        console.out.print(json.dumps(info))
    else:
        title = f"{about['url']} ({about['owner'] or 'unknown server'}, {about['server_model']})"
        show_table(Table(check_report.HEADINGS, check_report.rows(result.legs), title))
        for fault in result.faults[: check_report.SHOWN_FAULTS]:
            console.print_wrapped(f"FAULT: {told_of(fault)}")
        if result.scale != 1.0:
            console.print_wrapped(check_report.scale_line(result))
        for cause in result.causes:
            console.print_wrapped(cause)
        style = {"right": "green", "wrong": "bold red", "unknown": ""}[result.verdict]
        if not about["complete"]:
            console.print_wrapped(check_report.BROKE_OFF)
        console.print_wrapped(check_report.verdict_line(result), style)
        if out is not None:
            console.out.print(f"Report: {out / 'check.md'}")
    if result.verdict != "right" and about["complete"]:
        raise typer.Exit(1 if result.verdict == "wrong" else 2)
