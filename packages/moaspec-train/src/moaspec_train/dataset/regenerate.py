"""`moaspec data regenerate`: replace responses by the target's own."""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from moaspec.data.conversations import Conversation
from moaspec.data.loss_mask import prompt_ids
from moaspec.target.spec import TargetSpec
from moaspec_core.chat.call_reader import CallReader
from moaspec_core.chat.chat_template import ChatTemplate
from moaspec_core.chat.messages import Message, normal_messages
from moaspec_core.engine.request_state import GenerationResult
from moaspec_core.errors import DataError
from moaspec_train.dataset.journal import Journal
from moaspec_train.dataset.response_writer import ConversationTask, OutputRow, Writer, WriteRequest

REMEDY = "Mend or remove the row, or leave such rows out with --skip-malformed."


def regenerate(writer: Writer, conversations: Sequence[Conversation], journal: Journal) -> None:
    """Generate the responses of all conversations that are not in the journal yet.

    Raises:
        DataError, TrainingError: see `written_groups`.
    """
    for _ in written_groups(writer, conversations, journal):
        pass


def written_groups(
    writer: Writer, conversations: Sequence[Conversation], journal: Journal
) -> Iterator[list[OutputRow]]:
    """The rows of each group that is not in the journal yet, when they are in it.

    Each assistant turn becomes a row of `id` (the conversation's own, or its number), `source`,
    `turn`, `prompt_ids`, `response_ids`, `stop_reason` and, for conversations in messages,
    `messages` up to and with that turn. Each turn follows the target's own earlier turns. Assistant
    turns with tool calls are kept, because their results follow. A conversation ends after a turn
    that was cut short or calls tools, or before a prompt that leaves no room in the target's
    context or whose answer cannot be used.

    Raises:
        DataError: the chat template refuses a conversation.
        TrainingError: the output file cannot be written.
    """
    size, template = writer.options.group_size, ChatTemplate(writer.target.tokenizer)
    groups = (
        {
            number: _conversation_task(writer.target, template, conversation, number)
            for number, conversation in enumerate(conversations[start : start + size], start)
        }
        for start in range(journal.groups * size, len(conversations), size)
    )
    writer.finished = journal.kept
    for rows in writer.write_groups(groups):
        journal.commit(rows)
        yield rows


def check_prompts(
    target: TargetSpec,
    conversations: Sequence[Conversation],
    on_malformed: Callable[[DataError], None],
    *,
    longest: float = math.inf,
) -> list[Conversation]:
    """The conversations that the target can answer, before the long run starts.

    Args:
        longest: tokens of a prompt; those with more are left out.
    """
    kept, template = [], ChatTemplate(target.tokenizer)
    for conversation in conversations:
        try:
            request = _first_request(conversation)
            ids = _prompt(template, request)
            _require_room(target, request, ids)
            if len(ids) <= longest:
                kept.append(conversation)
        except DataError as error:
            on_malformed(error)
    return kept


def _first_request(conversation: Conversation) -> Conversation:
    """The conversation up to the first generated turn."""
    if not conversation.messages:
        return conversation
    stop, _ = next(_turns(conversation.messages), (0, 0))
    if not stop:
        raise DataError(
            f"{conversation.where}: there is nothing in it that the target can answer. {REMEDY}"
        )
    return dataclasses.replace(conversation, messages=conversation.messages[:stop])


def _require_room(target: TargetSpec, conversation: Conversation, ids: Sequence[int]) -> None:
    if len(ids) >= target.max_positions:
        raise DataError(
            f"{conversation.where}: the prompt has {len(ids)} tokens, the target's context is "
            f"{target.max_positions}. {REMEDY}"
        )
    outside = [token for token in ids if not 0 <= token < target.vocab_size]
    if outside or not ids:
        raise DataError(
            f"{conversation.where}: the prompt is empty or has ids outside "
            f"0..{target.vocab_size - 1}: {outside[:3]}. {REMEDY}"
        )


def fingerprint(conversations: Sequence[Conversation]) -> str:
    """Hash of the conversations, to check that a resumed run has the same."""
    digest = hashlib.sha256()
    for c in conversations:
        digest.update(repr((c.messages, c.tools, c.plain, c.prompt_ids, c.variables)).encode())
    return digest.hexdigest()[:16]


def with_system_prompts(
    conversations: Sequence[Conversation], prompts: Sequence[str], *, without: float, seed: int
) -> list[Conversation]:
    """Add a random system prompt to conversations without one.

    Args:
        conversations: in a fixed order; conversations in token ids are unchanged.
        prompts: system prompts, drawn uniformly; an empty list changes nothing.
        without: fraction of conversations that get none.
    """
    if not prompts:
        return list(conversations)
    generator = torch.Generator().manual_seed(seed)
    left_out = torch.rand(len(conversations), generator=generator) < without
    drawn = torch.randint(len(prompts), (len(conversations),), generator=generator)
    return [
        conversation if skip else _with_system(conversation, prompts[which])
        for conversation, skip, which in zip(
            conversations, left_out.tolist(), drawn.tolist(), strict=True
        )
    ]


def _with_system(conversation: Conversation, text: str) -> Conversation:
    messages = conversation.messages
    if not messages or any(message["role"] in ("system", "developer") for message in messages):
        return conversation
    system = {"role": "system", "content": text}
    return dataclasses.replace(conversation, messages=(system, *messages), plain=False)


def _conversation_task(
    target: TargetSpec, template: ChatTemplate, conversation: Conversation, number: int
) -> ConversationTask:
    if not conversation.messages:
        return (yield from _token_task(conversation, number))
    rows: list[OutputRow] = []
    history: list[Message] = []
    done = 0
    for stop, resume in _turns(conversation.messages):
        history += conversation.messages[done:stop]
        done = resume
        request = dataclasses.replace(conversation, messages=tuple(history))
        ids = _next_prompt(target, template, request)
        if ids is None:
            break
        try:
            result = yield WriteRequest(ids, number)
        except DataError:
            break
        answer = read_answer(template, result.token_ids, conversation.tools, target.stop_token_ids)
        history = list(normal_messages([*history, answer]))
        row = _row(conversation, number, ids, result)
        rows.append({**row, "turn": len(rows), "messages": [dict(message) for message in history]})
        if result.stop_reason != "stop_token" or "tool_calls" in answer:
            break
    return rows


def short_prompt(target: TargetSpec, conversations: Sequence[Conversation]) -> list[int]:
    """The shortest prompt of the first conversations; `check_prompts` has kept them all."""
    template = ChatTemplate(target.tokenizer)
    return min(
        (first_prompt(template, conversation) for conversation in conversations[:32]), key=len
    )


def first_prompt(template: ChatTemplate, conversation: Conversation) -> list[int]:
    """What the target answers first, of a conversation that `check_prompts` has kept."""
    return _prompt(template, _first_request(conversation))


def _next_prompt(
    target: TargetSpec, template: ChatTemplate, conversation: Conversation
) -> list[int] | None:
    """The next turn's prompt, or None if the context or the template ends the conversation."""
    try:
        ids = _prompt(template, conversation)
        _require_room(target, conversation, ids)
    except DataError:
        return None  # `check_prompts` has reported refused first prompts.
    return ids


def _token_task(conversation: Conversation, number: int) -> ConversationTask:
    """Generate the response to a prompt of token ids."""
    try:
        result = yield WriteRequest(conversation.prompt_ids, number)
    except DataError:
        return []
    return [{**_row(conversation, number, conversation.prompt_ids, result), "turn": 0}]


def _turns(messages: Sequence[Message]) -> Iterator[tuple[int, int]]:
    """Yield (end of the prompt, start of the rest) for each turn to generate.

    These are assistant turns without tool calls, and turns after unanswered messages.
    """
    for index, message in enumerate(messages):
        follows = messages[index + 1]["role"] if index + 1 < len(messages) else None
        if message["role"] == "assistant" and not message.get("tool_calls") and index:
            yield index, index + 1
        elif (message["role"], follows) in _UNANSWERED:
            yield index + 1, index + 1


_UNANSWERED = {("user", None), ("user", "user"), ("tool", None)}


def _prompt(template: ChatTemplate, conversation: Conversation) -> list[int]:
    if not conversation.messages:
        return list(conversation.prompt_ids)
    return prompt_ids(template, conversation)


def _row(
    conversation: Conversation, number: int, ids: Sequence[int], result: GenerationResult
) -> OutputRow:
    row: OutputRow = {
        "id": conversation.name or str(number),
        "source": conversation.where,
        "prompt_ids": list(ids),
        "response_ids": list(result.token_ids),
        "stop_reason": result.stop_reason,
    }
    if conversation.tools:
        row["tools"] = list(conversation.tools)
    if conversation.variables:
        row["chat_template_kwargs"] = dict(conversation.variables)
    return row


def read_answer(
    template: ChatTemplate,
    token_ids: Sequence[int],
    tools: Sequence[Mapping[str, Any]],
    stop_token_ids: Collection[int],
) -> Message:
    """An assistant's message with calls of these tools, without ids, and no stop tokens."""
    tokenizer: Any = template.tokenizer
    if not tools:
        text = tokenizer.decode(token_ids, skip_special_tokens=True)
        return {"role": "assistant", "content": text}
    said = [token for token in token_ids if token not in stop_token_ids]
    # Marks that are special tokens must be seen.
    text = tokenizer.decode(said, skip_special_tokens=not template.special_marks)
    functions = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    reader = CallReader(template.form, functions)
    content, calls = reader.feed(text, last=True)
    message: Message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {k: v for k, v in call.as_json().items() if k != "id"} for call in calls
        ]
    return message
