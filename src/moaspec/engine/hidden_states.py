"""Final states of verified tokens, for drafters that read these instead of keys and values.

Legend: T tokens, E hidden size.
"""

import torch
from torch import Tensor


class HiddenStates:
    """The states of each cache row that were not encoded yet."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, Tensor]] = {}

    def add(self, row: int, position: int, states_TE: Tensor) -> None:
        """Keep the states of the tokens from a position on; they replace older ones there."""
        start, held = self._held.get(row, (position, None))
        if held is None or position <= start:
            self._held[row] = (position, states_TE)
        else:
            self._held[row] = (start, torch.cat((held[: position - start], states_TE)))

    def pop(self, row: int) -> Tensor:
        return self._held.pop(row)[1]

    def clear(self) -> None:
        self._held.clear()
