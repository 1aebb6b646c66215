"""`moaspec remote PROMPT`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from moaspec.cli import console, options
from moaspec.decode import bundled_drafters
from moaspec.errors import InputError
from moaspec.target.cache import cache_dir

if TYPE_CHECKING:
    from moaspec.remote import RemoteEvent, RemoteSession
    from moaspec.remote.emulation import ShapedTransport
    from moaspec.remote.private import Vault

PROVISIONAL, NOTE = "yellow", "dim"


def remote(
    prompt: Annotated[str, typer.Argument(help="What the model should answer.")],
    server: Annotated[str, typer.Option(help="host:port of moaspec target-server.")] = (
        "127.0.0.1:50051"
    ),
    bundle: Annotated[
        Path | None, typer.Option(help="Device bundle; default: one of --model, made once.")
    ] = None,
    model: options.Model = options.MODEL,
    token: Annotated[str | None, typer.Option(help="Bearer token.")] = None,
    tls_ca: Annotated[
        str | None, typer.Option(help="Connect with TLS: a file of CA certificates, or system.")
    ] = None,
    on_cut: Annotated[str, typer.Option(help="rollback, keep or wait.")] = "rollback",
    cut_after: Annotated[
        int | None, typer.Option(help="Take the link away after so many tokens.")
    ] = None,
    cut_s: Annotated[float, typer.Option(help="For so many seconds.")] = 3.0,
    link: Annotated[str, typer.Option(help="Emulate a link: none, lan, 4g, 5g.")] = "none",
    recognise: Annotated[
        bool, typer.Option(help="Hide e-mail addresses, phone, card and account numbers.")
    ] = True,
    phone_region: Annotated[
        list[str] | None, typer.Option(help="Countries whose phone numbers have no prefix; US.")
    ] = None,
    max_new_tokens: options.MaxNewTokens = 64,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = None,
    threads: options.Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Draft here, verify on a server: verified drafts are green, text without a link is yellow.

    What stands between <private> and </private>, and what recognisers find, never leaves this
    process: the server sees placeholders.

    Example: moaspec remote "Why is the sky blue?" --cut-after 12
    """
    # Imported here, because gRPC is not needed by most commands.
    from moaspec.remote import Credentials, GrpcTransport, RemoteOptions, RemoteSession
    from moaspec.remote.bundle import load_device
    from moaspec.remote.emulation import Faults, ShapedTransport, link_named
    from moaspec.remote.private import Vault
    from moaspec.remote.private.recognisers import default

    vault = Vault(default(phone_region or ("US",)) if recognise else ())
    hidden = vault.hide(prompt)
    console.set_threads(threads)
    console.quiet_libraries()
    device = load_device(bundle or _made_bundle(model))
    ids = console.chat_ids(device.target, hidden)
    wire = GrpcTransport(server, Credentials(token=token, ca=tls_ca))
    transport = ShapedTransport(wire, link_named(link), Faults())
    session = RemoteSession(device, transport, RemoteOptions(on_cut=on_cut))  # type: ignore[arg-type]
    show = _Show(device.tokenizer, vault, quiet=as_json)
    cut = _Cut(transport, cut_after, cut_s)
    settings = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    asyncio.run(_run(session, ids, settings, show=show, cut=cut))
    _report(session, show, as_json=as_json, hidden=len(vault))


def _made_bundle(model: str) -> Path:
    """A bundle of the model's own drafter, exported the first time it is asked for."""
    from moaspec.remote.bundle import export_bundle, is_bundle

    if model not in bundled_drafters():
        raise InputError(
            f"No drafter is bundled for {model}; name a bundle with --bundle "
            "(moaspec checkpoint export-device)."
        )
    directory = cache_dir() / "devices" / model
    if not is_bundle(directory):
        with console.err.status("Making the device bundle, once"):
            export_bundle(model, model, directory)
    return directory


async def _run(
    session: RemoteSession, ids: list[int], settings: dict[str, Any], *, show: _Show, cut: _Cut
) -> None:
    try:
        async for event in session.stream(ids, **settings):
            show.event(event)
            cut.note(len(show.text), show)
    finally:
        cut.end()
        await session.close()


class _Cut:
    """Takes the link away once, for a while."""

    def __init__(self, transport: ShapedTransport, after: int | None, seconds: float) -> None:
        self._transport, self._after, self._seconds = transport, after, seconds
        self._timer: asyncio.TimerHandle | None = None

    def note(self, num_tokens: int, show: _Show) -> None:
        """Cut the link when there are enough tokens."""
        if self._after is None or num_tokens < self._after:
            return
        self._after = None
        self._transport.faults.cut = True
        show.note(f"[link cut for {self._seconds:g} s]")
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self.end)

    def end(self) -> None:
        """Give the link back."""
        self._transport.faults.cut = False
        if self._timer is not None:
            self._timer.cancel()


class _Show:
    """Prints text as it comes; what is taken back is said, and written anew."""

    def __init__(self, tokenizer: Any, vault: Vault, *, quiet: bool) -> None:
        self._tokenizer, self._vault, self._quiet = tokenizer, vault, quiet
        self.text: list[int] = []
        self._shown = ""
        self._provisional = 0

    def event(self, event: RemoteEvent) -> None:
        """Show what an event changed."""
        waiting = self._provisional > 0
        self.text[event.start :] = event.token_ids
        alone = event.link != "up" and event.num_provisional > 0
        self._provisional = self._provisional + 1 if alone else event.num_provisional
        if waiting and not alone:
            self._back(event)
        final = event.stop_reason is not None
        self._print(self.words(final=final), PROVISIONAL if alone else _style(event))

    def _back(self, event: RemoteEvent) -> None:
        kept = "all of it stays" if not event.num_corrected else f"{event.num_corrected} replaced"
        self.note(f"[link back: {kept}]")
        self._shown = ""

    def words(self, *, final: bool = False) -> str:
        """The text so far with private spans restored; what may still change waits."""
        text = self._tokenizer.decode(self.text, skip_special_tokens=True)
        restorer = self._vault.restorer()
        # A character that is split over tokens ends in a replacement character until it is whole.
        shown = restorer.push(text if final else text.rstrip("\N{REPLACEMENT CHARACTER}"))
        return shown + restorer.close() if final else shown

    def note(self, words: str) -> None:
        """A line of our own."""
        if not self._quiet:
            console.out.print()
            console.out.print(Text(words, style=NOTE))

    def _print(self, words: str, style: str) -> None:
        if not self._quiet and words.startswith(self._shown):
            console.out.print(Text(words[len(self._shown) :], style=style), end="")
        self._shown = words


def _style(event: RemoteEvent) -> str:
    return console.STYLES["draft" if "draft" in event.sources else "target"]


def _report(session: RemoteSession, show: _Show, *, as_json: bool, hidden: int) -> None:
    stats, result = session.stats, session.result
    facts = {
        "text": show.words(final=True),
        "token_ids": list(result.token_ids),
        "stop_reason": result.stop_reason,
        "seed": result.seed,
        "tau": result.tau,
        "num_rounds": result.num_rounds,
        "bytes_up": stats.bytes_up,
        "bytes_down": stats.bytes_down,
        "cuts": stats.cuts,
        "noticed_s": stats.noticed_s,
        "provisional": stats.provisional,
        "corrected": stats.corrected,
        "private_spans": hidden,
    }
    if as_json:
        console.out.print(json.dumps(facts))
        return
    console.out.print()
    line = f"{len(result.token_ids)} tokens in {result.num_rounds} rounds"
    line += f"; {stats.bytes_up} bytes up, {stats.bytes_down} down"
    if stats.cuts:
        line += f"; {stats.provisional} tokens without a link, {stats.corrected} replaced"
    console.out.print(line, style=NOTE)
