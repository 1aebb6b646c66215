"""Rounded targets: which numbers they have, whose text they write, and what is refused.

Legend: I inputs and O outputs of a matrix.
"""

from __future__ import annotations

import logging
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import moaspec
import tiny
from moaspec.backends.cpu.build import unpacks_exactly
from moaspec.backends.cpu.matrix import Matrix
from moaspec.backends.fast_target import accelerate
from moaspec.backends.weight_only import BITS, by_torchao, in_groups, quantise, require_quantize
from moaspec.calibration.measure_costs import fingerprint
from moaspec.target.target import Target
from moaspec_core.drafting.draft_tree import Tree
from moaspec_core.errors import InputError

pytestmark = pytest.mark.kernels

needs_torchao = pytest.mark.skipif(
    find_spec("torchao") is None, reason="torchao is not installed: pip install 'moaspec[quantize]'"
)
FEW_TOKENS = 12


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return _saved("llama", tmp_path)


def _saved(family: str, directory: Path) -> Path:
    tiny.kernel_target(family, dtype=torch.float32).model.save_pretrained(directory)
    return directory


def _layer_weights(target: Target) -> dict[str, Tensor]:
    named = target.model.named_modules()
    return {name: one.weight for name, one in named if isinstance(one, nn.Linear)}


def _weight(outputs: int = 48, inputs: int = 64) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(outputs, inputs)


@needs_torchao
@pytest.mark.parametrize("quantize", BITS)
def test_each_number_is_the_nearest_of_its_group(quantize: str) -> None:
    weight_OI = _weight()
    groups = weight_OI.unflatten(1, (-1, 32))
    range_ON = (
        groups.abs().amax(-1) * 2 if quantize == "int8" else groups.amax(-1) - groups.amin(-1)
    )
    step_ON1 = (range_ON / (254 if quantize == "int8" else 15))[..., None]
    error = (in_groups(weight_OI, BITS[quantize]).unflatten(1, (-1, 32)) - groups).abs()
    # Half a step, and what float16 scales and zeros and bf16 results round of the largest number.
    most = 0.5 * step_ON1 + groups.abs().amax(-1, keepdim=True) * 2**-8
    assert bool((error <= most).all())
    assert bool((error > 0.3 * step_ON1).any())


@needs_torchao
@pytest.mark.parametrize("quantize", BITS)
@pytest.mark.parametrize("special", ["zeros", "equal", "tiny", "one outlier"])
def test_groups_without_a_range(quantize: str, special: str) -> None:
    weight_OI = {
        "zeros": torch.zeros(16, 32),
        "equal": torch.full((16, 32), 0.75),
        "tiny": torch.full((16, 32), 1e-30),
        "one outlier": torch.eye(16, 32) * 1000,
    }[special]
    found_OI = in_groups(weight_OI, BITS[quantize])
    # The ends of a group are kept but for bf16's and float16's rounding.
    assert_close(found_OI, weight_OI, rtol=2**-8, atol=1e-12)


@needs_torchao
@pytest.mark.parametrize("quantize", BITS)
def test_kernels_keep_the_codes_alone(quantize: str) -> None:
    if not unpacks_exactly():
        pytest.skip("only kernels with AVX512-BF16 read codes")
    weight_OI = in_groups(0.02 * _weight(256, 512).bfloat16(), BITS[quantize])
    matrix = Matrix(weight_OI, None)
    assert matrix.bits == BITS[quantize]
    assert_close(matrix.weight(), weight_OI, rtol=0, atol=0)


@needs_torchao
@pytest.mark.parametrize("quantize", BITS)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_drafts_do_not_change_the_text(family: str, quantize: str, tmp_path: Path) -> None:
    _saved(family, tmp_path)
    target = moaspec.load_target(tmp_path, dtype="float32", quantize=quantize)
    stock = moaspec.load_target(tmp_path, dtype="float32", quantize=quantize, packed=False)
    drafter = tiny.random_drafter(stock)  # the identity of the target that it was is the same
    for prompt in tiny.PROMPTS[:2]:
        own = tiny.own_text(stock, prompt, FEW_TOKENS)
        for given in (None, drafter):
            found = moaspec.generate(
                target,
                prompt,
                drafter=given,
                tree=Tree(depth=2, breadth=2, total_tokens=4),
                max_new_tokens=FEW_TOKENS,
            )
            assert found.token_ids == own


@needs_torchao
def test_the_text_is_another_one(directory: Path) -> None:
    plain, four_bits = (
        moaspec.load_target(directory, dtype="float32", quantize=quantize)
        for quantize in (None, "int4")
    )
    texts = [
        [moaspec.generate(one, prompt, max_new_tokens=tiny.NEW_TOKENS).token_ids for one in pair]
        for prompt in tiny.PROMPTS
        for pair in [(plain, four_bits)]
    ]
    assert any(before != after for before, after in texts)


@needs_torchao
@pytest.mark.parametrize("quantize", BITS)
def test_what_is_in_groups(quantize: str, directory: Path) -> None:
    """Linear weights inside the layers, to the same numbers in either dtype; nothing else."""
    plain = moaspec.load_target(directory, dtype="float32", packed=False)
    single, half = (
        moaspec.load_target(directory, packed=False, quantize=quantize, dtype=dtype)
        for dtype in ("float32", "bfloat16")
    )
    before, found = _layer_weights(plain), _layer_weights(single)
    for name, weight in found.items():
        assert torch.equal(weight, before[name]) == (name == "lm_head")
        if name != "lm_head":
            assert torch.equal(weight, in_groups(before[name], BITS[quantize]))
            assert weight.bfloat16().float().equal(weight)
    assert half.dtype == torch.bfloat16
    assert (plain.quantize, single.quantize) == (None, quantize)
    assert single.identity == plain.identity
    assert single.precision == f"float32, {quantize} weights"


@needs_torchao
@pytest.mark.parametrize("quantize", BITS)
def test_costs_are_not_taken_for_those_of_the_plain_target(quantize: str, directory: Path) -> None:
    plain = fingerprint(moaspec.load_target(directory, dtype="float32"))
    found = fingerprint(moaspec.load_target(directory, dtype="float32", quantize=quantize))
    assert plain["dtype"] == "float32"
    assert {name for name in plain if plain[name] != found[name]} == {"dtype"}


@needs_torchao
def test_loading_says_that_it_changes_the_text(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="moaspec"):
        moaspec.load_target(directory)
        assert not caplog.messages
        moaspec.load_target(directory, quantize="int8")
    (message,) = caplog.messages
    assert "rounded to int8: its text is the rounded target's" in message


@needs_torchao
def test_packing_leaves_torchaos_tensors_alone() -> None:
    """As on a GPU, where these are what multiplies."""
    target = tiny.kernel_target(dtype=torch.bfloat16)
    by_torchao(target.model.base_model.layers, "int8")
    before = {name: type(weight) for name, weight in _layer_weights(target).items()}
    states = torch.randn(1, 3, 64).bfloat16()
    expected = target.model.base_model.layers[0].mlp(states)
    accelerate(target)
    after = {name: type(weight) for name, weight in _layer_weights(target).items()}
    assert {kind.__name__ for name, kind in before.items() if "layers" in name} == {"Int8Tensor"}
    assert after == before
    assert_close(target.model.base_model.layers[0].mlp(states), expected, rtol=0, atol=0)
    assert tiny.fast_layers(target).fused is None
    assert moaspec.generate(target, tiny.PROMPTS[0], max_new_tokens=4).token_ids


@needs_torchao
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("quantize", BITS)
def test_on_a_gpu_torchao_multiplies(quantize: str, directory: Path) -> None:
    options: dict[str, Any] = {"dtype": "bfloat16", "device": "cuda", "quantize": quantize}
    target = moaspec.load_target(directory, **options)
    stock = moaspec.load_target(directory, packed=False, **options)
    states = torch.randn(1, 3, 64, device="cuda").bfloat16()
    layers = [one.model.base_model.layers[0].mlp for one in (target, stock)]
    # Two orders of bf16 sums: single numbers may differ by 7%.
    one, other = (layer(states).float() for layer in layers)
    assert float((one - other).norm() / other.norm()) < 0.03


@needs_torchao
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": "int3"}, "choose one of int8, int4"),
        ({"dtype": "float16"}, "float32 or bfloat16, got float16"),
    ],
)
def test_refused_before_loading(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        moaspec.load_target(tmp_path / "nowhere", **({"quantize": "int8"} | options))


def test_other_devices_are_refused() -> None:
    with pytest.raises(InputError, match="for cpu and cuda, not for device 'mps'"):
        require_quantize("int8", dtype="bfloat16", device="mps")
    with pytest.raises(InputError, match="cuda goes with dtype bfloat16, got float32"):
        require_quantize("int8", dtype="float32", device="cuda")


@needs_torchao
def test_sizes_that_are_no_groups(tmp_path: Path) -> None:
    tiny.model().save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"groups of 32, and layers\.0\.self_attn\.q_proj .* 48"):
        moaspec.load_target(tmp_path, quantize="int4")


def test_models_that_are_quantised_already() -> None:
    model = tiny.kernel_target().model
    model.config.quantization_config = {"quant_method": "torchao"}
    with pytest.raises(InputError, match="some model is quantised already"):
        quantise(model, "int8", name="some model", packed=True)


@needs_torchao
def test_what_torchao_cannot_do_here() -> None:
    if torch.cuda.is_available():
        pytest.skip("here it can")
    with pytest.raises(InputError, match="torchao cannot quantize='int4' here"):
        by_torchao(tiny.kernel_target().model.base_model.layers, "int4")


def test_without_torchao(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(InputError, match=r"pip install .*\[quantize\]'"):
        moaspec.load_target(directory, quantize="int8")
