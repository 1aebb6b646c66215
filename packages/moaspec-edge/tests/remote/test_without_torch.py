"""A device needs what `moaspec-edge` installs, and nothing that Windows lacks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import moaspec
from bundles import save_drafter_and_target
from free_port import free_port
from moaspec.backends.load import load_target
from moaspec_core.support.extras import MODULES
from server_in_thread import server_in_thread

pytest.importorskip("onnx", reason="moaspec-edge[export] is not installed")
pytest.importorskip("onnxruntime", reason="moaspec-edge[export] is not installed")

from moaspec_edge.device_onnx.onnx_bundle import export_onnx

pytestmark = [pytest.mark.slow, pytest.mark.essential]

WINDOWS_LACKS = (
    *("fcntl", "grp", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"),
    *("os.fork", "os.getegid", "os.geteuid", "os.getgid", "os.getpgid", "os.getuid", "os.killpg"),
    *("os.nice", "os.pread", "os.pwrite", "os.sched_getaffinity", "os.sysconf"),
    *("signal.SIGALRM", "signal.SIGHUP", "signal.SIGKILL", "signal.SIGQUIT", "signal.SIGUSR1"),
)
"""Modules, and names in modules."""

WITHOUT = """
import importlib, json, sys

class Finder:
    '''Finds what the finders find, except some modules.'''
    def __init__(self, finders, hidden):
        self.finders, self.hidden = finders, hidden
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.hidden:
            return None
        found = (finder.find_spec(name, path, target) for finder in self.finders)
        return next((spec for spec in found if spec is not None), None)
    def find_distributions(self, *context):
        for finder in self.finders:
            for one in getattr(finder, "find_distributions", lambda *_: ())(*context):
                if one.name.replace("-", "_") not in self.hidden:
                    yield one

hidden = json.loads(sys.argv.pop(1))
for name in hidden:
    module, _, attribute = name.rpartition(".")
    if attribute and module:
        delattr(importlib.import_module(module), attribute)
    else:
        sys.modules.pop(name, None)
before = set(sys.modules)
sys.meta_path[:] = [Finder(list(sys.meta_path), hidden)]
from moaspec_core.cli import main
sys.argv[0] = "moaspec"
try:
    main.run()
finally:
    loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
    assert not loaded & set(hidden), loaded & set(hidden)
"""


def brought(wanted: Iterable[str]) -> set[str]:
    """Distributions that these requirements install."""
    found, queue = set[tuple[str, frozenset[str]]](), list(map(Requirement, wanted))
    while queue:
        one = queue.pop()
        if (key := (canonicalize_name(one.name), frozenset(one.extras))) in found:
            continue
        found.add(key)
        for needed in map(Requirement, metadata.requires(one.name) or ()):
            marker, extras = needed.marker, ("", *one.extras)
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
                queue.append(needed)
    return {name for name, _ in found}


def not_installed(*extras: str) -> tuple[str, ...]:
    """Modules that are here and that `moaspec-edge` with these extras does not install."""
    there = brought([f"moaspec-edge[{','.join(extras)}]"])
    here: dict[str, set[str]] = {
        module: set(map(canonicalize_name, names))
        for module, names in metadata.packages_distributions().items()
    }
    # An editable installation's files do not name its modules.
    here |= {
        one.replace("-", "_"): {one}
        for one in MODULES
        if one.startswith("moaspec") and "[" not in one
    }
    return tuple(module for module, names in here.items() if not there & names)


ABSENT = not_installed("onnx", "private")


def run(*arguments: str, absent: tuple[str, ...] = ABSENT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, json.dumps(absent), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
        check=False,
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("without")
    save_drafter_and_target(made)
    export_onnx(made / "target", made / "drafter", made / "bundle", weights="int8")
    return made


@pytest.fixture(scope="module")
def url(directory: Path) -> Iterator[str]:
    """Of a server in a thread of its own."""
    with server_in_thread(directory) as found:
        yield found


def expected(directory: Path, words: str, **settings: Any) -> list[int]:
    target = load_target(directory / "target")
    assert target.tokenizer is not None
    ids = list(target.tokenizer(words)["input_ids"])
    return moaspec.generate(target, ids, max_new_tokens=16, **settings).token_ids


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "sampled"]
)
def test_the_text_is_the_targets(directory: Path, url: str, settings: dict[str, Any]) -> None:
    options = [f"--{name}={value}" for name, value in settings.items()]
    done = run(
        *("remote", "w1 w2 <private>w3</private> w4", "--server", url, "--json"),
        *("--bundle", str(directory / "bundle"), "--max-new-tokens", "16", *options),
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["token_ids"] == expected(directory, "w1 w2 [PRIVATE_1] w4", **settings)
    assert data["private_spans"] == 1


def test_nothing_is_used_that_windows_lacks(directory: Path, url: str) -> None:
    done = run(
        *("remote", "w1 w2", "--server", url, "--json", "--no-recognise"),
        *("--bundle", str(directory / "bundle"), "--max-new-tokens", "16"),
        absent=(*not_installed("onnx"), *WINDOWS_LACKS),
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["token_ids"] == expected(directory, "w1 w2")


def test_a_cut_is_shown_and_changes_nothing(directory: Path, url: str) -> None:
    done = run(
        *("remote", "w1 w2", "--server", url, "--json", "--tree", "chain:2"),
        *("--bundle", str(directory / "bundle"), "--max-new-tokens", "16"),
        *("--cut-after", "5"),
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["token_ids"] == expected(directory, "w1 w2")
    assert data["provisional"] > 0


def test_an_edge_serves_the_targets_text(directory: Path, url: str) -> None:
    port = free_port()
    absent = (*not_installed("http", "onnx", "private"), *WINDOWS_LACKS)
    edge = subprocess.Popen(
        [
            *(sys.executable, "-c", WITHOUT, json.dumps(absent), "edge", "--port", str(port)),
            *("--server", url, "--bundle", str(directory / "bundle")),
        ],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert edge.stderr is not None
    try:
        said = next((line for line in edge.stderr if "page at" in line), None)
        assert said is not None, edge.wait()
        asked = {"prompt": "w1 w2", "max_tokens": 16, "temperature": 0, "model": "bundle"}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=asked, timeout=60)
        assert answer.status_code == 200, answer.text
        tokenizer = load_target(directory / "target").tokenizer
        assert tokenizer is not None
        words = tokenizer.decode(expected(directory, "w1 w2"))
        assert answer.json()["choices"][0]["text"].split() == words.split()
    finally:
        edge.send_signal(signal.SIGINT)
        _, rest = edge.communicate(timeout=60)
    assert "Error" not in rest


def test_other_commands_and_bundles_tell_what_is_missing(tmp_path: Path) -> None:
    told = run("generate", "Hi")
    assert told.returncode == 2
    assert "`moaspec generate` is a command of moaspec, which is not installed" in told.stderr
    assert "packages/moaspec'" in told.stderr
    told = run("remote", "Hi")
    assert told.returncode == 2
    assert "--bundle must name an ONNX bundle" in told.stderr
    (tmp_path / "manifest.json").write_text('{"format"')
    for command in (("remote", "Hi", "--bundle"), ("info",)):
        told = run(*command, str(tmp_path))
        assert told.returncode == 2
        assert "its manifest.json is damaged" in " ".join(told.stderr.split())
    told = run("edge")
    assert "packages/moaspec-edge[http]'" in told.stderr


def test_info_shows_a_bundle(directory: Path) -> None:
    shown = run("info", str(directory / "bundle"), "--json", absent=(*ABSENT, *WINDOWS_LACKS))
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["format"] == "ONNX device bundle"


def test_help_shows_what_a_device_can_do() -> None:
    shown = run("--help")
    assert shown.returncode == 0, shown.stderr
    first = {words[0] for line in shown.stdout.splitlines() if (words := line.split())}
    assert {"info", "remote"} <= first
    assert not {"edge", "generate", "train", "eval", "checkpoint"} & first
    shown = run("--help", absent=not_installed("http", "onnx", "private"))
    assert "  edge " in shown.stdout
