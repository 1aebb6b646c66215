"""What commands, servers and devices read of a target. Needs no PyTorch."""

from typing import Protocol

from moaspec_core.checkpoint.drafter_config import TargetIdentity
from moaspec_core.engine.position_rules import TargetFacts
from moaspec_core.sampling.generation_defaults import GenerationDefaults


class DeviceTarget(TargetFacts, Protocol):
    """Facts of the target that a device drafts for, from the target itself or from a bundle."""

    @property
    def name(self) -> str: ...
    @property
    def identity(self) -> TargetIdentity: ...
    @property
    def stop_token_ids(self) -> frozenset[int]: ...
    @property
    def generation_defaults(self) -> GenerationDefaults: ...
