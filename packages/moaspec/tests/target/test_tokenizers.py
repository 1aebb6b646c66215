"""Which tokenizer a target has: its tokenizer.json, a GGUF file's, or another directory's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

import gguf_files
import moaspec
import tiny
from gguf_files import CONTROL
from moaspec.target.registry import load_tokenizer, read_skeleton
from moaspec_core.errors import InputError, UnknownModelError

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
TEXT = "a:\n\n12 <|end|> b  c"
CLASSES = (
    "GPT2Tokenizer",
    "GPT2TokenizerFast",
    "LlamaTokenizer",
    "LlamaTokenizerFast",
    "Qwen2Tokenizer",
    "GemmaTokenizer",
    "PreTrainedTokenizerFast",
    None,
)


def single_digits() -> Tokenizer:
    """Digits alone, then byte level, as SmolLM and StarCoder 2 have it."""
    tokens = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ", "12"]
    ids = {token: i for i, token in enumerate(tokens)}
    found = Tokenizer(models.BPE(ids, [("Ċ", "Ċ"), ("1", "2")]))
    found.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens(["<|end|>"])
    return found


def sentencepiece() -> Tokenizer:
    """Spaces before each text, as Llama 2 has it."""
    tokens = ["<unk>", "<|end|>", *(f"<0x{byte:02X}>" for byte in range(256)), SPACE, *"abc12"]
    ids = {token: i for i, token in enumerate(tokens)}
    found = Tokenizer(models.BPE(ids, [], unk_token="<unk>", byte_fallback=True))
    found.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    found.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    found.add_special_tokens(["<|end|>"])
    return found


def saved(folder: Path, backend: Tokenizer, kind: str | None) -> Path:
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    named = {} if kind is None else {"tokenizer_class": kind}
    settings = {**named, "eos_token": "<|end|>", "chat_template": "{{ messages[0].content }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("make", [single_digits, sentencepiece])
def test_a_directory_is_read_as_its_tokenizer_json(
    make: Callable[[], Tokenizer], kind: str | None, tmp_path: Path
) -> None:
    backend = make()
    found = load_tokenizer(str(saved(tmp_path / "x", backend, kind)))
    assert found(TEXT)["input_ids"] == backend.encode(TEXT).ids
    assert found.eos_token == "<|end|>"
    assert found.chat_template == "{{ messages[0].content }}"


def unknown_gguf(tmp_path: Path, **fields: Any) -> Path:
    made = gguf_files.byte_level("not-known", special={"<|im_end|>": CONTROL}, **fields)
    return gguf_files.write(tmp_path / "x.gguf", made)


def test_an_unknown_tokenizer_needs_a_directory(tmp_path: Path) -> None:
    file = unknown_gguf(tmp_path)
    with pytest.raises(UnknownModelError, match=r"'not-known'.*--tokenizer DIR"):
        read_skeleton(file, dtype="float32")
    backend = single_digits()
    folder = saved(tmp_path / "x", backend, "GPT2Tokenizer")
    target = moaspec.load_target(file, dtype="float32", tokenizer=folder)
    assert target.tokenizer is not None
    assert target.tokenizer(TEXT)["input_ids"] == backend.encode(TEXT).ids
    # The ends of answers are still the file's.
    assert target.stop_token_ids == {
        gguf_files.byte_level("qwen2")["tokenizer.ggml.bos_token_id"] + 1
    }
    # What was converted for another tokenizer does not hide the refusal.
    with pytest.raises(UnknownModelError, match="--tokenizer DIR"):
        moaspec.load_target(file, dtype="float32")


def test_another_tokenizer_is_another_identity(tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny.model("llama", vocab_size=300).save_pretrained(model)
    folder = saved(tmp_path / "x", single_digits(), None)
    identity = read_skeleton(model, dtype="float32", tokenizer=folder).identity
    assert identity.tokenizer_hash is not None
    assert read_skeleton(model, dtype="float32").identity.tokenizer_hash is None


def test_a_tokenizer_that_cannot_be_the_models_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny.model("llama", vocab_size=100).save_pretrained(model)
    folder = saved(tmp_path / "x", single_digits(), None)
    with pytest.raises(InputError, match="largest id is 258, and the target has 100"):
        read_skeleton(model, dtype="float32", tokenizer=folder)
    with pytest.raises(InputError, match=r"holds no tokenizer\.json"):
        read_skeleton(model, dtype="float32", tokenizer=model)
