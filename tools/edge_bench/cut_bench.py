"""Cuts emulated links in the middle of texts and judges the text written without a link."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from edge_bench.bench import LOCAL, EdgeSettings, Setup
from edge_bench.case import Case, drafter_name
from moaspec_core.errors import InputError
from moaspec_core.sampling.token_ids import common_length


def run_cut_bench(
    settings: EdgeSettings,
    *,
    after: int,
    alone: int,
    advance: Callable[[str, int], None] = lambda *_: None,
) -> dict[str, Any]:
    """Cut every link in the middle of every prompt's text, and mend it.

    Args:
        settings: links, prompts, and what is drafted with; N is the first of its list.
        after: verified tokens before the cut.
        alone: tokens that the device writes before the link is mended.
        advance: told of what comes next, and of how many links, for a progress display.

    Returns:
        Plain values: per link and prompt see `cut_and_return`, with the target's opinion of what
        was written alone and whether the final text is that of plain decoding. And whether Ctrl-C
        ended it early.

    Raises:
        InputError: a link that is not emulated, or a cut that the text does not reach.
    """
    if LOCAL in settings.links:
        raise InputError(f"The link {LOCAL!r} is not emulated and cannot be cut; use lan.")
    if not (0 < after < settings.max_new_tokens and alone > 0):
        raise InputError(
            f"A cut comes after 1 to {settings.max_new_tokens - 1} tokens and leaves at least one "
            f"to write alone, got {after} and {alone}."
        )
    with Setup(settings) as setup:
        plain = _plain(setup)
        links: dict[str, Any] = {}
        interrupted = False
        try:
            for name in settings.links:
                advance(f"{name}: cut", len(settings.links))
                setup.shape(name)
                job = {"do": "cut", "case": _case(setup), "cut": _cut(settings, after, alone)}
                links[name] = [
                    _judged(setup, prompt, one, text)
                    for one, prompt, text in zip(
                        setup.cut(job), plain["prompts"], plain["texts"], strict=True
                    )
                ]
        except KeyboardInterrupt:
            if not links:
                raise
            interrupted = True
        return {"settings": asdict(settings), "links": links, "interrupted": interrupted}


def _case(setup: Setup) -> dict[str, Any]:
    speed, layers = setup.settings.server_speeds[0], setup.settings.num_target_layers[0]
    step_s = speed * setup.steps[drafter_name("moa", layers)]
    drafted = setup.settings.drafted
    return asdict(Case(mode="ahead", num_target_layers=layers, step_s=step_s, drafted=drafted))


def _cut(settings: EdgeSettings, after: int, alone: int) -> dict[str, int]:
    return {"after": after, "alone": alone, "max_new_tokens": settings.max_new_tokens}


def _plain(setup: Setup) -> dict[str, Any]:
    """Each prompt's text by the server alone."""
    case = asdict(Case(mode="plain"))
    job = {"do": "case", "case": case, "max_new_tokens": setup.settings.max_new_tokens}
    found: dict[str, Any] = setup.device.ask(job)["answer"]
    return found


def _judged(
    setup: Setup, prompt: list[int], one: dict[str, Any], plain: list[int]
) -> dict[str, Any]:
    """What the target thinks of the tokens that were written without it."""
    before, alone = one["before"], one["alone"]
    opinion: dict[str, Any] = {"log_likelihood": None, "agreement": None}
    if alone:
        job = {"do": "opinion", "seen": [*prompt, *plain[:before]], "text": alone}
        opinion = setup.server.ask(job)
    kept = common_length(alone, plain[before:])
    return {**one, **opinion, "kept": kept, "same_text": one["text"] == plain}
