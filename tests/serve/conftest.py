"""One server for all tests that do not change it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

import serving
from serving import Served


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    with serving.serving(serving.source()) as running:
        yield running


@pytest.fixture
def client(served: Served) -> OpenAI:
    return served.openai()
