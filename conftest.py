"""Keeps the tests apart from the settings of the machine and of the user who runs them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from caches import new_cache

KEPT = ("KERNELS", "LLM", "NODE", "SCREENSHOTS", "SHARED", "SOAK_MINUTES", "THREADS", "VLLM_VENV")
"""The MOASPEC_ variables with which a user chooses what the tests run on."""
CLEARED = (
    *("COLUMNS", "LINES", "TERMINAL_WIDTH", "COLORTERM", "NO_COLOR", "FORCE_COLOR", "PY_COLORS"),
    *("TTY_COMPATIBLE", "TTY_INTERACTIVE", "GITHUB_ACTIONS", "TYPER_STANDARD_TRACEBACK"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"),
    *("HF_HOME", "HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"),
    *("OPENAI_API_KEY", "OPENAI_BASE_URL", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"),
    *("XDG_CACHE_HOME", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_LOGS"),
)
"""Variables of terminals, proxies and libraries that would change what a test sees."""

# Modules read these when they are imported, so all of this happens before a test is collected.
for _name in list(os.environ):
    if _name in CLEARED or (
        _name.startswith("MOASPEC_")
        and _name != "MOASPEC_CACHE"
        and _name.removeprefix("MOASPEC_") not in KEPT
    ):
        del os.environ[_name]
# Ignored where tests run in the background of a shell; Ctrl-C is tested all the same.
signal.signal(signal.SIGINT, signal.default_int_handler)
# More threads than free cores stall one another; no result depends on their number.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Threads that spin while they wait take the cores from the threads that work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
_cache = tempfile.TemporaryDirectory(prefix="moaspec-tests-")
os.environ["MOASPEC_CACHE"] = str(new_cache(Path(_cache.name)))
# Measuring takes seconds, and what it finds decides what is drafted.
os.environ["MOASPEC_CALIBRATE"] = "off"
# A busy machine takes as long as it takes for an example.
settings.register_profile("any-speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-speed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One model family is enough for the fast tests; files with slow tests come first.

    Workers take whole files in this order, so at the end no long one keeps a worker from ending.
    """
    for item in items:
        family = item.callspec.params.get("family") if hasattr(item, "callspec") else None
        if family not in (None, "llama"):
            item.add_marker(pytest.mark.slow)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_unconfigure() -> None:
    """Remove the session's cache."""
    with contextlib.suppress(OSError):
        _cache.cleanup()


@pytest.fixture
def patient_link() -> Iterator[None]:
    """No link counts as dead because the machine is busy; see `links.patient_link`."""
    import links

    with links.patient_link():
        yield


@pytest.fixture(autouse=True)
def _independent() -> Iterator[None]:
    """No test finds a measurement that another one stored, or draws numbers after another one."""
    import torch

    torch.manual_seed(0)
    yield
    shutil.rmtree(Path(_cache.name) / "calibration", ignore_errors=True)
