"""Python programs that a model wrote, run in a process of their own, with limits.

The limits stop what goes wrong by accident: endless loops, memory, files, children. They are no
wall against a program that means harm; run those in a container.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from moaspec.errors import InputError

FINISHED = 87
"""Exit code of a program that came to its end; one that leaves by itself cannot pass for it by
chance."""

GUARD = """
import ctypes, os, resource, sys
seconds, size, finished = map(int, sys.argv[2:])
with open(sys.argv[1], encoding="utf-8") as file:
    program = file.read()
for name, most in (
    ("CPU", seconds), ("AS", size), ("FSIZE", 1 << 20), ("NOFILE", 64), ("NPROC", 0), ("CORE", 0)
):
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (most, most))
if sys.platform == "linux":
    CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
    ctypes.CDLL(None).unshare(CLONE_NEWUSER | CLONE_NEWNET)
try:
    exec(compile(program, "answer", "exec"), {"__name__": "answer"})
except BaseException:
    os._exit(1)
os._exit(finished)
"""
"""What runs before the program. Where the system allows it, there is no network either."""


def finishes(program: str, *, timeout_s: int = 5, memory_bytes: int = 1 << 30) -> bool:
    """Whether a Python program comes to its end without an exception, within limits.

    It runs in an empty directory, without input, output, environment, children or, on Linux, a
    network, and may write files of one megabyte.

    Args:
        program: source text.
        timeout_s: seconds, of the clock and of the CPU.
        memory_bytes: address space.

    Raises:
        InputError: this system has no limits for processes.
    """
    if os.name != "posix":
        raise InputError("Programs are only run where processes have limits: on Linux or macOS.")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "answer.py"
        path.write_text(program, encoding="utf-8")
        limits = map(str, (timeout_s, memory_bytes, FINISHED))
        child = subprocess.Popen(  # noqa: S603 - running it is the purpose; the limits are above
            [sys.executable, "-I", "-c", GUARD, str(path), *limits],
            cwd=directory,
            env={},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return child.wait(timeout_s + 1) == FINISHED
        except subprocess.TimeoutExpired:
            return False
        finally:
            _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill the child and whatever it started; its group is its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
