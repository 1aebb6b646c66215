"""Convert GGUF files to directories that transformers loads in seconds."""

import contextlib
import functools
import hashlib
import logging
import re
import shutil
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM

from moaspec.errors import MoaSpecError, UnknownModelError
from moaspec.model.checkpoint.directory import is_directory
from moaspec.support.causes import first_line
from moaspec.support.paths import (
    VARIABLE,
    close_to_others,
    make_private,
    require_room,
    require_writable,
    trusted,
)
from moaspec.target.families import require_supported
from moaspec.target.target import PROCESS_SETTINGS
from moaspec.target.weights.gguf_tokenizer import end_ids, read_tokenizer

log = logging.getLogger(__name__)
_PART = re.compile(r"-\d{5}(-of-(\d{5})\.gguf)$", re.IGNORECASE)
_WRITTEN_ANEW = ("GGUF.", "split.", "general.architecture")
"""Fields of a part that the joined file lacks, or that its writer adds itself."""
CONVERSION = 2
"""Part of the names of converted files; another number where they must be made anew."""
EXPANSION = 6  # bytes of float32 weights for each byte of a GGUF of about five bits a weight
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")


def find_gguf(path: Path) -> Path | None:
    """The GGUF file at a path, or in a directory without other weights.

    Returns:
        The first part, where the file is split.

    Raises:
        UnknownModelError: several files, or a split file that lacks parts.
    """
    found = [path] if is_gguf_name(path) and is_file(path) else _inside(path)
    firsts = sorted({parts_of(one)[0] for one in found})
    if len(firsts) > 1:
        names = ", ".join(one.name for one in firsts[:4])
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


def parts_of(gguf: Path) -> list[Path]:
    """All parts of a split file, by any part; the file itself where it is whole."""
    part = _PART.search(gguf.name)
    if part is None or int(part[2]) < 2:
        return [gguf]
    begun = gguf.name[: part.start()]
    return [gguf.with_name(f"{begun}-{i:05}{part[1]}") for i in range(1, int(part[2]) + 1)]


def is_gguf_name(path: Path) -> bool:
    """Whether a name ends in .gguf, in upper or lower case."""
    return path.suffix.lower() == ".gguf"


def is_file(path: Path) -> bool:
    """Whether there is such a file; no for a name too long for a path."""
    try:
        return path.is_file()
    except OSError:
        return False


def _inside(path: Path) -> list[Path]:
    if not is_directory(path) or any(any(path.glob(pattern)) for pattern in _WEIGHTS):
        return []
    return sorted(filter(is_gguf_name, path.iterdir()))


def key_of(gguf: Path) -> str:
    """Cache key of the converted file: its name with a hash of path, size and time."""
    facts = [one.stat() for one in parts_of(gguf)]
    text = " ".join(f"{one.st_size} {one.st_mtime_ns}" for one in facts)
    text = f"{CONVERSION} {gguf.resolve()} {text}"
    return f"{gguf.stem}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def is_dequantised(key: str) -> bool:
    """Whether the converted file is in the cache."""
    return (trusted(key) / "config.json").exists()


def dequantised(
    name: str, gguf: Path, key: str, *, remedy: str = "", with_tokenizer: bool = True
) -> Path:
    """Convert a GGUF once and keep float32 weights; later loads take seconds.

    Args:
        gguf: the file, or its first part.
        remedy: what to do where the file is damaged.
        with_tokenizer: whether the file's tokenizer must be one that can be read.

    Raises:
        OSError: the cache cannot be written.
        UnknownModelError: transformers cannot read the file.
        UnsupportedTargetError: a family that is not supported.
    """
    final = trusted(key)
    if is_dequantised(key):
        if with_tokenizer and not (final / "tokenizer.json").exists():
            # It was converted for another tokenizer.
            with _named_errors(name, gguf, remedy):
                read_tokenizer(_metadata(gguf), name=name).save_pretrained(final)
        return final
    require_writable(f"${VARIABLE}", final.parent)
    make_private(final.parent)
    parts = parts_of(gguf)
    size = sum(one.stat().st_size for one in parts)
    require_room(final.parent, (EXPANSION + (len(parts) > 1)) * size)
    said = "Dequantising the weights of %s, once; those of 135M took 15 to 60 s on other machines."
    log.info(said, name)
    scratch = Path(tempfile.mkdtemp(dir=final.parent, prefix=f".{key}-"))
    try:
        whole = gguf
        if len(parts) > 1:
            with _named_errors(name, gguf, remedy, but=OSError):
                whole = _joined(parts, scratch / "whole.gguf")
        with _named_errors(name, gguf, remedy):
            model, tokenizer = _read(name, whole, with_tokenizer=with_tokenizer)
        if whole != gguf:
            whole.unlink()
        model.save_pretrained(scratch)
        if tokenizer is not None:
            tokenizer.save_pretrained(scratch)
        close_to_others(scratch)
        _publish(scratch, final)
    except (OSError, SafetensorError) as error:
        raise OSError(f"Cannot write the cache {final.parent}: {first_line(error)}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return final


@contextmanager
def _named_errors(
    name: str, gguf: Path, remedy: str, *, but: type[Exception] = MoaSpecError
) -> Iterator[None]:
    """Turn the libraries' errors, except those of type `but`, into ours, which name the file."""
    try:
        yield
    except (MoaSpecError, but):
        raise
    # The libraries raise almost anything where files are damaged.
    except Exception as error:
        raise UnknownModelError(
            f"Cannot load the target {name!r}: the GGUF file {gguf} is damaged, or of a kind that "
            f"transformers cannot read. {remedy}{'. ' if remedy else ''}Cause: {first_line(error)}"
        ) from error


@contextmanager
def _parsed_once() -> Iterator[None]:
    """Parse the file once, and build its table of names once; transformers repeats both."""
    import gguf as package  # here: few targets are GGUF files

    with PROCESS_SETTINGS:
        names = "GGUFReader", "get_tensor_name_map"
        kept = {name: getattr(package, name) for name in names}
        try:
            for name, made in kept.items():
                setattr(package, name, functools.cache(made))
            yield
        finally:
            for name, made in kept.items():
                setattr(package, name, made)


@_parsed_once()
def _read(name: str, gguf: Path, *, with_tokenizer: bool) -> tuple[Any, Any]:
    """The model in float32, and its tokenizer; None for one that cannot be read."""
    fields = _metadata(gguf)
    tokenizer = None
    with contextlib.nullcontext() if with_tokenizer else contextlib.suppress(UnknownModelError):
        tokenizer = read_tokenizer(fields, name=name)
    source: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    config = AutoConfig.from_pretrained(**source)
    require_supported(config, name)
    _check_sizes(config, gguf)
    model: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The weights are plain float32 now; without this transformers refuses to save them.
    del model.config.quantization_config
    model.hf_quantizer = None
    _set_ends(model, end_ids(fields))
    return model, tokenizer


def _metadata(gguf: Path) -> dict[str, Any]:
    from gguf import GGUFReader

    return {name: field.contents() for name, field in GGUFReader(str(gguf)).fields.items()}


def _set_ends(model: Any, ends: list[int]) -> None:
    """Stop at the file's own tokens; transformers takes others where it names none."""
    for config in (model.config, model.generation_config):
        config.eos_token_id = ends or None


def _check_sizes(config: Any, gguf: Path) -> None:
    """Refuse sizes that do not fit the file, before transformers builds such a model."""
    with gguf.open("rb") as file:
        (num_tensors,) = struct.unpack("<8xQ", file.read(16))
    if config.num_hidden_layers > num_tensors:
        raise ValueError(f"{config.num_hidden_layers} layers, and {num_tensors} tensors")
    largest = config.hidden_size * max(config.vocab_size, config.intermediate_size)
    if largest > 8 * gguf.stat().st_size:  # less than one bit a weight
        raise ValueError(f"a matrix of {largest} weights in {gguf.stat().st_size} bytes")


def _joined(parts: list[Path], whole: Path) -> Path:
    """Join the parts of a split file; transformers reads whole ones only."""
    # Imported here: few files are split.
    from gguf import GGUFReader, GGUFValueType, GGUFWriter

    readers = [GGUFReader(one) for one in parts]
    fields = readers[0].fields
    writer = GGUFWriter(whole, fields["general.architecture"].contents())
    for name, field in fields.items():
        if not name.startswith(_WRITTEN_ANEW):
            kind = field.types[0]
            inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, sub_type=inner)
    tensors = [tensor for reader in readers for tensor in reader.tensors]
    for one in tensors:
        writer.add_tensor_info(
            one.name, one.data.shape, one.data.dtype, one.data.nbytes, one.tensor_type
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for one in tensors:
        writer.write_tensor_data(one.data)
    writer.close()
    return whole


def _publish(scratch: Path, final: Path) -> None:
    """Move a finished directory into place, unless another process already did."""
    try:
        scratch.rename(final)
    except OSError:
        if not (final / "config.json").exists():
            raise
