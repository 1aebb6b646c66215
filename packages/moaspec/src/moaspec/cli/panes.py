"""Two decodings of a prompt, side by side on a terminal, or as lines elsewhere."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from moaspec_core.cli.terminal.console import STYLES, is_live

if TYPE_CHECKING:
    from moaspec.evaluate.race import DecodingStats, Race, TimedDecoding
    from moaspec_core.engine.request_state import Source

MIN_WIDTH, MAX_WIDTH = 70, 140  # columns that both panes need, and may take
MARGIN = 2
"""Columns that stay free on the right: a terminal echoes ^C there without beginning a line."""
MIN_TEXT_ROWS, MAX_TEXT_ROWS = 3, 12
"""Rows of text in a pane while it is redrawn; all of them are shown at the end."""
FRAME_ROWS = 5  # rows of a pane beside its text: two borders, a rule, two lines of counters
PROMPT_CHARACTERS = 130  # longer prompts are shortened, so that panes have room below them
FRAME_S = 1 / 15  # seconds from one drawing to the next


@dataclass(frozen=True)
class Pane:
    """One decoding, as it is shown."""

    name: str
    pieces: Sequence[tuple[str, Source]]  # the text, with the source of each piece
    effort: DecodingStats
    done: bool

    @property
    def text(self) -> Text:
        return Text.assemble(*((piece, STYLES[source]) for piece, source in self.pieces))

    @property
    def counters(self) -> tuple[str, str]:
        """Two lines of figures: counts, and times."""
        effort = self.effort
        return (
            f"{effort.tokens} tokens, {effort.passes} target passes",
            f"{effort.tokens_per_s:.1f} tokens/s, {effort.seconds:.2f} s",
        )


def can_redraw(screen: Console) -> bool:
    """Whether panes can be shown live: a terminal that moves its cursor and has room for them."""
    enough = screen.width >= MIN_WIDTH and _text_rows(screen) >= MIN_TEXT_ROWS
    return is_live(screen) and enough


def legend(screen: Console) -> Text:
    """The meaning of the colours, or of bold if there are no colours."""
    copied: tuple[str | tuple[str, str], ...] = (", ", ("copied from the text", STYLES["copy"]))
    if screen.no_color or screen.color_system is None:
        copied = ()
    drafted = ("drafted and accepted", STYLES["draft"])
    return Text.assemble("Tokens: ", drafted, *copied, ", the target's own")


def frame(
    prompt: str, panes: Sequence[Pane], screen: Console, *, text_rows: int | None = None
) -> RenderableType:
    """Prompt and panes. `text_rows`: the last rows of each text; None shows the whole texts."""
    width = _width(screen) // 2
    texts = [_rows(pane.text, width - 4, screen) for pane in panes]
    rows = max(map(len, texts)) if text_rows is None else text_rows
    beside = Table.grid(padding=0)
    beside.add_row(
        *(_panel(pane, text, width, rows) for pane, text in zip(panes, texts, strict=True))
    )
    return Group(Text(shortened(prompt), style="bold"), beside)


def show_race(
    heading: str,
    plain: TimedDecoding,
    speculative: TimedDecoding,
    screen: Console,
    *,
    stop: Callable[[], bool],
    last: bool,
) -> bool:
    """Run two decodings in turns, and show them: redrawn in place, or as lines at the end.

    Args:
        last: whether the panes stay, instead of making room for the next ones.

    Returns:
        Whether both came to their end.
    """
    from moaspec.evaluate.race import run_race

    def panes() -> list[Pane]:
        runs = {"plain": plain, "speculative": speculative}
        return [Pane(name, run.pieces, run.stats, run.done) for name, run in runs.items()]

    if not can_redraw(screen):
        whole = run_race(plain, speculative, stop=stop)
        _show_lines(heading, panes(), screen, same=plain.token_ids == speculative.token_ids)
        return whole
    drawn_at = 0.0
    with Live(console=screen, auto_refresh=False, transient=True) as live:

        def draw() -> None:
            """Draw in this thread: another one would compete with what is being timed."""
            nonlocal drawn_at
            if time.monotonic() - drawn_at >= FRAME_S:
                shown = frame(heading, panes(), screen, text_rows=_text_rows(screen))
                live.update(shown, refresh=True)
                drawn_at = time.monotonic()

        whole = run_race(plain, speculative, watch=draw, stop=stop)
    if last or not whole:
        screen.print(frame(heading, panes(), screen))
    return whole


def _show_lines(heading: str, panes: Sequence[Pane], screen: Console, *, same: bool) -> None:
    """Print text and counters of the panes as lines; one text where both are the same."""
    screen.print(Text(heading, style="bold"))
    for pane in panes[same:]:
        screen.print(pane.text)
    for pane in panes:
        screen.print(Text(f"{pane.name}: {', '.join(pane.counters)}"))


def result_line(number: int, race: Race) -> str:
    """One prompt in a line; it fits into 80 columns."""
    texts = {"identical": "same text", "near_tie": "tie in rounding", "different": "DIFFERENT"}
    gain = "" if race.speedup is None else f"{race.speedup:.2f}x, "
    return (
        f"{number}. {race.name:<12} plain {race.plain.seconds:.2f} s, "
        f"speculative {race.speculative.seconds:.2f} s, {gain}{texts[race.equality.kind]}"
    )


def _panel(pane: Pane, text: Sequence[Text], width: int, rows: int) -> Panel:
    kept = [*text[max(0, len(text) - rows) :]]
    kept += [Text()] * (rows - len(kept))
    words = [Text(line, overflow="ellipsis", no_wrap=True) for line in pane.counters]
    title = f"{pane.name}, done" if pane.done else pane.name
    return Panel(Group(*kept, Rule(style=""), *words), title=title, width=width)


def _rows(text: Text, width: int, screen: Console) -> list[Text]:
    """The text in rows of this width, broken between words."""
    text.expand_tabs(4)
    text.rstrip()
    return list(text.wrap(screen, width)) if text.plain else []


def shortened(prompt: str) -> str:
    """The prompt in one line, shortened if it is long."""
    return textwrap.shorten(prompt, PROMPT_CHARACTERS, placeholder=" ...")


def _width(screen: Console) -> int:
    return min(screen.width - MARGIN, MAX_WIDTH)


def _text_rows(screen: Console) -> int:
    """Rows of text that each pane may have, so that a frame fits into the terminal."""
    heading = -(-PROMPT_CHARACTERS // max(1, _width(screen) - 10)) + 1
    return min(screen.height - heading - 1 - FRAME_ROWS, MAX_TEXT_ROWS)
