"""Shipped costs of a round, for a machine that was not measured.

`assumed_costs.json` has them for each set of kernels, as another machine measured them: seconds to
read 10^9 bytes of weights, seconds that further tokens of a pass add per 10^9 weights, and those
that each layer of the target, each drafted level and each encoding adds. So costs scale with the
sizes of target and drafter. Only their ratios matter to what is drafted. A name with a vendor is
that of a class of CPUs, whose ratios differ.

- "amx", "avx512", "avx2": SmolLM2-135M and Qwen2.5-0.5B in bf16 with two threads of one Xeon with
  AMX, which `MOASPEC_KERNELS` limited.
- "avx512 AuthenticAMD": SmolLM2-135M and Qwen2.5-Coder-0.5B in their files' bits with two threads
  of an EPYC (Zen 5).
- "avx2 AuthenticAMD": SmolLM2-135M in bf16 with two threads of an EPYC without AVX-512.
- "off": SmolLM2-135M in float32 there, by PyTorch. It varies most from CPU to CPU.
- "cuda": not measured; a pass reads the weights once for all its tokens.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from moaspec.backends.cpu.build import instructions
from moaspec.backends.fast_target import same_bits, weight_bytes
from moaspec.model.moa import MoADrafter
from moaspec.target.target import Target
from moaspec_core.checkpoint.drafter_config import inner_size
from moaspec_core.policy.cost_model import CostTable, best_chain

FILE = "assumed_costs.json"
WIDTHS = (1, 2, 4, 8)  # of drafted levels

DECIDE_S = 4e-5
"""Of deciding about drafts and copies in a round, on CPUs: some hundred lines of Python."""

SURE = 1.1
"""Least estimated speed-up of the best chain; below it nothing is drafted, where the clock may not
tell whether these costs fit."""


@dataclass(frozen=True)
class MachineCosts:
    """Costs of one set of kernels; see above."""

    read_s: float  # per 10^9 bytes of weights
    layer_s: float  # of a target's layer, beyond that
    draft_bytes: float  # that a weight of the drafter takes
    tokens: tuple[int, ...]  # of passes
    extra_s: tuple[float, ...]  # that these take beyond a pass over one, per 10^9 weights
    call_s: float
    row_s: float  # that each further row adds to drafting, in levels
    first_s: float = 0.0  # that the first level of a round takes beyond others
    encode_extra_s: tuple[float, ...] | None = None  # `extra_s` of the encoder, if it differs

    def pass_s(self, num_bytes: float, weights: int) -> tuple[float, ...]:
        """Seconds of products with weights, for `tokens` tokens."""
        return tuple(
            self.read_s * num_bytes / 1e9 + extra * weights / 1e9 for extra in self.extra_s
        )

    def of_encoder(self) -> "MachineCosts":
        """Those of products with the encoder's weights."""
        return replace(self, extra_s=self.encode_extra_s or self.extra_s)


def machine_costs(target: Target) -> MachineCosts:
    """Those of the kernels that compute this target, on this class of CPUs if it is known."""
    kernels = instructions() if same_bits(target) else None
    name = "cuda" if target.device.type == "cuda" else kernels or "off"
    name = "avx2" if name == "avxvnni" else name  # they differ in products of rounded inputs only
    shipped = _shipped()
    info = shipped.get(f"{name} {_vendor()}", shipped[name])
    lines: dict[str, Any] = {
        key: tuple(value) for key, value in info.items() if isinstance(value, list)
    }
    return MachineCosts(**info | lines)


@cache
def _vendor() -> str:
    """Of the CPU, as Linux names it; empty where that is unknown."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(r"^vendor_id\s*:\s*(\S+)", text, re.MULTILINE)
    return found[1] if found else ""


@cache
def _shipped() -> dict[str, dict[str, Any]]:
    text = files("moaspec.calibration").joinpath(FILE).read_text(encoding="utf-8")
    return dict(json.loads(text))


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
    """A cost table by the sizes of target and drafter."""
    of = machine_costs(target)
    layer = _layer_weights(target)
    num_drafted = (
        target.vocab_size if drafter.draft_token_ids is None else len(drafter.draft_token_ids)
    )
    hidden = int(target.config.hidden_size)
    level = _weights(drafter.decoder) + num_drafted * hidden + num_target_layers * layer
    encoder = drafter.encoder
    over_layers = target.num_layers * _weights(encoder.layer_self_attention)
    token = over_layers + _weights(encoder.projection, encoder.memory_key_value)
    level_s = of.pass_s(of.draft_bytes * level, level)
    encode_s = of.of_encoder().pass_s(of.draft_bytes * token, token)
    steps = np.interp(WIDTHS, of.tokens, level_s)
    return CostTable(
        contexts=(1,),
        tokens=of.tokens,
        pass_s=(target_pass_s(target, of),),
        head_s=(0.0,) * len(of.tokens),
        root_s=level_s[0] + of.call_s + of.first_s,
        row_s=of.row_s * (level_s[0] + of.call_s),
        decide_s=DECIDE_S,
        widths=WIDTHS,
        step_s=tuple(float(step) + of.call_s for step in steps),
        encode_s=tuple(seconds + of.call_s for seconds in encode_s),
    )


def target_pass_s(target: Target, of: MachineCosts) -> tuple[float, ...]:
    """Seconds of passes of the target over `of.tokens` tokens."""
    weights = num_weights(target)
    num_bytes = weight_bytes(target) or weights * target.dtype.itemsize
    return tuple(
        seconds + of.layer_s * target.num_layers for seconds in of.pass_s(num_bytes, weights)
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
    parameters: Iterable[nn.Parameter] = (p for module in modules for p in module.parameters())
    return sum(parameter.numel() for parameter in parameters)
