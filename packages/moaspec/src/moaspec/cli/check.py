"""`moaspec check`: compares decoded texts with transformers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moaspec.cli.check_server import ServerOptions, check_server
from moaspec.cli.loading import choose_drafter
from moaspec.cli.reader_check import check_reader
from moaspec.evaluate.prompt_suites import read_prompts
from moaspec_core.cli import options
from moaspec_core.cli.model_defaults import print_defaults
from moaspec_core.cli.prompts import chat_ids
from moaspec_core.cli.terminal import console
from moaspec_core.cli.terminal.progress_bar import ProgressBar
from moaspec_core.cli.terminal.status import loading, status
from moaspec_core.cli.terminal.table import Table, show_table
from moaspec_core.errors import InputError

if TYPE_CHECKING:
    from moaspec.evaluate.correctness.check_target import Check, CheckedText
    from moaspec.evaluate.prompt_suites import Prompt
    from moaspec.target.target import Target


@options.with_options
def check(
    url: Annotated[
        str | None,
        typer.Argument(help="A server to check; default: decoding in this process."),
    ] = None,
    *,
    asked: options.LoadOptions,
    suite: Annotated[str, "bundled, a JSONL file or a directory of them."] = "bundled",
    thorough: Annotated[
        bool, "Check all methods, and with --dtype auto float32 too; it takes several minutes."
    ] = False,
    limit: Annotated[
        int | None,
        "Prompts per suite; default: 1, with --thorough 2, with a URL 8, and more repeat them.",
    ] = None,
    max_new_tokens: Annotated[
        int | None, "Maximum number of new tokens; default: 16, with --thorough 32, with a URL 64."
    ] = None,
    server: ServerOptions,
    generation_config: options.GenerationConfig = "auto",
    as_json: options.Json = False,
) -> None:
    """Check that texts are exactly right here.

    Settings: greedy, sampled and with a repetition penalty, with the model's own generation
    defaults. Methods: plain decoding, drafts as --tree auto makes them, trees with copies, replayed
    texts, and a drafter that proposes pads and stop tokens. --thorough adds chains and trees of
    each, of an untrained drafter and of prompt lookup, and float32. All prompts and settings are
    decoded in one batch, and the first prompt alone, too.

    Each token of each text is compared with one pass of the model as transformers loads it. Exit
    code 1 if a token is further off than rounding explains. A GGUF file is also compared with
    llama.cpp's reading of it, if xllamacpp is installed.

    With a URL an OpenAI-compatible server is checked instead: vLLM, SGLang, llama.cpp, LM Studio,
    Ollama, moaspec serve. It is asked for greedy texts, alone and many at once, with cold and warm
    prefixes, without drafts where it has a switch. --model names the weights that it runs, and
    --dtype its dtype (auto: bfloat16). Exit code 1 if a token is wrong, 2 if its weights are others
    than the reference's. $MOASPEC_API_KEY is sent as its key.

    Example: moaspec check --thorough --limit 12 --max-new-tokens 64

    Example: moaspec check http://localhost:8000 --model Qwen/Qwen3-0.6B --out report
    """
    _refuse_bad(limit, max_new_tokens, url, server, thorough=thorough)
    if url is not None:
        check_server(
            url,
            asked,
            server,
            suite=suite,
            limit=limit,
            max_new_tokens=max_new_tokens,
            as_json=as_json,
        )
    else:
        _check_here(
            asked,
            suite=suite,
            thorough=thorough,
            limit=limit,
            max_new_tokens=max_new_tokens,
            generation_config=generation_config,
            as_json=as_json,
        )


def _refuse_bad(
    limit: int | None, new: int | None, url: str | None, server: ServerOptions, *, thorough: bool
) -> None:
    """InputError for options out of range, or without effect."""
    if any(number is not None and number < 1 for number in (limit, new)):
        raise InputError(f"--limit and --max-new-tokens must be at least 1, got {limit} and {new}.")
    if url is not None and thorough:
        raise InputError("--thorough does not go with a URL; raise --limit instead.")
    if url is None and server != ServerOptions():
        raise InputError("--server-model, --widths, --seed and --out go with a server's URL.")


def _check_here(
    asked: options.LoadOptions,
    *,
    suite: str,
    thorough: bool,
    limit: int | None,
    max_new_tokens: int | None,
    generation_config: options.GenerationConfig,
    as_json: bool,
) -> None:
    """Check decoding in this process."""
    limit = (2 if thorough else 1) if limit is None else limit
    if max_new_tokens is None:
        max_new_tokens = 32 if thorough else 16
    prompts, model = read_prompts(suite, limit=limit), asked.model
    with loading(model, asked.threads, asked.quantize):
        from moaspec.backends.load import chosen_dtype, load_target
        from moaspec.evaluate.correctness.check_target import SHORT
        from moaspec.generation.drafters import check_any_drafter

        if asked.drafts and asked.drafter is not None:
            check_any_drafter(asked.drafter, model, tokenizer=asked.tokenizer)
        chosen = chosen_dtype(
            asked.dtype, model=model, adapter=asked.adapter, tokenizer=asked.tokenizer
        )
    load = partial(
        load_target,
        model,
        quantize=asked.quantize,
        adapter=asked.adapter,
        tokenizer=asked.tokenizer,
        chat_template=asked.chat_template,
        generation_config=options.generation_defaults(generation_config),
    )
    settings = {
        "max_new_tokens": max_new_tokens,
        "methods": None if thorough else SHORT,
    }
    checked: dict[str, list[CheckedText]] = {}
    whole = True
    text: list[int] = []
    both = thorough and asked.dtype == "auto" and asked.quantize != "inputs"
    for dtype in dict.fromkeys((chosen, "float32") if both else (chosen,)):
        with status(f"Loading {model} in {dtype}"):
            plan = _plan(partial(load, dtype=dtype), asked, prompts, settings)
        print_defaults(plan.target, plan.target.generation_defaults)
        precision, number = plan.target.precision, plan.num_texts
        text = [token for prompt in plan.prompts for token in prompt]
        findings = checked[precision] = _run(plan)
        del plan  # its targets, before the next one is loaded
        if findings and not as_json:
            _show(f"{model}, {precision}", findings)
        whole = len(findings) == number
        if not whole:
            console.warn(f"Stopped: {len(findings)} of {number} texts were checked in {dtype}.")
            break
    reader = check_reader(asked, text, quiet=as_json) if whole else None
    right = _right(checked) and (reader is None or reader.verdict != "different")
    if as_json:
        info = {**_as_json(model, checked), "right": right, "complete": whole}
        info["reader"] = None if reader is None else vars(reader)
        console.out.print(json.dumps(info))
    if not whole:
        raise typer.Exit(130)
    if not right:
        raise typer.Exit(1)


def _plan(
    load: Callable[..., Target],
    asked: options.LoadOptions,
    prompts: Sequence[Prompt],
    settings: Mapping[str, Any],
) -> Check:
    """Load the target as it is used and as transformers has it."""
    from moaspec.evaluate.correctness.check_target import Check

    target = load()
    return Check(
        target,
        [chat_ids(target, prompt.turns[0]) for prompt in prompts],
        drafter=choose_drafter(asked.drafter, asked.model, target),
        stock=load(packed=False),
        **settings,
    )


def _right(checked: Mapping[str, Sequence[CheckedText]]) -> bool:
    return all(finding.lossless for findings in checked.values() for finding in findings)


def _run(plan: Check) -> list[CheckedText]:
    """All findings, or those before a Ctrl-C."""
    findings: list[CheckedText] = []
    with contextlib.suppress(KeyboardInterrupt), ProgressBar("checking", plan.num_texts) as bar:
        for finding in plan.run(lambda doing, left_s: bar.update(text=doing, left_s=left_s)):
            findings.append(finding)
            bar.advance()
    return findings


def _as_json(model: str, checked: Mapping[str, Sequence[CheckedText]]) -> dict[str, Any]:
    import torch
    import transformers

    return {
        "target": model,
        "dtype": ", ".join(checked),
        "device": "cpu",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "findings": [
            {"dtype": dtype, **vars(finding)}
            for dtype, findings in checked.items()
            for finding in findings
        ],
    }


def _table(title: str, findings: Sequence[CheckedText]) -> Table:
    groups: dict[str, dict[str, list[CheckedText]]] = {}
    for finding in findings:
        methods = groups.setdefault(finding.setting, {})
        methods.setdefault(finding.method, []).append(finding)
    rows = []
    for setting, methods in groups.items():
        for method, group in methods.items():
            kinds = [finding.kind for finding in group]
            counts = [kinds.count(kind) for kind in ("identical", "near_tie", "different")]
            tokens = sum(finding.num_tokens for finding in group)
            rows.append((setting, method, *map(str, (len(group), tokens, *counts))))
    headings = ("setting", "method", "texts", "tokens", "as plain", "ties", "faults")
    return Table(headings, rows, title, grouped=True)


def _show(title: str, findings: Sequence[CheckedText]) -> None:
    """One line of verdict; before it a row for each group of texts in which one differs."""
    differ = [finding for finding in findings if finding.kind != "identical"]
    if differ:
        groups = {(finding.setting, finding.method) for finding in differ}
        shown = [finding for finding in findings if (finding.setting, finding.method) in groups]
        show_table(_table(title, shown))
    for finding in differ:
        console.print_wrapped(_line(finding))
    tokens = sum(finding.num_tokens for finding in findings)
    checked = f"{len(findings)} texts, {tokens} tokens"
    if all(finding.lossless for finding in findings):
        said = (
            f"Right ({title}; {checked}): every token is the target's choice, up to its rounding."
        )
        console.print_wrapped(said, "green")
    else:
        said = f"Wrong ({title}; {checked}): rounding does not explain the faults above."
        console.print_wrapped(said, "bold red")


def _line(finding: CheckedText) -> str:
    gap = ""
    if finding.gap is not None:
        gap = f", {finding.gap:.3g} logits off (rounding: up to {finding.limit:.3g})"
    fault = not finding.lossless
    what = finding.reason if fault else "parts from plain decoding at a tie"
    return (
        f"{'FAULT' if fault else 'NEAR TIE'}: {finding.setting}; {finding.method}; "
        f"{finding.batch}; prompt {finding.prompt}, token {finding.position}: {what}{gap}"
    )
