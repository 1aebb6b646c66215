"""Sizes of a drafter, and which target it belongs to.

A published checkpoint records almost none of this, so every size that a tensor can tell is read
from the tensors (see `checkpoint/moa_config.py`); these classes only hold the result.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from moaspec_core.errors import ShapeError

MAX_LAYERS = 1024
"""Most layers of a model, and most exits of a drafter: a damaged config is rejected before layers
are built."""

Rates = tuple[tuple[float, ...], ...]
"""Share of drafts that the target chose, given that it chose the path to them: by depth, then by
rank among siblings. Empty if not measured."""

_EPSILONS = ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon")


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One pre-norm decoder layer: attention heads, MLP width and which projections have a bias."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ShapeError(f"{name} must be a whole number of at least 1, got {value!r}.")
        if self.num_heads % self.num_kv_heads:
            raise ShapeError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads "
                f"({self.num_kv_heads})."
            )
        if self.head_dim % 2:
            raise ShapeError(f"head_dim must be even for rotary embeddings, got {self.head_dim}.")


@dataclass(frozen=True, kw_only=True)
class TargetIdentity:
    """The record of a drafter's target in its checkpoint; drafting for another is an error."""

    model_type: str
    num_layers: int
    hidden_size: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tokenizer_hash: str | None = None
    adapter: str | None = None
    """Hash of the LoRA adapter merged into it. It also takes drafters of its base model."""

    @property
    def kv_size(self) -> int:
        """K: numbers in one layer's key and value of one token."""
        return 2 * self.num_kv_heads * self.head_dim

    def as_dict(self) -> dict[str, Any]:
        """All fields as JSON, without `adapter` if there is none, as in older records."""
        info = dataclasses.asdict(self)
        if self.adapter is None:
            del info["adapter"]
        return info


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Everything needed to build a drafter.

    Attributes:
        hidden_size: E, the target's hidden size.
        kv_size: K = 2 * num_kv_heads * head_dim of the target.
        layer_self_attention: LSA, over the target's layers; width K.
        self_attention: SA, over the text and its drafts; width E.
        cross_attention: CA, from SA's output to the output of `aggregate`; width E.
        self_attention_layers: number of SA's layers, all of one shape; the paper has one.
        rope_theta: base of the rotary embeddings of LSA and CA, which are never scaled.
        rope_parameters: transformers' `rope_parameters` of the target; SA keeps its scaling.
        max_position_embeddings: the target's context length, which some scalings need.
        trained_positions: length of the longest training texts. LSA reads keys of later positions
            as keys of earlier ones (see `FoldedPositions`). 0: keys are read unchanged.
        prompt_window: how many tokens before the end of a prompt our own engine encodes at most; CA
            attends to these and to later ones. 0: all.
        num_target_layers: the N that this drafter was trained for, the default one first. Each is
            an exit: CA's output leaves the drafter there and enters the target's last N layers.
        adapter: whether there is an `ExitAdapter` even for a single N, as after a change of N (see
            `TrainConfig.initial`). With several N each has one.
        target: the target it was trained for; None in published checkpoints.
        without: parts left out in an ablation: "lsa" (only the last layer's keys and values are
            read), "sa" (CA's queries come from token embeddings alone), "ca" (in its place a
            self-attention over aggregates of verified tokens and states of drafts).
        acceptance: rates of drafts with the first N; adaptive drafting starts from them.
        further_acceptance: rates for each other N, in the order of `num_target_layers`; with
            all of them, adaptive drafting chooses N. Empty if not measured.
    """

    hidden_size: int
    kv_size: int
    layer_self_attention: LayerConfig
    self_attention: LayerConfig
    cross_attention: LayerConfig
    self_attention_layers: int = 1
    rms_norm_eps: float = 1e-5
    hidden_act: str = "silu"
    rope_theta: float = 10000.0
    rope_parameters: dict[str, Any] = field(default_factory=dict)
    max_position_embeddings: int = 2048
    trained_positions: int = 0
    prompt_window: int = 0
    num_target_layers: tuple[int, ...] = (0,)
    adapter: bool = False
    target: TargetIdentity | None = None
    without: tuple[str, ...] = ()
    acceptance: Rates = ()
    further_acceptance: tuple[Rates, ...] = ()

    def __post_init__(self) -> None:
        unknown = set(self.without) - {"lsa", "sa", "ca"}
        if unknown:
            raise ShapeError(f"without may hold 'lsa', 'sa' and 'ca', got {sorted(unknown)}.")
        widths = {
            "layer_self_attention": (self.layer_self_attention.hidden_size, self.kv_size),
            "self_attention": (self.self_attention.hidden_size, self.hidden_size),
            "cross_attention": (self.cross_attention.hidden_size, self.hidden_size),
        }
        for name, (got, expected) in widths.items():
            if got != expected:
                raise ShapeError(f"{name} must be {expected} wide, got {got}.")
        self._check_layers()
        for name in ("trained_positions", "prompt_window"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise ShapeError(f"{name} must be an integer >= 0, got {value!r}.")
        if self.prompt_window and "ca" in self.without:
            raise ShapeError("A drafter without CA has no memory that prompt_window could limit.")
        self._check_acceptance()
        for name in ("rms_norm_eps", "rope_theta", "max_position_embeddings"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ShapeError(f"{name} must be a positive number, got {value!r}.")

    def _check_layers(self) -> None:
        count, numbers = self.self_attention_layers, self.num_target_layers
        if not isinstance(count, int) or not 1 <= count <= MAX_LAYERS:
            shown = f"{count!r}"[:80]
            raise ShapeError(f"self_attention_layers must be within 1..{MAX_LAYERS}, got {shown}.")
        whole = all(isinstance(n, int) and 0 <= n <= MAX_LAYERS for n in numbers)
        if not whole or not 1 <= len(numbers) <= MAX_LAYERS:
            shown = f"{str(numbers)[:80]}"
            raise ShapeError(f"num_target_layers must be integers >= 0, got {shown}.")

    def _check_acceptance(self) -> None:
        for exit_rates in (self.acceptance, *self.further_acceptance):
            rates = [rate for by_rank in exit_rates for rate in by_rank]
            if not all(exit_rates) or not all(0.0 <= rate <= 1.0 for rate in rates):
                raise ShapeError(f"acceptance must be rates within 0..1, got {exit_rates}.")
        num_others = len(self.num_target_layers) - 1
        if len(self.further_acceptance) not in (0, num_others):
            raise ShapeError(
                f"further_acceptance must be of {num_others} N beside the first, or empty; got "
                f"{len(self.further_acceptance)}."
            )

    @property
    def adapts(self) -> bool:
        """Whether there is an adapter for each N."""
        return self.adapter or len(self.num_target_layers) > 1

    def acceptance_of(self, num_target_layers: int) -> Rates:
        """Acceptance rates for this N; empty if not measured."""
        by_exit = zip(
            self.num_target_layers, (self.acceptance, *self.further_acceptance), strict=False
        )
        return dict(by_exit).get(num_target_layers, ())


def text_rope(config: Any) -> dict[str, Any]:
    """The `rope_parameters` that SA takes from a target's config.

    If sliding and full layers have different ones (Gemma 3), those of full layers: SA attends to
    the whole text. The drafter of a target without rotary embeddings has plain ones.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    chosen = dict(parameters.get("full_attention", parameters))
    return {"rope_theta": 10_000.0} | {k: v for k, v in chosen.items() if v is not None}


def activation_name(config: Any) -> str:
    """Name of a target's MLP activation; "silu" if it is unknown or has weights."""
    names = (getattr(config, name, None) for name in ("hidden_act", "hidden_activation"))
    name = str(next(filter(None, names), "silu"))
    return "silu" if name == "xielu" else name


def norm_eps(config: Any) -> float:
    """Epsilon of a target's norms, which configs call in several ways."""
    found = (getattr(config, name, None) for name in _EPSILONS)
    return float(next(filter(None, found), 1e-6))


def inner_size(config: Any) -> int:
    """Width of a target's MLP; the largest if layers differ."""
    given = getattr(config, "intermediate_size", None) or 4 * int(config.hidden_size)
    return int(given) if isinstance(given, int) else max(given)
