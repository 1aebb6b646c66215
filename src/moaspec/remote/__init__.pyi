from moaspec.remote.alone import RemoteText
from moaspec.remote.auth import Credentials, Guard, server_credentials
from moaspec.remote.client import RemoteOptions, RemoteSession
from moaspec.remote.device import Device, LocalDevice
from moaspec.remote.events import LinkStats, RemoteEvent, RoundTrip
from moaspec.remote.grpc_transport import GrpcTransport
from moaspec.remote.identity import fingerprint
from moaspec.remote.link import LinkOptions
from moaspec.remote.server import GrpcServer, ServerOptions
from moaspec.remote.service import ServiceOptions, TargetService
from moaspec.remote.shared import PassOptions
from moaspec.remote.store import StoreOptions
from moaspec.remote.transport import Connection, InProcessTransport, Transport

__all__ = [
    "Connection",
    "Credentials",
    "Device",
    "GrpcServer",
    "GrpcTransport",
    "Guard",
    "InProcessTransport",
    "LinkOptions",
    "LinkStats",
    "LocalDevice",
    "PassOptions",
    "RemoteEvent",
    "RemoteOptions",
    "RemoteSession",
    "RemoteText",
    "RoundTrip",
    "ServerOptions",
    "ServiceOptions",
    "StoreOptions",
    "TargetService",
    "Transport",
    "fingerprint",
    "server_credentials",
]
