from moaspec.model.checkpoint.moa_checkpoint import fingerprint
from moaspec.remote.device.device_parts import Device
from moaspec.remote.device.events import LinkStats, RemoteEvent, RoundTrip
from moaspec.remote.device.link import LinkOptions
from moaspec.remote.device.local_parts import LocalDevice
from moaspec.remote.device.remote_session import RemoteOptions, RemoteSession
from moaspec.remote.device.server_text import RemoteText
from moaspec.remote.protocol.fleet import Fleet
from moaspec.remote.protocol.transport import Connection, InProcessTransport, Transport
from moaspec.remote.protocol.websocket_transport import WebSocketTransport
from moaspec.remote.server.auth import CallAuth, Credentials, server_tls
from moaspec.remote.server.listeners.websocket_server import ServerOptions, TargetServer
from moaspec.remote.server.service import ServiceOptions, TargetService
from moaspec.remote.server.session_store import StoreOptions
from moaspec.remote.server.shared_verifier import PassOptions

__all__ = [
    "CallAuth",
    "Connection",
    "Credentials",
    "Device",
    "Fleet",
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
    "TargetServer",
    "TargetService",
    "Transport",
    "WebSocketTransport",
    "fingerprint",
    "server_tls",
]
