"""A vLLM that this plugin does not know is refused by name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from moaspec_core.errors import ServingError
from moaspec_vllm import hooks


@pytest.mark.parametrize("found", ["0.31.9", "0.33.0", "1.0"])
def test_other_versions_are_refused(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "installed_version", lambda: found)
    with pytest.raises(ServingError, match=rf"vLLM {found} is installed.*==0\.32\.\*"):
        hooks.require_version()


def test_without_vllm_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "installed_version", lambda: "not installed")
    with pytest.raises(ServingError, match=r"not installed: pip install 'vllm==0\.32\.\*'"):
        hooks.require_version()


@pytest.mark.parametrize("found", ["0.32.0", "0.32.0+cpu", "0.32.1"])
def test_known_versions_pass(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "installed_version", lambda: found)
    hooks.require_version()


def test_a_missing_hook_is_named_with_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "installed_version", lambda: "0.33.5")
    runner = SimpleNamespace(input_batch=SimpleNamespace(num_reqs=1))
    assert hooks.require(runner, "input_batch.num_reqs", owner_name="Runner") == 1
    with pytest.raises(
        ServingError, match=r"vLLM 0\.33\.5 has no Runner\.input_batch\.block_table"
    ):
        hooks.require(runner, "input_batch.block_table", owner_name="Runner")


class Runner:
    """Methods of vLLM's model runner, as far as their arguments are looked at."""

    def __init__(self, group: object) -> None:
        self.input_batch = SimpleNamespace(block_table=[Table()])
        self.attn_groups = [[group]]

    def _capture_cudagraphs(
        self, batch_descriptors: object, cudagraph_runtime_mode: object
    ) -> None: ...

    def _dummy_run(self, num_tokens: int, *, uniform_decode: bool = False) -> None: ...

    def _sample(self, logits: object, spec_decode_metadata: object) -> None: ...


class Table:
    """A block table of vLLM's batch."""

    def get_device_tensor(self, num_reqs: int) -> None: ...


class Group:
    """An attention group of vLLM's runner."""

    def build_metadata_for_drafting(self, common_attn_metadata: object, draft_index: int) -> None:
        """Take what vLLM 0.32 takes."""


class LaterGroup:
    """One of a vLLM that nobody knows."""

    def build_metadata_for_drafting(self, common_attn_metadata: object) -> None: ...


def test_a_changed_signature_is_named_with_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "installed_version", lambda: "0.32.7")
    hooks.require_arguments(Runner(Group()))
    with pytest.raises(
        ServingError, match=r"vLLM 0\.32\.7 has changed .*drafting, which takes no.*'draft_index'"
    ):
        hooks.require_arguments(Runner(LaterGroup()))
