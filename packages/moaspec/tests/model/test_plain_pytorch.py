"""The drafter's definition is plain PyTorch: acceleration replaces its modules from outside."""

from __future__ import annotations

import re
from pathlib import Path

import moaspec.model

WORDS = re.compile(r"\b(kernels|backends|fused|packed)")  # "refused" is no such word


def test_the_model_does_not_mention_acceleration() -> None:
    sources = Path(str(moaspec.model.__file__)).parent.rglob("*.py")
    texts = {path: path.read_text(encoding="utf-8") for path in sources}
    assert len(texts) > 10
    assert [str(path) for path, text in texts.items() if WORDS.search(text)] == []
