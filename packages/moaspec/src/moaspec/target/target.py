"""The frozen target: the model whose output is reproduced.

Transformers' own modules do the arithmetic. The caller of a pass hands in a `WriteKV`, which
receives each layer's new keys and values *as the model writes them* (after rotary embedding, before
any sliding window drops them) and returns the keys and values to attend to.

Legend: B batch, T new tokens, S visible keys, L layers, H KV heads, D head dim, E hidden size,
K = 2 * H * D, V vocabulary.
"""

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from moaspec.model.masks import text_mask
from moaspec.model.moa import LayerFeatures, TargetPass, positions
from moaspec.target import families
from moaspec.target.decoder_layers import DecoderLayers, LMHead, TextPass, WatchLayer, WriteKV
from moaspec.target.spec import TargetSpec
from moaspec.target.thread_limiter import ThreadLimiter
from moaspec.target.weights.stored import StoredEmbedding
from moaspec_core.errors import UnsupportedTargetError
from moaspec_core.support.torch_settings import PROCESS_SETTINGS as PROCESS_SETTINGS
from moaspec_core.support.torch_settings import plain_torch as plain_torch


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
        layers: its decoder layers; `moaspec.backends` replaces them by faster ones.
        lm_head: its LM head; `moaspec.backends` replaces it by a faster one.
        packed: whether its linear layers are packed for this CPU, so that it cannot be moved.
        threads: `moaspec.backends` sets a limit of CPU threads here.
        token_pass_s: seconds of a pass over one token, once it was timed; see `first_use`.
        draft_settings: of earlier calls, by drafter and choice; see `shaping_for`.

    Raises:
        UnsupportedTargetError: keys and values of this family cannot be captured.
    """

    packed = False
    threads: ThreadLimiter | None = None
    token_pass_s: float | None = None

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
        self.draft_settings: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()
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
        cap = getattr(model.config, "final_logit_softcapping", None)
        self.lm_head = LMHead(cast(nn.Module, model.get_output_embeddings()), cap)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, keys and values, as they are now."""
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    def limited_threads(self) -> AbstractContextManager[None]:
        """A block that limits the calling thread's threads to the number of free cores."""
        return nullcontext() if self.threads is None else self.threads.limited()

    @property
    def crowded(self) -> bool:
        """Whether other processes are known to use cores that passes need."""
        return self.threads is not None and self.threads.crowded

    def embed(self, input_ids: Tensor) -> Tensor:
        """Token embeddings as they enter the first layer (scaled in Gemma 3), (..., E)."""
        return self._base.embed_tokens(input_ids)

    @property
    def embeddings(self) -> nn.Embedding | StoredEmbedding | None:
        """The table of `embed`, (V, E); None if `embed` does more than look up."""
        table = self.model.base_model.embed_tokens
        plain = type(table) is nn.Embedding or isinstance(table, StoredEmbedding)
        return table if plain and not (table._forward_hooks or table._forward_pre_hooks) else None

    def draft_head(self, token_ids: Tensor | None) -> nn.Module:
        """The LM head for a draft vocabulary, a copy; for None the whole one, without a copy."""
        return self.lm_head.select(token_ids)

    def head(self, states: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Logits in float32, (..., V), or of `token_ids` only."""
        head = self.draft_head(None) if token_ids is None else self.lm_head.rows(token_ids)
        return self.logits(states, head)

    def best(self, states_NE: Tensor) -> Tensor:
        """The argmax of `head`, (N,) int64."""
        return self.lm_head.best(states_NE)

    def logits(self, states: Tensor, head: nn.Module) -> Tensor:
        """Logits in float32 by a head of this target, soft-capped where the model's are."""
        return self.lm_head.logits(states, head)

    def text_pass(self) -> TextPass | None:
        """Passes over one text in one call, if its layers have a faster way than `run`."""
        return self.layers.text_pass(self.embeddings, self.lm_head)

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
            write: see the module's docstring.
            lengths_B: (B,) tokens of each row's whole text, which select LongRoPE's factors; None
                takes the largest position of the row. Needed where a row is the start of a text.
            watch: receives the input of each layer.

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
    def capture(
        self,
        input_ids_BT: Tensor,
        attention_mask_BT: Tensor,
        before: Collection[int] = (),
        *,
        right_padded: bool | None = None,
    ) -> TargetPass:
        """Uncached pass that captures keys and values of all layers, for training.

        Args:
            input_ids_BT: (B, T) int64.
            attention_mask_BT: (B, T), 1 for real tokens.
            before: the N > 0 for which to return the input of the last N layers.
            right_padded: whether pads are behind every text; None looks, which waits for a GPU.
        """
        if right_padded is None:
            right_padded = _right_padded(attention_mask_BT)
        entering: dict[int, Tensor] = {}
        features = LayerFeatures(self.num_layers)

        def write(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            features.write(layer, key, value)
            return key, value

        def watch(layer: int, states_BTE: Tensor) -> None:
            if self.num_layers - layer in before:
                entering[self.num_layers - layer] = states_BTE

        hidden_BTE = self.run(
            input_ids_BT,
            positions(attention_mask_BT),
            # No real token sees pads after the text, and attention is faster without a mask.
            mask_B1TS=None if right_padded else text_mask(attention_mask_BT),
            write=write,
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

    def layer_state(self, index: int) -> dict[str, Tensor]:
        """Weights of one decoder layer, under transformers' names."""
        return cast(dict[str, Tensor], self.model.base_model.layers[index].state_dict())

    def plain_layer_state(self, index: int) -> dict[str, Tensor] | None:
        """`layer_state` under Llama's names; None if this family's layers differ."""
        return families.plain_layer_state(self.config, self.layer_state(index))


def _right_padded(attention_mask_BT: Tensor) -> bool:
    return bool((attention_mask_BT[:, 1:] <= attention_mask_BT[:, :-1]).all())
