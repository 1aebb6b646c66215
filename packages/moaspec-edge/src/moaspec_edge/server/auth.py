"""Authentication of devices and servers."""

from __future__ import annotations

import hashlib
import hmac
import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moaspec_core.checkpoint.user_files import MAX_JSON_BYTES, read_limited
from moaspec_core.errors import InputError, RefusedError
from moaspec_core.support.causes import system_reason

ANONYMOUS = "anonymous"
"""The owner of all sessions if clients have neither tokens nor certificates."""

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
"""Connections to these hosts stay on this machine and need no TLS."""


class UnknownClientError(RefusedError):
    """The credentials of a client are missing, unknown or expired."""


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """Credentials of a device.

    Attributes:
        token: bearer token; needs TLS, unless the server is on this machine.
        ca: file with the CA certificates of the server's certificate; None connects without TLS,
            "system" trusts the CAs of this system.
        certificate, key: files of the device's certificate, for servers that require one.
        server_name: name in the server's certificate, if it differs from the address.
    """

    token: str | None = None
    ca: Path | str | None = None
    certificate: Path | None = None
    key: Path | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise InputError("A certificate comes with its key; got only one of the two.")
        if self.certificate is not None and self.ca is None:
            raise InputError("A device's certificate needs TLS: name the server's ca, or 'system'.")
        if self.token is not None and not (self.token.isascii() and self.token.isprintable()):
            raise InputError("A token must be one line of printable ASCII characters.")

    def check(self, address: str) -> None:
        """Refuse to send a token without encryption.

        Args:
            address: host:port of the server.

        Raises:
            InputError: a token without TLS for a server that is not on this machine.
        """
        host = address.rpartition(":")[0].strip("[]")
        if self.token is not None and self.ca is None and host not in LOCAL_HOSTS:
            raise InputError(
                f"A token for {address} would travel in the clear. Connect with TLS: name the "
                "server's ca, or 'system'."
            )

    def tls(self) -> ssl.SSLContext | None:
        """Settings of TLS; None without.

        Raises:
            InputError: a file cannot be read or is invalid.
        """
        if self.ca is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            if str(self.ca) == "system":
                context.load_default_certs()
            else:
                context.load_verify_locations(self.ca)
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.key, password=lambda: b"")
        except (ssl.SSLError, OSError) as error:
            files = ", ".join(str(one) for one in (self.ca, self.certificate, self.key) if one)
            raise InputError(f"Cannot use {files} for TLS: {error.strerror or error}.") from error
        return context


@dataclass
class CallAuth:
    """Identifies the owner of a connection.

    Args:
        tokens: owners by the SHA-256 of their bearer tokens, 64 lower-case hexadecimal digits. None
            accepts everybody, an empty mapping nobody.
        until_s: seconds since the epoch at which an owner's tokens expire.
        max_sessions: of owners that may have more or fewer sessions than others.
    """

    tokens: Mapping[str, str] | None = None
    until_s: Mapping[str, float] = field(default_factory=dict)
    max_sessions: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def read(path: Path) -> CallAuth:
        """Read `{"owner": {"sha256": "...", "expires": seconds since the epoch}}`.

        `expires` may be left out; `max_sessions` may be added.

        Raises:
            InputError: not such a file, or one without any token.
        """
        # Imported here: devices do without.
        from pydantic import BaseModel, Field, FiniteFloat, PositiveInt, TypeAdapter

        from moaspec.data.rows import unique_keys

        class Entry(BaseModel, strict=True, extra="forbid"):
            sha256: str = Field(pattern="^[0-9a-fA-F]{64}$")
            expires: FiniteFloat | None = None
            max_sessions: PositiveInt | None = None

        text = _read(path)
        try:
            given = json.loads(text, object_pairs_hook=unique_keys)
            entries = TypeAdapter(dict[str, Entry]).validate_python(given)
        except (ValueError, RecursionError) as error:
            raise InputError(
                f'{path} must hold {{"owner": {{"sha256": "<of the token>"}}, ...}}: '
                f"{_first_cause(error)}."
            ) from error
        if not entries:
            raise InputError(
                f"{path} holds no token, so nobody could connect. Add one, or let everybody in by "
                "giving no file."
            )
        owners = {entry.sha256.lower(): owner for owner, entry in entries.items()}
        if len(owners) < len(entries):
            raise InputError(f"{path} has the same token for several owners. Give each its own.")
        until = {n: entry.expires for n, entry in entries.items() if entry.expires is not None}
        most = {
            n: entry.max_sessions for n, entry in entries.items() if entry.max_sessions is not None
        }
        return CallAuth(owners, until, most)

    def owner(self, bearer: str | None, peer: str | None) -> str:
        """Find the owner of a connection.

        Args:
            bearer: the token that was sent.
            peer: name in the device's certificate, if TLS has verified one.

        Raises:
            UnknownClientError: the token is missing, unknown or expired.
        """
        if self.tokens is None:
            return peer or ANONYMOUS
        digest = hashlib.sha256((bearer or "").encode()).hexdigest()
        for known, owner in self.tokens.items():
            if hmac.compare_digest(known.encode(), digest.encode()):
                if time.time() > self.until_s.get(owner, float("inf")):
                    raise UnknownClientError("The token has expired; get a new one.")
                return owner
        raise UnknownClientError("No token, or one that this server does not know.")


def _first_cause(error: Exception) -> str:
    """What is wrong first, and where; in one line."""
    if not hasattr(error, "errors"):
        return str(error)
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'all'}: {first['msg']}"


def _read(path: Path) -> bytes:
    try:
        return read_limited(path, MAX_JSON_BYTES)
    except (OSError, ValueError) as error:
        raise InputError(f"Cannot read {path}: {system_reason(error)}.") from error


def server_tls(certificate: Path, key: Path, client_ca: Path | None = None) -> ssl.SSLContext:
    """TLS settings of a server; with `client_ca`, devices need a certificate signed by it.

    Raises:
        InputError: a file cannot be read or is invalid.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password=lambda: b"")
    except (ssl.SSLError, OSError) as error:
        raise InputError(
            f"{certificate} and {key} are no certificate chain and its private key, in PEM and "
            f"without a password: {error.strerror or error}."
        ) from error
    if client_ca is None:
        return context
    try:
        context.load_verify_locations(client_ca)
    except (ssl.SSLError, OSError) as error:
        raise InputError(f"{client_ca} holds no CA certificates: {error.strerror}.") from error
    context.verify_mode = ssl.CERT_REQUIRED
    return context
