"""A comparison of our pass with transformers' own, which decides whether a model is supported.

Three tokens are enough to see whether a model attends by our mask, goes by our positions, and reads
what our cache returns: a root and two drafts below it that must not see each other. Transformers
runs the two texts [root, draft] without a cache.

Legend: T tokens, S visible keys, H KV heads, D head dim, V vocabulary.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moaspec.errors import UnsupportedTargetError
from moaspec.support.causes import first_line
from moaspec.target.generic.hybrid_layers import HybridLayers
from moaspec.target.generic.hybrid_test import hybrid_distance, relative_distance
from moaspec.target.generic.pass_cache import KVShape
from moaspec.target.target import plain_torch

if TYPE_CHECKING:
    from moaspec.target.generic.generic_target import GenericTarget

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
OTHER_TOLERANCE = 0.1
"""Largest distance between two logit vectors, relative to their length. Passes of different
widths differ by 1e-6 of it in float32, and by 1e-2 in bfloat16. A sibling's token that is seen by
mistake changes logits by a multiple of these bounds."""
TRIALS = ((0.31, 0.53, 0.74), (0.12, 0.88, 0.45), (0.67, 0.25, 0.91))
"""Tokens as shares of the vocabulary. Rounding may send a token of a mixture-of-experts model to
another expert in one trial; a wrong mask is wrong in all of them."""


@torch.inference_mode()
def require_equal(target: GenericTarget) -> KVShape:
    """Shape of the keys and values of a target whose passes equal transformers' own.

    On the meta device, where nothing can be compared, only the shape is found.

    Raises:
        UnsupportedTargetError: says what differs.
    """
    trials = [[int(share * target.vocab_size) for share in trial] for trial in TRIALS]
    limit, distance = TOLERANCE.get(target.dtype, OTHER_TOLERANCE), math.inf
    try:
        with plain_torch():
            ids_1T = torch.tensor([trials[0][:2]], device=target.model.device)
            shape = target.layers.measure(ids_1T)
            if ids_1T.is_meta:
                return shape
            while trials and distance > limit:
                distance = min(distance, _distance(target, trials.pop(0), limit))
    except UnsupportedTargetError:
        raise
    # Models raise almost anything where they do not keep to the interfaces.
    except Exception as error:
        kind = type(error).__name__
        raise UnsupportedTargetError(
            f"its model does not take our cache and masks ({kind}: {first_line(error)})"
        ) from error
    if distance > limit:
        raise UnsupportedTargetError(
            f"its logits for two drafts in one pass differ from those of transformers' own passes "
            f"by {distance:.1%}, so it does not attend by our masks and positions"
        )
    return shape


def _distance(target: GenericTarget, trial: list[int], limit: float) -> float:
    """Of the logits of two drafts, the larger distance relative to their length."""
    ids_1T = torch.tensor([trial], device=target.model.device)
    if isinstance(target.layers, HybridLayers):
        return hybrid_distance(target, target.layers, ids_1T, limit)
    return relative_distance(_our_logits(target, ids_1T), _own_logits(target, ids_1T))


def _our_logits(target: GenericTarget, ids_1T: Tensor) -> Tensor:
    """Of the two drafts, from one pass over both, (2, V)."""
    kept: dict[int, tuple[Tensor, Tensor]] = {}

    def write(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        old_key, old_value = kept.get(layer, (key[:, :, :0], value[:, :, :0]))
        kept[layer] = torch.cat((old_key, key), dim=2), torch.cat((old_value, value), dim=2)
        return kept[layer]

    device = ids_1T.device
    root_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    target.run(ids_1T[:, :1], torch.tensor([[0]], device=device), mask_B1TS=root_mask, write=write)
    mask = torch.tensor([[[[True, True, False], [True, False, True]]]], device=device)
    positions = torch.tensor([[1, 1]], device=device)
    states = target.run(ids_1T[:, 1:], positions, mask_B1TS=mask, write=write)
    return target.head(states[0])


def _own_logits(target: GenericTarget, ids_1T: Tensor) -> Tensor:
    """Of the two drafts, by transformers, (2, V)."""
    texts_2T = torch.stack([ids_1T[0, [0, 1]], ids_1T[0, [0, 2]]])
    return target.model(input_ids=texts_2T, use_cache=False).logits[:, -1].float()
