"""Garbage of a server that waits is collected, what was loaded is not, and caches are bounded."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import subprocess
import sys
import weakref

import pytest
import torch

from moaspec_core.process_memory import (
    KERNEL_CACHES,
    OPEN_FILES,
    freeze_loaded_objects,
    prepare_process,
    return_memory_forever,
)
from moaspec_core.support import limits


class Cycle:
    """Only a garbage collection frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.slow
def test_garbage_is_collected_while_nothing_happens() -> None:
    async def run() -> None:
        gc.disable()
        left = weakref.ref(Cycle())
        returning = asyncio.create_task(return_memory_forever(0.01))
        try:
            async with asyncio.timeout(60):
                while left() is not None:
                    await asyncio.sleep(0.01)
        finally:
            gc.enable()
            returning.cancel()

    asyncio.run(run())


@pytest.mark.slow
def test_loaded_objects_are_exempt() -> None:
    loaded = Cycle()
    freeze_loaded_objects()
    try:
        assert gc.get_freeze_count() > 0
        assert not any(one is loaded for one in gc.get_objects())
    finally:
        gc.unfreeze()


def test_what_the_user_set_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = KERNEL_CACHES
    monkeypatch.setenv(first, "7")
    monkeypatch.delenv(second, raising=False)
    prepare_process()
    assert os.environ[first] == "7"
    assert os.environ[second] == KERNEL_CACHES[second]


@pytest.mark.slow
def test_a_server_may_have_as_many_files_as_connections() -> None:
    code = (
        "import resource as r; from moaspec_core.process_memory import prepare_process\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (100, r.getrlimit(r.RLIMIT_NOFILE)[1])); prepare_process()\n"
        "print(*r.getrlimit(r.RLIMIT_NOFILE))"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, text=True
    )
    soft, hard = map(int, told.stdout.split())
    assert soft == (OPEN_FILES if hard < 0 else min(OPEN_FILES, hard))
    assert OPEN_FILES > limits.MAX_HTTP_CONNECTIONS


_GROWTH = """
import ctypes, torch
from moaspec.backends.linear_backends import OneDnnLinear
from moaspec_core.process_memory import prepare_process

class Mallinfo(ctypes.Structure):
    _fields_ = [(f"field_{i}", ctypes.c_size_t) for i in range(10)]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Mallinfo
prepare_process()
linear = OneDnnLinear(torch.zeros(64, 64), None)
used = []
for start in (0, 512, 1024):
    for rows in range(start, start + 512):
        linear.product(torch.zeros(rows + 1, 64))
    used.append(libc.mallinfo2().field_7)
print(used[-1] - used[0])
"""


@pytest.mark.slow
def test_kernels_of_other_numbers_of_tokens_take_the_place_of_earlier_ones() -> None:
    if not hasattr(ctypes.CDLL(None), "mallinfo2") or not torch.backends.mkldnn.is_available():
        pytest.skip("another C library, or no oneDNN")
    environment = {name: value for name, value in os.environ.items() if name not in KERNEL_CACHES}
    told = subprocess.run(
        [sys.executable, "-c", _GROWTH],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    # Without a bound 250 MiB on a CPU with AVX-512; with one, no kernels are added.
    assert int(told.stdout) < 2**24


TEAMS = """
import psutil, torch
from moaspec_core.process_memory import end_idle_threads

def num_threads(team):
    torch.set_num_threads(team)
    torch.zeros(1 << 20).exp()
    return psutil.Process().num_threads()

alone, with_team = num_threads(1), num_threads(2)
end_idle_threads()
print(with_team - alone, psutil.Process().num_threads() - alone)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only libgomp counts threads")
def test_the_team_of_a_loading_thread_ends() -> None:
    """It would count against the team of the thread that decodes."""
    made, left = map(int, subprocess.check_output([sys.executable, "-c", TEAMS]).split())
    if not made:
        pytest.skip("this PyTorch does without OpenMP's threads here")
    assert not left
