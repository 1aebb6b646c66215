"""`moaspec generate PROMPT`."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from moaspec.cli import console
from moaspec.decode import (
    GenerationResult,
    bundled_drafters,
    load_drafter,
    local_engine,
    parse_shape,
)
from moaspec.model import MoADrafter
from moaspec.target import Target, load_target

MODEL = "smollm2-135m"


def generate(
    prompt: Annotated[str, typer.Argument(help="What the model should answer.")],
    model: Annotated[str, typer.Option(help="Target: alias, directory or hub id.")] = MODEL,
    drafter: Annotated[
        str | None, typer.Option(help="Alias, directory or hub id; default: the bundled one.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="At most so many tokens.")] = 128,
    tree: Annotated[
        str, typer.Option(help="auto, chain:LENGTH or tree:DEPTH,BREADTH,TOTAL_TOKENS.")
    ] = "auto",
    speculation: Annotated[
        bool, typer.Option("--speculation/--no-speculation", help="Draft, or decode plainly.")
    ] = True,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, no stream.")] = False,
) -> None:
    """Answer a prompt, streaming verified tokens; accepted drafts are green.

    Ctrl-C stops generating; what was generated stays on the screen.

    Example: moaspec generate "Why is the sky blue?" --max-new-tokens 64
    """
    shape = parse_shape(tree)
    console.set_threads(threads)
    console.quiet_libraries()
    with console.err.status(f"Loading {model}"):
        target = load_target(model, dtype=dtype)
        module = choose_drafter(drafter, model, target) if speculation else None
    prompt_ids = console.chat_ids(target, prompt, raw=raw)
    engine = local_engine(target, module)
    handle = engine.add(
        prompt_ids, max_new_tokens=max_new_tokens, stop_token_ids=target.stop_token_ids, shape=shape
    )
    result = engine.result(handle)
    printer = console.TokenPrinter(target)
    interrupted = False
    try:
        while engine.num_active:
            for event in engine.step():
                if not as_json:
                    printer.show(event)
    except KeyboardInterrupt:
        interrupted = True
        engine.abort(handle)
    if as_json:
        console.out.print(json.dumps(summary(target, prompt_ids, result)), markup=False)
    else:
        printer.close()
        console.err.print(describe(result), style="dim")
    if interrupted:
        raise typer.Exit(130)


def choose_drafter(name: str | None, model: str, target: Target) -> MoADrafter | None:
    """The named drafter, else the one bundled for this target, else none (plain decoding)."""
    if name is not None:
        return load_drafter(name, target=target)
    if model in bundled_drafters():
        return load_drafter(model, target=target)
    console.err.print(f"No drafter is bundled for {model}: decoding plainly.", style="yellow")
    return None


def describe(result: GenerationResult) -> str:
    """One line of statistics."""
    timing = result.timing
    decode_s = timing.total_s - timing.prefill_s
    speed = (len(result.token_ids) - 1) / decode_s if decode_s > 0 else 0.0
    tau = f"tau {result.tau:.2f}, " if result.tau else ""
    return (
        f"{len(result.token_ids)} tokens ({result.stop_reason}), {speed:.1f} tokens/s, {tau}"
        f"{result.num_rounds} rounds, prompt {timing.prefill_s:.2f} s"
    )


def summary(target: Target, prompt_ids: list[int], result: GenerationResult) -> dict[str, Any]:
    """What `--json` prints."""
    tokenizer: Any = target.tokenizer
    return {
        "text": tokenizer.decode(result.token_ids, skip_special_tokens=True),
        "token_ids": result.token_ids,
        "sources": result.sources,
        "prompt_tokens": len(prompt_ids),
        "stop_reason": result.stop_reason,
        "tau": result.tau,
        "accept_lengths": result.accept_lengths,
        "acceptance_by_depth": result.acceptance_by_depth,
        "timing": vars(result.timing),
    }
