"""Client-server: the speaker on the device, encoder and target on a server."""

from moaspec.remote.client import RemoteOptions, RemoteSession
from moaspec.remote.device import Device, LocalDevice
from moaspec.remote.events import LinkStats, RemoteEvent, RoundTrip
from moaspec.remote.identity import fingerprint
from moaspec.remote.link import LinkOptions
from moaspec.remote.service import ServiceOptions, TargetService
from moaspec.remote.shared import PassOptions
from moaspec.remote.store import StoreOptions
from moaspec.remote.transport import Connection, InProcessTransport, Transport

__all__ = [
    "Connection",
    "Device",
    "InProcessTransport",
    "LinkOptions",
    "LinkStats",
    "LocalDevice",
    "PassOptions",
    "RemoteEvent",
    "RemoteOptions",
    "RemoteSession",
    "RoundTrip",
    "ServiceOptions",
    "StoreOptions",
    "TargetService",
    "Transport",
    "fingerprint",
]
