"""The device of a session, and a device with the whole target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from moaspec.drafting.fast_moa_proposer import FastMoAProposer
from moaspec.drafting.kv_cache import KVCache
from moaspec.drafting.protocols import Proposer
from moaspec.model.moa import MoADrafter
from moaspec.remote.protocol.identity import fingerprint
from moaspec.target.partial import PartialTarget
from moaspec.target.target import Target


class Device(ABC):
    """What a session needs of a device.

    Attributes:
        target: a whole target, or the parts of it in a device bundle.
        fingerprint: of the drafter whose encoder the server must have; None where none is needed.
    """

    target: Target | PartialTarget
    fingerprint: str | None

    @abstractmethod
    def drafting(self, num_target_layers: int | None) -> Proposer:
        """Make a drafter for one session, with caches of its own.

        A `MoAProposer` with N > 0 has a cache for the target's last layers.
        """


def make_moa_proposer(
    module: MoADrafter, target: Any, num_target_layers: int | None
) -> FastMoAProposer:
    """Make a proposer, with a cache for the target's last layers where it reuses some."""
    proposer = FastMoAProposer(module, target, num_target_layers=num_target_layers)
    if proposer.num_target_layers:
        proposer.share_target_cache(KVCache.of(target))
    return proposer


class LocalDevice(Device):
    """A device that holds the whole target and uses the parts that a bundle would hold.

    Args:
        target: whose embedding, head and last layers are used.
        drafter: drafts; any `Proposer` that needs no activations will do too, for one session.
    """

    target: Target

    def __init__(self, target: Target, drafter: MoADrafter | Proposer) -> None:
        self.target, self._drafter = target, drafter
        self.fingerprint = fingerprint(drafter) if isinstance(drafter, MoADrafter) else None

    def drafting(self, num_target_layers: int | None) -> Proposer:
        """Make a drafter for one session; see `Device`."""
        if isinstance(self._drafter, MoADrafter):
            return make_moa_proposer(self._drafter, self.target, num_target_layers)
        return self._drafter
