"""Operations of an ONNX graph whose matrices have 32, eight or four bits.

Legend: T tokens, R rows of a matrix, I its inputs, Q blocks of a row, B inputs of a block.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import ArrayLike, NDArray
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

Weights = Literal["float32", "int8", "int8-web", "int4", "int4-web"]
"""int8 and int4: `MatMulNBits`, fastest in native onnxruntime, without a kernel in WebAssembly.
int8-web: bytes that each run turns into floats, some at a time, and multiplies in float32; layers
have twelve bits. int4-web: `MatMulInteger`, whose eight bits are results of operations on
constants, which runtimes compute as they load."""
CONTRIB = "com.microsoft"
BLOCK = 32  # inputs that share a scale in `MatMulNBits` and int8-web
WEB_BLOCK = 16  # inputs that share a factor of int4-web
MAX_FACTOR = 9  # CPUs without VNNI add two products in 16 bits: 2 * 255 * 7 * 9 fits
WEB_ROWS = 4096  # rows that are multiplied at once, which limits the memory for it
REST_STEPS = 14  # steps of a rest in four bits, -7 ... 7, within a step of eight bits
FLOAT_ROWS = 1024  # rows of an embedding of int8-web that are floats at once
MOST_FLOATS = 2**17  # weights of a layer of int8-web that are floats at once; caches hold them
FEWEST_ROWS = 64  # of such a piece of a layer: wide layers would have hundreds of pieces
LOW_STEPS = 16  # steps of twelve bits in one of eight, int8-web
TWELVE_BITS = 1900  # steps of the largest weight; `_twelve_bits` needs 128 for itself
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
    is_fine: bool = False  # int8-web: whether it has twelve bits
    picked: Array | None = None  # int8-web: rows of what is stored; None for all


class GraphBuilder:
    """Collects nodes and initializers (`weights`: their bits); methods name tensors.

    Equal operations on equal inputs share a node, and equal constants share an initializer.

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
        self._outputs: dict[bytes, Sequence[str]] = {}
        self._constants: dict[bytes, str] = {}

    def op(self, kind: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        """Add a node with one output, whose name matters only where the graph has it as output."""
        return self.ops(kind, *inputs, names=[name] if name else (), **attributes)[0]

    def ops(
        self, kind: str, *inputs: str, count: int = 1, names: Sequence[str] = (), **attributes: Any
    ) -> Sequence[str]:
        """Add a node with several outputs."""
        key = helper.make_node(kind, inputs, (), **attributes).SerializeToString()
        if names or key not in self._outputs:
            self._outputs[key] = names or [f"{kind}_{len(self.nodes)}_{i}" for i in range(count)]
            self.nodes.append(helper.make_node(kind, inputs, self._outputs[key], **attributes))
        return self._outputs[key]

    def constant(self, value: ArrayLike) -> str:
        """Store numbers: floating ones in float32, whole ones as they are (int64 from Python)."""
        array = np.asarray(value)
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        tensor = numpy_helper.from_array(array)
        key = tensor.SerializeToString()
        if key not in self._constants:
            self._constants[key] = self._stored(tensor)
        return self._constants[key]

    def weight(self, value: Array) -> str:
        """Store a trained weight, or a constant that is computed from one."""
        return self._trained(numpy_helper.from_array(value))

    def _trained(self, tensor: onnx.TensorProto) -> str:
        if self.is_learning:
            self.learned.append(tensor)
        return self._stored(tensor)

    def _stored(self, tensor: onnx.TensorProto) -> str:
        tensor.name = f"constant_{len(self.initializers)}"
        self.initializers.append(tensor)
        return tensor.name

    def cut(self, x: str, start: int, stop: int, axis: int) -> str:
        return self.op("Slice", x, *(self.constant([one]) for one in (start, stop, axis)))

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
        """Store eight and four bits, and a scale of each row; (I * 3 / 2, R) int8.

        The four bits of two inputs, one of each half, share a byte: low + 16 * high. No bits are
        unpacked: a product takes the byte for the first input and a sixteenth of it for the
        second. So the first one's eight bits are less by `high`, the second's four by low / 16.
        """
        num_rows, num_inputs = weight_RI.shape
        padded_RI = _blocks(weight_RI).reshape(num_rows, -1)
        scale_R1 = _scale(padded_RI, TWELVE_BITS)
        first, second = np.split(padded_RI / scale_R1, 2, axis=1)
        first = np.rint(first)
        low = first % LOW_STEPS
        second = np.rint(second - low / LOW_STEPS)
        second_eight = (second + LOW_STEPS // 2) // LOW_STEPS
        high = second - LOW_STEPS * second_eight
        first_eight = first // LOW_STEPS - high
        stored = np.concatenate([first_eight, second_eight, low + LOW_STEPS * high], axis=1)
        names = self.weight(stored.T.astype(np.int8)), self.weight(scale_R1[:, 0])
        return Matrix(*names, num_inputs, num_rows, is_fine=True)

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
            x_IR = self.cut(x_IR, 0, num_inputs, axis=0)
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
        data = (low | high << 4).tobytes()
        return self._trained(helper.make_tensor("", TensorProto.INT4, values.shape, data, raw=True))

    def selected(self, matrix: Matrix, rows: Array) -> Matrix:
        """Some rows of a matrix. Runtimes compute them once, as they load the graph."""
        if self.weights == "int8-web":
            return replace(matrix, num_rows=len(rows), picked=rows)
        assert not matrix.rest, "embeddings and heads are not fine"
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
        if self.weights == "int4-web":
            quantised, x_scale, zero = self.ops("DynamicQuantizeLinear", x, count=3)
            sums = self.op("MatMulInteger", quantised, matrix.name, zero)
            sums = self.op("Cast", sums, to=TensorProto.FLOAT)
            return self.op("Mul", sums, self.op("Mul", x_scale, matrix.scale))
        x = self._padded(x, matrix.num_inputs)
        if matrix.is_fine:
            found = self.op("MatMul", self._for_twelve_bits(x), self._floats(matrix.name))
            return self.op("Mul", found, matrix.scale)
        if self.weights == "int8-web":
            return self._web_product(x, matrix)
        scale = self.op("Cast", matrix.scale, to=TensorProto.FLOAT)
        if not matrix.rest:
            return self._block_product(x, matrix, matrix.name, scale, self.bits)
        high, both = self._split(x)
        found = self._block_product(both, matrix, matrix.name, scale, self.bits)
        found = self.op("ReduceSum", found, self.constant([0]), keepdims=0)
        scale = self.op("Div", scale, self.constant(float(REST_STEPS)))
        return self.op("Add", found, self._block_product(high, matrix, matrix.rest, scale, 4))

    def _web_product(self, x: str, matrix: Matrix) -> str:
        """Products of blocks, of some rows at a time."""
        blocks = self.constant([0, -(-matrix.num_inputs // BLOCK), BLOCK])
        x_QTB = self.op("Transpose", self.op("Reshape", x, blocks), perm=[1, 0, 2])
        parts = []
        rows = np.arange(matrix.num_rows) if matrix.picked is None else matrix.picked
        for start in range(0, len(rows), FLOAT_ROWS):
            index = self.constant(rows[start : start + FLOAT_ROWS])
            name_RQB = self.op("Gather", matrix.name, index, axis=0)
            name_QBR = self.op("Transpose", name_RQB, perm=[1, 2, 0])
            scale_RQ = self.op("Gather", matrix.scale, index, axis=0)
            scale_RQ = self.op("Cast", scale_RQ, to=TensorProto.FLOAT)
            scale_QR = self.op("Transpose", scale_RQ, perm=[1, 0])
            scale_Q1R = self.op("Unsqueeze", scale_QR, self.constant([1]))
            found_QTR = self.op("MatMul", x_QTB, self._floats(name_QBR))
            found_QTR = self.op("Mul", found_QTR, scale_Q1R)
            parts.append(self.op("ReduceSum", found_QTR, self.constant([0]), keepdims=0))
        return self.op("Concat", *parts, axis=1)

    def _for_twelve_bits(self, x: str) -> str:
        """Inputs of a product with what `_twelve_bits` stores, (T, I) -> (T, I * 3 / 2)."""
        first, second = self.ops("Split", x, count=2, axis=1, num_outputs=2)
        step = self.constant(float(LOW_STEPS))
        both = self.op("Add", first, self.op("Div", second, step))
        return self.op("Concat", self.op("Mul", x, step), both, axis=1)

    def _floats(self, name: str) -> str:
        """Bytes in float32, in each run: runtimes do not compute this operation as they load."""
        return self.op("DequantizeLinear", name, self.constant(np.float32(1)))

    def _block_product(self, x: str, matrix: Matrix, name: str, scale: str, bits: int) -> str:
        """`MatMulNBits` with inputs of whole blocks."""
        num_inputs = matrix.num_inputs + -matrix.num_inputs % BLOCK
        sizes: dict[str, Any] = {"K": num_inputs, "N": matrix.num_rows, "bits": bits}
        fast: dict[str, Any] = {"domain": CONTRIB, "accuracy_level": INT8_PRODUCTS}
        return self.op("MatMulNBits", x, name, scale, block_size=BLOCK, **fast, **sizes)

    def _padded(self, x: str, num_inputs: int) -> str:
        """Inputs with zeros up to the end of a block."""
        missing = -num_inputs % BLOCK
        return self.op("Pad", x, self.constant([0, 0, 0, missing])) if missing else x

    def _split(self, x: str) -> tuple[str, str]:
        """Inputs rounded to eight bits, (T, I), and these stacked on the remainder, (2, T, I).

        `MatMulNBits` rounds its inputs in the same way, which does not change rounded ones.
        """
        blocks = self.op("Reshape", x, self.constant([0, -1, BLOCK]))
        largest = self.op("ReduceMax", self.op("Abs", blocks), self.constant([2]), keepdims=1)
        scale = self.op("Mul", largest, self.constant(1 / 127))
        scale = self.op("Max", scale, self.constant(SMALLEST))
        steps = self.op("Round", self.op("Div", blocks, scale))
        high = self.op("Reshape", self.op("Mul", steps, scale), self.op("Shape", x))
        first = self.constant([0])
        parts = (self.op("Unsqueeze", one, first) for one in (high, self.op("Sub", x, high)))
        return high, self.op("Concat", *parts, axis=0)

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
        whole = matrix.num_inputs % BLOCK == 0
        return padded if whole else self.cut(padded, 0, matrix.num_inputs, axis=1)

    def _unpacked(self, packed_TQB: str) -> str:
        """The two halves of each byte, the lower one first."""
        low = self.op("BitwiseAnd", packed_TQB, self.constant(np.uint8(15)))
        high = self.op("BitShift", packed_TQB, self.constant(np.uint8(4)), direction="RIGHT")
        last = self.constant([3])
        pairs = [self.op("Unsqueeze", half, last) for half in (low, high)]
        return self.op("Reshape", self.op("Concat", *pairs, axis=3), self.constant([0, 0, BLOCK]))

    def linear(self, x: str, layer: nn.Linear) -> str:
        weight_RI = to_numpy(layer.weight)
        size = len(weight_RI)
        if self.weights == "int8-web":
            size = max(FEWEST_ROWS, MOST_FLOATS // weight_RI.shape[1])
        parts = [
            self.product(x, self.matrix(weight_RI[start : start + size], fine=True))
            for start in range(0, len(weight_RI), size)
        ]
        y = self.op("Concat", *parts, axis=1) if len(parts) > 1 else parts[0]
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
        return self.op("Gelu", x, **ACTIVATIONS[name])


def wasm_bytes(graph: onnx.ModelProto, weights: Weights) -> int:
    """Estimate onnxruntime-web's memory for a graph with these weights, in bytes.

    Constant-folded results stay resident. The factors are measured, with bundles of 35 and 46
    million weights.
    """
    sizes = Counter[int]()
    for one in graph.graph.initializer:
        sizes[one.data_type] += prod(one.dims)
    if weights == "int8-web":
        return 4 * sizes[TensorProto.INT8]
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
    scale = _scale(values, largest).astype(kind)
    return np.rint(values / scale.astype(np.float32)).clip(-largest, largest), scale


def _scale(values: Array, largest: int) -> Array:
    """The scale of each row (last axis) whose steps are within +-`largest`."""
    found: Array = (np.abs(values).max(-1, keepdims=True) / largest).clip(SMALLEST)
    return found


def _packed(values_RQB: Array, bits: int) -> Array:
    """Whole numbers around 0 as `MatMulNBits` reads them, unsigned."""
    stored = (values_RQB + 2 ** (bits - 1)).astype(np.uint8)
    return stored if bits == 8 else stored[..., ::2] | stored[..., 1::2] << 4
