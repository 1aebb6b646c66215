"""Quantised checkpoints: loaded as ordinary weights of the same values, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import moaspec
import tiny
from moaspec.target.weights import quantised
from moaspec_core.errors import InputError, UnsupportedTargetError

Weights = dict[str, Tensor]
BLOCK = 8
"""Rows and columns that share a scale; widths of tiny models are multiples."""


def linears(weights: Weights) -> list[str]:
    """Names of the linear layers inside decoder layers."""
    return [key.removesuffix(".weight") for key in weights if "proj.weight" in key]


def blocks_of_fp8(weights: Weights) -> tuple[Weights, Weights]:
    """As DeepSeek and Qwen publish FP8: a scale for each block."""
    stored, expected = dict(weights), dict(weights)
    for name in linears(weights):
        weight = stored.pop(f"{name}.weight")
        rows, columns = (-(-size // BLOCK) for size in weight.shape)
        scale = torch.rand(rows, columns) + 0.5
        wide = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        wide = wide[: weight.shape[0], : weight.shape[1]]
        codes = (weight / wide).to(torch.float8_e4m3fn)
        stored |= {f"{name}.weight": codes, f"{name}.weight_scale_inv": scale}
        expected[f"{name}.weight"] = codes.float() * wide
    return stored, expected


def rows_of(dtype: torch.dtype, largest: float) -> Callable[[Weights], tuple[Weights, Weights]]:
    """As compressed-tensors stores eight bits: a scale for each row."""

    def convert(weights: Weights) -> tuple[Weights, Weights]:
        stored, expected = dict(weights), dict(weights)
        for name in linears(weights):
            weight = stored.pop(f"{name}.weight")
            scale = weight.abs().amax(1, keepdim=True) / largest
            codes = weight / scale
            codes = (codes if dtype.is_floating_point else codes.round()).to(dtype)
            stored |= {f"{name}.weight": codes, f"{name}.weight_scale": scale}
            expected[f"{name}.weight"] = codes.float() * scale
        return stored, expected

    return convert


def compressed(kind: str, form: str) -> dict[str, Any]:
    scheme = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "channel"}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}},
        "format": form,
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


FORMS: dict[str, tuple[Callable[[Weights], tuple[Weights, Weights]], dict[str, Any]]] = {
    "fp8": (
        blocks_of_fp8,
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        },
    ),
    "compressed-tensors int8": (rows_of(torch.int8, 127), compressed("int", "int-quantized")),
    "compressed-tensors fp8": (
        rows_of(torch.float8_e4m3fn, 448),
        compressed("float", "float-quantized"),
    ),
}


def save(directory: Path, weights: Weights | None, quantization: dict[str, Any]) -> None:
    """Make a saved model a quantised one."""
    if weights is not None:
        contiguous = {name: one.contiguous() for name, one in weights.items()}
        save_file(contiguous, directory / "model.safetensors", {"format": "pt"})
    path = directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": quantization}))


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_widened(form: str, tmp_path: Path) -> None:
    convert, quantization = FORMS[form]
    if "compressed" in form:
        pytest.importorskip("compressed_tensors")
    tiny.fresh_target().model.save_pretrained(tmp_path)
    stored, expected = convert(load_file(tmp_path / "model.safetensors"))
    save(tmp_path, stored, quantization)
    target = moaspec.load_target(tmp_path, dtype="float32", packed=False)
    found = target.model.state_dict()
    for name in linears(expected):
        # bf16 at worst: some versions of transformers widen to it first.
        torch.testing.assert_close(
            found[f"{name}.weight"], expected[f"{name}.weight"], atol=0, rtol=2**-8
        )
    packed = moaspec.load_target(tmp_path, dtype="float32")
    plain = moaspec.generate(packed, tiny.PROMPTS[0], max_new_tokens=8)
    drafted = moaspec.generate(
        target, tiny.PROMPTS[0], drafter=tiny.random_drafter(target), max_new_tokens=8
    )
    assert plain.token_ids == drafted.token_ids


def test_torchao_is_widened(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, TorchAoConfig

    plain, rounded = tmp_path / "plain", tmp_path / "rounded"
    tiny.fresh_target().model.save_pretrained(plain)
    model: Any = AutoModelForCausalLM.from_pretrained(
        plain, quantization_config=TorchAoConfig(Int8WeightOnlyConfig()), dtype=torch.float32
    )
    expected = model.model.layers[0].mlp.up_proj.weight.dequantize()
    model.save_pretrained(rounded)
    target = moaspec.load_target(rounded, dtype="float32", packed=False)
    found = target.model.base_model.layers[0].mlp.up_proj.weight
    assert type(found) is torch.nn.Parameter
    torch.testing.assert_close(found.data, expected)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes"])
def test_others_are_refused(method: str, tmp_path: Path) -> None:
    tiny.fresh_target().model.save_pretrained(tmp_path)
    save(tmp_path, None, {"quant_method": method, "bits": 4})
    with pytest.raises(UnsupportedTargetError, match=f"quantised by {method}.*GGUF"):
        moaspec.load_target(tmp_path)


def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(quantised.PACKAGES, "compressed-tensors", "not-installed-here")
    tiny.fresh_target().model.save_pretrained(tmp_path)
    save(tmp_path, None, compressed("int", "int-quantized"))
    with pytest.raises(InputError, match="pip install not-installed-here"):
        moaspec.load_target(tmp_path)
