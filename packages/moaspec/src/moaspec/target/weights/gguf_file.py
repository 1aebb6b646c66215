"""Fields and tensors of GGUF files, over all parts of a split file."""

import json
import math
import mmap
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from moaspec_core.errors import UnknownModelError, UnsupportedTargetError

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFReader

_PART = re.compile(r"-(\d{5})(-of-(\d{5})\.gguf)$", re.IGNORECASE)
ARCHITECTURE = "general.architecture"
_SIGNATURE = 256  # bytes that tell a file's kind
_POINTER = b"version https://git-lfs.github.com/spec/"
_SPLIT = ("split.no", "split.count", "split.tensors.count")


class UnfitFileError(UnknownModelError):
    """The file is not damaged, and another one is needed; the message says which."""


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor as the file stores it.

    Args:
        shape: rows first, as in PyTorch.
        blocks: the stored bytes, or floats, mapped from the file; one row for each row of `shape`.
        part: which part of a split file holds it.
        offset: bytes before it in that part.
    """

    name: str
    shape: tuple[int, ...]
    kind: "GGMLQuantizationType"
    blocks: np.ndarray
    part: int = 0
    offset: int = 0

    @property
    def num_bytes(self) -> int:
        """How many bytes the file stores."""
        return int(self.blocks.nbytes)

    @property
    def num_weights(self) -> int:
        """How many values the tensor has."""
        return math.prod(self.shape)

    def forget_pages(self) -> None:
        """Drop the file's resident pages from memory; they are read again where they are used."""
        mapped = getattr(self.blocks, "_mmap", None)
        if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED)

    def dequantised(self) -> Tensor:
        """The values in float32, in memory of their own."""
        # Imported here: few targets are GGUF files.
        from gguf.quants import dequantize

        values = np.array(dequantize(self.blocks, self.kind), dtype=np.float32)
        return torch.from_numpy(values).reshape(self.shape)


@dataclass(frozen=True)
class GGUFFile:
    """What a file holds, or all parts of a split file together.

    Args:
        fields: metadata as Python values, without those of the split.
    """

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    @cached_property
    def architecture(self) -> str:
        """The value of `general.architecture`.

        Raises:
            UnknownModelError: there is none, or it is no text.
        """
        found = self.fields.get(ARCHITECTURE)
        if not isinstance(found, str):
            is_ = "missing" if found is None else f"{str(found)[:60]}, and must be a text"
            raise UnknownModelError(f"its field {ARCHITECTURE} is {is_}.")
        return found


def parts_of(gguf: Path) -> list[Path]:
    """All parts of a split file, by any part; the file itself where it is whole.

    Raises:
        UnknownModelError: its name has the number of no part.
    """
    part = _PART.search(gguf.name)
    if part is None or int(part[3]) < 2:
        return [gguf]
    if not 1 <= int(part[1]) <= int(part[3]):
        raise UnknownModelError(
            f"{gguf} is named part {int(part[1])} of {int(part[3])}. Give all parts the names with "
            "which they were published (NAME-00001-of-00003.gguf and so on)."
        )
    begun = gguf.name[: part.start()]
    return [gguf.with_name(f"{begun}-{i:05}{part[2]}") for i in range(1, int(part[3]) + 1)]


def read_gguf(gguf: Path) -> GGUFFile:
    """Map a file, or all parts of a split file.

    Raises:
        UnknownModelError: without the file's name: what is wrong with it.
        Exception: almost any, where a file is damaged.
    """
    # Imported here: few targets are GGUF files.
    from gguf import GGUFReader

    readers = []
    for part in parts_of(gguf):
        _require_gguf(part)
        try:
            readers.append(GGUFReader(part))
        except ValueError as error:
            if "GGMLQuantizationType" not in str(error):
                raise
            raise UnsupportedTargetError(
                f"it has a tensor of a type that the package gguf does not know ({error}). A newer "
                "one may: pip install -U gguf."
            ) from error
    _check_split(parts_of(gguf), readers)
    fields = dict(_fields(readers[0]))
    tensors: dict[str, GGUFTensor] = {}
    for number, (part, reader) in enumerate(zip(parts_of(gguf), readers, strict=True)):
        for tensor in _tensors(reader, number):
            if tensor.name in tensors:
                raise UnknownModelError(f"its tensor {tensor.name} is also in {part.name}.")
            tensors[tensor.name] = tensor
    _check_places(tensors.values(), readers)
    _check_count(fields, tensors, readers)
    _check_types(tensors)
    return GGUFFile(gguf, {k: v for k, v in fields.items() if k not in _SPLIT}, tensors)


def save_index(file: GGUFFile, path: Path) -> None:
    """Write where a file's tensors are, so that later loads need not parse its vocabulary."""
    tensors = [
        [one.name, one.shape, int(one.kind), one.part, one.offset] for one in file.tensors.values()
    ]
    path.write_text(json.dumps({ARCHITECTURE: file.architecture, "tensors": tensors}))


def read_by_index(gguf: Path, path: Path) -> GGUFFile:
    """Map a file by an index of `save_index`; its only field is the architecture.

    Raises:
        OSError, UnknownModelError: the file is not the one that was indexed.
    """
    # Imported here: few targets are GGUF files.
    from gguf import GGMLQuantizationType

    index = json.loads(path.read_text())
    parts = [np.memmap(part, mode="r") for part in parts_of(gguf)]
    tensors = {}
    for name, shape, kind, part, offset in index["tensors"]:
        blocks = _blocks(parts[part], tuple(shape), GGMLQuantizationType(kind), offset)
        tensors[name] = GGUFTensor(
            name, tuple(shape), GGMLQuantizationType(kind), blocks, part, offset
        )
    return GGUFFile(gguf, {ARCHITECTURE: index[ARCHITECTURE]}, tensors)


def _blocks(
    part: np.ndarray, shape: tuple[int, ...], kind: "GGMLQuantizationType", offset: int
) -> np.ndarray:
    """A tensor's stored bytes, or floats, as the package gguf gives them."""
    from gguf import GGML_QUANT_SIZES

    weights, size = GGML_QUANT_SIZES[kind]
    *rows, columns = shape
    row_bytes = columns // weights * size
    stored = part[offset : offset + math.prod(rows) * row_bytes]
    if len(stored) < math.prod(rows) * row_bytes:
        raise UnknownModelError("it ends before its last tensor does.")
    stored = stored.reshape(*rows, row_bytes)
    floats = {"F32": np.float32, "F16": np.float16}
    return stored.view(floats[kind.name]) if kind.name in floats else stored


def _require_gguf(part: Path) -> None:
    """Refuse files that are taken for GGUF files, each with its own way out."""
    with part.open("rb") as file:
        start = file.read(_SIGNATURE)
    if start.startswith(_POINTER):
        raise UnfitFileError(
            f"{part.name} is a pointer of Git LFS, which stands for the file. Fetch the file "
            "itself in its repository with `git lfs pull`, or download it from the repository's "
            "page."
        )
    if start.lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith((b"<!doctype", b"<html")):
        raise UnfitFileError(
            f"{part.name} is a web page, such as one that asks for a login. Download the file "
            "itself: on the Hugging Face hub its address has `/resolve/` where the page's has "
            "`/blob/`."
        )
    if start[:4] == b"GGUF" and start[4:6] == b"\0\0" and start[6:] != b"\0\0":
        raise UnfitFileError(
            f"{part.name} is big-endian. Convert it to little-endian (gguf-convert-endian of the "
            "package gguf), or take another file of the model."
        )


def _fields(reader: "GGUFReader") -> Iterator[tuple[str, Any]]:
    for name, field in reader.fields.items():
        if not name.startswith("GGUF."):
            yield name, field.contents()


def _tensors(reader: "GGUFReader", part: int) -> Iterator[GGUFTensor]:
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        place = (part, int(tensor.data_offset))
        yield GGUFTensor(tensor.name, shape, tensor.tensor_type, tensor.data, *place)


def _check_split(parts: Sequence[Path], readers: Sequence["GGUFReader"]) -> None:
    """Refuse parts that were renamed, mixed up or taken from another file."""
    for index, (part, reader) in enumerate(zip(parts, readers, strict=True)):
        number, count = (_scalar(reader, key) for key in _SPLIT[:2])
        if len(parts) == 1 and count in (None, 1):
            continue
        if (number, count) != (index, len(parts)):
            is_ = f"part {(number or 0) + 1} of {count}" if count else "no part of a split file"
            raise UnfitFileError(
                f"{part.name} is {is_} by its own fields, and its name says part {index + 1} of "
                f"{len(parts)}. Give all parts the names with which they were published "
                "(NAME-00001-of-00003.gguf and so on)."
            )


def _scalar(reader: "GGUFReader", key: str) -> int | None:
    field = reader.get_field(key)
    return None if field is None else int(field.contents())


def _check_types(tensors: Mapping[str, GGUFTensor]) -> None:
    """Refuse types that cannot be dequantised, before others are."""
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    for kind, name in {tensor.kind: name for name, tensor in tensors.items()}.items():
        _, size = GGML_QUANT_SIZES[kind]
        try:
            dequantize(np.zeros((1, size), np.uint8), kind)
        except NotImplementedError as error:
            raise UnsupportedTargetError(
                f"its tensor {name} is of the type {kind.name}, which the package gguf cannot "
                "dequantise. Take a file with another quantisation of the model."
            ) from error


def _check_places(tensors: Iterable[GGUFTensor], readers: Sequence["GGUFReader"]) -> None:
    """Refuse tensors that do not follow one another, each from the next multiple of alignment."""
    ends: dict[int, tuple[int, str]] = {}
    for tensor in sorted(tensors, key=lambda one: (one.part, one.offset, one.num_bytes)):
        reader = readers[tensor.part]
        end, before = ends.get(tensor.part, (int(reader.data_offset), "the header"))
        start = end + -(end - int(reader.data_offset)) % int(reader.alignment)
        if tensor.offset != start:
            raise UnknownModelError(
                f"it is damaged: its tensor {tensor.name} begins at byte {tensor.offset}, and must "
                f"begin at {start}, behind {before}."
            )
        ends[tensor.part] = (tensor.offset + tensor.num_bytes, tensor.name)


def _check_count(
    fields: Mapping[str, Any], tensors: Mapping[str, Any], readers: Sequence[Any]
) -> None:
    expected = fields.get("split.tensors.count")
    if len(readers) > 1 and expected is not None and expected != len(tensors):
        raise UnknownModelError(
            f"its {len(readers)} parts hold {len(tensors)} tensors, and by split.tensors.count "
            f"{expected}."
        )
