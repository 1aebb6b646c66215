"""Tiny tokenizers of the kinds that models have, which spell words in different ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ("true", "Paris", "is", "a", "the", "s", "x", ".", "é")
SPECIALS = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def _metaspace_words() -> list[str]:
    return [_SPACE, *(_SPACE + word for word in WORDS), *WORDS, *"TruePaishx", "\n"]


def _finished(backend: Tokenizer) -> Any:
    backend.add_special_tokens(
        [AddedToken(one, special=True, normalized=False) for one in SPECIALS]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def llama() -> Any:
    """SentencePiece BPE with byte fallback, as Llama 2, Mistral 7B and Phi-3 have it."""
    pieces = list(dict.fromkeys([*SPECIALS, *BYTES, *_metaspace_words()]))
    vocabulary = {token: i for i, token in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _finished(backend)


def unigram() -> Any:
    """A Unigram model behind Metaspace, as T5 and XGLM have it."""
    pieces = list(dict.fromkeys([*SPECIALS, *_metaspace_words()]))
    backend = Tokenizer(models.Unigram([(piece, -float(len(pieces))) for piece in pieces], 0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return _finished(backend)


def byte_level() -> Any:
    """Byte-level BPE, as GPT-2, Llama 3 and Qwen have it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    space = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"
    words = [*(space + word for word in WORDS[:-1]), *WORDS[:-1]]
    pieces = list(dict.fromkeys([*SPECIALS, *letters, *words]))
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(pieces)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _finished(backend)


def wordpiece() -> Any:
    """WordPiece, as BERT has it."""
    pieces = [*SPECIALS, *WORDS, *(f"##{word}" for word in WORDS)]
    vocabulary = {token: i for i, token in enumerate(pieces)}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    return _finished(backend)


KINDS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "unigram": unigram,
    "byte level": byte_level,
    "wordpiece": wordpiece,
}
