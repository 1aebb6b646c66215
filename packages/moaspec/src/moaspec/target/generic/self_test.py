"""A comparison of our passes with transformers' own, which decides whether a model is supported.

The test is a prompt, a root, and two drafts below the root that must not see each other. It shows
whether a model uses our mask, our positions, and the keys and values that our cache returns.
Transformers runs the two texts that end in a draft without a cache; of a hybrid it reads the prompt
and then processes the tokens one by one, as its `generate` does.

Legend: T tokens, J KV heads, S visible keys, D head dim, V vocabulary.
"""

from __future__ import annotations

import copy
import math
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moaspec.target.decoder_layers import cache_argument
from moaspec.target.generic.hybrid_layers import HybridLayers
from moaspec.target.generic.pass_cache import KVShape
from moaspec.target.generic.recurrent_states import StepPass, StepRow, TextState, num_bytes
from moaspec.target.target import plain_torch
from moaspec_core.errors import UnsupportedTargetError
from moaspec_core.support.causes import first_line

if TYPE_CHECKING:
    from moaspec.target.generic.generic_target import GenericTarget

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
OTHER_TOLERANCE = 0.1
"""Largest distance between two logit vectors, relative to their length. Passes of different
widths differ by 1e-6 of it in float32, and by 1e-2 in bfloat16. A sibling's token that is seen by
mistake changes logits by a multiple of these bounds."""
TRIALS = ((0.31, 0.53, 0.74), (0.12, 0.88, 0.45), (0.67, 0.25, 0.91))
"""Token ids of each trial, as shares of the vocabulary. In one trial rounding may send a token to
another expert; a wrong mask fails in all of them."""
PROMPT = 2  # tokens of a trial that are put before it again, as its prompt
TREE, CHAIN = (-1, 0, 0), (-1, 0, 1)  # parents of the tokens behind the prompt


@torch.inference_mode()
def require_equal(target: GenericTarget) -> KVShape:
    """Require that a target's passes equal transformers' own; the shape of its keys and values.

    On the meta device nothing can be compared, and only the shape is found.

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
    """Relative distance between our logits of two drafts and transformers': the larger one.

    For a hybrid it also sets `continues`, `steps_differ` (`HybridLayers`) and `batches`.
    """
    ids_1T = torch.tensor([trial[:PROMPT] + trial], device=target.model.device)
    layers = target.layers
    if not isinstance(layers, HybridLayers):
        ours_TV = _Text(target, ids_1T).logits(TREE)[1:]
        return _relative_distance(ours_TV, _own_logits(target, ids_1T))
    distance = math.inf
    for batches in (True, False):
        for mixer in layers.mixers:
            mixer.batches = batches and mixer.can_batch
        # A mixer that does more around its projections may fail in any way.
        with suppress(RuntimeError):
            text = _Text(target, ids_1T)
            layers.state_bytes, ours_TV = text.state_bytes, text.logits(TREE)[1:]
            distance = _relative_distance(ours_TV, _own_stepped_logits(target, ids_1T))
        if distance <= limit:
            break
    # Whether tokens that are read at once, behind others, have the logits of steps.
    text = _Text(target, ids_1T)
    read_TV = text.logits(CHAIN, num_read=len(CHAIN))
    layers.continues = _relative_distance(read_TV, text.logits(CHAIN)) <= limit
    return distance


def _relative_distance(ours_TV: Tensor, right_TV: Tensor) -> float:
    """The largest distance between logits relative to their norm; infinite for NaN."""
    distance = float(((ours_TV - right_TV).norm(dim=1) / right_TV.norm(dim=1)).max())
    return math.inf if math.isnan(distance) else distance


class _Text:
    """Keys, values and states of one text."""

    def __init__(self, target: GenericTarget, ids_1T: Tensor) -> None:
        self._target, self._ids_1T = target, ids_1T
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}
        self._state: TextState = {}
        self.steps = StepPass([StepRow(PROMPT, (), {})])
        self._run(list(range(PROMPT)))
        self._state = self.steps.after(0, PROMPT - 1)

    @property
    def state_bytes(self) -> int:
        return num_bytes(self._state)

    def logits(self, parents: tuple[int, ...], num_read: int = 0) -> Tensor:
        """Of the tokens behind the prompt, in one pass, (T, V)."""
        depths: list[int] = []
        for parent in parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        pairs = dict(self._pairs)
        self.steps = StepPass([StepRow(num_read, parents[num_read:], self._state)])
        states_TE = self._run([PROMPT + depth for depth in depths], _visible(parents))
        self._pairs = pairs
        return self._target.head(states_TE)

    def __call__(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self._pairs:
            past_key, past_value = self._pairs[layer]
            key = torch.cat((past_key, key), dim=2)
            value = torch.cat((past_value, value), dim=2)
        self._pairs[layer] = key, value
        return key, value

    def _run(self, positions: list[int], visible_TT: Tensor | None = None) -> Tensor:
        first = 0 if visible_TT is None else PROMPT
        ids_1T = self._ids_1T[:, first : first + len(positions)]
        positions_1T = torch.tensor([positions], device=ids_1T.device)
        mask = torch.ones(len(positions), len(positions), dtype=torch.bool).tril()
        if visible_TT is not None:
            mask = torch.cat((torch.ones(len(positions), PROMPT, dtype=torch.bool), visible_TT), 1)
        mask_11TS = mask.to(ids_1T.device)[None, None]
        return self._target.run(ids_1T, positions_1T, mask_B1TS=mask_11TS, write=self)[0]


def _visible(parents: tuple[int, ...]) -> Tensor:
    """Which of these tokens each of them sees, (T, T) bool."""
    matrix = torch.eye(len(parents), dtype=torch.bool)
    for token, parent in enumerate(parents):
        if parent >= 0:
            matrix[token] |= matrix[parent]
    return matrix


def _own_logits(target: GenericTarget, ids_1T: Tensor) -> Tensor:
    """Of the two drafts, by transformers without a cache, (2, V)."""
    texts_2T = torch.cat((ids_1T[:, :-1], ids_1T[:, [0, 1, 2, 4]]))
    return target.model(input_ids=texts_2T, use_cache=False).logits[:, -1].float()


def _own_stepped_logits(target: GenericTarget, ids_1T: Tensor) -> Tensor:
    """Of the two drafts, by transformers with a cache, (2, V)."""
    model: Any = target.model
    argument = cache_argument(model)

    def run(first: int, position: int, cache: Any, num: int = 1) -> tuple[Tensor, Any]:
        positions_1T = torch.arange(position, position + num, device=ids_1T.device)[None]
        output = model(
            input_ids=ids_1T[:, first : first + num],
            position_ids=positions_1T,
            use_cache=True,
            **{argument: cache},
        )
        return output.logits[0, -1].float(), output[argument]

    _, cache = run(0, 0, None, PROMPT)
    _, cache = run(PROMPT, PROMPT, cache)
    return torch.stack([run(PROMPT + n, PROMPT + 1, copy.deepcopy(cache))[0] for n in (1, 2)])
