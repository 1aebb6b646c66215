"""An exponential average of a drafter's weights, which drafts better than the last ones."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

EARLY_STEPS = 10
"""The first averages reach back this part of the steps so far, so that they follow fast learning:
step s has the weight EARLY_STEPS / (EARLY_STEPS + s), until that is below that of the average."""


UPDATES = "updates"
"""Name of their number in a saved state."""


class WeightAverage:
    """The average of the parameters that learn.

    Args:
        steps: that it reaches back, roughly.
    """

    def __init__(self, module: nn.Module, steps: int) -> None:
        self._steps, self._updates = steps, 0
        self._learning = {
            name: parameter
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        self.values = {name: one.detach().clone() for name, one in self._learning.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights after a step."""
        self._updates += 1
        weight = max(1 / self._steps, EARLY_STEPS / (EARLY_STEPS + self._updates))
        for name, value in self.values.items():
            value.lerp_(self._learning[name].detach(), weight)

    def state(self) -> dict[str, Tensor]:
        """What `restore` goes on from: the values, and how often they were updated."""
        return {**self.values, UPDATES: torch.tensor(self._updates)}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a saved state; from the module's weights where that has no average."""
        for name, parameter in self._learning.items():
            self.values[name].copy_(state.get(name, parameter.detach()))
        self._updates = int(state.get(UPDATES, 0))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The module has the average as its weights."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, parameter in self._learning.items():
            last = parameter.detach().clone()
            parameter.copy_(self.values[name])
            self.values[name] = last
