"""Whether the hub answers, and what is used where it does not."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import RepositoryNotFoundError

from lying_http import lying, whole
from moaspec.hub import cached_if_offline
from moaspec_core.errors import HubError


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)


@pytest.mark.usefixtures("unreachable")
def test_without_network_and_copy() -> None:
    with pytest.raises(HubError, match="cannot be reached"):
        cached_if_offline("nobody/nothing")


def test_what_is_no_hub_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with lying(lambda _: whole(b"<html>")) as url:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
        with pytest.raises(HubError, match=f"hub at {url} .*what answers there is none"):
            cached_if_offline("nobody/nothing")


@pytest.mark.usefixtures("unreachable")
def test_the_copy_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: str(config))
    assert cached_if_offline("owner/name") == tmp_path


@pytest.mark.parametrize("answer", [None, "refusal"])
def test_a_hub_that_answers(answer: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def info(*_: object, **__: object) -> None:
        if answer is not None:
            raise RepositoryNotFoundError.__new__(RepositoryNotFoundError)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", info)
    assert cached_if_offline("owner/name") is None
