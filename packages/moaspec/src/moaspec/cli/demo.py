"""`moaspec demo`: plain and speculative decoding side by side, and one verdict."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from moaspec.cli.loading import num_threads
from moaspec.evaluate.prompt_suites import read_prompts
from moaspec_core.bundled import bundled_drafters
from moaspec_core.cli.options import MODEL, Dtype, Model, Threads, with_options
from moaspec_core.cli.prompts import chat_ids
from moaspec_core.cli.terminal import console
from moaspec_core.cli.terminal.console import STYLES, Screen
from moaspec_core.cli.terminal.interrupts import deferred_interrupts
from moaspec_core.cli.terminal.status import loading, require_threads, status
from moaspec_core.errors import InputError
from moaspec_core.tokens.names import ALIASES

if TYPE_CHECKING:
    from moaspec.evaluate.race import Race, TimedDecoding
    from moaspec.model.moa import MoADrafter
    from moaspec.target.target import Target
    from moaspec_core.policy.policies import FreeBranches

INTRODUCTION = (
    "A small language model answers the same prompts twice: plainly, token by token, and with "
    "speculative decoding, which drafts several tokens and checks them in one pass. They take "
    "turns, one pass each. Each clock counts only its own passes."
)
COPIES = (
    "No drafter is bundled for {}: drafts are continuations copied from the prompt and the text so "
    "far (n-gram branches). They gain where an answer repeats its prompt, as an edited file does."
)
MAX_PROMPTS, MAX_TOKENS = 6, 96
ENOUGH_S = 12.0  # seconds of decoding after which no other prompt begins
WARM_UP_TOKENS = 8
FRAME_S = 1 / 15  # seconds from one drawing to the next
MIN_GAIN = 1.03  # smaller speed-ups are within the difference of two equal decodings
TEXTS = {"identical": "same text", "near_tie": "same text up to ties in rounding"}


@with_options
def demo(
    model: Model = MODEL,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = MAX_TOKENS,
    dtype: Dtype = "auto",
    threads: Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, no panes.")] = False,
) -> None:
    """Race plain and speculative decoding.

    Both decode the same prompts, side by side. The first run compiles kernels for this CPU and
    reads the model's vocabulary; later runs find these ready.
    Models for code have prompts about code. Where no drafter is bundled, drafts are copied from the
    text.
    Ctrl-C ends the demo and keeps what was shown. `moaspec eval` measures more methods, in tables.

    Example: moaspec demo
    """
    if max_new_tokens < 1:
        raise InputError(f"--max-new-tokens must be at least 1, got {max_new_tokens}.")
    require_threads(threads)
    # FORCE_COLOR makes no terminal of a pipe: its cursor cannot be moved.
    live = None if sys.stdout.isatty() else False
    screen = Screen(quiet=as_json, highlight=False, markup=False, emoji=False, force_terminal=live)
    screen.print(INTRODUCTION)
    with loading("PyTorch and transformers", threads):
        from moaspec.evaluate.race import Race
        from moaspec.evaluate.report.report import surroundings
    target, drafter, trusted = _loaded(model, dtype)
    cores = num_threads(surroundings()["threads"])
    screen.print(f"{target.name} in {target.precision} on {cores}.")
    if drafter is None:
        screen.print(COPIES.format(model))
    with deferred_interrupts() as interrupts:
        races = _races(
            model, target, drafter, trusted, max_new_tokens, screen, lambda: bool(interrupts)
        )
    total = Race.total(races) if races else None
    if total is not None:
        show_verdict(total, len(races), screen, model, drafted=drafter is not None)
    if as_json:
        drafts = "copies" if drafter is None else "drafter"
        shared = {"target": target.name, "drafts": drafts, "dtype": target.precision}
        each = [{"speedup": race.speedup, **asdict(race)} for race in (*races, total) if race]
        result = {"prompts": each[: len(races)], **(each[-1] if races else {})}
        console.out.print(json.dumps({**shared, **surroundings(), **result}))
    if interrupts:
        raise typer.Exit(130)
    if total is not None and not total.equality.lossless:
        raise typer.Exit(1)


def _loaded(model: str, dtype: str) -> tuple[Target, MoADrafter | None, Callable[[], Target]]:
    """Compile, load and measure, each only where it was not done before.

    Returns:
        The target, its drafter (None: drafts are copied from the text), and a function that loads
        the target that says which of two texts is right.
    """
    from moaspec.backends.cpu.build import must_compile, why_not
    from moaspec.backends.fast_target import same_bits
    from moaspec.backends.load import chosen_dtype
    from moaspec.calibration.choose_layers import layers_options
    from moaspec.calibration.first_use import expected_s, measure_once
    from moaspec.cli.method_loading import MethodSources, load_methods, load_reference_target
    from moaspec.model.moa import MoADrafter

    if must_compile():
        with status("Compiling kernels for this CPU (once; timed elsewhere: 13 to 60 s)"):
            why_not()
    drafted = model in bundled_drafters()
    with status(f"Loading {model} and its drafter" if drafted else f"Loading {model}"):
        sources = MethodSources(model, dtype=chosen_dtype(dtype))
        methods = load_methods(("plain", "moa") if drafted else ("plain",), sources)
    target, drafter = methods[-1].target, methods[-1].drafter
    assert drafter is None or isinstance(drafter, MoADrafter), "a bundled one"
    # Where passes of any width have the same bits, the clock corrects the costs that are shipped.
    if drafter is not None and not same_bits(target):
        options = layers_options(target, drafter)
        if any(option.costs is None or option.costs.busy for option in options):
            known = f"once, about {max(1.0, expected_s(target)):.0f} s by its first passes"
            with status(f"Measuring what passes and drafts cost here ({known})"):
                _, unmeasured = measure_once(target, drafter)
            if unmeasured is not None:
                console.err.print(f"Not measured, because {unmeasured}.")
    return target, drafter, cache(lambda: load_reference_target(methods, sources))


def _races(
    model: str,
    target: Target,
    drafter: MoADrafter | None,
    trusted: Callable[[], Target],
    tokens: int,
    screen: Console,
    stop: Callable[[], bool],
) -> list[Race]:
    """Decode prompt after prompt. A prompt that Ctrl-C interrupts is shown but not counted."""
    from moaspec.evaluate.race import Race, TimedDecoding, compare_texts, run_race

    suite = ALIASES[model].prompts if model in ALIASES else "bundled"
    prompts = read_prompts(suite, limit=MAX_PROMPTS)

    def decodings(ids: list[int], tokens: int) -> tuple[TimedDecoding, TimedDecoding]:
        branches: FreeBranches = "auto" if drafter else True
        return (
            TimedDecoding(target, None, ids, tokens),
            TimedDecoding(target, drafter, ids, tokens, free_branches=branches),
        )

    with status("Warming up"):
        run_race(*decodings(chat_ids(target, prompts[-1].turns[0]), WARM_UP_TOKENS))
    drafted, copied = ("drafted", STYLES["draft"]), ("copied", STYLES["copy"])
    screen.print(Text.assemble("Tokens: ", drafted, ", ", copied, ", the target's own."))
    races: list[Race] = []
    started_s = time.perf_counter()
    for number, prompt in enumerate(prompts, 1):
        if races and time.perf_counter() - started_s > ENOUGH_S:
            break
        ids = chat_ids(target, prompt.turns[0])
        plain, speculative = decodings(ids, tokens)
        heading = f"Prompt {number}: {prompt.turns[0]}"
        if not show_race(heading, plain, speculative, screen, stop=stop):
            break
        equality = compare_texts(plain, speculative, ids, max_new_tokens=tokens, trusted=trusted)
        race = Race(plain=plain.stats, speculative=speculative.stats, equality=equality)
        gain = "" if race.speedup is None else f"{race.speedup:.2f}x, "
        screen.print(f"{number}. {gain}{TEXTS.get(equality.kind, 'DIFFERENT text')}\n")
        races.append(race)
    return races


def show_race(
    heading: str,
    plain: TimedDecoding,
    speculative: TimedDecoding,
    screen: Console,
    *,
    stop: Callable[[], bool],
) -> bool:
    """Run two decodings in turns, and show them; elsewhere than on a terminal, at the end.

    Returns:
        Whether both came to their end.
    """
    from moaspec.evaluate.race import run_race

    drawn_at = 0.0
    with Live(console=screen, auto_refresh=False, transient=True) as live:

        def draw() -> None:
            """Draw in this thread: another one would compete with what is being timed."""
            nonlocal drawn_at
            if time.monotonic() - drawn_at >= FRAME_S:
                live.update(panes(heading, plain, speculative), refresh=True)
                drawn_at = time.monotonic()

        whole = run_race(plain, speculative, watch=draw, stop=stop)
    screen.print(panes(heading, plain, speculative))
    return whole


def panes(heading: str, plain: TimedDecoding, speculative: TimedDecoding) -> Table:
    """A prompt above two columns: a decoding's text, and its figures below."""
    table = Table(
        title=Text(heading), title_justify="left", box=box.ROUNDED, expand=True, show_footer=True
    )
    texts = []
    for name, run in {"plain": plain, "speculative": speculative}.items():
        stats = run.stats
        counts = f"{stats.tokens} tokens, {stats.passes} target passes"
        times = f"{stats.tokens_per_s:.1f} tokens/s, {stats.seconds:.2f} s"
        header = f"{name}, done" if run.done else name
        table.add_column(header, footer=Text(f"{counts}\n{times}"), ratio=1)
        texts.append(Text.assemble(*((piece, STYLES[source]) for piece, source in run.pieces)))
    table.add_row(*texts)
    return table


def show_verdict(total: Race, number: int, screen: Console, model: str, *, drafted: bool) -> None:
    """The verdict on all prompts, and what to try next."""
    speculative = total.speculative
    basis = f"{number} prompt{'s' * (number > 1)}, {speculative.tokens} tokens"
    saved = 1 - speculative.passes / total.plain.passes
    # With equal numbers of passes, differences are noise.
    gained = saved > 0 and total.speedup is not None and round(total.speedup, 2) >= MIN_GAIN
    if total.speedup is None:
        screen.print(f"Verdict: FAULT, a text is not the model's own ({basis}).")
        screen.print("`moaspec check` finds the first wrong token; please report it.")
    elif gained:
        fewer = f"{TEXTS[total.equality.kind]}, {saved:.0%} fewer passes"
        screen.print(f"Verdict: {total.speedup:.2f}x as fast, {fewer} ({basis}).")
    else:
        same = TEXTS[total.equality.kind]
        screen.print(f"Verdict: no gain ({total.speedup:.2f}x), {same} ({basis}).")
        tokens = speculative.tokens / speculative.passes
        screen.print(
            f"A speculative pass gave {tokens:.2f} tokens, but took longer by as much or more."
            if saved > 0
            else "No draft was accepted: few or none are made where they do not surely pay."
        )
    option = "" if model == MODEL else f" --model {model}"
    if drafted and not gained:
        screen.print(f"Try next: moaspec calibrate{option}  (measures this machine when idle)")
    else:
        screen.print(f"Try next: moaspec chat{option}  (talk with this model)")
    screen.print(f"          moaspec serve --open{option}  (a page to chat on, and an API)")
