"""Read training examples from data in any supported format."""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from moaspec.data.conversations import Conversation, ReadReport, read_conversations
from moaspec.data.loss_mask import masked_tokens
from moaspec.data.rows import OnMalformed, refuse
from moaspec_core.chat.chat_template import ChatTemplate
from moaspec_core.errors import DataError
from moaspec_train.dataset.example_cache import (
    cache_file,
    one_at_a_time,
    read_cached,
    write_cached,
)
from moaspec_train.dataset.examples import Example
from moaspec_train.progress import REPORT_EVERY_S

log = logging.getLogger("moaspec.dataset.read_examples")


def read_examples(
    sources: Iterable[str | Path],
    *,
    vocab_size: int,
    max_length: int,
    tokenizer: Any = None,
    stop_token_ids: Collection[int] = (),
    on_malformed: OnMalformed = refuse,
    report: ReadReport | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> list[Example]:
    """Read every source, cutting examples to `max_length` tokens; or take them from the cache.

    Examples without a response of two tokens are left out and counted. Those of whole files without
    a malformed row are kept.

    Args:
        sources: files and data sets, see `read_conversations`.
        vocab_size: of the target; larger ids are refused.
        max_length: tokens of one example.
        tokenizer: the target's; rows of `prompt_ids` and `response_ids` need none.
        on_malformed: called for each malformed row.
        report: counts columns, files and examples that are not used.
        stopped: called before each row; True ends the reading.

    Raises:
        DataError: a source is missing, or a row is malformed; the message names file and line.
    """
    names = list(map(str, sources))
    path = cache_file(
        names, tokenizer, vocabulary=vocab_size, length=max_length, stops=stop_token_ids
    )
    kept = read_cached(path)
    if kept is None:
        with one_at_a_time(path):
            kept = read_cached(path)
            if kept is None:
                settings = (vocab_size, max_length, tokenizer, stop_token_ids)
                kept = _tokenised(names, path, settings, on_malformed, stopped)
    examples, found = kept
    if report is not None:
        report.add(found)
    if not examples:
        raise DataError(
            f"No usable training examples in {', '.join(names)}: every source was empty or its "
            "prompts too long. Give other data, or a larger max_length."
        )
    return examples


def _tokenised(
    names: Sequence[str],
    path: Path | None,
    settings: tuple[int, int, Any, Collection[int]],
    on_malformed: OnMalformed,
    stopped: Callable[[], bool],
) -> tuple[list[Example], ReadReport]:
    """Read sources and keep the examples in `path`; from there they come if they are whole."""
    vocab_size, max_length, tokenizer, stop_token_ids = settings
    template, found, is_whole = ChatTemplate(tokenizer), ReadReport(), True

    def skip(error: DataError) -> None:
        nonlocal is_whole
        is_whole = False
        on_malformed(error)

    def example_of(row: Conversation) -> Example:
        example = _example(row, template, stop_token_ids, found, max_length)
        _check_ids(example, vocab_size, row.where)
        return example

    rows = takewhile(lambda _: not stopped(), read_conversations(names, skip, found))
    examples = list(_cut(_joined(rows, example_of, skip), max_length, found))
    found.forget_columns_of(template.source)
    if examples and is_whole and not stopped():
        write_cached(path, examples, found)
        return read_cached(path) or (examples, found)
    return examples, found


def _joined(
    rows: Iterable[Conversation],
    example_of: Callable[[Conversation], Example],
    on_malformed: OnMalformed,
) -> list[Example]:
    """One example of each conversation, also where its turns are rows of token ids."""
    found: list[Example] = []
    previous = Conversation(where="")
    told, started = 0.0, time.monotonic()
    for number, row in enumerate(rows):
        elapsed = time.monotonic() - started
        if elapsed >= told + REPORT_EVERY_S:
            told = elapsed
            log.info("Read %d rows in %.0f s; now at %s", number, elapsed, row.where)
        try:
            example = example_of(row)
        except DataError as error:
            on_malformed(error)
            continue
        if _follows(previous, row):
            example = _appended(found, example)
        found.append(example)
        previous = row
    return found


def _example(
    conversation: Conversation,
    template: ChatTemplate,
    stop_token_ids: Collection[int],
    report: ReadReport,
    max_length: int,
) -> Example:
    if not conversation.prompt_ids:
        masked = masked_tokens(template, conversation, stop_token_ids, max_length)
        report.turns_without_loss += masked.turns - masked.turns_with_loss
        return Example.from_mask(masked.token_ids, masked.written)
    if conversation.response_ids is None:
        raise DataError(
            f"{conversation.where}: 'prompt_ids' without 'response_ids'. Let the target write "
            "responses: moaspec data regenerate."
        )
    try:
        return Example(conversation.prompt_ids, conversation.response_ids)
    except OverflowError as error:
        raise DataError(f"{conversation.where}: a token id has more than 31 bits.") from error


def _check_ids(example: Example, vocab_size: int, where: str) -> None:
    wrong = example.tokens[(example.tokens < 0) | (example.tokens >= vocab_size)]
    if len(wrong):
        raise DataError(
            f"{where}: token id {wrong[0]} is outside 0..{vocab_size - 1}. "
            "The row is another target's: name that one, or give text."
        )


def _follows(previous: Conversation, conversation: Conversation) -> bool:
    """Whether both are token rows of one conversation."""
    named = bool(conversation.name) and conversation.name == previous.name
    return named and bool(conversation.prompt_ids and previous.prompt_ids)


def _appended(found: list[Example], example: Example) -> Example:
    """Append a turn to its conversation's example if its prompt starts with that example."""
    earlier, (prompt, whole) = found[-1], example.ends
    length = len(earlier)
    if prompt < length or not np.array_equal(example.tokens[:length], earlier.tokens):
        return example
    return Example.of(example.tokens, (*found.pop().ends, prompt, whole))


def _cut(examples: Iterable[Example], max_length: int, report: ReadReport) -> Iterator[Example]:
    for example in examples:
        kept = example.cut(max_length)
        if kept is None:
            report.without_response += 1
            continue
        report.cut += len(example) > max_length
        yield kept


def examples_of_answers(rows: Iterable[Mapping[str, Any]], max_length: int) -> list[Example]:
    """The examples of rows that `regenerate` wrote, as `read_examples` reads them from a file."""
    found: list[Example] = []
    for row in rows:
        example = Example(row["prompt_ids"], row["response_ids"])
        found.append(_appended(found, example) if row["turn"] else example)
    return list(_cut(found, max_length, ReadReport()))
