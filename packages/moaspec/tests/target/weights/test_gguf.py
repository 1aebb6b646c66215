"""GGUF files, wherever a model is named."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import ggufs
import moaspec
import tiny
from moaspec.target import registry
from moaspec.target.target import Target
from moaspec.target.weights import gguf
from moaspec_core.errors import UnknownModelError, UnsupportedTargetError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOASPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return ggufs.write(tmp_path / "models" / "tiny.gguf")


def test_a_file_is_a_target(file: Path) -> None:
    target = moaspec.load_target(file, dtype="float32")
    assert target.name == str(file)
    tokenizer = target.tokenizer
    assert tokenizer is not None
    prompt = tokenizer("Hi")["input_ids"]
    expected = tiny.own_text(Target(ggufs.model(), None, name="whole"), prompt, 8)
    assert moaspec.generate(target, prompt, max_new_tokens=8).token_ids == expected
    assert target.stop_token_ids == {0}
    assert tokenizer.chat_template


def test_a_directory_with_one_is_the_same(file: Path, cache: Path) -> None:
    assert moaspec.load_target(file).identity == moaspec.load_target(file.parent).identity
    (kept,) = cache.glob("tiny-*")
    assert "quantization_config" not in json.loads((kept / "config.json").read_text())


def test_a_file_is_parsed_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing takes seconds where the vocabulary is large."""
    import gguf as package

    parsed, reader = [], package.GGUFReader

    def counted(path: Path) -> object:
        parsed.append(path)
        return reader(path)

    monkeypatch.setattr(package, "GGUFReader", counted)
    moaspec.load_target(file)
    assert parsed == [file]


def test_names_end_in_any_case(file: Path) -> None:
    shouted = file.rename(file.with_suffix(".GGUF"))
    assert moaspec.load_target(shouted).identity == moaspec.load_target(file.parent).identity


def test_weights_beside_it_go_first(file: Path) -> None:
    tiny.model().save_pretrained(file.parent)
    assert moaspec.load_target(file.parent).vocab_size == tiny.VOCAB
    assert moaspec.load_target(file).vocab_size == len(ggufs.TOKENS) + 7


def test_a_file_that_was_replaced_is_converted_again(file: Path) -> None:
    first = moaspec.load_target(file)
    bigger = file.with_name("other.gguf")
    ggufs.write(bigger)
    with bigger.open("ab") as appended:
        appended.write(b"\0" * 64)
    bigger.replace(file)
    assert gguf.key_of(file) != gguf.key_of(ggufs.write(bigger))
    state = moaspec.load_target(file).model.state_dict()
    for name, value in first.model.state_dict().items():
        assert_close(state[name], value, rtol=0, atol=0)


@pytest.mark.parametrize("size", [0, 3, 100, 9000, -5000])
def test_a_damaged_file_is_refused_in_one_line(size: int, file: Path, cache: Path) -> None:
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(UnknownModelError, match="is damaged, or no GGUF") as caught:
        moaspec.load_target(file)
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)
    assert not list(cache.glob("*"))


def test_what_is_no_gguf(file: Path) -> None:
    file.write_bytes(b"not a model at all " * 1000)
    with pytest.raises(UnknownModelError, match="is damaged, or no GGUF"):
        moaspec.load_target(file)
    with pytest.raises(UnknownModelError, match="a directory or a GGUF file"):
        moaspec.load_target(file.with_name("missing.gguf"))
    weights = file.with_name("model.safetensors")
    weights.write_bytes(b"x")
    with pytest.raises(UnknownModelError, match="Name the directory that holds"):
        moaspec.load_target(weights)


NO_TENSORS = b"GGUF" + struct.pack("<IQQQ20sIQ", 3, 0, 1, 20, b"general.architecture", 8, 1 << 40)


@pytest.mark.parametrize(
    ("place", "patch", "reason"),
    [
        (8, struct.pack("<Q", 1 << 63), "damaged"),  # tensors
        (16, struct.pack("<Q", 1 << 63), "damaged"),  # facts
        (24, struct.pack("<Q", 1 << 63), "damaged"),  # length of the first fact's name
        (0, NO_TENSORS + b"llama", "has no field llama.embedding_length"),
        (b"llama.block_count", struct.pack("<I", 2**31 - 1), "block_count is 2147483647"),
        (b"llama.feed_forward_length", struct.pack("<I", 2**31 - 1), "ask for 2147483647x48"),
    ],
)
def test_hostile_sizes(place: int | bytes, patch: bytes, reason: str, file: Path) -> None:
    """They are refused before memory or time is spent on them."""
    data = bytearray(file.read_bytes())
    start = place if isinstance(place, int) else data.index(place) + len(place) + 4
    end = len(data) if patch.startswith(b"GGUF") else start + len(patch)
    data[start:end] = patch
    file.write_bytes(data)
    with pytest.raises(UnknownModelError, match=reason):
        moaspec.load_target(file)


def test_a_family_that_is_not_supported(file: Path) -> None:
    other = ggufs.write(file.with_name("other.gguf"), "gpt2")
    with pytest.raises(UnsupportedTargetError, match="no GGUF files of the architecture 'gpt2'"):
        moaspec.load_target(other)


def test_several_files(file: Path) -> None:
    shutil.copy(file, file.with_name("second.gguf"))
    with pytest.raises(UnknownModelError, match=r"tiny.gguf\); name one of them"):
        moaspec.load_target(file.parent)


@pytest.mark.parametrize("named", ["first", "second", "directory"])
def test_parts_of_a_split_file_are_joined(file: Path, cache: Path, named: str) -> None:
    whole = moaspec.load_target(file, dtype="float32").model.state_dict()
    file.unlink()
    first, second = ggufs.write_parts(file.parent / "big.gguf")
    path = {"first": first, "second": second, "directory": file.parent}[named]
    target = moaspec.load_target(path, dtype="float32")
    assert target.tokenizer is not None
    assert target.tokenizer.chat_template
    state = target.model.state_dict()
    for name, value in whole.items():
        assert_close(state[name], value, rtol=0, atol=0)
    assert not list(cache.rglob("*.gguf"))
    second.unlink()
    with pytest.raises(UnknownModelError, match=r"1 of its parts .*big-00002-of-00002\.gguf"):
        moaspec.load_target(first)


def test_the_alias_takes_the_packaged_file(
    file: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setattr(registry, "local_gguf", lambda _: file)
    for dtype in ("bfloat16", "float32", "bfloat16", "float32"):
        target = moaspec.load_target("smollm2-135m", dtype=dtype)
        assert target.name == "smollm2-135m"
        assert target.tokenizer is not None
    kept = f"smollm2-135m-{file.stat().st_size}-{gguf.CONVERSION}"
    assert sorted(one.name for one in cache.glob("smollm2*")) == [kept, f"{kept}-config"]


def test_a_cache_that_cannot_be_written(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(gguf, "save_file", full)
    with pytest.raises(OSError, match=r"Cannot write the cache .*disk full"):
        moaspec.load_target(file, dtype="float32")
    assert list(cache.iterdir()) == []


def test_a_disk_without_room_is_noticed_before(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "FLOAT_BYTES", 2**60)
    with pytest.raises(OSError, match=r"are needed.*\$MOASPEC_CACHE"):
        moaspec.load_target(file, dtype="float32")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_damaged_weights_in_the_cache_are_made_anew(name: str, file: Path, cache: Path) -> None:
    state = moaspec.load_target(file, dtype="float32").model.state_dict()
    (made,) = cache.glob(f"*/{name}")
    content = made.read_bytes()
    made.unlink()  # it is mapped
    made.write_bytes(content[: len(content) // 2])
    anew = moaspec.load_target(file, dtype="float32").model.state_dict()
    for key, value in state.items():
        assert_close(anew[key], value, rtol=0, atol=0)


def test_sharded_checkpoints_with_padded_vocabularies(tmp_path: Path) -> None:
    model = tiny.model(vocab_size=80)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    tiny.tokenizer().save_pretrained(tmp_path)  # 64 tokens for 80 rows
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    target = moaspec.load_target(tmp_path, dtype="float32")
    prompt = target.tokenizer("w5 w9")["input_ids"]  # type: ignore[misc]
    result = moaspec.generate(target, prompt, logit_bias={70: 1e4}, max_new_tokens=3, stop=["w3"])
    assert result.token_ids == [70, 70, 70]
    assert torch.equal(target.model.state_dict()["lm_head.weight"], model.lm_head.weight)
    shards[1].unlink()
    with pytest.raises(UnknownModelError) as caught:
        moaspec.load_target(tmp_path)
    assert "\n" not in str(caught.value)
