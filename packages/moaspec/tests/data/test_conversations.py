"""Every shape of row becomes the same conversation, and malformed ones are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moaspec.data.conversations import Conversation, ReadReport, parse, read_conversations
from moaspec.data.rows import Row
from moaspec_core.chat.messages import normal_tool
from moaspec_core.errors import DataError


def parsed(row: dict[str, Any]) -> Conversation:
    return parse(Row("f:7", row))


def said(conversation: Conversation) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in conversation.messages]


ASKED = [("user", "q"), ("assistant", "a")]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [{"role": "user", "content": "q"}]}, ASKED[:1]),
        ({"prompt": [{"role": "user", "content": "q"}]}, ASKED[:1]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}]}, ASKED[:1]),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            ASKED,
        ),
        (
            {"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}]},
            [("system", "s"), ("user", "q")],
        ),
        ({"instruction": "q", "input": "", "output": "a"}, ASKED),
        ({"instruction": "q", "input": "more"}, [("user", "q\n\nmore")]),
        ({"prompt": "q"}, ASKED[:1]),
        ({"prompt": "q", "response": "a"}, ASKED),
        ({"question_id": 3, "turns": ["q", "r"]}, [("user", "q"), ("user", "r")]),
        ({"turns": ["q"], "prompt_ids": None}, ASKED[:1]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_shapes(row: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert said(parsed(row)) == expected


Q, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
HUMAN, GPT = {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}
SYSTEM, EARLIER = ("system", "s"), [("user", "p"), ("assistant", "r")]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"conversations": [HUMAN, GPT], "system": "s"}, [SYSTEM, *ASKED]),
        ({"conversations": [HUMAN, GPT], "history": [["p", "r"]]}, [*EARLIER, *ASKED]),
        ({"conversations": [Q, A]}, ASKED),
        (
            {"conversations": [{"from": "system", "value": "s"}, HUMAN], "system": "s"},
            [SYSTEM, ASKED[0]],
        ),
        ({"conversation": [Q, A]}, ASKED),
        ({"messages": [HUMAN, GPT]}, ASKED),
        ({"messages": json.dumps([Q, A])}, ASKED),
        (
            {"conversations": [{"from": "Human", "content": "q"}, {"role": "AI", "value": "a"}]},
            ASKED,
        ),
        (
            {
                "messages": [{"role": "system", "content": [{"type": "text", "text": "s"}]}, Q],
                "system": "s",
            },
            [SYSTEM, ASKED[0]],
        ),
        ({"messages": [Q, A], "system": "s", "history": None}, [SYSTEM, *ASKED]),
        (
            {"instruction": "q", "output": "a", "system": "s", "history": [["p", "r"]]},
            [SYSTEM, *EARLIER, *ASKED],
        ),
        ({"instruction": "q", "output": "a", "system": "", "history": []}, ASKED),
        ({"prompt": [Q], "response": "a"}, ASKED),
        ({"prompt": [Q], "completion": "a"}, ASKED),
        ({"prompt": [Q], "completion": [A]}, ASKED),
        ({"prompt": "q", "completion": "a"}, ASKED),
        ({"prompt": "q", "completion": [A]}, ASKED),
        ({"prompt": [Q], "chosen": [A], "rejected": [A]}, ASKED),
        ({"messages": [], "conversations": [HUMAN, GPT], "prompt": ""}, ASKED),
        ({"prompt": "q", "chosen": [Q, A]}, ASKED),
        ({"chosen": [Q, A], "rejected": [Q, A]}, ASKED),
        ({"conversations": [HUMAN], "chosen": GPT, "rejected": GPT}, ASKED),
        ({"system_prompt": "s", "question": "q", "response": "a"}, [SYSTEM, *ASKED]),
        ({"instruction": "q", "context": "c", "response": "a"}, [("user", "q\n\nc"), ASKED[1]]),
        ({"question": "q", "answer": "a"}, ASKED),
        ({"messages": [{"role": "developer", "content": "s"}, Q]}, [("developer", "s"), ASKED[0]]),
        (
            {"messages": [Q, {**A, "content": ["a", {"type": "text", "text": "b"}]}]},
            [ASKED[0], ("assistant", "ab")],
        ),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_what_stands_beside_a_shape(row: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert said(parsed(row)) == expected


CALLED = {"name": "f", "arguments": {"x": 1}}


@pytest.mark.parametrize(
    "row",
    [
        {
            "conversations": [
                HUMAN,
                {"from": "function_call", "value": json.dumps(CALLED)},
                {"from": "observation", "value": "r"},
                GPT,
            ],
            "tools": json.dumps([{"name": "f"}]),
        },
        {
            "messages": [
                Q,
                {"role": "tool_call", "content": json.dumps(CALLED)},
                {"role": "tool_response", "content": "r"},
                A,
            ],
            "tools": json.dumps([{"name": "f"}]),
        },
        {
            "messages": [
                Q,
                {
                    "role": "assistant",
                    "content": None,
                    "function_call": {"name": "f", "arguments": '{"x": 1}'},
                },
                {"role": "function", "name": "f", "content": "r"},
                A,
            ],
            "functions": [{"name": "f"}],
        },
    ],
    ids=["sharegpt", "roles", "function_call"],
)
def test_calls_of_every_form(row: dict[str, Any]) -> None:
    conversation = parsed(row)
    (call,) = conversation.messages[1]["tool_calls"]
    assert call["function"] == CALLED
    assert conversation.messages[2]["tool_call_id"] == call["id"]
    assert [role for role, _ in said(conversation)] == ["user", "assistant", "tool", "assistant"]
    assert conversation.tools == (normal_tool({"name": "f"}),)


def test_results_without_an_id_belong_to_calls_in_order() -> None:
    calls = [{"function": CALLED}, {"id": "own", "function": CALLED}]
    results = [{"role": "tool", "content": one} for one in ("r1", "r2")]
    found = parsed({"messages": [Q, {"role": "assistant", "tool_calls": calls}, *results]}).messages
    assert [one["id"] for one in found[1]["tool_calls"]] == ["call00000", "own"]
    assert [one["tool_call_id"] for one in found[2:]] == ["call00000", "own"]


@pytest.mark.parametrize(
    ("row", "unused"),
    [
        ({"prompt": "q", "completion": "a", "response": "b"}, ("completion",)),
        (
            {"messages": [Q, A], "category": "x", "score": 3, "tags": ["y"], "none": []},
            ("category", "score", "tags"),
        ),
        ({"prompt": [Q], "chosen": [A], "rejected": [A]}, ("rejected",)),
        ({"messages": [{**Q, "lang": "en"}, {**A, "lang": ""}]}, ("messages.lang",)),
        ({"prompt_ids": [1], "response_ids": [2], "source": "x", "messages": [Q]}, ()),
        ({"instruction": "q", "input": " ", "output": "a", "id": "7"}, ()),
    ],
    ids=str,
)
def test_what_is_not_used_is_named(row: dict[str, Any], unused: tuple[str, ...]) -> None:
    assert parsed(row).unused == unused


def test_token_ids_and_what_stands_beside_them() -> None:
    row = {"prompt_ids": [1, 2], "response_ids": [3], "id": "x", "prompt": "ignored"}
    conversation = parsed(row)
    assert (conversation.prompt_ids, conversation.response_ids) == ((1, 2), (3,))
    assert (conversation.name, conversation.where, conversation.messages) == ("x", "f:7", ())
    assert parsed({"prompt_ids": [1]}).response_ids is None
    # What the target wrote is kept, also a call whose arguments are no object.
    call = {**A, "tool_calls": [{"name": "f", "arguments": "{"}]}
    assert said(parsed({"prompt_ids": [1], "messages": [Q, call]})) == ASKED


def test_tool_calls_may_have_no_content() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    row = {"messages": [{"role": "user", "content": "q"}, call], "tools": [{"name": "f"}]}
    conversation = parsed(row)
    function = {"name": "f", "arguments": {}}
    calls = [{"id": "call00000", "type": "function", "function": function}]
    assert conversation.messages[1] == {**call, "content": "", "tool_calls": calls}
    assert conversation.tools == (normal_tool({"name": "f"}),)


def test_plain_texts() -> None:
    """These alone can be tokenised without a chat template."""
    assert parsed({"prompt": "q"}).plain
    assert parsed({"turns": ["q"]}).plain
    assert not parsed({"turns": ["q", "r"]}).plain
    assert not parsed({"prompt": "q", "response": "a"}).plain
    assert not parsed({"messages": [{"role": "user", "content": "q"}]}).plain


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "none of the columns"),
        ({"text": "q"}, "the row has text"),
        ({"messages": []}, "list of messages"),
        ({"messages": "q"}, "'messages' must be JSON"),
        ({"messages": ["q"]}, "message 1 must be an object"),
        ({"messages": [{"content": "q"}]}, "message 1"),
        ({"messages": [{"role": "user", "content": 3}]}, "text 'content'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "other than text"),
        ({"messages": [{"role": "user", "content": "q"}], "tools": {"a": 1}}, "'tools'"),
        ({"conversations": [{"from": "martian", "value": "q"}]}, "message 1 must have 'from'"),
        ({"conversations": [{"from": "human", "value": None}]}, "'value'"),
        ({"conversations": {}}, "list of messages"),
        ({"turns": []}, "list of texts"),
        ({"turns": ["q", ""]}, "not blank"),
        ({"instruction": 5}, "'instruction'"),
        ({"prompt": "  "}, "not blank"),
        ({"prompt_ids": []}, "empty"),
        ({"prompt_ids": [1, True]}, "list of integers"),
        ({"prompt_ids": [1], "response_ids": "ab"}, "'response_ids'"),
        ({"messages": [Q], "images": ["a.png"]}, "'images' cannot be read"),
        ({"messages": [Q, A], "label": False}, "'label' is False"),
        ({"prompt": "q", "completion": "a", "KTO_tag": " False"}, "'KTO_tag' is ' False'"),
        ({"conversations": [HUMAN], "tools": "no json"}, "'tools' must be JSON"),
        ({"conversations": [HUMAN], "history": ["p"]}, "'history' must be a list of"),
        ({"conversations": [HUMAN], "system": 3}, "'system' must be a text"),
        ({"messages": [{"role": "system", "content": "t"}, Q], "system": "s"}, "Keep one"),
        ({"conversations": [{"from": "function_call", "value": "f(1)"}]}, "a call as JSON"),
        ({"messages": [Q], "tools": [{"type": "web_search"}]}, "a tool must be a function"),
        ({"messages": [Q], "tools": [{"function": {}}]}, "a tool must have a 'name'"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "message 1: a call must have"),
        ({"prompt": [Q], "completion": 3}, "'completion' must be a text"),
        (
            {"messages": [Q, {**A, "tool_calls": [{"name": "f", "arguments": "{"}]}]},
            "message 2: the arguments of a call must be a JSON object",
        ),
        ({"messages": [Q], "chat_template_kwargs": [1]}, "must be an object"),
    ],
    ids=str,
)
def test_malformed_rows(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"^f:7: .*{message}"):
        parsed(row)


def test_skipping_malformed_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([json.dumps({"prompt": "q"}), "{", json.dumps({"prompt": 3})]))
    seen: list[DataError] = []
    assert len(list(read_conversations([str(path)], seen.append))) == 1
    assert [str(error).split(": ")[0] for error in seen] == [f"{path}:2", f"{path}:3"]
    with pytest.raises(DataError, match=r"a\.jsonl:2"):
        list(read_conversations([str(path)]))


def test_errors_leave_no_file_open(tmp_path: Path) -> None:
    for number, line in enumerate(("{", json.dumps({"prompt": 3}))):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(f"{line}\n" * 3)
        with pytest.raises(DataError):
            list(read_conversations([str(path)]))
        own = Path("/proc/self/fd")
        if own.exists():
            assert path not in [one.resolve() for one in own.iterdir()]


SILENT = [
    *({"weight": 0}, {"weight": 0.0}, {"loss_weight": 0}, {"train": False}, {"loss": False}),
    *({"training": "false"}, {"train": "no"}, {"loss": 0}, {"weight": -0.0}, {"Weight": "0.00"}),
    *({"train": "N"}, {"TRAIN": " f "}, {"Train": False}),
]
LOUD = [
    *({"weight": 1}, {"weight": 1.0}, {"train": True}, {"loss": "true"}, {"loss": None}),
    *({"Train": "Y"}, {"weight": "1.00"}),
]


NO = [False, 0, 0.0, -0.0, "0", "0.00", "-0", "false", " False ", "NO", "n", "F", "off"]


@pytest.mark.parametrize("no", NO, ids=repr)
@pytest.mark.parametrize("column", ["label", "kto_tag", "Label", "KTO_TAG"])
def test_answers_that_are_judged_bad_are_refused(column: str, no: Any) -> None:
    with pytest.raises(DataError, match=f"{column!r} is .*shall not give"):
        parsed({"prompt": "q", "completion": "bad", column: no})


@pytest.mark.parametrize(
    ("verdict", "unused"),
    [(True, ()), (1, ()), (1.0, ()), ("True", ()), ("", ()), (None, ()), ("sports", ("label",))],
    ids=repr,
)
def test_answers_that_are_not_judged_bad(verdict: Any, unused: tuple[str, ...]) -> None:
    conversation = parsed({"prompt": "q", "completion": "a", "label": verdict})
    assert (said(conversation), conversation.unused) == (ASKED, unused)


@pytest.mark.parametrize("keys", SILENT, ids=str)
def test_turns_and_rows_without_loss(keys: dict[str, Any]) -> None:
    """In every shape; what they say of other roles is without effect."""
    rows: list[dict[str, Any]] = [
        {"messages": [{**Q, **keys}, {**A, **keys}]},
        {"conversations": [HUMAN, {**GPT, **keys}]},
        {"prompt": "q", "completion": [{**A, **keys}]},
        {"instruction": "q", "output": "a", **keys},
        {"messages": [Q, A], **keys},
    ]
    for row in rows:
        conversation = parsed(row)
        assert said(conversation) == ASKED
        assert [one.get("weight") for one in conversation.messages] == [None, 0]
        assert not conversation.unused


@pytest.mark.parametrize("keys", LOUD, ids=str)
def test_turns_and_rows_with_loss(keys: dict[str, Any]) -> None:
    rows: list[dict[str, Any]] = [
        {"messages": [Q, {**A, **keys}]},
        {"prompt": "q", "response": "a", **keys},
    ]
    for row in rows:
        assert not any("weight" in one for one in parsed(row).messages)
        assert not parsed(row).unused


@pytest.mark.parametrize(
    ("row", "unused"),
    [
        ({"messages": [Q, {**A, "weight": 0.5}]}, ("messages.weight",)),
        ({"messages": [{**Q, "train": True}, A]}, ("messages.train",)),
        ({"messages": [Q, {**A, "train_detail": [{"end": 0}]}]}, ("messages.train_detail",)),
        ({"messages": [Q, {**A, "skip_loss": True}]}, ("messages.skip_loss",)),
        ({"messages": [Q, {**A, "calculate_loss": 0}]}, ("messages.calculate_loss",)),
        ({"prompt": "q", "response": "a", "ignore": True}, ("ignore",)),
        ({"prompt": "q", "response": "a", "weight": 0.25}, ("weight",)),
        ({"prompt": "q", "response": "a", "train_on_input": True}, ("train_on_input",)),
        ({"prompt_ids": [1], "response_ids": [2], "loss_mask": [1, 0]}, ("loss_mask",)),
        ({"prompt_ids": [1], "response_ids": [2], "train": False}, ("train",)),
        ({"prompt_ids": [1], "response_ids": [2], "messages": [Q], "weight": 0}, ("weight",)),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, ("rejected",)),
        ({"messages": [{**Q, "value": "other"}, A]}, ("messages.value",)),
    ],
    ids=str,
)
def test_what_would_change_the_loss_is_named(row: dict[str, Any], unused: tuple[str, ...]) -> None:
    assert parsed(row).unused == unused


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "q", "value": None},
        {"role": "user", "content": None, "value": "q"},
        {"from": "human", "value": None, "content": "q"},
        {"from": None, "role": "user", "value": "", "content": "q"},
        {"from": "human", "role": None, "value": "q", "content": ""},
    ],
    ids=str,
)
def test_empty_keys_of_the_other_form(message: dict[str, Any]) -> None:
    conversation = parsed({"conversations": [message, A]})
    assert (said(conversation), conversation.unused) == (ASKED, ())


def test_a_template_reads_whole_names() -> None:
    report = ReadReport()
    report.unused_columns.update(["messages.train", "messages.thinking", "train"])
    report.forget_columns_of("{% if constraints %}{{ message.reasoning_content }}{% endif %}")
    assert set(report.unused_columns) == {"messages.train", "train"}
