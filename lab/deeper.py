"""MoA with a second self-attention or cross-attention layer; trained and measured, not decoded.

    python lab/deeper.py sa|ca lab/comparison/moa.yaml data='[responses.jsonl]' steps=400

The second layer begins as the identity, so that both drafters start from the same distributions.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from eagle3 import new_trainer, train_and_print
from torch import Tensor, nn

from moaspec.model.drafter_config import DrafterConfig
from moaspec.model.layers import CrossAttentionLayer, DecoderLayer, KeyValueProjection
from moaspec.model.layers import masked_attention as attention
from moaspec.model.masks import memory_mask, text_mask
from moaspec.model.moa import MoADrafter
from moaspec.model.training_pass import positions
from moaspec.train.students import students
from moaspec.train.students.warm_start import random_weights


class DeeperDrafter(MoADrafter):
    """SA, SA, CA, or SA, CA, CA; the second CA has keys and values of its own."""

    second = "sa"

    def __init__(self, config: DrafterConfig, draft_token_ids: Tensor | None = None) -> None:
        super().__init__(config, draft_token_ids)
        kind: Any = DecoderLayer if self.second == "sa" else CrossAttentionLayer
        shape = config.self_attention if self.second == "sa" else config.cross_attention
        with torch.random.fork_rng():  # all other weights begin as without this layer
            self.layer = kind(shape, eps=config.rms_norm_eps, hidden_act=config.hidden_act)
            own = KeyValueProjection(config.cross_attention) if self.second == "ca" else None
        self.memory = own
        self.begin()

    def begin(self) -> None:
        """Make the second layer the identity."""
        nn.init.zeros_(self.layer.self_attn.o_proj.weight)
        nn.init.zeros_(self.layer.mlp.down_proj.weight)

    def block_states(
        self,
        embeddings_BTE: Tensor,
        aggregated_BTE: Tensor,
        attention_mask_BT: Tensor,
        last_verified_BT: Tensor,
        *,
        staircase_B: Tensor | None = None,  # noqa: ARG002 - not in these configs
    ) -> Tensor:
        """As `BlockTraining`, with the second layer."""
        position_BT = positions(attention_mask_BT)
        seen, verified = (
            text_mask(attention_mask_BT),
            memory_mask(attention_mask_BT, last_verified_BT),
        )
        decoder, own = self.decoder, self.encoder
        angles = decoder.self_rope(position_BT)
        x_BTE = decoder.run_self_attention(
            embeddings_BTE, angles, lambda q, k, v: attention(q, k, v, seen)
        )
        if self.memory is None:
            x_BTE = self.layer(x_BTE, angles, lambda q, k, v: attention(q, k, v, seen))
        key, value = self.project_kv(aggregated_BTE, position_BT)
        cross = decoder.cross_rope(position_BT)
        y_BTE = decoder.run_cross_attention(
            x_BTE, cross, lambda q: attention(q, key, value, verified)
        )
        if self.memory is None:
            return y_BTE
        normed_BTE = self.layer.input_layernorm(aggregated_BTE)
        further_key, further = self.memory(normed_BTE, own.memory_rope(position_BT))
        found: Tensor = self.layer(
            y_BTE, cross, lambda q: attention(q, further_key, further, verified)
        )
        return found


def start(drafter: DeeperDrafter) -> None:
    """Random weights, as without the second layer, which is the identity."""
    with torch.random.fork_rng():
        random_weights(drafter)
    for part in (drafter.encoder, drafter.decoder, drafter.exits):
        random_weights(part)
    drafter.begin()


def main() -> None:
    """Train, and print held-out accuracy and simulated tau."""
    options = argparse.ArgumentParser(description="Train MoA with one more layer.")
    options.add_argument("second", choices=["sa", "ca"])
    options.add_argument("config", type=Path)
    options.add_argument("overrides", nargs="*")
    args = options.parse_args()
    DeeperDrafter.second = args.second
    for name, own in (("MoADrafter", DeeperDrafter), ("random_weights", start)):
        setattr(students, name, own)  # there is no public hook
    train_and_print(new_trainer(args))


if __name__ == "__main__":
    main()
