"""Mirrors of the C++ structures in `cpp/`, field by field; `check_layouts` compares them."""

import ctypes
from collections.abc import Iterator
from ctypes import POINTER, byref, c_double, c_float, c_int64, c_void_p


class MatrixFacts(ctypes.Structure):
    """A weight in panels."""

    _fields_ = (
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("bits", c_int64),
        ("rounded", c_int64),
    )


class LayerFacts(ctypes.Structure):
    """A decoder layer but for its attention."""

    _fields_ = (
        ("read", MatrixFacts),
        ("output", MatrixFacts),
        ("inner", MatrixFacts),
        ("down", MatrixFacts),
        ("norm", c_void_p),
        ("inner_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("eps", c_float),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
    )


class AttentionFacts(ctypes.Structure):
    """Queries, keys and values, and where they are."""

    _fields_ = (
        ("query", c_void_p),
        ("key", c_void_p),
        ("value", c_void_p),
        ("cache_rows", c_void_p),
        ("mask", c_void_p),
        ("out", c_void_p),
        *((name, c_int64) for name in ("rows", "tokens", "heads", "kv_heads", "head_dim", "slots")),
        *((f"query_{name}", c_int64) for name in ("row", "token", "head")),
        *((f"key_{name}", c_int64) for name in ("row", "head", "slot")),
        *((f"value_{name}", c_int64) for name in ("row", "head", "slot")),
        *((f"mask_{name}", c_int64) for name in ("row", "token")),
        ("scale", c_float),
    )


class PassFacts(ctypes.Structure):
    """A pass of several layers over a cache."""

    _fields_ = (
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("turned", c_int64),
        ("period", c_int64),
        ("cache", c_void_p),
        *((name, c_int64) for name in ("layer", "half", "cache_row", "head")),
        ("starts", c_void_p),
        ("attention", AttentionFacts),
        ("norm", c_void_p),
        ("eps", c_float),
    )


class EncoderFacts(ctypes.Structure):
    """What becomes of a token's keys and values in all layers."""

    _fields_ = (
        ("layer", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("turned", c_int64),
        ("layers", c_int64),
        ("scale", c_float),
        ("projection", c_void_p),
        ("memory", c_void_p),
    )


class ExitFacts(ctypes.Structure):
    """What a drafter's states go through before what it reuses of the target."""

    _fields_ = (("norm", c_void_p), ("linear", c_void_p), ("eps", c_float), ("scale", c_float))


class DrafterFacts(ctypes.Structure):
    """A drafter that reads text, then its own drafts level by level."""

    _fields_ = (
        ("text", c_void_p),
        ("memory", c_void_p),
        ("last", c_void_p),
        ("reused", c_int64),
        ("exit", c_void_p),
        *((f"{name}_pass", PassFacts) for name in ("text", "memory", "last")),
        ("finished", c_int64),
        ("head", c_void_p),
        ("names", c_void_p),
        ("embeddings", c_void_p),
        ("width", c_int64),
    )


class GrowthFacts(ctypes.Structure):
    """Shape and nodes of a draft tree."""

    _fields_ = (
        ("depth", c_int64),
        ("breadth", c_int64),
        ("least", c_float),
        ("levels", c_int64),
        ("leaves", c_int64),
        ("nodes", c_int64),
        ("tokens", c_void_p),
        ("parents", c_void_p),
        ("scores", c_void_p),
        ("coupling", c_void_p),
    )


class SamplerFacts(ctypes.Structure):
    """How a token is chosen, and where."""

    _fields_ = (
        ("temperature", c_double),
        ("top_k", c_int64),
        ("top_p", c_double),
        ("min_p", c_double),
        *((name, c_int64) for name in ("seed", "choice", "position")),
    )


class CouplingFacts(ctypes.Structure):
    """How drafts for a sampled row are ranked."""

    _fields_ = (("sampler", SamplerFacts), ("agreement", c_void_p), ("ranks", c_int64))


SHARED = (
    *(MatrixFacts, LayerFacts, AttentionFacts, SamplerFacts, CouplingFacts, GrowthFacts),
    *(PassFacts, EncoderFacts, ExitFacts, DrafterFacts),
)
"""All of them, in the order of `moaspec_layouts`."""


def check_layouts(library: ctypes.CDLL) -> None:
    """Compare sizes and offsets with the C++ compiler's; OSError where they differ."""
    if not hasattr(library, "moaspec_layouts"):
        raise OSError("the library has no kernels of moaspec")
    count = c_int64()
    library.moaspec_layouts.restype = POINTER(c_int64)
    theirs = library.moaspec_layouts(byref(count))[: count.value]
    if theirs != list(_layouts()):
        raise OSError("the structures of Python and C++ differ in size or offset")


def _layouts() -> Iterator[int]:
    for structure in SHARED:
        yield ctypes.sizeof(structure)
        for name, *_ in structure._fields_:
            yield getattr(structure, name).offset
