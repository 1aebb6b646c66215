"""Names of targets, directories, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close
from transformers import MambaConfig

import moaspec
import tiny
from moaspec.backends import load
from moaspec.target import registry
from moaspec_core.errors import HubError, InputError, UnknownModelError, UnsupportedTargetError
from moaspec_core.tokens import names
from moaspec_core.tokens.names import ALIASES, local_gguf


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tiny.model().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_load_target_from_a_directory(family: str, tmp_path: Path) -> None:
    tiny.model(family).save_pretrained(tmp_path)
    target = moaspec.load_target(str(tmp_path), dtype="float32")
    assert target.name == str(tmp_path)
    assert target.config.model_type == family
    state = target.model.state_dict()
    for name, value in tiny.target(family).model.state_dict().items():
        assert_close(state[name], value, rtol=0, atol=0)
    result = moaspec.generate(target, tiny.PROMPTS[0], max_new_tokens=6)
    assert tuple(result.token_ids) == tiny.own_texts(family)[0][:6]


def test_the_tokenizer_comes_along(directory: Path) -> None:
    tiny.tokenizer().save_pretrained(directory)
    tokenizer: Any = moaspec.load_target(str(directory)).tokenizer
    assert tokenizer("w3 w9")["input_ids"] == [3, 9]


def test_a_directory_without_tokenizer(directory: Path) -> None:
    assert moaspec.load_target(str(directory)).tokenizer is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes(dtype: str, directory: Path) -> None:
    assert moaspec.load_target(str(directory), dtype=dtype).dtype == getattr(torch, dtype)


def test_the_faster_dtype_is_the_default(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for fastest in (torch.bfloat16, torch.float32):
        monkeypatch.setattr(load, "fastest_dtype", lambda *_, dtype=fastest, **__: dtype)
        assert moaspec.load_target(str(directory)).dtype == fastest
        assert load.chosen_dtype("float16") == "float16"


def test_wrong_names_are_told_before_kernels_are_compiled(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compiled them for half a minute first, on CPUs without instructions for bfloat16."""
    monkeypatch.setattr(load, "must_compile", lambda: True)
    monkeypatch.setattr(load, "fastest_dtype", lambda *_, **__: pytest.fail("compiled"))
    with pytest.raises(InputError, match="adapter"):
        moaspec.load_target(str(directory), adapter="nothing")
    with pytest.raises(InputError, match="int3"):
        moaspec.load_target(str(directory), quantize="int3")
    (directory / "model.safetensors").write_bytes(b"damaged")
    for name in ("nothing", str(directory)):
        with pytest.raises(UnknownModelError):
            moaspec.load_target(name)


def test_without_kernels_that_compile_the_dtype_is_chosen_anew(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "must_compile", lambda: True)
    monkeypatch.setattr(load, "fastest_dtype", lambda *_, **__: torch.float32)
    assert moaspec.load_target(str(directory)).dtype == torch.float32


def test_unknown_dtype(directory: Path) -> None:
    with pytest.raises(InputError, match="int8"):
        moaspec.load_target(str(directory), dtype="int8")


@pytest.mark.parametrize("name", ["not a name!", "a/b/c", ""])
def test_unknown_name(name: str) -> None:
    with pytest.raises(UnknownModelError):
        moaspec.load_target(name)


def test_an_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(UnknownModelError, match="is damaged or holds no model"):
        moaspec.load_target(str(tmp_path))


def test_a_directory_without_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    with pytest.raises(UnknownModelError):
        moaspec.load_target(str(directory))


def test_truncated_weights(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UnknownModelError, match="Cannot load the target"):
        moaspec.load_target(str(directory))


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "no such model"}'])
def test_broken_config(text: str, directory: Path) -> None:
    (directory / "config.json").write_text(text)
    with pytest.raises((UnknownModelError, UnsupportedTargetError)):
        moaspec.load_target(str(directory))


def edit_weights(directory: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "missing .model.layers.1.mlp"),
        (lambda t: t.pop("lm_head.weight"), "missing .lm_head"),
        (lambda t: t.update({"model.layers.7.x": torch.zeros(2)}), "unexpected .model.layers.7"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(5)}), r"norm.weight has shape \(5,"),
        (lambda t: t["model.norm.weight"].fill_(float("nan")), "norm.weight has NaN"),
        (lambda t: t["lm_head.weight"][3].fill_(float("-inf")), "lm_head.weight has NaN or inf"),
    ],
)
def test_weights_that_cannot_be_trusted(change: Any, cause: str, directory: Path) -> None:
    """Transformers would go on with random numbers, and NaN would be decoded to some token."""
    edit_weights(directory, change)
    with pytest.raises(UnknownModelError, match=f"is damaged .*{cause}"):
        moaspec.load_target(directory)


def test_weights_too_large_for_the_dtype(directory: Path) -> None:
    edit_weights(directory, lambda t: t["lm_head.weight"][3].fill_(1e6))
    moaspec.load_target(directory)
    with pytest.raises(UnknownModelError, match="infinite values in float16"):
        moaspec.load_target(directory, dtype="float16")


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 4},
        {"num_hidden_layers": 2},
        {"vocab_size": 65},
        {"num_attention_heads": 5},
        {"num_attention_heads": 0},
        {"num_attention_heads": "x"},
        {"hidden_size": 10**12},
        {"hidden_act": "no such"},
    ],
    ids=str,
)
def test_a_config_that_does_not_fit(change: dict[str, Any], directory: Path) -> None:
    edit_config(directory, **change)
    with pytest.raises(UnknownModelError, match=r"is damaged .*Cause: \S"):
        moaspec.load_target(str(directory))


@pytest.mark.parametrize("stored", [True, False])
def test_a_tied_head_may_be_stored_or_not(stored: bool, tmp_path: Path) -> None:
    tiny.model(tie_word_embeddings=True).save_pretrained(tmp_path)
    if stored:
        edit_weights(
            tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})
        )
    target = moaspec.load_target(tmp_path)
    assert target.name == str(tmp_path)


def test_buffers_of_old_checkpoints_are_ignored(directory: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_weights(directory, lambda t: t.update({name: torch.zeros(4)}))
    moaspec.load_target(directory)


@pytest.mark.parametrize("device", ["foo", "cpu:x", "", "meta"])
def test_unknown_device(device: str, directory: Path) -> None:
    with pytest.raises(InputError, match="try 'cpu'"):
        moaspec.load_target(directory, device=device)


def test_a_family_that_is_not_covered(tmp_path: Path) -> None:
    MambaConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedTargetError, match="mamba"):
        moaspec.load_target(str(tmp_path))


def test_an_alias_without_its_package_is_asked_of_the_hub(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alias = replace(ALIASES["smollm2-135m"], hub_id=str(directory))
    monkeypatch.setitem(ALIASES, "smollm2-135m", alias)
    monkeypatch.setattr(registry, "local_gguf", lambda _: None)
    target = moaspec.load_target("smollm2-135m")
    assert target.name == "smollm2-135m"
    assert target.identity == tiny.target().identity


def test_hub_id_of_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "local_gguf", lambda _: None)
    monkeypatch.setattr(registry, "cached_if_offline", lambda _: None)
    asked: list[str] = []

    def from_pretrained(source: str, **_: Any) -> None:
        asked.append(source)
        raise OSError("no network")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", from_pretrained)
    with pytest.raises(UnknownModelError, match=r"models get smollm2-135m.*no network"):
        moaspec.load_target("smollm2-135m")
    assert asked == ["HuggingFaceTB/SmolLM2-135M-Instruct"]


@dataclass
class _File:
    """Stands in for a file of an installed package."""

    folder: Path
    name: str

    def locate(self) -> Path:
        return self.folder / self.name


@dataclass
class _Distribution:
    files: list[_File] | None


def test_a_packaged_gguf_is_found_without_importing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alias = ALIASES["smollm2-135m"]
    code, weights = _File(tmp_path, "__init__.py"), _File(tmp_path, alias.gguf)
    installed = _Distribution([code, weights])
    monkeypatch.setattr(names, "distribution", lambda _: installed)
    assert local_gguf(alias) == tmp_path / alias.gguf
    installed.files = [code]
    assert local_gguf(alias) is None
    installed.files = None
    assert local_gguf(alias) is None


def test_the_gguf_of_a_package_that_is_not_installed() -> None:
    missing = replace(ALIASES["smollm2-135m"], package="no-such-package-here")
    assert local_gguf(missing) is None


@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b", "smollm2-135m"])
def test_an_alias_takes_its_fetched_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alias = ALIASES[name]
    monkeypatch.setenv("MOASPEC_CACHE", str(tmp_path))
    fetched = names.fetched_gguf(alias)
    fetched.parent.mkdir()
    fetched.write_bytes(b"no GGUF")
    assert local_gguf(alias) == fetched
    with pytest.raises(UnknownModelError, match=rf"GGUF.* `moaspec models get {name}` fetches it"):
        registry.find_weights(name)


def test_an_alias_that_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOASPEC_CACHE", str(tmp_path))
    told = r"is not here: `moaspec models get qwen2\.5-coder-1\.5b` fetches it \(1117 MB\)"
    with pytest.raises(UnknownModelError, match=told):
        moaspec.load_target("qwen2.5-coder-1.5b")


def test_without_network_the_command_to_install_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "local_gguf", lambda _: None)

    def unreachable(_: str) -> None:
        raise HubError("The hub cannot be reached (no route).")

    monkeypatch.setattr(registry, "cached_if_offline", unreachable)
    command = "moaspec models get smollm2-135m"
    with pytest.raises(UnknownModelError, match=f"{command}.*no route"):
        moaspec.load_target("smollm2-135m")
