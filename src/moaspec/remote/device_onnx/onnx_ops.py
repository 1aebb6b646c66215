"""Operations of an ONNX graph whose matrices have 32, eight or four bits.

Legend: T tokens, R rows of a matrix, I its inputs, Q blocks of a row, B inputs of a block.
"""

from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import ArrayLike, NDArray
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from moaspec.errors import InputError

Weights = Literal["float32", "int8", "int8-web", "int4", "int4-web"]
"""int8 and int4: `MatMulNBits`, fastest in native onnxruntime. int8-web: `MatMulInteger`, which is
standard ONNX and several times as fast in WebAssembly, where `MatMulNBits` has no kernel; layers
are stored in twelve bits and multiplied in float32, which takes as long there. int4-web:
`MatMulInteger` alone. The eight bits of int4-web and the floats of int8-web are results of
operations on constants, which runtimes compute as they load."""
CONTRIB = "com.microsoft"
BLOCK = 32  # inputs that share a scale in `MatMulNBits` and int8-web
WEB_BLOCK = 16  # inputs that share a factor of int4-web
MAX_FACTOR = 18  # 7 * 18 fits into eight bits
WEB_ROWS = 4096  # rows that are multiplied at once, which limits the memory for it
REST_STEPS = 14  # steps of a rest in four bits, -7 ... 7, within a step of eight bits
LOW_STEPS = 16  # steps of twelve bits in one of eight, int8-web
INT8_PRODUCTS = 4
"""`MatMulNBits` with inputs in eight bits; CPUs have fast kernels for nothing else."""
SMALLEST = 2.0**-24  # smallest scale, the smallest positive number of fp16
ACTIVATIONS = {"gelu": {"approximate": "none"}, "gelu_pytorch_tanh": {"approximate": "tanh"}}
Array = NDArray[Any]


@dataclass(frozen=True)
class Matrix:
    """A stored matrix: a product's weight, an embedding, or both."""

    name: str  # of its numbers
    scale: str  # of its blocks or rows
    num_inputs: int
    num_rows: int
    rest: str = ""  # what eight bits leave, in four bits of the same scale / `REST_STEPS`; or empty
    is_float: bool = False  # whether `name` is float32, (I, R)


class GraphBuilder:
    """Collects nodes and initializers (`weights`: their bits); methods name tensors.

    Attributes:
        learned: the initializers of weights that were stored while `is_learning`. Their number and
            sizes depend on the weights' shapes alone.
    """

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.learned: list[onnx.TensorProto] = []
        self.is_learning = False
        self._splits: dict[str, tuple[str, str]] = {}

    def op(self, kind: str, *inputs: str, name: str | None = None, **attributes: Any) -> str:
        """Add a node with one output, whose name matters only where the graph has it as output."""
        name = name or f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], **attributes))
        return name

    def ops(self, kind: str, *inputs: str, count: int, **attributes: Any) -> list[str]:
        """Add a node with several outputs."""
        names = [f"{kind}_{len(self.nodes)}_{i}" for i in range(count)]
        self.nodes.append(helper.make_node(kind, inputs, names, **attributes))
        return names

    def constant(self, value: ArrayLike) -> str:
        """Store numbers: floating ones in float32, whole ones as they are (int64 from Python)."""
        array = np.array(value, order="C")
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        name = f"constant_{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def weight(self, value: Array) -> str:
        """Store numbers that are trained, or follow from such."""
        name = self.constant(value)
        self._learn()
        return name

    def _learn(self) -> None:
        if self.is_learning:
            self.learned.append(self.initializers[-1])

    def matrix(self, weight_RI: Array, *, fine: bool = False) -> Matrix:
        """Store a matrix in this graph's bits; `fine`: in four more, with int8 and int8-web."""
        num_rows, num_inputs = weight_RI.shape
        if self.weights == "float32":
            return Matrix(self.weight(weight_RI.T), "", num_inputs, num_rows)
        if self.weights == "int4-web":
            return self._expanded(weight_RI)
        if fine and self.weights == "int8-web":
            return self._twelve_bits(weight_RI)
        blocks_RQB = _blocks(weight_RI)
        values, scale = _quantised(blocks_RQB, 2 ** (self.bits - 1) - 1, np.float16)
        stored = values.astype(np.int8) if self.is_web else _packed(values, self.bits)
        names = self.weight(stored), self.weight(scale[..., 0])
        rest = ""
        if fine and self.weights == "int8":
            step = scale.astype(np.float32)
            steps = np.rint((blocks_RQB / step - values) * REST_STEPS)
            rest = self.weight(_packed(steps.clip(-7, 7), 4))
        return Matrix(*names, num_inputs, num_rows, rest)

    def _twelve_bits(self, weight_RI: Array) -> Matrix:
        """Store eight and four bits, and a scale of each row; whole numbers in float32, (I, R)."""
        steps, scale = _quantised(weight_RI, 127 * LOW_STEPS + LOW_STEPS // 2 - 1)
        steps_IR = steps.T.astype(np.int16)
        high_IR = (steps_IR + LOW_STEPS // 2) // LOW_STEPS
        low = self.op("Cast", self._int4(steps_IR - LOW_STEPS * high_IR), to=TensorProto.FLOAT)
        high = self.op("Cast", self.weight(high_IR.astype(np.int8)), to=TensorProto.FLOAT)
        name = self.op("Add", self.op("Mul", high, self.constant(float(LOW_STEPS))), low)
        num_rows, num_inputs = weight_RI.shape
        return Matrix(name, self.weight(scale[:, 0]), num_inputs, num_rows, is_float=True)

    def _expanded(self, weight_RI: Array) -> Matrix:
        """Store four bits, a factor of each block and a scale of each row."""
        num_rows, num_inputs = weight_RI.shape
        blocks_RQB = _blocks(weight_RI, WEB_BLOCK)
        largest_RQ1 = np.abs(blocks_RQB).max(2, keepdims=True)
        scale_R11 = (largest_RQ1.max(1, keepdims=True) / (7 * MAX_FACTOR)).clip(SMALLEST)
        factor_RQ1 = np.rint(largest_RQ1 / (7 * scale_R11)).clip(1)
        steps_RQB = np.rint(blocks_RQB / (scale_R11 * factor_RQ1)).clip(-7, 7)
        parts = [
            self._multiplied(steps_RQB[i : i + WEB_ROWS], factor_RQ1[i : i + WEB_ROWS])
            for i in range(0, num_rows, WEB_ROWS)
        ]
        x_IR = self.op("Concat", *parts, axis=1)
        if num_inputs % WEB_BLOCK:
            x_IR = self.op("Slice", x_IR, *(self.constant([one]) for one in (0, num_inputs, 0)))
        return Matrix(x_IR, self.weight(scale_R11.ravel()), num_inputs, num_rows)

    def _multiplied(self, steps_RQB: Array, factor_RQ1: Array) -> str:
        """Steps times factors, (I, R) int8: a convolution, each block a channel.

        Runtimes apply no other product of eight bits to constants.
        """
        steps, factor = steps_RQB.astype(np.int8), factor_RQ1.astype(np.int8)
        x = self.op("Cast", self._int4(steps.reshape(1, -1, WEB_BLOCK)), to=TensorProto.INT8)
        same = self.constant(np.float32(1)), self.constant(np.int8(0))
        factors = self.weight(factor.reshape(-1, 1, 1))
        x = self.op("QLinearConv", x, *same, factors, *same, *same, group=factor.size)
        x_RI = self.op("Reshape", x, self.constant([len(steps), -1]))
        return self.op("Transpose", x_RI, perm=[1, 0])

    def _int4(self, values: Array) -> str:
        """Store whole numbers from -8 to 7; an even number of them."""
        low, high = (values.reshape(-1, 2).astype(np.uint8) & 15).T
        name, data = f"constant_{len(self.initializers)}", (low | high << 4).tobytes()
        made = helper.make_tensor(name, TensorProto.INT4, values.shape, data, raw=True)
        self.initializers.append(made)
        self._learn()
        return name

    def selected(self, matrix: Matrix, rows: Array) -> Matrix:
        """Some rows of a matrix. Runtimes compute them once, as they load the graph."""
        assert not any((matrix.rest, matrix.is_float)), "embeddings and heads are not fine"
        index = self.constant(rows)
        by_column = self.weights in ("float32", "int4-web")
        name = self.op("Gather", matrix.name, index, axis=int(by_column))
        scale = matrix.scale
        if self.weights != "float32":
            scale = self.op("Gather", scale, index, axis=0)
        return Matrix(name, scale, matrix.num_inputs, len(rows))

    @property
    def is_web(self) -> bool:
        return self.weights.endswith("-web")

    @property
    def bits(self) -> int:
        return 4 if self.weights == "int4" else 8

    def product(self, x: str, matrix: Matrix) -> str:
        """(T, I) -> (T, R)."""
        if self.weights == "float32":
            return self.op("MatMul", x, matrix.name)
        if matrix.is_float:
            return self.op("Mul", self.op("MatMul", x, matrix.name), matrix.scale)
        if self.weights == "int4-web":
            quantised = self.ops("DynamicQuantizeLinear", x, count=3)
            return self._integer_product(*quantised, name=matrix.name, scale=matrix.scale)
        if self.weights == "int8-web":
            return self._web_product(self._padded(x, matrix.num_inputs), matrix)
        scale = self.op("Cast", matrix.scale, to=TensorProto.FLOAT)
        x = self._padded(x, matrix.num_inputs)
        if not matrix.rest:
            return self._block_product(x, matrix, matrix.name, scale, self.bits)
        high, both = self._split(x)
        found = self._block_product(both, matrix, matrix.name, scale, self.bits)
        found = self.op("ReduceSum", found, self.constant([0]), keepdims=0)
        scale = self.op("Div", scale, self.constant(float(REST_STEPS)))
        return self.op("Add", found, self._block_product(high, matrix, matrix.rest, scale, 4))

    def _integer_product(self, x: str, x_scale: str, zero: str, *, name: str, scale: str) -> str:
        """Inputs in eight bits, and a scale of each row."""
        sums = self.op("Cast", self.op("MatMulInteger", x, name, zero), to=TensorProto.FLOAT)
        return self.op("Mul", sums, self.op("Mul", x_scale, scale))

    def _web_product(self, x: str, matrix: Matrix) -> str:
        """Add the products of all blocks."""
        quantised, x_scale, zero = self.ops("DynamicQuantizeLinear", x, count=3)
        count = -(-matrix.num_inputs // BLOCK)
        sizes = self.constant([BLOCK] * count)
        inputs = self.ops("Split", quantised, sizes, count=count, axis=1)
        name_QBR = self.op("Transpose", matrix.name, perm=[1, 2, 0])
        scale_RQ = self.op("Cast", matrix.scale, to=TensorProto.FLOAT)
        products = []
        for number, part in enumerate(inputs):
            block = self.constant(number)
            name = self.op("Gather", name_QBR, block)
            scale = self.op("Gather", scale_RQ, block, axis=1)
            found = self._integer_product(part, x_scale, zero, name=name, scale=scale)
            products.append(found)
        return self.op("Sum", *products)

    def _block_product(self, x: str, matrix: Matrix, name: str, scale: str, bits: int) -> str:
        """`MatMulNBits` with inputs of whole blocks."""
        return self.op(
            "MatMulNBits",
            x,
            name,
            scale,
            domain=CONTRIB,
            K=matrix.num_inputs + -matrix.num_inputs % BLOCK,
            N=matrix.num_rows,
            bits=bits,
            block_size=BLOCK,
            accuracy_level=INT8_PRODUCTS,
        )

    def _padded(self, x: str, num_inputs: int) -> str:
        """Inputs with zeros up to the end of a block."""
        missing = -num_inputs % BLOCK
        return self.op("Pad", x, self.constant([0, 0, 0, missing])) if missing else x

    def _split(self, x: str) -> tuple[str, str]:
        """Inputs in eight bits, (T, I), and these above what eight bits leave, (2, T, I).

        `MatMulNBits` rounds its inputs in the same way, which leaves the former as they are.
        """
        if x not in self._splits:
            shape = self.op("Shape", x)
            blocks = self.op("Reshape", x, self.constant([0, -1, BLOCK]))
            largest = self.op("ReduceMax", self.op("Abs", blocks), self.constant([2]), keepdims=1)
            scale = self.op("Mul", largest, self.constant(1 / 127))
            scale = self.op("Max", scale, self.constant(SMALLEST))
            steps = self.op("Round", self.op("Div", blocks, scale))
            high = self.op("Reshape", self.op("Mul", steps, scale), shape)
            first = self.constant([0])
            parts = (self.op("Unsqueeze", one, first) for one in (high, self.op("Sub", x, high)))
            self._splits[x] = high, self.op("Concat", *parts, axis=0)
        return self._splits[x]

    def rows(self, ids: str, matrix: Matrix) -> str:
        """Rows of a matrix in float32, (T,) -> (T, I)."""
        if self.weights == "float32":
            return self.op("Transpose", self.op("Gather", matrix.name, ids, axis=1), perm=[1, 0])
        scale = self.op("Gather", matrix.scale, ids, axis=0)
        if self.weights == "int4-web":
            columns = self.op("Gather", matrix.name, ids, axis=1)
            found = self.op("Cast", columns, to=TensorProto.FLOAT)
            scale = self.op("Unsqueeze", scale, self.constant([1]))
            return self.op("Mul", self.op("Transpose", found, perm=[1, 0]), scale)
        packed_TQB = self.op("Gather", matrix.name, ids, axis=0)
        if self.weights == "int4":
            packed_TQB = self._unpacked(packed_TQB)
        found = self.op("Cast", packed_TQB, to=TensorProto.FLOAT)
        if not self.is_web:
            found = self.op("Sub", found, self.constant(np.float32(2 ** (self.bits - 1))))
        scale = self.op("Cast", scale, to=TensorProto.FLOAT)
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
        y = self.product(x, self.matrix(to_numpy(layer.weight), fine=True))
        return y if layer.bias is None else self.op("Add", y, self.weight(to_numpy(layer.bias)))

    def norm(self, x: str, norm: Any) -> str:
        """Weight * x / rms(x), of PyTorch or transformers."""
        squares = self.op("Pow", x, self.constant(np.float32(2.0)))
        mean = self.op("ReduceMean", squares, self.constant([-1]), keepdims=1)
        eps = norm.eps if isinstance(norm, nn.RMSNorm) else norm.variance_epsilon
        root = self.op("Sqrt", self.op("Add", mean, self.constant(np.float32(eps))))
        return self.op("Mul", self.op("Div", x, root), self.weight(to_numpy(norm.weight)))

    def activation(self, x: str, name: str) -> str:
        if name == "silu":
            return self.op("Mul", x, self.op("Sigmoid", x))
        if name not in ACTIVATIONS:
            raise InputError(
                f"An ONNX bundle cannot be made of a drafter with activation {name!r}; known: "
                f"silu, {', '.join(ACTIVATIONS)}."
            )
        return self.op("Gelu", x, **ACTIVATIONS[name])


def wasm_bytes(graph: onnx.ModelProto, weights: Weights) -> int:
    """Memory that onnxruntime-web takes for a graph with these weights, about.

    Results of operations on constants stay in it. The factors are measured, with bundles of 35 and
    46 million weights.
    """
    sizes = Counter[int]()
    for one in graph.graph.initializer:
        sizes[one.data_type] += prod(one.dims)
    if weights == "int8-web":
        return 23 * sizes[TensorProto.INT4] + 4 * sizes[TensorProto.INT8]
    return 15 * sizes[TensorProto.FLOAT] + 9 * sizes[TensorProto.INT4]


def to_numpy(tensor: Tensor) -> Array:
    """A float32 copy on the CPU."""
    array: Array = tensor.detach().float().cpu().numpy()
    return array


def _blocks(weight_RI: Array, size: int = BLOCK) -> Array:
    """Rows in blocks, the last one filled with zeros, (R, Q, B)."""
    num_rows, num_inputs = weight_RI.shape
    padded = np.pad(weight_RI, ((0, 0), (0, -num_inputs % size)))
    return padded.reshape(num_rows, -1, size)


def _quantised(values: Array, largest: int, kind: Any = np.float32) -> tuple[Array, Array]:
    """Nearest whole numbers within +-`largest`, and the scale of each row (last axis)."""
    scale = (np.abs(values).max(-1, keepdims=True) / largest).clip(SMALLEST).astype(kind)
    return np.rint(values / scale.astype(np.float32)).clip(-largest, largest), scale


def _packed(values_RQB: Array, bits: int) -> Array:
    """Whole numbers around 0 as `MatMulNBits` reads them, unsigned."""
    stored = (values_RQB + 2 ** (bits - 1)).astype(np.uint8)
    return stored if bits == 8 else stored[..., ::2] | stored[..., 1::2] << 4
