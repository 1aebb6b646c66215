"""A drafter of PyTorch on a device, and a device with the whole target."""

from typing import Any

import torch
from torch import Tensor

from moaspec.backends.fast_moa_proposer import FastMoAProposer
from moaspec.drafting.kv_cache import KVCache
from moaspec.model.checkpoint.moa_checkpoint import fingerprint
from moaspec.model.moa import MoADrafter
from moaspec.target.target import Target
from moaspec_core.drafting.protocols import Proposer
from moaspec_edge.device.device_parts import Device, DeviceProposer
from moaspec_edge.protocol.activation_layout import ActivationLayout, Activations
from moaspec_edge.protocol.codec import CodecName, Floats


class DeviceMoAProposer(FastMoAProposer, DeviceProposer):
    """A `MoAProposer` whose activations come from a server.

    With N > 0 it has a cache for the target's last layers.
    """

    def __init__(
        self, drafter: MoADrafter, target: Any, *, num_target_layers: int | None = None
    ) -> None:
        super().__init__(drafter, target, num_target_layers=num_target_layers)
        if self.num_target_layers:
            self.share_target_cache(KVCache(target))

    def layout(self, codec: CodecName) -> ActivationLayout:
        config = self.module.config
        return ActivationLayout.of(config, codec, self.num_target_layers, self.target.head_dim)

    def place_activations(self, row: int, start: int, activations: Activations) -> None:
        key_1CTD, value_1CTD = (self._tensor(part)[None] for part in activations[:2])
        stop = start + key_1CTD.shape[2]
        self.memory.append(row, start, key_1CTD, value_1CTD)
        if activations.layers_2NHTD is not None:
            assert self.target_cache is not None, "share_target_cache() comes before last layers"
            self.target_cache.append(row, start, *self._tensor(activations.layers_2NHTD))
        num_encoded = self.num_encoded.get(row, 0)
        if start > num_encoded or row in self.missing:
            missing = self.missing.get(row, set()) | set(range(num_encoded, start))
            self.missing[row] = missing.difference(range(start, stop))
        self.num_encoded[row] = max(num_encoded, stop)

    def _tensor(self, values: Floats) -> Tensor:
        return torch.from_numpy(values).to(dtype=self.target.dtype, device=self.device)


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
        if isinstance(self._drafter, MoADrafter):
            return DeviceMoAProposer(
                self._drafter, self.target, num_target_layers=num_target_layers
            )
        return self._drafter
