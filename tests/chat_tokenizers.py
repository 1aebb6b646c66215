"""A tokenizer of words with chat templates of several kinds, and targets that use them.

Ids: 0 <|start|>, 1 <|end|>, 2..5 roles, 6 <think>, 7 </think>, 8 a line break, 9 <call>; words
follow.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import tiny
from moaspec.data.conversations import Conversation
from moaspec.target.target import Target

MARKS = ("<|start|>", "<|end|>", "system", "user", "assistant", "tool")
TAGS = ("<think>", "</think>", "\n", "<call>")
START, END, SYSTEM, USER, ASSISTANT, TOOL, THINK, UNTHINK, BREAK, CALL = range(10)

CHATML = (
    "{% for message in messages %}"
    "{{ '<|start|>' + message.role + '\n' + message.content + '<|end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ '<|start|>system\nw10 w11<|end|>\n' }}{% endif %}"
    + CHATML
)
LLAMA3 = (
    "{% for message in messages %}"
    "{{ '<|start|>' + message.role + '\n\n' + message.content | trim + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n\n' }}{% endif %}"
)
THINKING = (
    "{% for message in messages %}"
    "{% set text = message.content %}"
    "{% if not loop.last %}{% set text = text.split('</think>')[-1] %}{% endif %}"
    "{{ '<|start|>' + message.role + '\n' + text + '<|end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
FORCED_THINKING = THINKING.replace("assistant\n' }}", "assistant\n<think>' }}")
TOOLS = (
    "{% if tools %}"
    "{{ '<|start|>system\n' + tools | map(attribute='function.name') | join(' ') + '<|end|>\n' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{{ '<|start|>' + message.role + '\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}{{ '<call>' + call.function.name }}{% endfor %}"
    "{{ '<|end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}"
    "{{ '<|start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|end|>' }}{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def tokenizer(template: str | None = CHATML) -> Any:
    """One token a word, in the vocabulary of the tiny targets."""
    known = [*MARKS, *TAGS]
    words = [*known, *(f"w{i}" for i in range(len(known), tiny.VOCAB))]
    backend = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<|start|>")
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\n|<[^>]*>"), behavior="isolated"),
            pre_tokenizers.Split(" ", behavior="removed"),
        ]
    )
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<|start|>",
        eos_token="<|end|>",
    )
    made.chat_template = template
    return made


def target(template: str | None = CHATML, **changes: Any) -> Target:
    """A tiny target that chats."""
    return tiny.fresh_target(tokenizer=tokenizer(template), eos_token_id=END, **changes)


def talk(*texts: str, system: str | None = None, **fields: Any) -> Conversation:
    """User and assistant in turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return Conversation(where="here:1", messages=tuple(messages), **fields)
