"""The page's files: libraries as they were fetched, and headers that keep others out."""

from __future__ import annotations

import hashlib
import json

import pytest

from moaspec.serve.app import page_directory
from serving import Served

VENDOR = page_directory() / "vendor"


def test_libraries_are_what_was_fetched() -> None:
    """`scripts/vendor.py` fetches others; nobody edits them."""
    packages = json.loads((VENDOR / "vendor.json").read_text())
    recorded = {name for package in packages.values() for name in package["files"]}
    assert recorded == {path.name for path in VENDOR.iterdir()} - {"vendor.json"}
    for package in packages.values():
        assert package["license"]
        assert package["version"]
        for name, file in package["files"].items():
            assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == file["sha256"], name


def test_nothing_of_the_page_is_elsewhere() -> None:
    for path in page_directory().iterdir():
        if path.suffix in {".html", ".css", ".js"}:
            text = path.read_text().replace("http://www.w3.org/2000/svg", "")
            assert "http://" not in text.replace("http:\\/\\/", ""), path.name
            assert "style=" not in text, path.name
            assert "innerHTML" not in text, path.name


@pytest.mark.parametrize("path", ["/", "/app.js", "/style.css", "/vendor/marked.esm.js"])
def test_headers_of_the_page(endpoint: Served, path: str) -> None:
    with endpoint.http() as client:
        answer = client.get(path)
    assert answer.status_code == 200
    policy = dict(
        part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "img-src", "connect-src")} == {
        "'self'"
    }
    for name in ("base-uri", "form-action", "frame-ancestors"):
        assert policy[name] == "'none'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
