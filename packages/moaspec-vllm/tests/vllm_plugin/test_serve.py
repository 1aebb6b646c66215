"""A user's way: `moaspec vllm-config` prints a command, a shell runs it, a client asks."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny
import vllm_serving as serving
from free_port import free_port

pytest.importorskip("vllm", reason="vLLM is not installed; `make test-vllm` installs it")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
START_S = 300


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`vllm serve` with the taught drafter; its address."""
    root = tmp_path_factory.mktemp("serve")
    models = serving.write_models(root)
    printed = subprocess.run(
        [
            *(sys.executable, "-m", "moaspec", "vllm-config", str(models.taught)),
            # The target is so small that drafts would not pay.
            *("--model", str(models.path), "--draft-up-to", "1024"),
        ],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    command = shlex.split(printed)
    port = free_port()
    extra = f"--port {port} --host 127.0.0.1 --dtype float32 --enforce-eager --max-model-len 256"
    (root / "metrics").mkdir()
    environment = os.environ | {
        "PROMETHEUS_MULTIPROC_DIR": str(root / "metrics"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    with (root / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, *shlex.split(extra)],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            _await(f"http://127.0.0.1:{port}/health", process, root / "log")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def _await(url: str, process: Any, log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url):
            return
        time.sleep(1)
    raise AssertionError(f"vllm serve did not start:\n{log.read_text()[-5000:]}")


def ask(server: str, **changes: Any) -> Any:
    body = {"prompt": list(tiny.PROMPTS[1]), "temperature": 0, "max_tokens": tiny.NEW_TOKENS}
    request = urllib.request.Request(
        f"{server}/v1/completions",
        json.dumps(body | changes).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def test_a_served_request_is_the_targets_text_and_is_drafted(server: str) -> None:
    of = tiny.fresh_target(tokenizer=tiny.tokenizer(), **serving.SIZES)
    words = [f"w{token}" for token in tiny.own_text(of, tiny.PROMPTS[1])]
    assert ask(server, ignore_eos=True)["choices"][0]["text"].split() == words
    with urllib.request.urlopen(f"{server}/metrics") as answer:
        metrics = answer.read().decode()
    counts = {
        line.split("{")[0].split(" ")[0]: float(line.rsplit(" ", 1)[1])
        for line in metrics.splitlines()
        if line and not line.startswith("#")
    }
    assert counts["vllm:spec_decode_num_accepted_tokens_total"] > 0
    assert counts["moaspec:drafter_seconds_total"] > 0
    assert counts["moaspec:drafter_failures_total"] == 0
    assert counts["moaspec:drafter_active"] == 1


@pytest.mark.parametrize("setting", [{"min_p": 0.1}, {"logit_bias": {"3": 5.0}}])
def test_what_vllm_cannot_verify_is_refused(server: str, setting: dict[str, Any]) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(server, temperature=1.0, **setting)
    assert caught.value.code == 400
    assert "speculative" in caught.value.read().decode()


def test_a_check_whose_engine_ends_says_what_it_knows() -> None:
    """Here for an argument that vLLM does not have."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "moaspec", "vllm-check", "--requests", "1"),
            *("--engine", '{"no_such_argument": 1}'),
        ],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "vllm: 0.32.0" in done.stdout
    assert "vLLM, plain, ended with exit code 1; its whole log is" in done.stderr
    assert "no_such_argument" in done.stderr
