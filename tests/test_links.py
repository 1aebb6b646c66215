"""Links between the repository's pages, checked without the network."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FILES = "https://github.com/moaspec/moaspec/blob/main/"
PAGES = sorted(
    page.relative_to(ROOT)
    for folder in (".", "docs", "lab", "lab/log", "tests/golden_data", "packages/*", "drafters/*")
    for page in ROOT.glob(f"{folder}/*.md")
)


def links(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text("utf-8"), flags=re.S | re.M)
    return re.findall(r"\]\(([^)\s]+)\)", text)


def anchors(page: Path) -> set[str]:
    """The headings' anchors on the site, which are also GitHub's unless hyphens repeat."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.S | re.M)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.M)
    return {re.sub(r"[^\w\s-]", "", name.lower()).strip().replace(" ", "-") for name in headings}


def broken(page: Path, link: str) -> bool:
    """Whether a link of a page leads to no file, or to no heading of one."""
    path, _, anchor = link.partition("#")
    if link.startswith(FILES):
        place = ROOT / path.removeprefix(FILES)
    elif re.match(r"\w+:", link):
        return False
    else:
        place = (page.parent / path).resolve() if path else page
    return not place.exists() or (anchor != "" and anchor not in anchors(place))


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    assert [link for link in links(ROOT / page) if broken(ROOT / page, link)] == []


@pytest.mark.parametrize("page", sorted(page.name for page in DOCS.glob("*.md")))
def test_relative_links_of_the_documentation_stay_inside_it(page: str) -> None:
    """The site holds `docs/` only; other files are linked by their address on GitHub."""
    assert [link for link in links(DOCS / page) if link.startswith("../")] == []


def test_the_tests_that_the_security_page_names_exist() -> None:
    named = re.findall(r"`([\w/]*test_\w+\.py)`", (DOCS / "security.md").read_text("utf-8"))
    assert len(named) > 20
    places = [ROOT / "tests", *ROOT.glob("packages/*/tests")]
    there = [name for name in named if any((place / name).is_file() for place in places)]
    assert named == there


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One heading\n[a](page.md#one-heading) [b](page.md#two) [c](none.md)\n")
    assert [link for link in links(page) if broken(page, link)] == ["page.md#two", "none.md"]
