"""The JavaScript device: its golden numbers, its generated code, and its own tests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import protoc
from write_golden import GOLDEN, golden

ROOT = Path(__file__).parents[5]
PACKAGE = ROOT / "packages" / "device-js"
PROTO = ROOT / "packages/moaspec-edge/src/moaspec_edge/protocol"

installed = pytest.mark.skipif(
    shutil.which("node") is None or not (PACKAGE / "node_modules").exists(),
    reason="needs Node and `make device-js`",
)


def close(got: Any, expected: Any) -> bool:
    """Equality, but for the last bits of numbers that a CPU may round otherwise."""
    if isinstance(got, float):
        # A log-softmax near zero is the difference of numbers near one, in float32.
        return bool(got == pytest.approx(expected, rel=1e-6, abs=1e-6))
    if isinstance(got, dict):
        return got.keys() == expected.keys() and all(close(got[key], expected[key]) for key in got)
    if isinstance(got, list | tuple):
        return len(got) == len(expected) and all(map(close, got, expected))
    return bool(got == expected)


def test_golden_numbers_are_fresh() -> None:
    stored = json.loads(GOLDEN.read_text())
    for name, part in golden().items():
        assert close(json.loads(json.dumps(part)), stored[name]), (
            f"{name}: run `packages/moaspec-edge/tests/write_golden.py`"
        )


@installed
def test_generated_code_is_fresh(tmp_path: Path) -> None:
    plugin = PACKAGE / "node_modules" / ".bin" / "protoc-gen-es"
    options = ["--es_opt=target=ts,import_extension=js", f"--es_out={tmp_path}"]
    asked = [f"-I{PROTO}", f"--plugin=protoc-gen-es={plugin}", *options]
    protoc.generate(*asked, str(PROTO / "target.proto"))
    stored = PACKAGE / "src" / "protocol" / "target_pb.ts"
    assert (tmp_path / "target_pb.ts").read_text() == stored.read_text(), "run `make proto`"


@installed
@pytest.mark.slow
def test_the_package_passes_its_tests() -> None:
    environment = os.environ | {"MOASPEC_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = ["npm", "test", "--silent", "--", "--reporter=dot"]
    ran = subprocess.run(
        command, cwd=PACKAGE, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, f"{ran.stdout}{ran.stderr}"
