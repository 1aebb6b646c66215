"""The target's embedding and LM head inside vLLM, as the drafter uses them.

Legend: N embedded tokens, T draft states, E hidden size, V vocabulary rows of this rank,
W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moaspec.backends.linear_backends import can_pack
from moaspec.backends.pack import PackedLinear
from moaspec.target.decoder_layers import frozen_linear

AllReduce = Callable[[Tensor], Tensor]
Embed = Callable[[Tensor], Tensor]  # token ids (N,) -> embeddings (N, E)
NUM_PROBES = 8  # tokens to compare a plain look-up with the target's own embedding


def embedding_of(target: nn.Module, own: Embed, kind: type[nn.Module]) -> Embed:
    """Return a plain table look-up if it equals the target's embedding, else that embedding.

    The look-up skips the work that vLLM's modules do around it. Adapters are left out, see
    `_without_adapters`.

    Args:
        target: vLLM's model, its weights loaded.
        own: the target's embedding. It is more than one look-up with several ranks, and where it
            scales, dequantises or wraps the table.
        kind: the class of vLLM's embedding modules.
    """
    adapted = [one for one in target.modules() if type(getattr(one, "base_layer", None)) is kind]
    own = _without_adapters(own, adapted)
    tables = [module for module in target.modules() if type(module) is kind]
    if len(tables) != 1 or tables[0].tp_size != 1:
        return own
    table: Any = tables[0]
    ids_N = torch.arange(min(NUM_PROBES, len(table.weight)), device=table.weight.device)

    def look_up(ids_N: Tensor) -> Tensor:
        return F.embedding(ids_N, table.weight)

    return look_up if torch.equal(look_up(ids_N), own(ids_N)) else own


class DraftHead:
    """The most probable draft token of each state.

    With a trimmed draft vocabulary, every rank holds a copy of the trimmed rows of the head.
    Without one, the target computes the logits.

    Args:
        draft_token_ids: ids of a trimmed draft vocabulary, (W,) int64, or None.
        all_reduce: sums a tensor over ranks.
    """

    def __init__(self, target: Any, draft_token_ids: Tensor | None, all_reduce: AllReduce) -> None:
        self._ids = draft_token_ids
        self._choose: Callable[[Tensor], Tensor] | None = None
        head = getattr(target, "lm_head", None)
        head = getattr(head, "base_layer", head)
        if draft_token_ids is not None and _is_plain(head):
            rows_WE = all_reduce(_trimmed_rows(head, draft_token_ids))
            self._choose = _choose_function(rows_WE, draft_token_ids)
        else:
            self._logits = base_logits(target)
            if draft_token_ids is None:
                self._choose = _choose_among_ranks(target, self._logits)

    def best(self, states_TE: Tensor) -> Tensor:
        """Most probable token of each state, (T,) int64."""
        if self._choose is not None:
            return self._choose(states_TE)
        logits_TV = self._logits(states_TE)
        if self._ids is None:
            return _best(logits_TV)
        return self._ids[_best(logits_TV[:, self._ids])]


def _choose_among_ranks(
    target: Any, logits: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor] | None:
    """VLLM's choice that sends each rank's best logit instead of all; None if it may not be equal.

    Args:
        target: vLLM's model.
        logits: of all tokens, on all ranks.
    """
    head: Any = getattr(target, "lm_head", None)
    processor: Any = getattr(target, "logits_processor", None)
    if getattr(head, "tp_size", 1) == 1 or not hasattr(processor, "get_top_tokens"):
        return None
    if not _is_plain(head):  # LoRA wraps it, for one
        return None
    weight_VE: Tensor = head.weight

    def choose(states_TE: Tensor) -> Tensor:
        best_T: Tensor = processor.get_top_tokens(head, states_TE)
        return best_T

    # A target may do more than multiply: a scale or a norm of its own.
    probe_TE = _states_alike(NUM_PROBES, weight_VE)
    return choose if torch.equal(choose(probe_TE), _best(logits(probe_TE))) else None


def _states_alike(number: int, weight_VE: Tensor) -> Tensor:
    """Made-up states, the same on every rank: (T, E)."""
    angles_TE = torch.arange(number * weight_VE.shape[1], device=weight_VE.device).view(number, -1)
    return angles_TE.float().sin().to(weight_VE.dtype)


def base_logits(target: Any) -> Callable[[Tensor], Tensor]:
    """The target's `compute_logits` without adapters, see `_without_adapters`."""
    processor = getattr(target, "logits_processor", None)
    adapted = [processor] if hasattr(processor, "base_layer") else []
    return _without_adapters(target.compute_logits, adapted)


def _without_adapters(
    call: Callable[[Tensor], Tensor], adapted: Sequence[Any]
) -> Callable[[Tensor], Tensor]:
    """A method of the target that leaves out LoRA layers.

    These apply adapters by the batch's rows and their order. Drafts are other rows, and the drafter
    was trained with the target's own embedding and head.

    Args:
        call: the method.
        adapted: vLLM's LoRA layers that it calls.
    """

    def base_call(x: Tensor) -> Tensor:
        for layer in adapted:
            layer.forward = _base_forward(layer.base_layer)
        try:
            return call(x)
        finally:
            for layer in adapted:
                del layer.forward

    return base_call if adapted else call


def _base_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: base(
        *(getattr(argument, "base_layer", argument) for argument in arguments)
    )


def _best(logits_TV: Tensor) -> Tensor:
    # argmax on a CPU is four times faster in float32 than in 16 bits; a GPU would write a copy.
    return (logits_TV.float() if logits_TV.device.type == "cpu" else logits_TV).argmax(-1)


def _is_plain(head: Any) -> bool:
    """Whether the head is a matrix of 16 or 32 bits without bias; one of 8 bits has scales."""
    weight = getattr(head, "weight", None)
    return (
        isinstance(weight, Tensor)
        and weight.ndim == 2
        and weight.is_floating_point()
        and weight.itemsize > 1
        and getattr(head, "bias", None) is None
    )


def _choose_function(weight_WE: Tensor, ids_W: Tensor) -> Callable[[Tensor], Tensor]:
    """A function from states (T, E) to the most probable ids (T,), packed for this CPU if possible.

    As in the engine, float32 sums are compared before rounding where the kernel exposes them.
    """
    if not can_pack(weight_WE.dtype, weight_WE.device):
        return lambda states_TE: ids_W[_best(F.linear(states_TE, weight_WE))]
    packed = PackedLinear(frozen_linear(weight_WE, None))
    matrix = packed.matrix
    if matrix is not None:
        return lambda states_TE: ids_W[matrix.best(states_TE)]
    return lambda states_TE: ids_W[packed.single(states_TE).argmax(-1)]


def _trimmed_rows(head: Any, ids_W: Tensor) -> Tensor:
    """The trimmed rows of this rank, zeros elsewhere: (W, E)."""
    start, stop = head.shard_indices.org_vocab_start_index, head.shard_indices.org_vocab_end_index
    own_W = (ids_W >= start) & (ids_W < stop)
    rows_WE = head.weight.new_zeros(len(ids_W), head.weight.shape[1])
    rows_WE[own_W] = head.weight[ids_W[own_W] - start]
    return torch.Tensor.detach(rows_WE)
