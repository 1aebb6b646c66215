"""A target's tokenizer and chat template out of a bundle's files, without transformers."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from moaspec_core.checkpoint.user_files import read_json
from moaspec_core.errors import CorruptCheckpointError

NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""Special tokens that have a name: `bos_token`, ..."""
END = "\ufdd1 "
"""Marks the end of a message to continue. Its first character is a noncharacter of Unicode. A
template that removes the space also removes white space of the message."""


class DeviceTokenizer:
    """The methods of transformers' fast tokenizers that devices use, with the same results.

    Args:
        directory: with `tokenizer.json`, `tokenizer_config.json` and, where there is one, the chat
            template as transformers saves them.

    Attributes:
        backend_tokenizer: the tokenizer itself.
        chat_template: a text, several by name, or None.

    Raises:
        OSError, ValueError: files that cannot be read.
    """

    def __init__(self, directory: str | Path) -> None:
        directory = Path(directory)
        text = (directory / "tokenizer.json").read_text(encoding="utf-8")
        try:
            self.backend_tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # tokenizers raises nothing narrower
            raise CorruptCheckpointError(f"{directory / 'tokenizer.json'}: {error}") from error
        self.backend_tokenizer.no_padding()
        self.backend_tokenizer.no_truncation()
        self._config: dict[str, Any] = read_json(directory / "tokenizer_config.json")
        self.chat_template = _chat_template(directory, self._config)
        self.added_tokens_decoder = self.backend_tokenizer.get_added_tokens_decoder()
        self._templates: dict[str, Any] = {}

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """`input_ids` of a text."""
        encoded = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": encoded.ids}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of tokens."""
        return str(
            self.backend_tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        )

    def get_vocab(self) -> dict[str, int]:
        """Ids by token, added ones among them."""
        return dict(self.backend_tokenizer.get_vocab(with_added_tokens=True))

    def get_added_vocab(self) -> dict[str, int]:
        """Ids by added token, in the order of ids."""
        return {one.content: number for number, one in sorted(self.added_tokens_decoder.items())}

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        """A token by its id."""
        found: str | None = self.backend_tokenizer.id_to_token(token_id)
        return found

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """The id of a token."""
        found: int | None = self.backend_tokenizer.token_to_id(token)
        return found

    @cached_property
    def special_tokens_map(self) -> dict[str, str]:
        """Named special tokens, which templates may write."""
        names = [f"{name}_token" for name in NAMED]
        found = {name: _content(self._config.get(name)) for name in names}
        return {name: token for name, token in found.items() if token is not None}

    @property
    def all_special_tokens(self) -> list[str]:
        """Named special tokens and further ones."""
        extra = self._config.get("extra_special_tokens") or ()
        extra = extra.values() if isinstance(extra, Mapping) else extra
        found = [*self.special_tokens_map.values(), *map(_content, extra)]
        return [token for token in dict.fromkeys(found) if token is not None]

    def get_chat_template(self, *, tools: Sequence[Any] | None = None) -> str:
        """The template's text; where there are several, the one for conversations with tools.

        Raises:
            ValueError: none of these.
        """
        template = self.chat_template
        if isinstance(template, dict):
            for name in ("tool_use", "default") if tools is not None else ("default",):
                if name in template:
                    return str(template[name])
        if not isinstance(template, str):
            raise ValueError("the tokenizer has no chat template")
        return template

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        chat_template: str,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = False,
        **variables: Any,
    ) -> str:
        """Render a conversation.

        Raises:
            TemplateError: the template refuses it.
            ValueError: the last message is to be continued, and the template does not write it.
        """
        assert not tokenize, "`ChatTemplate` encodes the text"
        messages = [dict(message) for message in conversation]
        if continue_final_message:
            messages[-1]["content"] += END
        text = self._compiled(chat_template).render(
            messages=messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            **{**self.special_tokens_map, **variables},
        )
        if not continue_final_message:
            return str(text)
        before, mark, after = text.rpartition(END[0])
        if not mark:
            raise ValueError("the template does not write the message that is to be continued")
        return str(before if after.startswith(END[1]) else before.rstrip())

    def _compiled(self, source: str) -> Any:
        if source not in self._templates:
            self._templates[source] = self._environment.from_string(source)
        return self._templates[source]

    @cached_property
    def _environment(self) -> ImmutableSandboxedEnvironment:
        """A Jinja environment with the functions that templates of transformers use."""
        found = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationMarks, loopcontrols]
        )
        found.filters["tojson"] = _to_json
        found.globals["raise_exception"] = _refuse
        found.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        return found


class _GenerationMarks(Extension):
    """`{% generation %}` marks what training learns; here it is text like any other."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the escapes for HTML that Jinja's own filter makes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _content(token: Any) -> str | None:
    """A special token as text; files have an object for one with flags."""
    found = token.get("content") if isinstance(token, Mapping) else token
    return None if found is None else str(found)


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):  # several, by name
        return {str(one["name"]): str(one["template"]) for one in found}
    return found if isinstance(found, str) else None
