"""`moaspec serve`: serves OpenAI's API from this machine."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from moaspec.cli.loading import load_pair, measure_once
from moaspec_core.cli import options
from moaspec_core.cli.terminal.status import loading
from moaspec_core.errors import InputError
from moaspec_core.process_memory import prepare_process
from moaspec_core.support.extras import require
from moaspec_core.support.ports import bind
from moaspec_serve.cli.http_options import Active, HttpOptions, Port, Waiting, check_defaults

if TYPE_CHECKING:
    pass


@options.with_options
def serve(
    context: typer.Context,
    *,
    asked: options.LoadOptions,
    http: HttpOptions,
    port: Port = 8000,
    tree: options.Shape = "auto",
    generation_config: options.GenerationConfig = "auto",
    max_active: Active = 64,
    max_waiting: Waiting = 256,
    cache_gib: Annotated[
        float, typer.Option(help="GiB for keys and values.", min=0.001, max=options.MAX_GIB)
    ] = 4.0,
    learn: options.Learn = None,
) -> None:
    """Serve OpenAI's API, and a page to chat on.

    The base URL for apps is http://HOST:PORT/v1.

    Example: moaspec serve --port 8000 --open
    """
    from moaspec_core.drafting.tree_shapes import parse_shape

    parse_shape(tree)  # before anything slow, as below
    keys, hosts = http.keys(), http.hosts()
    with bind(http.host, port) as listener:
        with loading(asked.model, asked.threads, asked.quantize):
            settings = http.settings(keys, hosts)
            from moaspec.generation.shaping import renewed_shaping, shaping_for
            from moaspec_serve.sources.engine_worker import WorkerLimits
            from moaspec_serve.sources.local_source import LocalSource

            prepare_process()
            learning = None
            if learn is not None:
                require("--learn", "moaspec-train")
                if not asked.drafts:
                    raise InputError("--learn needs a drafter: leave out --drafter none.")
                from moaspec_train.cli.learning import with_learning

                asked, learning = with_learning(asked, learn, context.with_resource)
            target, module = load_pair(
                asked, generation_config=options.generation_defaults(generation_config)
            )
            if learning is not None:
                learning.check(target)
        check_defaults(target, target.generation_defaults)
        if tree == "auto":
            measure_once(target, module)
        source = LocalSource(
            target,
            module,
            shaping=shaping_for(target, module, tree=tree),
            renew=partial(renewed_shaping, target, module) if module is not None else None,
            limits=WorkerLimits(
                active=max_active, waiting=max_waiting, cache_bytes=int(cache_gib * 2**30)
            ),
            learning=learning,
        )
        http.run(source, settings, listener, what=asked.model)
