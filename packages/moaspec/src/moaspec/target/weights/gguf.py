"""Convert GGUF files to directories that transformers loads in seconds."""

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig

from moaspec.target.weights.gguf_config import architecture_of, read_config
from moaspec.target.weights.gguf_file import (
    GGUFFile,
    UnfitFileError,
    parts_of,
    read_gguf,
    save_index,
)
from moaspec.target.weights.gguf_tensors import parameters, sources
from moaspec.target.weights.gguf_tokenizer import end_ids, read_tokenizer
from moaspec.target.weights.gguf_tokens import SUPPRESSED, UnreadableError
from moaspec_core.checkpoint.directory import is_directory
from moaspec_core.errors import MoaSpecError, UnknownModelError, UnsupportedTargetError
from moaspec_core.sampling.params import SETTINGS
from moaspec_core.support.causes import first_line
from moaspec_core.support.paths import (
    VARIABLE,
    make_private,
    require_room,
    require_writable,
    trusted,
)
from moaspec_core.support.seals import cached_directory, is_whole

log = logging.getLogger(__name__)
CONVERSION = 4
"""Part of the names of converted files; another number where they must be made anew."""
INDEX = "tensors.json"
_REFUSED = "tokenizer_refused.txt"  # why the file's tokenizer cannot be read, in its place
FLOAT_BYTES = 4
SHARD_BYTES = 1 << 30  # what is in memory at once, unless one tensor is larger
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")


def find_gguf(path: Path) -> Path | None:
    """Find the GGUF file at a path, or in a directory that has no other weights.

    Returns:
        The file, or its first part if it is split; None if there is none.

    Raises:
        UnknownModelError: the directory has several files, or a split file lacks parts.
    """
    found = [path] if is_gguf_name(path) and is_file(path) else _inside(path)
    firsts = sorted({parts_of(one)[0] for one in found})
    if len(firsts) > 1:
        names = ", ".join(first.name for first in firsts[:4])
        raise UnknownModelError(
            f"The directory {path} holds several GGUF files ({names}); name one of them."
        )
    if not firsts:
        return None
    missing = [one.name for one in parts_of(firsts[0]) if not is_file(one)]
    if missing:
        raise UnknownModelError(
            f"{firsts[0]} is split, and {len(missing)} of its parts are not beside it "
            f"({', '.join(missing[:3])}). Put all parts in one directory."
        )
    return firsts[0]


def is_gguf_name(path: Path) -> bool:
    """Whether a name ends in .gguf, in upper or lower case."""
    return path.suffix.lower() == ".gguf"


def is_file(path: Path) -> bool:
    """Whether the path is a file. False too if the name is too long for a path."""
    try:
        return path.is_file()
    except OSError:
        return False


def _inside(path: Path) -> list[Path]:
    if not is_directory(path) or any(any(path.glob(pattern)) for pattern in _WEIGHTS):
        return []
    return sorted(filter(is_gguf_name, path.iterdir()))


def key_of(gguf: Path) -> str:
    """The name of a converted file in the cache, with a hash of its path, size and time."""
    stats = [one.stat() for one in parts_of(gguf)]
    text = " ".join(f"{stat.st_size} {stat.st_mtime_ns}" for stat in stats)
    text = f"{CONVERSION} {gguf.resolve()} {text}"
    return f"{gguf.stem}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def described(name: str, gguf: Path, key: str, *, remedy: str = "") -> Path:
    """Convert a GGUF file, once, to a directory with its config, tokenizer and `INDEX` of tensors.

    Args and Raises: see `dequantised`.
    """
    return _converted(name, gguf, key, remedy, weights=False)


def dequantised(name: str, gguf: Path, key: str, *, remedy: str = "") -> Path:
    """Convert a GGUF file, once, to a directory with weights in float32.

    Args:
        gguf: the file, or its first part.
        remedy: what to do where the file is damaged.

    Raises:
        OSError: the cache cannot be written.
        UnknownModelError: the file is damaged, lacks tensors, or has surplus ones.
        UnsupportedTargetError: its architecture, a field or a type of tensor is not read.
    """
    return _converted(name, gguf, key, remedy, weights=True)


def _converted(name: str, gguf: Path, key: str, remedy: str, *, weights: bool) -> Path:
    final = trusted(key if weights else f"{key}-config")
    if is_whole(final):
        return final
    require_writable(f"${VARIABLE}", final.parent)
    make_private(final.parent)
    with named_errors(name, gguf, remedy):
        file = read_gguf(gguf)
        config = read_config(file)
        found = sources(config, architecture_of(file), file)
        generation = _generation_config(config, file)
    if weights:
        said = "Dequantising the weights of %s, once; those of 135M took 15 to 60 s elsewhere."
        log.info(said, name)
        numbers = sum(tensor.num_weights for tensor in file.tensors.values())
        require_room(final.parent, FLOAT_BYTES * numbers)

    def write(directory: Path) -> None:
        directory.mkdir()
        if weights:
            _write_weights(directory, _named(parameters(found, file), name, gguf, remedy))
        else:
            save_index(file, directory / INDEX)
        generation.save_pretrained(directory)
        config.save_pretrained(directory)
        if _has_vocabulary(file):
            _write_tokenizer(directory, file, name)

    try:
        return cached_directory(final, write)
    except (OSError, SafetensorError) as error:
        raise OSError(f"Cannot write the cache {final.parent}: {first_line(error)}") from error


@contextmanager
def named_errors(name: str, gguf: Path, remedy: str) -> Iterator[None]:
    """Name the target and the file in errors, and turn the libraries' into ours."""
    begun = f"Cannot load the target {name!r} from the GGUF file {gguf}: "
    remedy = f" {remedy}." if remedy else ""
    try:
        yield
    except (UnsupportedTargetError, UnfitFileError) as error:  # another download is the same
        raise type(error)(f"{begun}{error}") from error
    except MoaSpecError as error:
        raise type(error)(f"{begun}{error}{remedy}") from error
    # The libraries raise almost anything where files are damaged.
    except Exception as error:
        raise UnknownModelError(
            f"{begun}it is damaged, or no GGUF.{remedy} Cause: {first_line(error)}"
        ) from error


def _named(
    tensors: Iterator[tuple[str, Tensor]], name: str, gguf: Path, remedy: str
) -> Iterator[tuple[str, Tensor]]:
    """Pass tensors on; an error in reading one names the file."""
    while True:
        with named_errors(name, gguf, remedy):
            one = next(tensors, None)
        if one is None:
            return
        yield one


def _write_tokenizer(directory: Path, file: GGUFFile, name: str) -> None:
    """Write the tokenizer, or why it cannot be read; the weights serve with another one, too."""
    try:
        read_tokenizer(file.fields, name=name).save_pretrained(directory)
    except UnknownModelError as error:
        (directory / _REFUSED).write_text(str(error), encoding="utf-8")


def require_readable_tokenizer(directory: Path) -> None:
    """Refuse a converted file whose tokenizer could not be read.

    Raises:
        UnknownModelError: says why, and names --tokenizer.
    """
    refused = directory / _REFUSED
    if is_file(refused):
        raise UnknownModelError(refused.read_text(encoding="utf-8"))


def _has_vocabulary(file: GGUFFile) -> bool:
    return file.fields.get("tokenizer.ggml.model", "none") not in ("none", "no_vocab")


def _generation_config(config: Any, file: GGUFFile) -> GenerationConfig:
    """Tokens that end an answer, and the sampling that the file recommends."""
    sampling = dict(_sampling(file))
    made = GenerationConfig.from_model_config(config)
    if _has_vocabulary(file):
        with suppress(UnreadableError):  # another tokenizer is read; the file's own id stays
            made.eos_token_id = config.eos_token_id = end_ids(file.fields) or None
    made.update(**sampling, **({"do_sample": True} if sampling else {}))
    made.suppress_tokens = _suppressed(file, config.vocab_size)
    return made


def _suppressed(file: GGUFFile, vocab_size: int) -> list[int] | None:
    """Tokens that no answer has."""
    found = file.fields.get(SUPPRESSED)
    if found is None:
        return None
    fits = isinstance(found, list) and all(type(one) is int for one in found)
    if not fits or not all(0 <= one < vocab_size for one in found):
        raise UnknownModelError(
            f"its field {SUPPRESSED} is {str(found)[:60]}, and must be a list of ids from 0 to "
            f"{vocab_size - 1}."
        )
    return found or None


def _sampling(file: GGUFFile) -> Iterator[tuple[str, float]]:
    for name, setting in SETTINGS.items():
        key = f"general.sampling.{setting.gguf}"
        if not setting.gguf or key not in file.fields:
            continue
        value = file.fields[key]
        if not setting.accepts(value):
            raise UnknownModelError(
                f"its field {key} is {str(value)[:60]}, and must be a finite number"
                f"{setting.bounds}."
            )
        yield name, value


def _write_weights(directory: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Write shards of a limited size, and their index."""
    shards: list[dict[str, int]] = []
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if shard and _size(shard) + tensor.nbytes > SHARD_BYTES:
            shards.append(_write_shard(directory, len(shards), shard))
            shard = {}
        shard[name] = tensor
    shards.append(_write_shard(directory, len(shards), shard))
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    for number, name in enumerate(names):
        _shard(directory, number).rename(directory / name)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(sum(shard.values()) for shard in shards)},
            "weight_map": {
                key: name for name, shard in zip(names, shards, strict=True) for key in shard
            },
        }
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_shard(directory: Path, number: int, shard: dict[str, Tensor]) -> dict[str, int]:
    save_file(shard, _shard(directory, number), metadata={"format": "pt"})
    return {name: tensor.nbytes for name, tensor in shard.items()}


def _shard(directory: Path, number: int) -> Path:
    return directory / f"{number}.safetensors"


def _size(shard: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in shard.values())
