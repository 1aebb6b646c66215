"""Rows of files and of the hub."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from moaspec.data.row_sources import read_records
from moaspec_core.errors import DataError, InputError


def test_plain_and_compressed_files_say_where_rows_are(tmp_path: Path) -> None:
    text = '{"a": 1}\n\n{"a": 2}\n'
    plain, packed = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()) + gzip.compress(b'{"a": 3}\n'))
    assert [(r.where, r.value["a"]) for r in read_records(plain)] == [
        (f"{plain}:1", 1),
        (f"{plain}:3", 2),
    ]
    assert [record.value["a"] for record in read_records(packed)] == [1, 2, 3]


def test_a_source_without_a_name_is_not_the_present_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="has no name"):
        list(read_records(""))


def test_malformed_lines_are_raised_or_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a":\n[2]\n{"a": 3}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: not JSON"):
        list(read_records(path))
    seen: list[DataError] = []
    assert [record.value["a"] for record in read_records(path, seen.append)] == [1, 3]
    assert "a.jsonl:3: expected a JSON object" in str(seen[1])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "half \\ud800"}', "half of a surrogate pair"),
        ('{"prompt": ' + "9" * 5000 + "}", "not JSON"),
        ("[" * 100_000, "not JSON"),
    ],
    ids=["half", "number", "deep"],
)
def test_rows_that_nobody_can_read(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"prompt": "whole \\ud83d\\ude00"}}\n{line}\n')
    with pytest.raises(DataError, match=rf"a\.jsonl:2: .*{message}"):
        list(read_records(path))


def test_a_damaged_archive(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    data = bytearray(gzip.compress(b'{"a": 1}\n' * 999))
    data[20:40] = b"x" * 20
    path.write_bytes(bytes(data))
    with pytest.raises(DataError, match="Cannot read the data"):
        list(read_records(path))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Stands in for the package `datasets`, which is optional; remembers how it was called."""
    calls: list[tuple[Any, ...]] = []

    def load_dataset(name: str, configuration: str | None, **options: Any) -> Iterator[Any]:
        calls.append((name, configuration, options))
        if name == "no/thing":
            raise ValueError("there is no such data set")
        return iter([{"prompt": "one"}, {"prompt": "two"}])

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return calls


@pytest.mark.parametrize(
    ("source", "call"),
    [
        ("hub:a/b", ("a/b", None, "train")),
        ("hub:a/b@test", ("a/b", None, "test")),
        ("hub:a/b:main@test", ("a/b", "main", "test")),
    ],
)
def test_hub_data_sets(source: str, call: tuple[Any, ...], hub: list[tuple[Any, ...]]) -> None:
    rows = list(read_records(source))
    assert [row.value for row in rows] == [{"prompt": "one"}, {"prompt": "two"}]
    assert rows[1].where == f"{source}:2"
    name, configuration, options = hub[0]
    assert (name, configuration, options["split"]) == call
    assert options["streaming"]


@pytest.mark.usefixtures("hub")
def test_an_unknown_data_set() -> None:
    with pytest.raises(DataError, match=r"hub:no/thing.*no such"):
        list(read_records("hub:no/thing"))


def test_without_the_optional_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"\[hub\]"):
        list(read_records("hub:a/b"))


def test_deep_json_is_malformed_and_no_crash(tmp_path: Path) -> None:
    path = tmp_path / "deep.jsonl"
    path.write_text("[" * 100_000 + "\n" + json.dumps({"a": 1}) + "\n")
    seen: list[DataError] = []
    assert len(list(read_records(path, seen.append))) == 1
    assert len(seen) == 1


def test_a_damaged_list_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(json.dumps([{"a": i} for i in range(2000)]).encode())[:-20])
    with pytest.raises(DataError, match="Cannot read the data"):
        list(read_records(path))


def test_files_that_describe_data_are_passed_by(tmp_path: Path) -> None:
    """Those of hub data sets, and of any program that writes an object beside rows."""
    row = {"prompt": "q", "response": "a"}
    described = {
        "dataset_info.json": json.dumps({"builder_name": "json", "prompt": {}}, indent=2),
        "dataset_infos.json": "{}",
        "state.json": json.dumps({"_data_files": []}),
        "sums.json": json.dumps({"rows.jsonl": "0f"}),
        "README.md": "# Rows",
        "LICENSE": "",
        "SHA256SUMS": "0f rows.jsonl",
    }
    for name, text in described.items():
        (tmp_path / name).write_text(text)
    (tmp_path / ".gitattributes").write_text("*.jsonl lfs")
    (tmp_path / "one.json").write_text(json.dumps(row))
    (tmp_path / "list.json").write_text(json.dumps([row]))
    (tmp_path / "lines.json").write_text(f"{json.dumps(row)}\n{json.dumps(row)}\n")
    skipped: list[str] = []
    rows = [record.value for record in read_records(tmp_path, skipped=skipped)]
    assert rows == [row] * 4
    assert sorted(skipped) == sorted(str(tmp_path / name) for name in described)


def test_a_damaged_file_of_a_directory_is_no_description(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text('[{"prompt": "q"}, {"pro')
    with pytest.raises(DataError, match=r"rows\.json"):
        list(read_records(tmp_path))
