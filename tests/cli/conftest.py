"""Running commands on tiny models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import logging

import tiny
from caches import new_cache
from commands import Cli, Output, load_targets_by, text_target
from moaspec.cli.loading import warn_unmeasured
from moaspec.model.moa import MoADrafter
from moaspec.target.target import Target
from moaspec_core.cli.main import run
from moaspec_core.cli.terminal import console


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs the installed command's entry point."""
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    warn_unmeasured.cache_clear()

    def call(*arguments: str) -> Output:
        monkeypatch.setattr("sys.argv", ["moaspec", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            run()
        captured = capsys.readouterr()
        code = caught.value.code
        return Output(code if isinstance(code, int) else 0, captured.out, captured.err)

    return call


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements of this machine are made for these tests alone."""
    monkeypatch.setenv("MOASPEC_CACHE", str(new_cache(tmp_path / "cache")))


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a width at which nothing wraps; a test may set another one."""
    monkeypatch.setenv("COLUMNS", "300")
    for shown in (console.out, console.err):
        monkeypatch.setattr(shown, "_width", None)  # what it had at import


@pytest.fixture(autouse=True)
def _libraries_speak_again() -> Iterator[None]:
    yield
    logging.set_verbosity_warning()
    logging.enable_progress_bar()


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Target:
    """Every name is the tiny target, and every drafter the agreeing one."""
    target = text_target()

    def drafter(*_: Any, **__: Any) -> MoADrafter:
        return tiny.agreeing_drafter("llama")

    load_targets_by(monkeypatch, lambda *_, **__: target)
    monkeypatch.setattr("moaspec.generation.drafters.load_any_drafter", drafter)
    monkeypatch.setattr("moaspec.cli.loading.bundled_drafters", lambda: {"smollm2-135m": Path()})
    monkeypatch.setattr("moaspec.target.registry.find_target_gguf", lambda _: None)
    return target
