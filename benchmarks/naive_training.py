"""A training loop as one would write it first: what `training.py` compares ours with.

Plain and correct, without tricks. Batches are padded to their longest example, transformers' own
forward returns its cache and all logits, and LSA runs over all tokens of the batch at once. Target
and drafter compute logits of every token over the whole vocabulary; losses are masked at the end.
The target is frozen and runs without gradients; the optimiser is torch's. Weights are those of a
`MoADrafter`, the arithmetic is written out here, so that nothing of ours is measured.

Legend: B batch, T tokens, L target layers, H heads, D head dim, K one layer's key and value, E
hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moaspec.model.moa import MoADrafter
from moaspec.target.target import Target
from moaspec_train.data_order import TrainBatch


def naive_step(
    target: Target,
    drafter: MoADrafter,
    optimizer: torch.optim.Optimizer,
    part: TrainBatch,
    vocabulary: Tensor | None,
) -> tuple[float, float]:
    """One optimiser step (smooth-L1 1.0, forward KL 1.0, clip 1.0).

    Args:
        target: the frozen target.
        drafter: what learns.
        optimizer: of the drafter.
        part: the batch and its blocks.
        vocabulary: ids of a trimmed draft vocabulary, None for all.

    Returns:
        Mean loss and tokens with loss.
    """
    batch, blocks = part.batch, part.blocks
    with torch.no_grad():
        wanted = target.model(
            batch.input_ids_BT,
            attention_mask=batch.attention_mask_BT,
            use_cache=True,
            output_hidden_states=True,
        )
        embeddings_BTE = target.model.get_input_embeddings()(batch.input_ids_BT)
    hidden_BTE = wanted.hidden_states[-1]
    keys_values = _layer_inputs(wanted.past_key_values)
    states_BTE = _drafter(drafter, embeddings_BTE, keys_values, part)
    drafted_BTV = target.model.get_output_embeddings()(states_BTE)
    wanted_BTV = wanted.logits
    if vocabulary is not None:
        drafted_BTV, wanted_BTV = drafted_BTV[..., vocabulary], wanted_BTV[..., vocabulary]
    feature_BT = F.smooth_l1_loss(states_BTE, hidden_BTE, reduction="none").mean(-1)
    kl_BT = F.kl_div(
        drafted_BTV.log_softmax(-1), wanted_BTV.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    count = blocks.loss_BT.sum()
    loss = ((feature_BT + kl_BT) * blocks.loss_BT).sum() / count
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach()), float(count)


def _layer_inputs(cache: Any) -> Tensor:
    """Keys and values of all layers as LSA reads them, (B, T, L, K)."""
    layers = [
        torch.cat((layer.keys, layer.values), dim=-1).transpose(1, 2).flatten(2)
        for layer in cache.layers
    ]
    return torch.stack(layers, dim=2)


def _drafter(
    drafter: MoADrafter, embeddings_BTE: Tensor, kv_BTLK: Tensor, part: TrainBatch
) -> Tensor:
    """LSA, SA and CA of the whole batch."""
    config, encoder, decoder = drafter.config, drafter.encoder, drafter.decoder
    mask_BT, start_BT = part.batch.attention_mask_BT.bool(), part.blocks.last_verified_BT
    index_T = torch.arange(mask_BT.shape[1])
    theta, eps = config.rope_theta, config.rms_norm_eps

    lsa = encoder.layer_self_attention
    x_NLK, layers = kv_BTLK.flatten(0, 1), torch.arange(kv_BTLK.shape[2])
    normed = _norm(x_NLK, lsa.input_layernorm.weight, eps)
    query = _query(lsa, normed, layers, theta)
    key, value = _key_value(lsa.key_value, normed, layers, theta)
    x_NLK = _finish(lsa, x_NLK, _attend(query, key, value, None), eps)
    aggregated_BTE = encoder.projection(x_NLK.mean(1).view(*kv_BTLK.shape[:2], -1))

    (sa,), eye = decoder.text_layers, index_T[:, None] == index_T
    causal = ((index_T[:, None] >= index_T) & mask_BT[:, None] | eye)[:, None]
    normed = _norm(embeddings_BTE, sa.input_layernorm.weight, eps)
    query = _query(sa, normed, index_T, theta)
    key, value = _key_value(sa.key_value, normed, index_T, theta)
    x_BTE = _finish(sa, embeddings_BTE, _attend(query, key, value, causal), eps)

    ca = decoder.cross_attention
    visible = ((index_T <= start_BT[..., None]) & mask_BT[:, None])[:, None]
    query = _query(ca, _norm(x_BTE, ca.input_layernorm.weight, eps), index_T, theta)
    memory = _norm(aggregated_BTE, ca.input_layernorm.weight, eps)
    key, value = _key_value(encoder.memory_key_value, memory, index_T, theta)
    return _finish(ca, x_BTE, _attend(query, key, value, visible), eps)


def _query(layer: Any, normed: Tensor, positions: Tensor, theta: float) -> Tensor:
    attn = layer.self_attn
    return _rotate(_heads(attn.q_proj(normed), attn.head_dim), positions, theta)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    read = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return read.transpose(1, 2).flatten(2)


def _finish(layer: Any, x: Tensor, read: Tensor, eps: float) -> Tensor:
    """What follows the attention in a Llama layer."""
    x, mlp = x + layer.self_attn.o_proj(read), layer.mlp
    normed = _norm(x, layer.post_attention_layernorm.weight, eps)
    return x + mlp.down_proj(F.silu(mlp.gate_proj(normed)) * mlp.up_proj(normed))


def _key_value(module: Any, x: Tensor, positions: Tensor, theta: float) -> tuple[Tensor, Tensor]:
    key = _rotate(_heads(module.k_proj(x), module.head_dim), positions, theta)
    return key, _heads(module.v_proj(x), module.head_dim)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def _heads(x_BTE: Tensor, head_dim: int) -> Tensor:
    return x_BTE.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def _rotate(x_BHTD: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding, halves as in Llama."""
    half = x_BHTD.shape[-1] // 2
    angle = positions[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angle.cos(), angle.sin()
    first, second = x_BHTD.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
