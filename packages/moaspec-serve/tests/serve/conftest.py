"""One server of each kind for all tests that do not change it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from openai import OpenAI

import browsing
import chatpage
import device_pages
import serving
from edges import Edge
from links import patient_link
from serving import Served

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    with serving.serving(serving.source()) as running:
        yield running


@pytest.fixture(scope="module")
def edge() -> Iterator[Edge]:
    with patient_link():
        yield Edge()


@pytest.fixture(scope="module")
def served_edge(edge: Edge) -> Iterator[Served]:
    with serving.serving(edge.source) as running:
        yield running


@pytest.fixture(params=["serve", pytest.param("edge", marks=pytest.mark.slow)])
def endpoint(request: pytest.FixtureRequest) -> Served:
    """What `moaspec serve` and `moaspec edge` serve: clients must not notice which."""
    kinds = {"serve": "served", "edge": "served_edge"}
    found: Served = request.getfixturevalue(kinds[request.param])
    return found


@pytest.fixture
def client(endpoint: Served) -> OpenAI:
    return endpoint.openai()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing.chromium() as running:
        yield running


@pytest.fixture(scope="module")
def local(browser: Browser) -> Iterator[Served]:  # noqa: ARG001 - skips without one
    with serving.serving(chatpage.local_source()) as served:
        yield served


@pytest.fixture(scope="session")
def device_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, its drafter and their ONNX bundle, see `device_pages.save_models`."""
    made = tmp_path_factory.mktemp("device-models")
    device_pages.save_models(made)
    return made
