"""A copy of a GGUF file with its first layers only, not quantised.

llama.cpp rounds what a quantised weight is multiplied with to 8 bits, which hides a forgotten
scaling of positions. In the copy layers are in float32, and the embedding and the head, which are
large, in float16; two layers show faults of reading as well as all do.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize

from moaspec.target.weights.gguf_file import parts_of

NUM_LAYERS = 2
_WRITTEN_ANEW = ("GGUF.", "split.", "general.architecture")
_BY_DEPTH = {("gemma2", 46), ("gemma3", 62)}
"""llama.cpp recognises Gemma 27B, which scales attention otherwise, by its number of layers."""


def write_first_layers(gguf: Path, copy: Path) -> int | None:
    """Write the copy of a file, or of all parts of a split file.

    Returns:
        The number of its layers, or None where a copy would be another model; then none is written.
    """
    readers = [GGUFReader(part) for part in parts_of(gguf)]
    fields = readers[0].fields
    architecture = fields["general.architecture"].contents()
    depth = int(fields[f"{architecture}.block_count"].contents())
    if (architecture, depth) in _BY_DEPTH:
        return None
    layers = min(NUM_LAYERS, depth)
    writer = GGUFWriter(copy, architecture)
    for name, field in fields.items():
        if not name.startswith(_WRITTEN_ANEW):
            kind = field.types[0]
            inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
            value = _shortened(name, field.contents(), architecture, depth, layers)
            writer.add_key_value(name, value, kind, sub_type=inner)
    for tensor in _kept(readers, layers):
        outside = len(tensor.shape) > 1 and not tensor.name.startswith("blk.")
        kind = np.float16 if outside else np.float32
        writer.add_tensor(tensor.name, dequantize(tensor.data, tensor.tensor_type).astype(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return layers


def _shortened(name: str, value: Any, architecture: str, depth: int, layers: int) -> Any:
    """A field for the copy: the number of layers, and lists with a value for each."""
    if name == f"{architecture}.block_count":
        return layers
    per_layer = name.startswith(f"{architecture}.") and isinstance(value, list)
    return value[:layers] if per_layer and len(value) == depth else value


def _kept(readers: list[GGUFReader], layers: int) -> Iterator[Any]:
    for reader in readers:
        for tensor in reader.tensors:
            _, _, rest = tensor.name.partition("blk.")
            if not rest or int(rest.partition(".")[0]) < layers:
                yield tensor
