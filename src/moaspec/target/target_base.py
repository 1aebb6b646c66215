"""The parts of a target that rounds do not use: uncached passes for training, its weights.

Legend: B batch, T tokens, L layers, H KV heads, D head dim, E hidden size, K = 2 * H * D.
"""

from collections.abc import Collection
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moaspec.model.masks import text_mask
from moaspec.model.training_pass import LayerFeatures, TargetPass, positions
from moaspec.support.thread_limiter import ThreadLimiter
from moaspec.target import families
from moaspec.target.decoder_layers import DecoderLayers
from moaspec.target.spec import TargetSpec


class TargetBase(TargetSpec):
    """The part of `Target` that training, export and calibration use, and rounds do not."""

    model: PreTrainedModel
    layers: DecoderLayers
    packed = False
    threads: ThreadLimiter | None = None
    token_pass_s: float | None = None
    observed_times: WeakKeyDictionary[Any, dict[Any, Any]]

    def run(self, *args: Any, **options: Any) -> Tensor:
        raise NotImplementedError

    @property
    def crowded(self) -> bool:
        """Whether other processes are known to use cores that passes need."""
        return self.threads is not None and self.threads.crowded

    @property
    def embeddings(self) -> Tensor | None:
        """The table of `embed`, (V, E); None if `embed` does more than look up."""
        table = self.model.base_model.embed_tokens
        plain = type(table) is nn.Embedding and not table._forward_hooks
        return table.weight if plain and not table._forward_pre_hooks else None

    def layer_state(self, index: int) -> dict[str, Tensor]:
        """Weights of one decoder layer, under transformers' names."""
        return cast(dict[str, Tensor], self.model.base_model.layers[index].state_dict())

    def plain_layer_state(self, index: int) -> dict[str, Tensor] | None:
        """`layer_state` under Llama's names; None if this family's layers differ."""
        return families.plain_layer_state(self.config, self.layer_state(index))

    @torch.no_grad()
    def capture(
        self, input_ids_BT: Tensor, attention_mask_BT: Tensor, before: Collection[int] = ()
    ) -> TargetPass:
        """Uncached pass that captures keys and values of all layers, for training.

        Args:
            input_ids_BT: (B, T) int64.
            attention_mask_BT: (B, T), 1 for real tokens.
            before: the N > 0 for which to return the input of the last N layers.
        """
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
            mask_B1TS=None if _right_padded(attention_mask_BT) else text_mask(attention_mask_BT),
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


def _right_padded(attention_mask_BT: Tensor) -> bool:
    return bool((attention_mask_BT[:, 1:] <= attention_mask_BT[:, :-1]).all())
