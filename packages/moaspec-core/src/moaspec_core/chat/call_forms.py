"""Forms of tool calls as models write them.

Most write JSON: Hermes (also Qwen), Llama 3, Mistral, Phi-4, Granite. Qwen3-Coder and GLM-4.5 write
tags, Llama 4 writes a Python list.

If a template knows no tools, the system message describes them, in the form of Hermes.
"""

import json
import re
import secrets
import string
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from moaspec_core.chat.argument_types import as_text

CALL_ID_ALPHABET = string.ascii_letters + string.digits
CALL_ID_LENGTH = 9  # Mistral's templates take ids of nine letters or digits; all others take any


@dataclass(frozen=True)
class Tags:
    """Tags around the name and the arguments of a call, where these are no JSON."""

    # name, name_end: around the name; no end where the first tag of an argument ends it.
    name: str
    name_end: str
    # key, key_end: around an argument's name; its value follows.
    key: str
    key_end: str
    value_end: str  # behind a value
    close: str = ""  # behind the last argument
    padding: str = ""  # before and after a value, and no part of it

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that a template of this form contains."""
        return tuple(filter(None, (self.name, self.key, self.value_end)))

    @property
    def key_pattern(self) -> str:
        """A regular expression of the text before a value; its group is the argument's name."""
        end = r"\s*".join(map(re.escape, self.key_end.split("\n")))
        return rf"\s*{re.escape(self.key)}([^<>\n]+){end}"

    def opening(self, name: str) -> str:
        return f"{self.name}{name}{self.name_end}\n"

    def before(self, key: str) -> str:
        return f"{self.key}{key}{self.key_end}{self.padding}"

    @property
    def after(self) -> str:
        return f"{self.padding}{self.value_end}\n"

    def written(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call in these tags."""
        texts = [f"{self.before(k)}{as_text(v)}{self.after}" for k, v in arguments.items()]
        return f"{self.opening(name)}{''.join(texts)}{self.close}".rstrip("\n")


@dataclass(frozen=True)
class CallForm:
    """How a model writes calls."""

    trigger: str  # the mark before a call (with `listed`: before all calls); "" for bare JSON
    # before, after: text around a call's JSON.
    before: str = ""
    after: str = ""
    arguments: str = "arguments"  # the key of the arguments
    listed: bool = False  # whether all calls are one JSON list
    end: str = ""  # a mark that may follow a call; it is not content
    named: str = ""  # the mark between a call's name and its arguments, where only these are JSON
    identified: str = ""  # the mark between that name and the call's id, where there is one
    tags: Tags | None = None  # around the parts of a call that is no JSON
    python: bool = False  # whether calls are Python's, as `name(key=value)`

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks that a grammar must write, which may be special tokens."""
        given = (self.trigger, self.identified, self.named)
        return (*filter(None, given), *(self.tags.marks if self.tags else ()))

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
        if self.tags and isinstance(arguments, Mapping):
            return self.tags.written(name, arguments)
        if self.python and isinstance(arguments, Mapping):
            return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
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
PHI_TOOLS = "<|tool|>"  # the mark before its tools; its template writes no calls

QWEN_XML = CallForm(
    "<tool_call>",
    "\n",
    "\n</tool_call>",
    end="</tool_call>",
    tags=Tags("<function=", ">", "<parameter=", ">", "</parameter>", "</function>", "\n"),
)
GLM = CallForm(
    "<tool_call>",
    after="\n</tool_call>",
    end="</tool_call>",
    tags=Tags("", "", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>"),
)
PYTHON = CallForm("", "[", "]", listed=True, python=True)
PYTHON_EXAMPLE = re.compile(r"\[(?!namespace)\w+\(\w+=")
"""How templates describe it: `[func_name1(params_name1=params_value1), ...]`."""
_FORMS = (MISTRAL_IDENTIFIED, MISTRAL_NAMED, MISTRAL, PHI, FUNCTOOLS, QWEN_XML, GLM, HERMES)


def form_of(template: str, vocabulary: Collection[str] = ()) -> CallForm:
    """The form that a template asks for, else the one whose marks the tokenizer has."""
    for form in _FORMS:
        if all(mark in template for mark in form.marks):
            return form
    if PYTHON_EXAMPLE.search(template):
        return PYTHON
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
