"""Devices of a set speed and of a set agreement, around a real bundle."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from moaspec.drafting.other_proposers.oracle_proposer import OracleProposer
from moaspec_core.drafting.draft_tree import DraftTree, Tree
from moaspec_core.drafting.protocols import Proposer, RequestText
from moaspec_edge.device.device_parts import Device


class SlowedDevice(Device):
    """A device whose draft steps take at least a set time.

    On one machine, device and server are equally fast. Slowing one down sets their ratio, which is
    then the same on a busy machine as on an idle one.

    Args:
        inner: the real device.
        step_s: least seconds per drafted level.
        replay: makes a drafter without activations that replaces the device's.
    """

    def __init__(
        self, inner: Device, step_s: float, replay: Callable[[], OracleProposer] | None = None
    ) -> None:
        self._inner, self._step_s, self._replay = inner, step_s, replay
        self.steps = Steps()
        self.target = inner.target
        self.fingerprint = None if replay is not None else inner.fingerprint

    def drafting(self, num_target_layers: int | None) -> Proposer:
        """See `Device`: the inner device's drafter, slowed down."""
        drafter: Any = (
            self._inner.drafting(num_target_layers) if self._replay is None else self._replay()
        )
        propose = drafter.propose

        def slowed(rows: Sequence[RequestText], shape: Tree) -> list[DraftTree]:
            started = time.perf_counter()
            trees: list[DraftTree] = propose(rows, shape)
            took = time.perf_counter() - started
            missing = self._step_s * shape.depth - took
            if missing > 0:
                # The thread sleeps, as it would compute: nothing else happens on the device.
                time.sleep(missing)
            self.steps.add(time.perf_counter() - started, shape.depth)
            return trees

        # The very object is kept: a session treats drafters with activations by their class.
        drafter.propose = slowed
        found: Proposer = drafter
        return found


class Steps:
    """How long draft steps took."""

    def __init__(self) -> None:
        self.seconds, self.count = 0.0, 0

    def add(self, seconds: float, depth: int) -> None:
        """Take in one proposal."""
        self.seconds += seconds
        self.count += depth

    @property
    def mean_s(self) -> float:
        """Of one step; 0 before the first."""
        return self.seconds / self.count if self.count else 0.0
