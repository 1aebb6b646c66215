"""Where the parameters of a model of transformers are in a GGUF file.

Every parameter has its tensors, and every tensor its parameter; anything else is refused.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from moaspec.target.weights.gguf_config import HEAD, Architecture
from moaspec.target.weights.gguf_fields import WAY_OUT
from moaspec.target.weights.gguf_file import GGUFFile, UnfitFileError
from moaspec_core.errors import UnknownModelError
from moaspec_core.support.torch_settings import PROCESS_SETTINGS

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_FUSED = {  # parts of transformers that are one tensor or several in files
    "self_attn.qkv_proj": ("attn_qkv", ("attn_q", "attn_k", "attn_v")),
    "mlp.gate_up_proj": ("ffn_up", ("ffn_gate", "ffn_up")),
    "mlp.experts.gate_up_proj": ("ffn_gate_up_exps", ("ffn_gate_exps", "ffn_up_exps")),
}


@dataclass(frozen=True)
class Source:
    """Tensors of the file that give a parameter.

    Args:
        tensors: names; several are joined, one below the other.
        rows: of the only tensor.
        heads: number of heads whose rows are in the order of neighbouring pairs; 0 for none.
        offset: is subtracted.
    """

    tensors: tuple[str, ...]
    rows: tuple[int, int] | None = None
    heads: int = 0
    offset: float = 0.0

    def shape(self, file: GGUFFile) -> tuple[int, ...]:
        """Of the parameter that the file gives."""
        shapes = [file.tensors[name].shape for name in self.tensors]
        rows = sum(shape[:-1][-1] if len(shape) > 1 else shape[0] for shape in shapes)
        if self.rows is not None:
            rows = self.rows[1] - self.rows[0] if self.rows[1] <= rows else rows
        first = shapes[0]
        return (*first[:-2], rows, first[-1]) if len(first) > 1 else (rows,)

    def order(self, num_rows: int) -> np.ndarray:
        """Which rows of a tensor, of `num_rows`, the parameter has: int64, in its order."""
        order = np.arange(num_rows, dtype=np.int64)
        if self.rows is not None:
            order = order[slice(*self.rows)]
        if self.heads:
            order = order.reshape(self.heads, -1, 2).swapaxes(1, 2).reshape(-1)
        return np.ascontiguousarray(order)

    def read(self, file: GGUFFile) -> Tensor:
        """The parameter in float32.

        Raises:
            UnknownModelError: it has NaN or infinite values.
        """
        parts = [file.tensors[name].dequantised() for name in self.tensors]
        value = parts[0] if len(parts) == 1 else torch.cat(parts, dim=max(parts[0].dim() - 2, 0))
        if not bool(value.isfinite().all()):
            raise UnknownModelError(f"{', '.join(self.tensors)} has NaN or infinite values.")
        if self.rows is not None or self.heads:
            value = value[torch.from_numpy(self.order(len(value)))]
        return (value - self.offset if self.offset else value).contiguous()


def sources(config: Any, architecture: Architecture, file: GGUFFile) -> dict[str, Source]:
    """For every parameter of the model, its tensors.

    Raises:
        UnknownModelError: without the file's name: tensors are missing, surplus or of wrong shapes.
    """
    shapes = parameter_shapes(config)
    found = {name: _source(name, config, architecture, file) for name in shapes}
    _require(found, architecture, file)
    for name, source in found.items():
        if source.shape(file) != shapes[name]:
            has, asked = (_shown(shape) for shape in (source.shape(file), shapes[name]))
            raise UnknownModelError(
                f"{', '.join(source.tensors)} has shape {has}, and its fields ask for {asked}."
            )
    return found


def parameter_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's own parameters, without tied ones."""
    with torch.device("meta"), PROCESS_SETTINGS:
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _source(name: str, config: Any, architecture: Architecture, file: GGUFFile) -> Source:
    part, _, suffix = name.rpartition(".")
    if suffix not in ("weight", "bias"):  # stacked experts
        part, suffix = name, "weight"
    if part in _OUTSIDE:
        offset = architecture.norm_offset if part == "model.norm" else 0.0
        return Source((f"{_OUTSIDE[part]}.{suffix}",), offset=offset)
    match = _LAYER.fullmatch(part)
    assert match is not None, name
    layer, part = match.groups()

    def tensor(named: str) -> str:
        return f"blk.{layer}.{named}.{suffix}"

    if part in _FUSED:
        fused, parts = _FUSED[part]
        # In Phi-3's files `ffn_up` is the name of the fused tensor.
        whole = tensor(fused) in file.tensors and tensor(parts[0]) not in file.tensors
        return Source((tensor(fused),) if whole else tuple(map(tensor, parts)))
    own = architecture.parts[part]
    if part[-6:] in ("q_proj", "k_proj", "v_proj"):
        heads = _heads(part, config) if architecture.pairs and part[-6:] != "v_proj" else 0
        if tensor(own) not in file.tensors and tensor("attn_qkv") in file.tensors:
            return Source((tensor("attn_qkv"),), _rows_of(part, config), heads)
        return Source((tensor(own),), heads=heads)
    is_norm = part.endswith(("norm", "layernorm"))
    return Source((tensor(own),), offset=architecture.norm_offset if is_norm else 0.0)


def _heads(part: str, config: Any) -> int:
    is_query = part.endswith("q_proj")
    return int(config.num_attention_heads if is_query else config.num_key_value_heads)


def _rows_of(part: str, config: Any) -> tuple[int, int]:
    """Rows of queries, keys or values in a fused tensor."""
    query, key = (_heads(one, config) * config.head_dim for one in ("q_proj", "k_proj"))
    starts = {"q_proj": (0, query), "k_proj": (query, key), "v_proj": (query + key, key)}
    start, rows = starts[part[-6:]]
    return start, start + rows


def _require(found: Mapping[str, Source], architecture: Architecture, file: GGUFFile) -> None:
    """Refuse a file without some of these tensors, or with others."""
    wanted = dict.fromkeys(name for source in found.values() for name in source.tensors)
    missing = [name for name in wanted if name not in file.tensors]
    if missing:
        raise UnknownModelError(
            f"it lacks {_listed(missing)}, which its fields ask for in a model of the architecture "
            f"{file.architecture!r}."
        )
    known = {*wanted, *architecture.factors}  # factors were read for the config
    surplus = [name for name in file.tensors if name not in known]
    if surplus:
        why = (
            " It has a head of its own, where this architecture takes the embedding."
            if (HEAD in surplus)
            else ""
        )
        raise UnfitFileError(
            f"it has {_listed(surplus)}, which its fields have no place for in a model of the "
            f"architecture {file.architecture!r}.{why} {WAY_OUT}"
        )


def _listed(names: Sequence[str]) -> str:
    count = "the tensor" if len(names) == 1 else f"{len(names)} tensors:"
    return f"{count} {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"


def _shown(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def parameters(found: Mapping[str, Source], file: GGUFFile) -> Iterator[tuple[str, Tensor]]:
    """All parameters, one at a time."""
    for name, source in found.items():
        yield name, source.read(file)
