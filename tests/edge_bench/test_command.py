"""How `moaspec edge-bench` starts its processes."""

from __future__ import annotations

import subprocess
from pathlib import Path

from edge_bench import python_command


def test_a_new_process_finds_the_modules_from_any_directory(tmp_path: Path) -> None:
    done = subprocess.run(python_command("edge_bench.formula"), cwd=tmp_path, check=False)
    assert done.returncode == 0
