"""What `moaspec.target.generic.self_test` does, for hybrids: a prompt of two tokens, then a tree.

Transformers reads the prompt and processes the other tokens one by one, as its `generate` does.

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
from moaspec.target.generic.recurrent_states import StepPass, StepRow, TextState, num_bytes

if TYPE_CHECKING:
    from moaspec.target.generic.generic_target import GenericTarget
    from moaspec.target.generic.hybrid_layers import HybridLayers

PROMPT = 2
TREE, CHAIN = (-1, 0, 0), (-1, 0, 1)  # parents of the tokens behind the prompt


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
            held_key, held_value = self._pairs[layer]
            key = torch.cat((held_key, key), dim=2)
            value = torch.cat((held_value, value), dim=2)
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


def hybrid_distance(
    target: GenericTarget, layers: HybridLayers, ids_1T: Tensor, limit: float
) -> float:
    """Distance of our logits for a root and two drafts from transformers' own.

    Also finds out what the layers can do, see `HybridLayers` and `SteppedMixer`.

    Args:
        ids_1T: three tokens.
        limit: largest distance that rounding explains.
    """
    ids_1T = torch.cat((ids_1T[:, :PROMPT], ids_1T), dim=1)  # two of them again, as the prompt
    distance = math.inf
    for batches in (True, False):
        for mixer in layers.mixers:
            mixer.batches = batches and mixer.can_batch
        # A part that does more around its projections may fail in any way.
        with suppress(RuntimeError):
            text = _Text(target, ids_1T)
            layers.state_bytes, ours_TV = text.state_bytes, text.logits(TREE)
            distance = relative_distance(ours_TV, _own_logits(target, ids_1T))
        if distance <= limit:
            break
    layers.continues = _distance_of_reading(target, ids_1T) <= limit
    return distance


def relative_distance(ours_TV: Tensor, right_TV: Tensor) -> float:
    """Of logits, the largest distance relative to their length; infinite for NaN."""
    distance = float(((ours_TV - right_TV).norm(dim=1) / right_TV.norm(dim=1)).max())
    return math.inf if math.isnan(distance) else distance


def _distance_of_reading(target: GenericTarget, ids_1T: Tensor) -> float:
    """Of logits of tokens that are read at once, behind others, from those of steps."""
    text = _Text(target, ids_1T)
    return relative_distance(text.logits(CHAIN, num_read=len(CHAIN)), text.logits(CHAIN))


def _visible(parents: tuple[int, ...]) -> Tensor:
    """Which of these tokens each of them sees, (T, T) bool."""
    matrix = torch.eye(len(parents), dtype=torch.bool)
    for token, parent in enumerate(parents):
        if parent >= 0:
            matrix[token] |= matrix[parent]
    return matrix


def _own_logits(target: GenericTarget, ids_1T: Tensor) -> Tensor:
    """Of the root and of either draft behind it, (3, V)."""
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
    root_V, cache = run(PROMPT, PROMPT, cache)
    drafts = [run(PROMPT + n, PROMPT + 1, copy.deepcopy(cache))[0] for n in (1, 2)]
    return torch.stack([root_V, *drafts])
