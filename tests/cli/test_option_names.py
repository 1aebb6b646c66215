"""Options have one name for one thing, and show their choices."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from commands import Cli
from moaspec_core.cli.main import app
from moaspec_core.cli.renamed import REMOVED, RENAMED


def _options() -> Iterator[tuple[str, Any]]:
    """Each option, after its command."""

    def of(command: Any, *names: str) -> Iterator[tuple[str, Any]]:
        if isinstance(command, TyperGroup):
            for name, each in command.commands.items():
                yield from of(each, *names, name)
        yield from ((" ".join(names), one) for one in command.params)

    yield from of(typer.main.get_command(app))


@pytest.mark.parametrize(
    ("command", "old", "new"),
    [(command, *names) for command, renamed in RENAMED.items() for names in renamed.items()],
)
def test_an_earlier_name_is_refused_with_the_present_one(
    command: str, old: str, new: str, cli: Cli
) -> None:
    there = {name for found, one in _options() if found == command for name in one.opts}
    assert set(new.split(" and ")) <= there
    assert old not in there
    for arguments in ((old, "1"), (f"{old}=1",)):
        done = cli(*command.split(), *arguments)
        assert (done.code, done.out) == (2, "")
        assert f"{old} of `moaspec {command}` was renamed to {new}" in " ".join(done.err.split())


@pytest.mark.parametrize(
    ("command", "old"), [(command, old) for command, gone in REMOVED.items() for old in gone]
)
def test_a_removed_option_is_refused_with_what_takes_its_place(
    command: str, old: str, cli: Cli
) -> None:
    assert old not in {name for found, one in _options() if found == command for name in one.opts}
    done = cli(*command.split(), old, "1")
    assert (done.code, done.out) == (2, "")
    said = f"{old} of `moaspec {command}` was removed: {REMOVED[command][old]}."
    assert said in " ".join(done.err.split())


def test_one_thing_has_one_name() -> None:
    """Of synonyms, only one is an option of any command."""
    names = {name for _, one in _options() for name in one.opts}
    for synonyms in (
        {"--tree", "--draft", "--shape"},
        {"--link", "--links", "--emulate", "--network"},
        {"--cache-gib", "--max-cache-gib", "--cache-gb"},
        {"--batch", "--batch-size"},
        {"--threads", "--num-threads"},
        {"--max-new-tokens", "--num-tokens"},
        {"--certificate", "--tls-certificate"},
        {"--key", "--tls-key"},
        {"--bits", "--int8"},
        {"--drafter", "--speculation"},
    ):
        assert len(names & synonyms) == 1, synonyms


@pytest.mark.parametrize(
    ("option", "choices"),
    [
        ("--quantize", ["int8", "int4", "inputs"]),
        ("--on-cut", ["rollback", "keep", "wait"]),
        ("--codec", ["fp16", "int8", "int4"]),
        ("--bits", ["8", "4"]),
        ("--link", ["none", "lan", "4g", "5g"]),
        ("--dtype", ["auto", "float32", "bfloat16", "float16"]),
    ],
)
def test_choices_are_shown_and_others_refused(option: str, choices: list[str], cli: Cli) -> None:
    there = {command for command, one in _options() if option in one.opts}
    found = sorted(there - {"edge-bench"} if option == "--link" else there)  # it takes several
    assert found
    for command in found:
        shown = cli(*command.split(), "--help").out
        (listed,) = re.findall(rf"{option} <(\S+)>", " ".join(shown.split()))
        # `checkpoint convert` writes 8 bits only.
        assert listed == ("8" if command == "checkpoint convert" else "|".join(choices)), command
    done = cli(*found[0].split(), option, "nonsense")
    assert (done.code, done.out) == (2, "")
    assert choices[0] in done.err
