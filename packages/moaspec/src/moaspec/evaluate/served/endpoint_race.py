"""Two servers side by side on the same prompts: speed, tau and acceptance by category.

Counts of drafts come from the servers themselves: from each answer, else from the difference of
their counters (`/metrics`), which other clients' requests would change.
"""

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from moaspec.evaluate.prompt_suites import Prompt
from moaspec.evaluate.served.asked_server import AskedServer
from moaspec.evaluate.served.server_speculation import Speculation, read_counters

ALL = "all"


@dataclass(frozen=True)
class EndpointAnswer:
    """One answer of one server.

    Attributes:
        tokens: by the server's count; None if it gives none.
    """

    server: int
    prompt: int
    category: str
    text: str
    tokens: int | None
    seconds: float
    speculation: Speculation

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.tokens is None else self.tokens / self.seconds


@dataclass(frozen=True, kw_only=True)
class CategoryResult:
    """Figures of both servers in one category; None where a server does not tell.

    Attributes:
        ratio: the second server's speed by the first one's, the median over prompts.
    """

    category: str
    prompts: int
    same_texts: int
    tokens_per_second: tuple[float | None, float | None]
    tau: tuple[float | None, float | None]
    acceptance: tuple[float | None, float | None]
    ratio: float | None


async def race(
    servers: Sequence[AskedServer], prompts: Sequence[Prompt], max_new_tokens: int
) -> AsyncIterator[EndpointAnswer]:
    """Ask both servers for the first turn of each prompt, alone; they take turns to be first."""
    for server in servers:
        await server.prepare_chats()
    for number, prompt in enumerate(prompts):
        order = range(len(servers)) if number % 2 == 0 else reversed(range(len(servers)))
        for index in order:
            answer = await _ask(servers[index], prompt, max_new_tokens)
            yield replace(answer, server=index, prompt=number)


async def _ask(server: AskedServer, prompt: Prompt, max_new_tokens: int) -> EndpointAnswer:
    before = await server.text_of("/metrics")
    messages = [{"role": "user", "content": prompt.turns[0]}]
    started = time.perf_counter()
    answer = await server.chat(messages, max_new_tokens)
    seconds = time.perf_counter() - started
    speculation = answer.speculation
    if speculation == Speculation() and before is not None:
        after = await server.text_of("/metrics")
        speculation = read_counters(after or "") - read_counters(before)
    return EndpointAnswer(
        0, 0, prompt.category, answer.text, answer.completion_tokens, seconds, speculation
    )


def by_category(answers: Sequence[EndpointAnswer]) -> list[CategoryResult]:
    """The figures of each category that has answers of both servers, then of all."""
    categories = sorted({one.category for one in answers} - {""})
    groups = [(name, [one for one in answers if one.category == name]) for name in categories]
    return [_result(name, group) for name, group in [*groups, (ALL, list(answers))]]


def _result(category: str, answers: Sequence[EndpointAnswer]) -> CategoryResult:
    both: tuple[dict[int, EndpointAnswer], ...] = ({}, {})
    for one in answers:
        both[one.server][one.prompt] = one
    pairs = [(both[0][number], both[1][number]) for number in both[0] if number in both[1]]
    sides = list(zip(*pairs, strict=True)) or [(), ()]
    totals = [sum((one.speculation for one in side), Speculation()) for side in sides]
    ratios = [
        two.tokens_per_second / one.tokens_per_second
        for one, two in pairs
        if one.tokens_per_second and two.tokens_per_second
    ]
    speeds: Any = tuple(_speed(side) for side in sides)
    tau: Any = tuple(total.tau for total in totals)
    acceptance: Any = tuple(total.acceptance_rate for total in totals)
    return CategoryResult(
        category=category,
        prompts=len(pairs),
        same_texts=sum(one.text == two.text for one, two in pairs),
        tokens_per_second=speeds,
        tau=tau,
        acceptance=acceptance,
        ratio=median(ratios) if ratios else None,
    )


def _speed(answers: Sequence[EndpointAnswer]) -> float | None:
    tokens = [one.tokens for one in answers if one.tokens is not None]
    if not answers or len(tokens) < len(answers):
        return None
    return sum(tokens) / sum(one.seconds for one in answers)
