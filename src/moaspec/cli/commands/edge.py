"""`moaspec edge`: the device as an OpenAI endpoint."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated

import typer

from moaspec.cli import device_options as device
from moaspec.cli import options
from moaspec.cli.commands.serve import (
    BodyBytes,
    Host,
    KeyFile,
    MaxTokens,
    Names,
    Open,
    Origins,
    Port,
    announce,
    check_defaults,
    serve_settings,
    warn_if_open,
)
from moaspec.cli.terminal.status import loading
from moaspec.support import limits
from moaspec.support.extras import require
from moaspec.support.ports import bind


def edge(
    server: device.Server = device.SERVER,
    bundle: device.Bundle = None,
    model: options.Model = options.MODEL,
    host: Host = "127.0.0.1",
    port: Port = 8001,
    on_cut: device.OnCut = "rollback",
    codec: device.Codec = "int8",
    draft: device.Draft = "auto",
    num_target_layers: device.NumTargetLayers = None,
    generation_config: options.GenerationConfig = options.AUTO,
    prefix_dir: device.PrefixDir = None,
    give_up_s: device.GiveUp = None,
    emulate: Annotated[
        str | None,
        typer.Option(help="Emulate a link: none, lan, 4g or 5g; the page can cut it."),
    ] = None,
    recognise: device.Recognise = True,
    phone_region: device.PhoneRegion = None,
    token_file: device.TokenFile = None,
    ca: device.CA = None,
    certificate: device.Certificate = None,
    key: device.Key = None,
    api_key_file: KeyFile = None,
    cors_origin: Origins = None,
    name: Names = None,
    max_active: Annotated[int, typer.Option(help="Requests decoded together.", min=1)] = 8,
    max_waiting: Annotated[int, typer.Option(help="Requests that may wait.", min=0)] = 64,
    default_max_tokens: MaxTokens = 1024,
    max_body_bytes: BodyBytes = limits.MAX_BODY_BYTES,
    threads: options.Threads = None,
    browse: Open = False,
) -> None:
    """Serve OpenAI's API; the target is remote.

    The device keeps writing where the link to the server is down, see --on-cut.

    A client that does not ask for provisional text gets verified text only (with --on-cut keep:
    also what was written without a link). Text between `<private>` and `</private>`, and
    text that recognisers find, never leaves this machine: the server sees placeholders.

    Example: moaspec edge --server 127.0.0.1:50051 --emulate 4g --open
    """
    require("`moaspec edge`", "serve", "remote", *(["private"] if recognise else []))
    device.check_address(server)
    with loading(model, threads):
        settings = serve_settings(
            api_key_file, cors_origin, name, default_max_tokens, max_body_bytes
        )
        from moaspec.process_memory import prepare_process
        from moaspec.remote.emulation import Faults, ShapedTransport, link_named
        from moaspec.remote.protocol.grpc_transport import GrpcTransport
        from moaspec.remote.server.server_only import RemoteText
        from moaspec.serve.sources.edge_source import EdgeLimits, EdgeSource
        from moaspec.serve.uvicorn_server import serve as run
        from moaspec.target.generation_defaults import NO_DEFAULTS

        prepare_process()
    chosen = device.remote_options(
        codec=codec,
        num_target_layers=num_target_layers,
        draft=draft,
        on_cut=on_cut,
        prefix_dir=prefix_dir,
        give_up_s=give_up_s,
    )
    faults = None if emulate is None else Faults()
    link = None if emulate is None else link_named(emulate)
    transport = GrpcTransport(server, device.credentials(token_file, ca, certificate, key))
    with bind(host, port) as listener:
        loaded = device.load_bundle(bundle, model)
        loaded.drafting(num_target_layers)  # a bad N is told now, not to every client
        auto = generation_config is options.AUTO
        defaults = loaded.target.generation_defaults if auto else NO_DEFAULTS
        check_defaults(loaded.target, defaults)
        make_vault = partial(device.vault, phone_region, recognise=recognise)
        make_vault().hide("")  # unknown regions are told now, not to every client
        settings = replace(settings, make_vault=make_vault)
        source = EdgeSource(
            loaded,
            transport if link is None else ShapedTransport(transport, link, faults),
            name=model,
            options=chosen,
            limits=EdgeLimits(active=max_active, waiting=max_waiting),
            faults=faults,
            server_only=RemoteText(transport, loaded.target.stop_token_ids),
            defaults=defaults,
        )
        warn_if_open(host, settings)
        ready = partial(announce, f"{model} at {server}", host, port, browse=browse)
        run(source, settings, host=host, listener=listener, ready=ready)
