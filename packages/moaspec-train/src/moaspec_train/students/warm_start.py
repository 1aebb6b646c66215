"""Warm start: initial weights from the target's weights and activations, in closed form.

- SA starts as a copy of the target's first layer, which reads token embeddings too. A narrower MLP
  keeps the units that add most. Not if that layer has other parts (Qwen3, Gemma, OLMo 2) or massive
  dimensions.
- The projection after LSA is the ridge regression of the target's final state on the mean over
  layers.
- CA's MLP is fitted to the target's states. Its residual holds the token's embedding, which
  outweighs the rest at the LM head, often the same matrix: the drafter would repeat its last token.
  With a nearly constant gate the MLP's inner activations are linear in its normed input, and its
  last projection is the ridge regression on them of

      the target's state - (CA's input + CA's attention).

  So the drafter starts near the target's mean state for CA's inputs. An exit's adapter is the
  regression of the states before its target layers.

Legend: N sampled tokens or queries, T tokens, E hidden size, I width of CA's MLP, K inputs.
"""

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moaspec.model.layers import AttentionBlock, DecoderLayer, masked_attention
from moaspec.model.masks import text_mask
from moaspec.model.moa import MoADrafter, TargetPass, positions
from moaspec.target.target import Target
from moaspec_core.errors import InputError
from moaspec_train.data_order import fixed_blocks
from moaspec_train.dataset.examples import Batch

log = logging.getLogger("moaspec.students.warm_start")

Sample = Iterable[tuple[Batch, TargetPass]]
"""Batches of one example, and the target's passes over them."""

MASSIVE_DIMENSION = 100.0
"""SA stays random where a dimension of the first layer's output, by its root mean square, is above
this multiple of the median one. The target's later layers remove such a dimension; in the drafter
it would dominate CA's norms and change with each step of training."""
MASSIVE_RATIO = 3.0
"""Hidden states above this multiple of the median norm (usually the first token's) are excluded
from regressions, which they would dominate."""
RIDGE = 1e-3  # penalty of a regression, relative to the mean square of the inputs
OUTPUT_RIDGE = 0.1
"""Penalty of CA's regression. Smaller ones fit the sample better, by large weights: the optimiser's
first steps, which move all weights alike, then raise the loss."""
BLOCK = 10  # length of the blocks of sampled responses: the mean of `TrainConfig`'s defaults
GATE = 2.0  # mean of the gates. Activations are nearly linear from there on.
MIN_QUERIES_PER_UNIT = 4
"""With fewer sampled queries for each unit of CA's MLP, fewer units are used; a narrower SA keeps
its units without a regression."""


def random_weights(drafter: nn.Module) -> None:
    """Initialise linear layers with normal weights and zero biases."""
    for module in drafter.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


@torch.no_grad()
def make_later_layers_identity(drafter: MoADrafter) -> None:
    """Make SA's layers after the first return their input; they can learn from there."""
    for layer in drafter.decoder.text_layers[1:]:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            nn.init.zeros_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)


@torch.no_grad()
def warm_start(
    target: Target, drafter: MoADrafter, sample: Sequence[tuple[Batch, TargetPass]]
) -> None:
    """Replace random weights by the warm start, in place.

    Args:
        sample: see `Sample`; the passes hold the states before each N's layers.

    Raises:
        InputError: SA has other shapes than the target's first layer.
    """
    log.info("Warm start: SA, then regressions of LSA's and CA's outputs")
    copy_first_layer(target, drafter, (batch for batch, _ in sample))
    kv_NLK = torch.cat([result.kv_BTLK[0].float() for _, result in sample])
    final_NE = torch.cat([result.hidden_BTE[0].float() for _, result in sample])
    encoder = drafter.encoder
    fit_linear(encoder.projection, encoder.mean_over_layers(kv_NLK[None])[0], final_NE)
    fit_output(target, drafter, sample)


@torch.no_grad()
def copy_first_layer(target: Target, drafter: MoADrafter, batches: Iterable[Batch]) -> None:
    """Copy the target's first layer to SA; of a wider MLP, the units that add most (`keep_units`).

    Logs a warning where SA stays random: the layer has other parts, or massive dimensions.

    Args:
        batches: of one example each, whose text is run through the layer.

    Raises:
        InputError: SA has other shapes than a plain first layer, or a wider MLP.
    """
    if drafter.decoder.without_text:
        return
    whole = first_layer(target, drafter)
    if whole is None:
        _warn_of_random(target, "parts that SA lacks")
        return
    whole.float()
    entered: list[Tensor] = []
    hook = whole.post_attention_layernorm.register_forward_pre_hook(
        lambda _, inputs: entered.append(inputs[0][0])
    )
    decoder = drafter.decoder
    random, decoder.self_attention = decoder.self_attention, whole
    try:
        states = [_text_states(target, drafter, batch) for batch in batches]
    finally:
        hook.remove()
        decoder.self_attention = random
    ratio = largest_dimension(states)
    if ratio > MASSIVE_DIMENSION:
        times = f"{ratio:.0f} times the median one"
        _warn_of_random(target, f"massive dimensions: the largest is {times}")
        return
    keep_units(whole, torch.cat(entered), drafter.config.self_attention.intermediate_size)
    random.load_state_dict(whole.state_dict())


@torch.no_grad()
def keep_units(layer: AttentionBlock, middle_NE: Tensor, width: int) -> None:
    """Keep the `width` units of an MLP that add most to the layer's output, in place.

    What the others add is fitted to the kept units by regression, if there are enough states.

    Args:
        middle_NE: states before the MLP's norm.
        width: at most the MLP's.
    """
    mlp = layer.mlp
    down_EI = mlp.down_proj.weight
    if width == down_EI.shape[1]:
        return
    inner_NI = mlp.inner(layer.post_attention_layernorm, middle_NE)
    added_I = inner_NI.square().mean(0).sqrt() * down_EI.norm(dim=0)
    order_I = added_I.argsort(descending=True)
    kept_I, lost_I = order_I[:width].sort().values, order_I[width:]
    fitted_EI = down_EI[:, kept_I]
    if len(middle_NE) >= MIN_QUERIES_PER_UNIT * width:
        lost_NE = inner_NI[:, lost_I] @ down_EI[:, lost_I].T
        fitted_EI = fitted_EI + ridge(inner_NI[:, kept_I], lost_NE).T
    for linear in (mlp.gate_proj, mlp.up_proj):
        linear.weight = nn.Parameter(linear.weight[kept_I])
        if linear.bias is not None:
            linear.bias = nn.Parameter(linear.bias[kept_I])
    mlp.down_proj.weight = nn.Parameter(fitted_EI)


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


def first_layer(target: Target, drafter: MoADrafter) -> DecoderLayer | None:
    """The target's first layer, with its own tensors, as a layer of SA; None if it is not plain.

    Raises:
        InputError: SA has other shapes, or a wider MLP.
    """
    state = target.plain_layer_state(0)
    if state is None:
        return None
    source = {
        name.replace("self_attn.k_", "key_value.k_").replace("self_attn.v_", "key_value.v_"): tensor
        for name, tensor in state.items()
    }
    config, width = drafter.config, len(source["mlp.up_proj.weight"])
    shape = dataclasses.replace(config.self_attention, intermediate_size=width)
    with torch.device("meta"):
        layer = DecoderLayer(shape, eps=config.rms_norm_eps, hidden_act=config.hidden_act)
    fits = _shapes(source) == _shapes(layer.state_dict())
    if not fits or config.self_attention.intermediate_size > width:
        raise InputError(
            "warm_start needs SA to have the shapes of the target's first layer, with an MLP of at "
            f"most its width ({width}); change sizes.sa_* or set warm_start=false."
        )
    layer.load_state_dict(source, assign=True)
    return layer


def _shapes(state: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in state.items()}


def _text_states(target: Target, drafter: MoADrafter, batch: Batch) -> Tensor:
    """SA's output for one example, (T, E)."""
    mask = text_mask(batch.attention_mask_BT)
    decoder = drafter.decoder
    return decoder.run_self_attention(
        target.embed(batch.input_ids_BT).float(),
        decoder.self_rope(positions(batch.attention_mask_BT)),
        [lambda q, k, v: masked_attention(q, k, v, mask)] * len(decoder.text_layers),
    )[0]


@torch.no_grad()
def fit_output(target: Target, drafter: MoADrafter, sample: Sample) -> None:
    """Fit CA's MLP, and every exit, to the target's states, in place."""
    numbers = drafter.config.num_target_layers
    middle_NE, wanted = _queries(target, drafter, sample)
    if not len(middle_NE):
        return
    usual_N, scale = non_massive_states(wanted[numbers[0]])
    # An exit's adapter has the scale.
    first_NE = wanted[numbers[0]] / (scale if drafter.exits else 1.0)
    layer = drafter.decoder.cross_attention
    fit_mlp(layer, middle_NE[usual_N], first_NE[usual_N])
    if drafter.exits:
        inner_NI = layer.mlp.inner(layer.post_attention_layernorm, middle_NE)
        states_NE = middle_NE + layer.mlp.down_proj(inner_NI)
        for n in numbers:
            fit_exit(drafter.adapter(n), states_NE, wanted[n])


def _queries(
    target: Target, drafter: MoADrafter, sample: Sample
) -> tuple[Tensor, dict[int, Tensor]]:
    """CA's states before the norm of its MLP, (N, E), and the target's states by exit."""
    entered: list[Tensor] = []
    middles: list[Tensor] = []
    wanted: dict[int, list[Tensor]] = {n: [] for n in drafter.config.num_target_layers}
    norm = drafter.decoder.cross_attention.post_attention_layernorm
    hook = norm.register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0]))
    try:
        for batch, result in sample:
            blocks = fixed_blocks(batch.to(torch.device("cpu")), BLOCK)
            loss_BT = blocks.loss_BT.to(target.device)
            drafter.block_states(
                target.embed(batch.input_ids_BT).float(),
                drafter.aggregate(result.kv_BTLK.float()),
                batch.attention_mask_BT,
                blocks.last_verified_BT.to(target.device),
            )
            middles.append(entered.pop()[loss_BT])
            for n, states in wanted.items():
                states.append(layer_inputs(result, n)[loss_BT].float())
    finally:
        hook.remove()
    return torch.cat(middles), {n: torch.cat(states) for n, states in wanted.items()}


@torch.no_grad()
def fit_mlp(layer: AttentionBlock, middle_NE: Tensor, wanted_NE: Tensor) -> None:
    """Make a layer approximate wanted states from its states before the MLP, in place.

    Args:
        layer: its norm before the MLP stays; the MLP is replaced, biases excepted.
        middle_NE: its states after attention, before this norm.
        wanted_NE: the states that it should return.
    """
    norm, mlp = layer.post_attention_layernorm, layer.mlp
    normed_NE = norm(middle_NE)
    units = max(1, min(mlp.down_proj.in_features, len(middle_NE) // MIN_QUERIES_PER_UNIT))
    linear = min(units, normed_NE.shape[1])
    constant_E1 = ridge(normed_NE, torch.ones_like(normed_NE[:, :1]))
    mlp.gate_proj.weight[:linear] = GATE * constant_E1.T
    mlp.up_proj.weight[:linear] = _main_directions(normed_NE)[:linear]
    inner_NI = mlp.inner(norm, middle_NE)[:, :units]
    mlp.down_proj.weight.zero_()
    mlp.down_proj.weight[:, :units] = ridge(inner_NI, wanted_NE - middle_NE, OUTPUT_RIDGE).T


def _main_directions(states_NE: Tensor) -> Tensor:
    """Orthonormal directions of the states, largest mean square first, (E, E)."""
    states = states_NE.double()
    _, vectors_EE = torch.linalg.eigh(states.T @ states)
    return vectors_EE.flip(1).T.to(states_NE.dtype)


def fit_exit(adapter: Any, given_NE: Tensor, wanted_NE: Tensor) -> None:
    """Set an exit's adapter to the regression of wanted states on given ones, in place."""
    usual_N, scale = non_massive_states(wanted_NE)
    adapter.scale.fill_(scale)
    fit_linear(adapter.linear, adapter.norm(given_NE[usual_N]), wanted_NE[usual_N] / scale)


def layer_inputs(result: TargetPass, num_target_layers: int) -> Tensor:
    """The states before the last N layers, or before the head for N = 0, (B, T, E)."""
    return result.before[num_target_layers] if num_target_layers else result.hidden_BTE


def non_massive_states(states_NE: Tensor) -> tuple[Tensor, Tensor]:
    """Mask of the states that are not massive, (N,) bool, and their root mean square."""
    size_N = states_NE.float().square().mean(1).sqrt()
    usual_N = size_N < MASSIVE_RATIO * size_N.median()
    return usual_N, size_N[usual_N].square().mean().sqrt()


def ridge(x_NK: Tensor, y_NE: Tensor, strength: float = RIDGE) -> Tensor:
    """W that minimises |x W - y|^2 + penalty |W|^2, (K, E).

    Args:
        strength: the penalty, relative to the sum of squares of an input.
    """
    x, y = x_NK.double(), y_NE.double()
    gram = x.T @ x
    gram += (
        strength * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype).to(gram.device)
    )
    return torch.linalg.solve(gram, x.T @ y).to(x_NK.dtype)


def fit_linear(linear: nn.Linear, inputs_NK: Tensor, outputs_NE: Tensor) -> None:
    """Set a layer with bias to the ridge regression of outputs on inputs."""
    input_mean, output_mean = inputs_NK.mean(0), outputs_NE.mean(0)
    weight_EK = ridge(inputs_NK - input_mean, outputs_NE - output_mean).T
    linear.weight.copy_(weight_EK)
    linear.bias.copy_(output_mean - weight_EK @ input_mean)
