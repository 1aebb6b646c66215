"""Warm start: closed-form initial weights from the target's weights and activations.

With random weights CA attends uniformly and LSA's output carries no information, so the drafter
learns from the text alone for a long time. Instead:

- SA starts as a copy of the target's first layer, which reads token embeddings too; norms that SA
  lacks are folded into the weights (`folded_layer`). Not if that layer has massive dimensions.
- LSA's heads prefer the target's last layers, some sharply and some broadly. Their values are the
  directions that a regression of the target's final state uses.
- The projection after LSA is the ridge regression of the target's final state on the mean over
  layers.
- CA's heads prefer the newest readable tokens, recent ones, or none. `output_fit` fits its MLP.

Both preferences are functions of a distance in layers or tokens. With rotary embedding, a constant
query and a constant key score a sum of cosines and sines of the distance; `distance_query` fits its
coefficients to the wanted function.

Legend: N sampled tokens, T tokens, L target layers, E hidden size, K one layer's key and value,
H query heads, C KV heads, D head dim, X distances.
"""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, tee

import torch
from torch import Tensor, nn

from moaspec.errors import InputError
from moaspec.model.layers import masked_attention
from moaspec.model.masks import text_mask
from moaspec.model.moa import MoADrafter, TargetEncoder, TargetPass, positions
from moaspec.target.target import Target
from moaspec.train.dataset.examples import Batch
from moaspec.train.students.folded_layer import folded_layer_state
from moaspec.train.students.output_fit import RIDGE, fit_exit, fit_linear, layer_inputs, ridge

log = logging.getLogger(__name__)

FOLD_EXAMPLES = 16  # examples for measuring the first layer's norms and outputs
MASSIVE_DIMENSION = 100.0
"""SA stays random where a dimension of the first layer's output, by its root mean square, is above
this multiple of the median one (Gemma 3 270M: 659). The target's later layers remove such a
dimension; in the drafter it would dominate CA's norms and change with each step of training."""
LAYER_SLOPES = (1.0, 0.5, 0.25)  # increase of the score per layer, for LSA's heads in turn
LSA_GAIN = 4.0
"""Scale of LSA's attention output relative to the residual it is added to, so that the regression's
signal dominates."""
TOKEN_SLOPES = ((1.2, 14.0), (0.4, 10.0), (0.0, 0.0))
"""Decrease of the score per token of distance, and largest decrease, for CA's heads in turn."""
MAX_DISTANCE = 1024


def random_weights(drafter: nn.Module) -> None:
    """Initialise linear layers with normal weights and zero biases."""
    for module in drafter.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


@torch.no_grad()
def skip_further_layers(drafter: MoADrafter) -> None:
    """Make SA's layers after the first return their input; they can learn from there."""
    for layer in drafter.decoder.text_layers[1:]:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            nn.init.zeros_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)


@torch.no_grad()
def warm_start(
    target: Target, drafter: MoADrafter, sample: Iterable[tuple[Batch, TargetPass]]
) -> None:
    """Replace random weights by the warm start, in place.

    Args:
        sample: batches of one example, and the target's passes over them.

    Raises:
        InputError: SA has other shapes than the target's first layer, or the sample is too small.
    """
    sample, shown = tee(sample)
    copy_first_layer(target, drafter, (batch for batch, _ in shown))
    del shown  # `tee` keeps unread items
    kv, finals, texts = [], [], []
    for batch, result in sample:
        kv.append(result.kv_BTLK[0].float())
        finals.append(result.hidden_BTE[0].float())
        texts.append(_text_states(target, drafter, batch))
    log.info("Warm start: fitting LSA and CA")
    encoder, kv_NLK, final_NE = drafter.encoder, torch.cat(kv), torch.cat(finals)
    init_layer_attention(encoder, kv_NLK, final_NE)
    mean_NK = encoder.mean_over_layers(kv_NLK[None])[0]
    fit_linear(encoder.projection, mean_NK, final_NE)
    norm = encoder.memory_norm
    init_cross_attention(
        drafter, queries_NE=norm(torch.cat(texts)), keys_NE=norm(encoder.projection(mean_NK))
    )


@torch.no_grad()
def copy_first_layer(target: Target, drafter: MoADrafter, batches: Iterable[Batch] = ()) -> None:
    """Copy the target's first layer to SA, its further norms folded into the weights.

    Logs a warning where SA stays random: it has other parts or sizes, or massive dimensions.

    Args:
        batches: of one example each; needed to fold norms and to find massive dimensions.
    """
    batches = list(islice(batches, FOLD_EXAMPLES))
    source = first_layer_weights(target, drafter)
    if source is None:
        folded = folded_layer_state(target, batches)
        source = None if folded is None else _named_as_in_sa(folded)
        if source is None or not _fits(source, drafter):
            _warn_of_random(target, "other parts or sizes")
            return
    layer = drafter.decoder.self_attention
    random = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    layer.load_state_dict(source)
    ratio = largest_dimension([_text_states(target, drafter, one) for one in batches])
    if ratio > MASSIVE_DIMENSION:
        layer.load_state_dict(random)
        times = f"{ratio:.0f} times the median one"
        _warn_of_random(target, f"massive dimensions: the largest is {times}")


def _warn_of_random(target: Target, why: str) -> None:
    log.warning(
        "Warm start: SA keeps random weights, because the first layer of %s (%s) has %s.",
        target.name,
        target.identity.model_type,
        why,
    )


def largest_dimension(states: Sequence[Tensor]) -> float:
    """Root mean square of the largest dimension of states, (N, E) each, over the median one's."""
    if not states:
        return 1.0
    size_E = torch.cat(list(states)).square().mean(0).sqrt()
    return float(size_E.max() / size_E.median().clamp(min=1e-12))


def first_layer_weights(target: Target, drafter: MoADrafter) -> dict[str, Tensor] | None:
    """The target's first layer under SA's names; None if not plain, InputError if SA differs."""
    state = target.plain_layer_state(0)
    if state is None:
        return None
    source = _named_as_in_sa(state)
    if not _fits(source, drafter):
        raise InputError(
            "warm_start needs SA to have the shapes of the target's first layer; "
            "drop sizes.sa_* and sizes.parameters, or set warm_start=false."
        )
    return source


def _named_as_in_sa(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.replace("self_attn.k_", "key_value.k_").replace("self_attn.v_", "key_value.v_"): tensor
        for name, tensor in state.items()
    }


def _fits(source: Mapping[str, Tensor], drafter: MoADrafter) -> bool:
    """Whether SA has these tensors, in their shapes."""
    states = (source, drafter.decoder.self_attention.state_dict())
    given, own = ({name: one.shape for name, one in state.items()} for state in states)
    return given == own


def init_layer_attention(encoder: TargetEncoder, kv_NLK: Tensor, final_NE: Tensor) -> None:
    """Make LSA's heads prefer the last layers, with values that predict the final state.

    Queries and keys of a head are constants (biases), so a score depends on the distance of two
    layers only. Each head's values are the directions of its average that matter most to the
    regression of the final state on the averages of all kinds of heads.
    """
    layer = encoder.layer_self_attention
    kinds = _init_layer_preferences(encoder, kv_NLK.shape[1])
    normed_NLK = layer.input_layernorm(kv_NLK.to(encoder.projection.weight.dtype))
    averages = _layer_averages(encoder, normed_NLK, kinds)
    x, y = torch.cat(averages, dim=1), final_NE - final_NE.mean(0)
    weight_XE = ridge(x - x.mean(0), y)
    head_dim = layer.key_value.head_dim
    directions = [
        _main_directions(average_NK, part_KE)
        for average_NK, part_KE in zip(averages, weight_XE.split(normed_NLK.shape[-1]), strict=True)
    ]
    rows, taken = [], dict.fromkeys(range(len(averages)), 0)
    for kind in kinds:
        start, taken[kind] = taken[kind], taken[kind] + head_dim
        rows.append(directions[kind][start : start + head_dim])
    if len(final_NE) < max(taken.values()):
        raise InputError(
            f"warm_start needs {max(taken.values())} tokens of the training data, got "
            f"{len(final_NE)}: add examples, or set warm_start=false."
        )
    layer.key_value.v_proj.weight.copy_(torch.cat(rows))
    residual = kv_NLK.float().mean(1).std()
    nn.init.orthogonal_(layer.self_attn.o_proj.weight, gain=float(LSA_GAIN * residual))


def _init_layer_preferences(encoder: TargetEncoder, num_layers: int) -> list[int]:
    """Write LSA's constant queries and keys; return the kind of each KV head."""
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
    """Attention-weighted averages of the layers, one for each kind of head: (N, K) each."""
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


def _main_directions(average_NK: Tensor, weight_KE: Tensor) -> Tensor:
    """Principal directions of `average @ weight`, largest first, scaled to unit deviation."""
    centred = average_NK - average_NK.mean(0)
    _, _, components_EE = torch.linalg.svd(centred @ weight_KE, full_matrices=False)
    rows = (weight_KE @ components_EE.T).T
    return rows / (centred @ rows.T).std(0).clamp(min=1e-6)[:, None]


@torch.no_grad()
def fit_exits(
    target: Target,
    drafter: MoADrafter,
    sample: Iterable[tuple[Batch, TargetPass]],
    *,
    former_n: int,
) -> None:
    """Initialise new exits of a drafter by regression on its states, in place.

    The exit of the former N reproduces the drafter's states, each other exit the states before its
    target layers.

    Args:
        sample: as for `warm_start`; the passes hold the states before each N's layers.
        former_n: the N that the drafter was trained for.
    """
    given: list[Tensor] = []
    wanted: dict[int, list[Tensor]] = {n: [] for n in drafter.config.num_target_layers}
    for batch, result in sample:
        all_verified_BT = positions(batch.attention_mask_BT)  # s(i) = i
        states_BTE = drafter.block_states(
            target.embed(batch.input_ids_BT).float(),
            drafter.aggregate(result.kv_BTLK.float()),
            batch.attention_mask_BT,
            all_verified_BT,
        )
        given.append(states_BTE[0])
        for n, states in wanted.items():
            states.append(states_BTE[0] if n == former_n else layer_inputs(result, n)[0].float())
    given_NE = torch.cat(given)
    for n, states in wanted.items():
        fit_exit(drafter.exits[str(n)], given_NE, torch.cat(states))


def init_cross_attention(drafter: MoADrafter, *, queries_NE: Tensor, keys_NE: Tensor) -> None:
    """Make CA's heads in turn prefer the newest tokens, recent ones, or none.

    CA has no biases, so the constants come from a direction that all normalised inputs share.
    """
    config = drafter.config.cross_attention
    distances = torch.arange(MAX_DISTANCE)
    fitted = [
        distance_query(
            drafter.decoder.cross_rope.inv_freq,
            distances,
            (-slope * distances).clamp(min=-limit),
            weights=1 / (1 + distances),
        )
        for slope, limit in TOKEN_SLOPES
    ]
    queries_HD = torch.stack([fitted[head % len(fitted)] for head in range(config.num_heads)])
    queries_HD, keys_CD = balance_norms(queries_HD, config.num_kv_heads)
    for linear, constant, inputs_NE in (
        (drafter.decoder.cross_attention.self_attn.q_proj, queries_HD, queries_NE),
        (drafter.encoder.memory_key_value.k_proj, keys_CD, keys_NE),
    ):
        direction_E1 = ridge(inputs_NE, torch.ones_like(inputs_NE[:, :1]))
        linear.weight += constant.flatten()[:, None] * direction_E1.T


def distance_query(
    inv_freq: Tensor, distances: Tensor, wanted: Tensor, *, weights: Tensor | None = None
) -> Tensor:
    """Fit a constant query that scores keys by distance, up to an additive constant.

    With rotary embedding, a query (c, s) at i and a key (1, 0) at j score
    sum_f c_f cos(f (i - j)) - s_f sin(f (i - j)), over sqrt(D).

    Args:
        inv_freq: (D / 2,) rotary frequencies.
        distances: (X,) values of i - j.
        wanted: (X,) scores to approximate.
        weights: (X,) of the least squares; None for equal weights.

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
    # One distance (of a target with keys in one layer only) leaves nothing to fit, and gives zeros.
    ridge_size = (RIDGE * gram.diagonal().mean()).clamp(min=torch.finfo(torch.double).tiny)
    gram += ridge_size * torch.eye(len(gram), dtype=torch.double)
    return torch.linalg.solve(gram, basis.T @ (weight * score)).float()


def balance_norms(queries_HD: Tensor, num_kv_heads: int) -> tuple[Tensor, Tensor]:
    """Scale constant queries and their keys, (C, D), to similar norms."""
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
        [lambda q, k, v: masked_attention(q, k, v, mask)] * len(decoder.text_layers),
    )[0]
