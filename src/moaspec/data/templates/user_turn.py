"""What a chat template writes around a user's text."""

from __future__ import annotations

from dataclasses import dataclass

from moaspec.data.messages import Message
from moaspec.data.templates.chat_template import ChatTemplate
from moaspec.errors import DataError, InputError

SENTINEL = "MOASPEC-USER-TEXT"


@dataclass(frozen=True)
class UserTurn:
    """The first turn of a user, without its text.

    Attributes:
        prefix_ids: tokens before it.
        suffix: what follows it, as text.
        suffix_ids: the same as tokens.
    """

    prefix_ids: tuple[int, ...]
    suffix: str
    suffix_ids: tuple[int, ...]


def user_turn(template: ChatTemplate, system: str | None = None) -> UserTurn:
    """How a chat template opens and closes the first user turn.

    Raises:
        DataError: no template, or the rendered text does not contain the user's text once.
    """
    messages: list[Message] = [{"role": "user", "content": SENTINEL}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    try:
        text = template.text(template.prepare(messages))
    except InputError as error:
        raise DataError(str(error)) from error
    prefix, *rest = text.split(SENTINEL)
    if len(rest) != 1:
        raise DataError(
            f"The chat template repeats or drops the user's text ({len(rest)} times), so the "
            "start of a user turn cannot be told. Give prompts of your own instead."
        )
    prefix_ids, suffix_ids = template.tokenize(prefix), template.tokenize(rest[0])
    return UserTurn(tuple(prefix_ids), rest[0], tuple(suffix_ids))
