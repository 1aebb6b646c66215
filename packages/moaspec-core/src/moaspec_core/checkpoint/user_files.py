"""Files that a user names, before a library opens them.

Opening a FIFO waits for a writer, and a device may never end.
"""

import json
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 16 * 2**20
"""Largest JSON file that is read; as Python objects it may take 30 times as much."""
MAX_LAYERS = 10_000  # of a model
MAX_DIMENSIONS = 8  # of a tensor of a model
MAX_HEADER_BYTES = 100_000_000  # of a safetensors file, as its library limits it
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_file(path: Path) -> BufferedReader:
    """Open a regular file for reading, at once.

    Raises:
        OSError: there is none, or it cannot be read; says what is in its place.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    kind = stat.S_IFMT(os.fstat(handle).st_mode)
    if kind != stat.S_IFREG:
        os.close(handle)
        raise OSError(f"{path} is {_KINDS.get(kind, 'no file')}, and must be a file")
    return os.fdopen(handle, "rb")


def read_limited(path: Path, most: int) -> bytes:
    """Read a file of at most `most` bytes, or a pipe of the shell, as in `<(command)`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is larger.
    """
    # Such a pipe has its writer already.
    is_pipe = path.is_fifo() and str(path.parent) in ("/dev", "/dev/fd", "/proc/self/fd")
    with path.open("rb") if is_pipe else open_file(path) as file:
        content: bytes = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it is larger than {most} bytes")
    return content


def read_json(path: Path) -> Any:
    """The value of a JSON file.

    Raises:
        OSError: it cannot be read.
        ValueError: no JSON, or over `MAX_JSON_BYTES`.
        RecursionError: it nests too deeply.
    """
    return json.loads(read_limited(path, MAX_JSON_BYTES).decode())


def why_not_files(directory: Path) -> str | None:
    """Why a library may not open the files of a model's directory; None if it may.

    Hidden files and directories are not looked at.
    """
    for path in sorted(directory.iterdir()):
        if path.name.startswith(".") or path.is_dir():
            if path.suffix in {".json", ".safetensors"} and path.is_dir():
                return f"{path.name} is a directory, and must be a file"
            continue
        kind = stat.S_IFMT(path.stat().st_mode) if path.exists() else stat.S_IFREG
        if kind != stat.S_IFREG:
            return f"{path.name} is {_KINDS.get(kind, 'no file')}, and must be a file"
        reason = why_not_tensors(path) if path.suffix == ".safetensors" else None
        if path.name == "config.json" and path.exists():
            reason = _why_not_config(path)
        if reason is not None:
            return f"{path.name}: {reason}"
    return None


def _why_not_config(path: Path) -> str | None:
    """Refuse numbers of layers for which some families would make a list first."""
    try:
        values = read_json(path)
    except (OSError, ValueError, RecursionError) as error:
        return f"it cannot be read ({str(error)[:200]})"
    parts = [values, *values.values()] if isinstance(values, dict) else []
    for part in (one for one in parts if isinstance(one, dict)):
        layers = part.get("num_hidden_layers")
        if isinstance(layers, int) and layers > MAX_LAYERS:
            return f"num_hidden_layers is {layers}, over {MAX_LAYERS}"
    return None


def why_not_tensors(path: Path) -> str | None:
    """Why a safetensors header is refused; None if it is not. The library checks the rest."""
    try:
        shapes = list(_shapes(path))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return f"its header cannot be read ({str(error)[:200]})"
    for name, shape in shapes:
        if not isinstance(shape, list) or not all(type(one) is int and one >= 0 for one in shape):
            return f"tensor {name[:100]!r} has no sizes"
        if len(shape) > MAX_DIMENSIONS:
            return (
                f"tensor {name[:100]!r} has {len(shape)} dimensions; {MAX_DIMENSIONS} are possible"
            )
        if max(shape, default=0) >= 2**48:
            return f"tensor {name[:100]!r} has a size of 2^48 or more"
    return None


def _shapes(path: Path) -> Iterator[tuple[str, Any]]:
    with open_file(path) as file:
        size = int.from_bytes(file.read(8), "little")
        if size > min(MAX_HEADER_BYTES, max(path.stat().st_size - 8, 0)):
            raise ValueError(f"it would have {size} bytes")
        header = json.loads(file.read(size).decode())
    for name, info in header.items():
        if name != "__metadata__":
            yield name, info["shape"]
