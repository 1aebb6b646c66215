"""The frozen target: the model whose output is reproduced.

Transformers' own modules do the arithmetic. What a pass reads and stores is decided by the caller,
who hands in an operation that receives each layer's new keys and values *as the model writes them*
(after rotary embedding, before any sliding window drops them) and returns what to attend to.

Legend: B batch, T new tokens, S visible keys, L layers, H KV heads, D head dim, E hidden size,
K = 2 * H * D, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from moaspec.errors import UnsupportedTargetError
from moaspec.kernels import MOST_QUERIES, FusedNorm, FusedStack, Slots
from moaspec.model.drafter import TargetPass, positions
from moaspec.model.encoder import LayerFeatures
from moaspec.model.masks import text_mask
from moaspec.model.rope import AngleTable
from moaspec.places import cache_dir
from moaspec.target import families
from moaspec.target.facts import TargetFacts
from moaspec.target.forms import can_pack
from moaspec.target.graphs import PassGraphs, Steady
from moaspec.target.heads import draft_rows, pack_like
from moaspec.target.lean import (
    KVTap,
    Reading,
    WriteKV,
    cache_argument,
    kernel_norm,
    make_lean,
)
from moaspec.target.packing import PackedLinear, pack_linears, return_freed_memory

WatchLayer = Callable[[int, Tensor], None]
"""(layer index, the states that enter it, (B, T, E))."""


@dataclass(frozen=True)
class LastLayers:
    """A target's last layers as kernels run them inside a call for more than these.

    Attributes:
        stack: ends with them.
        norm: behind the last one.
        angles: float32, of any position.
    """

    stack: FusedStack
    norm: FusedNorm
    angles: AngleTable


class Target(TargetFacts):
    """A causal LM of transformers, frozen, with its tokenizer.

    Args:
        model: a `PreTrainedModel` with an LM head; put in evaluation mode, gradients off.
        tokenizer: transformers' tokenizer, or None where only token ids are used.
        name: how messages call it.
        freeze: False leaves the model's mode and gradients as they are, for a model that is not
            ours to change; it must be in evaluation mode then.
        quantize: see `TargetFacts`.

    Attributes:
        packed: whether `pack` has laid the weights out for this CPU.
        fused: its layers as `moaspec.kernels` compute them, or None.
        graphs: recordings of passes on a CUDA device, or None.

    Raises:
        UnsupportedTargetError: keys and values of this family cannot be captured.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        name: str,
        freeze: bool = True,
        quantize: str | None = None,
    ) -> None:
        families.require_supported(model.config, name)
        if model.config._attn_implementation != "sdpa":
            raise UnsupportedTargetError(
                f"{name} was loaded with attn_implementation="
                f"{model.config._attn_implementation!r}; verifying a tree needs masks that only "
                "'sdpa' takes as they are. Load it with attn_implementation='sdpa'."
            )
        self.model = model.eval().requires_grad_(requires_grad=False) if freeze else model
        super().__init__(
            model.config,
            tokenizer,
            name=name,
            dtype=None,
            generation_config=model.generation_config,
            quantize=quantize,
        )
        self._base: Any = model.base_model
        # The last layer is the one that an excerpt has, if it has any.
        self._cache_argument = cache_argument(self._base.layers[-1])
        self._lm_head = cast(nn.Linear, model.get_output_embeddings())
        self._fast_head: nn.Module = self._lm_head
        self._forget_rows: Callable[[], None] = lambda: None
        self._cap: float | None = getattr(model.config, "final_logit_softcapping", None)
        self._rotary = families.RotaryEmbeddings(self._base.rotary_emb, model.config)
        self._layer_types = families.layer_types(model.config)
        self._window: int | None = getattr(model.config, "sliding_window", None)
        self.lean = self.packed = False
        self.fused: FusedStack | None = None
        self.graphs: PassGraphs | None = None
        self._fast_norm: FusedNorm | None = None
        self._hooks: list[Mapping[int, Any]] = []

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, keys and values, as they are now."""
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    @property
    def records(self) -> bool:
        """Whether passes are recorded, so that their sizes are worth rounding up."""
        return self.graphs is not None and self.graphs.failure is None

    def pack(self) -> bool:
        """Lay the weights of linear layers out for this CPU, in place, see `packing`.

        Afterwards the target decodes and can be saved, but no longer be moved or cast.

        On a CUDA device passes are recorded instead, see `graphs`.

        Returns:
            Whether weights were laid out; False where there is nothing to gain, such as on a GPU.
        """
        self.packed = can_pack(self.dtype, self.device)
        if self.packed:
            pack_linears(self.model, keep=(self._lm_head,))
            self._fast_head, self._forget_rows = pack_like(self._lm_head, directory=cache_dir())
        self._fuse(list(self._base.layers))
        self.graphs = PassGraphs.of(self.device)
        return_freed_memory()
        return self.packed

    def _fuse(self, layers: Sequence[nn.Module]) -> None:
        """Run layers in fewer calls; by kernels, with the norm behind them, where they can."""
        self.fused, self.lean = make_lean(layers), True
        self._hooks = [
            hooks for layer in layers for hooks in (layer._forward_hooks, layer._forward_pre_hooks)
        ]
        if self.fused is not None:
            self._fast_norm = kernel_norm(self._base.norm)
            self._rotary.tabulate()

    def layer_state(self, index: int) -> dict[str, Tensor]:
        """Weights of one decoder layer, under transformers' names."""
        return cast(dict[str, Tensor], self._base.layers[index].state_dict())

    def plain_layer_state(self, index: int) -> dict[str, Tensor] | None:
        """`layer_state` as a Llama layer has it; None where this family's layers differ."""
        return families.plain_layer_state(self.config, self.layer_state(index))

    def embed(self, input_ids: Tensor) -> Tensor:
        """Token embeddings as they enter the first layer (scaled in Gemma 3), (..., E)."""
        return self._base.embed_tokens(input_ids)

    @property
    def embeddings(self) -> Tensor | None:
        """What `embed` looks up, (V, E), where it does nothing else; else None."""
        table = self._base.embed_tokens
        plain = type(table) is nn.Embedding and not table._forward_hooks
        return table.weight if plain and not table._forward_pre_hooks else None

    def head_rows(self, token_ids: Tensor) -> nn.Linear:
        """The LM head for these ids alone, a copy."""
        weight, bias = self._lm_head.weight[token_ids], self._lm_head.bias
        with torch.device("meta"):
            rows = nn.Linear(weight.shape[1], len(token_ids), bias=bias is not None)
        rows.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            rows.bias = nn.Parameter(bias[token_ids], requires_grad=False)
        return rows

    def draft_head(self, token_ids: Tensor | None, moment_EE: Tensor | None = None) -> nn.Module:
        """A head to keep: packed where that helps; for None the target's own, without a copy.

        Args:
            token_ids: the draft vocabulary.
            moment_EE: how drafted states vary together; with it the head may be rounded.
        """
        if token_ids is None:
            return self._fast_head
        rows = self.head_rows(token_ids)
        self._forget_rows()
        return draft_rows(rows, moment_EE)

    def head(self, states: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Logits in float32, (..., V), or of `token_ids` only."""
        head = self._fast_head if token_ids is None else self.head_rows(token_ids)
        return self.logits(states, head)

    def best(self, states_NE: Tensor) -> Tensor:
        """The argmax of `head`, (N,) int64; where kernels have the head, no logits are written."""
        matrix = self._fast_head.matrix if isinstance(self._fast_head, PackedLinear) else None
        if matrix is None or self.caps_logits or states_NE.requires_grad:
            return self.head(states_NE).argmax(-1)
        return matrix.best(states_NE)

    def logits(self, states: Tensor, head: nn.Module) -> Tensor:
        """Logits in float32 by a head of this target, soft-capped where the model's are."""
        raw = head.single(states) if isinstance(head, PackedLinear) else head(states).float()
        return self._capped(raw)

    @property
    def caps_logits(self) -> bool:
        """Whether logits are soft-capped."""
        return self._cap is not None

    def _capped(self, logits: Tensor) -> Tensor:
        return logits if self._cap is None else self._cap * torch.tanh(logits / self._cap)

    def run(
        self,
        input_ids_BT: Tensor,
        position_ids_BT: Tensor,
        *,
        mask_B1TS: Tensor | None,
        write: WriteKV,
        lengths_B: Tensor | None = None,
        watch: WatchLayer | None = None,
    ) -> Tensor:
        """One pass through all layers.

        Args:
            input_ids_BT: (B, T) int64.
            position_ids_BT: (B, T) int64, counting real tokens only.
            mask_B1TS: bool, True where a token may attend to a key that `write` returns. A token
                sees one key of every position up to its own, in ascending order of positions (pads
                may see anything); sliding windows are cut out of this. None: `write` returns what
                it was given, and a token sees all that comes before it.
            write: receives each layer's keys and values; see the module's docstring.
            lengths_B: (B,) tokens of each row's whole text, by which LongRoPE goes; None takes the
                largest position of the row. To be given where a row is only the start of a text.
            watch: is shown what enters each layer.

        Returns:
            (B, T, E) after the final norm.
        """
        return self.run_last(
            self.embed(input_ids_BT),
            position_ids_BT,
            num=self.num_layers,
            mask_B1TS=mask_B1TS,
            write=write,
            lengths_B=lengths_B,
            watch=watch,
        )

    def run_last(
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
        """The last `num` layers and the final norm, from states that stand for their input.

        The other arguments are those of `run`.
        """
        if lengths_B is None:
            lengths_B = position_ids_BT.amax(1) + 1
        exact = self.fused is not None
        rope = self._rotary(states_BTE, position_ids_BT, lengths_B, exact=exact)
        masks = families.layer_masks(self._layer_types, self._window, mask_B1TS, position_ids_BT)
        kinds = set(self._layer_types[self.num_layers - num :])
        if watch is None and len(kinds) == 1:
            (kind,) = kinds
            done_BTE = self._in_one_call(states_BTE, rope[kind], masks[kind], write, num)
            if done_BTE is not None:
                return done_BTE
        shared = {
            kind: self._shared(rope[kind], mask, position_ids_BT) for kind, mask in masks.items()
        }
        if self.graphs is not None and isinstance(write, Steady) and self._can_record(states_BTE):
            readings = {kind: one["reading"] for kind, one in shared.items()}
            return self.graphs.run(partial(self._read, num), states_BTE, readings, write, key=num)
        return self._through(states_BTE, shared, write, num, watch)

    def last_layers(self, num: int) -> LastLayers | None:
        """The last `num` layers, if kernels can run them where a token sees all text before it."""
        kinds = set(self._layer_types[self.num_layers - num :])
        norm, angles = self._unwatched_norm(), self._rotary.table(families.FULL)
        if self.fused is None or norm is None or angles is None or any(self._hooks):
            return None
        return LastLayers(self.fused, norm, angles) if kinds == {families.FULL} else None

    def _through(
        self,
        states_BTE: Tensor,
        shared: Mapping[str, dict[str, Any]],
        write: WriteKV,
        num: int,
        watch: WatchLayer | None = None,
    ) -> Tensor:
        """The last `num` layers one by one, and the final norm."""
        tap = {self._cache_argument: KVTap(write)}
        for index in range(self.num_layers - num, self.num_layers):
            kind = self._layer_types[index]
            if watch is not None:
                watch(index, states_BTE)
            states_BTE = self._base.layers[index](states_BTE, **tap, **shared[kind])
        return self._normed(states_BTE)

    def _read(
        self, num: int, states_BTE: Tensor, readings: Mapping[str, Reading], write: WriteKV
    ) -> Tensor:
        return self._through(
            states_BTE, {kind: {"reading": one} for kind, one in readings.items()}, write, num
        )

    def _can_record(self, states_BTE: Tensor) -> bool:
        """Whether a pass does nothing that a recording would leave out."""
        norm = self._base.norm
        watched = any(self._hooks) or norm._forward_hooks or norm._forward_pre_hooks
        return self.lean and not watched and not states_BTE.requires_grad

    def _normed(self, states_BTE: Tensor) -> Tensor:
        """The final norm; the same bits however many tokens a pass has."""
        norm = self._unwatched_norm()
        if norm is None or states_BTE.requires_grad:
            return cast(Tensor, self._base.norm(states_BTE))
        return norm(states_BTE)

    def _unwatched_norm(self) -> FusedNorm | None:
        """The final norm by kernels, unless somebody wants to see it."""
        return None if self._base.norm._forward_hooks else self._fast_norm

    def _in_one_call(
        self,
        states_BTE: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        mask_B1TS: Tensor | None,
        write: WriteKV,
        num: int,
    ) -> Tensor | None:
        """The last `num` layers and the final norm over a few tokens by kernels.

        None where layers are run one by one.

        That is so where somebody watches them, or where keys and values go elsewhere than into a
        cache that kernels know.
        """
        slots = getattr(write, "slots", None)
        if (
            self.fused is None
            or mask_B1TS is None
            or mask_B1TS.shape[2] > MOST_QUERIES
            or not isinstance(slots, Slots)
            or any(self._hooks)
            or states_BTE.requires_grad
        ):
            return None
        cos_BTR, sin_BTR = (part.contiguous() for part in cos_sin)
        norm = self._unwatched_norm()
        done_BTE = self.fused.run(
            states_BTE, cos_BTR, sin_BTR, mask_B1TS.contiguous(), slots=slots, num=num, norm=norm
        )
        return done_BTE if norm is not None else cast(Tensor, self._base.norm(done_BTE))

    def _shared(
        self, cos_sin: tuple[Tensor, Tensor], mask_B1TS: Tensor | None, position_ids_BT: Tensor
    ) -> dict[str, Any]:
        """What all layers of one type are called with in a pass."""
        if self.lean:
            groups = int(self.config.num_attention_heads) // self.num_kv_heads
            fused = self.fused is not None
            return {"reading": Reading.of(cos_sin, mask_B1TS, groups, self.dtype, fused=fused)}
        return {
            "attention_mask": mask_B1TS,
            "position_ids": position_ids_BT,
            "position_embeddings": cos_sin,
        }

    @torch.no_grad()
    def encode(
        self, input_ids_BT: Tensor, attention_mask_BT: Tensor, before: Collection[int] = ()
    ) -> TargetPass:
        """Uncached pass that captures keys and values of all layers, for training.

        Args:
            input_ids_BT: (B, T) int64.
            attention_mask_BT: (B, T), 1 for real tokens.
            before: the N > 0 of which the states that enter the last N layers are wanted.
        """
        entering: dict[int, Tensor] = {}
        features = LayerFeatures(self.num_layers)

        def capture(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            features.write(layer, key, value)
            return key, value

        def watch(layer: int, states_BTE: Tensor) -> None:
            if self.num_layers - layer in before:
                entering[self.num_layers - layer] = states_BTE

        hidden_BTE = self.run(
            input_ids_BT,
            positions(attention_mask_BT),
            # Behind the text, pads are seen by nothing real, and no mask is faster than one.
            mask_B1TS=None if _right_padded(attention_mask_BT) else text_mask(attention_mask_BT),
            write=capture,
            watch=watch,
        )
        return TargetPass(features.read(), hidden_BTE, entering)

    def reuse_layers(
        self,
        states_BTE: Tensor,
        position_ids_BT: Tensor,
        *,
        mask: Tensor,
        kv_BTLK: Tensor,
        num: int,
    ) -> Tensor:
        """On-policy pass through the last `num` layers for training.

        Each layer attends to [the target's true keys; the keys of `states_BTE`] under `mask`,
        (B, 1, T, 2 T). `kv_BTLK` holds at least the last `num` layers.
        """

        def join(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            pairs = (
                kv_BTLK[:, :, layer - self.num_layers]
                .unflatten(-1, (self.num_kv_heads, -1))
                .transpose(1, 2)
            )
            true_key, true_value = pairs.to(key.dtype).chunk(2, dim=-1)
            return torch.cat((true_key, key), dim=2), torch.cat((true_value, value), dim=2)

        return self.run_last(states_BTE, position_ids_BT, num=num, mask_B1TS=mask, write=join)


def _right_padded(attention_mask_BT: Tensor) -> bool:
    return bool((attention_mask_BT[:, 1:] <= attention_mask_BT[:, :-1]).all())
