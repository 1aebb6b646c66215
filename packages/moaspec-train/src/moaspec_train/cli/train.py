"""`moaspec train CONFIG.yaml key=value ...`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moaspec.data.conversations import ReadReport
from moaspec.data.rows import require_sources
from moaspec_core.cli.entry import INTERRUPTED
from moaspec_core.cli.options import Threads, with_options
from moaspec_core.cli.terminal import console
from moaspec_core.cli.terminal.console import Screen
from moaspec_core.cli.terminal.interrupts import TERMINATED, TerminatedError, raise_on_sigterm
from moaspec_core.cli.terminal.progress_bar import ProgressBar
from moaspec_core.cli.terminal.status import loading, set_threads, show_log_records, status
from moaspec_core.cli.terminal.table import show_table
from moaspec_core.errors import InputError
from moaspec_core.support.locks import writing
from moaspec_core.support.paths import require_writable
from moaspec_train.cli.continuous import ContinuousOptions
from moaspec_train.cli.plan_table import plan_table
from moaspec_train.stopping import EXIT_UNFINISHED, StopCause, parse_duration

if TYPE_CHECKING:
    from accelerate import Accelerator

    from moaspec.target.spec import TargetSpec
    from moaspec.target.target import Target
    from moaspec_train.dataset.examples import Example
    from moaspec_train.reports.run_log import StepMetrics as StepProgress
    from moaspec_train.run_config import TrainConfig
    from moaspec_train.trainer import Trainer


@with_options
def train(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Argument(help="YAML file of settings; with --init: a name.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value pairs.")] = None,
    *,
    continuously: ContinuousOptions,
    for_: Annotated[
        str | None, typer.Option("--for", help="Stop after this time, ready to resume: 8m, 1.5h.")
    ] = None,
    threads: Threads = None,
    init: Annotated[bool, "Write a ready configuration here; without a name: list them."] = False,
    dry_run: Annotated[bool, "Show memory, disk, time and expected tau; load no weights."] = False,
    gpu: Annotated[str, "GPUs of the estimates of --dry-run, such as h100 or 8xh100."] = "h100",
) -> None:
    """Train a drafter, or resume its training.

    Run the command again to resume exactly where it stopped. Ctrl-C saves the last step before
    leaving. Exit code 75: the time of --for is over, and there is
    more to do. Several processes: torchrun -m moaspec train ...

    Example: moaspec train --init smollm2-135m; moaspec train smollm2-135m.yaml
    data='["responses.jsonl"]' steps=500 --for 8m; moaspec train --continuous
    qwen2.5-coder-0.5b.yaml prompts='["prompts.jsonl"]' --for 8h --disk 40GB; moaspec train
    llama-3-8b.yaml --dry-run --gpu 8xh100
    """
    if init:
        _write_recipe(config)
        return
    config = _existing(config)
    if dry_run:
        if continuously.continuous:
            raise InputError(
                "--dry-run plans `steps` over `data`, which --continuous has not: leave one out."
            )
        _show_plan(config, overrides or [], gpu)
        return
    seconds = None if for_ is None else parse_duration(for_)
    with loading(str(config)):
        from moaspec.backends.load import load_target
        from moaspec_train.parallelism import new_accelerator
        from moaspec_train.run_config import read_train_config

        settings = read_train_config(config, overrides or [])
        if threads is not None:
            settings = dataclasses.replace(settings, threads=threads)
        continuously.check(settings)
        output = _checked_places(settings)
        set_threads(settings.threads or None)
        accelerator = new_accelerator(settings)
        if accelerator.is_main_process:
            context.with_resource(writing(output))
        skeleton = _checked_target(settings, accelerator.num_processes)
    main = accelerator.is_main_process
    out, told = (console.out, console.err) if main else (Screen(quiet=True),) * 2
    with _explained_stop(output):
        examples = _read_all(settings, skeleton, told)
        with status(f"Loading {settings.target}"):
            target = load_target(
                settings.target,
                dtype=settings.target_dtype,
                device=str(accelerator.device),
                packed=continuously.continuous,
                quantize=settings.quantize or None,
                adapter=settings.adapter or None,
                tokenizer=settings.tokenizer or None,
                chat_template=settings.chat_template or None,
            )
        if continuously.continuous:
            continuously.run(target, settings, *examples, seconds=seconds)
        else:
            _train(target, settings, *examples, accelerator, (out, told), seconds)


def _checked_target(settings: TrainConfig, processes: int) -> TargetSpec:
    """Refuse what cannot be trained before minutes are spent on loading it."""
    from moaspec_train.reports.plan import make_plan

    skeleton = _skeleton(settings)
    make_plan(skeleton, settings, processes=processes)
    return skeleton


def _skeleton(settings: TrainConfig) -> Target:
    from moaspec.target.registry import read_skeleton
    from moaspec.target.weights.quantised import prepare_config

    skeleton = read_skeleton(
        settings.target,
        dtype=settings.target_dtype,
        tokenizer=settings.tokenizer or None,
        chat_template=settings.chat_template or None,
    )
    prepare_config(skeleton.model.config, skeleton.name)
    return skeleton


def _read_all(
    settings: TrainConfig, target: TargetSpec, told: Screen
) -> tuple[list[Example], list[Example]]:
    """Examples to train on and held-out ones; tells of settings, and of what is not used."""
    from moaspec_train.reports.run_notes import setting_notes

    for note in setting_notes(settings):
        told.print(note)
    unused = ReadReport()
    with status("Reading examples"):
        examples, held_out = (
            _read_examples(sources, settings, target, unused) if sources else []
            for sources in (settings.data, settings.held_out_data)
        )
    for sentence in unused.lines():
        told.print(sentence)
    return examples, held_out


def _train(
    target: Target,
    settings: TrainConfig,
    examples: list[Example],
    held_out: list[Example],
    accelerator: Accelerator,
    screens: tuple[Screen, Screen],
    seconds: float | None,
) -> None:
    """Train `settings.steps` steps on these examples."""
    from moaspec_train.trainer import Trainer

    out, told = screens
    with status(f"Preparing a drafter from {len(examples)} examples"):
        trainer = Trainer(target, examples, settings, held_out=held_out, accelerator=accelerator)
    _tell_start(trainer, len(examples), told)
    with (
        ProgressBar("step", settings.steps, screen=told, stays=True) as bar,
        show_log_records(told, lambda text: bar.update(completed=trainer.step, text=text.plain)),
    ):
        bar.resume(trainer.step)

        def report(step: StepProgress) -> None:
            bar.update(completed=step.step, text=_line(step))
            if step.held_out_accuracy:
                bar.screen.print(_measured(step))

        ending = trainer.run(report, seconds=seconds)
    _tell_end(trainer, ending, out, told)


def _checked_places(settings: TrainConfig) -> Path:
    """The output; refuses sources that are missing, and directories that cannot be written."""
    output = Path(settings.output)
    require_sources((*settings.data, *settings.prompts, *settings.held_out_data), output)
    require_writable("output", output)
    if settings.kept:
        require_writable("kept", Path(settings.kept))
    return output


def _existing(config: Path | None) -> Path:
    if config is None:
        raise InputError("Name a YAML file of settings, or list ready ones with --init.")
    if str(config).startswith("-"):
        raise InputError(f"There is no option {config}: moaspec train --help lists them.")
    if not config.is_file():
        raise InputError(
            f"Cannot read the training config {config}: there is no such file. "
            "moaspec train --init writes one."
        )
    return config


def _tell_start(trainer: Trainer, num_examples: int, told: Screen) -> None:
    """Notes, and how large the run is."""
    for line in trainer.notes():
        told.print(line)
    size = sum(parameter.numel() for parameter in trainer.student.module.parameters())
    told.print(
        f"{num_examples} examples, drafter of {size / 1e6:.1f}M parameters, "
        f"from step {trainer.step}"
    )


def _tell_end(trainer: Trainer, ending: StopCause, out: Screen, told: Screen) -> None:
    """Say where the drafters are; leave with the exit code of a run that is not over."""
    written = f"drafter written to {trainer.output / 'drafter'}"
    if trainer.best is not None and trainer.best.step != trainer.step:
        best = f"step {trainer.best.step}, the best on held-out text ({trainer.best.score:.2f})"
        told.print(f"The weights of {best}, are in {trainer.output / 'best'}.")
    if ending is StopCause.FINISHED:
        out.print(f"Finished: {written}")
        return
    told.print(
        f"Stopped after step {trainer.step} of {trainer.config.steps}, which is saved; run it "
        f"again to continue. As it is now, {written}"
    )
    codes = {StopCause.INTERRUPTED: INTERRUPTED, StopCause.TERMINATED: TERMINATED}
    raise typer.Exit(codes.get(ending, EXIT_UNFINISHED))


def _show_plan(path: Path, overrides: list[str], gpu: str) -> None:
    with loading(str(path)):
        from moaspec_train.reports.plan import GPUs, cpu_operations_per_s, make_plan
        from moaspec_train.reports.run_notes import setting_notes
        from moaspec_train.run_config import launched_processes, read_train_config

        gpus, settings = GPUs.parse(gpu), read_train_config(path, overrides)
        set_threads(settings.threads or None)
        if settings.data:
            require_sources(settings.data)
        skeleton = _skeleton(settings)
        on_gpus = settings.device == "cuda"
        plan = partial(
            make_plan,
            skeleton,
            settings,
            processes=gpus.count if on_gpus else launched_processes(),
        )
        found = plan()
    if settings.data:
        with status("Reading examples"):
            found = plan(_read_examples(settings.data, settings, skeleton, ReadReport()))
    for note in setting_notes(settings):
        console.err.print(note)
    rate = 0.0
    if settings.device == "cpu":
        rate = launched_processes() * cpu_operations_per_s(settings)
    show_table(plan_table(found, settings, gpus if on_gpus else None, rate))


def _read_examples(
    sources: Sequence[str], settings: TrainConfig, target: TargetSpec, report: ReadReport
) -> list[Example]:
    from moaspec_train.dataset.read_examples import read_examples

    return read_examples(
        sources,
        vocab_size=target.vocab_size,
        max_length=settings.max_length,
        tokenizer=target.tokenizer,
        stop_token_ids=target.stop_token_ids,
        report=report,
    )


@contextmanager
def _explained_stop(output: Path) -> Iterator[None]:
    """On Ctrl-C or SIGTERM, say what is saved and leave.

    `Trainer.run` saves the last step first; here arrive signals before and after it, and second
    ones.
    """
    from moaspec_train.training_state import StateFiles

    try:
        with raise_on_sigterm():
            yield
    except (KeyboardInterrupt, TerminatedError) as reason:
        ended = isinstance(reason, TerminatedError)
        saved = StateFiles(output / "state").sentence()
        if any(output.glob("activations/*/*")) or any(output.glob("means/*/*")):
            saved += " Activations that were computed are kept."
        console.warn(
            f"Stopped by {'SIGTERM' if ended else 'Ctrl-C'}. {saved} Run the same command again to "
            "continue."
        )
        raise typer.Exit(TERMINATED if ended else INTERRUPTED) from reason


def _write_recipe(name: Path | None) -> None:
    from moaspec_train.recipes import recipes, write_recipe

    if name is None:
        for known, purpose in recipes().items():
            console.out.print(f"{known}: {purpose}")
        return
    console.out.print(f"Written: {write_recipe(str(name), Path())}")


def _line(step: StepProgress) -> str:
    return (
        f"loss {step.loss:.2f} kl {step.kl:.2f} accuracy {step.accuracy:.0%} "
        f"{step.tokens_per_s:.0f} tokens/s"
    )


def _measured(step: StepProgress) -> str:
    taus = step.held_out_tau or {}
    shown = ", ".join(f"{tau} (N={n})" for n, tau in taus.items() if tau is not None)
    return f"step {step.step}: held-out accuracy {step.held_out_accuracy}, tau {shown or 'none'}"
