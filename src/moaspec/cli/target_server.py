"""`moaspec target-server`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from moaspec.cli import console, options
from moaspec.decode import bundled_drafters, load_drafter
from moaspec.errors import InputError
from moaspec.target import load_target


def target_server(
    model: options.Model = options.MODEL,
    drafter: options.DrafterName = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 50051,
    tls_certificate: Annotated[
        Path | None, typer.Option(help="Certificate chain of this server, PEM.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key, PEM.")] = None,
    client_ca: Annotated[
        Path | None, typer.Option(help="Devices must show a certificate that this CA signed.")
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(help='JSON: {"owner": {"sha256": "...", "expires": seconds}}.'),
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Serve Prometheus metrics here (on the same address).")
    ] = None,
    traces: Annotated[
        bool, typer.Option("--traces", help="Print OpenTelemetry spans on standard error.")
    ] = False,
    max_sessions: Annotated[int, typer.Option(help="Sessions that are held at once.")] = 64,
    max_sessions_per_client: Annotated[int, typer.Option(help="Of one token.")] = 64,
    max_tokens: Annotated[int, typer.Option(help="Longest text, prompt included.")] = 4096,
    idle_s: Annotated[float, typer.Option(help="Sessions are forgotten after so long.")] = 300.0,
    drain_s: Annotated[float, typer.Option(help="On SIGTERM, running work may take so long.")] = 10,
    dtype: options.Dtype = "float32",
    threads: options.Threads = None,
) -> None:
    """Hold the target for devices that draft; stops gracefully on SIGTERM and Ctrl-C.

    The first line on standard output is JSON with the address. Listening beyond this machine
    without TLS is refused.

    Example: moaspec target-server --port 50051 --metrics-port 9464
    """
    _check(host, tls_certificate, tls_key, client_ca)
    # Imported here, because gRPC is not needed by any other command.
    from moaspec.remote import (
        GrpcServer,
        Guard,
        ServerOptions,
        ServiceOptions,
        StoreOptions,
        TargetService,
        server_credentials,
    )

    guard = Guard() if tokens is None else Guard.read(tokens)
    secure = None
    if tls_certificate is not None and tls_key is not None:
        secure = server_credentials(tls_certificate, tls_key, client_ca)
    console.set_threads(threads)
    console.quiet_libraries()
    if traces:
        _print_traces()
    with console.status(f"Loading {model}"):
        target = load_target(model, dtype=dtype)
        name = drafter or (model if model in bundled_drafters() else None)
        module = None if name is None else load_drafter(name, target=target)
    sessions = StoreOptions(
        max_sessions=max_sessions,
        max_sessions_per_owner=max_sessions_per_client,
        idle_s=idle_s,
    )
    service = TargetService(
        target, module, ServiceOptions(max_tokens=max_tokens, sessions=sessions)
    )
    if metrics_port is not None:
        _serve_metrics(service, host, metrics_port)
    where = ServerOptions(host=host, port=port, credentials=secure, guard=guard)
    # Made inside the loop, to which gRPC ties a server when it is made.
    asyncio.run(_serve(lambda: GrpcServer(service, where), host, drain_s))


def _check(host: str, certificate: Path | None, key: Path | None, client_ca: Path | None) -> None:
    # Imported here for the same reason.
    from moaspec.remote.auth import LOCAL_HOSTS

    if (certificate is None) != (key is None):
        raise InputError("--tls-certificate and --tls-key come together.")
    if client_ca is not None and certificate is None:
        raise InputError("--client-ca needs --tls-certificate and --tls-key.")
    if certificate is None and host not in LOCAL_HOSTS:
        raise InputError(
            f"Listening on {host} without TLS would send texts and tokens in the clear. Give "
            "--tls-certificate and --tls-key, or listen on 127.0.0.1."
        )


def _serve_metrics(service: Any, host: str, port: int) -> None:
    from prometheus_client import start_http_server

    try:
        start_http_server(port, addr=host, registry=service.observer.registry)
    except OSError as error:
        raise InputError(f"Cannot serve metrics on {host}:{port}: {error.strerror}.") from error


def _print_traces() -> None:
    import sys

    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(ConsoleSpanExporter(out=sys.stderr)))
    trace.set_tracer_provider(provider)


async def _serve(make: Callable[[], Any], host: str, drain_s: float) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(NotImplementedError):  # not on Windows
            loop.add_signal_handler(number, stop.set)
    async with make() as server:
        console.out.print(json.dumps({"address": f"{host}:{server.port}"}))
        await stop.wait()
        console.err.print("Draining", style="dim")
        await server.drain(drain_s)
