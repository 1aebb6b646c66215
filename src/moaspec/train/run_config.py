"""Configuration of a training run."""

import dataclasses
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import torch
import yaml
from pydantic import BeforeValidator

from moaspec.errors import InputError
from moaspec.model.baselines import KINDS, StackConfig
from moaspec.model.drafter_config import (
    DrafterConfig,
    LayerConfig,
    activation_name,
    inner_size,
    norm_eps,
    text_rope,
)
from moaspec.model.moa import MoADrafter
from moaspec.target.target_base import TargetBase
from moaspec.train.students.losses import LossWeights

_COUNTS = (
    *("batch_size", "accumulation", "steps", "shortest_block", "save_every", "max_length"),
    "warm_start_tokens",
)
_AMOUNTS = (
    *("held_out", "batch_tokens", "pass_tokens", "warmup_steps", "decay_steps", "weight_decay"),
    "shard_mb",
)
_RANGES = {
    **dict.fromkeys(_COUNTS, (1, math.inf)),
    **dict.fromkeys(_AMOUNTS, (0, math.inf)),
    "clip": (1e-9, 1e9),
    "learning_rate": (1e-12, 1.0),
    "final_lr": (0.0, 1.0),
    "frozen_lsa": (0.0, 1.0),
    "seed": (0, 2**63 - 1),
}


MAX_CPU_PASS_TOKENS = 512  # tokens of a pass on a CPU: enough rows for products at full speed
WIDTH_UNIT = 64  # widths that a budget chooses are multiples of it, as fast products want
_UNITS = {"k": 10**3, "M": 10**6, "B": 10**9}


def _parse_count(value: Any) -> Any:
    """250M as 250,000,000; anything else as it is."""
    found = re.fullmatch(r"([0-9.]+)\s*([kMB])", value) if isinstance(value, str) else None
    return value if found is None else int(float(found[1]) * _UNITS[found[2]])


@dataclass(frozen=True, kw_only=True)
class DrafterSizes:
    """Sizes of a new drafter; 0 derives them from the target.

    Attributes:
        parameters: trainable parameters at most, as 250000000 or "250M"; SA and CA then get the
            widest MLPs, both as wide, that keep to it.
        lsa_heads: query heads of LSA; default: K / target head dim. Must divide K.
        lsa_kv_heads: key and value heads of LSA.
        lsa_intermediate: MLP width of LSA; default K.
        sa_intermediate, ca_intermediate: MLP widths; default: the target's.
        sa_kv_heads, ca_kv_heads: default: the target's.
        draft_vocab: size of the trimmed draft vocabulary; 0 keeps the full one.
        publishable: give LSA the target's number of heads, as `moaspec checkpoint convert` needs,
            and refuse settings that cannot be converted.
        layers: layers of an independent drafter.
        without: parts to leave out in an ablation; see `DrafterConfig`.
    """

    parameters: Annotated[int, BeforeValidator(_parse_count)] = 0
    lsa_heads: int = 0
    lsa_kv_heads: int = 0
    lsa_intermediate: int = 0
    sa_intermediate: int = 0
    sa_kv_heads: int = 0
    ca_intermediate: int = 0
    ca_kv_heads: int = 0
    draft_vocab: int = 0
    publishable: bool = False
    layers: int = 2
    without: tuple[Literal["lsa", "sa", "ca"], ...] = ()

    def __post_init__(self) -> None:
        if self.parameters and (self.sa_intermediate or self.ca_intermediate):
            raise InputError(
                "sizes.parameters chooses sa_intermediate and ca_intermediate: leave these out."
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run (`moaspec train CONFIG.yaml key=value ...`).

    Attributes:
        target: alias, directory, GGUF file or hub id of the frozen target.
        adapter: directory of a LoRA adapter that is merged into the target; "" for none.
        data: files, directories or hub data sets, in any format that `docs/data.md` lists.
        output: directory of the run: checkpoints, log, exported drafter.
        max_length: tokens of one example, prompt included.
        held_out: examples set aside for measuring.
        batch_size: examples of one optimiser step, over all processes and accumulation steps.
        batch_tokens: if not 0, fill a step with examples of similar length up to this number of
            tokens, pads included, instead of `batch_size` examples.
        accumulation: minimum number of passes of a process in a step.
        pass_tokens: tokens of a pass, roughly; 0 means 512 on a CPU, where larger passes gain
            nothing and need more padding, and no limit on a GPU. It changes rounding only.
        steps: optimiser steps.
        learning_rate: peak, reached after `warmup_steps`; then a cosine decay.
        final_lr: where the decay ends, as a fraction of the peak.
        decay_steps: steps of the decay; 0 takes the rest of the run. The rate is constant
            afterwards, so the paper's recipe is a peak of 20 times the paper's rate and `final_lr`
            1/20.
        optimizer: "adamw", or "muon": Muon for matrices and AdamW for vectors, with sharding=none.
            In our runs it learned more from the same tokens; on a CPU its steps take longer.
        clip: largest norm of the gradients.
        shortest_block, longest_block: lengths of the blocks of the T-step bounded mask, in tokens.
        anchors: where blocks begin: "random" places, or "rounds": where rounds of the current
            drafter would begin along the text, see `moaspec.train.students.simulated_rounds`. It
            costs another forward pass; the simulation reads blocks at random places.
        staircase: restrict SA to the query's own block: in all sequences at first, in ever fewer
            until half of the run.
        warm_start: start from the target's own weights and states, see
            `moaspec.train.students.warm_start`.
        initial: a drafter to continue from: an alias, directory or hub id. Its sizes are kept. So
            are its N, unless it has no exits and `num_target_layers` names others: then each N gets
            an exit, initialised by regression. `warm_start` has no effect. Of `sizes` only
            `draft_vocab` has one: if not 0, the vocabulary grows to this size by the most frequent
            other tokens of the data.
        warm_start_tokens: number of tokens whose activations `warm_start` uses.
        frozen_lsa: fraction of the steps, from the first, in which LSA keeps its initial weights.
            Its means over layers are then computed once per example and kept on disk, which makes
            a step much cheaper; with N > 0 the target's last layers still run.
        activation_cache: keep the target's activations on disk; for a baseline, its final states
            only.
        drafter: "moa", or a baseline: "eagle" (EAGLE-2's head) or "independent" (a small language
            model between the target's embeddings and its head).
        num_target_layers: N, the number of target layers that drafts reuse. Several values train
            one drafter with an exit for each; the first one is its default.
        save_every: steps between saved states.
        shard_mb: largest file of a state or checkpoint, in MB of 10^6 bytes; 0 for no limit.
        seed: of initial weights, order and blocks.
        threads: torch threads; 0 leaves torch's default.
        device: "cpu" or "cuda"; each process takes a GPU of its own.
        target_dtype: of the target's weights.
        mixed_precision: "bf16" lets the drafter compute in bf16 over float32 weights.
        sharding: "fsdp" shards weights, gradients and optimiser state over the processes,
            "deepspeed" gradients and optimiser state (ZeRO stage 2, needs DeepSpeed), "none"
            nothing (DDP).
        trackers: where to log besides `log.jsonl`: names that accelerate knows (tensorboard, ...).
        license: of the drafter, for its model card: a name that the hub knows, such as apache-2.0.
    """

    target: str
    data: tuple[str, ...]
    output: str
    adapter: str = ""
    max_length: int = 768
    held_out: int = 32
    batch_size: int = 8
    batch_tokens: int = 0
    accumulation: int = 1
    pass_tokens: int = 0
    steps: int = 2000
    learning_rate: float = 1e-3
    final_lr: float = 0.05
    decay_steps: int = 0
    optimizer: Literal["adamw", "muon"] = "adamw"
    warmup_steps: int = 50
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 1.0
    shortest_block: int = 5
    longest_block: int = 15
    anchors: Literal["random", "rounds"] = "random"
    staircase: bool = False
    warm_start: bool = True
    initial: str = ""
    warm_start_tokens: int = 12000
    frozen_lsa: float = 0.0
    activation_cache: bool = True
    drafter: Literal["moa", "eagle", "independent"] = "moa"
    num_target_layers: tuple[int, ...] = (0,)
    save_every: int = 200
    shard_mb: float = 0.0
    seed: int = 0
    threads: int = 0
    device: str = "cpu"
    target_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    # YAML reads an unquoted no as false.
    mixed_precision: Annotated[
        Literal["no", "bf16"], BeforeValidator(lambda value: "no" if value is False else value)
    ] = "no"
    sharding: Literal["none", "fsdp", "deepspeed"] = "none"
    trackers: tuple[str, ...] = ()
    license: str = ""
    loss: LossWeights = field(default_factory=LossWeights)
    sizes: DrafterSizes = field(default_factory=DrafterSizes)

    def __post_init__(self) -> None:
        self._check_numbers()
        if self.longest_block < self.shortest_block:
            raise InputError(
                f"longest_block ({self.longest_block}) is below shortest_block "
                f"({self.shortest_block}). Raise it, or lower the other."
            )
        layers = self.num_target_layers
        if not layers or min(layers) < 0 or len(set(layers)) < len(layers):
            raise InputError(
                f"num_target_layers must be different numbers of layers, 0 or more; got {layers}."
            )
        if self.drafter != "moa" and (max(layers) or self.frozen_lsa or self.loss.summary):
            raise InputError(
                f"drafter={self.drafter} has no LSA and reuses no layers: leave out "
                "num_target_layers, frozen_lsa and loss.summary."
            )
        rounds = self.anchors == "rounds"
        if self.drafter != "moa" and (self.sizes.without or self.staircase or rounds):
            raise InputError(
                f"drafter={self.drafter} has neither parts to leave out nor a staircase, and reads "
                "no blocks: drop sizes.without, staircase and anchors."
            )
        if self.sizes.publishable:
            self._check_publishable()
        if self.initial and self.drafter != "moa":
            raise InputError("initial goes on from a Mixture-of-Attentions drafter: drafter=moa.")
        if self.frozen_lsa and self.sharding != "none":
            raise InputError("frozen_lsa works with sharding=none only.")
        if self.optimizer == "muon" and self.sharding != "none":
            raise InputError("optimizer=muon works with sharding=none only.")

    def _check_publishable(self) -> None:
        several = len(self.num_target_layers) > 1
        if self.drafter != "moa" or self.sizes.draft_vocab or several or self.initial:
            raise InputError(
                "sizes.publishable: the published forms hold a new drafter=moa with the full "
                "vocabulary and one N. Drop sizes.draft_vocab, further num_target_layers and "
                "initial, or sizes.publishable."
            )

    def _check_numbers(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high or value == math.inf:
                wanted = f"{low} or more" if high == math.inf else f"within {low:g}..{high:g}"
                raise InputError(f"{name} must be {wanted}, got {value}.")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise InputError(f"betas must be at least 0 and below 1, got {self.betas}.")

    def require_vocabulary(self, target: TargetBase) -> None:
        """Raise InputError where the target has fewer tokens than the draft vocabulary."""
        if self.sizes.draft_vocab > target.vocab_size:
            raise InputError(
                f"sizes.draft_vocab={self.sizes.draft_vocab}: {target.name} has "
                f"{target.vocab_size} tokens; 0 keeps them all."
            )

    def require_enough(self, num_examples: int) -> None:
        """Raise InputError where no example is left to train on."""
        if num_examples <= self.held_out:
            raise InputError(
                f"{num_examples} examples are too few for held_out={self.held_out}, which sets "
                f"as many aside: give more data, or set held_out below {num_examples}."
            )

    def require_processes(self, processes: int) -> None:
        """Raise InputError where one process cannot train as `sharding` says."""
        if self.sharding != "none" and processes == 1:
            raise InputError(
                f"sharding={self.sharding} needs several processes: start with torchrun "
                "--nproc-per-node 2 -m moaspec train ..., or leave it out."
            )

    @property
    def shard_bytes(self) -> int:
        """Largest file of a checkpoint; 0 for no limit."""
        return int(self.shard_mb * 1e6)


def read_train_config(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a YAML file and apply `key=value` overrides (`loss.kl=0.5` reaches inside).

    Raises:
        InputError: unreadable YAML, an unknown key, or a value of the wrong type.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        if not isinstance(values, dict):
            raise InputError(f"The training config {path} must be a mapping of settings.")
        for item in overrides:
            _override(values, item)
        return pydantic.TypeAdapter(TrainConfig).validate_python(_known(TrainConfig, values))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise InputError(
            f"Cannot read the training config {path}: {error}. moaspec train --init writes one."
        ) from error
    except pydantic.ValidationError as error:
        problems = "; ".join(map(_problem, error.errors()))
        raise InputError(f"Training config {path}: {problems}.") from error
    except InputError as error:
        raise InputError(f"Training config {path}: {error}") from error


def _problem(error: Any) -> str:
    """Describe one of pydantic's errors by its place in the YAML file."""
    place = ".".join(map(str, error["loc"]))
    if error["type"] == "tuple_type":
        return f"{place} must be a list, for example {place}='[a]'"
    message = str(error["msg"]).removeprefix("Value error, ").rstrip(".")
    return f"{place}: {message}" if place else message


def _known(kind: Any, values: Any) -> Any:
    """Return the values; refuse keys that are not fields of this dataclass."""
    names = {f.name for f in dataclasses.fields(kind)}
    if not isinstance(values, Mapping):
        raise InputError(f"Expected a mapping of {', '.join(sorted(names))}; got {values!r}.")
    unknown = sorted(map(str, set(values) - names))
    if unknown:
        raise InputError(f"Unknown key(s) {unknown}; known: {', '.join(sorted(names))}.")
    nested = {"loss": LossWeights, "sizes": DrafterSizes}
    return {k: _known(nested[k], v) if k in nested else v for k, v in values.items()}


def _override(values: dict[str, Any], item: str) -> None:
    key, separator, text = item.partition("=")
    if not separator:
        raise InputError(f"Expected key=value, got {item!r}.")
    *path, last = key.split(".")
    for name in path:
        values = values.setdefault(name, {})
        if not isinstance(values, dict):
            raise InputError(f"{key}: {name} is a single value, nothing is inside it. Set {name}.")
    values[last] = yaml.safe_load(text)


def num_passes(config: TrainConfig, tokens: int, processes: int) -> int:
    """Passes of each process in a step of this many tokens, at least."""
    limit = MAX_CPU_PASS_TOKENS if config.device == "cpu" else sys.maxsize
    return max(config.accumulation, -(-tokens // ((config.pass_tokens or limit) * processes)))


def _widest(sizes: DrafterSizes, make: Callable[[DrafterSizes], torch.nn.Module]) -> DrafterSizes:
    """The sizes with MLP widths that keep to `sizes.parameters`; without it, unchanged.

    Args:
        make: builds a drafter of these sizes; its parameters are linear in the widths.

    Raises:
        InputError: the drafter is larger than that with the narrowest MLPs.
    """
    if not sizes.parameters:
        return sizes

    def at(width: int) -> DrafterSizes:
        return dataclasses.replace(
            sizes, parameters=0, sa_intermediate=width, ca_intermediate=width
        )

    with torch.device("meta"):
        narrowest, next_one = (sum(p.numel() for p in make(at(w)).parameters()) for w in (1, 2))
    width = 1 + (sizes.parameters - narrowest) // (next_one - narrowest)
    if width < 1:
        raise InputError(
            f"sizes.parameters={sizes.parameters:,}: with this target the attentions alone have "
            f"{narrowest:,}. Give more, or lower sizes.lsa_intermediate."
        )
    return at(width - width % WIDTH_UNIT if width > WIDTH_UNIT else width)


def stack_config(target: TargetBase, config: TrainConfig) -> StackConfig:
    """Config of a new baseline drafter: the target's layers with the widths of `sizes.sa_*`."""
    kind = KINDS[config.drafter]
    return _stack(
        target, config, _widest(config.sizes, lambda sizes: kind(_stack(target, config, sizes)))
    )


def _stack(target: TargetBase, config: TrainConfig, sizes: DrafterSizes) -> StackConfig:
    shape = drafter_config(target, sizes)
    return StackConfig(
        layer=dataclasses.replace(shape.self_attention, qkv_bias=False, o_bias=False),
        num_layers=sizes.layers if config.drafter == "independent" else 1,
        rms_norm_eps=shape.rms_norm_eps,
        hidden_act=shape.hidden_act,
        rope_parameters=shape.rope_parameters,
        max_position_embeddings=shape.max_position_embeddings,
        target=target.identity,
    )


def drafter_config(
    target: TargetBase, sizes: DrafterSizes, num_target_layers: tuple[int, ...] = (0,)
) -> DrafterConfig:
    """Config of a new drafter; InputError for sizes or reused layers that do not fit the target."""
    sizes = _widest(sizes, lambda one: MoADrafter(drafter_config(target, one, num_target_layers)))
    config, identity = target.config, target.identity
    head_dim = target.head_dim
    usual_heads = identity.kv_size // head_dim
    if sizes.publishable:
        usual_heads = int(config.num_attention_heads)
    lsa_heads = sizes.lsa_heads or usual_heads
    if identity.kv_size % lsa_heads:
        raise InputError(
            f"lsa_heads={lsa_heads} does not divide K={identity.kv_size}. Choose a divisor."
        )
    if max(num_target_layers) > target.num_reusable_layers:
        raise InputError(
            f"num_target_layers={num_target_layers}: the target has {target.num_layers} layers, of "
            f"which {target.num_reusable_layers} can be reused. Ask for as many at most."
        )

    first_layer = target.layer_state(0)

    def text_layer(intermediate: int, kv_heads: int, *, biases: bool) -> LayerConfig:
        return LayerConfig(
            hidden_size=identity.hidden_size,
            num_heads=int(config.num_attention_heads),
            num_kv_heads=kv_heads or target.num_kv_heads,
            head_dim=target.draft_head_dim,
            intermediate_size=intermediate or inner_size(config),
            qkv_bias=biases and "self_attn.q_proj.bias" in first_layer,
            o_bias=biases and "self_attn.o_proj.bias" in first_layer,
            mlp_bias=biases and "mlp.gate_proj.bias" in first_layer,
        )

    rope_parameters = text_rope(config)
    return DrafterConfig(
        hidden_size=identity.hidden_size,
        kv_size=identity.kv_size,
        layer_self_attention=LayerConfig(
            hidden_size=identity.kv_size,
            num_heads=lsa_heads,
            num_kv_heads=sizes.lsa_kv_heads or lsa_heads,
            head_dim=identity.kv_size // lsa_heads,
            intermediate_size=sizes.lsa_intermediate or identity.kv_size,
            qkv_bias=True,
        ),
        self_attention=text_layer(sizes.sa_intermediate, sizes.sa_kv_heads, biases=True),
        cross_attention=text_layer(sizes.ca_intermediate, sizes.ca_kv_heads, biases=False),
        rms_norm_eps=norm_eps(config),
        hidden_act=activation_name(config),
        rope_theta=float(rope_parameters["rope_theta"]),
        rope_parameters=rope_parameters,
        max_position_embeddings=int(config.max_position_embeddings),
        num_target_layers=num_target_layers,
        target=identity,
        without=sizes.without,
    )


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up to the peak, then a cosine decay to `final_lr` times the peak."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    fall = config.decay_steps or config.steps - config.warmup_steps
    done = (step - config.warmup_steps) / max(1, fall)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return config.learning_rate * (config.final_lr + (1 - config.final_lr) * cosine)


def staircase_probability(config: TrainConfig, step: int) -> float:
    """Probability that SA sees its own block only: 1 at first, 0 from half of the run on."""
    return max(0.0, 1 - step / (config.steps / 2)) if config.staircase else 0.0


def lsa_is_frozen(config: TrainConfig, step: int) -> bool:
    """Whether LSA keeps its initial weights at this step."""
    return config.frozen_lsa == 1.0 or step < config.frozen_lsa * config.steps
