"""Layers of hybrids: some attend, others keep a recurrent or convolution state.

Legend: B batch, T new tokens, E hidden size.
"""

import copy
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache

from moaspec.target.decoder_layers import WriteKV
from moaspec.target.generic.generic_layers import GenericLayers
from moaspec.target.generic.pass_cache import KVShape, PassCache
from moaspec.target.generic.recurrent_states import MixerCache, StepPass, SteppedWrite
from moaspec_core.errors import UnsupportedTargetError

UNLIMITED = (0.0, math.inf)
CACHE_NAMES = ("cache", "cache_params", "past_key_values")
"""Names of a mixer's cache argument; the last two before transformers 5.24."""
FIRST = frozenset({"q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj"})
LAST = frozenset({"out_proj", "o_proj"})
"""Names of projections of a mixer's input (others begin with "in_proj") and to its output."""


class HybridCache(PassCache):
    """A `PassCache` with the pass's `steps`; None for a pass over whole texts, as in training."""

    def __init__(self, write: WriteKV, shape: KVShape | None, num_visible: int) -> None:
        super().__init__(write, shape, num_visible)
        self.steps: StepPass | None = write.steps if isinstance(write, SteppedWrite) else None


class SteppedMixer(nn.Module):
    """Stands in for the mixer of a layer (the part with a state), and steps through drafts.

    The first and last projections are computed for the tokens of all steps together, which reads
    their weights once. In `step` transformers' module therefore gets the outputs of its first
    projections in place of its input, and its last projection is left out.

    Args:
        mixer: transformers' module, which is not changed.

    Attributes:
        batches: whether projections are computed together; False calls the whole module in each
            step, for modules that do more around their projections.
        can_batch: whether the module has projections of known names.
    """

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer
        name = _cache_name(mixer)
        assert name is not None, "a mixer takes a cache"
        self._cache_argument = name
        linears = {k: v for k, v in mixer.named_children() if isinstance(v, nn.Linear)}
        self._first = [v for k, v in linears.items() if k.startswith("in_proj") or k in FIRST]
        last = [name for name in linears if name in LAST]
        self.can_batch = self.batches = bool(self._first) and len(last) == 1
        if self.can_batch:
            widths = iter(_projection_slices([one.out_features for one in self._first]))
            replaced = {k: next(widths) for k, v in linears.items() if v in self._first}
            self._inner = _copy_with(mixer, replaced | {last[0]: nn.Identity()})
            self._last = linears[last[0]]

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        """Outputs of inputs, (B, T, E) each.

        Args:
            options: a `HybridCache`, and other arguments of transformers' module.
        """
        cache: HybridCache = options.pop(self._cache_argument)
        if cache.steps is None:
            return cast(
                Tensor, self.mixer(hidden_states, **{self._cache_argument: None}, **options)
            )
        return cache.steps.run(cast(int, self.mixer.layer_idx), self, hidden_states)

    def read(self, hidden_BTE: Tensor, cache: MixerCache) -> Tensor:
        """The whole module, for one or several tokens of each text, (B, T, E)."""
        return cast(Tensor, self.mixer(hidden_BTE, **{self._cache_argument: cache}))

    def enter(self, hidden_N1E: Tensor) -> Tensor:
        """The first projections, concatenated, (N, 1, F)."""
        if not self.batches:
            return hidden_N1E
        return torch.cat([linear(hidden_N1E) for linear in self._first], dim=-1)

    def step(self, entered_N1F: Tensor, cache: MixerCache) -> Tensor:
        """The module without these projections, for one token of each of N texts, (N, 1, G)."""
        inner = self._inner if self.batches else self.mixer
        return cast(Tensor, inner(entered_N1F, **{self._cache_argument: cache}))

    def leave(self, stepped_N1G: Tensor) -> Tensor:
        """The last projection, for the tokens of all steps: outputs, (N, 1, E)."""
        return cast(Tensor, self._last(stepped_N1G)) if self.batches else stepped_N1G


class _ProjectionSlice(nn.Module):
    """Stands in for a projection that was computed before: takes its part of the input."""

    def __init__(self, start: int, stop: int) -> None:
        super().__init__()
        self._start, self._stop = start, stop

    def forward(self, entered_N1F: Tensor) -> Tensor:
        return entered_N1F[..., self._start : self._stop]


def _projection_slices(widths: Sequence[int]) -> list[_ProjectionSlice]:
    stops = list(accumulate(widths))
    return [_ProjectionSlice(stop - width, stop) for width, stop in zip(widths, stops, strict=True)]


class HybridLayers(GenericLayers):
    """`GenericLayers` of a hybrid.

    Args:
        base: transformers' text model without its head; it is not changed.

    Attributes:
        continues: whether its layers can read several tokens in one call from a state, which the
            self-test tries. Mamba 1 of transformers cannot: it steps through these tokens.
        steps_differ: whether a step differs from reading by more than rounding: transformers
            limits the time steps of Nemotron-H and Zamba 2 in the one and not in the other.
    """

    def __init__(self, base: Any) -> None:
        super().__init__(_stepped(base))
        self.mixers = [
            module for module in self._base.modules() if isinstance(module, SteppedMixer)
        ]
        self.cache_class = HybridCache
        self.continues = False
        limits = [getattr(mixer, "time_step_limit", None) for mixer in mixers(base)]
        self.steps_differ = any(limit is not None and tuple(limit) != UNLIMITED for limit in limits)

    def measure(self, token_ids_1T: Tensor) -> KVShape:
        """See `GenericLayers`; also refuses layers whose states are not in transformers' cache."""
        if not hasattr(Cache, "get_recurrent_state"):
            raise UnsupportedTargetError("hybrids need transformers 5.22 or newer")
        if not self.mixers:
            raise UnsupportedTargetError(
                "its layers with states do not keep these in transformers' cache"
            )
        return super().measure(token_ids_1T)

    @property
    def reads_whole(self) -> bool:
        """Whether a prompt must be read in one pass, and from its start."""
        return self.steps_differ or not self.continues

    def padding(self, position_ids_BT: Tensor, write: WriteKV) -> Tensor | None:
        """False for pads to the left of a text, which must not enter its states, (B, T).

        These have the position of the text's first token. Passes with steps skip all pads. None
        on the meta device too, where transformers cannot look for pads.
        """
        if position_ids_BT.is_meta or isinstance(write, SteppedWrite):
            return None
        return F.pad(position_ids_BT[:, 1:] != 0, (0, 1), value=True)


def mixers(base: nn.Module) -> Iterator[nn.Module]:
    """The modules that keep a state: modules of a layer with a convolution of their own."""
    return (module for module in base.modules() if _is_mixer(module))


def _is_mixer(module: nn.Module) -> bool:
    convolves = any(isinstance(child, nn.Conv1d) for child in module.children())
    return convolves and hasattr(module, "layer_idx") and _cache_name(module) is not None


def _cache_name(module: nn.Module) -> str | None:
    """The name of the module's cache argument; None if it has none."""
    names = inspect.signature(type(module).forward).parameters
    return next((name for name in CACHE_NAMES if name in names), None)


def _stepped(module: nn.Module) -> nn.Module:
    """A copy with stepped mixers that shares the rest; the module itself if it has no mixer."""
    if _is_mixer(module):
        return SteppedMixer(module)
    changed = {
        name: new
        for name, child in module.named_children()
        if (new := _stepped(child)) is not child
    }
    return _copy_with(module, changed) if changed else module


def _copy_with(module: nn.Module, children: Mapping[str, nn.Module]) -> nn.Module:
    """A copy with some children replaced; it shares the weights."""
    copied = copy.copy(module)
    vars(copied)["_modules"] = {**module._modules, **children}
    return copied
