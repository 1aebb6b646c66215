"""The target's decoder layers, final norm and LM head, by transformers' modules.

Legend: B batch, T new tokens, N states, S visible keys, J KV heads, D head dim, E hidden size, V
vocabulary.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from moaspec.model.layers import CosSin
from moaspec.target import families
from moaspec.target.weights.stored import StoredLinear

WriteKV = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(layer index, new key_BJTD, new value_BJTD) -> (key_BJSD, value_BJSD) to attend to."""
WatchLayer = Callable[[int, Tensor], None]  # (layer index, input of this layer, (B, T, E))


@dataclass(frozen=True)
class Slots:
    """The slots of a cache that a pass writes and reads, for kernels that do both in place."""

    cache: Tensor  # (L, 2, R, J, S, D), contiguous in D: keys and values of all layers
    rows_B: Sequence[int]
    starts_B: Sequence[int]  # first slot that each row writes
    visible: int  # number of slots that are read, from slot 0 on


class TextPass(Protocol):
    """A pass over the newest tokens of one text and drafts after them, with choices, in one call.

    For one thread at a time.
    """

    def run(
        self,
        token_ids: Sequence[int],
        parents: Sequence[int],
        slots: Slots,
        *,
        finished: int,
        choices: int,
    ) -> tuple[Tensor, list[int] | None] | None:
        """States of the last tokens after the final norm, and the target's greedy choices.

        Args:
            parents: the index of the token before each one; -1: the text in the cache.
            slots: of one row; the tokens take neighbouring ones.
            finished: number of the last tokens whose states are needed.
            choices: number of the last tokens after which the target chooses, at most `finished`.

        Returns:
            States, (`finished`, E). None instead of choices if the head cannot be computed too.
            None if the pass must be made in another way: too many tokens, impossible ids, or
            modules with hooks.
        """
        ...


class KVCapture:
    """Stands in for transformers' cache and passes keys and values to an operation."""

    def __init__(self, write: WriteKV) -> None:
        self._write = write

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return self._write(layer_idx, key_states, value_states)


def cache_argument(module: nn.Module) -> str:
    """The name of the cache argument of a model or layer: transformers renamed it in 5.24."""
    names = inspect.signature(type(module).forward).parameters
    return "cache" if "cache" in names else "past_key_values"


class DecoderLayers:
    """The target's layers: runs the last of them, or all, and the final norm.

    `moaspec.backends.fast_target` has a faster one with the same methods.

    Args:
        base: transformers' model without its head.
        config: its configuration; of the whole target, where `base` lacks some layers.

    Attributes:
        types: each layer's, as transformers names them.
        records: whether passes are recorded by shape, so that callers should round sizes up.
    """

    records = False

    def __init__(self, base: Any, config: Any) -> None:
        self._base = base
        # A partial target has the last layer, if it has any.
        self._cache_argument = cache_argument(base.layers[-1])
        self._rotary = families.RotaryEmbeddings(base.rotary_emb, config)
        self._is_plain = families.has_plain_inputs(config)
        self._window: int | None = getattr(config, "sliding_window", None)
        self._groups = int(config.num_attention_heads) // int(config.num_key_value_heads)
        self.types = families.layer_types(config)

    def text_pass(self, table: nn.Module | None, head: "LMHead") -> TextPass | None:
        """Passes over one text in one call, if there is a faster way for this target than `run`.

        Args:
            table: see `Target.embeddings`.
            head: the target's.
        """
        del table, head  # there is none with PyTorch alone
        return None

    def run(
        self,
        states_BTE: Tensor,
        position_ids_BT: Tensor,
        *,
        num: int,
        mask_B1TS: Tensor | None,
        write: WriteKV,
        lengths_B: Tensor | None = None,
        watch: WatchLayer | None = None,
    ) -> Tensor:
        """The last `num` layers and the final norm; other arguments as for `Target.run`."""
        inputs = self._inputs(states_BTE, position_ids_BT, mask_B1TS, lengths_B)
        shared = {
            kind: {
                "attention_mask": mask,
                "position_ids": position_ids_BT,
                "position_embeddings": cos_sin,
            }
            for kind, (cos_sin, mask) in inputs.items()
        }
        return self._one_by_one(states_BTE, shared, write, num, watch)

    def _inputs(
        self,
        states_BTE: Tensor,
        position_ids_BT: Tensor,
        mask_B1TS: Tensor | None,
        lengths_B: Tensor | None,
    ) -> dict[str, tuple[CosSin, Tensor | None]]:
        """Cosines and sines, and the mask, of each layer type."""
        if self._is_plain:
            return {families.FULL: (self._base.rotary_emb(states_BTE, position_ids_BT), mask_B1TS)}
        if lengths_B is None:
            lengths_B = position_ids_BT.amax(1) + 1
        rope = self._rotary(states_BTE, position_ids_BT, lengths_B)
        masks = families.layer_masks(self.types, self._window, mask_B1TS, position_ids_BT)
        return {kind: (rope[kind], mask) for kind, mask in masks.items()}

    def _one_by_one(
        self,
        states_BTE: Tensor,
        shared: Mapping[str, Mapping[str, Any]],
        write: WriteKV,
        num: int,
        watch: WatchLayer | None = None,
    ) -> Tensor:
        """The last `num` layers and the norm; `shared`: arguments by layer type."""
        cache = {self._cache_argument: KVCapture(write)}
        for index in range(len(self.types) - num, len(self.types)):
            if watch is not None:
                watch(index, states_BTE)
            layer = self._base.layers[index]
            states_BTE = layer(states_BTE, **cache, **shared[self.types[index]])
        return self._norm(states_BTE)

    def _norm(self, states_BTE: Tensor) -> Tensor:
        return cast(Tensor, self._base.norm(states_BTE))


def frozen_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear layer over these very tensors."""
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


class LMHead:
    """Logits in float32, scaled, then soft-capped where the model's are (`cap`)."""

    def __init__(self, linear: nn.Module, cap: float | None, scale: float = 1.0) -> None:
        self.linear, self.cap, self.scale = linear, cap, scale

    def rows(self, token_ids: Tensor) -> nn.Linear:
        """The head for these ids alone, a copy."""
        linear: Any = self.linear
        bias = None if linear.bias is None else linear.bias[token_ids]
        stored = isinstance(linear, StoredLinear)  # where `weight` would dequantise all rows
        rows = linear.rows(token_ids) if stored else linear.weight[token_ids]
        return frozen_linear(rows, bias)

    def select(self, token_ids: Tensor | None) -> nn.Module:
        """The head for these ids, a copy; for None the whole one, without a copy."""
        return self.linear if token_ids is None else self.rows(token_ids)

    def logits(self, states: Tensor, head: nn.Module) -> Tensor:
        """Logits by the whole head, or by some of its rows."""
        logits = head(states).float()
        logits = logits if self.scale == 1.0 else self.scale * logits
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def best(self, states_NE: Tensor) -> Tensor:
        """The ids of the largest logits, (N,) int64."""
        return self.logits(states_NE, self.select(None)).argmax(-1)
