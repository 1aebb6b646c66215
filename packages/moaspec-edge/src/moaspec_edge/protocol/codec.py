"""Activations as bytes.

Each token is one record of fixed size, so any range of tokens can be sliced without decoding. A
record holds the token's vectors (keys and values of one head each) as numbers,
then their scales:

- fp16: 2 bytes a number;
- int8: 1 byte a number, and an fp16 scale per vector;
- int4: half a byte a number; per group of 64 numbers an fp16 scale and an fp16 minimum.

Numbers that are not finite or too large for fp16 are clamped: a wrong activation may cost an
accepted draft, but never changes the text.

Legend: T tokens, V vectors of a token, D numbers of a vector, G groups of a token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from moaspec_core.errors import InputError

CodecName = Literal["fp16", "int8", "int4"]
CODECS: tuple[CodecName, ...] = ("fp16", "int8", "int4")
GROUP = 64  # numbers that share a scale in int4
MAX_FP16 = 65504.0  # largest finite fp16 number

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Codec:
    """Encodes the vectors of one token as a record.

    Args:
        name: one of `CODECS`.
        vectors: V.
        width: D, even.

    Raises:
        InputError: an unknown codec, or a width that it cannot pack.
    """

    name: CodecName
    vectors: int
    width: int

    def __post_init__(self) -> None:
        if self.name not in CODECS:
            raise InputError(f"codec must be one of {', '.join(CODECS)}, got {self.name!r}.")
        if self.vectors < 1 or self.width < 2 or self.width % 2:
            raise InputError(
                f"A record needs vectors of an even width, got {self.vectors} of {self.width}."
            )

    @property
    def numbers(self) -> int:
        """Numbers of a record, V * D."""
        return self.vectors * self.width

    @property
    def token_bytes(self) -> int:
        """Size of a record."""
        groups = -(-self.numbers // GROUP)
        sizes = {
            "fp16": 2 * self.numbers,
            "int8": self.numbers + 2 * self.vectors,
            "int4": self.numbers // 2 + 4 * groups,
        }
        return sizes[self.name]

    def encode(self, values_TVD: Floats) -> Bytes:
        """Records of T tokens, (T, `token_bytes`)."""
        bounded = np.nan_to_num(values_TVD, nan=0.0, posinf=MAX_FP16, neginf=-MAX_FP16)
        bounded = bounded.clip(-MAX_FP16, MAX_FP16)
        encoders: dict[str, Callable[[Floats], Bytes]] = {
            "fp16": _to_fp16,
            "int8": _to_int8,
            "int4": _to_int4,
        }
        return encoders[self.name](bounded)

    def decode(self, records: Bytes) -> Floats:
        """Decode records, (T, `token_bytes`), into (T, V, D) float32."""
        decoders = {"fp16": self._from_fp16, "int8": self._from_int8, "int4": self._from_int4}
        # A hostile record may hold infinite or too large scales.
        with np.errstate(invalid="ignore"):
            values = np.nan_to_num(decoders[self.name](records))
        return values.clip(-MAX_FP16, MAX_FP16).reshape(len(records), self.vectors, self.width)

    def _from_fp16(self, records: Bytes) -> Floats:
        return _halves(records).astype(np.float32)

    def _from_int8(self, records: Bytes) -> Floats:
        levels = records[:, : self.numbers].view(np.int8).astype(np.float32)
        scales_TV = _halves(records[:, self.numbers :]).astype(np.float32)
        levels_TVD = levels.reshape(len(records), self.vectors, self.width)
        return np.asarray(levels_TVD * scales_TV[..., None])

    def _from_int4(self, records: Bytes) -> Floats:
        half = self.numbers // 2
        packed, rest = records[:, :half], _halves(records[:, half:]).astype(np.float32)
        levels = np.stack((packed & 15, packed >> 4), axis=-1).reshape(len(records), 2 * half)
        scales_TG, minima_TG = np.split(rest, 2, axis=1)
        grouped = _grouped(levels.astype(np.float32))
        values = grouped * scales_TG[..., None] + minima_TG[..., None]
        return np.asarray(_flat(values)[:, : self.numbers])


def _halves(records: Bytes) -> npt.NDArray[np.float16]:
    return np.ascontiguousarray(records).view("<f2")


def _raw(values: npt.NDArray[np.float32]) -> Bytes:
    return np.ascontiguousarray(values.astype("<f2")).view(np.uint8)


def _to_fp16(values_TVD: Floats) -> Bytes:
    return _raw(_flat(values_TVD))


def _to_int8(values_TVD: Floats) -> Bytes:
    scales_TV = (np.abs(values_TVD).max(-1) / 127.0).astype("<f2").astype(np.float32)
    levels = values_TVD / np.where(scales_TV > 0, scales_TV, 1.0)[..., None]
    levels = levels.round().clip(-127, 127).astype(np.int8)
    flat = _flat(levels).view(np.uint8)
    return np.concatenate((flat, _raw(scales_TV)), axis=1)


def _to_int4(values_TVD: Floats) -> Bytes:
    flat = _flat(values_TVD)
    grouped = _grouped(flat, edge=True)
    minima_TG = grouped.min(-1).astype("<f2").astype(np.float32)
    scales_TG = ((grouped.max(-1) - minima_TG) / 15.0).clip(0, MAX_FP16)
    scales_TG = scales_TG.astype("<f2").astype(np.float32)
    shifted = grouped - minima_TG[..., None]
    levels = shifted / np.where(scales_TG > 0, scales_TG, 1.0)[..., None]
    nibbles = _flat(levels.round().clip(0, 15).astype(np.uint8))
    nibbles = nibbles[:, : flat.shape[1]]
    packed = nibbles[:, ::2] | (nibbles[:, 1::2] << 4)
    return np.concatenate((packed, _raw(np.concatenate((scales_TG, minima_TG), axis=1))), axis=1)


def _flat(values_TVD: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """(T, V, D) -> (T, V * D), also for no tokens at all."""
    return values_TVD.reshape(len(values_TVD), values_TVD.shape[1] * values_TVD.shape[2])


def _grouped(flat: Floats, *, edge: bool = False) -> Floats:
    """(T, N) -> (T, G, 64), the last group filled up: with its last number, or with zeros."""
    missing = -flat.shape[1] % GROUP
    padded = np.pad(flat, ((0, 0), (0, missing)), mode="edge" if edge else "constant")
    return padded.reshape(len(flat), padded.shape[1] // GROUP, GROUP)
