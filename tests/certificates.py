"""Certificates of this machine and of devices, for tests of TLS."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Authority:
    """Signs certificates for this machine and for devices."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory, self._name = directory, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.ca = directory / f"{name}.pem"
        self._issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.ca.write_bytes(self._signed(self._issuer, self._key, ca=True))

    def certificate(self, common_name: str) -> tuple[Path, Path]:
        """Files with a certificate and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
        stem = self._directory / f"{self._name}-{common_name}"
        stem.with_suffix(".crt").write_bytes(self._signed(subject, key, ca=False))
        stem.with_suffix(".key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return stem.with_suffix(".crt"), stem.with_suffix(".key")

    def _signed(self, subject: x509.Name, key: Any, *, ca: bool) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        names = [x509.DNSName(one) for one in ("localhost", "name")]
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
        )
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
