"""Options of the device commands: bundle, server address, credentials, link policy."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from moaspec_core.bundled import bundled_drafters
from moaspec_core.cli import options
from moaspec_core.cli.terminal.status import status
from moaspec_core.errors import InputError
from moaspec_core.support.extras import has_torch, install_command, require
from moaspec_core.support.paths import require_writable, trusted
from moaspec_core.support.ports import server_url
from moaspec_edge.device_onnx.manifest import is_onnx_bundle

if TYPE_CHECKING:
    from moaspec_core.privacy.vault import Vault
    from moaspec_edge.device.device_parts import Device
    from moaspec_edge.device.remote_session import RemoteOptions
    from moaspec_edge.protocol.fleet import Fleet

SERVER = "127.0.0.1:50051"


@dataclass(frozen=True)
class DeviceOptions:
    """Options of a device: its bundle, its server and the link between them."""

    server: Annotated[
        str,
        "Address of `moaspec target-server`: ws://HOST:PORT, or wss://HOST:PORT with TLS; "
        "HOST:PORT is the one or, with --ca, the other; several with commas between.",
    ] = SERVER
    bundle: Annotated[
        Path | None,
        "Device bundle directory; default: made once, of --model and its bundled drafter.",
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            help="Target with a bundled drafter; default: smollm2-135m. With --bundle only "
            "`moaspec edge` takes it, as the model's name; default: the directory's."
        ),
    ] = None
    on_cut: Annotated[
        Literal["rollback", "keep", "wait"],
        "While the link is down: rollback (write on, correct later), keep (write on, "
        "correct nothing) or wait.",
    ] = "rollback"
    codec: Annotated[Literal["fp16", "int8", "int4"], "Encoding of activations on the link."] = (
        "int8"
    )
    tree: options.Shape = "auto"
    num_target_layers: Annotated[
        int | None, "N: drafts also pass the target's last N layers; default: the drafter's."
    ] = None
    give_up_s: Annotated[
        float | None,
        typer.Option(help="Fail after this many seconds without an answer; default: never.", min=0),
    ] = None
    recognise: Annotated[bool, "Hide e-mail addresses, phone and card numbers, and IBANs."] = True
    phone_region: Annotated[
        list[str] | None,
        "Country whose national phone numbers are hidden, as DE; may be given several "
        "times; default: US.",
    ] = None
    token_file: Annotated[
        Path | None, "File with the token for the server; also $MOASPEC_TOKEN."
    ] = None
    ca: Annotated[
        str | None,
        "TLS: PEM file of the CA that signed the server's certificate, or system for this "
        "machine's CAs; default: no TLS, or system with wss://.",
    ] = None
    certificate: Annotated[Path | None, "Certificate of this device, PEM."] = None
    key: Annotated[Path | None, "Private key of --certificate, PEM."] = None
    threads: options.Threads = None

    def check(self, command: str) -> None:
        """Refuse, before anything is loaded, missing extras and options that cannot be read.

        Raises:
            InputError: names the extra or the option.
        """
        if self.recognise:
            require(command, "moaspec-core[private]")
        if self.needs_torch and not has_torch():
            found = self.bundle and f"; {self.bundle} is none, or its manifest.json is damaged"
            raise InputError(
                f"PyTorch is not installed, so --bundle must name an ONNX bundle{found or ''}. "
                "`moaspec checkpoint export-device TARGET DRAFTER DIR --format onnx` makes one, on "
                "a machine that has it."
            )
        _ = self.servers  # refuses addresses that are none
        if self.tree != "auto":
            # Imported here: it imports NumPy.
            from moaspec_core.drafting.tree_shapes import parse_shape

            parse_shape(self.tree)
        self.vault().hide("")  # refuses unknown phone regions
        ca = None if self.ca is None or self.ca == "system" else Path(self.ca)
        files = {"--ca": ca, "--certificate": self.certificate, "--key": self.key}
        for option, path in files.items():
            if path is not None:
                options.read_file(option, path)

    @property
    def name(self) -> str:
        """The bundle or, without one, the model."""
        return str(self.bundle or self.served)

    @property
    def served(self) -> str:
        """The model's name: --model, or that of the bundle's directory."""
        bundle = None if self.bundle is None else Path(os.path.abspath(self.bundle)).name  # noqa: PTH100 - keeps links
        return self.model or bundle or options.MODEL

    @property
    def servers(self) -> list[str]:
        """The URLs of the servers that --server names; InputError for one that is none."""
        tls = self.ca is not None
        return [server_url(one.strip(), tls=tls) for one in self.server.split(",")]

    def remote_options(self, prefix_dir: Path | None = None) -> RemoteOptions:
        """How a session uses its link; InputError as of `RemoteOptions`."""
        # Imported here, because most commands need no protobuf; below for the same reason.
        from moaspec_edge.device.remote_session import RemoteOptions

        if prefix_dir is not None:
            require_writable("--prefix-dir", prefix_dir)
        names = ("codec", "num_target_layers", "on_cut", "give_up_s")
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        return RemoteOptions(draft=self.tree, prefix_dir=prefix_dir, **given)

    def vault(self) -> Vault:
        from moaspec_core.privacy.recognisers import default
        from moaspec_core.privacy.vault import Vault

        return Vault(default(self.phone_region or ("US",)) if self.recognise else ())

    @property
    def needs_torch(self) -> bool:
        """Whether drafting needs PyTorch: only bundles for onnxruntime do not."""
        return self.bundle is None or not is_onnx_bundle(self.bundle)

    def load(self) -> Device:
        """Load the named bundle, or by default that of the model's bundled drafter.

        Raises:
            InputError: none was named, and no drafter is bundled for the model.
            CheckpointError: no bundle, or a damaged one.
        """
        if self.bundle is not None and not self.needs_torch:
            try:
                from moaspec_edge.device_onnx.onnx_device import OnnxDevice
            except ModuleNotFoundError as error:
                raise InputError(
                    f"An ONNX bundle needs {error.name}: {install_command('moaspec-edge[onnx]')}."
                ) from error
            return OnnxDevice(self.bundle, threads=self.threads or 1)
        from moaspec_edge.device.bundle import load_device

        return load_device(self.bundle or _made_bundle(self.served))

    def transport(self) -> Fleet:
        """The connections to the servers, not opened yet.

        Raises:
            InputError: a token that cannot be read, or options that do not go together.
        """
        from moaspec_edge.protocol.fleet import Fleet
        from moaspec_edge.server.auth import Credentials

        credentials = Credentials(
            token=_token(self.token_file),
            ca=self.ca,
            certificate=self.certificate,
            key=self.key,
        )
        return Fleet.at(self.servers, credentials)


def _token(path: Path | None) -> str | None:
    """From a file or the environment: command lines are seen by every user."""
    if path is None:
        return os.environ.get("MOASPEC_TOKEN", "").strip() or None
    return "\n".join(options.read_lines("--token-file", path))


def _made_bundle(model: str) -> Path:
    """The directory of the bundled drafter's bundle, exported at the first use."""
    from moaspec_core.support.seals import cached_directory, is_whole
    from moaspec_edge.device.bundle import FORMAT_VERSION, export_bundle

    drafter = bundled_drafters().get(model)
    if drafter is None:
        raise InputError(
            f"No drafter is bundled for {model}; name a bundle with --bundle "
            "(moaspec checkpoint export-device)."
        )
    directory = trusted("devices", f"{model}-{FORMAT_VERSION}-{_version(drafter)}")
    if is_whole(directory):
        return directory
    with status("Making the device bundle, once"):
        return cached_directory(directory, partial(export_bundle, model, drafter))


def _version(drafter: Path) -> str:
    """A hash of the drafter's files: a server accepts only its own drafter."""
    digest = hashlib.sha256()
    for file in sorted(path for path in drafter.iterdir() if path.is_file()):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
