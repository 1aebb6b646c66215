"""ARCHITECTURE.md promises that a greedy round runs the files of the reading path and no other."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import moaspec
import tiny
from moaspec.drafting.moa_proposer import MoAProposer
from moaspec.engine.local_verifier import LocalVerifier
from moaspec_core.drafting.draft_tree import Tree
from moaspec_core.engine.engine import Engine

PACKAGES = Path(moaspec.__file__).parents[3]
PATH = {
    "moaspec/model/moa.py",
    "moaspec/model/layers.py",
    "moaspec_core/engine/engine.py",
    "moaspec_core/engine/request_state.py",
    "moaspec_core/engine/scheduler.py",
    "moaspec_core/drafting/protocols.py",
    "moaspec/drafting/tree_proposer.py",
    "moaspec/drafting/moa_proposer.py",
    "moaspec_core/drafting/draft_tree.py",
    "moaspec/engine/local_verifier.py",
    "moaspec/engine/accept.py",
    "moaspec/target/target.py",
    "moaspec/target/decoder_layers.py",
    "moaspec/drafting/kv_cache.py",
    "moaspec_core/support/torch_settings.py",
}


def files_of_a_round() -> set[str]:
    """Our files with functions that a greedy round by PyTorch calls."""
    target = tiny.target()
    proposer = MoAProposer(tiny.random_drafter(target), target)
    verifier = LocalVerifier(target, proposer)
    engine = Engine(verifier, proposer, target=target)
    engine.add(tiny.PROMPTS[0], max_new_tokens=24, shape=Tree(4, 2, 7))
    engine.step()
    engine.step()
    called: set[str] = set()
    before = sys.getprofile()
    sys.setprofile(lambda frame, _event, _argument: called.add(_file(frame)))
    try:
        engine.step()
    finally:
        sys.setprofile(before)
    return {
        Path(name).relative_to(PACKAGES).as_posix().partition("/src/")[2]
        for name in called
        if Path(name).is_relative_to(PACKAGES)
    }


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


def test_a_greedy_round_runs_the_reading_path() -> None:
    assert files_of_a_round() == PATH


def test_the_architecture_names_each_file() -> None:
    text = Path(__file__).parents[1].joinpath("ARCHITECTURE.md").read_text()
    assert not [name for name in PATH if f"`{name}`" not in text]
