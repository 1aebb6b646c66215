"""Targets whose weights stay in the bits of their GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from torch import Tensor
from torch.testing import assert_close

import gguf_models
import moaspec
import tiny
from moaspec.backends import rounded_inputs
from moaspec.backends.cpu.build import why_not
from moaspec.backends.fast_target import same_bits, weight_bytes
from moaspec.backends.rounded_inputs import require_inputs
from moaspec.target.registry import read_target
from moaspec.target.target import Target
from moaspec.target.weights.stored import StoredEmbedding, StoredLinear
from moaspec_core.errors import InputError, UnknownModelError

IDS = [(7 * i * i + 3 * i + 5) % gguf_models.VOCAB for i in range(40)]
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
GEMMA3 = {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_theta": 1e6, "rope_type": "default"},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    },
    "sliding_window": 8,
    "query_pre_attn_scalar": 64,
    "tie_word_embeddings": True,
}
Q4_0, Q5_1, Q8_0 = (GGMLQuantizationType[name] for name in ("Q4_0", "Q5_1", "Q8_0"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOASPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(path: Path, architecture: str = "llama", kind: str = "llama", **changes: Any) -> Path:
    """A file with matrices of three types: values in more bits than keys, as real ones have."""
    made = gguf_models.model(kind, **(WIDE | changes))
    stored: dict[str, tuple[np.ndarray, GGMLQuantizationType]] = {}

    def quantise(tensors: dict[str, np.ndarray]) -> None:
        for name, value in tensors.items():
            if value.ndim == 2:
                types = {"attn_v": Q8_0, "ffn_down": Q5_1, "token_embd": Q5_1, "output": Q8_0}
                part = name.split(".")[-2]
                of = types.get(part, Q4_0)
                stored[name] = quantize(np.ascontiguousarray(value, "f4"), of), of

    return gguf_models.write(path, architecture, made, change=quantise, stored=stored)


def logits_of(target: Target) -> Tensor:
    """Of every position, by the packed target."""
    ids = torch.tensor([IDS])
    passed = target.capture(ids, torch.ones_like(ids))
    return target.head(passed.hidden_BTE[0])


@pytest.mark.parametrize(
    ("architecture", "kind", "changes"),
    [
        ("llama", "llama", {}),
        ("llama", "llama", {"tie_word_embeddings": True}),
        ("qwen2", "qwen2", {}),
        ("qwen3", "qwen3", {}),
        ("phi3", "phi3", {"hidden_size": 256}),
        ("olmo2", "olmo2", {}),
        ("gemma3", "gemma3_text", GEMMA3),
    ],
)
def test_a_target_has_the_files_weights(
    architecture: str, kind: str, changes: dict[str, Any], tmp_path: Path, cache: Path
) -> None:
    path = write(tmp_path / "model.gguf", architecture, kind, **changes)
    target = moaspec.load_target(path, dtype="bfloat16")
    assert not list(cache.glob("*/*.safetensors"))
    plain = moaspec.load_target(path, dtype="float32", packed=False)
    state, expected = target.model.state_dict(), plain.model.state_dict()
    assert set(expected) - set(state) <= (
        {"lm_head.weight"} if "tie_word_embeddings" in changes else set()
    )
    for name, value in state.items():
        assert_close(value, expected[name].bfloat16(), rtol=0, atol=0, msg=name)
    states = plain.model(torch.tensor([IDS])).logits[0]
    found = logits_of(target)
    assert_close(found, states, atol=0.08 * float(states.abs().max()), rtol=0)
    assert target.head(torch.zeros(2, 256).bfloat16(), torch.tensor([5, 3])).shape == (2, 2)


@pytest.mark.parametrize("quantize", [None, "inputs"])
def test_drafts_change_no_text_and_memory_is_the_files(
    quantize: str | None, tmp_path: Path
) -> None:
    if why_not() is not None:
        pytest.skip("needs kernels: without them passes of other widths have other bits")
    path = write(tmp_path / "model.gguf")
    target = moaspec.load_target(path, dtype="bfloat16", quantize=quantize)
    assert same_bits(target)
    drafter = tiny.random_drafter(target).bfloat16()
    for temperature in (0.0, 1.0):
        options: dict[str, Any] = {
            "max_new_tokens": 40,
            "temperature": temperature,
            "seed": 3,
            "stop_token_ids": (),
        }
        prompts = [IDS[:9], IDS[3:20], IDS[:5]]
        trees = (moaspec.Chain(4), moaspec.Tree(depth=3, breadth=4, total_tokens=12))
        plain = moaspec.generate(target, prompts, **options)
        for tree in trees:
            drafted = moaspec.generate(target, prompts, drafter=drafter, tree=tree, **options)
            assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    assert weight_bytes(target) < 1.05 * path.stat().st_size


def test_inputs_are_rounded_by_kernels_as_by_pytorch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if why_not() is not None:
        pytest.skip("kernels round inputs")
    path = write(tmp_path / "model.gguf")
    target = moaspec.load_target(path, dtype="bfloat16", quantize="inputs")
    assert target.precision == "bfloat16, inputs in 8 bits"
    assert "its text is the rounded target's" in caplog.text
    # Of each layer by itself: what rounds to bf16 in between moves some inputs to the next step.
    plain = moaspec.load_target(path, dtype="float32", packed=False, quantize="inputs")
    exact = moaspec.load_target(path, dtype="bfloat16")
    x = torch.linspace(-3, 3, 4 * 256).sin().mul(5).view(4, 256).bfloat16()
    ours, right, other = (one.model.model.layers[1].mlp.gate_proj for one in (target, plain, exact))
    found = ours(x).float()
    assert_close(found, right(x.float()), rtol=2.0**-8, atol=1e-4)  # one rounding to bf16
    assert not torch.equal(found, other(x).float())
    logits = plain.model(torch.tensor([IDS])).logits[0]
    assert_close(logits_of(target), logits, atol=0.08 * float(logits.abs().max()), rtol=0)


def test_inputs_of_other_targets_are_not_rounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "model.gguf")
    with pytest.raises(InputError, match="goes with dtype bfloat16, got float32"):
        moaspec.load_target(path, dtype="float32", quantize="inputs")
    with pytest.raises(InputError, match="for the CPU, not for device 'cuda'"):
        require_inputs(dtype="bfloat16", device="cuda", packed=True)
    gguf_models.model("llama").save_pretrained(tmp_path / "plain")
    with pytest.raises(InputError, match="is for GGUF files of quantised weights"):
        moaspec.load_target(tmp_path / "plain", packed=False, quantize="inputs")
    for compiles in (
        False,
        True,
    ):  # it turns out before weights are read, or after a compiler failed
        monkeypatch.setattr(rounded_inputs, "must_compile", lambda compiles=compiles: compiles)
        monkeypatch.setattr(rounded_inputs, "why_not", lambda: "the compiler failed")
        with pytest.raises(InputError, match="takes moaspec's kernels: the compiler failed"):
            moaspec.load_target(path, dtype="bfloat16", quantize="inputs")


def test_a_type_that_kernels_do_not_keep_is_widened_alone(tmp_path: Path) -> None:
    made = gguf_models.model("llama", **WIDE)
    blocks = np.zeros((256, 512 // 256 * 84), np.uint8)  # Q2_K
    stored = {"blk.0.ffn_down.weight": (blocks, GGMLQuantizationType.Q2_K)}
    path = gguf_models.write(tmp_path / "model.gguf", "llama", made, stored=stored, quantised=True)
    target = read_target(path, dtype="bfloat16", in_file_bits=True)
    first, second = (layer.mlp.down_proj for layer in target.model.model.layers)
    assert isinstance(first, torch.nn.Linear)
    assert not first.weight.any()
    assert isinstance(second, StoredLinear)
    assert isinstance(target.model.get_input_embeddings(), StoredEmbedding)
    moaspec.generate(moaspec.load_target(path, dtype="bfloat16"), IDS, max_new_tokens=4)


def test_gates_of_two_types_are_multiplied(tmp_path: Path) -> None:
    made = gguf_models.model("llama", **WIDE)
    value = made.state_dict()["model.layers.0.mlp.gate_proj.weight"].numpy()
    stored = {"blk.0.ffn_gate.weight": (quantize(value, Q4_0), Q4_0)}
    path = gguf_models.write(tmp_path / "model.gguf", "llama", made, stored=stored, quantised=True)
    target = moaspec.load_target(path, dtype="bfloat16")
    plain = moaspec.load_target(path, dtype="float32", packed=False)
    logits = plain.model(torch.tensor([IDS])).logits[0]
    assert_close(logits_of(target), logits, atol=0.08 * float(logits.abs().max()), rtol=0)


def test_no_change_of_the_file_reaches_a_loaded_target(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf")
    target = moaspec.load_target(path, dtype="bfloat16")
    if not same_bits(target):
        pytest.skip("without kernels weights stay in their file")
    text = moaspec.generate(target, IDS, max_new_tokens=8).token_ids
    with path.open("r+b") as file:
        file.truncate(4096)
    assert moaspec.generate(target, IDS, max_new_tokens=8).token_ids == text
    ids = torch.tensor([[3, 5]], dtype=torch.int32)
    assert torch.equal(target.embed(ids), target.embed(ids.long()))
    with pytest.raises(UnknownModelError, match=r"Download it again"):
        moaspec.load_target(path, dtype="bfloat16")


def test_a_packed_target_can_be_saved(tmp_path: Path) -> None:
    for is_tied in (False, True):
        path = write(tmp_path / f"{is_tied}.gguf", tie_word_embeddings=is_tied)
        target = moaspec.load_target(path, dtype="bfloat16")
        target.model.save_pretrained(tmp_path / str(is_tied))
        again = logits_of(moaspec.load_target(tmp_path / str(is_tied), dtype="float32"))
        assert_close(logits_of(target), again, atol=0.08 * float(again.abs().max()), rtol=0)


def test_numbers_that_are_infinite_in_bf16_are_refused(tmp_path: Path) -> None:
    made = gguf_models.model("llama", **WIDE)
    with torch.no_grad():
        made.model.layers[0].mlp.down_proj.weight[0, 0] = 3.4e38
    path = gguf_models.write(tmp_path / "model.gguf", "llama", made)
    with pytest.raises(
        UnknownModelError, match=r"down_proj\.weight has NaN or infinite values in bf"
    ):
        moaspec.load_target(path, dtype="bfloat16")


def test_infinite_scales_are_refused(tmp_path: Path) -> None:
    made = gguf_models.model("llama", **WIDE)
    blocks = np.zeros((256, 512 // 32 * 18), np.uint8)
    blocks[3, 1], blocks[3, 0] = 0x7C, 0
    stored = {"blk.1.ffn_down.weight": (blocks, Q4_0)}
    path = gguf_models.write(tmp_path / "model.gguf", "llama", made, stored=stored)
    with pytest.raises(UnknownModelError, match=r"blk\.1\.ffn_down\.weight has NaN or infinite"):
        moaspec.load_target(path, dtype="bfloat16")


def test_other_uses_have_ordinary_weights(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf")
    for options in ({"dtype": "float32"}, {"dtype": "bfloat16", "packed": False}):
        model = moaspec.load_target(path, **options).model
        assert type(model.get_input_embeddings()) is torch.nn.Embedding
