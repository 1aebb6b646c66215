"""The tokenizer of devices against transformers' own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, GenerationConfig

import tiny
from moaspec_core.chat.chat_template import ChatTemplate
from moaspec_core.errors import CorruptCheckpointError
from moaspec_core.sampling.generation_defaults import GenerationDefaults
from moaspec_edge.device_onnx.device_tokenizer import DeviceTokenizer
from moaspec_edge.device_onnx.onnx_device import _GenerationConfig

TEMPLATE = """\
{%- if bos_token is defined %}{{ bos_token }}{% endif %}
{%- for message in messages %}
    {%- if loop.index > 9 %}{% break %}{% endif %}
<{{ message.role }}> {% generation %}{{ message.content | trim }}{% endgeneration %}
{%- if message.tool_calls %} {{ message.tool_calls | tojson }}{% endif %}
{%- if message.role not in ["system", "user", "assistant", "tool"] %}
    {{- raise_exception("unknown role") }}
{%- endif %}
{%- endfor %}
{%- if tools %} tools {{ tools | tojson(indent=1) }}{% endif %}
{%- if note %} {{ note }}{% endif %}
{%- if add_generation_prompt %} <assistant>{% endif %}"""

CHAT = [
    {"role": "system", "content": "w1 <b>"},
    {"role": "user", "content": "w2 w3"},
    {"role": "assistant", "content": "w4 é "},
]
CALL = {"id": "a1", "type": "function", "function": {"name": "f", "arguments": {"key": "w7"}}}
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
}


@pytest.fixture
def both(tmp_path: Path) -> tuple[Any, DeviceTokenizer]:
    """Transformers' tokenizer and ours, of the same files."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    return AutoTokenizer.from_pretrained(tmp_path), DeviceTokenizer(tmp_path)


def test_tokens_and_texts_are_the_same(both: tuple[Any, DeviceTokenizer]) -> None:
    theirs, ours = both
    text = "w1 w2 unknown w3"
    for special in (True, False):
        ids = list(theirs(text, add_special_tokens=special)["input_ids"])
        assert ours(text, add_special_tokens=special)["input_ids"] == ids
        assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(
            ids, skip_special_tokens=special
        )
    assert ours.get_vocab() == theirs.get_vocab()
    assert list(ours.get_added_vocab().items()) == list(theirs.get_added_vocab().items())
    assert ours.all_special_tokens == theirs.all_special_tokens
    assert ours.special_tokens_map == theirs.special_tokens_map
    tokens = [*theirs.get_vocab()][:20]
    assert [ours.convert_tokens_to_ids(one) for one in tokens] == theirs.convert_tokens_to_ids(
        tokens
    )
    assert [ours.convert_ids_to_tokens(i) for i in range(20)] == theirs.convert_ids_to_tokens(
        list(range(20))
    )


@pytest.mark.parametrize(
    ("messages", "options"),
    [
        (CHAT, {}),
        (CHAT[:2], {"variables": {"note": "w9"}}),
        (CHAT, {"continue_final_message": True}),
        ([*CHAT[:2], {"role": "assistant", "content": " w8 \n"}], {"continue_final_message": True}),
        ([*CHAT[:2], {"role": "assistant", "content": "", "tool_calls": [CALL]}], {}),
        (CHAT[:2], {"tools": [TOOL]}),
    ],
)
def test_chats_are_rendered_the_same(
    both: tuple[Any, DeviceTokenizer], messages: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    theirs, ours = (ChatTemplate(one) for one in both)
    text = theirs.rendered(messages, **options)
    assert ours.rendered(messages, **options) == text
    assert ours.tokenize(text) == theirs.tokenize(text)


def test_several_templates_by_name(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    ours = DeviceTokenizer(tmp_path)
    assert ours.get_chat_template() == "plain"
    assert ours.get_chat_template(tools=[]) == "tools"


def test_a_damaged_tokenizer_is_told(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CorruptCheckpointError, match=r"tokenizer\.json"):
        DeviceTokenizer(tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [1, 2]},
        {"repetition_penalty": 1.1, "bad_words_ids": [[3], [4, 5]], "suppress_tokens": [7]},
        {"num_beams": 4, "max_length": 20, "sequence_bias": [[[3], -1.0]]},
    ],
)
def test_generation_defaults_are_read_the_same(settings: dict[str, Any], tmp_path: Path) -> None:
    GenerationConfig(**settings).save_pretrained(tmp_path)
    theirs = GenerationConfig.from_pretrained(tmp_path)
    config: Any = _GenerationConfig(json.loads((tmp_path / "generation_config.json").read_text()))
    assert GenerationDefaults.of(config, 64) == GenerationDefaults.of(theirs, 64)
