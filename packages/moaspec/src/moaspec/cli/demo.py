"""`moaspec demo`: plain and speculative decoding side by side, and one verdict."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from moaspec.cli import panes
from moaspec.cli.loading import num_threads
from moaspec.cli.race_verdict import show_verdict
from moaspec.evaluate.prompt_suites import Prompt, read_prompts
from moaspec_core.bundled import bundled_drafters
from moaspec_core.cli.options import MODEL, Dtype, Model, Threads, with_options
from moaspec_core.cli.prompts import chat_ids
from moaspec_core.cli.terminal import console
from moaspec_core.cli.terminal.console import Screen
from moaspec_core.cli.terminal.interrupts import deferred_interrupts
from moaspec_core.cli.terminal.status import loading, require_threads, status
from moaspec_core.errors import InputError
from moaspec_core.tokens.names import ALIASES

if TYPE_CHECKING:
    from moaspec.evaluate.race import Race, Races, TimedDecoding
    from moaspec.model.moa import MoADrafter
    from moaspec.target.target import Target
    from moaspec_core.policy.policies import FreeBranches


INTRODUCTION = (
    "A small language model answers the same prompts twice: plainly, token by token, and with "
    "speculative decoding, which drafts several tokens and checks them in one pass."
)
COPIES = (
    "No drafter is bundled for {}: drafts are continuations copied from the prompt and the text so "
    "far (n-gram branches). They gain where an answer repeats its prompt, as an edited file does."
)
FAIRNESS = "They take turns, one pass each. Each clock counts only its own passes."
DECODING_S = 12.0  # seconds of decoding that the demo aims at
LONGEST_S = 20.0  # after which no further prompt begins: other processes began to use the CPU
MIN_PROMPTS, MAX_PROMPTS = 3, 6
MIN_TOKENS, MAX_TOKENS = 32, 96
WARM_UP_TOKENS = 8


@with_options
def demo(
    model: Model = MODEL,
    max_new_tokens: Annotated[
        int | None, "Tokens per prompt; by default as many as a short demo has time for."
    ] = None,
    dtype: Dtype = "auto",
    threads: Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, no panes.")] = False,
) -> None:
    """Race plain and speculative decoding.

    Both decode the same prompts, side by side. The first run compiles kernels for this CPU and
    dequantises the model's weights; later runs find all of this ready.
    Models for code have prompts about code. Where no drafter is bundled, drafts are copied from the
    text.
    Ctrl-C ends the demo and keeps what was shown. `moaspec eval` measures more methods, in tables.

    Example: moaspec demo
    """
    if max_new_tokens is not None and max_new_tokens < 1:
        raise InputError(f"--max-new-tokens must be at least 1, got {max_new_tokens}.")
    require_threads(threads)
    screen = Screen(quiet=True) if as_json else new_screen()
    screen.print(INTRODUCTION)
    steps = Steps()
    libraries = "PyTorch and transformers"
    with steps(f"Loading {libraries}", shown=loading(libraries, threads)):
        pass
    setting = _prepared(model, dtype, steps)
    with steps("Timing the first tokens of both"):
        number, tokens = plan(_pair_s(setting), max_new_tokens)
    prompts = setting.prompts[:number]
    screen.print(f"{setting}.")
    if setting.drafter is None:
        screen.print(COPIES.format(model))
    limit_s = LONGEST_S if max_new_tokens is None else float("inf")
    with deferred_interrupts() as interrupts:
        with steps("Decoding the prompts, in turns") if as_json else nullcontext():
            races = _races(setting, prompts, tokens, screen, lambda: bool(interrupts), limit_s)
        if races.each:
            drafted = setting.drafter is not None
            show_verdict(races, screen, setting.unmeasured, model=model, drafted=drafted)
    if as_json:
        console.out.print(json.dumps(_facts(setting, races, steps)))
    if interrupts:
        raise typer.Exit(130)
    if not races.lossless:
        raise typer.Exit(1)


class Steps:
    """Slow steps before the races; `seconds` has their times by their names."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(
        self, name: str, expected: str = "", shown: AbstractContextManager[object] | None = None
    ) -> Iterator[None]:
        """Show a status line during the block, and the time that it took after it.

        Args:
            expected: the time of a long step.
            shown: in place of the status line.
        """
        started = time.perf_counter()
        with shown or status(f"{name} ({expected})" if expected else name):
            yield
        self.seconds[name] = time.perf_counter() - started
        if console.err.is_terminal:  # elsewhere the line of its beginning is enough
            console.err.print(f"{name}: {self.seconds[name]:.1f} s")


def new_screen() -> Screen:
    """A console that breaks lines between words; in files and pipes it breaks none."""
    soft_wrap = not sys.stdout.isatty()
    return Screen(highlight=False, markup=False, emoji=False, soft_wrap=soft_wrap)


@dataclass(frozen=True)
class Setting:
    """Models and settings of the demo."""

    target: Target
    drafter: MoADrafter | None  # None: drafts are copied from the text
    prompts: Sequence[Prompt]
    trusted: Callable[[], Target]  # loads the target that says which of two texts is right
    # Why drafts are not chosen by measured costs; None if they are.
    unmeasured: str | None = None

    def decodings(self, prompt: Prompt, tokens: int) -> tuple[TimedDecoding, TimedDecoding]:
        """A plain and a speculative one of a prompt."""
        from moaspec.evaluate.race import TimedDecoding

        ids = chat_ids(self.target, prompt.turns[0])
        branches: FreeBranches = "auto" if self.drafter else True
        return (
            TimedDecoding(self.target, None, ids, tokens),
            TimedDecoding(self.target, self.drafter, ids, tokens, free_branches=branches),
        )

    def __str__(self) -> str:
        import torch

        from moaspec.evaluate.report.report import machine

        threads = num_threads(torch.get_num_threads())
        return (
            f"{self.target.name} in {self.target.precision} on {threads} of "
            f"{machine()['processor']}"
        )


def _prepared(model: str, dtype: str, steps: Steps) -> Setting:
    """Compile, dequantise, load and measure, each only where it was not done before."""
    from moaspec.backends.cpu.build import must_compile, why_not
    from moaspec.backends.fast_target import same_bits
    from moaspec.backends.load import chosen_dtype
    from moaspec.calibration.choose_layers import layers_options
    from moaspec.calibration.first_use import expected_s, measure_once
    from moaspec.cli.method_loading import MethodSources, load_methods, load_reference_target
    from moaspec.model.moa import MoADrafter
    from moaspec.target.registry import find_weights, must_dequantise

    if must_compile():
        with steps("Compiling kernels for this CPU", "once; timed elsewhere: 10 to 30 s"):
            why_not()
    if must_dequantise(model):
        times = ALIASES[model].size / ALIASES[MODEL].size
        known = "timed elsewhere" if model == MODEL else "by its size"
        expected = f"once; {known}: {15 * times:.0f} to {60 * times:.0f} s"
        with steps("Dequantising the model's weights", expected):
            find_weights(model)
    drafted = model in bundled_drafters()
    names = ("plain", "moa") if drafted else ("plain",)
    with steps(f"Loading {model} and its drafter" if drafted else f"Loading {model}"):
        sources = MethodSources(model, dtype=chosen_dtype(dtype))
        methods = load_methods(names, sources)
    target, drafter = methods[-1].target, methods[-1].drafter
    assert drafter is None or isinstance(drafter, MoADrafter), "a bundled one"
    unmeasured = None
    unknown = drafter is not None and any(
        option.costs is None or option.costs.busy for option in layers_options(target, drafter)
    )
    if drafter is not None and unknown and not same_bits(target):
        # Else shipped costs do, which the clock corrects.
        expected = f"once, about {max(1.0, expected_s(target)):.0f} s by its first passes"
        with steps("Measuring what passes and drafts cost here", expected):
            _, unmeasured = measure_once(target, drafter)
        if unmeasured is not None:
            console.err.print(f"Not measured, because {unmeasured}.")
    prompts = read_prompts(ALIASES[model].prompts if model in ALIASES else "bundled")
    trusted = cache(lambda: load_reference_target(methods, sources))
    return Setting(target, drafter, prompts, trusted, unmeasured)


def _pair_s(setting: Setting) -> float:
    """Seconds that both decodings take for a token each, after a warm-up."""
    from moaspec.evaluate.race import run_race

    for _ in range(2):  # the first one warms up
        plain, speculative = setting.decodings(setting.prompts[-1], WARM_UP_TOKENS)
        run_race(plain, speculative)
    return sum(1 / one.stats.tokens_per_s for one in (plain, speculative))


def plan(pair_s: float, max_new_tokens: int | None) -> tuple[int, int]:
    """How many prompts and tokens fit; both decodings take `pair_s` seconds a token each."""
    tokens = max_new_tokens or min(
        MAX_TOKENS, max(MIN_TOKENS, int(DECODING_S / (MIN_PROMPTS * pair_s)))
    )
    prompts = int(DECODING_S / (tokens * pair_s))
    return min(MAX_PROMPTS, max(MIN_PROMPTS, prompts)), tokens


def _races(
    setting: Setting,
    prompts: Sequence[Prompt],
    tokens: int,
    screen: Console,
    stop: Callable[[], bool],
    limit_s: float,
) -> Races:
    """Decode prompt after prompt. A prompt that Ctrl-C interrupts is shown but not counted.

    Args:
        limit_s: seconds after which no further prompt begins.
    """
    from moaspec.evaluate.race import Race, Races, compare_texts

    screen.print(FAIRNESS)
    if panes.can_redraw(screen):
        screen.print(panes.legend(screen))
    races: list[Race] = []
    started_s = time.perf_counter()
    for number, prompt in enumerate(prompts, 1):
        if races and time.perf_counter() - started_s > limit_s:
            screen.print(f"Ended after {len(races)} of {len(prompts)} prompts: the CPU is busy.")
            break
        heading = f"Prompt {number} of {len(prompts)}: {prompt.turns[0]}"
        ids = chat_ids(setting.target, prompt.turns[0])
        plain, speculative = setting.decodings(prompt, tokens)
        last = number == len(prompts)
        if not panes.show_race(heading, plain, speculative, screen, stop=stop, last=last):
            break
        equality = compare_texts(
            plain, speculative, ids, max_new_tokens=tokens, trusted=setting.trusted
        )
        race = Race(
            name=prompt.category or prompt.question_id,
            prompt=prompt.turns[0],
            plain=plain.stats,
            speculative=speculative.stats,
            equality=equality,
        )
        races.append(race)
        screen.print(panes.result_line(number, race))
    return Races(races)


def _facts(setting: Setting, races: Races, steps: Steps) -> dict[str, Any]:
    """The settings, the seconds of each step and all measurements, for `--json`."""
    from moaspec.evaluate.report.report import surroundings

    return {
        "target": setting.target.name,
        "drafts": "copies" if setting.drafter is None else "drafter",
        "dtype": setting.target.precision,
        **surroundings(),
        "steps_s": steps.seconds,
        "unmeasured": setting.unmeasured,
        **races.as_json(),
    }
