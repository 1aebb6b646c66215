"""Build the tokenizer that the metadata of a GGUF file describes.

The ids are those of llama.cpp, for the kinds of tokenizers that causal models have there: `gpt2`
(byte-level BPE), `llama` (the BPE of SentencePiece) and `gemma4` (BPE over SentencePiece's tokens).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from moaspec.target.weights.gguf_merges import merges_by_score
from moaspec.target.weights.gguf_special import SPACE, add_special
from moaspec.target.weights.gguf_splits import SPLITS, Splits
from moaspec.target.weights.gguf_tokens import (
    KEY,
    TEMPLATE,
    Tokens,
    UnreadableError,
    require_known,
)
from moaspec_core.errors import UnknownModelError
from moaspec_core.support.causes import first_line

_KINDS = ("gpt2", "llama", "gemma4")
_NAMED = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",  # as GGUF spells it
    "pad_token": "padding",
    "mask_token": "mask",
}


def read_tokenizer(fields: Mapping[str, Any], *, name: str) -> Any:
    """Build the tokenizer of a GGUF file.

    Args:
        fields: the file's metadata.
        name: the target's, for errors.

    Returns:
        A fast tokenizer of transformers, with the file's chat templates.

    Raises:
        UnknownModelError: a kind of tokenizer or a way to split words that is not known here, or
            tokens and merges that do not fit each other.
    """
    try:
        return _tokenizer(fields)
    except Exception as error:  # the library raises almost anything where fields are damaged
        known = isinstance(error, UnreadableError)
        cause = error if known else f"Its fields are damaged ({first_line(error)})."
        raise UnknownModelError(
            f"Cannot read the tokenizer of {name!r} out of its GGUF file: {cause} Name a directory "
            "that holds the model's own tokenizer.json: --tokenizer DIR, or "
            "load_target(..., tokenizer=DIR)."
        ) from error


def end_ids(fields: Mapping[str, Any]) -> list[int]:
    """The tokens that end an answer, as llama.cpp finds them: the file's EOS token first.

    Raises:
        UnreadableError: the file's tokens cannot be read.
    """
    return Tokens.of(fields).ends


def _tokenizer(fields: Mapping[str, Any]) -> Any:
    kind = fields.get(f"{KEY}model")
    if kind not in _KINDS:
        raise UnreadableError(f"{KEY}model is {kind!r}, and known are {', '.join(_KINDS)}.")
    require_known(fields)
    tokens = Tokens.of(fields)
    if kind == "llama":
        backend, begins = _sentencepiece(tokens), True
    else:
        splits = _splits(tokens, kind)
        backend = _raw_bpe(tokens, splits) if splits.raw else _byte_level_bpe(tokens, splits)
        begins = splits.add_bos
    add_special(backend, tokens)
    ids = {name: tokens.named(kind) for name, kind in _NAMED.items()}
    named = {name: one for name, one in ids.items() if one is not None}
    # transformers cuts its special tokens out of texts, so that no ordinary token may be one.
    special = {name: tokens.texts[one] for name, one in named.items() if tokens.is_special(one)}
    ordinary = {name: one for name, one in named.items() if name not in special}
    begins = kind == "gemma4" or tokens.field("add_bos_token", begins)
    adds = {"bos_token": bool(begins), "eos_token": bool(tokens.field("add_eos_token", False))}
    added = {name: named[name] for name, is_added in adds.items() if is_added and name in named}
    if added.keys() & ordinary:
        backend.post_processor = _framed(tokens, added)
        switches = dict[str, bool]()
    else:
        switches = {f"add_{name}": name in added for name in adds}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **special,
        **switches,
        chat_template=_chat_template(fields, {k: backend.decode([v]) for k, v in ordinary.items()}),
        # Unset, transformers would take spaces out of some texts.
        clean_up_tokenization_spaces=False,
    )


def _framed(tokens: Tokens, added: Mapping[str, int]) -> TemplateProcessing:
    """Texts between the BOS and EOS tokens, or one of them."""
    before, after = ([name] if name in added else [] for name in ("bos_token", "eos_token"))
    special = [
        {"id": name, "ids": [one], "tokens": [tokens.texts[one]]} for name, one in added.items()
    ]
    return TemplateProcessing(single=[*before, "$A", *after], special_tokens=special)


def _splits(tokens: Tokens, kind: str) -> Splits:
    pre = "gemma4" if kind == "gemma4" else tokens.field("pre") or "default"
    if pre not in SPLITS:
        raise UnreadableError(f"{KEY}pre is {pre!r}, which is not known.")
    return SPLITS[pre]


def _byte_level_bpe(tokens: Tokens, splits: Splits) -> Tokenizer:
    merges = list(_merges(tokens))
    backend = Tokenizer(models.BPE(tokens.ids, merges, ignore_merges=splits.ignore_merges))
    words = [Split(Regex(pattern), "isolated") for pattern in splits.patterns]
    backend.pre_tokenizer = Sequence([*words, ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    return backend


def _raw_bpe(tokens: Tokens, splits: Splits) -> Tokenizer:
    backend = Tokenizer(models.BPE(tokens.ids, list(_merges(tokens)), byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.pre_tokenizer = Sequence(
        [Split(Regex(pattern), "isolated") for pattern in splits.patterns]
    )
    backend.decoder = _sentencepiece_decoder()
    if splits.whole_lines:
        runs = [text for text in tokens.texts if len(text) > 1 and not text.strip("\n")]
        backend.add_tokens([AddedToken(run, normalized=False) for run in runs])
    return backend


def _merges(tokens: Tokens) -> Iterator[tuple[str, str]]:
    """The file's merges, of each pair the first."""
    ids = tokens.ids
    for merge in dict.fromkeys(tokens.field("merges") or ()):
        at = merge.find(" ", 1)  # a token may begin with a space
        left, right = merge[:at], merge[at + 1 :]
        if at < 0 or left not in ids or right not in ids or left + right not in ids:
            raise UnreadableError(f"The merge {merge!r} is not one of tokens to a token.")
        yield left, right


def _sentencepiece(tokens: Tokens) -> Tokenizer:
    unknown = tokens.named("unknown")
    model = models.BPE(
        tokens.ids,
        merges_by_score(_scores(tokens)),
        byte_fallback=True,
        unk_token=None if unknown is None else tokens.texts[unknown],
    )
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.decoder = _sentencepiece_decoder(prefix=tokens.space_prefix)
    return backend


def _sentencepiece_decoder(*, prefix: bool = False) -> Any:
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)


def _scores(tokens: Tokens) -> dict[str, float]:
    """Scores of letters, and of the tokens to which a text without special ones can be merged."""
    cut_out = {text for text, _ in tokens.special() if len(text) > 1 and SPACE not in text}
    scores = zip(tokens.texts, tokens.numbers("scores", 0.0), strict=False)
    return {text: one for text, one in scores if text not in cut_out and " " not in text}


def _chat_template(
    fields: Mapping[str, Any], ordinary: Mapping[str, str]
) -> str | dict[str, str] | None:
    """The file's template, or all of its templates by name.

    Args:
        ordinary: texts of named tokens that transformers does not know, for the templates.
    """
    begin = f"{TEMPLATE}."
    known = "".join(
        f"{{% set {name} = {json.dumps(text, ensure_ascii=False)} %}}"
        for name, text in ordinary.items()
        if name in ("bos_token", "eos_token")
    )
    named = {
        key.removeprefix(begin): known + text
        for key, text in fields.items()
        if key.startswith(begin)
    }
    default = fields.get(TEMPLATE)
    default = None if default is None else known + default
    if not named:
        return default
    return named if default is None else {"default": default, **named}
