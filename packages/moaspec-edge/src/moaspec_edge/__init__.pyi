from moaspec.model.checkpoint.moa_checkpoint import fingerprint
from moaspec_edge.device.device_parts import Device
from moaspec_edge.device.events import LinkStats, RemoteEvent, RoundTrip
from moaspec_edge.device.local_parts import LocalDevice
from moaspec_edge.device.remote_session import RemoteOptions, RemoteSession
from moaspec_edge.device.server_text import RemoteText
from moaspec_edge.protocol.fleet import Fleet
from moaspec_edge.protocol.transport import Connection, InProcessTransport, Transport
from moaspec_edge.protocol.websocket_transport import WebSocketTransport
from moaspec_edge.server.auth import CallAuth, Credentials, server_tls
from moaspec_edge.server.listeners.websocket_server import ServerOptions, TargetServer
from moaspec_edge.server.service import ServiceOptions, TargetService
from moaspec_edge.server.session_store import StoreOptions
from moaspec_edge.server.shared_verifier import PassOptions

__all__ = [
    "CallAuth",
    "Connection",
    "Credentials",
    "Device",
    "Fleet",
    "InProcessTransport",
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
