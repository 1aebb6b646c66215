"""States of recurrent and convolution layers: of each text, and of each token of a pass.

Such a layer folds all tokens before one into a state of fixed size, so a draft that is rejected
cannot be masked out afterwards. A pass therefore steps through its drafts: each draft starts from
the state after the token before it, and every state is kept until it is known which drafts were
accepted. Branches of a tree have states of their own.

A step is what transformers' modules compute for one token, and a prompt is read in one call, as
transformers' `generate` does. The two differ by more than rounding in some models (see
`HybridLayers.steps_differ`), so drafts are not read like prompts.

Legend: B rows, T tokens, E hidden size, N tokens of steps, F and G sizes inside a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from moaspec.target.generic.hybrid_layers import SteppedMixer

LayerState = Mapping[tuple[str, int], Tensor]
"""Tensors of a layer, (1, ...) each, by kind ("conv", "recurrent") and number of that kind."""
TextState = Mapping[int, LayerState]
"""The states of all layers that have them, by transformers' index of the layer."""


class MixerCache:
    """The cache of one layer in one call, with transformers' interface for layers with states.

    Args:
        states: before the call, (B, ...) each; empty at the start of a text. Calls change these
            tensors in place.

    Attributes:
        states: after the call.
    """

    def __init__(self, states: LayerState) -> None:
        self.states = dict(states)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The last inputs of a convolution; None at the start of a text."""
        del layer_idx  # a cache is of one layer
        return self.states.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The state of a recurrence; None at the start of a text."""
        del layer_idx
        return self.states.get(("recurrent", state_idx))

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        """Whether a text has begun."""
        return bool(self.states)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether a convolution's older inputs are kept as well; they are not."""
        del layer_idx
        return False

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Keep the last inputs of a convolution; returns all inputs that the new tokens need."""
        del layer_idx
        state = self.states.get(("conv", state_idx))
        size = conv_kernel_size or (conv_states if state is None else state).shape[-1]
        if state is None:
            inputs = F.pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        else:
            inputs = torch.cat((state, conv_states), dim=-1)
        self.states["conv", state_idx] = inputs[..., -size:].clone()
        return inputs

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        """Keep the state of a recurrence."""
        del layer_idx
        self.states["recurrent", state_idx] = recurrent_states
        return recurrent_states


@dataclass(frozen=True)
class StepRow:
    """One row of a pass."""

    num_read: int  # how many of its first tokens are read in one call
    # For each other token the index of the one before it in the row, -1 for the text before the
    # pass.
    parents: Sequence[int]
    before: TextState  # states after that text; empty if there is none: `num_read` is above 0 then


@runtime_checkable
class SteppedWrite(Protocol):
    """A `WriteKV` that also hands layers with states the steps of the pass."""

    steps: StepPass

    def __call__(self, layer: int, key: Tensor, value: Tensor, /) -> tuple[Tensor, Tensor]: ...


class StepPass:
    """One pass over several rows, layer by layer. `rows`: in the batch order of the pass."""

    def __init__(self, rows: Sequence[StepRow]) -> None:
        self._rows = rows
        self._states: dict[int, dict[tuple[int, int], LayerState]] = {}

    def run(self, layer: int, mixer: SteppedMixer, hidden_BTE: Tensor) -> Tensor:
        """Outputs of a layer, (B, T, E); those of pads are 0."""
        states = {(i, -1): row.before.get(layer, {}) for i, row in enumerate(self._rows)}
        self._states[layer] = states
        num_rows, num_tokens, width = hidden_BTE.shape
        order = self._order
        if len(order) == num_rows * num_tokens and self._is_sorted:
            hidden_N1E = hidden_BTE.reshape(-1, 1, width)
            return self._stepped(mixer, hidden_N1E, states).reshape(hidden_BTE.shape)
        output_BTE = torch.zeros_like(hidden_BTE, memory_format=torch.contiguous_format)
        for i, row in enumerate(self._rows):
            if row.num_read:
                cache = MixerCache(_joined([states[i, -1]]))
                read = mixer.read(hidden_BTE[i : i + 1, : row.num_read], cache)
                output_BTE[i, : row.num_read] = read[0]
                states[i, row.num_read - 1] = cache.states
        if order:
            places = [i * num_tokens + token for i, token in order]
            places_N = torch.tensor(places, device=hidden_BTE.device)
            hidden_N1E = hidden_BTE.reshape(-1, 1, width)[places_N]
            output_BTE.view(-1, 1, width)[places_N] = self._stepped(mixer, hidden_N1E, states)
        return output_BTE

    def _stepped(
        self, mixer: SteppedMixer, hidden_N1E: Tensor, states: dict[tuple[int, int], LayerState]
    ) -> Tensor:
        """Step through all levels: outputs, (N, 1, E); add each token's state to `states`."""
        if len(self._levels) == 1:  # nothing can be made together
            return self._step(self._levels[0], mixer.read, hidden_N1E, states)
        entered_N1F = mixer.enter(hidden_N1E)
        entered = entered_N1F.split([len(level) for level in self._levels])
        stepped = [
            self._step(level, mixer.step, own_N1F, states)
            for level, own_N1F in zip(self._levels, entered, strict=True)
        ]
        return mixer.leave(torch.cat(stepped))

    def _step(
        self,
        level: Sequence[tuple[int, int]],
        run: Callable[[Tensor, MixerCache], Tensor],
        inputs_N1F: Tensor,
        states: dict[tuple[int, int], LayerState],
    ) -> Tensor:
        cache = MixerCache(_joined([states[i, self._parent(i, token)] for i, token in level]))
        outputs = run(inputs_N1F, cache)
        if len(level) == 1:
            states[level[0]] = cache.states
            return outputs
        for n, place in enumerate(level):
            states[place] = {kind: state[n : n + 1] for kind, state in cache.states.items()}
        return outputs

    def after(self, row: int, token: int) -> TextState:
        """The states of all layers after a row's token, in tensors of their own."""
        return {
            layer: {kind: _own_copy(one) for kind, one in states[row, token].items()}
            for layer, states in self._states.items()
        }

    def _parent(self, row: int, token: int) -> int:
        return self._rows[row].parents[token - self._rows[row].num_read]

    @cached_property
    def _order(self) -> list[tuple[int, int]]:
        """(row, token) of all steps, one level after another."""
        return [place for level in self._levels for place in level]

    @cached_property
    def _is_sorted(self) -> bool:
        """Whether the order of the steps is also the order of the batch."""
        return self._order == sorted(self._order)

    @cached_property
    def _levels(self) -> list[list[tuple[int, int]]]:
        """(row, token) of the tokens of each step; a token is one step behind its parent."""
        levels: list[list[tuple[int, int]]] = []
        for i, row in enumerate(self._rows):
            depths = dict.fromkeys(range(-1, row.num_read), -1)
            for token, parent in enumerate(row.parents, start=row.num_read):
                depths[token] = depths[parent] + 1
                if depths[token] == len(levels):
                    levels.append([])
                levels[depths[token]].append((i, token))
        return levels


def _joined(states: Sequence[LayerState]) -> LayerState:
    """States of several texts in a batch; always a copy."""
    return {kind: torch.cat([state[kind] for state in states]) for kind in states[0]}


def _own_copy(state: Tensor) -> Tensor:
    """A copy where the tensor is a part of a larger one."""
    return state if state.untyped_storage().nbytes() == state.nbytes else state.clone()


def num_bytes(state: TextState) -> int:
    """Bytes of a text's states."""
    tensors = (one for layer in state.values() for one in layer.values())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
