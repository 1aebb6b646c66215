"""Operations of an ONNX graph whose matrices have 32, eight or four bits.

Legend: T tokens, R rows of a matrix, I its inputs, Q blocks of a row, B inputs of a block.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import ArrayLike, NDArray
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

Weights = Literal["float32", "int8", "int8-web", "int4", "int4-web"]
"""int8 and int4: `MatMulNBits`, fastest in native onnxruntime, without a kernel in WebAssembly.
int8-web: `MatMulInteger`; layers have twelve bits, and inputs of sixteen. int4-web: the same with
eight bits, which are results of operations on constants: runtimes compute them as they load."""
CONTRIB = "com.microsoft"
BLOCK = 32  # inputs that share a scale in `MatMulNBits` and int8-web
WEB_BLOCK = 16  # inputs that share a factor of int4-web
MAX_FACTOR = 9  # CPUs without VNNI add two products in 16 bits: 2 * 255 * 7 * 9 fits
WEB_ROWS = 4096  # rows that are multiplied at once, which limits the memory for it
REST_STEPS = 14  # steps of a rest in four bits, -7 ... 7, within a step of eight bits
LOW_STEPS = 16  # steps of twelve bits in one of eight, int8-web
TWELVE_BITS = 1900  # steps of the largest weight; `_twelve_bits` needs 128 for itself
ZERO = 128  # what int8-web stores for 0: CPUs without VNNI multiply unsigned bytes exactly
LOW_INPUTS = 254  # steps of the lower eight bits of an input in one of the upper eight, int8-web
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
    whole: "Matrix | None" = None  # the matrix that `picked` names rows of
    picked: str = ""


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
        names = self.weight(_packed(values, self.bits)), self.weight(scale[..., 0])
        rest = ""
        if fine and self.weights == "int8":
            step = scale.astype(np.float32)
            steps = np.rint((blocks_RQB / step - values) * REST_STEPS)
            rest = self.weight(_packed(steps.clip(-7, 7), 4))
        return Matrix(*names, num_inputs, num_rows, rest)

    def _twelve_bits(self, weight_RI: Array) -> Matrix:
        """Store eight and four bits, and a scale of each row; (I * 3 / 2, R) uint8.

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
        names = self.weight(_packed(stored.T, 8)), self.weight(scale_R1[:, 0])
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
        assert not matrix.rest, "embeddings and heads are not fine"
        index = self.constant(rows)
        by_column = self.weights in ("float32", "int4-web")
        name = self.op("Gather", matrix.name, index, axis=int(by_column))
        scale = matrix.scale
        if self.weights != "float32":
            scale = self.op("Gather", scale, index, axis=0)
        return Matrix(name, scale, matrix.num_inputs, len(rows), whole=matrix, picked=index)

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
            return self._fine_product(x, matrix)
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
        """Products of blocks, with inputs in eight bits."""
        steps, scale_T1 = self._steps(x)
        blocks = self.constant([0, -(-matrix.num_inputs // BLOCK), BLOCK])
        steps_TQB = self.op("Reshape", self._bytes(steps), blocks)
        steps_QTB = self.op("Transpose", steps_TQB, perm=[1, 0, 2])
        name_QBR = self.op("Transpose", matrix.name, perm=[1, 2, 0])
        scale_QR = self.op("Transpose", matrix.scale, perm=[1, 0])
        scale_QR = self.op("Cast", scale_QR, to=TensorProto.FLOAT)
        scale_Q1R = self.op("Unsqueeze", scale_QR, self.constant([1]))
        sums_QTR = self.op("Mul", self._sums(steps_QTB, name_QBR), scale_Q1R)
        found = self.op("ReduceSum", sums_QTR, self.constant([0]), keepdims=0)
        return self.op("Mul", found, scale_T1)

    def _fine_product(self, x: str, matrix: Matrix) -> str:
        """Product with twelve bits; inputs are two rows of eight bits."""
        steps, scale_T1 = self._steps(self._for_twelve_bits(x))
        high = self.op("Round", steps)
        low = self.op("Mul", self.op("Sub", steps, high), self.constant(float(LOW_INPUTS)))
        both_2TI = self._stacked(high, low)
        sums_2TR = self._sums(self._bytes(both_2TI), matrix.name)
        sizes = self.constant(np.array([1, 1 / LOW_INPUTS]).reshape(2, 1, 1))
        sums_2TR = self.op("Mul", sums_2TR, sizes)
        found = self.op("ReduceSum", sums_2TR, self.constant([0]), keepdims=0)
        return self.op("Mul", self.op("Mul", found, scale_T1), matrix.scale)

    def _sums(self, steps: str, name: str) -> str:
        """Product of stored bytes, in float32."""
        zero = self.constant(np.uint8(ZERO))
        sums = self.op("MatMulInteger", steps, name, zero, zero)
        return self.op("Cast", sums, to=TensorProto.FLOAT)

    def _bytes(self, steps: str) -> str:
        """Inputs within +-127 as whole numbers around `ZERO`."""
        return self.op("QuantizeLinear", steps, self.constant(1.0), self.constant(np.uint8(ZERO)))

    def _for_twelve_bits(self, x: str) -> str:
        """Inputs of a product with what `_twelve_bits` stores, (T, I) -> (T, I * 3 / 2)."""
        first, second = self.ops("Split", x, count=2, axis=1, num_outputs=2)
        step = self.constant(float(LOW_STEPS))
        both = self.op("Add", first, self.op("Div", second, step))
        return self.op("Concat", self.op("Mul", x, step), both, axis=1)

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
        steps, scale = self._steps(blocks)
        high = self.op("Mul", self.op("Round", steps), scale)
        high = self.op("Reshape", high, self.op("Shape", x))
        return high, self._stacked(high, self.op("Sub", x, high))

    def _steps(self, x: str) -> tuple[str, str]:
        """Inputs as multiples of a scale of each row (last axis), within +-127; and the scale."""
        largest = self.op("ReduceMax", self.op("Abs", x), self.constant([-1]), keepdims=1)
        scale = self.op("Mul", largest, self.constant(1 / 127))
        scale = self.op("Max", scale, self.constant(SMALLEST))
        return self.op("Div", x, scale), scale

    def _stacked(self, *parts: str) -> str:
        """Tensors of one shape side by side, on a new first axis."""
        first = self.constant([0])
        return self.op("Concat", *(self.op("Unsqueeze", part, first) for part in parts), axis=0)

    def rows(self, ids: str, matrix: Matrix) -> str:
        """Rows of a matrix in float32, (T,) -> (T, I)."""
        if matrix.whole:  # which runtimes keep anyway
            return self.rows(self.op("Gather", matrix.picked, ids), matrix.whole)
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
        return 2 * sizes[TensorProto.UINT8]
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
