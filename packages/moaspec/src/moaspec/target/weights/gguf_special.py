"""Special tokens of a GGUF file, cut out of texts as llama.cpp does.

llama.cpp searches the text for each special token, the longest first, and cuts out all places.
`tokenizers` searches once, from the left, and at each position prefers the longest token. Results
differ where tokens overlap (`ab` and `bcd` in `abcd`). For such vocabularies, normalizers search
for the tokens, the longest first, and set borders around them, which no other token crosses.

Source: `tokenizer_st_partition` of llama.cpp.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers

from moaspec.target.weights.gguf_tokens import USER_DEFINED, Tokens

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
# Unicode reserves these for use inside programs.
_MARK, _BORDER, _PREFIX = "\ufdd0", "\ufdd1", "\ufdd2"
_FIRST_MARKED = 0xF0000  # with a private character for each token, a mark stands for it
_KEPT_SPACES = {"<unk>", "<s>", "<|endoftext|>"}
"""Tokens after which Phi-3 keeps spaces. ASCII ones after its other special tokens are dropped; no
token of `tokenizers` drops just these, so they are cut out as overlapping ones are."""


def add_special(backend: Tokenizer, tokens: Tokens) -> None:
    """Have a tokenizer cut special tokens out, in place, and set spaces before the text between."""
    special = dict(tokens.special())
    ordered = sorted(special, key=lambda text: -len(text.encode()))
    strips = special.keys() - _KEPT_SPACES if _is_phi3(tokens) else set()
    overlap = bool(strips) or _overlap(ordered)
    if overlap:
        _set_borders(backend, ordered, strips, prefix=tokens.space_prefix)
    elif tokens.space_prefix:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), backend.normalizer])
    backend.add_tokens(
        [
            AddedToken(
                text,
                special=kind != USER_DEFINED,
                normalized=overlap,  # found after the normalizers
            )
            for text, kind in special.items()
        ]
    )


def _is_phi3(tokens: Tokens) -> bool:
    name = tokens.fields.get("general.name", "").lower()
    return "phi-3" in name or "phi3" in name


def _overlap(ordered: Sequence[str]) -> bool:
    """Whether some text holds two overlapping tokens, and the later one goes before the earlier."""
    ranks = {text: rank for rank, text in enumerate(ordered)}
    begun: dict[str, list[str]] = defaultdict(list)
    for text in ordered:
        for at in range(1, len(text)):
            begun[text[:at]].append(text)
    return any(
        ranks[second] < ranks[first]
        and _is_longest(first, first + second[len(first) - at :], ranks)
        for first in ordered
        for at in range(1, len(first))
        for second in begun.get(first[at:], ())
    )


def _is_longest(token: str, text: str, known: Collection[str]) -> bool:
    """Whether no longer token begins a text."""
    return not any(text[:end] in known for end in range(len(token) + 1, len(text) + 1))


def _set_borders(
    backend: Tokenizer, ordered: Sequence[str], strips: Collection[str], *, prefix: bool
) -> None:
    marks = {text: _MARK + chr(_FIRST_MARKED + i) for i, text in enumerate(ordered)}
    steps = [normalizers.Prepend(_PREFIX)] if prefix else []
    for text, mark in marks.items():
        found = Regex(re.escape(text) + r"[ \t-\r]*") if text in strips else text
        steps.append(normalizers.Replace(found, mark + (_PREFIX if prefix else "")))
    if prefix:  # not before tokens, nor behind the last one
        steps.append(normalizers.Replace(Regex(rf"{_PREFIX}(?={_MARK}|\z)"), ""))
        steps.append(normalizers.Replace(_PREFIX, SPACE))
    steps += [] if backend.normalizer is None else [backend.normalizer]
    steps += [normalizers.Replace(mark, _BORDER + text + _BORDER) for text, mark in marks.items()]
    # The text of a token itself stays as it is.
    steps.append(normalizers.Replace(Regex(rf"\A{_BORDER}|{_BORDER}\z"), ""))
    backend.normalizer = normalizers.Sequence(steps)
    words = [] if backend.pre_tokenizer is None else [backend.pre_tokenizer]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(_BORDER, "removed"), *words]
    )
