"""Small files that would become large in memory: one clear error each, in bounded memory."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from moaspec.data import row_sources
from moaspec.data.row_sources import numbered_lines, read_records, read_text
from moaspec_core.errors import DataError, InputError
from moaspec_train.run_config import read_train_config

LINE = 1 << 20


def _zstd(data: bytes) -> bytes:
    arrow = pytest.importorskip("pyarrow", reason="the package pyarrow is not installed")
    return bytes(arrow.compress(data, codec="zstd", asbytes=True))


PACKERS = {
    "plain": bytes,
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": _zstd,
}


def _raise(error: DataError) -> None:
    raise error


@pytest.mark.slow
@pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS)
@pytest.mark.parametrize("start", [b'{"text": "', b'[{"text": "'], ids=["line", "list"])
def test_one_line_without_end(
    pack: Callable[[bytes], bytes], start: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 64 times the limit; neither the line nor the file is held in memory."""
    path = tmp_path / "bomb.jsonl"
    path.write_bytes(pack(start + bytes(64 * LINE)))
    monkeypatch.setattr(row_sources, "MAX_LINE_BYTES", LINE)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="a line of more than 1 MiB"):
            list(read_records(path, _raise))
        assert tracemalloc.get_traced_memory()[1] < 24 * LINE
    finally:
        tracemalloc.stop()


def test_a_list_of_many_lines(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_bytes(gzip.compress(b"[" + b"\n" * (4 * LINE)))
    with pytest.raises(DataError, match="more than 1 MiB in one list"):
        read_text(path, LINE)


def test_zstd_frames(tmp_path: Path) -> None:
    """Several frames, and a file that ends too early."""
    lines = [b"%d\n" % number for number in range(1000)]
    whole = b"".join(_zstd(line) for line in lines[:9]) + _zstd(b"".join(lines[9:]))
    path = tmp_path / "a.zst"
    path.write_bytes(whole)
    assert [line for _, line in numbered_lines(path)] == lines
    path.write_bytes(whole[:-3])
    with pytest.raises(DataError, match="Truncated"):
        list(numbered_lines(path))


def test_parquet_whose_column_repeats_a_long_text(tmp_path: Path) -> None:
    """One text of a megabyte, stored once, in 3,000 rows: only a few of them at a time."""
    arrow = pytest.importorskip("pyarrow", reason="the package pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    column = arrow.DictionaryArray.from_arrays(arrow.array([0] * 3000), ["x" * LINE])
    out = io.BytesIO()
    parquet.write_table(arrow.table({"text": column}), out)
    path = tmp_path / "a.parquet"
    path.write_bytes(out.getvalue())
    assert path.stat().st_size < 2 * LINE
    tracemalloc.start()
    try:
        assert sum(1 for _ in row_sources.parquet_rows(path)) == 3000
        assert tracemalloc.get_traced_memory()[1] < 2 * row_sources.PARQUET_ROWS * LINE
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_deep_training_config(tmp_path: Path) -> None:
    path = tmp_path / "deep.yaml"
    path.write_text("model: " + "[" * 5000)
    with pytest.raises(InputError, match="Cannot read the training config"):
        read_train_config(path)
