"""`moaspec data synth`: generate prompts with the target itself.

Given the start of a user turn only, a chat model continues with a user's question, so training data
for a drafter need no data set. Source: Magpie, arXiv 2406.08464.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moaspec.data.rows import read_rows
from moaspec.target.target import Target
from moaspec_core.chat.chat_template import ChatTemplate
from moaspec_core.chat.messages import Message, words
from moaspec_core.errors import DataError, InputError, TrainingError
from moaspec_train.dataset.journal import Journal
from moaspec_train.dataset.response_writer import (
    ConversationTask,
    OutputRow,
    ResponseWriter,
    WriteRequest,
)

SENTINEL = "MOASPEC-USER-TEXT"


@dataclass(frozen=True)
class UserTurn:
    """The first turn of a user, without its text."""

    before: tuple[Message, ...]  # the system message, if there is one
    prefix_ids: tuple[int, ...]  # tokens before it
    suffix: str  # text after it
    suffix_ids: tuple[int, ...]  # the same as tokens


def user_turn(template: ChatTemplate, system: str | None = None) -> UserTurn:
    """The text around a first user turn; DataError if the template has none that is fixed."""
    before = () if system is None else ({"role": "system", "content": system},)
    try:
        text = template.text(template.prepare([*before, {"role": "user", "content": SENTINEL}]))
    except InputError as error:
        raise DataError(str(error)) from error
    prefix, *rest = text.split(SENTINEL)
    if len(rest) != 1:
        raise DataError(
            f"The chat template repeats or drops the user's text ({len(rest)} times), so the "
            "start of a user turn cannot be told. Give prompts of your own instead."
        )
    prefix_ids, suffix_ids = template.tokenize(prefix), template.tokenize(rest[0])
    return UserTurn(before, tuple(prefix_ids), rest[0], tuple(suffix_ids))


MAX_FRUITLESS_GROUPS = 20  # consecutive groups without a new prompt after which generation fails


class PromptGenerator:
    """Creates tasks that generate user prompts.

    Args:
        system_prompts: start conversations with none and with each of these in turn.

    Raises:
        DataError: no chat template, or its user turns have no fixed start.
    """

    def __init__(self, target: Target, system_prompts: Sequence[str] = ()) -> None:
        template = ChatTemplate(target.tokenizer, target.name)
        if not template.exists:
            raise DataError(
                f"{target.name} has no chat template, so it cannot write a user's prompts. Write "
                'texts for it to continue, one {"prompt": "..."} a line, and give them to '
                "moaspec data regenerate."
            )
        self._turns = [user_turn(template, system) for system in (None, *system_prompts)]
        tokenizer: Any = target.tokenizer
        self._tokenizer = tokenizer
        special = set(tokenizer.all_special_ids)
        first = {turn.suffix_ids[:1] for turn in self._turns}
        ends = {token for ids in first for token in ids if token in special}
        self.stop_token_ids = target.stop_token_ids | ends

    def task(self, number: int) -> ConversationTask:
        """Generate one prompt; no row if it does not end."""
        turn = self._turns[number % len(self._turns)]
        result = yield WriteRequest(turn.prefix_ids, number)
        text = self._tokenizer.decode(result.token_ids, skip_special_tokens=True)
        # A template may end the user's turn with plain text instead of a stop token.
        mark = turn.suffix.strip()
        text, marked, _ = text.partition(mark) if mark else (text, "", "")
        if not words(text) or not (marked or result.stop_reason == "stop_token"):
            return []
        messages = [*turn.before, {"role": "user", "content": text.strip()}]
        return [{"id": f"synth-{number}", "messages": messages}]


def synth(
    writer: ResponseWriter,
    generator: PromptGenerator,
    journal: Journal,
    num: int,
    *,
    max_samples: int | None = None,
    report: Callable[[int, int], None] = lambda *_: None,
) -> None:
    """Generate `num` different prompts, continuing at the end of the journal.

    Args:
        num: of prompts in the journal.
        max_samples: end after this number of samples, earlier runs included; None: no limit.
        report: called after each group with (prompts, samples) in all.

    Raises:
        TrainingError: generation yields no new prompts or reaches the limit, or the output file
            cannot be written.
    """
    seen = {_prompt_key(row.value) for row in read_rows(journal.path)}
    size, fruitless = writer.options.group_size, 0
    writer.finished = journal.kept
    while journal.rows < num:
        first = journal.groups * size
        if max_samples is not None and first >= max_samples:
            raise TrainingError(
                f"{first} samples brought {journal.rows} of {num} prompts, which are in "
                f"{journal.path}: the limit of {max_samples} samples is reached. Allow more "
                "tokens, raise the temperature or ask for fewer, in another file."
            )
        rows = writer.write({n: generator.task(n) for n in range(first, first + size)})
        fresh = _new_prompts(rows, seen)[: num - journal.rows]
        journal.commit(fresh)
        report(journal.rows, journal.groups * size)
        fruitless = 0 if fresh else fruitless + 1
        if fruitless == MAX_FRUITLESS_GROUPS:
            raise TrainingError(
                f"The last {MAX_FRUITLESS_GROUPS * size} samples brought no new prompt; "
                f"{journal.rows} of {num} are in {journal.path}. Raise the temperature, allow more "
                "tokens, or give other system prompts."
            )


def _new_prompts(rows: Sequence[OutputRow], seen: set[tuple[str, ...]]) -> list[OutputRow]:
    """Select rows whose normalised prompts are not in `seen`, and add them."""
    fresh = []
    for row in rows:
        key = _prompt_key(row)
        if key not in seen:
            seen.add(key)
            fresh.append(row)
    return fresh


def _prompt_key(row: OutputRow) -> tuple[str, ...]:
    return words(row["messages"][-1]["content"])
