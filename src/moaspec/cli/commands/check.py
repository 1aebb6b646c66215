"""`moaspec check`: compares decoded texts with transformers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moaspec.cli import options
from moaspec.cli.loading import choose_drafter, print_defaults
from moaspec.cli.prompts import chat_ids
from moaspec.cli.reader_check import check_reader
from moaspec.cli.terminal import console
from moaspec.cli.terminal.progress_bar import ProgressBar
from moaspec.cli.terminal.status import loading, status
from moaspec.cli.terminal.tables.table import Table, show_table
from moaspec.errors import InputError
from moaspec.evaluate.prompt_suites import read_prompts

if TYPE_CHECKING:
    from moaspec.evaluate.correctness.check_target import Check, CheckedText


@options.with_options
def check(
    *,
    asked: options.LoadOptions,
    suite: Annotated[str, "bundled, a JSONL file or a directory of them."] = "bundled",
    limit: Annotated[int, "Prompts per suite."] = 2,
    max_new_tokens: options.MaxNewTokens = 32,
    seeds: Annotated[int, "Sampled texts per prompt."] = 1,
    alone: Annotated[int, "Prompts that are also decoded alone, outside the batch."] = 1,
    generation_config: options.GenerationConfig = "auto",
    as_json: options.Json = False,
) -> None:
    """Check that texts are exactly right here.

    Settings: greedy, sampled and with a repetition penalty, with the model's own generation
    defaults. Methods: plain decoding, and chains and trees of the drafter, of an untrained drafter,
    of prompt lookup, of replayed texts, and of a drafter that proposes pads and stop tokens. All
    prompts and settings are decoded in one batch, and some prompts alone.

    Each token of each text is compared with one pass of the model as transformers loads it. Exit
    code 1 if a token is further off than rounding explains. --dtype auto checks float32, and
    bfloat16 where that is faster here. A GGUF file is also compared with llama.cpp's reading of it,
    if xllamacpp is installed.

    Example: moaspec check --limit 12 --max-new-tokens 64 --seeds 3
    """
    if min(limit, max_new_tokens, seeds) < 1 or alone < 0:
        raise InputError(
            "--limit, --max-new-tokens and --seeds must be at least 1, and --alone at least 0; got "
            f"{limit}, {max_new_tokens}, {seeds} and {alone}."
        )
    prompts, model = read_prompts(suite, limit=limit), asked.model
    with loading(model, asked.threads, asked.quantize):
        from moaspec.backends.load import chosen_dtype, load_target
        from moaspec.evaluate.correctness.check_target import Check
        from moaspec.generation.drafters import check_drafter

        if asked.drafter is not None:
            check_drafter(asked.drafter, model, tokenizer=asked.tokenizer)
        chosen = chosen_dtype(
            asked.dtype, model=model, adapter=asked.adapter, tokenizer=asked.tokenizer
        )
    checked: dict[str, list[CheckedText]] = {}
    whole = True
    for one in dict.fromkeys((chosen, "float32") if asked.dtype == "auto" else (chosen,)):
        with status(f"Loading {model} in {one}"):
            load = partial(
                load_target,
                model,
                dtype=one,
                quantize=asked.quantize,
                adapter=asked.adapter,
                tokenizer=asked.tokenizer,
                generation_config=options.generation_defaults(generation_config),
            )
            target = load()
            plan = Check(
                target,
                [chat_ids(target, prompt.turns[0]) for prompt in prompts],
                drafter=choose_drafter(asked.drafter, model, target),
                stock=load(packed=False),
                max_new_tokens=max_new_tokens,
                seeds=range(seeds),
                alone=alone,
            )
        print_defaults(target, target.generation_defaults)
        findings = checked[target.precision] = _run(plan)
        if findings and not as_json:
            _show(f"{model}, {target.precision}", findings)
        whole = len(findings) == plan.num_texts
        if not whole:
            said = f"Stopped: {len(findings)} of {plan.num_texts} texts were checked in {one}."
            console.warn(said)
            break
    text = [token for prompt in plan.prompts for token in prompt]
    reader = check_reader(asked, text, quiet=as_json) if whole else None
    right = _right(checked) and (reader is None or reader.verdict != "different")
    if as_json:
        facts = {**_as_json(model, checked), "right": right, "complete": whole}
        facts["reader"] = None if reader is None else vars(reader)
        console.out.print(json.dumps(facts))
    if not whole:
        raise typer.Exit(130)
    if not right:
        raise typer.Exit(1)


def _right(checked: Mapping[str, Sequence[CheckedText]]) -> bool:
    return all(finding.lossless for findings in checked.values() for finding in findings)


def _run(plan: Check) -> list[CheckedText]:
    """All findings, or those before a Ctrl-C."""
    findings: list[CheckedText] = []
    with contextlib.suppress(KeyboardInterrupt), ProgressBar("checking", plan.num_texts) as bar:
        for finding in plan.run():
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
    show_table(_table(title, findings))
    for finding in findings:
        if finding.kind != "identical":
            console.print_wrapped(_line(finding))
    if all(finding.lossless for finding in findings):
        console.print_wrapped(
            "Right: every token is the target's choice, up to its rounding.", "green"
        )
    else:
        console.print_wrapped("Wrong: rounding does not explain the faults above.", "bold red")


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
