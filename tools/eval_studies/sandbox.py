"""Run a model's functions with their tests in a sandbox.

The answer and its tests run in two processes, each in its own sandbox (`jail.py`): bubblewrap if it
works, else Linux namespaces. Without either, nothing runs.
"""

import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moaspec_core.errors import InputError

START_S = 5  # seconds of wall-clock time beyond the processor time
TMP_BYTES = 1 << 24


@dataclass(frozen=True)
class Trial:
    """A function, and the tests that it must pass."""

    code: str  # source text that defines the function; not trusted
    function: str
    tests: str  # source text that defines `check`, which takes the function
    setup: str = ""  # source text that the tests need to run before them


def passes(trial: Trial, *, timeout_s: int = 5, memory_bytes: int = 1 << 30) -> bool:
    """Return whether the function passes its tests within limits.

    Arguments and results are sent as plain data: numbers, strings, lists, tuples, sets, dicts. The
    code sees Python's standard library and an empty directory. It has no network, input, output or
    environment, and cannot start processes or threads.

    Args:
        timeout_s: seconds of processor time; `START_S` more by the clock.
        memory_bytes: address space of each process.

    Raises:
        InputError: this system has no sandbox.
    """
    return _run(trial, isolation(), timeout_s, memory_bytes)


def isolation() -> str:
    """The sandbox here: `bwrap` or `namespaces`; InputError where there is none."""
    found = _isolation()
    if found is not None:
        return found
    raise InputError(
        "This system has no sandbox for code that a model wrote (bubblewrap, or Linux namespaces). "
        "Install bubblewrap, or allow unprivileged user namespaces."
    )


@functools.cache
def _isolation() -> str | None:
    """The first sandbox that runs a small program, or None."""
    trial = Trial("def one():\n    return 1", "one", "def check(one):\n    assert one() == 1")
    kinds = [] if sys.platform != "linux" else ["bwrap", "namespaces"]
    return next((kind for kind in kinds if works(kind, trial)), None)


def works(kind: str, trial: Trial) -> bool:
    """Return whether a correct function passes in this sandbox."""
    if kind == "bwrap" and shutil.which(kind) is None:
        return False
    return _run(trial, kind, 5, 1 << 30)


def _run(trial: Trial, kind: str, timeout_s: int, memory_bytes: int) -> bool:
    limits = (str(timeout_s), str(memory_bytes))
    candidate = {"code": trial.code, "function": trial.function}
    judge = {"function": trial.function, "tests": trial.tests, "setup": trial.setup}
    with ExitStack() as stack:
        here, there = socket.socketpair()
        with here, there:
            stack.enter_context(_started(_command(kind, "candidate", limits), candidate, here))
            judging = stack.enter_context(_started(_command(kind, "judge", limits), judge, there))
        try:
            return judging.wait(timeout_s + START_S) == 0
        except subprocess.TimeoutExpired:
            return False


@contextlib.contextmanager
def _started(
    command: list[str], job: dict[str, Any], channel: socket.socket
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in an empty directory; kill its process group at the end."""
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile() as file:
        file.write(json.dumps(job).encode())
        file.seek(0)
        process = subprocess.Popen(  # noqa: S603 - running it is the purpose
            command,
            cwd=directory,
            env={},
            stdin=file,
            stdout=channel.fileno(),
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _command(kind: str, role: str, limits: tuple[str, str]) -> list[str]:
    program = Path(__file__).with_name("jail.py").read_text(encoding="utf-8")
    visible = _visible()
    python = [_python(), "-I", "-S", "-c", program, role, kind, *limits, *visible]
    return [*_bwrap(visible), *python] if kind == "bwrap" else python


def _bwrap(visible: list[str]) -> list[str]:
    """The bubblewrap prefix of a command.

    Root stays root until the program drops its rights, because a user namespace would map the user
    inside to root outside.
    """
    root = os.geteuid() == 0
    capabilities = ["ALL", "CAP_SETUID", "CAP_SETGID"]
    user = (
        ["--cap-drop", *" --cap-add ".join(capabilities).split()]
        if root
        else ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    )
    return [
        *(shutil.which("bwrap") or "bwrap", "--die-with-parent", "--new-session", *user),
        *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
        *("--size", str(TMP_BYTES), "--perms", "1777", "--tmpfs", "/tmp"),  # noqa: S108 - a new one
        # bwrap would create directories that only root can enter.
        *(word for path in _parents(visible) for word in ("--perms", "0755", "--dir", path)),
        *(word for path in visible for word in ("--ro-bind", path, path)),
        *("--dev-bind", os.devnull, os.devnull, "--remount-ro", "/", "--chdir", "/tmp"),  # noqa: S108
    ]


def _python() -> str:
    """The interpreter outside of a virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def _parents(paths: list[str]) -> list[str]:
    return sorted({str(parent) for path in paths for parent in Path(path).parents} - {"/"})


def _visible() -> list[str]:
    """Existing paths that Python needs, none inside another."""
    prefixes = {"/usr", sys.base_prefix, sys.base_exec_prefix}
    places = {f"{prefix}/{name}" for prefix in prefixes for name in ("lib", "lib64")}
    places |= {"/lib", "/lib64", "/etc/ld.so.cache", _python()}
    places.add(str(Path(os.__file__).parent))
    found = {Path(place) for place in places if Path(place).exists()}
    return sorted(str(path) for path in found if found.isdisjoint(path.parents))
