"""`moaspec serve`: serves OpenAI's API from this machine."""

from __future__ import annotations

import os
import webbrowser
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moaspec.cli import options
from moaspec.cli.loading import load_pair, measure_once, print_defaults
from moaspec.cli.terminal import console
from moaspec.cli.terminal.status import loading
from moaspec.errors import InputError
from moaspec.support import limits
from moaspec.support.extras import require
from moaspec.support.ports import bind

if TYPE_CHECKING:
    from moaspec.serve.server_context import ServeSettings
    from moaspec.target.generation_defaults import GenerationDefaults
    from moaspec.target.spec import TargetSpec

Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: all.")]
Port = Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)]
KeyFile = Annotated[
    Path | None,
    typer.Option(help="File of API keys, one per line; also $MOASPEC_API_KEY. Default: no key."),
]
Origins = Annotated[
    list[str] | None,
    typer.Option(help="Web origin that may call; may be given several times; * allows all."),
]
Names = Annotated[
    list[str] | None,
    typer.Option(help="Another name of the model; may be given several times; * accepts any name."),
]
MaxTokens = Annotated[
    int, typer.Option(help="Tokens of an answer where the request sets no limit.", min=1)
]
BodyBytes = Annotated[int, typer.Option(help="Largest request body, in bytes.", min=1024)]
Open = Annotated[bool, typer.Option("--open", help="Show the page in the browser.")]


def serve(
    model: options.Model = options.MODEL,
    drafter: options.DrafterName = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    tree: options.Shape = "auto",
    free_branches: options.FreeBranches = options.FreeBranchesOption.auto,
    speculation: options.Speculation = True,
    generation_config: options.GenerationConfig = options.AUTO,
    api_key_file: KeyFile = None,
    cors_origin: Origins = None,
    name: Names = None,
    max_active: Annotated[int, typer.Option(help="Requests decoded together.", min=1)] = 64,
    max_waiting: Annotated[int, typer.Option(help="Requests that may wait.", min=0)] = 256,
    cache_gib: Annotated[float, typer.Option(help="GiB for keys and values.")] = 4.0,
    default_max_tokens: MaxTokens = 1024,
    max_body_bytes: BodyBytes = limits.MAX_BODY_BYTES,
    dtype: options.Dtype = "auto",
    quantize: options.Quantize = None,
    threads: options.Threads = None,
    browse: Open = False,
) -> None:
    """Serve OpenAI's API, and a page to chat on.

    The base URL for apps is http://HOST:PORT/v1.

    Example: moaspec serve --port 8000 --open
    """
    require("`moaspec serve`", "serve")
    from moaspec.drafting.draft_tree import parse_shape

    parse_shape(tree)  # before anything slow, as below
    if cache_gib <= 0:
        raise InputError(f"--cache-gib must be above 0, got {cache_gib}.")
    cache_bytes = int(cache_gib * 2**30)
    with bind(host, port) as listener:
        with loading(model, threads, quantize):
            settings = serve_settings(
                api_key_file, cors_origin, name, default_max_tokens, max_body_bytes
            )
            from moaspec.generation.options import shaping_for
            from moaspec.process_memory import prepare_process
            from moaspec.serve.sources.engine_worker import WorkerLimits
            from moaspec.serve.sources.local_source import LocalSource
            from moaspec.serve.uvicorn_server import serve as run

            prepare_process()
            target, module = load_pair(
                model,
                drafter,
                dtype=dtype,
                quantize=quantize,
                generation_config=generation_config.setting,
                speculation=speculation,
            )
        check_defaults(target, target.generation_defaults)
        if tree == "auto":
            measure_once(target, module)
        source = LocalSource(
            target,
            module,
            shaping=shaping_for(target, module, tree=tree, free_branches=free_branches.setting),
            limits=WorkerLimits(
                active=max_active,
                waiting=max_waiting,
                cache_bytes=cache_bytes,
            ),
        )
        warn_if_open(host, settings)
        ready = partial(announce, model, host, port, browse=browse)
        run(source, settings, host=host, listener=listener, ready=ready)


def check_defaults(target: TargetSpec, defaults: GenerationDefaults) -> None:
    """Say which of the model's defaults hold for requests that say nothing.

    Raises:
        InputError: some cannot be honoured.
    """
    defaults.settings(sampled=True)
    print_defaults(target, defaults)


def serve_settings(
    api_key_file: Path | None,
    cors_origin: list[str] | None,
    name: list[str] | None,
    default_max_tokens: int,
    max_body_bytes: int,
) -> ServeSettings:
    """Settings of the endpoints from a command's options.

    Raises:
        InputError: a key file that cannot be read.
    """
    from moaspec.serve.guard import GuardSettings
    from moaspec.serve.server_context import ServeSettings

    return ServeSettings(
        names=tuple(name or ()),
        default_max_tokens=default_max_tokens,
        cors_origins=tuple(cors_origin or ()),
        guarded=GuardSettings(api_keys=_keys(api_key_file), max_body_bytes=max_body_bytes),
    )


def announce(what: str, host: str, port: int, *, browse: bool) -> None:
    """Say where a server that is ready answers, and show its page if that is wanted."""
    from moaspec.serve.uvicorn_server import page_url

    url = page_url(host, port)
    console.err.print(f"{what}: page at {url}, API at {url}v1. Ctrl-C ends.")
    if browse:
        webbrowser.open(url)


def warn_if_open(host: str, settings: ServeSettings) -> None:
    """Say so where others can connect and no key is asked for."""
    from moaspec.serve.uvicorn_server import LOOPBACK

    if host not in LOOPBACK and not settings.guarded.api_keys:
        console.warn(f"Whoever can reach {host} may use this server: give --api-key-file.")


def _keys(path: Path | None) -> tuple[str, ...]:
    """Keys are read from a file or the environment: command lines are seen by every user."""
    text = os.environ.get("MOASPEC_API_KEY", "")
    if path is not None:
        try:
            text += "\n" + path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--api-key-file {path} cannot be read: {error}.") from error
    keys = tuple(line.strip() for line in text.splitlines() if line.strip())
    if path is not None and not keys:
        raise InputError(f"--api-key-file {path} holds no key.")
    return keys
