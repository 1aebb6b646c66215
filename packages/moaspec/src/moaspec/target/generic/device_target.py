"""A device's part of a `GenericTarget`: its embedding, and its head for the draft vocabulary.

Legend: V vocabulary, E hidden size.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from moaspec.model.checkpoint.eight_bits import SCALE
from moaspec.target.decoder_layers import LMHead
from moaspec.target.generic import rules
from moaspec.target.generic.generic_layers import GenericLayers
from moaspec.target.generic.generic_target import GenericTarget, set_position_rules
from moaspec.target.partial import (
    EMBEDDING,
    HEAD,
    PartialLMHead,
    PartialTarget,
    excerpt_tensors,
    grouped,
    linear_of,
)
from moaspec.target.spec import TargetSpec
from moaspec.target.target import Target
from moaspec.target.weights.int8_rows import Int8Embedding
from moaspec_core.checkpoint.drafter_config import TargetIdentity
from moaspec_core.errors import UnsupportedTargetError

FACTOR = "factor"  # name of the number that a model's embedding multiplies its rows with


def device_tensors(
    target: Target, *, num_layers: int, head_token_ids: Tensor | None
) -> dict[str, Tensor]:
    """`excerpt_tensors`, and for a `GenericTarget` the factor of its embedding.

    Raises:
        UnsupportedTargetError: the embedding does more than multiply its rows.
    """
    tensors = excerpt_tensors(target, num_layers=num_layers, head_token_ids=head_token_ids)
    if isinstance(target, GenericTarget):
        factor = _factor(target, tensors[f"{EMBEDDING}.weight"])
        tensors[f"{EMBEDDING}.{FACTOR}"] = torch.tensor(factor)
    return tensors


@torch.inference_mode()
def _factor(target: GenericTarget, rows_VE: Tensor) -> float:
    ids = torch.arange(min(16, len(rows_VE)), device=target.device)
    given, rows = target.embed(ids).double().cpu(), rows_VE[: len(ids)].double()
    factor = float((given * rows).sum() / rows.square().sum())
    if not torch.allclose(given, factor * rows, rtol=0.02, atol=1e-6):
        raise UnsupportedTargetError(
            f"{target.name} changes what its embedding looks up, so a device cannot embed without "
            "the whole model."
        )
    # Models round the factor to the dtype of their rows; the mean over rows is exactly that number.
    return float(torch.tensor(factor).to(target.dtype))


class _Embedding(nn.Embedding):
    """Rows times a factor, in the dtype of the rows."""

    def __init__(self, weight_VE: Tensor, factor: float) -> None:
        num_rows, width = weight_VE.shape
        super().__init__(num_rows, width, _weight=weight_VE, _freeze=True)
        self._factor = factor

    def forward(self, input: Tensor) -> Tensor:
        rows = super().forward(input)
        return rows if self._factor == 1.0 else rows * self._factor


class _Parts(nn.Module):
    """Stands in for a model of transformers, with an embedding and a head only."""

    def __init__(self, config: Any, embedding: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.config, self.embed_tokens, self.lm_head = config, embedding, head


class GenericPartialTarget(PartialTarget):
    """`PartialTarget` of a `GenericTarget`; no layers can be reused.

    Args are those of `PartialTarget`, but for these:
        config: transformers' config of the target's text part.
        tensors: see `device_tensors`.
        identity: of the whole target.
    """

    def __init__(
        self,
        config: Any,
        tensors: Mapping[str, Tensor],
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        name: str,
        identity: TargetIdentity,
        head_token_ids: Tensor | None,
        stop_token_ids: frozenset[int],
        dtype: torch.dtype,
        generation_config: GenerationConfig | None = None,
    ) -> None:
        embedding, head = _embedding_and_head(grouped(tensors), dtype)
        TargetSpec.__init__(
            self, config, tokenizer, name=name, dtype=None, generation_config=generation_config
        )
        self.model = cast(Any, _Parts(config, embedding, head).eval())
        self._base: Any = self.model
        self.stop_token_ids, self._compute_dtype = stop_token_ids, dtype
        self.layers = GenericLayers(self.model)
        self.lm_head = PartialLMHead(LMHead(head, *rules.head_rule(config)), head_token_ids, name)
        self.identity, self.num_layers = identity, identity.num_layers
        self.num_kv_heads, self.head_dim = identity.num_kv_heads, identity.head_dim
        set_position_rules(self)

    @property
    def embeddings(self) -> None:
        """None: kernels would leave out the factor."""
        return None


def _embedding_and_head(
    groups: Mapping[str, Mapping[str, Tensor]], dtype: torch.dtype
) -> tuple[nn.Module, nn.Module]:
    parts = dict(groups[EMBEDDING])
    factor = float(parts.pop(FACTOR))
    head = linear_of(groups.get(HEAD, parts), dtype)
    if f"weight{SCALE}" in parts:
        return Int8Embedding(parts["weight"], parts[f"weight{SCALE}"], dtype, factor), head
    return _Embedding(parts["weight"].to(dtype), factor), head
