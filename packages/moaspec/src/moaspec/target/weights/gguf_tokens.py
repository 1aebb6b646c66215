"""The tokens of a GGUF file: texts, types, and which of them mean something to llama.cpp."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from moaspec_core.errors import InputError

KEY = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # types of tokens; 5 is unused, 6 a byte

ENDS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "[e~[",
)
"""Texts of tokens that end an answer, whatever the file says about them."""
_FIM = {
    "fim_pre": (
        "<|fim_prefix|>",
        "<fim-prefix>",
        "<fim_prefix>",
        "<\uff5cfim\u2581begin\uff5c>",
        "<PRE>",
        "\u2581<PRE>",
        "<|code_prefix|>",
        "<|prefix|>",
    ),
    "fim_suf": (
        "<|fim_suffix|>",
        "<fim-suffix>",
        "<fim_suffix>",
        "<\uff5cfim\u2581hole\uff5c>",
        "<SUF>",
        "\u2581<SUF>",
        "<|code_suffix|>",
        "<|suffix|>",
    ),
    "fim_mid": (
        "<|fim_middle|>",
        "<fim-middle>",
        "<fim_middle>",
        "<\uff5cfim\u2581end\uff5c>",
        "<MID>",
        "\u2581<MID>",
        "<|code_middle|>",
        "<|middle|>",
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""Texts of tokens for code to fill in, by the name of the field that may give their id."""
_OLD_NAMES = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
_ENDS_BY_FIELD = ("eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
"""Texts of control tokens that are part of an answer."""
_DEFAULTS = {"llama": {"bos": 1, "eos": 2, "unknown": 0}}
"""Ids that a file of a kind need not name."""

_LISTS: Mapping[str, tuple[type, ...]] = {
    f"{KEY}tokens": (str,),
    f"{KEY}merges": (str,),
    f"{KEY}token_type": (int,),
    f"{KEY}scores": (int, float),
    f"{KEY}eos_token_ids": (int,),  # Ollama's, beside eos_token_id
}
_SWITCHES = tuple(f"{KEY}add_{name}" for name in ("bos_token", "eos_token", "space_prefix"))
_TEXTS = ("general.name", f"{KEY}model", f"{KEY}pre")
_ROLES = (
    *("bos", "eos", "unknown", "seperator", "padding", "mask"),
    *("cls", "eot", "eom"),
    *_FIM,
    *_OLD_NAMES.values(),
)
SUPPRESSED = f"{KEY}suppress_tokens"
_KNOWN = {
    *_LISTS,
    *_SWITCHES,
    *_TEXTS,
    *(f"{KEY}{role}_token_id" for role in _ROLES),
    TEMPLATE,
    "tokenizer.chat_templates",  # names of those that follow
    SUPPRESSED,  # part of the generation config
    # These are of other kinds of tokenizers, or of programs for whole prompts.
    f"{KEY}add_sep_token",
    f"{KEY}token_type_count",
    f"{KEY}added_tokens",  # llama.cpp, too, goes by types alone
    f"{KEY}precompiled_charsmap",
    f"{KEY}remove_extra_whitespaces",
    "tokenizer.huggingface.json",
    "tokenizer.rwkv.world",
}
_NOT_ADDED = tuple(f"{KEY}add_{role}_token" for role in _ROLES)
_NORMALIZER = f"{KEY}normalizer."


class UnreadableError(InputError):
    """A tokenizer of a kind that is not known here, or whose parts do not fit each other."""


@dataclass(frozen=True)
class Tokens:
    """The tokens of a file, and its other metadata."""

    fields: Mapping[str, Any]
    texts: tuple[str, ...]

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Tokens:
        """Raises UnreadableError where a field has no such value, or two tokens are the same."""
        for name, value in fields.items():
            _require_kind(name, value)
        texts = tuple(
            text or f"[EMPTY_{i}]" for i, text in enumerate(fields.get(f"{KEY}tokens", ()))
        )
        if not texts:
            raise UnreadableError("It has no tokens.")
        if len(set(texts)) < len(texts):
            twice, _ = Counter(texts).most_common(1)[0]
            raise UnreadableError(f"Two of its tokens are {twice!r}.")
        return cls(fields, texts)

    def field(self, name: str, default: Any = None) -> Any:
        """A field of the tokenizer, or the default."""
        return self.fields.get(f"{KEY}{name}", default)

    def numbers(self, name: str, default: float) -> list[Any]:
        """A field with a number for each token.

        Raises:
            UnreadableError: it has fewer.
        """
        found = self.field(name) or [default] * len(self.texts)
        if len(found) < len(self.texts):
            raise UnreadableError(
                f"It has {len(self.texts)} tokens, and its field {KEY}{name} {len(found)} values."
            )
        return list(found)

    @property
    def space_prefix(self) -> bool:
        """Whether a space is set before each part of a text between special tokens."""
        return self.field("model") == "llama" and bool(self.field("add_space_prefix", True))

    @cached_property
    def ids(self) -> dict[str, int]:
        return {text: i for i, text in enumerate(self.texts)}

    @cached_property
    def types(self) -> list[int]:
        """The type of each token: the file's, but for tokens whose text means more."""
        types = self.numbers("token_type", NORMAL)
        by_text = [self._by_text(kind) for kind in _FIM if self._by_field(kind) is None]
        for one in (*by_text, *self._known_ends):
            if one is not None:
                types[one] = CONTROL
        for text in _SHOWN:
            if text in self.ids:
                types[self.ids[text]] = USER_DEFINED
        for text, kind in self._no_ends.items():
            types[self.ids[text]] = kind
        return types

    @cached_property
    def ends(self) -> list[int]:
        """The tokens that end an answer, the file's EOS token first."""
        found = [self.named("eos"), *sorted(self._all_ends)]
        excluded = {self.ids[text] for text in self._no_ends}
        return [
            token_id
            for token_id in dict.fromkeys(found)
            if token_id is not None and token_id not in excluded
        ]

    def named(self, kind: str) -> int | None:
        """The id that the file or its kind gives to `bos`, `eos`, `unknown`, ..., or None."""
        given = self._by_field(kind)
        if given is not None:
            return given
        default = _DEFAULTS.get(self.field("model"), {}).get(kind)
        if default is None or default >= len(self.texts):
            return None
        # llama.cpp takes any token with the usual id; here an ordinary token must not end texts.
        return default if kind != "eos" or self.types[default] in (CONTROL, UNKNOWN) else None

    def _by_field(self, kind: str) -> int | None:
        keys = (f"{kind}_token_id", f"{_OLD_NAMES.get(kind)}_token_id")
        found = (self.field(key) for key in keys)
        return next((one for one in found if one is not None and one < len(self.texts)), None)

    def _by_text(self, kind: str) -> int | None:
        return next((self.ids[text] for text in _FIM[kind] if text in self.ids), None)

    @cached_property
    def _known_ends(self) -> list[int]:
        return [self.ids[text] for text in ENDS if text in self.ids]

    @cached_property
    def _all_ends(self) -> set[int]:
        found = {self._by_field(kind) for kind in ("eos", *_ENDS_BY_FIELD)}
        found |= {
            self._by_text(kind)
            for kind in _ENDS_BY_FIELD
            if kind in _FIM and self._by_field(kind) is None
        }
        more = (one for one in self.field("eos_token_ids", ()) if 0 <= one < len(self.texts))
        return {*self._known_ends, *more, *(one for one in found if one is not None)}

    @cached_property
    def _no_ends(self) -> dict[str, int]:
        """Texts that end no answer beside other tokens, with the types that they then have."""
        texts = {self.texts[end] for end in self._all_ends}
        found = {}
        calls = texts & {"<|call|>", "<|calls|>"}
        if "<|end|>" in texts and calls and texts & {"<|return|>", "<|flush|>"}:
            found["<|end|>"] = USER_DEFINED
        if {"<|tool_response>", "</s>"} <= texts:
            found["</s>"] = NORMAL
        return found

    def special(self) -> Iterator[tuple[str, int]]:
        """Tokens that are cut out of a text before it is split into words, with their types."""
        for token_id, (text, kind) in enumerate(zip(self.texts, self.types, strict=False)):
            if self.is_special(token_id):
                yield text, kind

    def is_special(self, token_id: int) -> bool:
        """Whether a token is cut out of texts, by its type alone."""
        return self.types[token_id] in (UNKNOWN, CONTROL, USER_DEFINED)


def require_known(fields: Mapping[str, Any]) -> None:
    """Refuse fields of the tokenizer that may change ids in a way that is not known here.

    Raises:
        UnreadableError: names the first.
    """
    for name, value in sorted(fields.items()):
        is_off = value is False and (name in _NOT_ADDED or name.startswith(_NORMALIZER))
        is_template = name.startswith(f"{TEMPLATE}.")
        if name.startswith("tokenizer.") and name not in _KNOWN and not is_off and not is_template:
            raise UnreadableError(f"{name} is {str(value)[:60]!r}, which is not known.")


def _require_kind(name: str, value: Any) -> None:
    """Raises UnreadableError where a field of the tokenizer has a value of another kind."""
    if name in _LISTS:
        asked = "a list of texts" if _LISTS[name] == (str,) else "a list of finite numbers"
        fits = isinstance(value, list) and {type(one) for one in value} <= {*_LISTS[name]}
        fits = fits and all(math.isfinite(one) for one in value if type(one) is float)
    elif name in _SWITCHES:
        asked, fits = "true or false", isinstance(value, bool)
    elif name in (*_TEXTS, TEMPLATE) or name.startswith(f"{TEMPLATE}."):
        asked, fits = "a text", isinstance(value, str)
    elif name.startswith(KEY) and name.endswith("_token_id"):
        asked, fits = "a whole number from 0", type(value) is int and value >= 0
    else:
        return
    if not fits:
        raise UnreadableError(f"{name} is {str(value)[:60]!r}, and must be {asked}.")
