"""Which tokens of a conversation the assistant generated, under templates of several kinds."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import normalizers

import chat_tokenizers
from chat_tokenizers import ASSISTANT, BREAK, CALL, END, START, SYSTEM, THINK, TOOL, UNTHINK, USER
from moaspec.data.conversations import Conversation
from moaspec.data.loss_mask import masked_tokens, prompt_ids
from moaspec_core.chat.chat_template import ChatTemplate
from moaspec_core.chat.control_tokens import ControlTokens
from moaspec_core.chat.messages import normal_messages, normal_tool
from moaspec_core.chat.prefix_tokens import PrefixTokens
from moaspec_core.errors import DataError
from moaspec_train.dataset.examples import Example

STOPS = {END}
ASKED = (START, USER, BREAK, 20, END, BREAK, START, ASSISTANT, BREAK)
TWO_TURNS = chat_tokenizers.talk("w20", "w30 w31", "w21 w22", "w32")


def encoded(template: str, conversation: Conversation) -> Example:
    masked = masked_tokens(ChatTemplate(chat_tokenizers.tokenizer(template)), conversation, STOPS)
    return Example.from_mask(masked.token_ids, masked.written)


@pytest.mark.parametrize(
    "template", [chat_tokenizers.CHATML, chat_tokenizers.MARKED], ids=["derived", "marked"]
)
def test_chatml(template: str) -> None:
    """The line break after <|end|> is the template's, so it is given and not written."""
    assert encoded(template, TWO_TURNS) == Example(
        (START, USER, BREAK, 20, END, BREAK, START, ASSISTANT, BREAK),
        (30, 31, END),
        (BREAK, START, USER, BREAK, 21, 22, END, BREAK, START, ASSISTANT, BREAK),
        (32, END),
    )


def test_the_mask_written_out() -> None:
    example = encoded(chat_tokenizers.CHATML, chat_tokenizers.talk("w20", "w30 w31", "w21"))
    assert example.token_ids == (0, 3, 8, 20, 1, 8, 0, 4, 8, 30, 31, 1)
    assert [int(mark) for mark in example.response_mask] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1]


def test_llama_3() -> None:
    assert encoded(chat_tokenizers.LLAMA3, chat_tokenizers.talk("w20", " w30 ")) == Example(
        (START, USER, BREAK, BREAK, 20, END, START, ASSISTANT, BREAK, BREAK), (30, END)
    )


def test_a_default_system_prompt() -> None:
    assert encoded(chat_tokenizers.DEFAULT_SYSTEM, chat_tokenizers.talk("w20", "w30")) == Example(
        (START, SYSTEM, BREAK, 10, 11, END, BREAK, *ASKED),
        (30, END),
    )


def test_thinking_that_is_stripped_from_earlier_turns() -> None:
    """The first turn is no longer what the target wrote, so it carries no loss."""
    thought = "<think>w50</think>w30"
    one = encoded(chat_tokenizers.THINKING, chat_tokenizers.talk("w20", thought))
    assert one.pieces[1] == (THINK, 50, UNTHINK, 30, END)
    two = encoded(
        chat_tokenizers.THINKING,
        chat_tokenizers.talk("w20", thought, "w21", "<think>w51</think>w31"),
    )
    assert two == Example(
        (*ASKED, 30, END, BREAK, START, USER, BREAK, 21, END, BREAK, START, ASSISTANT, BREAK),
        (THINK, 51, UNTHINK, 31, END),
    )


def test_earlier_turns_without_thinking_count() -> None:
    two = encoded(
        chat_tokenizers.THINKING, chat_tokenizers.talk("w20", "w30", "w21", "<think>w51</think>w31")
    )
    assert two.pieces[1::2] == ((30, END), (THINK, 51, UNTHINK, 31, END))


def test_tools() -> None:
    """Calls are written by the target; descriptions and results are given."""
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "w20"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "w40"}]},
        {"role": "tool", "content": "w60"},
        {"role": "assistant", "content": "w30"},
    ]
    conversation = Conversation(
        where="here:1",
        messages=normal_messages(messages),
        tools=(normal_tool({"name": "w40"}),),
    )
    assert encoded(chat_tokenizers.TOOLS, conversation) == Example(
        (START, SYSTEM, BREAK, 40, END, BREAK, *ASKED),
        (CALL, 40, END),
        (BREAK, START, TOOL, BREAK, 60, END, BREAK, START, ASSISTANT, BREAK),
        (30, END),
    )


def test_a_template_without_end_of_turn() -> None:
    """Without a stop token all that the template adds after the prompt is the turn."""
    template = (
        "{% for m in messages %}{{ m.role + '\n' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}"
    )
    assert encoded(template, chat_tokenizers.talk("w20", "w30")) == Example(
        (USER, BREAK, 20, BREAK, ASSISTANT, BREAK), (30, BREAK)
    )


@pytest.mark.parametrize(
    ("template", "conversation", "message"),
    [
        (
            chat_tokenizers.FORCED_THINKING,
            chat_tokenizers.talk("w20", "w30"),
            "no assistant turn's tokens",
        ),
        (chat_tokenizers.CHATML, chat_tokenizers.talk("w20"), "no assistant turn to learn from"),
        (
            "{{ raise_exception('not so') }}",
            chat_tokenizers.talk("w20", "w30"),
            "user, assistant.*not so",
        ),
        ("{{ messages[0].foo.bar }}", chat_tokenizers.talk("w20", "w30"), "refuses"),
        (None, chat_tokenizers.talk("w20", "w30"), "no chat template"),
    ],
    ids=["unlocatable", "no turn", "refused", "broken", "none"],
)
def test_what_cannot_be_masked(
    template: str | None, conversation: Conversation, message: str
) -> None:
    with pytest.raises(DataError, match=f"here:1: .*{message}"):
        masked_tokens(ChatTemplate(chat_tokenizers.tokenizer(template)), conversation, STOPS)


def test_prompts() -> None:
    ids = prompt_ids(ChatTemplate(chat_tokenizers.tokenizer()), chat_tokenizers.talk("w20"))
    assert ids == [START, USER, BREAK, 20, END, BREAK, START, ASSISTANT, BREAK]


def test_plain_prompts_need_no_template() -> None:
    bare = ChatTemplate(chat_tokenizers.tokenizer(None))
    assert prompt_ids(bare, chat_tokenizers.talk("w20 w21", plain=True)) == [20, 21]
    with pytest.raises(DataError, match="no chat template"):
        prompt_ids(bare, chat_tokenizers.talk("w20 w21"))
    with pytest.raises(DataError, match="no tokenizer"):
        prompt_ids(ChatTemplate(None), chat_tokenizers.talk("w20"))


@pytest.mark.parametrize(
    "template", [chat_tokenizers.CHATML, chat_tokenizers.MARKED], ids=["derived", "marked"]
)
def test_turns_of_weight_zero_carry_no_loss(template: str) -> None:
    messages = [dict(message) for message in TWO_TURNS.messages]
    messages[1]["weight"] = 0
    conversation = Conversation(where="here:1", messages=normal_messages(messages))
    masked = masked_tokens(ChatTemplate(chat_tokenizers.tokenizer(template)), conversation, STOPS)
    assert (masked.turns, masked.turns_with_loss) == (2, 1)
    assert Example.from_mask(masked.token_ids, masked.written).pieces[1::2] == ((32, END),)


def test_developers_are_systems() -> None:
    messages = [{"role": "developer", "content": "w12"}, {"role": "user", "content": "w20"}]
    conversation = Conversation(where="here:1", messages=normal_messages(messages))
    ids = prompt_ids(ChatTemplate(chat_tokenizers.tokenizer()), conversation)
    assert ids[:6] == [START, SYSTEM, BREAK, 12, END, BREAK]


LONG = chat_tokenizers.talk(*(f"w{20 + i % 9} <|end|> w{30 + i % 7}" for i in range(80)))


@pytest.mark.parametrize("name", ["CHATML", "LLAMA3", "DEFAULT_SYSTEM", "THINKING"])
def test_a_long_conversation_is_encoded_about_twice(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its tokens are those of texts that are each encoded as a whole."""
    template = ChatTemplate(chat_tokenizers.tokenizer(getattr(chat_tokenizers, name)))
    prepared = template.prepare(LONG.messages)
    whole = template.text(prepared)
    prefixes = PrefixTokens(template, whole)
    for index in range(1, 80, 2):
        given = template.text(prepared, index, add_generation_prompt=True)
        for text in (given, template.text(prepared, index + 1), given + "w40", given[:-3]):
            assert prefixes.tokenize(text) == template.tokenize(text)
    encoded, encode = list[int](), ControlTokens._encode

    def counted(self: ControlTokens, text: str) -> list[int]:
        encoded.append(len(text))
        return encode(self, text)

    monkeypatch.setattr(ControlTokens, "_encode", counted)
    found = masked_tokens(template, LONG, STOPS)
    assert found.turns == found.turns_with_loss == 40
    assert sum(encoded) < 5 * len(whole)


def test_a_tokenizer_whose_parts_give_other_tokens_encodes_whole_texts() -> None:
    """This one writes a word's start before each text that it encodes."""
    made = chat_tokenizers.tokenizer()
    made.backend_tokenizer.normalizer = normalizers.Prepend("w33 ")
    template = ChatTemplate(made)
    text = template.text(template.prepare(TWO_TURNS.messages))
    prefixes = PrefixTokens(template, text)
    for end in range(len(text) + 1):
        assert prefixes.tokenize(text[:end]) == template.tokenize(text[:end])


@pytest.mark.parametrize("limit", [1, 14, 25, 60, 10_000])
def test_turns_behind_the_limit_are_not_looked_for(limit: int) -> None:
    template = ChatTemplate(chat_tokenizers.tokenizer())
    whole, found = masked_tokens(template, LONG, STOPS), masked_tokens(template, LONG, STOPS, limit)
    example = Example.from_mask(found.token_ids, found.written)
    all_of_it = Example.from_mask(whole.token_ids, whole.written)
    assert example.cut(limit) == all_of_it.cut(limit)
    assert (len(example) > limit) == (len(all_of_it) > limit)
    assert (found.turns < whole.turns) == (limit < 10_000)
