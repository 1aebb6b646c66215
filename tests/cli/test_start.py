"""What a command imports before it does something, and what Ctrl-C does meanwhile."""

from __future__ import annotations

import importlib
import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

import moaspec
from moaspec.backends import load
from moaspec_core.cli.main import app

LIBRARIES = ("torch", "transformers")
SLOW = (*LIBRARIES, "numpy", "accelerate", "datasets", "fastapi", "huggingface_hub", "websockets")

RUN = """
import json, sys
from moaspec_core.cli.entry import run
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["moaspec", *arguments]
    try:
        run()
    except SystemExit as end:
        code = end.code or 0
    modules = sorted({name.split(".")[0] for name in sys.modules})
    print("\\n" + json.dumps([arguments, code, modules]))
"""


def _after(code: str, *arguments: str, **environment: str) -> str:
    """Standard output of Python code in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=500,
        check=True,
    )
    return done.stdout


def _runs(cases: Sequence[Sequence[str]]) -> Iterator[tuple[list[str], int, set[str]]]:
    """Commands one after another in one process: each one's exit code, and what is imported."""
    for line in _after(RUN, json.dumps(cases)).splitlines():
        if line.startswith('[["') or line.startswith("[[]"):
            arguments, code, modules = json.loads(line)
            yield arguments, code, set(modules)


def _commands(group: TyperGroup, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        yield (*above, name)
        if isinstance(command, TyperGroup):
            yield from _commands(command, (*above, name))


@pytest.mark.slow
def test_what_only_lists_and_explains_imports_no_library() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    helps = [[*names, "--help"] for names in _commands(group)]
    cases = [["--version"], ["--help"], [], *helps, ["models"], ["models", "--json"]]
    done = list(_runs(cases))
    assert len(done) == len(cases) > 25
    for arguments, code, modules in done:
        assert code == (2 if not arguments else 0)
        assert not modules.intersection(SLOW), arguments


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shell", "words", "expected"),
    [
        ("bash", "moaspec cali", "calibrate"),
        ("bash", "moaspec data reg", "regenerate"),
        ("bash", "moaspec generate --temp", "--temperature"),
        ("zsh", "moaspec cali", "calibrate"),
        ("zsh", "moaspec generate --temp", "--temperature"),
    ],
)
def test_shells_complete_commands_and_options(shell: str, words: str, expected: str) -> None:
    code = """
import atexit, sys
from moaspec_core.cli.entry import run
atexit.register(lambda: print("imported:", *sorted({name.split(".")[0] for name in sys.modules})))
run()
"""
    given = {
        "_MOASPEC_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
        "_TYPER_COMPLETE_ARGS": words,
    }
    completed, _, modules = _after(code, **given).partition("imported:")
    assert expected in completed
    assert not set(modules.split()).intersection(SLOW)


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_can_be_shown(shell: str) -> None:
    code = "from moaspec_core.cli.entry import run; run()"
    assert "_MOASPEC_COMPLETE" in _after(code, _MOASPEC_COMPLETE=f"source_{shell}")


@pytest.mark.slow
def test_bad_input_is_told_before_libraries_are_imported() -> None:
    nowhere = str(Path("no", "such", "file.jsonl"))
    cases = [
        ["generate", "x", "--tree", "bush"],
        ["generate", "x", "--max-new-tokens", "-1"],
        ["generate", "x", "--temperature", "-1"],
        ["generate", "x", "--stop", ""],
        ["generate", "x", "--threads", "0"],
        ["generate", "x", "--temperature", "nan"],
        ["generate", "x", "--dtype", "float8"],
        ["chat", "--top-p", "2"],
        ["serve", "--tree", "tree:1x1x9"],
        ["serve", "--api-key-file", nowhere],
        *(
            ["serve", "--allow-host", name]
            for name in ("http://x.org", "", "x.org/path", "*.x.org")
        ),
        ["edge", "--allow-host", "a b"],
        ["check", "--suite", nowhere],
        ["eval", "--suite", nowhere],
        ["eval", "--limit", "0"],
        ["eval", "compare", nowhere, nowhere],
        ["info", nowhere],
        ["remote", "x", "--server", "nowhere"],
        ["edge", "--server", "nowhere"],
        ["edge", "--ca", nowhere],
        ["target-server", "--key", nowhere],
        ["data", "synth", "--num", "0", "--out", nowhere],
        ["data", "synth", "--temperature", "-1", "--out", nowhere],
        ["data", "regenerate", nowhere, "--out", nowhere],
        ["data", "overlap", nowhere, "--against", nowhere],
        ["train", nowhere, "--for", "soon"],
        ["train", nowhere],
        ["generate", "x", "--quantize", "int3"],
        ["chat", "--quantize", "int3"],
        ["eval", "--quantize", "int3"],
    ]
    done = list(_runs(cases))
    assert len(done) == len(cases)
    for arguments, code, modules in done:
        assert code == 2, arguments
        assert not modules.intersection(LIBRARIES), arguments


def test_what_is_not_decoding_imports_no_library() -> None:
    _after(
        """
import sys
import moaspec, moaspec_core.errors
from moaspec_core.drafting.tree_shapes import parse_shape
from moaspec_core.bundled import bundled_drafters
from moaspec.evaluate import read_prompts
from moaspec.target import ALIASES, SUPPORTED_FAMILIES
assert parse_shape("tree:6x8x62") and bundled_drafters() and read_prompts("bundled")
assert not {"torch", "transformers"} & sys.modules.keys()
"""
    )


def test_all_that_packages_export_can_be_had() -> None:
    names = ("moaspec.target", "moaspec.model", "moaspec.evaluate", "moaspec_train", "moaspec_edge")
    for name in names:
        package = importlib.import_module(name)
        assert package.__all__
        assert all(hasattr(package, exported) for exported in package.__all__)
        assert not hasattr(package, "nothing")
    assert moaspec.load_target is load.load_target
    assert "errors" not in moaspec.__all__


@pytest.mark.slow
def test_what_libraries_say_is_not_shown() -> None:
    code = """
from moaspec_core.cli.terminal.status import quiet_libraries
quiet_libraries()
import logging, sys, warnings
from tqdm.auto import tqdm
from transformers.utils import logging as transformers_logging
list(tqdm(range(3)))
list(transformers_logging.tqdm(range(3)))
warnings.warn("noise")
for name in ("transformers.something", "library"):
    logging.getLogger(name).warning("noise")
logging.getLogger("moaspec.backends.cpu").warning("no compiler")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=500, check=True
    )
    assert (done.stdout, done.stderr) == ("", "no compiler\n")


# Ctrl-C

AT_TORCH = """
import importlib.util, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in background
from moaspec_core.cli.entry import run
class Torch:
    def find_spec(self, name, *_):
        return importlib.util.spec_from_loader(name, self) if name == "torch" else None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        {what}
sys.meta_path.insert(0, Torch())
sys.argv = ["moaspec", "generate", "x"]
run()
"""


@pytest.mark.slow
def test_ctrl_c_while_the_libraries_load() -> None:
    """They would catch an exception, or leave half a module; the process ends at once."""
    code = AT_TORCH.format(what="os.kill(os.getpid(), signal.SIGINT)")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (
        130,
        "",
        "Loading smollm2-135m\nStopped by Ctrl-C: nothing had begun.\n",
    )


def test_ctrl_c_while_the_command_line_loads() -> None:
    code = AT_TORCH.replace('"torch"', '"typer"').format(what="os.kill(os.getpid(), signal.SIGINT)")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def _in_terminal(code: str) -> tuple[int, str]:
    """Exit code of a process whose output is a terminal, and what it showed there."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(ours, 4096):
                shown += part
        except OSError:  # what Linux says when nobody has the other end any more
            pass
    os.close(ours)
    return process.returncode, shown.decode()


@pytest.mark.slow
def test_a_terminal_says_what_loads_before_the_libraries_are_imported() -> None:
    code, shown = _in_terminal(AT_TORCH.format(what="os._exit(7)"))
    assert code == 7
    assert "Loading smollm2-135m" in shown


@pytest.mark.slow
def test_ctrl_c_leaves_the_terminal_as_it_was() -> None:
    code, shown = _in_terminal(AT_TORCH.format(what="os.kill(os.getpid(), signal.SIGINT)"))
    assert code == 130
    assert "Traceback" not in shown
    hidden, visible = "\x1b[?25l", "\x1b[?25h"
    assert shown.rindex(hidden) < shown.rindex(visible)
