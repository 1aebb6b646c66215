"""`moaspec generate PROMPT`: answers one prompt."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moaspec.cli.loading import load, measure_once
from moaspec_core.cli import options
from moaspec_core.cli.model_defaults import with_model_defaults
from moaspec_core.cli.prompts import chat_ids, read_prompt
from moaspec_core.cli.terminal import console
from moaspec_core.cli.terminal.interrupts import deferred_interrupts
from moaspec_core.cli.terminal.token_printer import TokenPrinter, show_events
from moaspec_core.errors import InputError

if TYPE_CHECKING:
    from moaspec.target.target import Target
    from moaspec_core.engine.request_state import GenerationResult


@options.with_options
def generate(
    prompt: options.Prompt = None,
    *,
    asked: options.LoadOptions,
    max_new_tokens: options.MaxNewTokens = 128,
    decoding: options.DecodingOptions,
    system: options.System = None,
    stop: Annotated[list[str] | None, "Stop at this string; may be given several times."] = None,
    raw: Annotated[bool, "No chat template."] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, no stream.")] = False,
) -> None:
    """Answer a prompt, streaming verified tokens.

    Accepted drafts are green, copies from the text cyan. --tree auto drafts what pays on this
    machine.

    Ctrl-C stops generating; what was generated stays on the screen.

    Without a prompt, or with -, it is read from standard input: moaspec generate < question.txt

    Example: moaspec generate "Why is the sky blue?" --temperature 0.8 --top-p 0.95 --seed 7
    """
    settings = decoding.settings(max_new_tokens, stop or ())
    if raw and system is not None:
        raise InputError("--system is for the chat template, which --raw leaves out.")
    if raw and asked.chat_template is not None:
        raise InputError("--raw leaves the chat template out: drop --chat-template.")
    question = read_prompt(prompt)
    target, module = load(asked)
    if decoding.tree == "auto":
        measure_once(target, module)
    from moaspec.generation.api import start
    from moaspec_core.chat.chat_template import ChatTemplate

    if target.tokenizer is not None and not ChatTemplate(target.tokenizer).exists and not raw:
        console.err.print(
            f"{target.name} has no chat template: it continues the prompt as plain text. Give a "
            "template with --chat-template.",
            style="yellow",
        )
    settings = with_model_defaults(settings, target)
    prompt_ids = chat_ids(target, question, system=system, raw=raw)
    engine, (result,) = start(target, [prompt_ids], drafter=module, **settings)
    printer = None if as_json else TokenPrinter(target, prompt_ids if raw else [])
    with deferred_interrupts() as interrupts:
        interrupted = show_events(engine.run(), printer, interrupts)
        if as_json:
            console.out.print(json.dumps(summary(target, prompt_ids, result, raw=raw)))
        else:
            console.err.print(describe(result), style="dim")
    if interrupted:
        raise typer.Exit(130)


def describe(result: GenerationResult) -> str:
    """One line of statistics."""
    timing = result.timing
    decode_s = timing.total_s - timing.prefill_s
    rounds = result.num_rounds and decode_s > 0
    speed = f"{(len(result.token_ids) - 1) / decode_s:.1f} tokens/s, " if rounds else ""
    tau = f"tau {result.tau:.2f}, " if result.tau else ""
    tau += f"{result.num_copied} of them copied, " if result.num_copied else ""
    seed = "" if result.seed is None else f", seed {result.seed}"
    return (
        f"{len(result.token_ids)} tokens ({result.stop_reason}), {speed}{tau}"
        f"{result.num_rounds} rounds, prompt {timing.prefill_s:.2f} s{seed}"
    )


def summary(
    target: Target, prompt_ids: list[int], result: GenerationResult, *, raw: bool
) -> dict[str, Any]:
    """The JSON object of an answer; a raw text continues its prompt."""
    from moaspec_core.sampling.incremental_text import continuation

    before = prompt_ids if raw else []
    return {
        "text": continuation(target.tokenizer, before, result.token_ids),
        "token_ids": result.token_ids,
        "sources": result.sources,
        "prompt_tokens": len(prompt_ids),
        "stop_reason": result.stop_reason,
        "stop_string": result.stop_string,
        "seed": result.seed,
        "tau": result.tau,
        "num_copied": result.num_copied,
        "accept_lengths": result.accept_lengths,
        "acceptance_by_depth": result.acceptance_by_depth,
        "timing": vars(result.timing),
    }
