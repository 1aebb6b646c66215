"""Rows of files and of the hub: read, or refused with file, line and advice, in bounded memory."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import sys
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from moaspec.data import rows
from moaspec.data.rows import read_rows
from moaspec_core.errors import DataError, InputError
from moaspec_core.support.extras import install_command

MIB = 1 << 20
ROW: dict[str, Any] = {"prompt": "q", "response": "a"}
TWO = f"{json.dumps(ROW)}\n{json.dumps(ROW)}\n".encode()
LIST = json.dumps([ROW, ROW], indent=1).encode()


def zstd(data: bytes) -> bytes:
    return bytes(pyarrow.compress(data, codec="zstd", asbytes=True))


def parquet(*values: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(values)), out)
    return out.getvalue()


def zipped() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a.jsonl", TWO)
    return out.getvalue()


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes,
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstd,
}
READ = {
    "lines": TWO,
    "lines without a last break": TWO.strip(),
    "lines with blank ones": TWO.replace(b"\n", b"\r\n\n \n"),
    "a list": LIST,
    "a list in a line": json.dumps([ROW, ROW]).encode(),
    "a list with a last comma": f"[{json.dumps(ROW)}, {json.dumps(ROW)},]".encode(),
}


@pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS)
@pytest.mark.parametrize("content", READ.values(), ids=READ)
def test_the_content_decides_and_not_the_name(
    content: bytes, pack: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    path = tmp_path / "data"
    for mark in (b"", b"\xef\xbb\xbf"):
        path.write_bytes(pack(mark + content))
        assert [row.value for row in read_rows(path)] == [ROW, ROW]
    assert len({row.where for row in read_rows(path)}) == 2


@pytest.mark.parametrize("pack", [gzip.compress, zstd])
def test_lines_are_counted_in_all_parts_of_an_archive(
    pack: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(pack(b'{"a": 1}\n\n{"a": 2}\n') + pack(b'{"a": 3}\n'))
    assert [(row.where, row.value["a"]) for row in read_rows(path)] == [
        (f"{path}:1", 1),
        (f"{path}:3", 2),
        (f"{path}:4", 3),
    ]


def test_tables_add_no_keys(tmp_path: Path) -> None:
    """Objects of a column have each other's keys, as null."""
    values: list[dict[str, Any]] = [{"tools": [{"a": 1}, {"b": 2}], "system": "s"}, {"tools": []}]
    path = tmp_path / "a.parquet"
    path.write_bytes(parquet(*values))
    found = list(read_rows(path))
    assert [row.value for row in found] == values
    assert found[1].where == f"{path}:2"


REFUSED: dict[str, tuple[bytes, str]] = {
    "cut off": (TWO[:-9], "a.x:2: not JSON"),
    "an object over lines": (
        json.dumps(ROW, indent=1).encode(),
        "a.x:1: not JSON .* object a line",
    ),
    "a cut list": (LIST[:-9], "a.x, element 2: not JSON"),
    "two lists": (LIST + b"\n[]", "a.x: .*more after the list"),
    "a list without commas": (b"[{} {}]", "a.x, element 1: .*expected ','"),
    "a list of texts": (b'["q", "r"]', "a.x:1: expected a JSON object"),
    "texts in a list": (b'[{}, "r"]', "a.x, element 2: expected a JSON object"),
    "python": (b"{'prompt': 'q'}\n", "a.x:1: not JSON .* JSON object a line"),
    "csv": (b"prompt,response\nq,r\n", "a.x:1: not JSON .* Parquet"),
    "a key twice": (b'{"prompt": "q", "prompt": "r"}', "a.x:1: .*'prompt' occurs twice"),
    "utf-16": (TWO.decode().encode("utf-16"), "a.x:1: .*iconv -f utf-16"),
    "latin-1": (TWO + b'{"prompt": "K\xf6ln"}\n', "a.x:3: not UTF-8 .*iconv"),
    "a zip archive": (zipped(), "a.x:1: .*an archive"),
    "an Arrow file": (b"ARROW1\0\0\xff\xff\n", "a.x:1: .*a binary file.*Parquet"),
    "half a character": (TWO + b'{"prompt": "\\ud800"}', "a.x:3: .*half of a surrogate pair"),
    "a long number": (b'{"prompt": ' + b"9" * 5000 + b"}", "a.x:1: not JSON"),
    "deep": (TWO + b"[" * 100_000, "a.x:3: not JSON"),
    "cut gzip": (gzip.compress(TWO)[:-12], "Cannot read the data .*a.x"),
    "damaged gzip": (gzip.compress(TWO)[:20] + b"x" * 20, "Cannot read the data .*a.x"),
    "a list in cut gzip": (gzip.compress(LIST)[:-12], "Cannot read the data .*a.x"),
    "cut zstd": (zstd(TWO)[:-3], "Cannot read the data .*a.x"),
    "damaged zstd": (zstd(TWO)[:10] + b"xxxx" + zstd(TWO)[14:], "Cannot read the data .*a.x"),
    "cut Parquet": (parquet(ROW)[:-20], "Cannot read the data .*a.x.*whole"),
}


@pytest.mark.parametrize(("content", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.x"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read_rows(path))


def test_malformed_rows_may_be_counted(tmp_path: Path) -> None:
    path, seen = tmp_path / "a.jsonl", list[DataError]()
    path.write_text('{"a": 1}\n{"a":\n[2]\n{"a": 3}\n')
    assert [row.value["a"] for row in read_rows(path, seen.append)] == [1, 3]
    assert [str(error).split(": ")[0] for error in seen] == [f"{path}:2", f"{path}:3"]
    path.write_text('[{"a": 1},\n2, {"a": 3}, {')
    assert [row.value["a"] for row in read_rows(path, seen.append)] == [1, 3]
    assert len(seen) == 4


@pytest.mark.slow
@pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS)
@pytest.mark.parametrize("start", [b'{"text": "', b'[{"text": "'], ids=["line", "list"])
def test_one_line_without_end(
    pack: Callable[[bytes], bytes], start: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 64 times the limit; neither the line nor the file is held in memory."""
    path = tmp_path / "bomb.jsonl"
    path.write_bytes(pack(start + bytes(64 * MIB)))
    monkeypatch.setattr(rows, "MAX_LINE_BYTES", MIB)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="a line of more than 1 MiB"):
            list(read_rows(path))
        assert tracemalloc.get_traced_memory()[1] < 24 * MIB
    finally:
        tracemalloc.stop()


def test_a_list_of_many_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "list.json"
    path.write_bytes(gzip.compress(b"[" + b"\n" * (4 * MIB)))
    monkeypatch.setattr(rows, "MAX_LIST_BYTES", MIB)
    with pytest.raises(DataError, match="more than 1 MiB in one list"):
        list(read_rows(path))


def test_parquet_whose_column_repeats_a_long_text(tmp_path: Path) -> None:
    """One text of a megabyte, stored once, in 3,000 rows: only a few of them at a time."""
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 3000), ["x" * MIB])
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path)
    assert path.stat().st_size < 2 * MIB
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_rows(path)) == 3000
        assert tracemalloc.get_traced_memory()[1] < 2 * rows.PARQUET_ROWS * MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("start", [b"PAR1", b"\x28\xb5\x2f\xfd"])
def test_a_missing_package_is_named(
    start: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    path = tmp_path / "a.bin"
    path.write_bytes(start + b"rest")
    with pytest.raises(DataError) as caught:
        list(read_rows(path))
    assert f"`pyarrow`: {install_command('moaspec[data]')}" in str(caught.value)


def test_a_directory(tmp_path: Path) -> None:
    """Its files of rows; files that describe them, and others, are passed by with their names."""
    read = {
        "one.json": json.dumps(ROW),
        "list.json": LIST.decode(),
        "lines.json": TWO.decode(),
        "below/a.jsonl": TWO.decode(),
    }
    passed_by = {
        "dataset_info.json": json.dumps({"builder_name": "json", "features": {}}, indent=2),
        "dataset_infos.json": "{}",
        "state.json": json.dumps({"_data_files": []}),
        "sums.json": json.dumps({"rows.jsonl": "0f"}),
        "README.md": "# Rows",
        "LICENSE": "",
        "empty.jsonl": "\n",
    }
    hidden = {".gitattributes": "*.jsonl lfs", ".cache/a.jsonl": "{"}
    for name, text in {**read, **passed_by, **hidden}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    skipped: list[str] = []
    assert [row.value for row in read_rows(tmp_path, skipped=skipped)] == [ROW] * 7
    assert sorted(skipped) == sorted(str(tmp_path / name) for name in passed_by)
    (tmp_path / "rows.json").write_text('[{"prompt": "q"}, {"pro')
    with pytest.raises(DataError, match=r"rows\.json, element 2"):
        list(read_rows(tmp_path))


def test_a_source_without_a_name_is_not_the_present_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_bytes(TWO)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="has no name"):
        list(read_rows(""))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Stands in for the package `datasets`; remembers how it was called."""
    calls: list[tuple[Any, ...]] = []

    def load_dataset(
        name: str, configuration: str | None, *, split: str, streaming: bool
    ) -> Iterator[Any]:
        calls.append((name, configuration, split, streaming))
        if name == "no/thing":
            raise ValueError("there is no such data set")
        return iter([{"prompt": "one", "system": None}, {"prompt": "two"}])

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return calls


@pytest.mark.parametrize(
    ("source", "call"),
    [
        ("hub:a/b", ("a/b", None, "train", True)),
        ("hub:a/b@test", ("a/b", None, "test", True)),
        ("hub:a/b:main@test", ("a/b", "main", "test", True)),
    ],
)
def test_hub_data_sets(source: str, call: tuple[Any, ...], hub: list[tuple[Any, ...]]) -> None:
    found = [(row.where, row.value) for row in read_rows(source)]
    assert found == [(f"{source}:1", {"prompt": "one"}), (f"{source}:2", {"prompt": "two"})]
    assert hub == [call]


@pytest.mark.usefixtures("hub")
def test_an_unknown_data_set() -> None:
    with pytest.raises(DataError, match=r"hub:no/thing.*no such"):
        list(read_rows("hub:no/thing"))


def test_the_hub_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"\[data\]"):
        list(read_rows("hub:a/b"))
