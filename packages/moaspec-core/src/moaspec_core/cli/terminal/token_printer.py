"""Prints tokens as they are verified, coloured by source."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from moaspec_core.cli.terminal import console

if TYPE_CHECKING:
    from moaspec_core.cli.terminal.interrupts import Interrupts
    from moaspec_core.engine.device_target import DeviceTarget
    from moaspec_core.engine.request_state import Event


class TokenPrinter:
    """Prints verified tokens; accepted drafts have another style. `after`: ids before the text."""

    def __init__(self, target: DeviceTarget, after: Sequence[int] = ()) -> None:
        from moaspec_core.sampling.incremental_text import TextStream

        self._stream = TextStream(target.tokenizer, skip_special_tokens=True, after=after)
        self.token_ids: list[int] = []

    def show(self, event: Event) -> None:
        """Print one event's text; a character split over tokens waits for its last one."""
        self.token_ids += event.token_ids
        for token, source in zip(event.token_ids, event.sources, strict=True):
            piece = self._stream.step(token)
            if piece:
                console.out.print(Text(piece, style=console.STYLES[source]), end="")
        sys.stdout.flush()

    def close(self) -> None:
        if self.token_ids:
            console.out.print()


def show_events(
    events: Generator[Event], printer: TokenPrinter | None, interrupts: Interrupts
) -> bool:
    """Decode to the end, printing verified tokens; True if Ctrl-C stopped it, which keeps them."""
    try:
        for event in events:
            if printer is not None:
                printer.show(event)
            if interrupts:
                return True
    except KeyboardInterrupt:
        return True
    finally:
        events.close()
        if printer is not None:
            printer.close()
    return False
