"""From conversations to token ids: prompts, and which tokens the assistant generated."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from jinja2.exceptions import TemplateError

from moaspec.errors import DataError
from moaspec.train.conversations import Conversation, Message
from moaspec.train.data import Example

Tokenizer = Any
"""Transformers' own; its methods are not typed."""

SENTINEL = "MOASPEC-USER-TEXT"
GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def prompt_ids(tokenizer: Tokenizer | None, conversation: Conversation) -> list[int]:
    """What the target is given to write the next assistant turn.

    Raises:
        DataError: no chat template for more than a plain text, or a template that refuses it.
    """
    tokenizer = _required(tokenizer, conversation)
    if not tokenizer.chat_template and conversation.plain:
        return list(tokenizer(conversation.messages[0]["content"])["input_ids"])
    _templated(tokenizer, conversation)
    return _ids(tokenizer, _render(tokenizer, conversation, ask=True))


def encode(
    tokenizer: Tokenizer | None, conversation: Conversation, stop_token_ids: Collection[int]
) -> Example:
    """A conversation's tokens, and which of them the assistant generated.

    A template that marks them (`{% generation %}`) is believed. With any other, an assistant turn
    begins where the prompt for it ends and stops after its first stop token. A turn counts only if
    the whole conversation's tokens repeat both exactly: templates that rewrite earlier turns (most
    drop their thinking) leave those turns without loss, because what the target generated is
    not there any more.

    Args:
        tokenizer: the target's.
        conversation: with at least one assistant turn.
        stop_token_ids: ids that end a turn.

    Raises:
        DataError: no assistant turn can be located.
    """
    tokenizer = _templated(tokenizer, conversation)
    if not any(message["role"] == "assistant" for message in conversation.messages):
        raise DataError(
            f"{conversation.where}: no assistant turn to learn from. Let the target write one: "
            "moaspec data regenerate."
        )
    if GENERATION_MARK.search(tokenizer.get_chat_template(tools=_tools(conversation))):
        example = _marked(tokenizer, conversation)
    else:
        example = _derived(tokenizer, conversation, stop_token_ids)
    if len(example.pieces) < 2 or not example.pieces[0]:
        raise DataError(
            f"{conversation.where}: no assistant turn's tokens can be located in what the chat "
            "template makes of the conversation. Rows of `prompt_ids` and `response_ids` need no "
            "template: moaspec data regenerate writes them."
        )
    return example


@dataclass(frozen=True)
class UserTurn:
    """What a chat template writes around a user's text.

    Attributes:
        prefix_ids: tokens before it.
        suffix: what follows it, as text.
        suffix_ids: the same as tokens.
    """

    prefix_ids: tuple[int, ...]
    suffix: str
    suffix_ids: tuple[int, ...]


def user_turn(tokenizer: Tokenizer | None, system: str | None = None) -> UserTurn:
    """How the tokenizer's chat template opens and closes the first user turn.

    Raises:
        DataError: no template, or one that does not contain the user's text exactly once.
    """
    where = "user turn"
    messages: list[Message] = [{"role": "user", "content": SENTINEL}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    conversation = Conversation(where=where, messages=tuple(messages))
    tokenizer = _templated(tokenizer, conversation)
    prefix, *rest = _render(tokenizer, conversation, ask=False).split(SENTINEL)
    if len(rest) != 1:
        raise DataError(
            f"The chat template repeats or drops the user's text ({len(rest)} times), so the "
            "start of a user turn cannot be told. Give prompts of your own instead."
        )
    return UserTurn(tuple(_ids(tokenizer, prefix)), rest[0], tuple(_ids(tokenizer, rest[0])))


def _derived(
    tokenizer: Tokenizer, conversation: Conversation, stop_token_ids: Collection[int]
) -> Example:
    """Locate assistant turns by rendering the conversation up to and with each of them."""
    messages = conversation.messages
    whole = _ids(tokenizer, _render(tokenizer, conversation, ask=False))
    written = [False] * len(whole)
    for index in (i for i, message in enumerate(messages) if message["role"] == "assistant"):
        before = replace(conversation, messages=messages[:index])
        if not before.messages:
            continue
        upto = replace(conversation, messages=messages[: index + 1])
        given = _ids(tokenizer, _render(tokenizer, before, ask=True))
        ids = _ids(tokenizer, _render(tokenizer, upto, ask=False))
        stop = _turn_end(ids, len(given), stop_token_ids)
        if ids[: len(given)] == given and whole[:stop] == ids[:stop]:
            written[len(given) : stop] = [True] * (stop - len(given))
    return Example.from_mask(whole, written)


def _turn_end(ids: list[int], start: int, stop_token_ids: Collection[int]) -> int:
    """Past the first stop token; what a template adds after it was not generated."""
    ends = (i + 1 for i in range(start, len(ids)) if ids[i] in stop_token_ids)
    return next(ends, len(ids))


def _marked(tokenizer: Tokenizer, conversation: Conversation) -> Example:
    try:
        encoded = tokenizer.apply_chat_template(
            list(conversation.messages),
            tools=_tools(conversation),
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
    except (TemplateError, ValueError, TypeError) as error:
        raise _refused(conversation, error) from error
    return Example.from_mask(encoded["input_ids"], encoded["assistant_masks"])


def _render(tokenizer: Tokenizer, conversation: Conversation, *, ask: bool) -> str:
    try:
        return tokenizer.apply_chat_template(
            list(conversation.messages),
            tools=_tools(conversation),
            add_generation_prompt=ask,
            tokenize=False,
        )
    except (TemplateError, ValueError, TypeError) as error:
        raise _refused(conversation, error) from error


def _refused(conversation: Conversation, error: Exception) -> DataError:
    roles = ", ".join(message["role"] for message in conversation.messages)
    return DataError(
        f"{conversation.where}: the target's chat template refuses these messages ({roles}): "
        f"{error}"
    )


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of rendered text; the template has written all special tokens itself."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _tools(conversation: Conversation) -> list[Any] | None:
    return list(conversation.tools) or None


def _required(tokenizer: Tokenizer | None, conversation: Conversation) -> Tokenizer:
    if tokenizer is None:
        raise DataError(
            f"{conversation.where}: the target has no tokenizer, so it cannot read text. "
            "Give rows of `prompt_ids`."
        )
    return tokenizer


def _templated(tokenizer: Tokenizer | None, conversation: Conversation) -> Tokenizer:
    tokenizer = _required(tokenizer, conversation)
    if not tokenizer.chat_template:
        raise DataError(
            f"{conversation.where}: the target's tokenizer has no chat template, so it cannot read "
            "messages. Give plain prompts (`prompt`), or rows of `prompt_ids`."
        )
    return tokenizer
