"""Assumed costs of a round, for a machine that `calibrate` has not measured.

The unit is one target pass over a single token. The costs of drafts are estimated high, so that
`tree="auto"` drafts only where drafts surely pay.
"""

from collections.abc import Iterable, Sequence

from torch import nn

from moaspec.drafting.policy.cost_model import CostTable, best_chain
from moaspec.model.drafter_config import inner_size
from moaspec.model.moa import MoADrafter
from moaspec.target.target import Target

TOKENS = (1, 2, 4, 5, 8, 16, 64)
PASSES = {
    "cpu": (1.0, 1.05, 1.5, 1.6, 2.8, 5.3, 17.0),
    "cuda": (1.0, 1.02, 1.05, 1.06, 1.1, 1.2, 1.7),
}
"""Costs of passes over `TOKENS` tokens by kind of device. CPU: the highest that we measured,
SmolLM2-135M with AVX2. CUDA: not measured; a pass reads the weights once for all its tokens."""
OVERHEAD = 0.05
"""Cost of calls and cold caches, added to the arithmetic of a drafted level and of an encoding."""
SURE = 1.1  # least estimated speed-up of the best chain; below it nothing is drafted


def sure_costs(
    target: Target,
    drafter: MoADrafter,
    num_target_layers: int,
    prior: Sequence[Sequence[float]],
) -> CostTable | None:
    """`assumed_costs`, or None if drafts may not pay by them; `prior` as `PRIOR`."""
    costs = assumed_costs(target, drafter, num_target_layers)
    _, speedup = best_chain(costs, prior)
    return costs if speedup >= SURE else None


def assumed_costs(target: Target, drafter: MoADrafter, num_target_layers: int) -> CostTable:
    """A cost table from the number of multiplications."""
    layer = _layer_weights(target)
    num_drafted = (
        target.vocab_size if drafter.draft_token_ids is None else len(drafter.draft_token_ids)
    )
    hidden = int(target.config.hidden_size)
    whole = num_weights(target)
    level = _weights(drafter.decoder) + num_drafted * hidden + num_target_layers * layer
    encoder = drafter.encoder
    over_layers = target.num_layers * _weights(encoder.layer_self_attention)
    token = over_layers + _weights(encoder.projection, encoder.memory_key_value)
    passes = PASSES.get(target.device.type, PASSES["cpu"])
    level_s = level / whole + OVERHEAD
    return CostTable(
        contexts=(1,),
        tokens=TOKENS,
        pass_s=(passes,),
        head_s=(0.0,) * len(TOKENS),
        root_s=level_s,
        row_s=level_s if target.device.type == "cpu" else OVERHEAD,
        widths=(1, 8),
        step_s=(level_s, level_s * passes[TOKENS.index(8)]),
        encode_s=tuple(one * token / whole + OVERHEAD for one in passes),
    )


def num_weights(target: Target) -> int:
    """Number of weights that take part in the pass of one token."""
    head = target.vocab_size * int(target.config.hidden_size)
    return target.num_layers * _layer_weights(target) + head


def _layer_weights(target: Target) -> int:
    """Number of weights of a target layer, counted as for a Llama layer."""
    config = target.config
    hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
    attention = 2 * hidden * target.head_dim * (heads + target.num_kv_heads)
    return attention + 3 * hidden * inner_size(config)


def _weights(*modules: nn.Module) -> int:
    parameters: Iterable[nn.Parameter] = (p for one in modules for p in one.parameters())
    return sum(one.numel() for one in parameters)
