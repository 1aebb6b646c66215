"""Forms of tool calls as models write them: Hermes (also Qwen), Llama 3, Mistral, Phi-4, Granite.

If a template knows no tools, the system message describes them, in the form of Hermes.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

CALL_ID_ALPHABET = string.ascii_letters + string.digits
CALL_ID_LENGTH = 9
"""Mistral's templates take ids of nine letters or digits; all others take any."""


@dataclass(frozen=True)
class CallForm:
    """How a model writes calls.

    Attributes:
        trigger: the mark before a call (with `listed`: before all calls); "" for bare JSON.
        before, after: text around a call's JSON.
        arguments: the key of the arguments.
        listed: whether all calls are one JSON list.
        end: a mark that may follow a call; it is not content.
        named: the mark between a call's name and its arguments, where only these are JSON.
        identified: the mark between that name and the call's id, where there is one.
    """

    trigger: str
    before: str = ""
    after: str = ""
    arguments: str = "arguments"
    listed: bool = False
    end: str = ""
    named: str = ""
    identified: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks that a grammar must write, which may be special tokens."""
        return tuple(mark for mark in (self.trigger, self.identified, self.named) if mark)

    @property
    def joint(self) -> str:
        """Text between calls, before the trigger of the next one."""
        return ", " if self.listed else "" if self.named else "\n"

    def written(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Calls of the normal form as the model writes them."""
        texts = [self._text(call) for call in calls]
        if self.listed:
            return f"{self.trigger}{self.before}{self.joint.join(texts)}{self.after}{self.end}"
        return self.joint.join(f"{self.trigger}{self.before}{text}{self.after}" for text in texts)

    def _text(self, call: Mapping[str, Any]) -> str:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if not self.named:
            return json.dumps({"name": name, self.arguments: arguments}, ensure_ascii=False)
        identifier = f"{self.identified}{call['id']}" if self.identified else ""
        return f"{name}{identifier}{self.named}{json.dumps(arguments, ensure_ascii=False)}"


HERMES = CallForm("<tool_call>", "\n", "\n</tool_call>", end="</tool_call>")
LLAMA = CallForm("", arguments="parameters")
MISTRAL = CallForm("[TOOL_CALLS]", "[", "]", listed=True)
CALL_ID = "[CALL_ID]"
MISTRAL_NAMED = CallForm("[TOOL_CALLS]", named="[ARGS]")
MISTRAL_IDENTIFIED = CallForm("[TOOL_CALLS]", named="[ARGS]", identified=CALL_ID)
"""Mistral's later forms: every call has a trigger."""
PHI = CallForm("<|tool_call|>", "[", "]", listed=True, end="<|/tool_call|>")
FUNCTOOLS = CallForm("functools", "[", "]", listed=True)
PHI_TOOLS = "<|tool|>"
"""The mark before its tools; its template writes no calls."""


def form_of(template: str, vocabulary: Collection[str] = ()) -> CallForm:
    """The form that a chat template asks for.

    Args:
        template: its source.
        vocabulary: tokens that were added to the tokenizer's, for a template that writes no calls.
    """
    for form in (MISTRAL_IDENTIFIED, MISTRAL_NAMED, MISTRAL, PHI, FUNCTOOLS, HERMES):
        if all(mark in template for mark in form.marks):
            return form
    if '"parameters"' in template:
        return LLAMA
    return PHI if PHI.trigger in vocabulary or PHI_TOOLS in template else HERMES


def new_call_id() -> str:
    """A call id that every template takes."""
    return "".join(secrets.choice(CALL_ID_ALPHABET) for _ in range(CALL_ID_LENGTH))


def short_call_id(given: str) -> str:
    """The id itself where it has nine letters or digits, else nine that it alone has."""
    if len(given) == CALL_ID_LENGTH and all(one in CALL_ID_ALPHABET for one in given):
        return given
    number = int.from_bytes(sha256(given.encode("utf-8", "surrogatepass")).digest())
    size = len(CALL_ID_ALPHABET)
    return "".join(CALL_ID_ALPHABET[number // size**i % size] for i in range(CALL_ID_LENGTH))
