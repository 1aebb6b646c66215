"""Attention masks of a pass, made where a model of transformers makes its own.

A model calls transformers' `create_*_mask` for each kind of layer that it has (full, sliding
window, chunked). These call the mask function that is registered under the name of the model's
attention. Ours returns the mask of the current pass, cut down by the rule of this kind of layer. So
our code needs no list of layers with a window.

Outside of our passes the functions registered here do the same as transformers' "sdpa" or "eager",
so other callers can use the same model.

Legend: B batch, T new tokens, S visible keys, G query heads of a key head.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

from moaspec.model.masks import text_mask

MaskFunction = Callable[[Any, Any, Any, Any], Any]
"""Transformers' (row, head, query position, key position) -> whether the query may attend."""

NAMES = {"sdpa": "moaspec-sdpa", "eager": "moaspec-eager"}
"""Our name for transformers' attention functions."""


class PassMasks:
    """The masks of one pass."""

    def __init__(self, mask_B1TS: Tensor | None, position_ids_BT: Tensor) -> None:
        self._given, self._position_ids_BT = mask_B1TS, position_ids_BT

    def of(self, rule: MaskFunction) -> Tensor | None:
        """The mask of layers with this rule, bool; None for plain causal attention."""
        if self._given is None and rule is causal_mask_function:
            return None
        mask_B1TS = self.written_out(rule)
        return None if _is_plain(mask_B1TS) else mask_B1TS

    def written_out(self, rule: MaskFunction) -> Tensor:
        """The mask of layers with this rule, bool, also for plain causal attention."""
        if rule is causal_mask_function:
            return self._mask
        row_B111 = torch.arange(len(self._mask), device=self._mask.device)
        row_B111 = row_B111[:, None, None, None]
        query_B1T1 = self._position_ids_BT[:, None, :, None]
        allowed = rule(row_B111, torch.zeros_like(row_B111), query_B1T1, self._key_positions)
        return self._mask & allowed

    @cached_property
    def _mask(self) -> Tensor:
        """As given, or plain causal attention written out."""
        if self._given is not None:
            return self._given
        return text_mask(torch.ones_like(self._position_ids_BT))

    @cached_property
    def _key_positions(self) -> Tensor:
        """Position of each key that a query sees: it sees one key per position, up to its own."""
        seen = self._mask.cumsum(-1)
        return seen - seen[..., -1:] + self._position_ids_BT[:, None, :, None]


def _is_plain(mask_B1TS: Tensor) -> bool:
    """Whether a mask is plain causal attention: one token that sees all keys, or a whole text."""
    num_tokens, num_keys = mask_B1TS.shape[-2:]
    if mask_B1TS.is_meta or num_tokens not in {1, num_keys}:
        return False
    plain_B1TS = torch.ones_like(mask_B1TS).tril(num_keys - num_tokens)
    return torch.equal(mask_B1TS, plain_B1TS)


_CURRENT: ContextVar[PassMasks | None] = ContextVar("masks of the pass", default=None)


@contextmanager
def masks_of_pass(masks: PassMasks) -> Iterator[None]:
    """Models attend by these masks inside the block, in this thread."""
    token = _CURRENT.set(masks)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def attend_by_pass(config: Any) -> None:
    """Let a model with this config attend by the masks of our passes, during a pass."""
    config._attn_implementation = NAMES.get(
        config._attn_implementation, config._attn_implementation
    )


def _bool_mask(*args: Any, mask_function: MaskFunction, **options: Any) -> Tensor | None:
    masks = _CURRENT.get()
    if masks is None:
        return sdpa_mask(*args, mask_function=mask_function, **options)
    if not options.get("allow_is_causal_skip", True):
        return masks.written_out(mask_function)
    return masks.of(mask_function)


def _float_mask(*args: Any, mask_function: MaskFunction, **options: Any) -> Tensor | None:
    """Zero where a query may attend, else the lowest number; eager attention adds it."""
    masks = _CURRENT.get()
    if masks is None:
        return eager_mask(*args, mask_function=mask_function, **options)
    mask_B1TS, dtype = masks.written_out(mask_function), options["dtype"]
    lowest = torch.tensor(torch.finfo(dtype).min, dtype=dtype, device=mask_B1TS.device)
    return torch.where(mask_B1TS, torch.zeros_like(lowest), lowest)


def _sdpa_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Any]:
    """Transformers' own; in our passes without its copies of keys that heads share.

    The queries of the G heads that share a key head become G * T queries of one head.
    """
    num_tokens, groups = query.shape[2], query.shape[1] // key.shape[1]
    is_causal = attention_mask is None and num_tokens > 1
    if groups == 1 or is_causal or _CURRENT.get() is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    query = query.unflatten(1, (-1, groups)).flatten(2, 3)
    mask = None if attention_mask is None else attention_mask.repeat(1, 1, groups, 1)
    options["is_causal"] = False
    # Without the module, which would say that heads are grouped.
    output, weights = sdpa_attention_forward(None, query, key, value, mask, **options)
    return output.unflatten(1, (groups, num_tokens)).permute(0, 2, 3, 1, 4).flatten(2, 3), weights


def _eager_attention(module: Any, *args: Any, **options: Any) -> Any:
    """The eager attention of this module's own file: it knows soft caps and attention sinks."""
    own = sys.modules[type(module).__module__].eager_attention_forward
    return own(module, *args, **options)


AttentionInterface.register(NAMES["sdpa"], _sdpa_attention)
AttentionInterface.register(NAMES["eager"], _eager_attention)
AttentionMaskInterface.register(NAMES["sdpa"], _bool_mask)
AttentionMaskInterface.register(NAMES["eager"], _float_mask)
