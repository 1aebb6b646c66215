"""A server's process: bounded caches, open files, no idle threads, freed memory given back."""

import asyncio
import contextlib
import ctypes
import gc
import os
import sys
from pathlib import Path

RETURN_S = 30.0  # seconds between two returns of freed memory


KERNEL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "256"}
"""Kernels that oneDNN and PyTorch's wrapper of it keep, at half a MiB each."""


OPEN_FILES = 8192
"""Open files that a server may have, where the system allows it; each connection is one."""


SWITCH_S = 0.0005
"""Seconds for which a thread may hold the interpreter while another one waits for it."""


PAUSE_SOFT = 1
"""`omp_pause_soft` of OpenMP 5.0: ends threads, and keeps settings."""


def prepare_process() -> None:
    """Keep fewer compiled kernels of oneDNN, allow more open files, and switch threads sooner.

    The thread that decodes gives the interpreter away in every operation of PyTorch. While another
    thread parses a request, it would wait Python's 5 ms each time, hundreds of times in a pass.

    Call before the model is loaded. oneDNN compiles a kernel for each number of tokens and each
    size of a layer, in float32, or in bf16 where moaspec has no kernels. By default 1,024 are kept:
    half a GiB for a model of any size. Variables of the environment that are set already hold.
    """
    sys.setswitchinterval(SWITCH_S)
    for name, capacity in KERNEL_CACHES.items():
        os.environ.setdefault(name, capacity)
    allow_open_files()


def allow_open_files() -> None:
    """Allow this process `OPEN_FILES`, or as many as the system lets it have."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # not on Windows
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def end_idle_threads() -> None:
    """End the OpenMP threads that wait for the calling thread's next parallel loop.

    While a process has more OpenMP threads than cores, libgomp lets them sleep at every barrier,
    and passes take 1.7 times as long. The thread that loads a model leaves as many threads behind
    as the thread that decodes needs. Other OpenMP libraries have no such rule.
    """
    try:
        mapped = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return
    for path in {line.split(maxsplit=5)[-1] for line in mapped if "libgomp" in line}:
        with contextlib.suppress(OSError, AttributeError):  # an old libgomp
            ctypes.CDLL(path).omp_pause_resource_all(PAUSE_SOFT)


def freeze_loaded_objects() -> None:
    """Exempt all objects of now from garbage collection; call once, before requests come.

    Modules and models are over a million objects. A full collection looks at each of them, which
    stops all threads for half a second, and so Python runs one rarely: requests that are garbage
    would stay in memory for long.
    """
    gc.collect()
    gc.freeze()


def return_freed_memory() -> None:
    """Give what was freed back to the system: glibc keeps it, after packing most of a model."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):  # another C library has no such call
        return


async def return_memory_forever(interval_s: float = RETURN_S) -> None:
    """Collect garbage and return freed memory to the system, again and again.

    glibc keeps what large requests leave in its heaps.
    """
    while True:
        await asyncio.sleep(interval_s)
        gc.collect()
        await asyncio.to_thread(return_freed_memory)
