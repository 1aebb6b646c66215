"""Where files are kept that can be made again."""

from __future__ import annotations

from pathlib import Path

import pytest

from moaspec.places import cache_dir


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOASPEC_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("MOASPEC_CACHE")
    assert cache_dir().parts[-2:] == (".cache", "moaspec")
