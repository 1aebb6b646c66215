"""Records of activations: sizes, round trips, and what hostile bytes become."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tiny
from moaspec_core.errors import InputError, WireError
from moaspec_edge.protocol.activation_layout import ActivationLayout
from moaspec_edge.protocol.codec import CODECS, GROUP, MAX_FP16, Codec
from moaspec_edge.server.activation_records import WireEncoder, encoded

SHAPES = st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(1, 40).map(lambda n: 2 * n))


def test_sizes_are_those_of_the_arithmetic() -> None:
    """Llama-3-8B: CA has 4 heads of 128, so 1024 numbers a token."""
    sizes = {name: Codec(name, vectors=8, width=128).token_bytes for name in CODECS}
    assert sizes == {"fp16": 2048, "int8": 1040, "int4": 576}


@given(
    name=st.sampled_from(CODECS),
    shape=SHAPES,
    seed=st.integers(0, 99),
    scale=st.sampled_from((0.0, 1e-30, 1e-6, 1.0, 1e4, 1e30, np.inf, np.nan)),
)
def test_any_numbers_come_back_as_near_as_the_codec_says(
    name: str, shape: tuple[int, int, int], seed: int, scale: float
) -> None:
    values = np.random.default_rng(seed).normal(size=shape).astype("f4")
    values.flat[:: 1 + seed % 7] *= np.float32(scale)
    count, vectors, width = values.shape
    codec = Codec(name, vectors, width)  # type: ignore[arg-type]
    records = codec.encode(values)
    assert records.shape == (count, codec.token_bytes)
    back = codec.decode(records)
    assert np.isfinite(back).all()
    clean = np.nan_to_num(values, nan=0.0, posinf=MAX_FP16, neginf=-MAX_FP16).clip(
        -MAX_FP16, MAX_FP16
    )
    assert (np.abs(back - clean) <= _error(name, clean)).all()


def _error(name: str, clean: np.ndarray) -> np.ndarray:
    """fp16 rounds to 11 bits (6e-8 below its normal range); a level more for 8 and 4 bits."""
    largest = np.abs(clean).max(-1, keepdims=True, initial=0.0)
    if name == "fp16":
        return np.asarray(np.abs(clean) * 2.0**-11 + 6e-8)
    if name == "int8":
        # Half a level, and the scale's own rounding at the largest level.
        return np.broadcast_to(largest * (0.5 / 127 + 2.0**-10) + 127 * 6e-8, clean.shape)
    whole = np.abs(clean).max((1, 2), keepdims=True, initial=0.0)
    return np.broadcast_to(2 * whole * (0.5 / 15 + 2.0**-8) + 15 * 6e-8 + 1e-6, clean.shape)


@given(name=st.sampled_from(CODECS), data=st.binary(max_size=300), count=st.integers(0, 4))
def test_hostile_lengths_are_an_error(name: str, data: bytes, count: int) -> None:
    layout = ActivationLayout(Codec(name, vectors=4, width=10))  # type: ignore[arg-type]
    if len(data) != count * layout.token_bytes:
        with pytest.raises(WireError, match="bytes"):
            layout.decode(data, count)


@pytest.mark.slow
@given(st.data())
def test_hostile_bytes_are_numbers_within_fp16(data: st.DataObject) -> None:
    """Scales may be infinite, or no numbers."""
    codec = Codec(data.draw(st.sampled_from(CODECS)), vectors=3, width=10)
    size = codec.token_bytes
    # Infinity, the largest number and a NaN of fp16, and whatever else there is.
    extreme = st.sampled_from([b"\x00\x7c", b"\x00\xfc", b"\xff\x7b", b"\x01\x7e"])
    pairs = data.draw(st.lists(extreme | st.binary(min_size=2, max_size=2), min_size=size))
    records = np.frombuffer(b"".join(pairs)[: 2 * size], np.uint8)
    values = codec.decode(records.reshape(2, size))
    assert np.abs(values).max() <= MAX_FP16


@given(st.data())
def test_records_of_tokens_stand_alone(data: st.DataObject) -> None:
    """Any run of tokens can be cut out of the records of a text."""
    codec = Codec(data.draw(st.sampled_from(CODECS)), vectors=2, width=GROUP // 4)
    values = np.random.default_rng(0).normal(size=(7, 2, 16)).astype("f4")
    start = data.draw(st.integers(0, 7))
    records = codec.encode(values)
    assert (codec.encode(values[start:]) == records[start:]).all()


def test_what_cannot_be_a_codec_is_refused() -> None:
    with pytest.raises(InputError, match="fp16, int8, int4"):
        Codec("int2", 1, 2)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="even width"):
        Codec("int4", 1, 3)


@pytest.mark.parametrize("num_layers", [0, 2])
def test_layouts_carry_what_the_encoder_made(num_layers: int) -> None:
    target, drafter = tiny.target(), tiny.random_drafter(tiny.target())
    ids_1T = torch.tensor([tiny.PROMPTS[2]])
    read = target.capture(ids_1T, torch.ones_like(ids_1T)).kv_BTLK
    length = ids_1T.shape[1]
    encoder = WireEncoder(drafter, 3, target.num_kv_heads)
    positions = torch.arange(length)[None]
    first, second = encoder.encode(read, positions, [5, length - 5])
    layout = ActivationLayout.of(drafter.config, "fp16", num_layers, target.head_dim)
    data = np.concatenate([encoded(one, layout) for one in (first, second)]).tobytes()
    key, value, layers = layout.decode(data, length)
    expected = drafter.project_kv(drafter.aggregate(read), positions)
    # fp16 keeps 11 bits of values near 1.
    for found, wanted in zip((key, value), expected, strict=True):
        np.testing.assert_allclose(found, wanted[0], atol=2e-3, rtol=2e-3)
    if not num_layers:
        assert layers is None
        return
    assert layers is not None
    pairs = read[0, :, -num_layers:].unflatten(-1, (target.num_kv_heads, -1))
    key_TNHD, value_TNHD = pairs.chunk(2, dim=-1)
    expected_2NHTD = torch.stack((key_TNHD, value_TNHD)).permute(0, 2, 3, 1, 4)
    np.testing.assert_allclose(layers, expected_2NHTD, atol=5e-3, rtol=2e-3)
    with pytest.raises(WireError):
        layout.decode(data[:-1], length)
    with pytest.raises(WireError):
        layout.decode(data + b"\0", length)
