"""Initial weights that already do something useful.

From random weights CA attends evenly to all it may read and LSA's output means nothing, so for a
long time the drafter learns from the text alone. Three closed-form steps give it a start:

- SA reads token embeddings as the target's first layer does: it starts as a copy of that layer.
- The projection after LSA starts as the ridge regression of the target's final state on the mean
  over layers of its keys and values.
- CA's heads start by preferring near tokens, medium ones, or none: a constant part of queries and
  keys turns, through rotary embedding, into a preference for small distances.

Legend: N sampled tokens, T tokens, E hidden size, K one layer's key and value, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moaspec.errors import InputError
from moaspec.model import MoADrafter
from moaspec.model.drafter import positions
from moaspec.model.layers import masked_attention
from moaspec.model.masks import text_mask
from moaspec.target import Target
from moaspec.train.data import Batch, Example, collate

SAMPLE_TOKENS = 6000
RIDGE = 1e-2
"""Relative to the mean square of the inputs."""
PEAK_SCORE = 6.0
"""Attention score of a preferred token; e**6 outweighs a few hundred others with score 0."""
BANDS = ((0, 8), (3, 14))
"""Rotary frequencies (highest first) whose sum prefers near and medium distances."""


def random_weights(drafter: MoADrafter) -> None:
    """Normal linear weights, zero biases."""
    for module in drafter.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


@torch.no_grad()
def warm_start(target: Target, drafter: MoADrafter, examples: Sequence[Example]) -> None:
    """Replace SA, the projection and CA's queries and keys by their informed start.

    Raises:
        InputError: SA has other shapes than the target's first layer.
    """
    copy_first_layer(target, drafter)
    means, finals, texts = [], [], []
    for batch in _sample(examples):
        result = target.encode(batch.input_ids_BT, batch.attention_mask_BT)
        means.append(drafter.encoder.mean_over_layers(result.kv_BTLK[0].float()))
        finals.append(result.hidden_BTE[0].float())
        texts.append(_text_states(target, drafter, batch))
    mean_NK = torch.cat(means)
    fit_linear(drafter.encoder.projection, mean_NK, torch.cat(finals))
    norm = drafter.encoder.memory_norm
    prefer_near(
        drafter,
        query_mean_E=norm(torch.cat(texts)).mean(0),
        key_mean_E=norm(drafter.encoder.projection(mean_NK)).mean(0),
    )


def copy_first_layer(target: Target, drafter: MoADrafter) -> None:
    """Start SA as the target's first layer; leave SA alone where that is no plain layer."""
    state = target.plain_layer_state(0)
    if state is None:
        return
    source = {
        name.replace("self_attn.k_", "key_value.k_").replace("self_attn.v_", "key_value.v_"): tensor
        for name, tensor in state.items()
    }
    layer = drafter.speaker.self_attention
    expected = {name: tensor.shape for name, tensor in layer.state_dict().items()}
    if {name: tensor.shape for name, tensor in source.items()} != expected:
        raise InputError(
            "warm_start needs SA to have the shapes of the target's first layer; "
            "drop sizes.sa_* or set warm_start=false."
        )
    layer.load_state_dict(source)


def fit_linear(linear: nn.Linear, inputs_NK: Tensor, outputs_NE: Tensor) -> None:
    """Ridge regression of outputs on inputs, with intercept, written into a layer with bias."""
    input_mean, output_mean = inputs_NK.mean(0), outputs_NE.mean(0)
    x, y = (inputs_NK - input_mean).double(), (outputs_NE - output_mean).double()
    gram = x.T @ x
    gram += RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.double)
    weight_EK = torch.linalg.solve(gram, x.T @ y).T.float()
    linear.weight.copy_(weight_EK)
    linear.bias.copy_(output_mean - weight_EK @ input_mean)


def prefer_near(drafter: MoADrafter, *, query_mean_E: Tensor, key_mean_E: Tensor) -> None:
    """Give CA's heads a preference by distance, in turns: near, medium, none.

    A query part and a key part that are constant over tokens, on the cosine half of rotary pairs,
    score sum_i a_i cos(frequency_i * distance).
    """
    config = drafter.config.cross_attention
    half, kinds = config.head_dim // 2, len(BANDS) + 1
    queries = torch.zeros(config.num_heads, config.head_dim)
    for head, query_D in enumerate(queries):
        if head % kinds < len(BANDS):
            first, last = (min(edge, half) for edge in BANDS[head % kinds])
            query_D[first:last] = PEAK_SCORE * config.head_dim**0.5 / max(1, last - first)
    keys = torch.zeros(config.num_kv_heads, config.head_dim)
    keys[:, :half] = 1.0
    for linear, constant, mean_E in (
        (drafter.speaker.cross_attention.self_attn.q_proj, queries, query_mean_E),
        (drafter.encoder.memory_key_value.k_proj, keys, key_mean_E),
    ):
        linear.weight += torch.outer(constant.flatten(), mean_E / mean_E.square().sum())


def _sample(examples: Sequence[Example]) -> list[Batch]:
    """The first few examples, one a batch."""
    batches, tokens = [], 0
    for index, example in enumerate(examples):
        if tokens < SAMPLE_TOKENS:
            batches.append(collate(examples, [index]))
            tokens += len(example)
    return batches


def _text_states(target: Target, drafter: MoADrafter, batch: Batch) -> Tensor:
    """SA's output for one example, (T, E)."""
    mask = text_mask(batch.attention_mask_BT)
    return drafter.speaker.read_text(
        target.embed(batch.input_ids_BT),
        positions(batch.attention_mask_BT),
        lambda q, k, v: masked_attention(q, k, v, mask),
    )[0]
