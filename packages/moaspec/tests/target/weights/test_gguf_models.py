"""GGUF files of all architectures that are read: what they hold, and what is refused.

transformers' own model is the first oracle and llama.cpp the second; neither shares code with our
reader.
"""

from __future__ import annotations

import importlib.util
import math
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor
from torch.testing import assert_close

import gguf_models
import moaspec
import tiny
from moaspec.evaluate.correctness.llama_cpp import log_probabilities
from moaspec.target.target import Target
from moaspec.target.weights import gguf
from moaspec.target.weights.gguf_config import ARCHITECTURES
from moaspec.target.weights.gguf_tokens import SUPPRESSED
from moaspec_core.errors import UnknownModelError, UnsupportedTargetError

IDS = [(7 * i * i + 3 * i + 5) % gguf_models.VOCAB for i in range(60)]
FULL, SLIDING = "full_attention", "sliding_attention"

SUMS = 1e-4
"""float32 sums in another order: log-probabilities here differ by up to 1e-5."""
TABLE = 1e-2
"""llama.cpp looks GELU up in a table of float16 values: up to 2e-3, and 8e-3 after 62 layers."""


@dataclass(frozen=True)
class Case:
    """A model, and the fields and factors with which a GGUF stores it."""

    architecture: str
    model_type: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    factors: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = SUMS

    def model(self) -> Any:
        return gguf_models.model(self.model_type, **self.changes)

    def write(self, path: Path, made: Any | None = None, **options: Any) -> Path:
        made = made or self.model()
        given = {"fields": self.fields, "factors": self.factors, **options}
        return gguf_models.write(path, self.architecture, made, **given)


def _rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **parameters}}


def _gemma3(layers: int, period: int, **full: Any) -> dict[str, Any]:
    kinds = [FULL if (layer + 1) % period == 0 else SLIDING for layer in range(layers)]
    ropes = {
        FULL: {"rope_theta": 1e6, "rope_type": "default", **full},
        SLIDING: {"rope_theta": 1e4, "rope_type": "default"},
    }
    return {
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "rope_parameters": ropes,
        "sliding_window": 8,
        "query_pre_attn_scalar": 16,
        "tie_word_embeddings": True,
    }


def _llama3(trained: int, factor: float, low: float = 1.0) -> Case:
    """Factors as llama.cpp's converter computes them."""
    base, factors = 5e5, []
    for exponent in range(0, 16, 2):
        wavelength = 2 * math.pi * base ** (exponent / 16)
        if wavelength < trained / 4.0:
            factors.append(1.0)
        elif wavelength > trained / low:
            factors.append(factor)
        else:
            smooth = (trained / wavelength - low) / (4.0 - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    parameters = {
        "rope_theta": base,
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": trained,
    }
    changes = {"rope_parameters": parameters, "max_position_embeddings": 16384}
    return Case("llama", "llama", changes, factors={"rope_freqs.weight": factors})


def _longrope(trained: int) -> Case:
    short, long = [1.0, 1.125, 1.25, 1.5], [2.0, 3.0, 4.0, 5.0]
    rope = _rope(
        rope_type="longrope",
        short_factor=short,
        long_factor=long,
        original_max_position_embeddings=trained,
        partial_rotary_factor=0.5,
    )
    fields = {
        "rope.dimension_count": 8,
        "rope.scaling.original_context_length": trained,
        "rope.scaling.attn_factor": math.sqrt(1 + math.log(512 / trained) / math.log(trained)),
        "attention.sliding_window": 262144,
    }
    factors = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    changes = {"original_max_position_embeddings": trained, **rope}
    return Case("phi3", "phi3", changes, fields, factors)


_FACTORS = [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0]


def _same(architecture: str, model_type: str, **changes: Any) -> Case:
    """`rope_freqs.weight` with other factors than Llama 3's, and a linear factor."""
    both = [2.0 * factor for factor in _FACTORS]
    rope = _rope(
        rope_type="longrope",
        short_factor=both,
        long_factor=both,
        original_max_position_embeddings=512,
        attention_factor=1.25,
    )
    fields = {"rope.scaling.factor": 2.0, "rope.scaling.attn_factor": 1.25, "logit_scale": 1.0}
    factors = {"rope_freqs.weight": _FACTORS}
    return Case(architecture, model_type, {**changes, **rope}, fields, factors)


_EXPERTS = {"expert_count": 4, "expert_used_count": 2}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_YARN_FIELDS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
}
_LINEAR = _rope(rope_type="linear", factor=4.0)
_LINEAR_FIELDS = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
_TIED = {"tie_word_embeddings": True}

CASES = {
    "llama": Case("llama", "llama"),
    "llama, tied": Case("llama", "llama", _TIED),
    "llama, biases": Case("llama", "llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, large heads": Case("llama", "llama", {"head_dim": 32}),
    "llama, linear": Case("llama", "llama", _LINEAR, _LINEAR_FIELDS),
    "llama, older linear": Case("llama", "llama", _LINEAR, {"rope.scale_linear": 4.0}),
    "llama, no scaling": Case(
        "llama", "llama", {}, {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}
    ),
    "llama, yarn": Case("llama", "llama", _rope(**_YARN), _YARN_FIELDS),
    "llama 3.1": _llama3(8192, 8.0),
    "llama 3.2": _llama3(8192, 32.0),
    "llama 3, other factors": _llama3(50, 8.0, low=2.0),
    "llama, experts": Case(
        "llama", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, _EXPERTS
    ),
    "llama, longrope": Case(
        "llama",
        "llama",
        _rope(
            rope_type="longrope",
            short_factor=[1.0] * 8,
            long_factor=_FACTORS,
            original_max_position_embeddings=32,
            attention_factor=1.0,
        ),
        {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": 32},
        {"rope_factors_short.weight": [1.0] * 8, "rope_factors_long.weight": _FACTORS},
    ),
    "arcee": Case("arcee", "arcee"),
    "arcee, factors": _same("arcee", "arcee"),
    "arcee, yarn": Case("arcee", "arcee", _rope(**_YARN), _YARN_FIELDS),
    "gemma": Case("gemma", "gemma", {"head_dim": 32, **_TIED}, tolerance=TABLE),
    "gemma2": Case(
        "gemma2",
        "gemma2",
        {
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 4.0,
            "sliding_window": 8,
            "query_pre_attn_scalar": 16,
            **_TIED,
        },
        {
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 4.0,
            "attention.sliding_window": 8,
        },
        tolerance=TABLE,
    ),
    "gemma2 27B": Case(
        "gemma2",
        "gemma2",
        {"num_hidden_layers": 46, "head_dim": 32, "query_pre_attn_scalar": 16, **_TIED},
        {"attention.sliding_window": 4096},
        tolerance=TABLE,
    ),
    "gemma3": Case(
        "gemma3",
        "gemma3_text",
        _gemma3(7, 6, rope_type="linear", factor=8.0),
        {**_LINEAR_FIELDS, "rope.scaling.factor": 8.0, "attention.sliding_window": 8},
        tolerance=TABLE,
    ),
    "gemma3 27B": Case(
        "gemma3",
        "gemma3_text",
        {**_gemma3(62, 6), "head_dim": 32},
        {"attention.sliding_window": 8},
        tolerance=TABLE,
    ),
    "gemma3, another period": Case(
        "gemma3",
        "gemma3_text",
        _gemma3(3, 2),
        {"attention.sliding_window": 8, "attention.sliding_window_pattern": 2},
        tolerance=TABLE,
    ),
    "gemma3 without windows": Case("gemma3", "gemma3_text", _gemma3(2, 1), tolerance=TABLE),
    "granite": Case(
        "granite",
        "granite",
        {
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.25,
            "logits_scaling": 4.0,
        },
        {
            "embedding_scale": 2.0,
            "residual_scale": 0.5,
            "attention.scale": 0.25,
            "logit_scale": 4.0,
        },
    ),
    "granite, factors": _same("granite", "granite", attention_multiplier=0.25),
    "mistral3, factors": _same("mistral3", "mistral", sliding_window=None),
    "mistral3": Case("mistral3", "mistral", {"sliding_window": None}),
    "ministral 3": Case(
        "mistral3",
        "ministral3",
        _rope(
            **_YARN,
            beta_fast=8.0,
            beta_slow=2.0,
            mscale=1.0,
            mscale_all_dim=0.5,
            llama_4_scaling_beta=0.125,
        ),
        {
            **_YARN_FIELDS,
            "rope.scaling.yarn_beta_fast": 8.0,
            "rope.scaling.yarn_beta_slow": 2.0,
            "rope.scaling.yarn_log_multiplier": 0.5,
            "attention.temperature_scale": 0.125,
        },
    ),
    "ministral 3, not scaled": Case(
        "mistral3",
        "ministral3",
        _rope(llama_4_scaling_beta=0.5, original_max_position_embeddings=16),
        {"attention.temperature_scale": 0.5, "rope.scaling.original_context_length": 16},
    ),
    "olmo2": Case("olmo2", "olmo2"),
    "olmo2, linear": Case("olmo2", "olmo2", _LINEAR, _LINEAR_FIELDS),
    "olmo 3": Case(
        "olmo2",
        "olmo3",
        {
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "layer_types": [SLIDING] * 3 + [FULL],
            "rope_parameters": {
                FULL: {"rope_theta": 1e4, **_YARN},
                SLIDING: {"rope_theta": 1e4, "rope_type": "default"},
            },
        },
        {
            **_YARN_FIELDS,
            "attention.sliding_window": 8,
            "attention.sliding_window_pattern": [True, True, True, False],
        },
    ),
    "phi3": Case("phi3", "phi3"),
    "phi3, linear": Case(
        "phi3",
        "phi3",
        _rope(
            rope_type="longrope",
            short_factor=[4.0] * 8,
            long_factor=[4.0] * 8,
            attention_factor=1.0,
            original_max_position_embeddings=512,
        ),
        _LINEAR_FIELDS,
    ),
    "phi3, partial rotary": Case(
        "phi3", "phi3", _rope(partial_rotary_factor=0.75), {"rope.dimension_count": 12}
    ),
    "phi3, beyond the trained length": _longrope(32),
    "phi3, within the trained length": _longrope(256),
    "qwen2": Case("qwen2", "qwen2"),
    "qwen2, yarn": Case("qwen2", "qwen2", _rope(**_YARN), _YARN_FIELDS),
    "qwen2, yarn and a magnitude": Case(
        "qwen2",
        "qwen2",
        _rope(**_YARN, attention_factor=1.5 * (1 + 0.1 * math.log(4))),
        {**_YARN_FIELDS, "rope.scaling.attn_factor": 1.5},
    ),
    "qwen3": Case("qwen3", "qwen3", {"head_dim": 32, **_TIED}),
    "qwen3, yarn": Case("qwen3", "qwen3", _rope(**_YARN), _YARN_FIELDS),
    "qwen3moe": Case(
        "qwen3moe",
        "qwen3_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
        {**_EXPERTS, "expert_feed_forward_length": 32},
    ),
    "seed_oss": Case("seed_oss", "seed_oss", {"attention_bias": True, "attention_out_bias": False}),
    "smollm3": Case("smollm3", "smollm3", {"num_hidden_layers": 5, **_TIED, **_rope()}),
    "starcoder2": Case(
        "starcoder2", "starcoder2", {"sliding_window": None, **_TIED}, tolerance=TABLE
    ),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOASPEC_CACHE", str(tmp_path / "cache"))


def _log_probabilities(model: Any) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([IDS])).logits[0].log_softmax(-1)


def test_all_architectures_have_a_case() -> None:
    assert {case.architecture for case in CASES.values()} == set(ARCHITECTURES)


def test_the_page_lists_the_architectures() -> None:
    page = (Path(__file__).parents[5] / "docs/models.md").read_text(encoding="utf-8")
    table = page.partition("| `general.architecture` |")[2].partition("\n\n")[0]
    named = (re.findall("`([a-z0-9_]+)`", row.split("|")[1]) for row in table.splitlines()[2:])
    assert sorted(chain(*named)) == sorted(ARCHITECTURES)


@pytest.mark.parametrize("name", CASES)
def test_a_file_is_the_model(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    made = case.model()
    path = case.write(tmp_path / "model.gguf", made)
    target = moaspec.load_target(path, dtype="float32")
    read = _log_probabilities(target.model)
    assert_close(read, _log_probabilities(made), atol=1e-5, rtol=0)
    assert target.stop_token_ids == {2}
    if importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("needs xllamacpp for the rest")
    found = log_probabilities(path, IDS, num_positions=len(IDS), num_best=gguf_models.VOCAB)
    expected = torch.tensor([[best[i] for i in range(gguf_models.VOCAB)] for best in found])
    assert_close(read, expected, atol=case.tolerance, rtol=0)


def _without(*names: str) -> Callable[[dict[str, np.ndarray]], None]:
    def change(tensors: dict[str, np.ndarray]) -> None:
        for name in [one for one in tensors if one.startswith(names)]:
            del tensors[name]

    return change


def _with(name: str, *shape: int) -> Callable[[dict[str, np.ndarray]], None]:
    return lambda tensors: tensors.update({name: np.zeros(shape, "f4")})


def _infinite(name: str) -> Callable[[dict[str, np.ndarray]], None]:
    return lambda tensors: tensors[name].fill(np.inf)


def _values(name: str, value: str) -> Callable[[dict[str, np.ndarray]], None]:
    return lambda tensors: tensors.update({name: np.full(8, float(value), "f4")})


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("llama", _without("token_embd"), "lacks the tensor token_embd.weight"),
        ("llama", _without("output_norm"), "lacks the tensor output_norm.weight"),
        ("llama", _without("blk.1.ffn_down"), r"lacks the tensor blk\.1\.ffn_down\.weight"),
        ("llama", _without("blk.1."), r"lacks 9 tensors: blk\.1\."),
        ("qwen2", _without("blk.1.attn_q.bias"), r"lacks the tensor blk\.1\.attn_q\.bias"),
        ("olmo2", _without("output.weight"), "lacks the tensor output.weight"),
        ("llama", _with("blk.0.attn_q.bias", 64), r"has the tensor blk\.0\.attn_q\.bias"),
        ("olmo2", _with("blk.0.attn_q.bias", 64), r"has the tensor blk\.0\.attn_q\.bias"),
        ("llama", _with("blk.2.attn_norm.weight", 64), r"has the tensor blk\.2\.attn_norm"),
        ("gemma2", _with("output.weight", 96, 64), "takes the embedding"),
        ("llama", _with("v.patch_embd.weight", 4, 4), r"has the tensor v\.patch_embd"),
        ("llama", _with("blk.0.attn_k.weight", 32, 48), "has shape 32x48, and .* 32x64"),
        ("llama", _with("rope_freqs.weight", 4), r"rope_freqs.weight is of shape \(4,\)"),
        ("qwen2", _with("rope_freqs.weight", 8), "has the tensor rope_freqs.weight"),
        ("qwen2", _with("rope_factors_long.weight", 8), "has the tensor rope_factors_long"),
        ("phi3", _with("rope_factors_long.weight", 8), "rope_factors_short.weight is missing"),
        *(
            (
                "llama",
                _values("rope_freqs.weight", one),
                rf"rope_freqs.weight has the value {one}, and",
            )
            for one in ("0", "nan", "inf", "-1")
        ),
        ("qwen3moe", _with("blk.0.attn_q.bias", 64), r"has the tensor blk\.0\.attn_q\.bias"),
        ("arcee", _with("blk.0.attn_q.bias", 64), r"has the tensor blk\.0\.attn_q\.bias"),
        ("seed_oss", _with("blk.0.ffn_up.bias", 96), r"has the tensor blk\.0\.ffn_up\.bias"),
        ("llama", _infinite("blk.1.ffn_up.weight"), r"blk\.1\.ffn_up\.weight has NaN or infinite"),
    ],
)
def test_other_tensors_are_refused_by_name(
    name: str, change: Any, reason: str, tmp_path: Path
) -> None:
    path = CASES[name].write(tmp_path / "model.gguf", change=change)
    with pytest.raises(UnknownModelError, match=reason) as caught:
        moaspec.load_target(path)
    said = str(caught.value)
    assert str(path) in said
    assert ("Download it again" in said) != ("hub id instead" in said)
    assert not any((tmp_path / "cache").glob("*/*.safetensors"))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_tensor_more_or_less_is_refused(architecture: str, tmp_path: Path) -> None:
    """Of each kind that a file has; a head that is missing is the embedding, in llama.cpp too."""
    case, names = CASES[architecture], list[str]()
    case.write(tmp_path / "whole.gguf", change=names.extend)
    kinds = {re.sub(r"^blk\.\d+", "blk.1", name) for name in names} - {"output.weight"}
    assert len(kinds) >= 7
    for name in sorted(kinds):
        path = case.write(tmp_path / "less.gguf", change=_without(name))
        with pytest.raises(
            UnknownModelError, match=r"lacks (the|\d+) tensors?:? (blk|output|token)"
        ):
            moaspec.load_target(path)
    for name in ("blk.0.attn_x.weight", "blk.99.attn_norm.weight", "extra.weight"):
        path = case.write(tmp_path / "more.gguf", change=_with(name, 64))
        with pytest.raises(UnknownModelError, match=rf"has the tensor {re.escape(name)}"):
            moaspec.load_target(path)


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("llama", {"logit_scale": 3.0}, r"llama\.logit_scale is 3\.0"),
        ("llama", {"attention.causal": False}, r"attention\.causal is False"),
        ("llama", {"attention.sliding_window": 8}, r"attention\.sliding_window is 8"),
        ("llama", {"rope.scaling.type": "dynamic"}, "rope.scaling.type is dynamic"),
        ("llama", {"rope.dimension_count": 8}, r"rope\.dimension_count is 8"),
        ("llama", {"attention.value_length": 8}, r"attention\.value_length is 8"),
        ("phi3", _YARN_FIELDS, "rope.scaling.type is yarn"),
        ("qwen2", {"rope.dimension_sections": [1, 1, 2, 0]}, "rope.dimension_sections"),
        ("qwen2", {**_YARN_FIELDS, "rope.scaling.yarn_beta_fast": 8.0}, "yarn_beta_fast is 8.0"),
        ("qwen2", {**_YARN_FIELDS, "rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor is 0.5"),
        ("qwen2", {**_YARN_FIELDS, "rope.scaling.yarn_attn_factor": 1.0}, "yarn_attn_factor is 1"),
        (
            "ministral 3",
            {"attention.temperature_scale": 0.5, "attention.temperature_length": 8192},
            "temperature_length is 8192, and moaspec reads the trained length, 512",
        ),
        ("granite", {"logit_scale": 4.0, "rope.scaling.finetuned": False}, "finetuned is False"),
        ("llama", {"attention.head_count_kv": [2, 4]}, r"layers differ in llama\.attention"),
        ("llama", {"what.is.this": "x"}, r"llama\.what\.is\.this is x"),
        ("llama", {"attention.causal": 1}, r"attention\.causal is 1"),
        ("llama", {"expert_weights_norm": 0}, r"expert_weights_norm is 0"),
        (
            "olmo 3",
            {**CASES["olmo 3"].fields, "rope.freq_base_swa": 5e5},
            "freq_base_swa is 500000",
        ),
    ],
)
def test_fields_that_change_the_model_are_refused_by_name(
    name: str, fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = CASES[name].write(tmp_path / "model.gguf", fields=fields)
    with pytest.raises(UnsupportedTargetError, match=rf"{reason}.* hub id instead") as caught:
        moaspec.load_target(path)
    assert "Download" not in str(caught.value)


NAN = float("nan")


@pytest.mark.parametrize(
    ("name", "field", "value", "asked"),
    [
        ("llama", "block_count", "two", "must be a whole number of at least 1"),
        ("llama", "block_count", 0, "must be a whole number of at least 1"),
        ("llama", "block_count", 99, "must be less than its 21 tensors"),
        ("llama", "context_length", 0, "must be a whole number of at least 1"),
        ("llama", "context_length", True, "must be a whole number of at least 1"),
        ("llama", "embedding_length", 0, "must be a whole number of at least 1"),
        ("llama", "feed_forward_length", 0, "must be a whole number of at least 1"),
        ("llama", "attention.head_count", 0, "must be a whole number of at least 1"),
        ("llama", "attention.head_count_kv", 0, "must be a whole number of at least 1"),
        ("llama", "attention.head_count_kv", -2, "must be a whole number of at least 1"),
        ("llama", "attention.head_count_kv", 3, "must divide attention.head_count, 4"),
        ("llama", "attention.head_count_kv", 8, "must divide attention.head_count, 4"),
        ("llama", "attention.key_length", 0, "must be a whole number of at least 2"),
        ("llama", "attention.layer_norm_rms_epsilon", NAN, "a finite number of at least 0"),
        ("llama", "attention.layer_norm_rms_epsilon", -1.0, "a finite number of at least 0"),
        ("llama", "vocab_size", 95, "must be from 96, the number of tokens, to 96, the rows of"),
        ("llama", "vocab_size", 97, "must be from 96, the number of tokens, to 96, the rows of"),
        ("llama", "rope.freq_base", NAN, "must be a finite number above 0"),
        ("llama", "rope.freq_base", 0.0, "must be a finite number above 0"),
        ("llama", "rope.scaling.factor", -2.0, "must be a finite number of at least 0"),
        ("llama", "rope.scaling.attn_factor", 0.0, "must be a finite number above 0"),
        ("llama, yarn", "rope.scaling.factor", 0.5, "must be at least 1 for yarn"),
        ("llama, yarn", "rope.scaling.original_context_length", 0, "of at least 1"),
        ("ministral 3", "rope.scaling.yarn_beta_fast", 0.0, "a finite number above 0"),
        ("ministral 3", "rope.scaling.yarn_beta_fast", 1.0, "must be at least yarn_beta_slow (2)"),
        ("llama, linear", "rope.scaling.factor", 2.0**-100, "must be 0 or from 1e-06 to 1e+06"),
        ("llama, linear", "rope.scaling.factor", NAN, "must be a finite number of at least 0"),
        ("llama, linear", "rope.scaling.factor", math.inf, "must be a finite number of at least 0"),
        ("llama, older linear", "rope.scale_linear", 2.0**60, "must be 0 or from 1e-06 to 1e+06"),
        ("llama, yarn", "rope.scaling.attn_factor", math.inf, "must be a finite number above 0"),
        ("llama", "attention.head_count_kv", [2, 2, 2], "one value for each of 2 layers"),
        ("llama", "attention.sliding_window", [8, 8], "must be a whole number of at least 0"),
        ("llama", "attention.sliding_window", "8", "must be a whole number of at least 0"),
        ("granite", "attention.scale", -0.5, "must be a finite number of at least 0"),
        ("granite", "residual_scale", -0.5, "must be a finite number of at least 0"),
        ("llama, experts", "expert_used_count", 0, "must be a whole number of at least 1"),
        ("llama, experts", "expert_used_count", 5, "must be at most expert_count, 4"),
        ("llama", "expert_used_count", 2, "must be 0 where there is no expert_count"),
        ("qwen3moe", "expert_count", 0, "must be a whole number of at least 1"),
        ("qwen3moe", "expert_used_count", 0, "must be a whole number of at least 1"),
        ("qwen3moe", "expert_feed_forward_length", 0, "must be a whole number of at least 1"),
        ("phi3, partial rotary", "rope.dimension_count", 11, "an even number from 2 to 16"),
        ("phi3, partial rotary", "rope.dimension_count", 20, "an even number from 2 to 16"),
        ("phi3, partial rotary", "rope.dimension_count", 0, "an even number from 2 to 16"),
        ("phi3, within the trained length", "rope.scaling.original_context_length", 1, "least 2"),
        ("gemma2", "attn_logit_softcapping", 0.0, "must be a finite number above 0"),
        ("gemma2", "final_logit_softcapping", NAN, "must be a finite number above 0"),
        ("gemma2", "attention.sliding_window", 0, "must be a whole number of at least 1"),
        ("gemma3", "attention.sliding_window_pattern", 0, "must be a whole number of at least 1"),
        ("gemma3", "rope.freq_base_swa", 0.0, "must be a finite number above 0"),
        ("granite", "logit_scale", 0.0, "must be a finite number above 0"),
    ],
)
def test_impossible_values(name: str, field: str, value: Any, asked: str, tmp_path: Path) -> None:
    """Each is refused with the field's name, what it is, and what it must be."""
    case = CASES[name]
    path = case.write(tmp_path / "model.gguf", fields={**case.fields, field: value})
    with pytest.raises(UnknownModelError) as caught:
        moaspec.load_target(path)
    said = str(caught.value)
    assert f"its field {case.architecture}.{field} is {value!r}, and " in said
    assert asked in said
    assert not any((tmp_path / "cache").glob("*"))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"block_count": None}, "has no field llama.block_count"),
        ({"attention.layer_norm_rms_epsilon": None}, "has no field .*layer_norm_rms_epsilon"),
        (
            {"embedding_length": 65, "attention.key_length": None},
            "embedding_length is 65, and must be a multiple of attention.head_count, 4",
        ),
        ({"embedding_length": 65}, "do not fit each other in a llama model"),
    ],
)
def test_fields_that_are_missing_or_do_not_fit(
    fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = CASES["llama"].write(tmp_path / "model.gguf", fields=fields)
    with pytest.raises(UnknownModelError, match=reason):
        moaspec.load_target(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temp", NAN), ("temp", -1.0), ("temp", "hot"), ("top_k", -3), ("top_p", 7.0)],
)
def test_sampling_that_is_impossible(name: str, value: Any, tmp_path: Path) -> None:
    others = {f"general.sampling.{name}": value}
    path = CASES["llama"].write(tmp_path / "model.gguf", others=others)
    with pytest.raises(UnknownModelError, match=rf"general\.sampling\.{name} is {value}, and must"):
        moaspec.load_target(path)


def test_suppressed_tokens_are_in_no_answer(tmp_path: Path) -> None:
    """llama.cpp never samples them either."""
    case, prompt = CASES["llama"], IDS[:20]
    made = case.model()
    first = tiny.own_text(Target(made, None, name="whole"), prompt, 1)
    path = case.write(tmp_path / "model.gguf", made, others={SUPPRESSED: first})
    target = moaspec.load_target(path, dtype="float32")
    found = moaspec.generate(target, prompt, max_new_tokens=8).token_ids
    made.generation_config.suppress_tokens = first
    assert found == tiny.own_text(Target(made, None, name="whole"), prompt, 8)
    assert first[0] not in found


@pytest.mark.parametrize("value", [[96], [-1], ["a"], 3])
def test_suppressed_tokens_that_are_no_ids(value: Any, tmp_path: Path) -> None:
    path = CASES["llama"].write(tmp_path / "model.gguf", others={SUPPRESSED: value})
    with pytest.raises(UnknownModelError, match=r"suppress_tokens is .* list of ids from 0 to 95"):
        moaspec.load_target(path)


def test_ids_outside_the_vocabulary_are_no_ends(tmp_path: Path) -> None:
    def with_ids(path: Path) -> Path:
        tokens = gguf_models.VOCAB
        fields = {"tokenizer.ggml.eos_token_id": tokens, "tokenizer.ggml.bos_token_id": tokens}
        return CASES["llama"].write(path, others=fields, vocabulary=False)

    target = moaspec.load_target(with_ids(tmp_path / "model.gguf"))
    assert target.stop_token_ids == frozenset()


def test_a_model_generates_without_layers_of_a_kind_that_has_a_rope(tmp_path: Path) -> None:
    case = CASES["gemma3 without windows"]
    target = moaspec.load_target(case.write(tmp_path / "model.gguf"), dtype="float32")
    expected = tiny.own_text(Target(case.model(), None, name="whole"), IDS[:9], 6)
    assert moaspec.generate(target, IDS[:9], max_new_tokens=6).token_ids == expected


def test_phi_3_has_its_window_where_llama_cpp_has_none(tmp_path: Path) -> None:
    window = 8
    fields = {"attention.sliding_window": window}
    case = Case("phi3", "phi3", {"sliding_window": window}, fields)
    made = case.model()
    path = case.write(tmp_path / "model.gguf", made)
    read = _log_probabilities(moaspec.load_target(path, dtype="float32").model)
    assert_close(read, _log_probabilities(made), atol=1e-5, rtol=0)
    pytest.importorskip("xllamacpp")
    found = log_probabilities(path, IDS, num_positions=len(IDS), num_best=gguf_models.VOCAB)
    theirs = torch.tensor([[best[i] for i in range(gguf_models.VOCAB)] for best in found])
    assert_close(read[:window], theirs[:window], atol=SUMS, rtol=0)
    assert float((read - theirs).abs()[window:].max()) > 0.1


def test_fields_that_change_nothing(tmp_path: Path) -> None:
    fields = {"expert_count": 0, "rope.scaling.finetuned": False, "attention.sliding_window": 512}
    path = CASES["llama"].write(tmp_path / "model.gguf", fields=fields)
    assert moaspec.load_target(path).vocab_size == gguf_models.VOCAB


@pytest.mark.parametrize("name", ["llama", "qwen2", "phi3"])
def test_fused_and_separate_queries_keys_and_values(name: str, tmp_path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        for key in [one for one in tensors if ".attn_q." in one]:
            parts = [tensors.pop(key.replace("attn_q", f"attn_{part}")) for part in "qkv"]
            tensors[key.replace("attn_q", "attn_qkv")] = np.concatenate(parts)
        for key in [one for one in tensors if ".attn_qkv." in one and name == "phi3"]:
            rows = np.split(tensors.pop(key), [64, 96])
            tensors.update(
                {key.replace("qkv", part): row for part, row in zip("qkv", rows, strict=True)}
            )

    case = CASES[name]
    made = case.model()
    path = case.write(tmp_path / "a.gguf", made, change=change)
    target = moaspec.load_target(path, dtype="float32")
    assert_close(target.model.state_dict(), made.state_dict(), rtol=0, atol=0)


def test_weights_are_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "SHARD_BYTES", 50_000)
    made = CASES["llama"].model()
    path = CASES["llama"].write(tmp_path / "model.gguf", made)
    target = moaspec.load_target(path, dtype="float32")
    assert_close(target.model.state_dict(), made.state_dict(), rtol=0, atol=0)
    assert len(list((tmp_path / "cache").rglob("model-*.safetensors"))) > 2


def _is_read(kind: GGMLQuantizationType) -> bool:
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


READ = [kind for kind in GGMLQuantizationType if _is_read(kind)]
MATRICES = {
    f"blk.{layer}.{ours}.weight": f"model.layers.{layer}.{theirs}.weight"
    for layer in range(4)
    for ours, theirs in {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }.items()
} | {"token_embd.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"}
WIDE = {
    "hidden_size": 256,  # K-quants have blocks of 256 values
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}


def _random_blocks(shape: tuple[int, int], kind: GGMLQuantizationType) -> np.ndarray:
    """Random bytes, so scales of any size; blocks with infinite values are zeros."""
    values, size = GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(kind.value)
    blocks = random.integers(0, 256, (shape[0] * shape[1] // values, size), np.uint8)
    with np.errstate(all="ignore"):
        finite = np.isfinite(dequantize(blocks, kind)).all(axis=1)
    assert finite.mean() > 0.5
    blocks[~finite] = 0
    return blocks.reshape(shape[0], -1)


def test_weights_of_all_types_are_read_bit_for_bit(tmp_path: Path) -> None:
    made = gguf_models.model("qwen2", **WIDE)
    shapes = {ours: made.state_dict()[theirs].shape for ours, theirs in MATRICES.items()}
    kinds = dict(zip(shapes, READ, strict=False))
    assert len(kinds) == len(READ) >= 26
    stored = {name: (_random_blocks(shapes[name], kind), kind) for name, kind in kinds.items()}
    path = gguf_models.write(tmp_path / "model.gguf", "qwen2", made, stored=stored)
    found = moaspec.load_target(path, dtype="float32", packed=False).model.state_dict()
    for name, (blocks, kind) in stored.items():
        right = np.array(dequantize(blocks, kind), np.float32)
        assert_close(
            found[MATRICES[name]].view(torch.int32),
            torch.from_numpy(right.view(np.int32)),
            msg=kind.name,
        )


@pytest.mark.parametrize("kind", set(GGMLQuantizationType) - set(READ), ids=lambda kind: kind.name)
def test_other_types_are_refused_by_name(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    made = gguf_models.model("qwen2", **WIDE)
    values, size = GGML_QUANT_SIZES[kind]
    stored = {"output.weight": (np.zeros((96, 256 // values * size), np.uint8), kind)}
    path = gguf_models.write(tmp_path / "model.gguf", "qwen2", made, stored=stored)
    said = rf"output\.weight is of the type {kind.name}, .* another quantisation"
    with pytest.raises(UnsupportedTargetError, match=said):
        moaspec.load_target(path)


def test_a_type_that_the_package_does_not_know_is_refused(tmp_path: Path) -> None:
    path = CASES["llama"].write(tmp_path / "model.gguf")
    data = bytearray(path.read_bytes())
    name = b"blk.1.ffn_down.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8  # behind the number of dimensions, and two
    data[at : at + 4] = (199).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(UnsupportedTargetError, match=r"199\D.*pip install -U gguf"):
        moaspec.load_target(path)


def _parts(tmp_path: Path, name: str = "big") -> list[Path]:
    CASES["llama"].write(tmp_path / f"{name}.gguf", split=8)
    return sorted(tmp_path.glob(f"{name}-*"))


def test_a_split_file_is_the_whole_one(tmp_path: Path) -> None:
    first, *_, last = _parts(tmp_path)
    made = CASES["llama"].model()
    for named in (first, last):
        target = moaspec.load_target(named, dtype="float32")
        assert_close(target.model.state_dict(), made.state_dict(), rtol=0, atol=0)


def test_parts_that_were_mixed_up_are_refused(tmp_path: Path) -> None:
    first, second, third = _parts(tmp_path)
    whole = shutil.copy(second, tmp_path / "whole.gguf")
    with pytest.raises(UnknownModelError, match=r"is part 2 of 3 .*says part 1 of 1"):
        moaspec.load_target(whole)
    with pytest.raises(UnknownModelError, match=r"is named part 4 of 3"):
        moaspec.load_target(shutil.copy(second, tmp_path / "big-00004-of-00003.gguf"))
    (tmp_path / "big-00004-of-00003.gguf").unlink()
    second.rename(tmp_path / "kept")
    third.rename(second)
    (tmp_path / "kept").rename(third)
    with pytest.raises(UnknownModelError, match=r"00002-of-00003.gguf is part 3 of 3"):
        moaspec.load_target(first)
    CASES["llama"].write(second)
    with pytest.raises(UnknownModelError, match="is no part of a split file"):
        moaspec.load_target(first)


def test_a_part_of_another_file_is_refused(tmp_path: Path) -> None:
    first, second, _ = _parts(tmp_path)
    CASES["llama"].write(tmp_path / "other.gguf", change=_without("blk.0.attn_k"), split=8)
    others = sorted(tmp_path.glob("other-*"))
    assert len(others) == 3
    shutil.copy(others[1], second)
    with pytest.raises(UnknownModelError, match=r"is also in|tensors, and by split.tensors.count"):
        moaspec.load_target(first)


@pytest.mark.parametrize("change", [0, 1, 32, -32, "another"])
def test_a_tensor_at_another_place_is_refused(change: int | str, tmp_path: Path) -> None:
    """Other tensors' bytes would be read as its own."""
    path = CASES["llama"].write(tmp_path / "model.gguf")
    data = bytearray(path.read_bytes())
    name = b"blk.0.ffn_up.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8 + 4  # behind dimensions and type
    now = int.from_bytes(data[at : at + 8], "little")
    data[at : at + 8] = (0 if change == "another" else now + int(change)).to_bytes(8, "little")
    path.write_bytes(data)
    if change == 0:
        moaspec.load_target(path, dtype="float32")
        return
    said = r"it is damaged: its tensor \S+ begins at byte \d+, and must begin at \d+.*Download"
    with pytest.raises(UnknownModelError, match=said):
        moaspec.load_target(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "pointer of Git LFS.* pull",
        ),
        (b"\n<!DOCTYPE html><html>Log in</html>", "is a web page.*`/resolve/`"),
    ],
)
def test_what_stands_for_a_file(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(UnknownModelError, match=said) as caught:
        moaspec.load_target(path)
    assert "damaged" not in str(caught.value)


def test_a_big_endian_file_is_refused(tmp_path: Path) -> None:
    path = CASES["llama"].write(tmp_path / "model.gguf")
    data = bytearray(path.read_bytes())
    data[4:8] = data[7:3:-1]
    path.write_bytes(data)
    with pytest.raises(UnknownModelError, match=r"model.gguf is big-endian"):
        moaspec.load_target(path)


def test_recommended_sampling_is_the_default(tmp_path: Path) -> None:
    path = CASES["llama"].write(
        tmp_path / "model.gguf",
        others={"general.sampling.temp": 0.5, "general.sampling.top_k": 7},
    )
    defaults = moaspec.load_target(path).generation_defaults
    assert defaults.sampling == {"temperature": 0.5, "top_k": 7}


def test_a_file_without_a_vocabulary(tmp_path: Path) -> None:
    path = CASES["llama"].write(tmp_path / "model.gguf", vocabulary=False)
    target = moaspec.load_target(path)
    assert target.tokenizer is None
    assert target.stop_token_ids == frozenset()


def test_parts_of_models_are_no_targets(tmp_path: Path) -> None:
    path = gguf_models.write(tmp_path / "a.gguf", "clip", CASES["llama"].model())
    with pytest.raises(UnsupportedTargetError, match="no GGUF files of the architecture 'clip'"):
        moaspec.load_target(path)
