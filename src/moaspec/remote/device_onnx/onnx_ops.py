"""Operations of an ONNX graph whose matrices have 32, eight or four bits.

Legend: T tokens, R rows of a matrix, I its inputs, Q blocks of a row, B inputs of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import ArrayLike, NDArray
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from moaspec.errors import InputError

Weights = Literal["float32", "int8", "int8-web", "int4"]
"""int8 and int4: `MatMulNBits`, fastest in native onnxruntime. int8-web: `MatMulInteger`, which is
standard ONNX and several times as fast in WebAssembly, where `MatMulNBits` has no kernel."""
CONTRIB = "com.microsoft"
BLOCK = 32
"""Inputs that share a scale in `MatMulNBits`."""
INT8_PRODUCTS = 4
"""`MatMulNBits` with inputs in eight bits; CPUs have fast kernels for nothing else."""
ACTIVATIONS = {"gelu": {"approximate": "none"}, "gelu_pytorch_tanh": {"approximate": "tanh"}}
Array = NDArray[Any]


@dataclass(frozen=True)
class Matrix:
    """A stored matrix: a product's weight, an embedding, or both."""

    name: str
    scale: str
    num_inputs: int
    num_rows: int


class GraphBuilder:
    """Collects nodes and initializers; methods return names of tensors.

    Args:
        weights: how matrices are stored and multiplied.
    """

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []

    def op(self, kind: str, *inputs: str, name: str | None = None, **attributes: Any) -> str:
        """Add a node with one output, whose name matters only where the graph has it as output."""
        name = name or f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], **attributes))
        return name

    def ops(self, kind: str, *inputs: str, count: int) -> list[str]:
        """Add a node with several outputs."""
        names = [f"{kind}_{len(self.nodes)}_{i}" for i in range(count)]
        self.nodes.append(helper.make_node(kind, inputs, names))
        return names

    def constant(self, value: ArrayLike) -> str:
        """Store numbers: floating ones in float32, whole ones as they are (int64 from Python)."""
        array = np.array(value, order="C")
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        name = f"constant_{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def matrix(self, weight_RI: Array) -> Matrix:
        """Store a matrix in this graph's bits."""
        num_rows, num_inputs = weight_RI.shape
        if self.weights == "float32":
            return Matrix(self.constant(weight_RI.T), "", num_inputs, num_rows)
        if self.weights == "int8-web":
            quantised, scale = _quantised(weight_RI, 127)
            stored, scale = quantised.T.astype(np.int8), scale[:, 0]
        else:
            padded = np.pad(weight_RI, ((0, 0), (0, -num_inputs % BLOCK)))
            blocks_RQB = padded.reshape(num_rows, -1, BLOCK)
            stored, scale = _packed(blocks_RQB, self.bits)
        return Matrix(self.constant(stored), self.constant(scale), num_inputs, num_rows)

    def selected(self, matrix: Matrix, rows: Array) -> Matrix:
        """Some rows of a matrix. Runtimes compute them once, as they load the graph."""
        index = self.constant(rows)
        by_column = self.weights in ("float32", "int8-web")
        name = self.op("Gather", matrix.name, index, axis=int(by_column))
        scale = matrix.scale
        if self.weights != "float32":
            scale = self.op("Gather", scale, index, axis=0)
        return Matrix(name, scale, matrix.num_inputs, len(rows))

    @property
    def bits(self) -> int:
        return 4 if self.weights == "int4" else 8

    def product(self, x: str, matrix: Matrix) -> str:
        """(T, I) -> (T, R)."""
        if self.weights == "float32":
            return self.op("MatMul", x, matrix.name)
        if self.weights == "int8-web":
            quantised, scale, zero = self.ops("DynamicQuantizeLinear", x, count=3)
            sums = self.op("MatMulInteger", quantised, matrix.name, zero)
            factor = self.op("Mul", scale, matrix.scale)
            return self.op("Mul", self.op("Cast", sums, to=TensorProto.FLOAT), factor)
        return self.op(
            "MatMulNBits",
            x,
            matrix.name,
            matrix.scale,
            domain=CONTRIB,
            K=matrix.num_inputs,
            N=matrix.num_rows,
            bits=self.bits,
            block_size=BLOCK,
            accuracy_level=INT8_PRODUCTS,
        )

    def rows(self, ids: str, matrix: Matrix) -> str:
        """Rows of a matrix in float32, (T,) -> (T, I)."""
        if self.weights == "float32":
            return self.op("Transpose", self.op("Gather", matrix.name, ids, axis=1), perm=[1, 0])
        scale = self.op("Gather", matrix.scale, ids, axis=0)
        if self.weights == "int8-web":
            columns = self.op("Gather", matrix.name, ids, axis=1)
            found = self.op("Cast", columns, to=TensorProto.FLOAT)
            scale = self.op("Unsqueeze", scale, self.constant([1]))
            return self.op("Mul", self.op("Transpose", found, perm=[1, 0]), scale)
        packed_TQB = self.op("Gather", matrix.name, ids, axis=0)
        if self.weights == "int4":
            packed_TQB = self._unpacked(packed_TQB)
        found = self.op("Cast", packed_TQB, to=TensorProto.FLOAT)
        found = self.op("Sub", found, self.constant(np.float32(2 ** (self.bits - 1))))
        found = self.op("Mul", found, self.op("Unsqueeze", scale, self.constant([2])))
        padded = self.op("Reshape", found, self.constant([0, -1]))
        if not matrix.num_inputs % BLOCK:
            return padded
        bounds = [self.constant([one]) for one in (0, matrix.num_inputs, 1)]
        return self.op("Slice", padded, *bounds)

    def _unpacked(self, packed_TQB: str) -> str:
        """The two halves of each byte, the lower one first."""
        low = self.op("BitwiseAnd", packed_TQB, self.constant(np.uint8(15)))
        high = self.op("BitShift", packed_TQB, self.constant(np.uint8(4)), direction="RIGHT")
        last = self.constant([3])
        pairs = [self.op("Unsqueeze", half, last) for half in (low, high)]
        return self.op("Reshape", self.op("Concat", *pairs, axis=3), self.constant([0, 0, BLOCK]))

    def linear(self, x: str, layer: nn.Linear) -> str:
        y = self.product(x, self.matrix(to_numpy(layer.weight)))
        return y if layer.bias is None else self.op("Add", y, self.constant(to_numpy(layer.bias)))

    def norm(self, x: str, norm: nn.RMSNorm) -> str:
        squares = self.op("Pow", x, self.constant(np.float32(2.0)))
        mean = self.op("ReduceMean", squares, self.constant([-1]), keepdims=1)
        assert norm.eps is not None, "the drafter's norms have one"
        root = self.op("Sqrt", self.op("Add", mean, self.constant(np.float32(norm.eps))))
        return self.op("Mul", self.op("Div", x, root), self.constant(to_numpy(norm.weight)))

    def activation(self, x: str, name: str) -> str:
        if name == "silu":
            return self.op("Mul", x, self.op("Sigmoid", x))
        if name not in ACTIVATIONS:
            raise InputError(
                f"An ONNX bundle cannot be made of a drafter with activation {name!r}; known: "
                f"silu, {', '.join(ACTIVATIONS)}."
            )
        return self.op("Gelu", x, **ACTIVATIONS[name])


def to_numpy(tensor: Tensor) -> Array:
    """A float32 copy on the CPU."""
    array: Array = tensor.detach().float().cpu().numpy()
    return array


def _quantised(values: Array, largest: int) -> tuple[Array, Array]:
    """Nearest whole numbers within +-`largest`, and the scale of each row (last axis)."""
    scale = np.abs(values).max(-1, keepdims=True).clip(np.finfo(np.float32).tiny) / largest
    return np.rint(values / scale), scale.astype(np.float32)


def _packed(blocks_RQB: Array, bits: int) -> tuple[Array, Array]:
    """Unsigned numbers as `MatMulNBits` reads them, and scales, (R, Q)."""
    middle = 2 ** (bits - 1)
    values, scale = _quantised(blocks_RQB, middle - 1)
    stored = (values + middle).astype(np.uint8)
    if bits == 4:
        stored = stored[..., ::2] | stored[..., 1::2] << 4
    return stored, scale[..., 0]
