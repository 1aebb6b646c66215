"""The table of limits: shown as it is, and kept on both protocols."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

import serving
from moaspec_core.errors import WireError
from moaspec_core.support import limits
from moaspec_edge.protocol import target_pb2 as pb
from moaspec_edge.protocol import wire
from serving import MODEL, say

DOCS = Path(__file__).parents[4] / "docs" / "security.md"
LIMITS = wire.WireLimits(vocab_size=1 << 20, max_tokens=4096)


def rows() -> list[str]:
    """The table as the module has it: name, value, and the comment behind or above it."""
    table, above = [], ""
    for line in inspect.getsource(limits).splitlines():
        if found := re.match(r"([A-Z_]+) = .*?(?:  # (.+))?$", line):
            text = found[2] or above
            table.append(f"| `{found[1]}` | {getattr(limits, found[1]):,} | {text} |")
        above = f"{above} {line[1:].strip()}".strip() if line.startswith("#") else ""
    return table


def test_the_documentation_shows_this_table() -> None:
    lines = DOCS.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if re.match(r"\| `[A-Z]", line)] == rows()


@pytest.mark.parametrize(
    "request_",
    [
        pb.GenerateRequest(stop=["x"] * (limits.MAX_STOP_STRINGS + 1)),
        pb.GenerateRequest(stop=["x" * (limits.MAX_STOP_CHARACTERS + 1)]),
        pb.GenerateRequest(stop_token_ids=range(limits.MAX_STOP_TOKENS + 1)),
    ],
)
def test_too_much_in_a_request_for_text(request_: pb.GenerateRequest) -> None:
    with pytest.raises(WireError, match="at most"):
        wire.parse_generate(request_.SerializeToString())


def test_the_largest_request_is_one_that_breaks_no_limit() -> None:
    stop = [chr(0x10FFFF) * limits.MAX_STOP_CHARACTERS] * limits.MAX_STOP_STRINGS
    words = [pb.TokenRules.Word(token_ids=[LIMITS.vocab_size - 1] * 16)] * limits.MAX_WORDS
    request = pb.GenerateRequest(
        token_ids=[LIMITS.vocab_size - 1] * LIMITS.max_tokens,
        stop=stop,
        stop_token_ids=[LIMITS.vocab_size - 1] * limits.MAX_STOP_TOKENS,
        sampling=pb.Sampling(
            grammar=chr(0x10FFFF) * limits.MAX_GRAMMAR,
            logit_bias={(1 << 20) - 1 - i: 1.0 for i in range(limits.MAX_LOGIT_BIAS)},
            top_p=1.0,
            repetition_penalty=1.0,
            rules=pb.TokenRules(
                suppress_tokens=[LIMITS.vocab_size - 1] * limits.MAX_RULE_TOKENS,
                begin_suppress_tokens=[LIMITS.vocab_size - 1] * limits.MAX_RULE_TOKENS,
                bad_words_ids=words,
            ),
        ),
    )
    frame = request.SerializeToString()
    wire.sampling_of(wire.parse_generate(frame).sampling, LIMITS)
    assert len(frame) <= LIMITS.max_bytes < limits.MAX_FRAME_BYTES


TOKENS = range(limits.MAX_RULE_TOKENS + 1)
WORD = pb.TokenRules.Word


@pytest.mark.parametrize(
    "sampling",
    [
        pb.Sampling(logit_bias=dict.fromkeys(range(limits.MAX_LOGIT_BIAS + 1), 1.0)),
        pb.Sampling(grammar="x" * (limits.MAX_GRAMMAR + 1)),
        pb.Sampling(rules=pb.TokenRules(suppress_tokens=TOKENS)),
        pb.Sampling(rules=pb.TokenRules(begin_suppress_tokens=TOKENS)),
        pb.Sampling(rules=pb.TokenRules(forced_eos_token_id=TOKENS)),
        pb.Sampling(rules=pb.TokenRules(stop_token_ids=TOKENS)),
        pb.Sampling(
            rules=pb.TokenRules(bad_words_ids=[WORD(token_ids=[1])] * (limits.MAX_WORDS + 1))
        ),
        pb.Sampling(rules=pb.TokenRules(bad_words_ids=[WORD(token_ids=[1] * 257)])),
        pb.Sampling(rules=pb.TokenRules(bad_words_ids=[WORD(token_ids=[1] * 256)] * 257)),
    ],
)
def test_too_much_in_the_settings_of_a_text(sampling: pb.Sampling) -> None:
    sampling.top_p = sampling.repetition_penalty = 1.0
    with pytest.raises(WireError, match="at most"):
        wire.sampling_of(sampling, LIMITS)


def test_as_many_parents_as_drafts() -> None:
    draft = pb.Draft(tokens=[1], parents=[0] * (limits.MAX_DRAFTED + 1))
    with pytest.raises(WireError, match="at most"):
        wire.tree_of(draft, LIMITS)


TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
PART = {"type": "text", "text": "x"}
CHAT = {"messages": say("x")}
TOO_MUCH: dict[str, tuple[str, dict[str, Any]]] = {
    "stop strings": ("chat/completions", {**CHAT, "stop": ["x"] * (limits.MAX_STOP_STRINGS + 1)}),
    "stop": ("chat/completions", {**CHAT, "stop": "x" * (limits.MAX_STOP_CHARACTERS + 1)}),
    "logit_bias": (
        "chat/completions",
        {**CHAT, "logit_bias": {str(i): 0 for i in range(limits.MAX_LOGIT_BIAS + 1)}},
    ),
    "choices": ("chat/completions", {**CHAT, "n": limits.MAX_CHOICES + 1}),
    "alternatives": (
        "chat/completions",
        {**CHAT, "logprobs": True, "top_logprobs": limits.MAX_TOP_LOGPROBS + 1},
    ),
    "tools": ("chat/completions", {**CHAT, "tools": [TOOL] * (limits.MAX_TOOLS + 1)}),
    "messages": ("chat/completions", {"messages": say("x") * (limits.MAX_MESSAGES + 1)}),
    "parts": (
        "chat/completions",
        {"messages": [{"role": "user", "content": [PART] * (limits.MAX_PARTS + 1)}]},
    ),
    "calls": (
        "chat/completions",
        {"messages": [{"role": "assistant", "tool_calls": [CALL] * (limits.MAX_CALLS + 1)}]},
    ),
    "prompts": ("completions", {"prompt": ["x"] * (limits.MAX_PROMPTS + 1)}),
    "items": (
        "responses",
        {"input": [{"role": "user", "content": "x"}] * (limits.MAX_MESSAGES + 1)},
    ),
    "depth": (
        "chat/completions",
        {**CHAT, "chat_template_kwargs": {"x": eval("[" * 101 + "]" * 101)}},
    ),
}


@pytest.mark.slow
def test_too_much_in_a_body() -> None:
    with serving.serving(serving.source(drafter=False)) as served, served.http() as http:
        for name, (path, body) in TOO_MUCH.items():
            answer: httpx.Response = http.post(f"/v1/{path}", json={"model": MODEL, **body})
            assert answer.status_code == 400, name
