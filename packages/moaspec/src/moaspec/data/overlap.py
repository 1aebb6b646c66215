"""Find training rows that share long word sequences with evaluation prompts."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from moaspec.data.conversations import Conversation
from moaspec_core.chat.messages import words
from moaspec_core.errors import DataError

Ngram = tuple[str, ...]


@dataclass(frozen=True)
class Overlap:
    """A training row that shares a word sequence with a prompt."""

    where: str
    against: str
    words: str


def overlaps(
    training: Iterable[Conversation],
    against: Iterable[Conversation],
    *,
    size: int = 8,
    decode: Callable[[tuple[int, ...]], str],
) -> Iterator[Overlap]:
    """Yield training rows that share `size` consecutive words with a prompt, one finding per row.

    A shorter text matches only a training message of the same words.

    Args:
        training: rows to search: their messages except system messages, or their decoded token ids.
        against: prompts whose user messages must not occur.

    Raises:
        DataError: prompts without text of a user; or a row that cannot be read.
    """
    known: dict[Ngram, str] = {}
    for prompt in against:
        for message in prompt.messages:
            if message["role"] == "user":
                known.update(dict.fromkeys(_ngrams(message["content"], size), prompt.where))
    if not known:
        raise DataError(
            "--against holds no text of a user, so nothing could be found. Name others."
        )
    for row in training:
        found = next(
            (g for text in _texts(row, decode) for g in _ngrams(text, size) if g in known), None
        )
        if found is not None:
            yield Overlap(row.where, known[found], " ".join(found))


def _texts(row: Conversation, decode: Callable[[tuple[int, ...]], str]) -> Iterator[str]:
    if not row.messages:
        yield decode(row.prompt_ids)
        yield decode(row.response_ids or ())
    for message in row.messages:
        if message["role"] not in ("system", "developer"):
            yield message["content"]


def _ngrams(text: str, size: int) -> Iterator[Ngram]:
    found = words(text)
    if found:
        yield from (found[i : i + size] for i in range(max(1, len(found) - size + 1)))
