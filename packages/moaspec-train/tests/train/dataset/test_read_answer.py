"""What a target wrote becomes a message, with its calls."""

from __future__ import annotations

from tokenizers import AddedToken

import serving
import templates
from moaspec_core.chat.chat_template import ChatTemplate
from moaspec_core.chat.messages import normal_tool
from moaspec_train.dataset.regenerate import read_answer

CALL = '{"name": "time", "arguments": {"city": "Rome"}}'
TOOLS = [normal_tool({"name": "time"})]


def ids(template: ChatTemplate, text: str) -> list[int]:
    return [*template.tokenize(text), serving.END]


def test_calls_are_read_where_there_are_tools() -> None:
    template = ChatTemplate(serving.tokenizer(templates.QWEN25))
    token_ids = ids(template, f"Look:\n<tool_call>\n{CALL}\n</tool_call>")
    message = read_answer(template, token_ids, TOOLS, {serving.END})
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "time", "arguments": '{"city": "Rome"}'}
    assert message["content"] == "Look:\n"
    plain = read_answer(template, token_ids, [], {serving.END})
    assert plain == {"role": "assistant", "content": f"Look:\n<tool_call>\n{CALL}\n</tool_call>"}


def test_a_trigger_that_is_a_special_token() -> None:
    tokenizer = serving.tokenizer(templates.MISTRAL_V3)
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("[TOOL_CALLS]")]})
    template = ChatTemplate(tokenizer)
    mark = tokenizer.convert_tokens_to_ids("[TOOL_CALLS]")
    assert template.special_marks == {"[TOOL_CALLS]": mark}
    message = read_answer(template, ids(template, f"[TOOL_CALLS][{CALL}]"), TOOLS, {serving.END})
    assert (message["content"], len(message["tool_calls"])) == ("", 1)
