"""Costs of target passes and drafting rounds on this machine, and the speed-ups they allow.

Speculation pays if a pass over several tokens costs about as much as a pass over one, that is,
while reading the weights takes longer than the arithmetic. This module measures passes by number of
tokens, and rounds by context length and batch size. Caches hold zeros, which cost as much as any
other values.

Legend: B rows, T tokens, L target layers, K one layer's key and value.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import nn

from moaspec.backends.linear_backends import compute_dtype
from moaspec.backends.pack import FusedPart, PackedLinear
from moaspec.calibration.round_parts import TimedPart, pass_over
from moaspec.drafting.kv_cache import KVCache
from moaspec.evaluate.methods import Method
from moaspec.generation.local_engine import local_parts
from moaspec.target.target import Target
from moaspec_core.drafting.draft_tree import Tree
from moaspec_core.drafting.protocols import Proposer, RequestText
from moaspec_core.drafting.tree_shapes import parse_shape

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (256, 512, 1024, 2048, 4096, 8192)
BATCHES = (1, 2, 4, 8, 16)
REPEATS = 5
MAX_FREE_RATIO = 1.25
"""Largest cost of a pass that counts as free, relative to a pass over one token."""

COPY_BYTES = 2**27  # larger than any CPU cache, so that reads go to memory

FEATURES_CHUNK = 512


@dataclass(frozen=True)
class PassCost:
    """Median seconds of one target pass, head included."""

    tokens: int  # per row
    context: int  # tokens in the cache before it
    batch: int
    seconds: float


@dataclass(frozen=True)
class RoundCost:
    """Median seconds of a method's round."""

    method: str
    context: int
    batch: int
    plain_s: float  # of a pass over one token per request
    # draft_s, verify_s, encode_s: parts of the round. Encoding is of one token per request, the
    # smallest number that a round verifies.
    draft_s: float
    verify_s: float
    encode_s: float

    @property
    def break_even(self) -> float:
        """The tau above which this method is faster than plain decoding."""
        return (self.draft_s + self.verify_s + self.encode_s) / self.plain_s


@dataclass(frozen=True)
class MemoryBound:
    """Limits of decoding by memory bandwidth and arithmetic."""

    weight_bytes: int  # read by every pass
    bytes_per_s: float  # measured memory bandwidth
    floor_s: float  # shortest possible pass, `weight_bytes` over `bytes_per_s`
    flops_per_s: float  # measured in a large matrix product
    arithmetic_s: float  # time of the products of a pass over one token at that speed
    # The largest width of `WIDTHS` up to which every pass costs at most `MAX_FREE_RATIO` times as
    # much as a pass over one token.
    free_tokens: int
    ceiling: dict[int, float]  # by width, the speed-up if all drafts were accepted and cost nothing


@dataclass(frozen=True)
class PassCosts:
    """Results of `measure_costs`; `interrupted` tells that Ctrl-C ended it early."""

    widths: list[PassCost]
    rounds: list[RoundCost]
    bound: MemoryBound
    interrupted: bool = False

    def as_json(self) -> dict[str, Any]:
        rounds = [{**asdict(cost), "break_even": cost.break_even} for cost in self.rounds]
        widths = [asdict(cost) for cost in self.widths]
        info = {"widths": widths, "rounds": rounds, "bound": asdict(self.bound)}
        return {**info, "interrupted": self.interrupted}


def measure_costs(
    methods: Sequence[Method],
    *,
    contexts: Sequence[int] | None = None,
    batches: Sequence[int] | None = None,
    widths: Sequence[int] | None = None,
    advance: Callable[[], None] = lambda: None,
) -> PassCosts:
    """Measure passes and rounds.

    Args:
        methods: methods with a drafter are measured, on the target of the first method.
        contexts: tokens in the cache, batch size 1, limited to the target's context. None takes
            `CONTEXTS`.
        batches: batch sizes at the shortest context; None takes `BATCHES`.
        widths: tokens of a pass, batch size 1, at the shortest context; None takes `WIDTHS`.

    Raises:
        KeyboardInterrupt: before anything was measured; later, the result is marked interrupted.
    """
    contexts, batches, widths = contexts or CONTEXTS, batches or BATCHES, widths or WIDTHS
    target, short = methods[0].target, min(contexts)
    passes: list[PassCost] = []
    rounds: list[RoundCost] = []
    interrupted = False
    try:
        for tokens in widths:
            passes.append(PassCost(tokens, short, 1, pass_s(target, tokens, short, 1)))
            advance()
        for context, batch in _places(methods, contexts, batches):
            plain_s = pass_s(target, 1, context, batch)
            rounds += [_round_cost(one, context, batch, plain_s) for one in _drafted(methods)]
            advance()
    except KeyboardInterrupt:
        if not passes:
            raise
        interrupted = True
    return PassCosts(passes, rounds, _memory_bound(target, passes), interrupted)


def num_measurements(methods: Sequence[Method]) -> int:
    """Number of calls of `advance` by `measure_costs` with its defaults."""
    return len(WIDTHS) + len(_places(methods, CONTEXTS, BATCHES))


def _places(
    methods: Sequence[Method], contexts: Sequence[int], batches: Sequence[int]
) -> list[tuple[int, int]]:
    """Contexts and batch sizes of rounds; the longest context with room for one ends the list."""
    largest = max((fixed_shape(one).total_tokens for one in _drafted(methods)), default=0)
    longest = methods[0].target.max_positions - largest - 1
    fitting = dict.fromkeys(min(context, longest) for context in contexts)
    return [(context, 1) for context in fitting] + [(min(contexts), b) for b in batches if b > 1]


def fixed_shape(method: Method) -> Tree:
    """The shape of a method's drafts; for "auto" the shape without a calibration."""
    return parse_shape(method.shape) if isinstance(method.shape, str) else method.shape


def _drafted(methods: Sequence[Method]) -> list[Method]:
    return [method for method in methods if method.drafter is not None]


@torch.inference_mode()
def pass_s(target: Target, tokens: int, context: int, batch: int) -> float:
    """Median seconds of a pass over `tokens` in each of `batch` rows, after `context` others."""
    run = pass_over(target, KVCache(target), tokens, context, batch)
    return _median_s(lambda: target.best(run().flatten(0, 1)).tolist(), target.device)


def _round_cost(method: Method, context: int, batch: int, plain_s: float) -> RoundCost:
    _, drafter = local_parts(
        method.target, method.drafter, num_target_layers=method.shaping.num_target_layers
    )
    assert drafter is not None, "only methods with a drafter come here"
    shape = fixed_shape(method)
    return RoundCost(
        method.name,
        context,
        batch,
        plain_s,
        _draft_s(method.target, drafter, shape, context, batch),
        pass_s(method.target, 1 + shape.total_tokens, context, batch),
        _encode_s(method.target, drafter, context, batch),
    )


def _draft_s(target: Target, drafter: Proposer, shape: Tree, context: int, batch: int) -> float:
    """Median seconds of drafting in a round with two new tokens."""
    # Few repetitions, so that n-gram lookup finds about as much as in real text.
    text = [(7 * i) % min(target.vocab_size, 499) for i in range(context)]
    known = context - 2 * (REPEATS + 1)
    if "kv" in drafter.needs:
        _fill_memory(target, drafter, known, batch)
    lengths = iter(range(known, context + 1, 2))

    def once() -> None:
        longer = text[: next(lengths)]
        drafter.propose([RequestText(row, longer) for row in range(batch)], shape)

    return _median_s(once, target.device)


def _fill_memory(target: Target, drafter: Proposer, known: int, batch: int) -> None:
    """Give the drafter activations of `known` tokens of every request."""
    for start in range(0, known, FEATURES_CHUNK):
        positions = range(start, min(start + FEATURES_CHUNK, known))
        positions_1N = torch.tensor([list(positions)], device=target.device)
        (features,) = drafter.encode(_zeros(target, len(positions)), positions_1N, [len(positions)])
        for row in range(batch):
            drafter.append_features(row, features)


def _encode_s(target: Target, drafter: Proposer, context: int, batch: int) -> float:
    if "kv" not in drafter.needs:
        return 0.0
    kv_1NLK = _zeros(target, batch)
    positions_1N = torch.full((1, batch), context, device=target.device)
    return _median_s(lambda: drafter.encode(kv_1NLK, positions_1N, [1] * batch), target.device)


def _zeros(target: Target, tokens: int) -> torch.Tensor:
    kv_size = 2 * target.num_kv_heads * target.head_dim
    shape = (1, tokens, target.num_layers, kv_size)
    return torch.zeros(shape, dtype=target.dtype, device=target.device)


def _memory_bound(target: Target, passes: Sequence[PassCost]) -> MemoryBound:
    layers = _linear_layers(target)
    num_bytes = sum(weight_bytes(layer, target.dtype) for layer in layers)
    products = sum(layer.in_features * layer.out_features for layer in layers)
    bytes_per_s, flops_per_s = _reading_speed(target.device), _arithmetic_speed(target)
    one = passes[0].seconds
    free = takewhile(lambda each: each.seconds <= MAX_FREE_RATIO * one, passes)
    return MemoryBound(
        weight_bytes=num_bytes,
        bytes_per_s=bytes_per_s,
        floor_s=num_bytes / bytes_per_s,
        flops_per_s=flops_per_s,
        arithmetic_s=2 * products / flops_per_s,
        free_tokens=list(free)[-1].tokens,
        ceiling={each.tokens: each.tokens * one / each.seconds for each in passes},
    )


def _linear_layers(target: Target) -> set[nn.Linear | PackedLinear]:
    """The linear layers of a pass as they are computed, with the head."""
    model: Any = target.model
    plain_head = model.get_output_embeddings()
    modules = [module for module in model.modules() if module is not plain_head]
    return linear_layers([*modules, *target.draft_head(None).modules()])


def linear_layers(modules: Iterable[nn.Module]) -> set[nn.Linear | PackedLinear]:
    """The linear layers among modules, as they are computed."""
    layers = {module.joined if isinstance(module, FusedPart) else module for module in modules}
    return {layer for layer in layers if isinstance(layer, nn.Linear | PackedLinear)}


def weight_bytes(layer: nn.Linear | PackedLinear, dtype: torch.dtype) -> int:
    """Size of a weight in the kernels' format, in torchao's, or in its dtype."""
    if isinstance(layer, PackedLinear) and layer.matrix is not None:
        return layer.matrix.num_bytes
    if isinstance(layer, nn.Linear) and hasattr(layer.weight, "__tensor_flatten__"):
        names, _ = layer.weight.__tensor_flatten__()
        return sum(getattr(layer.weight, name).nbytes for name in names)
    return layer.in_features * layer.out_features * dtype.itemsize


def _reading_speed(device: torch.device) -> float:
    data = torch.ones(COPY_BYTES // 4, device=device)
    return COPY_BYTES / _median_s(lambda: data.sum().item(), device)


def _arithmetic_speed(target: Target) -> float:
    """Products per second; CPUs without bf16 instructions compute in float32."""
    size, on_cpu = 1024, target.device.type == "cpu"
    dtype = compute_dtype(target.dtype) if on_cpu else target.dtype
    a = torch.ones(size, size, dtype=dtype, device=target.device)
    return 2 * size**3 / _median_s(lambda: a @ a, target.device)


def _median_s(work: Callable[[], object], device: torch.device) -> float:
    part = TimedPart(work, device)
    part.time(counts=False)
    for _ in range(REPEATS):
        part.time()
    return part.usual_s
