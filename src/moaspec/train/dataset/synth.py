"""`moaspec data synth`: prompts that the target itself imagines.

Given only the start of a user turn, a chat model goes on as a user would: with a question. So data
for a drafter need no data set. Source of the idea: Magpie, arXiv 2406.08464.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moaspec.data.messages import Message
from moaspec.data.row_sources import read_records
from moaspec.data.templates.chat_template import ChatTemplate
from moaspec.data.templates.user_turn import UserTurn, user_turn
from moaspec.errors import TrainingError
from moaspec.target.target import Target
from moaspec.train.dataset.journal import Journal
from moaspec.train.dataset.overlap import words
from moaspec.train.dataset.response_writer import (
    ConversationTask,
    OutputRow,
    ResponseWriter,
    WriteRequest,
)

MAX_FRUITLESS_GROUPS = 20
"""Groups in a row that bring nothing new before giving up."""


@dataclass(frozen=True)
class _ConversationStart:
    """A conversation's beginning, before the user speaks."""

    system: str | None
    turn: UserTurn


class PromptGenerator:
    """What a target's users might ask.

    Args:
        target: whose chat template and vocabulary.
        system_prompts: conversations begin with each of these in turn, and without one.

    Raises:
        DataError: no chat template, or one that hides where a user turn begins.
    """

    def __init__(self, target: Target, system_prompts: Sequence[str] = ()) -> None:
        template = ChatTemplate(target.tokenizer)
        self._openings = [
            _ConversationStart(system, user_turn(template, system))
            for system in (None, *system_prompts)
        ]
        tokenizer: Any = target.tokenizer
        self._tokenizer = tokenizer
        special = set(tokenizer.all_special_ids)
        first = {opening.turn.suffix_ids[:1] for opening in self._openings}
        ends = {token for ids in first for token in ids if token in special}
        self.stop_token_ids = target.stop_token_ids | ends

    def author(self, number: int) -> ConversationTask:
        """Imagines one prompt; no row when it does not come to an end."""
        opening = self._openings[number % len(self._openings)]
        result = yield WriteRequest(opening.turn.prefix_ids, number)
        text = self._tokenizer.decode(result.token_ids, skip_special_tokens=True)
        # A template may end the user's turn with plain text, which no stop token tells.
        mark = opening.turn.suffix.strip()
        text, marked, _ = text.partition(mark) if mark else (text, "", "")
        if not words(text) or not (marked or result.stop_reason == "stop_token"):
            return []
        messages: list[Message] = [{"role": "user", "content": text.strip()}]
        if opening.system is not None:
            messages.insert(0, {"role": "system", "content": opening.system})
        return [{"id": f"synth-{number}", "messages": messages}]


def synth(
    writer: ResponseWriter,
    generator: PromptGenerator,
    journal: Journal,
    num: int,
    report: Callable[[int], None] = lambda _: None,
) -> None:
    """Write `num` different prompts, continuing where the journal ends.

    Args:
        writer: samples; its stop tokens must be `generator.stop_token_ids`.
        generator: where prompts come from.
        journal: where rows of `messages` go.
        num: how many.
        report: called with the number of rows after each group.

    Raises:
        TrainingError: nothing new comes any more, or the disk refuses to be written.
    """
    seen = {_prompt_key(record.value) for record in read_records(journal.path)}
    size, fruitless = writer.options.group_size, 0
    while journal.rows < num:
        first = journal.groups * size
        rows = writer.write([generator.author(first + i) for i in range(size)])
        fresh = _new_prompts(rows, seen)[: num - journal.rows]
        journal.commit(fresh)
        report(journal.rows)
        fruitless = 0 if fresh else fruitless + 1
        if fruitless == MAX_FRUITLESS_GROUPS:
            raise TrainingError(
                f"The last {MAX_FRUITLESS_GROUPS * size} samples brought no new prompt; "
                f"{journal.rows} of {num} are in {journal.path}. Raise the temperature, allow more "
                "tokens, or give other system prompts."
            )


def _new_prompts(rows: Sequence[OutputRow], seen: set[tuple[str, ...]]) -> list[OutputRow]:
    """Rows whose prompts differ in more than case, spaces and punctuation; remembers them."""
    fresh = []
    for row in rows:
        key = _prompt_key(row)
        if key not in seen:
            seen.add(key)
            fresh.append(row)
    return fresh


def _prompt_key(row: OutputRow) -> tuple[str, ...]:
    return words(row["messages"][-1]["content"])
