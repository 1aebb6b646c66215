"""`moaspec target-server`: serves a target to devices."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, cast

import typer

from moaspec_core.bundled import bundled_drafters
from moaspec_core.cli import options
from moaspec_core.cli.terminal import console
from moaspec_core.cli.terminal.status import loading
from moaspec_core.errors import InputError
from moaspec_core.process_memory import freeze_loaded_objects, prepare_process
from moaspec_core.support.extras import install_command, require
from moaspec_core.support.ports import reserved
from moaspec_edge.cli.learning import announce, learning_from_texts

if TYPE_CHECKING:
    from moaspec_edge.server.listeners.websocket_server import TargetServer
    from moaspec_edge.server.service import ServiceOptions, TargetService
    from moaspec_train.learning_process import LearningProcess

EngineLoader: TypeAlias = (
    "Callable[[options.LoadOptions, ServiceOptions, int, Callable[[], None]], TargetService]"
)
"""Makes a service from options, limits, a number of processes, and what to do if one dies."""
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\sA-Z/?#@*]+")


@options.with_options
def target_server(
    context: typer.Context,
    *,
    asked: options.LoadOptions,
    host: Annotated[str, "Address to listen on."] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)
    ] = 50051,
    allow_origin: Annotated[
        list[str] | None,
        "Origin whose web pages may connect, as https://example.org; may be given several "
        "times; default: none.",
    ] = None,
    page: Annotated[
        Path | None,
        "ONNX bundle of a page that drafts in the browser, which the server then serves to "
        "everybody; default: no page.",
    ] = None,
    page_scripts: Annotated[
        Path | None, "Directory of the page's scripts; default: where they are built."
    ] = None,
    certificate: Annotated[Path | None, "TLS: certificate chain of this server, PEM."] = None,
    key: Annotated[Path | None, "Private key of --certificate, PEM."] = None,
    client_ca: Annotated[
        Path | None, "Devices must show a certificate that this CA signed."
    ] = None,
    tokens: Annotated[
        Path | None,
        'JSON file of tokens: {"owner": {"sha256": "...", "expires": seconds, '
        '"max_sessions": number}}; the last two may be left out.',
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            help="Port of Prometheus metrics, on --host; default: none.", min=0, max=65535
        ),
    ] = None,
    max_sessions: Annotated[
        int, typer.Option(help="Largest number of sessions; fewer if memory is short.", min=1)
    ] = 64,
    max_sessions_per_client: Annotated[
        int | None,
        typer.Option(
            help="Largest number of one token's sessions; default: half of all, or all for a "
            "single token.",
            min=1,
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest text, prompt included.", min=2)] = 4096,
    cache_gib: Annotated[
        float,
        typer.Option(
            help="GiB for keys and values of all texts; on GPUs, of all sessions at their longest.",
            min=0.001,
            max=options.MAX_GIB,
        ),
    ] = 8.0,
    idle_s: Annotated[
        float, typer.Option(help="Seconds after which an idle session is dropped.", min=0)
    ] = 300.0,
    drain_s: Annotated[
        float, typer.Option(help="Seconds that running work may take after SIGTERM.", min=0)
    ] = 10,
    engine: Annotated[
        Literal["torch", "vllm"],
        "What runs the target; vllm must be installed, see docs/vllm.md.",
    ] = "torch",
    tensor_parallel_size: Annotated[
        int,
        typer.Option(
            help="Processes of --engine vllm, one per GPU, that share a pass; where one dies, the "
            "server ends with code 1.",
            min=1,
        ),
    ] = 1,
    learn: options.Learn = None,
) -> None:
    """Verify the drafts of devices.

    SIGTERM and Ctrl-C let running work finish.

    The first line on standard output is JSON with the address, and how many sessions fit.
    Listening beyond this machine without TLS is refused.

    With --page, a browser is a device: it opens the server's address. The drafter must be that of
    the bundle.

    Example: moaspec target-server --port 50051 --metrics-port 9464
    """
    require("`moaspec target-server`", "moaspec-edge[server]")
    _check(host, certificate, key, client_ca)
    origins = _origins(allow_origin or [])
    scripts = _scripts(page, page_scripts)
    _check_engine(engine, asked, learn, ranks=tensor_parallel_size)
    from moaspec_edge.server.auth import CallAuth, server_tls

    guard = CallAuth() if tokens is None else CallAuth.read(tokens)
    tls = None
    if certificate is not None and key is not None:
        tls = server_tls(certificate, key, client_ca)
    if asked.drafter is None and asked.model in bundled_drafters():
        asked = replace(asked, drafter=asked.model)
    drafts = asked.drafts
    if not drafts:
        asked = replace(asked, drafter=None)
    learning = None
    if learn is not None:
        require("--learn", "moaspec-train")
        if not drafts:
            raise InputError("--learn needs a drafter: leave out --drafter none.")
        from moaspec_train.cli.learning import with_learning

        asked, learning = with_learning(asked, learn, context.with_resource)
    with (
        reserved({"--port": (host, port), "--metrics-port": (host, metrics_port)}),
        loading(asked.model, asked.threads, asked.quantize),
    ):
        from moaspec_edge.server.listeners.websocket_server import ServerOptions, TargetServer
        from moaspec_edge.server.service import ServiceOptions
        from moaspec_edge.server.session_store import StoreOptions

        limits = ServiceOptions(
            max_tokens=max_tokens,
            max_cache_bytes=int(cache_gib * 2**30),
            sessions=StoreOptions(
                max_sessions=max_sessions,
                max_sessions_per_owner=max_sessions_per_client
                or (max_sessions if len(guard.tokens or ()) == 1 else None),
                shares=guard.max_sessions,
                idle_s=idle_s,
            ),
        )
        prepare_process()
        stopping = threading.Event()
        ended = functools.partial(_end_process, stopping)
        service = engine_loader(engine)(asked, limits, tensor_parallel_size, ended)
    announce(service, learning)
    if metrics_port is not None:
        _serve_metrics(service, host, metrics_port)
    where = ServerOptions(
        host=host,
        port=port,
        tls=tls,
        guard=guard,
        origins=origins,
        http=_page(page, scripts, asked.model, service, learns=learn is not None),
    )
    info: dict[str, Any] = {"max_sessions": service.max_sessions, "engine": engine}
    if asked.quantize is not None:
        info["quantize"] = asked.quantize
    server = TargetServer(service, where)
    asyncio.run(_serve(server, drain_s, info, learning, stopping))


def _scripts(page: Path | None, scripts: Path | None) -> Path | None:
    """The directory of the page's scripts; None without a page.

    Raises:
        InputError: options that do not go together, or no scripts.
    """
    if page is None:
        if scripts is not None:
            raise InputError("--page-scripts needs --page.")
        return None
    require("--page", "moaspec-edge[http]")
    from moaspec_edge.http.device_page import find_scripts

    return find_scripts(scripts)


def _page(
    bundle: Path | None, scripts: Path | None, model: str, service: TargetService, *, learns: bool
) -> Callable[[], Any] | None:
    """Make protocols that serve the page; None without one.

    Raises:
        CheckpointError: no ONNX bundle.
        InputError: a bundle of another drafter.
    """
    if bundle is None or scripts is None:
        return None
    from moaspec_edge.http.device_page import DevicePage, page_protocols

    app = DevicePage(bundle, scripts, model=Path(model).name, learns=learns)
    if not service.capabilities.serves(app.manifest.fingerprint):
        raise InputError(
            f"The bundle at {bundle} is of another drafter than this server's. Export it again: "
            f"moaspec checkpoint export-device {model} DRAFTER {bundle} --format onnx-web --bits 8."
        )
    return page_protocols(app)


def torch_service(
    asked: options.LoadOptions,
    limits: ServiceOptions,
    ranks: int,  # noqa: ARG001 - this engine is one process
    on_failure: Callable[[], None],  # noqa: ARG001
) -> TargetService:
    """The target in this process, by moaspec's own passes."""
    from moaspec.backends.load import load_target
    from moaspec.generation.drafters import check_drafter, load_drafter
    from moaspec.generation.shaping import renewed_shaping, shaping_for
    from moaspec_edge.server.service import TargetService

    drafter = None
    if asked.drafter is not None:
        drafter = check_drafter(asked.drafter, asked.model, tokenizer=asked.tokenizer)
    target = load_target(
        asked.model,
        dtype=asked.dtype,
        quantize=asked.quantize,
        adapter=asked.adapter,
        tokenizer=asked.tokenizer,
    )
    module = None if drafter is None else load_drafter(drafter, target=target)
    if module is None:
        return TargetService(target, None, limits)
    # Alone the server drafts with N = 0 or not at all. N does not change the cost of a pass.
    layers = 0 if 0 in module.config.num_target_layers else None
    shaping = shaping_for(target, module, num_target_layers=layers)
    service = TargetService(target, module, limits, shaping=shaping)
    service.renew_costs(
        functools.partial(renewed_shaping, target, module, num_target_layers=layers)
    )
    return service


def engine_loader(name: str) -> EngineLoader:
    """What makes the service of `--engine`; an engine's distribution registers it.

    Raises:
        InputError: it is not installed.
    """
    found = entry_points(group="moaspec.engines", name=name)
    if not found:
        raise InputError(f"--engine {name} is not installed: {install_command(f'moaspec-{name}')}.")
    return cast(EngineLoader, next(iter(found)).load())


def _end_process(stopping: threading.Event) -> None:
    """End this process at once: a pass under way may wait for the rank that has ended."""
    if stopping.is_set():
        console.err.print("A process of vLLM has ended; texts that were not finished are cut off.")
        os._exit(0)
    console.error("A process of vLLM has ended, and so does this server. Start it again.")
    os._exit(1)


def _check_engine(engine: str, asked: options.LoadOptions, learn: Path | None, ranks: int) -> None:
    """Raise InputError for options that this engine does not have."""
    if asked.chat_template is not None:
        raise InputError(
            "--chat-template is for commands that read messages: devices send token ids, by the "
            "template in their bundle (export-device --tokenizer DIR)."
        )
    if engine != "vllm":
        if ranks > 1:
            raise InputError("--tensor-parallel-size is for --engine vllm.")
        return
    if learn is not None:
        raise InputError("--learn is for --engine torch.")
    if asked.quantize is not None:
        raise InputError("--quantize is for --engine torch; vLLM has quantised models of its own.")
    if asked.adapter is not None:
        raise InputError(
            "--adapter is for --engine torch. Merge it with peft, and name the result."
        )


def _check(host: str, certificate: Path | None, key: Path | None, client_ca: Path | None) -> None:
    from moaspec_edge.server.auth import LOCAL_HOSTS

    if (certificate is None) != (key is None):
        raise InputError("--certificate and --key come together.")
    if client_ca is not None and certificate is None:
        raise InputError("--client-ca needs --certificate and --key.")
    if certificate is None and host not in LOCAL_HOSTS:
        raise InputError(
            f"Listening on {host} without TLS would send texts and tokens in the clear. Give "
            "--certificate and --key, or listen on 127.0.0.1."
        )


def _origins(given: list[str]) -> tuple[str, ...]:
    """Check origins, as browsers write them.

    Raises:
        InputError: one is none.
    """
    for origin in given:
        if not _ORIGIN.fullmatch(origin):
            raise InputError(
                f"--allow-origin must be an origin such as https://example.org or "
                f"http://localhost:8000, in lower case, got {origin!r}."
            )
    return tuple(given)


def _serve_metrics(service: Any, host: str, port: int) -> None:
    from prometheus_client import start_http_server

    try:
        start_http_server(port, addr=host, registry=service.observer.registry)
    except OSError as error:
        raise InputError(f"Cannot serve metrics on {host}:{port}: {error.strerror}.") from error


async def _serve(
    server: TargetServer,
    drain_s: float,
    info: dict[str, Any],
    learning: LearningProcess | None,
    stopping: threading.Event,
) -> None:
    stop = asyncio.Event()

    def begin_stop() -> None:
        if not stopping.is_set():
            console.err.print("Draining", style="dim")
        stopping.set()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(NotImplementedError):  # not on Windows
            loop.add_signal_handler(number, begin_stop)
    # Nobody is told that it serves before it is warm.
    await server.service.warm_up()
    if stop.is_set():
        return
    freeze_loaded_objects()
    async with server:
        if server.has_page:
            info = {"page": server.url.replace("ws", "http", 1) + "/", **info}
        console.out.print(json.dumps({"address": server.url, **info}))
        async with learning_from_texts(server.service, learning):
            await stop.wait()
            await server.drain(drain_s)
