"""Options of the commands that serve HTTP: `serve` and `edge`."""

from __future__ import annotations

import os
import re
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Annotated

import typer

from moaspec_core.cli import options
from moaspec_core.cli.model_defaults import print_defaults
from moaspec_core.cli.terminal import console
from moaspec_core.errors import InputError

if TYPE_CHECKING:
    from moaspec_core.engine.device_target import DeviceTarget
    from moaspec_core.sampling.generation_defaults import GenerationDefaults
    from moaspec_serve.server_context import ServeSettings
    from moaspec_serve.sources.source import TextSource


HOST = re.compile(r"([a-z0-9_-]+\.)*[a-z0-9_-]+\.?(:\d+)?|\[[0-9a-f:.]+\](:\d+)?", re.I)
"""A name in the Host header, or an address, in brackets if it is one of IPv6."""


@dataclass(frozen=True)
class HttpOptions:
    """Options of an HTTP server: address, keys and limits of requests."""

    host: Annotated[str, "Address to listen on; 0.0.0.0: all."] = "127.0.0.1"
    api_key_file: Annotated[
        Path | None, "File of API keys, one per line; also $MOASPEC_API_KEY. Default: no key."
    ] = None
    cors_origin: Annotated[
        list[str] | None,
        "Origin of web pages that may call; may be given several times; * allows all.",
    ] = None
    allow_host: Annotated[
        list[str] | None,
        "Name in the Host header to accept, as reverse proxies forward it; may be given several "
        "times; * accepts all. Default: on a loopback address its names, else all.",
    ] = None
    name: Annotated[
        list[str] | None,
        "Another name of the model; may be given several times; * accepts any name.",
    ] = None
    default_max_tokens: Annotated[
        int, typer.Option(help="Tokens of an answer if the request sets no limit.", min=1)
    ] = 1024
    browse: Annotated[bool, typer.Option("--open", help="Show the page in the browser.")] = False

    def hosts(self) -> tuple[str, ...]:
        """Names of --allow-host. InputError: one that no Host header can have."""
        for name in self.allow_host or ():
            if name != "*" and not HOST.fullmatch(name):
                raise InputError(
                    f"--allow-host {name!r} is no name of a host: give one such as example.org, "
                    "without a scheme, a path or wildcards, or * for all."
                )
        return tuple(self.allow_host or ())

    def keys(self) -> tuple[str, ...]:
        """API keys of the file and the environment, because all users see command lines."""
        keys, path = os.environ.get("MOASPEC_API_KEY", "").split(), self.api_key_file
        return (*keys, *(options.read_lines("--api-key-file", path) if path is not None else ()))

    def settings(self, keys: tuple[str, ...], hosts: tuple[str, ...]) -> ServeSettings:
        """Settings of the endpoints."""
        from moaspec_serve.guard import GuardSettings
        from moaspec_serve.server_context import ServeSettings

        return ServeSettings(
            names=tuple(self.name or ()),
            default_max_tokens=self.default_max_tokens,
            cors_origins=tuple(self.cors_origin or ()),
            guarded=GuardSettings(api_keys=keys, hosts=hosts),
        )

    def run(
        self, source: TextSource, settings: ServeSettings, listener: socket, *, what: str
    ) -> None:
        """Serve until Ctrl-C; say where, once the server is ready."""
        from moaspec_serve.uvicorn_server import LOOPBACK, page_url, serve

        url = page_url(self.host, listener.getsockname()[1])

        def ready() -> None:
            console.err.print(f"{what}: page at {url}, API at {url}v1. Ctrl-C ends.")
            if self.browse:
                webbrowser.open(url)

        if self.host not in LOOPBACK and not settings.guarded.api_keys:
            console.warn(f"Whoever can reach {self.host} may use this server: give --api-key-file.")
        serve(source, settings, host=self.host, listener=listener, ready=ready)


Port = Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)]
Active = Annotated[int, typer.Option(help="Requests decoded together.", min=1)]
Waiting = Annotated[int, typer.Option(help="Requests that may wait.", min=0)]


def check_defaults(target: DeviceTarget, defaults: GenerationDefaults) -> None:
    """Print which of the model's defaults apply; InputError if some are not supported."""
    defaults.settings(sampled=True)
    print_defaults(target, defaults)
