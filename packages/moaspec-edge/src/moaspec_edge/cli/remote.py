"""`moaspec remote PROMPT`: answers one prompt with a target on a server."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.text import Text

from moaspec_core.cli import options
from moaspec_core.cli.model_defaults import with_model_defaults
from moaspec_core.cli.prompts import chat_ids, read_prompt
from moaspec_core.cli.terminal import console
from moaspec_core.cli.terminal.status import loading
from moaspec_core.errors import InputError
from moaspec_core.sampling.params import SamplingOptions
from moaspec_core.support.tasks import end_tasks
from moaspec_edge.cli import device_options

if TYPE_CHECKING:
    from moaspec_core.engine.generate_options import GenerateOptions
    from moaspec_core.privacy.vault import Vault
    from moaspec_edge.device.events import RemoteEvent
    from moaspec_edge.device.remote_session import RemoteSession
    from moaspec_edge.emulation import Faults

PROVISIONAL, NOTE = "yellow", "dim"
CUT_S = 3.0  # how long the cut of `--cut-after` lasts
PATIENCE_S = 2.0  # the user is told of a missing link after this time


@options.with_options
def remote(
    prompt: options.Prompt = None,
    *,
    device: device_options.DeviceOptions,
    cut_after: Annotated[
        int | None, typer.Option(help="Cut the link for 3 s after this many tokens.", min=0)
    ] = None,
    link: Annotated[options.Link, "Emulate a link."] = "none",
    max_new_tokens: options.MaxNewTokens = 64,
    sampling: SamplingOptions,
    as_json: options.Json = False,
) -> None:
    """Draft here and verify on a server.

    Verified drafts are green; text written while the link is down is yellow. Where standard output
    is no terminal, it holds final text only.

    Text between `<private>` and `</private>`, and text that recognisers find, never leaves this
    process: the server sees placeholders.

    Example: moaspec remote "Why is the sky blue?" --cut-after 12
    """
    if device.bundle is not None and device.model is not None:
        raise InputError("--bundle holds the model, so leave --model out.")
    device.check("`moaspec remote`")
    # Imported here, because it needs the extra; it loads nothing large.
    from moaspec_edge.emulation import Faults, ShapedTransport, link_named

    faults, emulated = Faults(), link_named(link)
    wire = device.transport()
    question = read_prompt(prompt)
    with loading(device.name, device.threads, torch=device.needs_torch):
        from moaspec_edge.device.remote_session import RemoteSession

    chosen = device.remote_options()
    shaped = link != "none" or cut_after is not None
    transport = wire.through(lambda one: ShapedTransport(one, emulated, faults)) if shaped else wire
    vault = device.vault()
    hidden = vault.hide(question)
    loaded = device.load()
    ids = chat_ids(loaded.target, hidden)
    session = RemoteSession(loaded, transport, chosen)
    live = console.is_live(console.out)
    show = _Show(loaded.target.tokenizer, vault, quiet=as_json, live=live)
    cut = _Cut(faults, cut_after)
    given = cast("GenerateOptions", {"max_new_tokens": max_new_tokens, **sampling})
    settings = with_model_defaults(given, loaded.target, optional=False)
    asyncio.run(_run(session, ids, settings, show=show, cut=cut, no_link=wire.no_link))
    _report(session, show, as_json=as_json, hidden=len(vault))


async def _run(
    session: RemoteSession,
    ids: list[int],
    settings: GenerateOptions,
    *,
    show: _Show,
    cut: _Cut,
    no_link: str,
) -> None:
    watch = asyncio.create_task(_tell_of_no_link(session, cut, show, no_link))
    try:
        async for event in session.stream(ids, **settings):
            show.event(event)
            cut.note(len(show.text), show)
    finally:
        cut.end()
        show.close()
        await end_tasks(watch)
        await session.close()


async def _tell_of_no_link(session: RemoteSession, cut: _Cut, show: _Show, no_link: str) -> None:
    """Report each outage longer than `PATIENCE_S`, except that of `--cut-after`."""
    told = list[float | None]()
    while True:
        down_s = session.stats.down_s
        await asyncio.sleep(PATIENCE_S)
        stays = session.stats.state != "up" and session.stats.down_s == down_s
        if stays and down_s not in told and not cut.lasts:
            told.append(down_s)
            show.break_line()
            console.err.print(no_link)


class _Cut:
    """Cuts the link once, for `CUT_S`."""

    def __init__(self, faults: Faults, after: int | None) -> None:
        self._faults, self._after = faults, after
        self._timer: asyncio.TimerHandle | None = None

    def note(self, num_tokens: int, show: _Show) -> None:
        """Cut the link when there are enough tokens."""
        if self._after is None or num_tokens < self._after:
            return
        self._after = None
        self._faults.cut = True
        show.note(f"[link cut for {CUT_S:g} s]")
        self._timer = asyncio.get_running_loop().call_later(CUT_S, self.end)

    @property
    def lasts(self) -> bool:
        return self._faults.cut

    def end(self) -> None:
        self._faults.cut = False
        if self._timer is not None:
            self._timer.cancel()


class _Show:
    """Prints text as it arrives; if text is taken back, says so and prints the new text.

    Without `live`, text waits until it is verified.
    """

    def __init__(self, tokenizer: Any, vault: Vault, *, quiet: bool, live: bool) -> None:
        self._tokenizer, self._vault, self._quiet, self._live = tokenizer, vault, quiet, live
        self.text: list[int] = []
        self._shown, self._num_final = "", 0
        self._waiting, self._replaced = False, 0

    def event(self, event: RemoteEvent) -> None:
        self.text[event.start :] = event.token_ids
        if event.start <= self._num_final:
            final = len(self.text) - event.num_provisional
            self._num_final = max(self._num_final, final)
        alone = event.link != "up" and event.num_provisional > 0
        if alone and not self._waiting and not self._live:
            self.note("[no link: text waits]")
        self._waiting |= alone
        self._replaced += event.num_corrected
        # A server that has to read the text anew confirms it in several steps.
        if self._waiting and not event.num_provisional:
            self._back()
        final = event.stop_reason is not None
        self._print(self.words(final=final), PROVISIONAL if alone else _style(event))

    def _back(self) -> None:
        kept = f"{self._replaced} replaced" if self._replaced else "all of it stays"
        self.note(f"[link back: {kept}]")
        self._shown = "" if self._live else self._shown
        self._waiting, self._replaced = False, 0

    def words(self, *, final: bool = False) -> str:
        """The text so far with private spans restored, without characters that may change."""
        ids = self.text if final or self._live else self.text[: self._num_final]
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        restorer = self._vault.restorer()
        # A character that is split over tokens ends in a replacement character until it is whole.
        shown = restorer.push(text if final else text.rstrip("\N{REPLACEMENT CHARACTER}"))
        return shown + restorer.close() if final else shown

    def note(self, words: str) -> None:
        if not self._quiet:
            self.break_line()
            console.err.print(Text(words, style=NOTE))

    def break_line(self) -> None:
        """End the line before a message; not in a pipe, where the text continues."""
        if self._live:
            self.close()

    def close(self) -> None:
        """End the line of the text."""
        if self._shown and not self._quiet:
            console.out.print()

    def _print(self, words: str, style: str) -> None:
        if not self._quiet and words.startswith(self._shown):
            console.out.print(Text(words[len(self._shown) :], style=style), end="")
        self._shown = words


def _style(event: RemoteEvent) -> str:
    return console.STYLES["draft" if "draft" in event.sources else "target"]


def _report(session: RemoteSession, show: _Show, *, as_json: bool, hidden: int) -> None:
    stats, result = session.stats, session.result
    content = {
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
        console.out.print(json.dumps(content))
        return
    line = f"{len(result.token_ids)} tokens in {result.num_rounds} rounds"
    line += f"; {stats.bytes_up} bytes up, {stats.bytes_down} down"
    if stats.cuts:
        line += f"; {stats.provisional} tokens without a link, {stats.corrected} replaced"
    console.err.print(Text(line, style=NOTE))
