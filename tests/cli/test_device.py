"""`moaspec checkpoint export-device`, and `moaspec info` of a bundle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tiny
from bundles import save_target
from commands import Cli
from moaspec.model.checkpoint.moa_checkpoint import save_drafter


@pytest.mark.slow
def test_export_and_info(tmp_path: Path, cli: Cli) -> None:
    target, drafter, out = tmp_path / "target", tmp_path / "drafter", tmp_path / "device"
    save_drafter(tiny.random_drafter(save_target(target)), drafter)
    output = cli("checkpoint", "export-device", str(target), str(drafter), str(out), "--int8")
    assert output.code == 0, output.err
    facts = json.loads(cli("info", str(out), "--json").out)
    assert (facts["format"], facts["weights"]) == ("device bundle", "int8")
    assert facts["target"]["vocab_size"] == tiny.VOCAB
    assert facts["draft_vocabulary"] == "full"
    assert "device bundle" in cli("info", str(out)).words


def test_what_cannot_be_exported(tmp_path: Path, cli: Cli) -> None:
    save_target(tmp_path / "target")
    missing = cli("checkpoint", "export-device", str(tmp_path / "target"), "nothing", "out")
    assert missing.code == 2
    assert "nothing" in missing.err
    (tmp_path / "taken").write_text("mine")
    taken = cli("checkpoint", "export-device", "x", "y", str(tmp_path / "taken"))
    assert taken.code == 2
    assert (tmp_path / "taken").read_text() == "mine"
