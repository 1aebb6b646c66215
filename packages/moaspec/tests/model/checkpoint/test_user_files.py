"""What stands in the place of a model's file is refused by name, at once."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import moaspec
import tiny
from moaspec.data.rows import read_rows
from moaspec.evaluate.report.comparison import read_report
from moaspec.generation.drafters import load_drafter
from moaspec.model.checkpoint.moa_checkpoint import save_drafter
from moaspec_core.checkpoint.user_files import why_not_tensors
from moaspec_core.cli.options import read_file
from moaspec_core.errors import CheckpointError, DataError, InputError, UnknownModelError
from moaspec_edge.server.auth import CallAuth


def fifo(path: Path) -> None:
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.mkdir()


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        before = Path.cwd()
        os.chdir(path.parent)  # its name may be too long
        try:
            one.bind(path.name)
        finally:
            os.chdir(before)


def empty(path: Path) -> None:
    path.touch()


KINDS = (fifo, directory, device, dangling, listening, empty)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    place = tmp_path / "model"
    tiny.model().save_pretrained(place)
    tiny.tokenizer().save_pretrained(place)
    return place


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "generation_config.json", "model.safetensors"),
        *("model.safetensors.index.json", "tokenizer.json"),
    ],
)
def test_files_of_a_target(name: str, kind: Callable[[Path], None], model: Path) -> None:
    (model / name).unlink(missing_ok=True)
    kind(model / name)
    if name.endswith("index.json") and kind in (dangling, empty):
        return  # the weights are whole without it
    if name == "generation_config.json" and kind is dangling:
        return  # as if it were missing
    if name == "tokenizer.json" and kind is dangling:
        return  # token ids still work
    with pytest.raises(UnknownModelError, match="Cannot load the target"):
        moaspec.load_target(model)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"eos_token_id": [257, 3',
        bytes(64),
        '{"eos_token_id": 3}'.encode("utf-16"),
        b'{"eos_token_id": "3"}',
        b'{"eos_token_id": [3, null]}',
        b'{"eos_token_id": true}',
        b'{"eos_token_id": 99999}',
        b'{"do_sample": true, "temperature": "hot"}',
        b'{"do_sample": true, "temperature": -3}',
        b'{"do_sample": true, "top_p": NaN}',
        b'{"repetition_penalty": [1.1]}',
    ],
    ids=str,
)
def test_a_damaged_generation_config_is_refused(content: bytes, model: Path) -> None:
    """It is not taken for one that is missing: its ends of texts would be lost."""
    (model / "generation_config.json").write_bytes(content)
    for kept in ("auto", None):
        with pytest.raises(UnknownModelError, match="Cannot load the target"):
            moaspec.load_target(model, generation_config=kept)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_files_of_a_drafter(name: str, kind: Callable[[Path], None], tmp_path: Path) -> None:
    target = tiny.target()
    save_drafter(tiny.random_drafter(target), tmp_path / "drafter")
    (tmp_path / "drafter" / name).unlink()
    kind(tmp_path / "drafter" / name)
    with pytest.raises(CheckpointError, match=name):
        load_drafter(tmp_path / "drafter", target=target)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text"])
def test_impossible_numbers_of_layers(model_type: str, model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": model_type, "num_hidden_layers": 10**9}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnknownModelError, match="num_hidden_layers is 1000000000"):
        moaspec.load_target(model)


@pytest.mark.parametrize("kind", [fifo, directory, device, listening])
def test_files_of_options(kind: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    kind(path)
    for read in (
        lambda: read_file("--file", path),
        lambda: list(read_rows(path)),
        lambda: read_report(path),
        lambda: CallAuth.read(path),
    ):
        with pytest.raises((InputError, DataError), match=r"file\.jsonl"):
            read()


def test_a_pipe_of_the_shell_is_read() -> None:
    source, sink = os.pipe()
    os.write(sink, b"one\n")
    os.close(sink)
    try:
        assert read_file("--file", Path(f"/dev/fd/{source}")) == b"one\n"
    finally:
        os.close(source)


def with_header(path: Path, header: Any, num_bytes: int = 8) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(num_bytes))
    return path


def entry(shape: Any, start: int = 0, end: int = 4) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}


HEADERS: dict[str, Any] = {
    "70 dimensions": {"a": entry([1] * 70)},
    "huge": {"a": entry([2**62, 4])},
    "overflow": {"a": entry([2**63, 2])},
    "negative": {"a": entry([-1])},
    "text": {"a": entry("x")},
    "no shape": {"a": {}},
    "list": [],
    "nesting": b"[" * 100_000,
    "long number": b'{"a": ' + b"9" * 100_000 + b"}",
    "beyond": {"a": entry([1], 0, 2**62)},
    "overlap": {"a": entry([1]), "b": entry([1])},
}


@pytest.mark.parametrize("header", HEADERS)
def test_impossible_headers(header: str, model: Path, tmp_path: Path) -> None:
    with_header(model / "model.safetensors", HEADERS[header])
    with pytest.raises(UnknownModelError, match="Cannot load the target"):
        moaspec.load_target(model)
    target = tiny.target()
    save_drafter(tiny.random_drafter(target), tmp_path / "drafter")
    shutil.copy(model / "model.safetensors", tmp_path / "drafter")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_drafter(tmp_path / "drafter", target=target)


def test_a_header_longer_than_its_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 2**60) + b"{}")
    assert "would have" in str(why_not_tensors(path))
