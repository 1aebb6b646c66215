"""The loss mask of a conversation: the tokens that the assistant generated."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from moaspec.data.conversations import Conversation
from moaspec_core.chat.chat_template import FAILURES, ChatTemplate, PreparedMessages
from moaspec_core.chat.prefix_tokens import PrefixTokens
from moaspec_core.errors import DataError, InputError

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class MaskedTokens:
    """A conversation's tokens, and their origin."""

    token_ids: Sequence[int]
    written: Sequence[bool]  # True for each that the assistant generated
    # turns, turns_with_loss: assistant turns up to the limit, and those located among the tokens.
    turns: int
    turns_with_loss: int


def prompt_ids(template: ChatTemplate, conversation: Conversation) -> list[int]:
    """The prompt of the next turn; DataError if the template refuses."""
    tokenizer = _tokenizer(template, conversation)
    if not template.exists and conversation.plain:
        return list(tokenizer(conversation.messages[0]["content"])["input_ids"])
    prepared = _prepared(template, conversation)
    try:
        return template.tokenize(template.text(prepared, add_generation_prompt=True))
    except InputError as error:
        raise DataError(f"{conversation.where}: {error}") from error


def masked_tokens(
    template: ChatTemplate,
    conversation: Conversation,
    stop_token_ids: Collection[int],
    limit: int | None = None,
) -> MaskedTokens:
    """A conversation's tokens, and which of them the assistant generated.

    If the template marks them (`{% generation %}`), by its marks. Otherwise an assistant turn
    begins where its prompt ends and stops after its first stop token. It counts only if the tokens
    of the whole conversation contain both unchanged: many templates rewrite earlier turns (most
    drop their thinking), and rewritten turns carry no loss. Nor do turns of `weight` 0.

    Args:
        conversation: with at least one assistant turn.
        limit: turns behind the first located one that ends after this many tokens are not located.

    Raises:
        DataError: there is an assistant turn with loss, and none can be located.
    """
    answers = [message for message in conversation.messages if message["role"] == "assistant"]
    if not answers:
        raise DataError(
            f"{conversation.where}: no assistant turn to learn from. Let the target write one: "
            "moaspec data regenerate."
        )
    prepared = _prepared(template, conversation)
    marked = GENERATION_MARK.search(prepared.source) is not None
    try:
        # Transformers, which reads the marks, would take a user's control tokens for real ones.
        marked = marked and not template.control_tokens.guarded(template.text(prepared))
        if marked:
            found = _marked(template, prepared)
        else:
            found = _derived(template, prepared, stop_token_ids, limit)
    except InputError as error:
        raise DataError(f"{conversation.where}: {error}") from error
    if all(answer.get("weight") == 0 for answer in answers):
        return found
    if not any(found.written) or found.written[0]:
        raise DataError(
            f"{conversation.where}: no assistant turn's tokens can be located in what the chat "
            "template makes of the conversation. Rows of `prompt_ids` and `response_ids` need no "
            "template: moaspec data regenerate writes them."
        )
    return found


def _derived(
    template: ChatTemplate,
    prepared: PreparedMessages,
    stop_token_ids: Collection[int],
    limit: int | None,
) -> MaskedTokens:
    """Locate assistant turns by rendering the conversation up to and with each of them."""
    tokens = PrefixTokens(template, template.text(prepared))
    written = [False] * len(tokens.ids)
    turns = located = 0
    for index, message in enumerate(prepared.messages):
        if message["role"] != "assistant":
            continue
        turns += 1
        if not index or message.get("weight") == 0:
            continue
        given = tokens.tokenize(template.text(prepared, index, add_generation_prompt=True))
        ids = tokens.tokenize(template.text(prepared, index + 1))
        start, stop = len(given), _turn_end(ids, len(given), stop_token_ids)
        if stop > start and ids[:start] == given and tokens.ids[:stop] == ids[:stop]:
            written[start:stop] = [True] * (stop - start)
            located += 1
            if limit is not None and stop > limit:
                break
    return MaskedTokens(tokens.ids, written, turns, located)


def _turn_end(ids: list[int], start: int, stop_token_ids: Collection[int]) -> int:
    """Past the first stop token; what a template adds after it was not generated."""
    ends = (i + 1 for i in range(start, len(ids)) if ids[i] in stop_token_ids)
    return next(ends, len(ids))


def _marked(template: ChatTemplate, prepared: PreparedMessages) -> MaskedTokens:
    """Take the template's own marks, but for turns of weight 0."""
    try:
        ids, mask = template.marked_ids(prepared)
    except FAILURES as error:
        raise InputError(f"The chat template refuses these messages: {error}") from error
    weights = [m.get("weight", 1) for m in prepared.messages if m["role"] == "assistant"]
    starts = [i for i, mark in enumerate(mask) if mark and not (i and mask[i - 1])]
    written = [bool(mark) for mark in mask]
    if len(starts) == len(weights):
        for start, weight in zip(starts, weights, strict=True):
            end = next((i for i in range(start, len(mask)) if not mask[i]), len(mask))
            written[start:end] = [weight != 0] * (end - start)
    located = sum(written[start] for start in starts)
    return MaskedTokens(ids, written, len(weights), located)


def _prepared(template: ChatTemplate, conversation: Conversation) -> PreparedMessages:
    _tokenizer(template, conversation)
    if not template.exists:
        raise DataError(
            f"{conversation.where}: the target's tokenizer has no chat template, so it cannot read "
            "messages. Give plain prompts (`prompt`), or rows of `prompt_ids`."
        )
    try:
        return template.prepare(conversation.messages, conversation.tools, conversation.variables)
    except InputError as error:
        raise DataError(f"{conversation.where}: {error}") from error


def _tokenizer(template: ChatTemplate, conversation: Conversation) -> Any:
    if template.tokenizer is None:
        raise DataError(
            f"{conversation.where}: the target has no tokenizer, so it cannot read text. "
            "Give rows of `prompt_ids`."
        )
    return template.tokenizer
