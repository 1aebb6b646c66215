"""What commands, servers and devices read of a target. Needs no PyTorch."""

from typing import Protocol

from moaspec_core.checkpoint.drafter_config import TargetIdentity
from moaspec_core.engine.position_rules import TargetInfo
from moaspec_core.sampling.generation_defaults import GenerationDefaults


class DeviceTarget(TargetInfo, Protocol):
    """What a device knows of the target that it drafts for, by the target or by a bundle."""

    @property
    def name(self) -> str: ...
    @property
    def identity(self) -> TargetIdentity: ...
    @property
    def stop_token_ids(self) -> frozenset[int]: ...
    @property
    def generation_defaults(self) -> GenerationDefaults: ...
