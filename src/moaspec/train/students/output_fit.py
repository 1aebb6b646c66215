"""Closed-form start of CA's MLP and of the exits, so that a new drafter predicts no single token.

SA and CA add to the token's embedding. A large embedding (Gemma scales it by sqrt(E)) outweighs the
rest at the LM head, which is often the same matrix: the drafter repeats its last token. No
parameter scales the residual, but CA's MLP can subtract it. With a nearly constant gate the MLP's
inner activations are linear in its normed input, and its last projection is fitted by ridge
regression on them to

    the target's state - (CA's input + CA's attention).

So the drafter starts near the target's mean state for CA's inputs.

Legend: T tokens, N sampled tokens or queries, E hidden size, I width of CA's MLP, K inputs.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from moaspec.model.layers import AttentionBlock
from moaspec.model.moa import MoADrafter, TargetPass
from moaspec.target.target import Target
from moaspec.train.data_order import fixed_blocks
from moaspec.train.dataset.examples import Batch

RIDGE = 1e-3  # relative to the mean square of the inputs
BLOCK = 10  # length of the blocks of sampled responses: the mean of `TrainConfig`'s defaults
GATE = 2.0  # mean of the gates. Activations are nearly linear from there on.
STRENGTH = 0.1
"""Penalty of the regression. Smaller ones fit the sample better, by large weights: the optimiser's
first steps, which move all weights alike, then raise the loss."""
MIN_QUERIES_PER_UNIT = 4
"""With fewer sampled queries for each unit of the MLP, fewer units are used."""
MASSIVE_RATIO = 3.0
"""Hidden states above this multiple of the median norm (usually the first token's) are excluded:
they would dominate the regression."""


@torch.no_grad()
def fit_output(
    target: Target, drafter: MoADrafter, sample: Iterable[tuple[Batch, TargetPass]]
) -> None:
    """Fit CA's MLP, and every exit, to the target's states, in place.

    Args:
        drafter: after `warm_start`.
        sample: as for `warm_start`; the passes hold the states before each N's layers.
    """
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
    target: Target, drafter: MoADrafter, sample: Iterable[tuple[Batch, TargetPass]]
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
    mlp.down_proj.weight[:, :units] = ridge(inner_NI, wanted_NE - middle_NE, STRENGTH).T


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
