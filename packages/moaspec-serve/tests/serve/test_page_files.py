"""The page's files: libraries as they were fetched, and headers that keep others out."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

import serving
from moaspec_serve.app import page_directory
from moaspec_serve.guard import GuardSettings
from moaspec_serve.server_context import ServeSettings
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


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/app.js"),
        ("GET", "/missing"),
        ("GET", "/openapi.json"),
        ("GET", "/health"),
        ("GET", "/metrics"),
        ("GET", "/v1/models"),
        ("GET", "/v1/missing"),
        ("GET", "/v1/chat/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("GET", "/v1/responses/none"),
        ("PUT", "/"),
    ],
)
def test_headers_of_all_responses(served: Served, method: str, path: str) -> None:
    """Answers, errors and files: none may be framed, sniffed, or named to other pages."""
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1, "stream": True}
    with served.http() as client:
        answer = client.request(method, path, json=body if method == "POST" else None)
    check_headers(answer.headers)


def test_headers_of_what_the_guard_refuses() -> None:
    settings = ServeSettings(guarded=GuardSettings(api_keys=("key",)))
    with serving.serving(serving.source(), settings) as served, served.http() as client:
        answer = client.get("/v1/models", headers={"Authorization": "Bearer wrong"})
    assert answer.status_code == 401
    check_headers(answer.headers)


def check_headers(headers: Any) -> None:
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["content-security-policy"].startswith("default-src 'none'")
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-opener-policy"] == "same-origin"
    assert "camera=()" in headers["permissions-policy"]
    assert headers["cache-control"] in ("no-store", "no-cache")
    assert len(headers.get_list("content-security-policy")) == 1
    assert len(headers.get_list("cache-control")) == 1
