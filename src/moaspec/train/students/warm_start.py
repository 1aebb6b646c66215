"""Initial weights that already do something useful.

From random weights CA attends evenly to all it may read and LSA's output means nothing, so for a
long time the drafter learns from the text alone. Closed-form steps give it a start:

- SA reads token embeddings as the target's first layer does: it starts as a copy of that layer.
- LSA's heads start by preferring the target's last layers, some sharply and some broadly, and pass
  on what a regression of the target's final state uses of them.
- The projection after LSA starts as the ridge regression of the target's final state on the mean
  over layers.
- CA's heads start by preferring the newest tokens they may read, recent ones, or none.

Both preferences are functions of a distance, of layers or of tokens. Rotary embedding turns a query
and a key that are the same everywhere into a sum of cosines and sines of the distance, whose
coefficients are fitted to the wanted function (`distance_query`).

Legend: N sampled tokens, T tokens, L target layers, E hidden size, K one layer's key and value,
H heads, C KV heads, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from moaspec.errors import InputError
from moaspec.model.layers import masked_attention
from moaspec.model.masks import text_mask
from moaspec.model.moa import MoADrafter, TargetPass, positions
from moaspec.model.target_encoder import TargetEncoder
from moaspec.target.target import Target
from moaspec.train.dataset.examples import Batch

RIDGE = 1e-3
"""Relative to the mean square of the inputs."""
LAYER_SLOPES = (1.0, 0.5, 0.25)
"""How much higher LSA's heads, in turns, score each layer than the one before it."""
LSA_GAIN = 4.0
"""Size of what LSA reads, relative to the residual it is added to: the regression's signal counts,
and the residual should not drown it."""
TOKEN_SLOPES = ((1.2, 14.0), (0.4, 10.0), (0.0, 0.0))
"""How much lower CA's heads, in turns, score each token than the next one, and at most in all."""
MAX_DISTANCE = 1024
MASSIVE_RATIO = 3.0
"""States of so many times the median's size, a text's first one as a rule, say nothing of the size
of the others, and in a regression they would count for all of these."""


def random_weights(drafter: nn.Module) -> None:
    """Normal linear weights, zero biases."""
    for module in drafter.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


@torch.no_grad()
def warm_start(
    target: Target, drafter: MoADrafter, sample: Iterable[tuple[Batch, TargetPass]]
) -> None:
    """Replace random weights by their informed start.

    Args:
        target: the frozen target.
        drafter: with random weights; changed in place.
        sample: some examples, one a batch, and the target's pass over each.

    Raises:
        InputError: SA has other shapes than the target's first layer.
    """
    copy_first_layer(target, drafter)
    kv, finals, texts = [], [], []
    for batch, result in sample:
        kv.append(result.kv_BTLK[0].float())
        finals.append(result.hidden_BTE[0].float())
        texts.append(_text_states(target, drafter, batch))
    encoder, kv_NLK, final_NE = drafter.encoder, torch.cat(kv), torch.cat(finals)
    init_layer_attention(encoder, kv_NLK, final_NE)
    mean_NK = encoder.mean_over_layers(kv_NLK[None])[0]
    fit_linear(encoder.projection, mean_NK, final_NE)
    norm = encoder.memory_norm
    init_cross_attention(
        drafter,
        queries_NE=norm(torch.cat(texts)),
        keys_NE=norm(encoder.projection(mean_NK)),
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
    layer = drafter.decoder.self_attention
    expected = {name: tensor.shape for name, tensor in layer.state_dict().items()}
    if {name: tensor.shape for name, tensor in source.items()} != expected:
        raise InputError(
            "warm_start needs SA to have the shapes of the target's first layer; "
            "drop sizes.sa_* or set warm_start=false."
        )
    layer.load_state_dict(source)


def init_layer_attention(encoder: TargetEncoder, kv_NLK: Tensor, final_NE: Tensor) -> None:
    """Let LSA's heads prefer the last layers and pass on what predicts the final state.

    Every query of a head has the same constant part, every key another (both in biases), so that a
    layer's score depends on its distance alone. Each head's values are the directions of its
    reading that matter most to the regression of the final state on all kinds of readings.
    """
    layer = encoder.layer_self_attention
    kinds = _init_layer_preferences(encoder, kv_NLK.shape[1])
    normed_NLK = layer.input_layernorm(kv_NLK.to(encoder.projection.weight.dtype))
    readings = _layer_averages(encoder, normed_NLK, kinds)
    x, y = torch.cat(readings, dim=1), final_NE - final_NE.mean(0)
    weight_XE = _ridge(x - x.mean(0), y)
    head_dim = layer.key_value.head_dim
    directions = [
        _main_directions(reading_NK, part_KE)
        for reading_NK, part_KE in zip(readings, weight_XE.split(normed_NLK.shape[-1]), strict=True)
    ]
    rows, taken = [], dict.fromkeys(range(len(readings)), 0)
    for kind in kinds:
        start, taken[kind] = taken[kind], taken[kind] + head_dim
        rows.append(directions[kind][start : start + head_dim])
    layer.key_value.v_proj.weight.copy_(torch.cat(rows))
    residual = kv_NLK.float().mean(1).std()
    nn.init.orthogonal_(layer.self_attn.o_proj.weight, gain=float(LSA_GAIN * residual))


def _init_layer_preferences(encoder: TargetEncoder, num_layers: int) -> list[int]:
    """Write the constant queries and keys of LSA; the kind of head that reads each KV head."""
    layer = encoder.layer_self_attention
    query, key_value = layer.self_attn, layer.key_value
    if query.q_proj.bias is None or key_value.k_proj.bias is None:
        raise InputError(
            "warm_start needs biases in LSA's query and key projections; set warm_start=false."
        )
    num_heads = query.q_proj.out_features // query.head_dim
    num_kv_heads = key_value.k_proj.out_features // key_value.head_dim
    group = num_heads // num_kv_heads
    kinds = [head % len(LAYER_SLOPES) for head in range(num_kv_heads)]
    distances = torch.arange(1 - num_layers, num_layers)
    inv_freq = encoder.layer_rope.inv_freq
    fitted = [distance_query(inv_freq, distances, -slope * distances) for slope in LAYER_SLOPES]
    queries_HD = torch.stack([fitted[kind] for kind in kinds for _ in range(group)])
    queries_HD, keys_CD = balance_norms(queries_HD, num_kv_heads)
    query.q_proj.bias.copy_(queries_HD.flatten())
    key_value.k_proj.bias.copy_(keys_CD.flatten())
    nn.init.zeros_(key_value.k_proj.weight)
    return kinds


def _layer_averages(encoder: TargetEncoder, normed_NLK: Tensor, kinds: list[int]) -> list[Tensor]:
    """What one head of each kind reads, were its values the layers themselves: (N, K) each."""
    layer, num_layers = encoder.layer_self_attention, normed_NLK.shape[1]
    cos_sin = encoder.layer_rope(torch.arange(num_layers, device=normed_NLK.device)[None])
    constant = torch.zeros_like(normed_NLK[:1])
    query = layer.self_attn.query(constant, cos_sin)
    key, _ = layer.key_value(constant, cos_sin)
    group = query.shape[1] // key.shape[1]
    scores_HLL = (query[0] @ key[0].repeat_interleave(group, 0).transpose(1, 2)) / math.sqrt(
        query.shape[-1]
    )
    share_HL = scores_HLL.softmax(-1).mean(1)
    return [
        torch.einsum("nlk,l->nk", normed_NLK, share_HL[kinds.index(kind) * group])
        for kind in sorted(set(kinds))
    ]


def _main_directions(reading_NK: Tensor, weight_KE: Tensor) -> Tensor:
    """Rows that read off the parts of `reading @ weight`, largest first, each of unit spread."""
    centred = reading_NK - reading_NK.mean(0)
    _, _, components_EE = torch.linalg.svd(centred @ weight_KE, full_matrices=False)
    rows = (weight_KE @ components_EE.T).T
    return rows / (centred @ rows.T).std(0).clamp(min=1e-6)[:, None]


def fit_linear(linear: nn.Linear, inputs_NK: Tensor, outputs_NE: Tensor) -> None:
    """Ridge regression of outputs on inputs, with intercept, written into a layer with bias."""
    input_mean, output_mean = inputs_NK.mean(0), outputs_NE.mean(0)
    weight_EK = _ridge(inputs_NK - input_mean, outputs_NE - output_mean).T
    linear.weight.copy_(weight_EK)
    linear.bias.copy_(output_mean - weight_EK @ input_mean)


@torch.no_grad()
def fit_exits(
    target: Target, drafter: MoADrafter, sample: Iterable[tuple[Batch, TargetPass]], *, had: int
) -> None:
    """Start the exits of a drafter that was trained for one N, as regressions on its states.

    That N's exit reproduces what the drafter gave, each other one what enters its target layers.

    Args:
        target: the frozen target.
        drafter: with new exits; changed in place.
        sample: as for `warm_start`; the target's passes have the states before each N's layers.
        had: the N it was trained for.
    """
    given: list[Tensor] = []
    wanted: dict[int, list[Tensor]] = {n: [] for n in drafter.config.num_target_layers}
    for batch, result in sample:
        newest_BT = positions(batch.attention_mask_BT)
        states_BTE = drafter.block_states(
            target.embed(batch.input_ids_BT).float(),
            drafter.aggregate(result.kv_BTLK.float()),
            batch.attention_mask_BT,
            newest_BT,
        )
        given.append(states_BTE[0])
        for n, states in wanted.items():
            states.append(states_BTE[0] if n == had else layer_inputs(result, n)[0].float())
    given_NE = torch.cat(given)
    for n, states in wanted.items():
        adapter: Any = drafter.exits[str(n)]
        wanted_NE = torch.cat(states)
        usual_N, scale = non_massive_states(wanted_NE)
        adapter.scale.fill_(scale)
        fit_linear(adapter.linear, adapter.norm(given_NE[usual_N]), wanted_NE[usual_N] / scale)


def layer_inputs(result: TargetPass, num_target_layers: int) -> Tensor:
    """The states that enter the last N layers, or for N = 0 the head, (B, T, E)."""
    return result.before[num_target_layers] if num_target_layers else result.hidden_BTE


def non_massive_states(states_NE: Tensor) -> tuple[Tensor, Tensor]:
    """Which states are not massive, (N,) bool, and the root mean square of these."""
    size_N = states_NE.float().square().mean(1).sqrt()
    usual_N = size_N < MASSIVE_RATIO * size_N.median()
    return usual_N, size_N[usual_N].square().mean().sqrt()


def _ridge(x_NK: Tensor, y_NE: Tensor) -> Tensor:
    """W that minimises |x W - y|^2 + penalty |W|^2, (K, E)."""
    x, y = x_NK.double(), y_NE.double()
    gram = x.T @ x
    gram += RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype).to(gram.device)
    return torch.linalg.solve(gram, x.T @ y).to(x_NK.dtype)


def init_cross_attention(drafter: MoADrafter, *, queries_NE: Tensor, keys_NE: Tensor) -> None:
    """Give CA's heads a preference by distance, in turns: the newest tokens, recent ones, none.

    CA has no biases; the constant parts come from a direction in which all normed inputs agree.
    """
    config = drafter.config.cross_attention
    distances = torch.arange(MAX_DISTANCE)
    fitted = [
        distance_query(
            drafter.decoder.cross_rope.inv_freq,
            distances,
            (-slope * distances).clamp(min=-most),
            weights=1 / (1 + distances),
        )
        for slope, most in TOKEN_SLOPES
    ]
    queries_HD = torch.stack([fitted[head % len(fitted)] for head in range(config.num_heads)])
    queries_HD, keys_CD = balance_norms(queries_HD, config.num_kv_heads)
    for linear, constant, inputs_NE in (
        (drafter.decoder.cross_attention.self_attn.q_proj, queries_HD, queries_NE),
        (drafter.encoder.memory_key_value.k_proj, keys_CD, keys_NE),
    ):
        direction_E1 = _ridge(inputs_NE, torch.ones_like(inputs_NE[:, :1]))
        linear.weight += constant.flatten()[:, None] * direction_E1.T


def distance_query(
    inv_freq: Tensor, distances: Tensor, wanted: Tensor, *, weights: Tensor | None = None
) -> Tensor:
    """A constant query that scores keys by distance, up to an additive constant.

    With rotary embedding, a query (c, s) at i and a key (1, 0) at j score
    sum_f c_f cos(f (i - j)) - s_f sin(f (i - j)), over sqrt(D).

    Args:
        inv_freq: (D / 2,) rotary frequencies.
        distances: (X,) values of i - j.
        wanted: (X,) scores to come near to.
        weights: (X,) importance of each; None for equal ones.

    Returns:
        (D,) float32, for keys that are 1 in their first half and 0 in the second.
    """
    weight = torch.ones(len(distances)) if weights is None else weights
    weight = (weight / weight.sum()).double()
    angles = distances[:, None].double() * inv_freq.double().cpu()
    basis = torch.cat((angles.cos(), -angles.sin()), dim=1) / math.sqrt(2 * len(inv_freq))
    basis = basis - weight @ basis
    score = wanted.double() - weight @ wanted.double()
    gram = basis.T @ (weight[:, None] * basis)
    gram += RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.double)
    return torch.linalg.solve(gram, basis.T @ (weight * score)).float()


def balance_norms(queries_HD: Tensor, num_kv_heads: int) -> tuple[Tensor, Tensor]:
    """Constant queries and their keys, (C, D), scaled to be of like length."""
    keys_CD = torch.zeros(num_kv_heads, queries_HD.shape[1])
    keys_CD[:, : queries_HD.shape[1] // 2] = 1.0
    scale = (queries_HD.norm(dim=1).mean() / keys_CD.norm(dim=1).mean()).clamp(min=1e-3).sqrt()
    return queries_HD / scale, keys_CD * scale


def _text_states(target: Target, drafter: MoADrafter, batch: Batch) -> Tensor:
    """SA's output for one example, (T, E)."""
    mask = text_mask(batch.attention_mask_BT)
    decoder = drafter.decoder
    return decoder.run_self_attention(
        target.embed(batch.input_ids_BT).float(),
        decoder.self_rope(positions(batch.attention_mask_BT)),
        lambda q, k, v: masked_attention(q, k, v, mask),
    )[0]
