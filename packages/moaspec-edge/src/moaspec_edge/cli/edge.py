"""`moaspec edge`: the device as an OpenAI endpoint."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from moaspec_core.cli import options
from moaspec_core.cli.terminal.status import loading
from moaspec_core.process_memory import prepare_process
from moaspec_core.support.ports import bind
from moaspec_edge.cli import device_options
from moaspec_serve.cli.http_options import Active, HttpOptions, Port, Waiting, check_defaults


@options.with_options
def edge(
    *,
    device: device_options.DeviceOptions,
    http: HttpOptions,
    port: Port = 8001,
    link: Annotated[
        options.Link | None, "Emulate a link, which the page can then cut; none: without delay."
    ] = None,
    generation_config: options.GenerationConfig = "auto",
    prefix_dir: Annotated[
        Path | None, "Directory that keeps activations of prompts for later; default: none."
    ] = None,
    max_active: Active = 8,
    max_waiting: Waiting = 64,
) -> None:
    """Serve OpenAI's API; the target is remote.

    The device keeps writing where the link to the server is down, see --on-cut.

    A client that does not ask for provisional text gets verified text only (with --on-cut keep:
    also what was written without a link). Text between `<private>` and `</private>`, and
    text that recognisers find, never leaves this machine: the server sees placeholders.

    Example: moaspec edge --server 127.0.0.1:50051 --link 4g --open
    """
    device.check("`moaspec edge`")
    keys, hosts = http.keys(), http.hosts()
    # Imported here, because it needs the extra; it loads nothing large.
    from moaspec_edge.emulation import Faults, ShapedTransport, link_named

    faults = None if link is None else Faults()
    emulated = None if link is None else link_named(link)
    transport = device.transport()
    with loading(device.name, device.threads, torch=device.needs_torch):
        settings = http.settings(keys, hosts)
        from moaspec_core.sampling.generation_defaults import NO_DEFAULTS
        from moaspec_edge.http.edge_source import EdgeLimits, EdgeSource

        prepare_process()
    chosen = device.remote_options(prefix_dir)
    with bind(http.host, port) as listener:
        loaded = device.load()
        loaded.drafting(device.num_target_layers)  # a bad N is told now, not to every client
        auto = generation_config == "auto"
        defaults = loaded.target.generation_defaults if auto else NO_DEFAULTS
        check_defaults(loaded.target, defaults)
        source = EdgeSource(
            loaded,
            transport
            if emulated is None
            else transport.through(lambda one: ShapedTransport(one, emulated, faults)),
            name=device.served,
            options=chosen,
            limits=EdgeLimits(active=max_active, waiting=max_waiting),
            faults=faults,
            defaults=defaults,
            server=transport,
        )
        settings = replace(settings, make_vault=device.vault)
        http.run(source, settings, listener, what=f"{device.served} at {device.server}")
