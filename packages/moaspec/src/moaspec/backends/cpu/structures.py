"""Mirrors of the C++ structures in `cpp/`, field by field; `check_layouts` compares them."""

import ctypes
from ctypes import POINTER, byref, c_double, c_float, c_int64, c_void_p


def _fields(kind: type, names: str) -> tuple[tuple[str, type], ...]:
    return tuple((name, kind) for name in names.split())


class MatrixStruct(ctypes.Structure):
    """A weight in panels."""

    _fields_ = (
        *_fields(c_void_p, "panels bias"),
        *_fields(c_int64, "inputs outputs bits rounded"),
        ("bounds", c_void_p),
        ("kind", c_int64),
        ("next", c_void_p),
    )


class EmbeddingsStruct(ctypes.Structure):
    """Token embeddings, in bf16 or in a GGUF file's blocks."""

    _fields_ = (("rows", c_void_p), ("kind", c_int64))


class OutputBoundsStruct(ctypes.Structure):
    """Bounds on the outputs of a matrix, by a copy in fewer bits."""

    _fields_ = (("copy", MatrixStruct), *_fields(c_void_p, "error norm"))


class LayerStruct(ctypes.Structure):
    """A decoder layer without its attention."""

    _fields_ = (
        *_fields(MatrixStruct, "read output inner down"),
        *_fields(c_void_p, "norm inner_norm query_norm key_norm"),
        ("eps", c_float),
        *_fields(c_int64, "heads kv_heads head_dim"),
    )


class AttentionStruct(ctypes.Structure):
    """A call of attention: addresses, shapes and strides of its tensors."""

    _fields_ = (
        *_fields(c_void_p, "query key value cache_rows mask out"),
        *_fields(c_int64, "rows tokens heads kv_heads head_dim slots"),
        *_fields(c_int64, "query_row query_token query_head"),
        *_fields(c_int64, "key_row key_head key_slot value_row value_head value_slot"),
        *_fields(c_int64, "mask_row mask_token"),
        ("scale", c_float),
    )


class PassStruct(ctypes.Structure):
    """A pass of a stack of layers over a cache."""

    _fields_ = (
        *_fields(c_void_p, "cos sin"),
        *_fields(c_int64, "turned period"),
        ("cache", c_void_p),
        *_fields(c_int64, "layer half cache_row head"),
        ("starts", c_void_p),
        ("attention", AttentionStruct),
        ("norm", c_void_p),
        ("eps", c_float),
    )


class TextPassStruct(ctypes.Structure):
    """A pass over the newest tokens of one text, with the target's choices."""

    _fields_ = (
        ("layers", c_void_p),
        ("count", c_int64),
        ("text", PassStruct),
        ("embeddings", EmbeddingsStruct),
        ("head", c_void_p),
    )


class EncoderStruct(ctypes.Structure):
    """The encoder: from a token's keys and values in all layers to those of CA."""

    _fields_ = (
        *_fields(c_void_p, "layer cos sin"),
        *_fields(c_int64, "turned layers"),
        ("scale", c_float),
        *_fields(c_void_p, "projection memory"),
        *_fields(c_int64, "heads token_stride layer_stride head_stride half_stride"),
    )


class ExitStruct(ctypes.Structure):
    """The adapter of an exit, between CA and the target's layers or head."""

    _fields_ = (*_fields(c_void_p, "norm linear"), *_fields(c_float, "eps scale"))


class DrafterStruct(ctypes.Structure):
    """A drafter, which processes unread tokens, then its drafts level by level."""

    _fields_ = (
        ("text", c_void_p),
        ("text_layers", c_int64),
        *_fields(c_void_p, "memory last"),
        ("reused", c_int64),
        ("exit", c_void_p),
        *_fields(PassStruct, "text_pass memory_pass last_pass"),
        ("finished", c_int64),
        *_fields(c_void_p, "head names"),
        ("embeddings", EmbeddingsStruct),
        ("width", c_int64),
    )


class GrowthStruct(ctypes.Structure):
    """The shape of a draft tree, and its nodes, which the kernel fills in."""

    _fields_ = (
        *_fields(c_int64, "depth breadth"),
        ("least", c_float),
        *_fields(c_int64, "levels leaves nodes"),
        *_fields(c_void_p, "tokens parents scores coupling"),
    )


class SamplerStruct(ctypes.Structure):
    """Sampling settings and position of a token."""

    _fields_ = (
        ("temperature", c_double),
        ("top_k", c_int64),
        *_fields(c_double, "top_p min_p"),
        *_fields(c_int64, "seed choice position"),
    )


class CouplingStruct(ctypes.Structure):
    """How drafts are ranked for a request that samples."""

    _fields_ = (("sampler", SamplerStruct), ("agreement", c_void_p), ("ranks", c_int64))


SHARED = (
    *(
        MatrixStruct,
        EmbeddingsStruct,
        OutputBoundsStruct,
        LayerStruct,
        AttentionStruct,
        SamplerStruct,
        CouplingStruct,
    ),
    *(GrowthStruct, PassStruct, TextPassStruct, EncoderStruct, ExitStruct, DrafterStruct),
)
"""All of them, in the order of `moaspec_layouts`."""


def check_layouts(library: ctypes.CDLL) -> None:
    """Compare sizes and offsets with the C++ compiler's; OSError where they differ."""
    if not hasattr(library, "moaspec_layouts"):
        raise OSError("the library has no kernels of moaspec")
    count = c_int64()
    library.moaspec_layouts.restype = POINTER(c_int64)
    theirs = library.moaspec_layouts(byref(count))[: count.value]
    ours: list[int] = []
    for structure in SHARED:
        offsets = (getattr(structure, name).offset for name, *_ in structure._fields_)
        ours += [ctypes.sizeof(structure), *offsets]
    if theirs != ours:
        raise OSError("the structures of Python and C++ differ in size or offset")
