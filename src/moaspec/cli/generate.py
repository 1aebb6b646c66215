"""`moaspec generate PROMPT`."""

from __future__ import annotations

import json
from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Any

import typer

from moaspec.cli import console
from moaspec.decode import (
    Engine,
    GenerationResult,
    SamplingParams,
    bundled_drafters,
    load_drafter,
    local_engine,
    parse_shape,
)
from moaspec.decode.shaping import FreeBranches
from moaspec.errors import InputError
from moaspec.model import MoADrafter
from moaspec.target import Target, load_target

MODEL = "smollm2-135m"


class FreeBranchesOption(StrEnum):
    """Values of --free-branches."""

    auto = "auto"
    on = "on"
    off = "off"


FREE_BRANCHES: dict[FreeBranchesOption, FreeBranches] = {
    FreeBranchesOption.auto: "auto",
    FreeBranchesOption.on: True,
    FreeBranchesOption.off: False,
}


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
    free_branches: Annotated[
        FreeBranchesOption, typer.Option(help="Also try what the text itself said before.")
    ] = FreeBranchesOption.auto,
    temperature: Annotated[float, typer.Option(help="0 takes the best token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample among so many tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample among tokens of this mass.")] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Drop tokens below this share of the best one's probability.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1 makes tokens that occurred less likely.")
    ] = 1.0,
    seed: Annotated[
        int | None, typer.Option(help="Of sampling; drawn where none is given.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop at this string; may be given several times.")
    ] = None,
    num_choices: Annotated[int, typer.Option(help="Answers, each sampled by itself.")] = 1,
    speculation: Annotated[
        bool, typer.Option("--speculation/--no-speculation", help="Draft, or decode plainly.")
    ] = True,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, no stream.")] = False,
) -> None:
    """Answer a prompt, streaming verified tokens; accepted drafts are green, copies cyan.

    With --tree auto the first run measures this machine, which takes some ten seconds; see
    `moaspec calibrate`.

    Ctrl-C stops generating; what was generated stays on the screen. Several choices are decoded
    together and shown one after another when they are done.

    Example: moaspec generate "Why is the sky blue?" --temperature 0.8 --top-p 0.95 --seed 7
    """
    parse_shape(tree)  # before anything slow
    sampling = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    ).resolved()
    if num_choices < 1:
        raise InputError(f"--num-choices must be at least 1, got {num_choices}.")
    console.set_threads(threads)
    console.quiet_libraries()
    with console.err.status(f"Loading {model}"):
        target = load_target(model, dtype=dtype)
        module = choose_drafter(drafter, model, target) if speculation else None
    prompt_ids = console.chat_ids(target, prompt, raw=raw)
    engine = local_engine(target, module)
    shaping = console.shaping(target, module, tree=tree, free_branches=FREE_BRANCHES[free_branches])
    handles = [
        engine.add(
            prompt_ids,
            max_new_tokens=max_new_tokens,
            stop_token_ids=target.stop_token_ids,
            stop=stop or (),
            shape=shaping.policy(),
            free_branches=shaping.branches(),
            sampling=replace(sampling, choice=choice),
        )
        for choice in range(num_choices)
    ]
    results = [engine.result(handle) for handle in handles]
    printer = None if as_json or num_choices > 1 else console.TokenPrinter(target)
    interrupted = _run(engine, dict(zip(handles, results, strict=True)), printer)
    if as_json:
        facts = [summary(target, prompt_ids, result) for result in results]
        console.out.print(
            json.dumps(facts[0] if num_choices == 1 else {"choices": facts}), markup=False
        )
    else:
        _show(target, results, printer)
    if interrupted:
        raise typer.Exit(130)


def _run(
    engine: Engine, results: dict[int, GenerationResult], printer: console.TokenPrinter | None
) -> bool:
    """Decode to the end, printing as it comes; True when the user stopped it."""
    try:
        while engine.num_active:
            for event in engine.step():
                if printer is not None:
                    printer.show(event)
    except KeyboardInterrupt:
        for handle, result in results.items():
            if result.stop_reason is None:
                engine.abort(handle)
        return True
    return False


def _show(
    target: Target, results: list[GenerationResult], printer: console.TokenPrinter | None
) -> None:
    """What is left to print after decoding: whole choices, and statistics."""
    tokenizer: Any = target.tokenizer
    for number, result in enumerate(results):
        if printer is not None:
            printer.close()
        else:
            console.err.print(f"choice {number}", style="bold")
            text = tokenizer.decode(result.token_ids, skip_special_tokens=True)
            console.out.print(text, markup=False)
        console.err.print(describe(result), style="dim")


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
    tau += f"{result.num_copied} of them copied, " if result.num_copied else ""
    seed = "" if result.seed is None else f", seed {result.seed}"
    return (
        f"{len(result.token_ids)} tokens ({result.stop_reason}), {speed:.1f} tokens/s, {tau}"
        f"{result.num_rounds} rounds, prompt {timing.prefill_s:.2f} s{seed}"
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
        "stop_string": result.stop_string,
        "seed": result.seed,
        "tau": result.tau,
        "num_copied": result.num_copied,
        "accept_lengths": result.accept_lengths,
        "acceptance_by_depth": result.acceptance_by_depth,
        "timing": vars(result.timing),
    }
