"""`moaspec eval`: measures decoding methods side by side."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from moaspec.cli.eval_endpoints import compare_endpoints
from moaspec.cli.report_tables import show, show_comparison
from moaspec.evaluate.prompt_suites import read_prompts
from moaspec.evaluate.report import REPORT
from moaspec_core.cli.checkout import add_tool_command, checkout_option, has_tool, import_tool
from moaspec_core.cli.model_defaults import print_defaults
from moaspec_core.cli.options import (
    Device,
    GenerationConfig,
    Json,
    LoadOptions,
    generation_defaults,
    with_options,
)
from moaspec_core.cli.terminal import console
from moaspec_core.cli.terminal.progress_bar import ProgressBar
from moaspec_core.cli.terminal.status import loading
from moaspec_core.errors import InputError
from moaspec_core.support.locks import writing

DEFAULT_METHODS = "hf,plain,moa"


app = typer.Typer(no_args_is_help=False)


@app.callback(invoke_without_command=True)
@with_options
def evaluate(
    context: typer.Context,
    *,
    suite: Annotated[
        str,
        "bundled, bundled-code, paper, spec-bench, speed-bench, a JSONL file, a directory of them, "
        "or hub:OWNER/NAME.",
    ] = "bundled",
    methods: Annotated[
        str, "Methods to time, commas between; see docs/evaluation.md."
    ] = DEFAULT_METHODS,
    tau_only: Annotated[str, "Methods measured for tau only: decoded in batches, not timed."] = "",
    limit: Annotated[int | None, "Prompts per suite, spread over its categories."] = None,
    max_new_tokens: Annotated[int, "Tokens per answer."] = 128,
    repeats: Annotated[int, "How often each method decodes each prompt."] = 1,
    batch: Annotated[int, "Prompts decoded together; above 1, speed is throughput."] = 1,
    temperature: Annotated[float, "0: greedy; above 0, all methods sample the same text."] = 0.0,
    seed: Annotated[int, "Seed of sampling."] = 0,
    asked: LoadOptions,
    checkpoint: Annotated[
        list[str] | None, "Checkpoint of another method: KIND=DIR, for example hf-assisted=DIR."
    ] = None,
    generation_config: GenerationConfig = "auto",
    device: Device = "cpu",
    endpoints: Annotated[
        tuple[str, str] | None,
        "URLs of two OpenAI-compatible servers, compared in place of methods: speed, and tau and "
        "acceptance as they report them, by category of the suite.",
    ] = None,
    cost: Annotated[
        bool,
        checkout_option(
            "--cost", "Measure only costs of passes and rounds, without prompts; in a checkout."
        ),
    ] = False,
    cut: Annotated[
        int | None,
        checkout_option(
            "--cut",
            "Remove the target after this many tokens; judge the drafters' texts; in a checkout.",
        ),
    ] = None,
    accuracy: Annotated[
        bool,
        checkout_option(
            "--accuracy",
            "With --cut: also whether answers to gsm8k and humaneval are right. Runs the code "
            "that the model writes, in a sandbox (bubblewrap or Linux namespaces).",
        ),
    ] = False,
    out: Annotated[
        Path | None, "Directory for results; the same command resumes what is there."
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure decoding methods side by side.

    Their texts are compared, too.

    Example: moaspec eval --endpoints http://localhost:8000 http://localhost:8001 --suite spec-bench

    Example: moaspec eval --suite prompts/ --limit 20 --dtype bfloat16 --threads 2 --out results
    """
    if context.invoked_subcommand is not None:
        return
    timed, untimed = _names(methods), _names(tau_only)
    _check_options(context.params, timed)
    if out is not None:
        context.with_resource(writing(out))
    read = {"suite": suite, "limit": limit}
    prompts = [] if cost else read_prompts(suite, limit=limit)
    if endpoints is not None:
        compare_endpoints(endpoints, prompts, max_new_tokens, out, as_json=as_json)
        return
    study = _study(cost=cost, cut=cut, max_new_tokens=max_new_tokens, accuracy=accuracy)
    if study is not None:
        study.check(prompts)
    with loading(asked.model, asked.threads, asked.quantize):
        from moaspec.backends.load import chosen_dtype
        from moaspec.cli.method_loading import (
            MethodSources,
            chat_encoder,
            check_methods,
            load_methods,
            load_reference_target,
            read_checkpoints,
        )
        from moaspec.evaluate.correctness.equality import RULE
        from moaspec.evaluate.method_names import require_known_noise
        from moaspec.evaluate.report.report import surroundings
        from moaspec.evaluate.results_store import ResultsStore, make_results_directory
        from moaspec.evaluate.runner import EvalSettings, measure

        require_known_noise([*timed, *untimed], temperature)
        settings = EvalSettings(
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            batch=batch,
            temperature=temperature,
            seed=seed,
        )
        if out is not None:
            make_results_directory(out)
        sources = MethodSources(
            asked.model,
            asked.dtype,
            asked.drafter,
            read_checkpoints(checkpoint or []),
            device,
            asked.quantize,
            asked.adapter,
            asked.tokenizer,
            asked.chat_template,
            generation_defaults(generation_config),
        )
        check_methods([*timed, *untimed], sources)
        sources = replace(
            sources,
            dtype=chosen_dtype(
                asked.dtype,
                device=device,
                model=asked.model,
                adapter=asked.adapter,
                tokenizer=asked.tokenizer,
            ),
        )
        around = {**asdict(sources), **surroundings()}
        info = {**settings.as_dict(), **around, "rule": RULE}
        # It refuses other settings before anything is loaded.
        store = None if study else ResultsStore(out, info)
        loaded = load_methods([*timed, *untimed], sources)
        trusted = None if study else load_reference_target(loaded, sources)
    print_defaults(loaded[0].target, loaded[0].target.generation_defaults)
    encode = chat_encoder(loaded[0].target)
    if study is not None:
        found = study.measure(loaded, prompts, encode)
        if cut is not None:
            around = {**around, **read, "max_new_tokens": max_new_tokens}
        _write_study(
            {**found.as_json(), "settings": around},
            lambda: study.show(found),
            out and out / study.file_name,
            as_json=as_json,
        )
        return
    with ProgressBar(
        "measuring", len(loaded) * sum(len(prompt.turns) for prompt in prompts)
    ) as bar:
        report = measure(
            loaded[: len(timed)],
            prompts,
            encode,
            settings,
            tau_only=loaded[len(timed) :],
            trusted=trusted,
            store=store,
            advance=bar.advance,
        )
    if report.interrupted:
        _write_results(report.as_json(), lambda: show(report), None, as_json=as_json)
        kept = f"They are kept in {out}; the same command continues." if out else None
        _leave("shown are the prompts measured before", kept)
    info = {"settings": {**info, **read}, **report.as_json()}
    _write_results(info, lambda: show(report), out and out / REPORT, as_json=as_json)
    if not report.lossless:
        raise typer.Exit(1)


def _check_options(options: dict[str, Any], timed: Sequence[str]) -> None:
    """Refuse options that are out of range or would be ignored, before anything is loaded."""
    limit = options["limit"]
    if limit is not None and limit < 1:
        raise InputError(f"--limit must be at least 1, got {limit}.")
    apart = options["cost"] or options["cut"] is not None
    if options["accuracy"] and options["cut"] is None:
        raise InputError("--accuracy goes with --cut: without a cut every text is the target's.")
    if options["cost"] and options["cut"] is not None:
        raise InputError("--cost and --cut are measured by themselves: use one after the other.")
    if apart and (options["repeats"], options["batch"], options["tau_only"]) != (1, 1, ""):
        raise InputError("--repeats, --batch and --tau-only do not go with --cost and --cut.")
    if apart and options["temperature"]:
        raise InputError("--temperature does not go with --cost and --cut, which are greedy.")
    _check_endpoints(options)
    if not timed:
        raise InputError("--methods must name at least one method that is timed.")


def _check_endpoints(options: dict[str, Any]) -> None:
    """Refuse options of methods beside servers."""
    apart = options["cost"] or options["cut"] is not None or options["tau_only"]
    if options["endpoints"] is not None and (apart or options["temperature"]):
        raise InputError(
            "--endpoints goes with --suite, --limit, --max-new-tokens, --out and --json only."
        )


def _study(*, cost: bool, cut: int | None, max_new_tokens: int, accuracy: bool) -> Any:
    """The study of --cost or --cut, whose code only a checkout has; None for neither.

    Raises:
        InputError: this is an installed package.
    """
    if not cost and cut is None:
        return None
    studies = import_tool("eval_studies.command", f"moaspec eval --{'cost' if cost else 'cut'}")
    if cost:
        return studies.CostStudy()
    return studies.CutStudy(cut, max_new_tokens, accuracy)


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="A report.json, or its directory.")],
    after: Annotated[Path, typer.Argument(help="The one to compare with it.")],
    as_json: Json = False,
) -> None:
    """Compare two reports.

    Changes have 95% confidence intervals over prompts.

    Example: moaspec eval compare results/before results/after
    """
    from moaspec.evaluate.report.comparison import compare_reports, read_report

    found = compare_reports(read_report(before), read_report(after))
    _write_results(found.as_json(), lambda: show_comparison(found), None, as_json=as_json)


add_tool_command(app, "eval_report.command:page", "moaspec eval page")


def _write_results(
    info: dict[str, Any], show_it: Callable[[], None], path: Path | None, *, as_json: bool
) -> None:
    """Write the file and the page around it, where wanted; print the table or the JSON."""
    if path is not None:
        from moaspec.evaluate.results_store import write_whole

        write_whole(path, json.dumps(info, indent=1, allow_nan=False) + "\n")
    written = None if path is None else _write_page(path.parent) or path
    if as_json:
        console.out.print(json.dumps(info))
    else:
        show_it()
    if written is not None:
        (console.err if as_json else console.out).print(f"Report: {written}")


def _write_study(
    info: dict[str, Any], show_it: Callable[[], None], path: Path | None, *, as_json: bool
) -> None:
    """`_write_results` of costs or a cut; results that Ctrl-C cut short replace no file."""
    interrupted = info["interrupted"]
    is_kept = interrupted and path is not None and path.exists()
    _write_results(info, show_it, None if is_kept else path, as_json=as_json)
    if interrupted:
        _leave("shown is the part measured before", f"{path} stays as it was." if is_kept else None)


def _leave(what: str, kept: str | None) -> NoReturn:
    console.warn(f"Stopped: {what}." + (f" {kept}" if kept else ""))
    raise typer.Exit(130)


def _write_page(directory: Path) -> Path | None:
    """Write the page if there is a report; skip it without tools or matplotlib."""
    if not has_tool("eval_report.pages") or not (directory / REPORT).exists():
        return None
    try:
        return import_tool("eval_report.pages", "moaspec eval page").write_page(directory)
    except InputError as error:
        console.warn(f"No report.html: {error}")
        return None


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
