"""What a session needs to know of the device, and the one that has the target at hand."""

from __future__ import annotations

from typing import Any, Protocol

from moaspec.drafting.fast_moa_proposer import FastMoAProposer
from moaspec.drafting.kv_cache import KVCache
from moaspec.drafting.protocols import Drafter
from moaspec.model.drafter_config import TargetIdentity
from moaspec.model.moa import MoADrafter
from moaspec.remote.protocol.identity import fingerprint
from moaspec.target.generation_defaults import GenerationDefaults
from moaspec.target.target import Target


class Device(Protocol):
    """The drafting side: a device bundle, or a target in the same process.

    Attributes:
        identity: of the target that is drafted for.
        fingerprint: of the drafter; None where it needs no activations.
        vocab_size, max_positions, rope_switches, rope_growth, stop_token_ids,
        generation_defaults: the target's.
        tokenizer: the target's, of transformers, or None.
    """

    @property
    def identity(self) -> TargetIdentity: ...
    @property
    def fingerprint(self) -> str | None: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def rope_switches(self) -> tuple[int, ...]: ...
    @property
    def rope_growth(self) -> int | None: ...
    @property
    def stop_token_ids(self) -> frozenset[int]: ...
    @property
    def generation_defaults(self) -> GenerationDefaults: ...
    @property
    def tokenizer(self) -> Any: ...

    def drafting(self, num_target_layers: int | None) -> Drafter:
        """A drafter for one session, with caches of its own.

        A `MoAProposer` with N > 0 has also borrowed one that the last layers are placed in.
        """
        ...


class LocalDevice:
    """A device that holds the whole target, of which it uses what a bundle would hold.

    Args:
        target: whose embedding, head and last layers are used.
        drafter: drafts; any `Drafter` that needs no activations will do too, for one session.
    """

    def __init__(self, target: Target, drafter: MoADrafter | Drafter) -> None:
        self.target, self._drafter = target, drafter
        self.identity = target.identity
        trained = isinstance(drafter, MoADrafter)
        self.fingerprint = fingerprint(drafter) if trained else None  # type: ignore[arg-type]
        self.vocab_size, self.max_positions = target.vocab_size, target.max_positions
        self.rope_switches, self.stop_token_ids = target.rope_switches, target.stop_token_ids
        self.rope_growth, self.tokenizer = target.rope_growth, target.tokenizer
        self.generation_defaults = target.generation_defaults

    def drafting(self, num_target_layers: int | None) -> Drafter:
        """See `Device`."""
        if not isinstance(self._drafter, MoADrafter):
            return self._drafter
        drafting = FastMoAProposer(self._drafter, self.target, num_target_layers=num_target_layers)
        if drafting.num_target_layers:
            drafting.share_target_cache(KVCache.of(self.target))
        return drafting
