"""The script for GPUs that come and go: blocks of seconds until it is done, nothing lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import chat_tokenizers
import moaspec
import tiny
from commands import text_target

SCRIPT = Path(__file__).parents[2] / "scripts" / "borrowed_gpu.sh"
STEPS = 150


def run(arguments: list[str], directory: Path) -> int:
    """Return the one block of the page."""
    environment = os.environ | {
        "MOASPEC": f"{sys.executable} -m moaspec",
        "REGENERATE": f"--model {directory / 'model'} --max-new-tokens 8",
        "BLOCK": "2s",
        "FORCE_COLOR": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    done = subprocess.run(
        [str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode in {0, 75}, done.stdout + done.stderr
    return done.returncode


@pytest.mark.slow
def test_blocks_until_it_is_done(tmp_path: Path) -> None:
    target = text_target()
    assert target.tokenizer is not None
    target.tokenizer.chat_template = chat_tokenizers.CHATML
    target.tokenizer.save_pretrained(tmp_path / "model")
    tiny.model().save_pretrained(tmp_path / "model")
    prompts, responses = tmp_path / "p.jsonl", tmp_path / "r.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"w{i} w{i + 1}"}) for i in range(20, 26)))
    config = tmp_path / "config.yaml"
    config.write_text(
        f"target: {tmp_path / 'model'}\noutput: {tmp_path / 'run'}\ndata: []\nheld_out: 1\n"
        f"batch_size: 2\nsteps: {STEPS}\nsave_every: 50\nactivation_cache: false\n"
    )
    arguments = [str(prompts), str(responses), str(config), "shard_mb=0.05", "threads=1"]
    codes: list[int] = []
    while not codes or codes[-1]:
        codes.append(run(arguments, tmp_path))
        assert len(codes) < 30
    assert [json.loads(line)["id"] for line in responses.read_text().splitlines()] == [
        str(i) for i in range(6)
    ]
    log = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in log] == list(range(1, STEPS + 1))
    (state,) = (tmp_path / "run" / "state").iterdir()
    assert max(path.stat().st_size for path in state.glob("*.safetensors")) < 60_000
    trained = moaspec.load_target(str(tmp_path / "model"))
    moaspec.load_drafter(tmp_path / "run" / "drafter", target=trained)
    assert run(arguments, tmp_path) == 0


def test_it_says_how_to_use_it() -> None:
    done = subprocess.run([str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "PROMPTS RESPONSES CONFIG" in done.stderr
