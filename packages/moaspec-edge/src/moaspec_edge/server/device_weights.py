"""The weights of a drafter version, packed for devices."""

import asyncio
import logging

import safetensors.torch

from moaspec.model.checkpoint.moa_checkpoint import device_part
from moaspec.model.moa import MoADrafter
from moaspec_core.errors import InputError

log = logging.getLogger("moaspec.server.device_weights")


class DeviceWeights:
    """The device's part of the newest version, in each form that a device has asked for."""

    def __init__(self) -> None:
        self._version = ""
        self._made: dict[str, asyncio.Future[bytes]] = {}
        self._told = False

    async def of(self, drafter: MoADrafter, version: str, packing: str) -> bytes:
        """The bytes of a version in a form, see `DescribeRequest`; none in an unknown one.

        They are made once for all devices.
        """
        if self._version != version:
            self._version, self._made = version, {}
        if packing not in self._made:
            making = self._make(drafter, packing, self._made)
            self._made[packing] = asyncio.ensure_future(making)
        return await asyncio.shield(self._made[packing])

    async def _make(
        self, drafter: MoADrafter, packing: str, made: dict[str, asyncio.Future[bytes]]
    ) -> bytes:
        data = b""
        try:
            data = await asyncio.to_thread(self._packed, drafter, packing)
        finally:
            if not data:  # devices may ask for any number of unknown forms
                del made[packing]
        return data

    def _packed(self, drafter: MoADrafter, packing: str) -> bytes:
        if not packing:
            return safetensors.torch.save(device_part(drafter))
        reason = "unknown"
        try:
            from moaspec_edge.device_onnx.onnx_bundle import packed_version

            found = packed_version(drafter, packing)
        except ModuleNotFoundError as error:
            found, reason = None, f"the package {error.name} is not installed"
        except InputError as error:
            found, reason = None, str(error)
        if found is None and not self._told:
            self._told = True
            log.warning(
                "A device asked for drafter weights packed as %.40r; none were sent: %s.",
                packing,
                reason,
            )
        return found or b""
