"""The generated code in the repository is what `make proto` makes of target.proto."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

import protoc

PROTO = "moaspec_edge/protocol/target.proto"


@pytest.mark.parametrize("name", ["target_pb2.py", "target_pb2.pyi"])
def test_generated_code_is_fresh(name: str, tmp_path: Path) -> None:
    package = Path(str(files("moaspec_edge"))) / "protocol"
    (tmp_path / PROTO).parent.mkdir(parents=True)
    (tmp_path / PROTO).write_text((package / "target.proto").read_text())
    protoc.generate(f"-I{tmp_path}", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", PROTO)
    made = (tmp_path / PROTO).with_name(name).read_text()
    assert made == (package / name).read_text(), "run `make proto`"
