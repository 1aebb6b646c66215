"""Resources of a training run, computed before anything is loaded.

Formulas, per token unless stated otherwise:

- disk: two bytes for each value that a cache keeps (`target_activations`), 12 for each parameter of
  a saved state (weights and AdamW's two moments in float32), two for each of the checkpoint.
- memory of a process: the target's weights; 16 bytes for each parameter of the drafter (weights,
  gradients, moments), 18 with bf16, sharded as `sharding` says; the head's rows of a trimmed draft
  vocabulary; and a pass: four bytes for each parameter of the drafter, its states of each layer,
  the target's keys and values, and the logits of one chunk.
- operations: two for each active parameter of the target's layers if they run, six for each
  parameter of the drafter (LSA's times the number of layers) and of the draft head. Products of
  attention are left out.

Legend: T tokens, L target layers, K one layer's key and value, E hidden size, V draft vocabulary.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from moaspec.backends.linear_backends import compute_dtype
from moaspec.generation.destinations import destinations
from moaspec.model.moa import MoADrafter
from moaspec.target.target import Target
from moaspec_core.checkpoint.drafter_config import LayerConfig
from moaspec_core.errors import InputError
from moaspec_train.dataset.examples import Example
from moaspec_train.muon import ITERATIONS
from moaspec_train.run_config import TrainConfig, num_passes
from moaspec_train.students.initial_drafter import load_initial_drafter
from moaspec_train.students.losses import logit_chunk_size
from moaspec_train.students.students import unfilled_drafter
from moaspec_train.students.target_activations import activation_widths, mean_widths
from moaspec_train.students.warm_start import first_layer
from moaspec_train.text_store import ENTRY, bytes_per_token

GPUS = {
    "a100": (312e12, 80e9),
    "b200": (2250e12, 180e9),
    "h100": (989e12, 80e9),
    "h200": (989e12, 141e9),
    "l4": (121e12, 24e9),
    "l40s": (362e12, 48e9),
    "rtx4090": (165e12, 24e9),
}
"""Dense bf16 operations a second and bytes of memory. Source: NVIDIA's data sheets."""
UTILISATION = 0.35
"""Share of these operations that a run reaches: assumed. With a target of 135M, whose products are
small, one run reached 0.08 on an H200 (lab/log/drafter-experiments.md)."""
LOGIT_COPIES = 6  # tensors as large as a chunk's logits that are in memory at once
PRODUCT_SIZE, PRODUCTS = 1024, 4
"""Rows and columns of matrices whose products are timed on a CPU, and how many products."""


@dataclass(frozen=True)
class GPUs:
    """The GPUs of a plan."""

    name: str
    count: int = 1  # as many processes

    @classmethod
    def parse(cls, text: str) -> GPUs:
        """Read `h100` or `8xh100`; InputError for an unknown name."""
        found = re.fullmatch(r"(?:(\d+)x)?(\w+)", text.lower())
        if found is None or found[2] not in GPUS or found[1] == "0":
            raise InputError(f"Unknown GPU {text!r}: give one of {', '.join(GPUS)}, or 8xh100.")
        return cls(found[2], int(found[1] or 1))

    @property
    def operations_per_s(self) -> float:
        return GPUS[self.name][0] * UTILISATION * self.count


def cpu_operations_per_s(config: TrainConfig) -> float:
    """Operations a second of linear layers on this CPU at their fastest, measured.

    Target and drafter may compute in two precisions; the faster one counts. Threads are PyTorch's.
    """
    target_dtype = compute_dtype(getattr(torch, config.target_dtype))
    own_dtype = torch.bfloat16 if config.mixed_precision == "bf16" else torch.float32
    best_s = math.inf
    for dtype in {target_dtype, own_dtype}:
        states, weight = torch.randn(2, PRODUCT_SIZE, PRODUCT_SIZE).to(dtype)
        for _ in range(PRODUCTS):
            started = time.perf_counter()
            F.linear(states, weight)
            best_s = min(best_s, time.perf_counter() - started)
    return 2 * PRODUCT_SIZE**3 / best_s


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Resources of a training run. Sizes are bytes."""

    parameters: Mapping[str, int]  # trainable ones, by part of the drafter
    target_parameters: int
    cache_bytes_per_token: Mapping[str, int]  # on disk, by the setting that keeps them
    data_tokens: int | None  # of all examples, or None where no data was read
    # Of all examples on disk, by setting; empty where no data was read.
    cache_bytes: Mapping[str, int]
    state_bytes: int  # a saved state
    checkpoint_bytes: int  # the drafter's checkpoint
    memory: Mapping[str, int]  # of a process, by what takes it, on the device that trains
    # Of a process that trains on a GPU, while it loads the target or saves a state.
    host_memory: int
    pass_tokens: int  # at most, with pads
    steps: int
    read_tokens: int  # that the steps read in all; at most, where no data was read
    loss_tokens: int  # those with loss; at most, where no data was read
    operations: float  # of the run
    problems: Mapping[str, str | None]  # see `moaspec.generation.destinations`

    @property
    def num_parameters(self) -> int:
        return sum(self.parameters.values())

    def hours(self, operations_per_s: float) -> float:
        """Hours of the run, from its operations alone."""
        return self.operations / operations_per_s / 3600


def make_plan(
    target: Target, config: TrainConfig, examples: Sequence[Example] = (), *, processes: int = 1
) -> Plan:
    """Compute the plan of a run.

    Args:
        target: may lie on the meta device.
        examples: its data, if it was read.

    Raises:
        InputError, ShapeError: the run cannot be trained; the message says why.
    """
    # What would fail after the target is loaded.
    config.require_vocabulary(target)
    if examples:
        config.require_enough(len(examples))
    config.require_processes(processes)
    module = _drafter(target, config, examples)
    if config.warm_start and not config.initial and isinstance(module, MoADrafter):
        first_layer(target, module)
    rows, tokens = len(examples), sum(map(len, examples))
    usual = tokens / rows if rows else config.max_length
    read = int(config.steps * (config.batch_tokens or config.batch_size * usual))
    per_token = _cache_bytes_per_token(target, config)
    step_tokens = config.batch_tokens or config.batch_size * config.max_length
    passes = num_passes(config, step_tokens, processes) * processes
    pass_tokens = max(config.max_length, -(-step_tokens // passes))
    parameters = _parameters(module)
    total = sum(parameters.values())
    share = _response_share(examples)
    memory = _memory(target, module, config, pass_tokens, processes)
    state_bytes = 12 * total + _moment_bytes(target, config)
    return Plan(
        parameters=parameters,
        target_parameters=_count(target.model),
        cache_bytes_per_token=per_token,
        data_tokens=tokens or None,
        cache_bytes={name: tokens * size + ENTRY.size * rows for name, size in per_token.items()}
        if rows
        else {},
        state_bytes=state_bytes,
        checkpoint_bytes=2 * total + 8 * config.sizes.draft_vocab + _moment_bytes(target, config),
        memory=memory,
        host_memory=max(_weight_bytes(target), state_bytes),
        pass_tokens=pass_tokens,
        steps=config.steps,
        read_tokens=read,
        loss_tokens=int(read * share),
        operations=_operations(target, module, config, read=read, share=share, data=tokens),
        problems=destinations(module, target),
    )


def _drafter(target: Target, config: TrainConfig, examples: Sequence[Example]) -> Any:
    """The drafter on the meta device, with the draft vocabulary that the config asks for."""
    if config.initial:
        return load_initial_drafter(target, config, examples).to("meta")
    size = config.sizes.draft_vocab
    with torch.device("meta"):
        ids = torch.empty(size, dtype=torch.int64) if size else None
        return unfilled_drafter(target, config, ids)


def _parameters(module: Any) -> dict[str, int]:
    """Trainable parameters by part; what belongs to none is the baseline's."""
    if not isinstance(module, MoADrafter):
        return {module.kind: _count(module)}
    encoder, decoder = module.encoder, module.decoder
    parts = {
        "LSA": _count(encoder.layer_self_attention),
        "projection": _count(encoder.projection),
        "SA": sum(map(_count, decoder.text_layers)),
        "CA": _count(decoder.cross_attention) + _count(encoder.memory_key_value),
        "exits": _count(module.exits),
    }
    return {name: count for name, count in parts.items() if count}


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _weight_bytes(target: Target) -> int:
    return sum(p.nbytes for p in target.model.parameters())


def _cache_bytes_per_token(target: Target, config: TrainConfig) -> dict[str, int]:
    moa, before = config.drafter == "moa", [n for n in config.num_target_layers if n]
    widths = {"activation_cache": activation_widths(target.identity, before, finals_only=not moa)}
    if moa:
        widths["frozen_lsa"] = mean_widths(target.identity, before)
    return {name: bytes_per_token(width) for name, width in widths.items()}


def _moment_bytes(target: Target, config: TrainConfig) -> int:
    """The head's input moment, (E, E) float32, which held-out examples bring."""
    return 4 * target.identity.hidden_size**2 if config.held_out or config.held_out_data else 0


def _response_share(examples: Sequence[Example]) -> float:
    """Share of tokens that are responses'; 1 where it is not known."""
    tokens = sum(map(len, examples))
    return sum(example.num_response_tokens for example in examples) / tokens if tokens else 1.0


def _memory(
    target: Target, module: Any, config: TrainConfig, pass_tokens: int, processes: int
) -> dict[str, int]:
    total, ids = _count(module), module.draft_token_ids
    vocabulary = target.vocab_size if ids is None else len(ids)
    state = {"weights": 4 * total, "optimiser": 12 * total}
    if config.sharding == "fsdp":
        state = {name: size // processes for name, size in state.items()}
    bf16 = 2 * total if config.mixed_precision == "bf16" else 0
    identity, size = target.identity, target.dtype.itemsize
    chunk = logit_chunk_size(vocabulary, torch.device(config.device))
    kv = identity.num_layers * identity.kv_size * size if config.drafter == "moa" else 0
    # A layer's projections of one input are joined in a pass, which copies weights.
    kept = 4 * total + pass_tokens * (kv + _kept_per_token(target, module, config))
    return {
        "target": _weight_bytes(target),
        "drafter and AdamW": sum(state.values()) + bf16,
        "draft head": 0 if ids is None else vocabulary * identity.hidden_size * size,
        "pass": kept + LOGIT_COPIES * 4 * min(chunk, pass_tokens) * vocabulary,
    }


def _kept_per_token(target: Target, module: Any, config: TrainConfig) -> int:
    """Bytes a token that autograd keeps of a training pass, by the layers that it runs."""
    shape = module.config
    if not isinstance(module, MoADrafter):
        return int(shape.num_layers) * _kept_by_layer(shape.layer)
    sa, ca = _kept_by_layer(shape.self_attention), _kept_by_layer(shape.cross_attention)
    # A reused layer of the target counts as one of SA's.
    num_sa = shape.self_attention_layers + sum(config.num_target_layers)
    lsa = 0 if config.frozen_lsa == 1.0 else target.identity.num_layers
    return lsa * _kept_by_layer(shape.layer_self_attention) + num_sa * sa + ca


def _kept_by_layer(shape: LayerConfig) -> int:
    """Bytes a token in float32: states and norms, queries to outputs of heads, and the MLP."""
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    return 4 * (4 * shape.hidden_size + 2 * heads + 4 * shape.intermediate_size)


def _operations(
    target: Target, module: Any, config: TrainConfig, *, read: int, share: float, data: int
) -> float:
    """Operations of a run.

    Args:
        target: may lie on the meta device.
        read: tokens that its steps read.
        share: the part of these with loss.
        data: tokens of all examples; 0 where they are not known.
    """
    cached = config.activation_cache or config.frozen_lsa == 1.0
    passed = min(read, data) if cached and data else read
    identity, ids = target.identity, module.draft_token_ids
    lsa = _count(module.encoder.layer_self_attention) if isinstance(module, MoADrafter) else 0
    trained = 6 * lsa * identity.num_layers * read * (1 - config.frozen_lsa)
    frozen = 2 * lsa * identity.num_layers * (min(read, data) or read) * (config.frozen_lsa > 0)
    # Queries and MLPs run only where there is loss.
    queries = _query_parameters(module, config)
    others = 6 * ((_count(module) - lsa - queries) * read + queries * read * share)
    vocabulary = target.vocab_size if ids is None else len(ids)
    head = 6 * vocabulary * identity.hidden_size * read * share * len(config.num_target_layers)
    update = _muon_operations(module) * config.steps if config.optimizer == "muon" else 0
    return 2 * active_parameters(target) * passed + trained + frozen + others + head + update


def _query_parameters(module: Any, config: TrainConfig) -> int:
    """Parameters that only tokens with loss pass: of CA, and of SA's last layer but its keys."""
    if not isinstance(module, MoADrafter) or any(config.num_target_layers) or module.reads_drafts:
        return 0
    decoder = module.decoder
    last = decoder.text_layers[-1:]
    found = _count(decoder.cross_attention) + sum(map(_count, last))
    named = (pair for layer in last for pair in layer.named_parameters())
    return found - sum(p.numel() for name, p in named if "k_proj" in name or "v_proj" in name)


def _muon_operations(module: nn.Module) -> int:
    """Operations of one step of Muon."""
    sizes = (sorted(p.shape) for p in module.parameters() if p.ndim == 2)
    return ITERATIONS * sum(4 * m * m * n + 2 * m**3 for m, n in sizes)


def active_parameters(target: Target) -> int:
    """Parameters of the layers that a token passes, with only the chosen experts."""
    found = 0.0
    for index in range(int(target.config.num_hidden_layers)):
        for name, tensor in target.layer_state(index).items():
            share = _chosen_experts(target.config) if ".experts." in name else 1.0
            found += tensor.numel() * share
    return int(found)


def _chosen_experts(config: Any) -> float:
    """Share of a layer's experts that a token passes."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((getattr(config, name) for name in names if getattr(config, name, None)), None)
    chosen = getattr(config, "num_experts_per_tok", None)
    return int(chosen) / int(experts) if experts and chosen else 1.0
