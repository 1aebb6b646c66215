"""Weights in the bits of GGUF files: kernels multiply exactly the numbers that the format defines.

Inputs are as they are, or rounded to 8 bits.

The `gguf` package's dequantisation is the oracle.

Legend: O outputs, I inputs.
"""

from __future__ import annotations

import hashlib
from functools import partial

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor, nn

from bits import ROWS, needs_kernels, normal, same_bits, threads
from moaspec.backends.cpu.embeddings import embed_by_kernels
from moaspec.backends.cpu.matrix import Matrix
from moaspec.backends.rounded_inputs import in_8_bits
from moaspec.target.weights.gguf_file import GGUFTensor
from moaspec.target.weights.stored import HALVES, StoredEmbedding, StoredRows, StoredWeight

pytestmark = [needs_kernels, pytest.mark.kernels]

INPUTS = 512
KINDS = [GGMLQuantizationType[name] for name in HALVES]


def tensor(
    kind: GGMLQuantizationType, rows: int, inputs: int = INPUTS, seed: int = 0
) -> GGUFTensor:
    """Random codes and inner scales; the float16 numbers of blocks are of a usual size."""
    random = np.random.default_rng(seed)
    values, size = GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (rows, inputs // values, size), np.uint8)
    for start in HALVES[kind.name]:
        halves = (0.01 * random.standard_normal(blocks.shape[:2])).astype(np.float16)
        blocks[:, :, start : start + 2] = halves[..., None].view(np.uint8)
    return GGUFTensor(kind.name, (rows, inputs), kind, blocks.reshape(rows, -1))


def whole(made: GGUFTensor) -> StoredRows:
    return StoredRows(made, np.arange(made.shape[0]))


def right(weight: StoredWeight) -> Tensor:
    parts = [dequantize(part.tensor.blocks, part.tensor.kind)[part.order] for part in weight.parts]
    return torch.from_numpy(np.concatenate(parts))


def numbers_of(matrix: Matrix) -> Tensor:
    """What the kernel multiplies: its products of unit vectors."""
    units = torch.eye(matrix.inputs, dtype=torch.bfloat16)
    return matrix.product(units, single=True).T


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("outputs", [16, 33, 56])
def test_products_have_the_files_numbers_bit_for_bit(
    outputs: int, kind: GGMLQuantizationType
) -> None:
    weight, bias = StoredWeight([whole(tensor(kind, outputs))]), normal(outputs, seed=1)
    values_OI = right(weight)
    assert torch.equal(numbers_of(Matrix.of_stored(weight, None)), values_OI)
    assert torch.equal(weight.dequantised(), values_OI)
    matrix = Matrix.of_stored(weight, bias)
    assert same_bits(matrix.weight(), values_OI.bfloat16())
    for rows in ROWS:
        x = normal(rows, INPUTS, seed=2)
        exact = x.double() @ values_OI.double().T + bias.double()
        terms = x.double().abs() @ values_OI.double().abs().T + bias.double().abs()
        # Each of some hundred float32 additions rounds by 2 ** -24 of what was summed.
        got = matrix.product(x, single=True)
        assert ((got.double() - exact).abs() <= 2.0**-18 * terms).all()
        assert matrix.best(x).tolist() == [int(row.argmax()) for row in got]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("outputs", [16, 33, 56])
def test_products_of_rounded_inputs(outputs: int, kind: GGMLQuantizationType) -> None:
    """Also of inputs that are 0, or very small, or large beside their neighbours."""
    weight, bias = StoredWeight([whole(tensor(kind, outputs))]), normal(outputs, seed=1)
    values_OI, matrix = right(weight), Matrix.of_stored(weight, bias, rounds_inputs=True)
    for rows in ROWS:
        x = normal(rows, INPUTS, seed=2)
        x[:, :32], x[:, 40], x[:1, 64:96] = 0, 900, 1e-35
        used = in_8_bits(x).double()
        assert not used[:1, 64:96].any()
        exact = used @ values_OI.double().T + bias.double()
        terms = used.abs() @ values_OI.double().abs().T + bias.double().abs()
        got = matrix.product(x, single=True)
        assert ((got.double() - exact).abs() <= 2.0**-18 * terms).all()
        assert matrix.best(x).tolist() == [int(row.argmax()) for row in got]


def test_products_of_rounded_inputs_have_the_same_bits_on_every_instruction_set() -> None:
    """Sums of integers are exact, and float32 sums have one order."""
    found = hashlib.sha256()
    for kind in KINDS:
        values, size = GGML_QUANT_SIZES[kind]
        numbers = np.arange(48 * INPUTS // values * size, dtype=np.uint64)
        blocks = (numbers * 2654435761 // 65536 % 256).astype(np.uint8).reshape(48, -1, size)
        for start in HALVES[kind.name]:
            blocks[:, :, start + 1] = blocks[:, :, start + 1] % 8 + 28  # float16 of 0.004 to 0.5
        rows = GGUFTensor(kind.name, (48, INPUTS), kind, blocks.reshape(48, -1))
        matrix = Matrix.of_stored(StoredWeight([whole(rows)]), None, rounds_inputs=True)
        x = (torch.arange(9 * INPUTS) * 7919 % 1009 - 504).view(9, INPUTS).bfloat16() / 64
        found.update(matrix.product(x, single=True).numpy().tobytes())
    assert found.hexdigest()[:16] == "faaf05819ae1d7cd"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("rounds_inputs", [False, True])
def test_a_row_has_the_same_bits_in_every_call(
    rounds_inputs: bool, kind: GGMLQuantizationType
) -> None:
    stored = StoredWeight([whole(tensor(kind, 72))])
    matrix = Matrix.of_stored(stored, None, rounds_inputs=rounds_inputs)
    x = normal(200, INPUTS, seed=3)
    expected = matrix.product(x, single=True)
    for num in (1, 2, 3):
        with threads(num):
            for rows in ROWS:
                part = matrix.product(x[7 : 7 + rows], single=True)
                assert same_bits(part, expected[7 : 7 + rows])


def test_rows_of_several_tensors_and_kinds_are_one_matrix() -> None:
    """Queries, keys and values of one layer: some files store values in more bits."""
    pairs = np.arange(64).reshape(2, -1, 2).swapaxes(1, 2).reshape(-1)
    kinds = ("Q4_K", "Q4_K", "Q6_K", "Q8_0", "Q5_0")
    parts = [whole(tensor(GGMLQuantizationType[k], 32, seed=i)) for i, k in enumerate(kinds)]
    parts.insert(0, StoredRows(tensor(GGMLQuantizationType.Q4_K, 64, seed=9), pairs))
    parts.append(whole(tensor(GGMLQuantizationType.Q5_0, 7, seed=8)))
    weight = StoredWeight(parts)
    assert Matrix.can_hold_stored(weight)
    assert not Matrix.can_hold_stored(StoredWeight(parts[::-1]))  # seven rows are no panel
    bias = normal(weight.shape[0])
    matrix = Matrix.of_stored(weight, bias)
    assert torch.equal(numbers_of(matrix), right(weight) + bias[:, None].float())
    ids = torch.tensor([229, 0, 230, 63, 64, 100, 0])
    assert torch.equal(weight.rows(ids), right(weight)[ids])
    before = numbers_of(matrix)
    room = torch.zeros(matrix.num_bytes, dtype=torch.uint8)
    matrix.move(room)
    assert torch.equal(numbers_of(matrix), before)
    room.zero_()
    assert not torch.equal(numbers_of(matrix), before)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_embeddings_are_looked_up_in_their_bits(kind: GGMLQuantizationType) -> None:
    weight = StoredWeight([whole(tensor(kind, 20))])
    plain = StoredEmbedding(weight, torch.bfloat16)

    model = nn.Module()
    model.table = plain
    model.get_input_embeddings = lambda: model.table  # type: ignore[assignment]
    model.set_input_embeddings = partial(setattr, model, "table")  # type: ignore[assignment]
    embed_by_kernels(model)
    assert model.table is not plain
    ids = torch.tensor([[3, 19, 0], [7, 7, 1]])
    expected = right(weight)[ids].bfloat16()
    assert same_bits(model.table(ids), expected)
    assert same_bits(plain(ids), expected)
    with pytest.raises(IndexError, match="from 0 to 19"):
        model.table(torch.tensor([20]))
