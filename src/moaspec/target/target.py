"""The frozen target: the model whose output is reproduced.

Transformers' own modules do the arithmetic. What a pass reads and stores is decided by the caller,
who hands in an operation that receives each layer's new keys and values *as the model writes them*
(after rotary embedding, before any sliding window drops them) and returns what to attend to.

Legend: B batch, T new tokens, S visible keys, L layers, H KV heads, D head dim, E hidden size,
K = 2 * H * D, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from moaspec.backends.cuda_graphs import PassGraphs
from moaspec.backends.fast_heads import draft_rows, pack_like
from moaspec.backends.fast_layers import WriteKV
from moaspec.backends.linear_backends import can_pack
from moaspec.backends.pack import PackedLinear, pack_linears, return_freed_memory
from moaspec.backends.thread_limiter import ThreadLimiter
from moaspec.errors import UnsupportedTargetError
from moaspec.model.masks import text_mask
from moaspec.model.moa import TargetPass, positions
from moaspec.model.target_encoder import LayerFeatures
from moaspec.support.paths import cache_dir
from moaspec.target import families
from moaspec.target.decoder_layers import DecoderLayers, WatchLayer
from moaspec.target.spec import TargetSpec


class Target(TargetSpec):
    """A causal LM of transformers, frozen, with its tokenizer.

    Args:
        model: a `PreTrainedModel` with an LM head; put in evaluation mode, gradients off.
        tokenizer: transformers' tokenizer, or None where only token ids are used.
        name: how messages call it.
        freeze: False leaves the model's mode and gradients as they are, for a model that is not
            ours to change; it must be in evaluation mode then.
        quantize: see `TargetSpec`.

    Attributes:
        packed: whether `pack` has laid the weights out for this CPU.
        layers: what runs its passes.
        threads: lowers the number of CPU threads while other processes need the cores.
        token_pass_s: seconds of a pass over one token, once it was timed; see `first_use`.

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
        self.layers = DecoderLayers(self._base, model.config)
        self._lm_head = cast(nn.Linear, model.get_output_embeddings())
        self._fast_head: nn.Module = self._lm_head
        self._forget_rows: Callable[[], None] = lambda: None
        self._cap: float | None = getattr(model.config, "final_logit_softcapping", None)
        self.packed = False
        self.threads = ThreadLimiter()
        self.token_pass_s: float | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, keys and values, as they are now."""
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

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
        self.layers.fuse(list(self._base.layers))
        self.layers.graphs = PassGraphs.of(self.device)
        return_freed_memory()
        return self.packed

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
        return self.layers.run(
            self.embed(input_ids_BT),
            position_ids_BT,
            num=self.num_layers,
            mask_B1TS=mask_B1TS,
            write=write,
            lengths_B=lengths_B,
            watch=watch,
        )

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

        return self.layers.run(states_BTE, position_ids_BT, num=num, mask_B1TS=mask, write=join)


def _right_padded(attention_mask_BT: Tensor) -> bool:
    return bool((attention_mask_BT[:, 1:] <= attention_mask_BT[:, :-1]).all())
