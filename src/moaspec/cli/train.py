"""`moaspec train CONFIG.yaml key=value ...`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from moaspec.cli import console
from moaspec.target import load_target
from moaspec.train import Progress as StepProgress
from moaspec.train import Trainer, read_examples, read_train_config


def train(
    config: Annotated[Path, typer.Argument(help="YAML file of settings.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value pairs.")] = None,
) -> None:
    """Train a drafter; run the same command again to resume from the last checkpoint.

    Example: moaspec train configs/smollm2-135m.yaml data='[responses.jsonl]' steps=500
    """
    settings = read_train_config(config, overrides or [])
    console.set_threads(settings.threads or None)
    console.quiet_libraries()
    with console.err.status(f"Loading {settings.target}"):
        target = load_target(settings.target, device=settings.device, packed=False)
        examples = read_examples(
            settings.data,
            vocab_size=target.vocab_size,
            max_length=settings.max_length,
            tokenizer=target.tokenizer,
            stop_token_ids=target.stop_token_ids,
        )
        trainer = Trainer(target, examples, settings)
    console.out.print(
        f"{len(examples)} examples, drafter of {trainer.drafter.num_parameters / 1e6:.1f}M "
        f"parameters, from step {trainer.step}"
    )
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console.out) as bar:
        task = bar.add_task("train", total=settings.steps, completed=trainer.step, state="")

        def report(step: StepProgress) -> None:
            bar.update(task, completed=step.step, state=_line(step))
            if step.held_out_accuracy:
                bar.console.print(f"step {step.step}: held-out accuracy {step.held_out_accuracy}")

        trainer.run(report)
    console.out.print(f"Drafter written to {trainer.output / 'drafter'}")


def _line(step: StepProgress) -> str:
    return f"loss {step.loss:.3f}  kl {step.kl:.3f}  {step.tokens_per_s:.0f} tokens/s"
