"""The verdict on a race of plain and speculative decoding, its reason, and what to try next."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from moaspec_core.cli.options import MODEL

if TYPE_CHECKING:
    from moaspec.evaluate.race import Races

MIN_GAIN = 1.03  # smaller speed-ups are within the difference of two equal decodings


def show_verdict(
    races: Races,
    screen: Console,
    *,
    details: bool,
    unmeasured: str | None = None,
    model: str = MODEL,
    drafter: bool = True,
) -> None:
    """The verdict, its reason where there was no gain, and what to try next.

    Args:
        unmeasured: why drafts were not chosen by measured costs; None where they were.
        model: whose texts they are.
        drafter: whether one drafted; costs are measured for drafters only.
    """
    screen.print()
    screen.print(Text(verdict(races, unmeasured), style="bold"))
    if why := reason(races, unmeasured):
        screen.print(why)
    suggested = try_next(
        command(), gained=_gained(races) or not drafter, details=details, model=model
    )
    for line in suggested:
        screen.print(line)


def verdict(races: Races, unmeasured: str | None = None) -> str:
    """One line: the speed-up, and the amount of text."""
    number = len(races.each)
    basis = f"{number} {'prompt' if number == 1 else 'prompts'}, {races.speculative.tokens} tokens"
    if races.speedup is None:
        wrong = sum(not one.equality.lossless for one in races.each)
        are = "is" if wrong == 1 else "are"
        return f"Verdict: FAULT, {wrong} of {number} texts {are} not the model's own."
    if unmeasured is not None and not _gained(races):
        return (
            f"Verdict: none on speed, this machine is not measured; {_equality(races)} ({basis})."
        )
    times = f"{races.speedup:.2f}x"
    gain = f"{times} as fast" if _gained(races) else f"no gain ({times})"
    return f"Verdict: {gain}, {_equality(races)}, {_saved_passes(races)} ({basis})."


def _gained(races: Races) -> bool:
    """Whether there was a gain; with equal numbers of passes, differences are noise."""
    fewer = races.speculative.passes < races.plain.passes
    return fewer and races.speedup is not None and round(races.speedup, 2) >= MIN_GAIN


def _equality(races: Races) -> str:
    same = all(one.equality.kind == "identical" for one in races.each)
    return "same text" if same else "same text up to ties in rounding"


def _saved_passes(races: Races) -> str:
    saved = 1 - races.speculative.passes / races.plain.passes
    return f"{saved:.0%} fewer passes" if saved >= 0.005 else "as many passes"


def reason(races: Races, unmeasured: str | None = None) -> str | None:
    """Why there was no gain, or what to do about a fault; None after a gain."""
    if not races.lossless:
        return (
            "No speed-up is shown. `moaspec check` finds the first wrong token; please report it."
        )
    if _gained(races):
        return None
    if unmeasured is not None:
        return (
            f"Reason: it is not measured, because {unmeasured}. Without its costs only drafts that "
            "surely pay are made. Run the demo again when the machine is idle."
        )
    plain, speculative = races.plain, races.speculative
    if speculative.passes == plain.passes:
        return "Reason: no draft was accepted. Few or none are made where they do not surely pay."
    longer = (speculative.seconds / speculative.passes) / (plain.seconds / plain.passes)
    return (
        f"Reason: a speculative pass gave {speculative.tokens_per_pass:.2f} tokens but took "
        f"{longer:.2f} times as long as a plain one, drafting included."
    )


def try_next(name: str, *, gained: bool, details: bool, model: str = MODEL) -> tuple[str, str]:
    """Two commands to try next.

    Args:
        gained: whether speculation was faster; if not, a busy machine may be the reason.
        details: whether this demo shows its tables already.
        model: of the demo.
    """
    option = "" if model == MODEL else f" --model {model}"
    first = (f"{name} chat{option}", "talk with this model")
    if not gained:
        first = (f"{name} calibrate{option}", "measure this machine when idle")
    second = (f"{name} demo{option} --details", "tables of all methods")
    if details:
        second = (f"{name} serve{option} --open", "a page to chat on, and an API")
    width = max(len(first[0]), len(second[0]))
    return (
        f"Try next: {first[0]:<{width}}  {first[1]}",
        f"          {second[0]:<{width}}  {second[1]}",
    )


def command() -> str:
    """How the user calls this program."""
    called = Path(sys.argv[0])
    if shutil.which("moaspec") == str(called):
        return "moaspec"
    return str(called) if called.name == "moaspec" else "python -m moaspec"
