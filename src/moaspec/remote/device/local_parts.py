"""The device of a session, and a device with the whole target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from moaspec.drafting.fast_moa_proposer import FastMoAProposer
from moaspec.drafting.kv_cache import KVCache
from moaspec.drafting.protocols import Drafter
from moaspec.model.drafter_config import TargetIdentity
from moaspec.model.moa import MoADrafter
from moaspec.remote.protocol.identity import fingerprint
from moaspec.target.generation_defaults import GenerationDefaults
from moaspec.target.partial import PartialTarget
from moaspec.target.target import Target


class Device(ABC):
    """What a session needs of a device: a drafter, and facts about the target that it drafts for.

    Attributes:
        target: a whole target, or the parts of it in a device bundle.
    """

    target: Target | PartialTarget

    @property
    @abstractmethod
    def identity(self) -> TargetIdentity:
        """Identity of the target that the server must have."""

    @property
    @abstractmethod
    def fingerprint(self) -> str | None:
        """Of the drafter whose encoder the server must have; None where none is needed."""

    @abstractmethod
    def drafting(self, num_target_layers: int | None) -> Drafter:
        """Make a drafter for one session, with caches of its own.

        A `MoAProposer` with N > 0 has a cache for the target's last layers.
        """

    @property
    def vocab_size(self) -> int:
        """V of the target."""
        return self.target.vocab_size

    @property
    def max_positions(self) -> int:
        """The target's context, in tokens."""
        return self.target.max_positions

    @property
    def rope_switches(self) -> tuple[int, ...]:
        """Lengths at which all keys of a text change; see `Target.rope_switches`."""
        return self.target.rope_switches

    @property
    def rope_growth(self) -> int | None:
        """Growth of a text that changes all keys; see `Target.rope_growth`."""
        return self.target.rope_growth

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Ids that end a turn."""
        return self.target.stop_token_ids

    @property
    def generation_defaults(self) -> GenerationDefaults:
        """The target's defaults of sampling."""
        return self.target.generation_defaults

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer of transformers, or None."""
        return self.target.tokenizer


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
        drafter: drafts; any `Drafter` that needs no activations will do too, for one session.
    """

    target: Target

    def __init__(self, target: Target, drafter: MoADrafter | Drafter) -> None:
        self.target, self._drafter = target, drafter
        self._fingerprint = fingerprint(drafter) if isinstance(drafter, MoADrafter) else None

    @property
    def identity(self) -> TargetIdentity:
        """Identity of the whole target."""
        return self.target.identity

    @property
    def fingerprint(self) -> str | None:
        """Of the drafter, if it has an encoder."""
        return self._fingerprint

    def drafting(self, num_target_layers: int | None) -> Drafter:
        """Make a drafter for one session; see `Device`."""
        if isinstance(self._drafter, MoADrafter):
            return make_moa_proposer(self._drafter, self.target, num_target_layers)
        return self._drafter
