"""The verdict on a race of plain and speculative decoding, its reason, and what to try next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from moaspec_core.cli.options import MODEL

if TYPE_CHECKING:
    from moaspec.evaluate.race import Races

MIN_GAIN = 1.03  # smaller speed-ups are within the difference of two equal decodings


def show_verdict(
    races: Races, screen: Console, unmeasured: str | None = None, *, model: str, drafted: bool
) -> None:
    """The verdict, its reason where there was no gain, and what to try next.

    Args:
        unmeasured: why drafts were not chosen by measured costs; None where they were.
        model: whose texts they are.
        drafted: whether by a drafter; costs are measured for drafters only.
    """
    screen.print()
    screen.print(Text(verdict(races, unmeasured), style="bold"))
    if why := reason(races, unmeasured):
        screen.print(why)
    option = "" if model == MODEL else f" --model {model}"
    if drafted and not _gained(races):
        screen.print(f"Try next: moaspec calibrate{option}     measure this machine when idle")
    else:
        screen.print(f"Try next: moaspec chat{option}          talk with this model")
    screen.print(f"          moaspec serve --open{option}  a page to chat on, and an API")


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
