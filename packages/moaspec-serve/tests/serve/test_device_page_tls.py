"""The page that drafts in the browser, over TLS."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509 import load_pem_x509_certificate

import browsing
from certificates import Authority
from chatpage import asked, raw_text
from device_pages import KEPT, READY, built_scripts, serving_pages
from memorised_target import ANSWER
from moaspec_edge.server.auth import server_tls

pytestmark = pytest.mark.browser


def test_over_tls(device_models: Path, tmp_path: Path) -> None:
    """A certificate for localhost: threads, answers, and a reload without a network."""
    files = Authority(tmp_path, "ours").certificate("localhost")
    key = load_pem_x509_certificate(files[0].read_bytes()).public_key()
    form = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    pin = base64.b64encode(hashlib.sha256(key.public_bytes(*form)).digest()).decode()
    with (
        serving_pages(device_models, built_scripts(), server_tls(*files)) as secure,
        browsing.chromium(f"--ignore-certificate-errors-spki-list={pin}") as trusting,
        browsing.visit(trusting, secure.url) as visited,
    ):
        visited.shows(READY)
        visited.shows(KEPT)
        assert visited.page.evaluate("crossOriginIsolated")
        asked(visited)
        assert raw_text(visited) == ANSWER
        assert not visited.complaints
        visited.page.context.set_offline(True)
        visited.page.reload()
        visited.shows(READY)
