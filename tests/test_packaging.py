"""What package indexes and installers read of the project."""

from __future__ import annotations

import re
import tomllib
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import moaspec

ROOT = Path(__file__).parents[1]
ORDER = (
    "moaspec-core",
    "moaspec",
    "moaspec-train",
    "moaspec-serve",
    "moaspec-edge",
    "moaspec-vllm",
)


PROJECTS = sorted(
    [*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("drafters/*/pyproject.toml")]
)


def project(path: Path) -> dict[str, Any]:
    return dict(tomllib.loads(path.read_text(encoding="utf-8"))["project"])


@pytest.mark.parametrize("path", PROJECTS, ids=lambda path: path.parent.name)
def test_the_long_description_has_absolute_links(path: Path) -> None:
    """The README is shown on an index without the files beside it."""
    text = (path.parent / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\]\((?!https://|#)[^)]*\)", text) == []


@pytest.mark.parametrize("path", PROJECTS, ids=lambda path: path.parent.name)
def test_all_have_one_version(path: Path) -> None:
    """Also in what they ask of one another: they are released together."""
    found = project(path)
    assert found["version"] == moaspec.__version__
    asked = [*found["dependencies"], *chain(*found.get("optional-dependencies", {}).values())]
    ours = [Requirement(one) for one in asked if one.startswith("moaspec")]
    assert [str(one) for one in ours if str(one.specifier) != f"=={moaspec.__version__}"] == []


@pytest.mark.parametrize("path", PROJECTS, ids=lambda path: path.parent.name)
def test_lower_ones_need_no_higher_ones(path: Path) -> None:
    """As their imports, which import-linter looks at; extras may name others."""
    found = project(path)
    if found["name"] in ORDER:
        ours = {one.partition("=")[0].partition("[")[0] for one in found["dependencies"]}
        assert ours & set(ORDER) <= set(ORDER[: ORDER.index(found["name"])])
