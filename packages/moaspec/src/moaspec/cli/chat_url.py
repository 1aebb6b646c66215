"""`moaspec chat --url`: the same conversation with a server."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.text import Text

from moaspec_core.cli.options import SAMPLING, sent_api_key
from moaspec_core.cli.terminal import console
from moaspec_core.cli.terminal.chat_loop import ChatLoop
from moaspec_core.errors import InputError

if TYPE_CHECKING:
    from moaspec_core.engine.generate_options import GenerateOptions

PROVISIONAL, CORRECTED, KEPT = "dim italic", "bold red", "magenta"
TAKEN_BACK = " ⟲ "
"""Stands before what replaces text that was taken back; a terminal cannot unsay it."""


class ServerChat(ChatLoop):
    """A conversation with a server; ServerError for none."""

    def __init__(self, url: str, settings: GenerateOptions, system: str | None = None) -> None:
        super().__init__(settings, system)
        from moaspec.cli.chat_client import ServedChat

        self._server = ServedChat(url, sent_api_key())
        self._answers: list[dict[str, Any]] = []

    def answer(self, question: str) -> None:
        printer = _Printer()
        chunks = self._server.stream(
            self.conversation(question), provisional=sys.stdout.isatty(), **_fields(self.settings)
        )
        try:
            for chunk in chunks:
                printer.show(chunk)
        except KeyboardInterrupt:
            pass
        finally:
            chunks.close()  # type: ignore[attr-defined]  # a generator: the server hears of it
            console.out.print()
        if printer.text:
            self.add_turn(question, printer.text)
            self._answers.append(printer.stats)

    def close(self) -> None:
        self._server.close()

    def stats(self) -> str:
        if not self._answers:
            raise InputError("Nothing has been answered yet.")
        last = self._answers[-1]
        speed, tau = last.get("tokens_per_second"), last.get("tau")
        parts = [f"last answer: {last.get('tokens', 0)} tokens"]
        parts += [f"{speed:.1f} tokens/s"] if speed else []
        parts += [f"tau {tau:.2f}"] if tau else []
        return f"{', '.join(parts)}\nconversation: {len(self._answers)} answers"

    def forget(self) -> None:
        self._answers = []


class _Printer:
    """Prints chunks as they come, coloured by source."""

    def __init__(self) -> None:
        self.text = ""
        self.stats: dict[str, Any] = {}
        self._shown = 0  # provisional tokens on the screen

    def show(self, chunk: dict[str, Any]) -> None:
        new = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
        self.text += new
        # A gateway may drop what it does not know; then nobody says where the text is from.
        said = chunk.get("moaspec", {"pieces": [{"text": new, "source": "target"}]})
        self.stats = said.get("stats", self.stats)
        for text, style in self._parts(said):
            console.out.print(Text(text, style=style), end="")
        sys.stdout.flush()

    def _parts(self, said: dict[str, Any]) -> Iterator[tuple[str, str]]:
        if "correction" in said:
            yield TAKEN_BACK, CORRECTED
        for piece in said.get("pieces", ()):
            if piece.get("was") == "provisional":  # is on the screen already
                self._shown -= 1
                continue
            yield piece["text"], _style(piece)
        if "correction" in said:
            self._shown = 0
        tail = said.get("provisional", ())
        for piece in tail[self._shown :]:
            yield piece["text"], PROVISIONAL
        self._shown = len(tail)


def _style(piece: dict[str, Any]) -> str:
    if piece.get("was") == "corrected":
        return CORRECTED
    return console.STYLES.get(piece["source"], KEPT)


def _fields(settings: GenerateOptions) -> dict[str, Any]:
    return {
        "max_completion_tokens": settings["max_new_tokens"],
        **{name: settings.get(name) for name in SAMPLING},
    }
