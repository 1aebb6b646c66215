"""Writes GGUF files for tests: any metadata of a tokenizer, over a model of one tiny layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

KEY = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
HIDDEN = 32
_SQUARE = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def write(path: Path, fields: Mapping[str, Any]) -> Path:
    """A Llama with these fields and small random weights."""
    size = len(fields[f"{KEY}tokens"])
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_rope_dimension_count(HIDDEN // 2)
    writer.add_vocab_size(size)
    for name, value in fields.items():
        _add(writer, name, value)
    random = np.random.default_rng(0)

    def weight(*shape: int) -> Any:
        return random.standard_normal(shape, dtype=np.float32) * 0.1

    writer.add_tensor("token_embd.weight", weight(size, HIDDEN))
    writer.add_tensor("output.weight", weight(size, HIDDEN))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    for name in _SQUARE:
        writer.add_tensor(f"blk.0.{name}.weight", weight(HIDDEN, HIDDEN))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: Any, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, list(value))


def byte_level(
    pre: str,
    merges: Sequence[str] = ("a b",),
    *,
    words: Sequence[str] = (),
    special: Mapping[str, int] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """The fields of a byte-level tokenizer: the alphabet, merges, further words, special tokens.

    Args:
        pre: the way to split words.
        special: types by text.
        **fields: further ones, without the prefix.
    """
    letters = sorted(ByteLevel.alphabet())
    made = [merge.replace(" ", "", 1) for merge in merges]
    plain = list(dict.fromkeys([*letters, *made, *words]))
    extra = {"<s>": CONTROL, **(special or {})}
    return _fields(
        {
            "model": "gpt2",
            "pre": pre,
            "tokens": [*plain, *extra],
            "token_type": [*[NORMAL] * len(plain), *extra.values()],
            "merges": list(merges),
            "bos_token_id": len(plain),
            **fields,
        }
    )


def sentencepiece(
    words: Mapping[str, float],
    *,
    special: Mapping[str, int] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """The fields of a SentencePiece tokenizer: bytes, words with their scores, special tokens."""
    pieces = {
        "<unk>": (0.0, UNKNOWN),
        "<s>": (0.0, CONTROL),
        "</s>": (0.0, CONTROL),
        **{f"<0x{byte:02X}>": (0.0, BYTE) for byte in range(256)},
        **{word: (score, NORMAL) for word, score in words.items()},
        **{text: (0.0, kind) for text, kind in (special or {}).items()},
    }
    return _fields(
        {
            "model": "llama",
            "tokens": list(pieces),
            "scores": [score for score, _ in pieces.values()],
            "token_type": [kind for _, kind in pieces.values()],
            "bos_token_id": 1,
            "eos_token_id": 2,
            "unknown_token_id": 0,
            **fields,
        }
    )


def _fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """With GGUF's prefix; a value of None leaves a field out."""
    return {f"{KEY}{name}": value for name, value in given.items() if value is not None}
