"""`moaspec edge`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from moaspec.cli import console, options
from moaspec.cli.serve import (
    BodyBytes,
    Host,
    KeyFile,
    MaxTokens,
    Names,
    Open,
    Origins,
    Port,
    serve_settings,
    warn_if_open,
)
from moaspec.decode import bundled_drafters, load_drafter
from moaspec.errors import InputError
from moaspec.target import load_target

if TYPE_CHECKING:
    from moaspec.remote import Device


def edge(
    server: Annotated[
        str, typer.Option(help="HOST:PORT of `moaspec target-server`.")
    ] = "127.0.0.1:50051",
    bundle: Annotated[
        Path | None,
        typer.Option(help="Device bundle, see `moaspec checkpoint export-device`."),
    ] = None,
    model: options.Model = options.MODEL,
    drafter: options.DrafterName = None,
    host: Host = "127.0.0.1",
    port: Port = 8001,
    on_cut: Annotated[
        str,
        typer.Option(
            help="Without a link: rollback (write on, and correct), keep (write on, and leave it) "
            "or wait."
        ),
    ] = "rollback",
    codec: Annotated[str, typer.Option(help="Of activations: fp16, int8 or int4.")] = "int8",
    draft: Annotated[str, typer.Option(help="auto, or a shape as for --tree.")] = "auto",
    emulate: Annotated[
        str | None,
        typer.Option(help="Emulate a link (none, lan, 4g, 5g) that the page can cut."),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the bearer token; also $MOASPEC_TOKEN.")
    ] = None,
    ca: Annotated[
        str | None, typer.Option(help='CA of the server, or "system"; switches TLS on.')
    ] = None,
    certificate: Annotated[Path | None, typer.Option(help="The device's own, PEM.")] = None,
    key: Annotated[Path | None, typer.Option(help="Its private key, PEM.")] = None,
    api_key_file: KeyFile = None,
    cors_origin: Origins = None,
    name: Names = None,
    max_active: Annotated[int, typer.Option(help="Texts decoded together.", min=1)] = 8,
    max_waiting: Annotated[int, typer.Option(help="Texts that may wait.", min=0)] = 64,
    default_max_tokens: MaxTokens = 1024,
    max_body_bytes: BodyBytes = 8 * 2**20,
    dtype: options.Dtype = "float32",
    threads: options.Threads = None,
    browse: Open = False,
) -> None:
    """Serve OpenAI's API on the device while the target is on a server, link or no link.

    A client that does not ask for provisional text gets verified text only (with --on-cut keep:
    also what was written without a link).

    Example: moaspec edge --server 127.0.0.1:50051 --emulate 4g --open
    """
    settings = serve_settings(api_key_file, cors_origin, name, default_max_tokens, max_body_bytes)
    from moaspec.remote import Credentials, GrpcTransport, RemoteOptions, RemoteText
    from moaspec.remote.client import OnCut
    from moaspec.remote.codec import CodecName
    from moaspec.remote.emulation import Faults, ShapedTransport, link_named
    from moaspec.serve.edge import EdgeLimits, EdgeSource
    from moaspec.serve.running import page_url
    from moaspec.serve.running import serve as run

    chosen = RemoteOptions(codec=cast(CodecName, codec), draft=draft, on_cut=cast(OnCut, on_cut))
    faults = None if emulate is None else Faults()
    link = None if emulate is None else link_named(emulate)
    console.set_threads(threads)
    console.quiet_libraries()
    with console.err.status("Loading the device's part"):
        device = _device(bundle, model, drafter, dtype)
    credentials = Credentials(token=_token(token_file), ca=ca, certificate=certificate, key=key)
    transport = GrpcTransport(server, credentials)
    source = EdgeSource(
        device,
        transport if link is None else ShapedTransport(transport, link, faults),
        name=model,
        options=chosen,
        limits=EdgeLimits(active=max_active, waiting=max_waiting),
        faults=faults,
        alone=RemoteText(transport, device.stop_token_ids),
    )
    warn_if_open(host, settings)
    url = page_url(host, port)
    console.err.print(f"{model} at {server}: page at {url}, API at {url}v1.")
    run(source, settings, host=host, port=port, browse=browse)


def _device(bundle: Path | None, model: str, drafter: str | None, dtype: str) -> Device:
    """The device's part of the model: a bundle, or the whole target where there is none."""
    if bundle is not None:
        from moaspec.remote.bundle import load_device

        return load_device(bundle)
    from moaspec.remote import LocalDevice

    if drafter is None and model not in bundled_drafters():
        raise InputError(f"No drafter is bundled for {model}: name one, or a --bundle.")
    target = load_target(model, dtype=dtype)
    return LocalDevice(target, load_drafter(drafter or model, target=target))


def _token(path: Path | None) -> str | None:
    """From a file or the environment: command lines are seen by every user."""
    if path is None:
        return os.environ.get("MOASPEC_TOKEN") or None
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--token-file {path} cannot be read: {error}.") from error
