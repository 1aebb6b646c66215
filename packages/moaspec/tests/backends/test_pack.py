"""Packed weights compute what plain ones do."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bits import needs_packed_kernels, needs_packing
from moaspec.backends import linear_backends
from moaspec.backends.cpu.matrix import Matrix
from moaspec.backends.fast_target import accelerate
from moaspec.backends.linear_backends import can_pack, fastest_backend
from moaspec.backends.pack import FusedPart, PackedLinear, joint_matrix, pack_linears
from tiny import FAMILIES, PROMPTS, fresh_target

pytestmark = pytest.mark.kernels

CPU = torch.device("cpu")


@pytest.fixture(params=[False, True], ids=["emulated", "native"])
def bf16_instructions(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Without kernels, on a CPU that has such instructions or has not."""
    if request.param and not linear_backends._bf16_instructions():
        pytest.skip("oneDNN cannot lay bf16 weights out here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_backends, "_bf16_instructions", lambda: request.param)
        patch.setattr(Matrix, "can_hold", lambda *_, **__: False)
        yield request.param


@needs_packing
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 24), (3, 24), (2, 5, 24), (2, 0, 24)])
def test_packed_linear_computes_the_same(bias: bool, shape: tuple[int, ...]) -> None:
    linear = nn.Linear(24, 40, bias=bias)
    x = torch.randn(shape)
    with torch.inference_mode():
        packed = PackedLinear(linear)(x)
        # Sums of 24 float32 products in another order.
        torch.testing.assert_close(
            packed, F.linear(x, linear.weight, linear.bias), atol=1e-5, rtol=0
        )


@needs_packing
@pytest.mark.usefixtures("bf16_instructions")
@pytest.mark.parametrize("shape", [(24,), (3, 24), (2, 0, 24)])
def test_bf16_results_are_bf16_and_close(shape: tuple[int, ...]) -> None:
    linear = nn.Linear(24, 40).bfloat16()
    x = torch.randn(shape).bfloat16()
    with torch.inference_mode():
        packed = PackedLinear(linear)(x)
        exact = F.linear(x.double(), linear.weight.double(), linear.bias.double())
    assert packed.dtype == torch.bfloat16
    # One rounding to bf16 (8 bits), of sums that are exact enough in float32.
    torch.testing.assert_close(packed.double(), exact, atol=1e-2, rtol=2**-7)


@needs_packing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_layer_is_saved_like_a_plain_one(dtype: torch.dtype) -> None:
    linear = nn.Linear(24, 40).to(dtype)
    saved = PackedLinear(linear).state_dict()
    assert saved.keys() == linear.state_dict().keys()
    for name, value in linear.state_dict().items():
        assert torch.equal(saved[name], value)


@needs_packing
def test_every_linear_but_those_kept_is_replaced() -> None:
    inner = nn.Sequential(nn.Linear(4, 4))
    module = nn.Sequential(nn.Linear(4, 4), inner, nn.Linear(4, 4))
    kept = module[2]
    pack_linears(module, keep=(kept,))
    assert isinstance(module[0], PackedLinear)
    assert isinstance(inner[0], PackedLinear)
    assert module[2] is kept


@needs_packing
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("bf16_instructions")
def test_a_packed_target_is_as_exact_as_a_plain_one(family: str) -> None:
    exact, plain, packed = (fresh_target(family) for _ in range(3))
    for target in (plain, packed):
        target.model.bfloat16()
    assert accelerate(packed)
    ids_BT = torch.tensor(PROMPTS[2:3])
    ones_BT = torch.ones_like(ids_BT)
    states = [one.capture(ids_BT, ones_BT).hidden_BTE.float() for one in (exact, plain, packed)]
    plain_error, packed_error = (float((one - states[0]).norm()) for one in states[1:])
    # Both round to bf16, not always in the same place; a wrong weight would be far off.
    assert packed_error < 1.5 * plain_error


@needs_packing
@pytest.mark.parametrize("largest", [1e-6, 0.3, 1e5])
def test_float16_holds_every_bf16_weight_of_a_usual_range(
    largest: float, bf16_instructions: bool
) -> None:
    weight = (torch.randn(40, 24).clamp(-3, 3) * largest / 3).bfloat16()
    form = fastest_backend(weight, None, drafts=False)
    assert isinstance(form, linear_backends.Fp16Linear) is not bf16_instructions
    assert torch.equal(form.weight().bfloat16(), weight)


def _half_steps(x: torch.Tensor) -> torch.Tensor:
    """What rounding to eight bits may take from inputs."""
    largest = x.double().unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True)
    return (largest / 254).expand(-1, -1, -1, 32).flatten(-2)


@needs_packed_kernels
@pytest.mark.parametrize("bias", [False, True])
def test_drafts_may_be_rounded_to_four_bits(bias: bool) -> None:
    linear = nn.Linear(96, 100, bias=bias).bfloat16().requires_grad_(requires_grad=False)
    exact, rounded = PackedLinear(linear), PackedLinear(linear, drafts=True)
    assert rounded.matrix is not None
    assert exact.matrix is not None
    assert rounded.matrix.num_bytes < 0.4 * exact.matrix.num_bytes
    blocks = linear.weight.float().unflatten(1, (-1, 32))
    step = (blocks.amax(-1, keepdim=True) - blocks.amin(-1, keepdim=True)) / 15
    off = (rounded.weight.float().unflatten(1, (-1, 32)) - blocks).abs()
    # Half a step, and what float16 takes from it and bf16 from the weight, below 0.11.
    assert (off <= 0.52 * step + 0.11 * 2**-8).all()
    added = 0.0 if linear.bias is None else linear.bias.double()
    for rows in (0, 1, 2, 9, 33):
        x = torch.randn(1, rows, 96).bfloat16()
        expected = x.double() @ rounded.weight.double().t() + added
        # `weight` is rounded to bf16, the sums are not: 96 roundings of numbers near 0.06, apart
        # from each other, times inputs near 1; then the result, below 4, is rounded.
        allowed = 2e-2 + _half_steps(x) @ rounded.weight.double().abs().t()
        assert ((rounded(x).double() - expected).abs() <= allowed).all()
        assert torch.equal(rounded.single(x).bfloat16(), rounded(x))


@needs_packing
@pytest.mark.usefixtures("bf16_instructions")
@pytest.mark.parametrize(("dtype", "shape"), [
    (torch.float32, (96, 192)), (torch.bfloat16, (80, 192)), (torch.bfloat16, (81, 192))
])  # fmt: skip
def test_drafts_without_a_kernel_are_exact(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    linear = nn.Linear(*shape).to(dtype).requires_grad_(requires_grad=False)
    x = torch.randn(2, shape[0], dtype=dtype)
    assert torch.equal(PackedLinear(linear, drafts=True)(x), PackedLinear(linear)(x))


@needs_packed_kernels
def test_logits_are_not_rounded_before_they_are_float32() -> None:
    linear, x = nn.Linear(96, 100).bfloat16(), torch.randn(3, 96).bfloat16()
    packed = PackedLinear(linear)
    with torch.inference_mode():
        exact = F.linear(x.double(), linear.weight.double(), linear.bias.double())
        # float32 sums of 97 numbers that are below 4 together.
        torch.testing.assert_close(packed.single(x).double(), exact, atol=97 * 4 * 2**-24, rtol=0)
    gradient = torch.autograd.grad(packed.single(x.requires_grad_()).sum(), x)
    assert gradient[0].shape == x.shape


@needs_packed_kernels
def test_a_weight_that_kernels_do_not_take_goes_to_other_libraries() -> None:
    linear, x = nn.Linear(31, 40).bfloat16(), torch.randn(3, 31).bfloat16()
    packed = PackedLinear(linear)
    assert packed.matrix is None
    assert isinstance(
        packed._backend,
        linear_backends.OneDnnLinear
        if linear_backends._bf16_instructions()
        else linear_backends.Fp16Linear,
    )
    # One rounding to bf16 of numbers below 2.
    torch.testing.assert_close(packed(x), linear(x), atol=2**-7, rtol=0)


@needs_packed_kernels
@pytest.mark.parametrize("drafts", [False, True])
def test_joint_projections_by_kernels(drafts: bool) -> None:
    plain = Projections(bias=True, width=64).bfloat16().requires_grad_(requires_grad=False)
    packed = copy.deepcopy(plain)
    pack_linears(packed, drafts=drafts)
    matrix = joint_matrix([packed.q_proj, packed.k_proj, packed.v_proj])
    assert matrix is not None
    assert matrix.outputs == 32
    assert joint_matrix([packed.q_proj, packed.k_proj, nn.Linear(4, 4)]) is None
    with torch.inference_mode():
        for rows in (1, 3, 9):
            x = torch.randn(2, rows, 64).bfloat16()
            assert torch.equal(packed(x), matrix.product(x))
            got, expected = packed(x), plain(x)
            # One rounding to bf16 of numbers below 2; four bits of weights below 0.125 add 64 of up
            # to 0.01, apart from each other.
            torch.testing.assert_close(got, expected, atol=0.25 if drafts else 2**-7, rtol=0)
    if not drafts:
        saved, expected_state = packed.state_dict(), plain.state_dict()
        assert all(torch.equal(saved[name], expected_state[name]) for name in expected_state)


@needs_packing
def test_weights_of_too_wide_a_range_stay_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_backends, "_bf16_instructions", lambda: False)
    monkeypatch.setattr(Matrix, "can_hold", lambda *_, **__: False)
    weight = torch.tensor([[1.0, 1.0078125e-13]]).bfloat16()
    form = fastest_backend(weight, None, drafts=False)
    assert isinstance(form, linear_backends.Fp32Linear)
    assert torch.equal(form.weight().bfloat16(), weight)


@pytest.mark.parametrize(("cpu", "gains"), [("Intel(R) Xeon(R)", False), ("AMD EPYC", True)])
def test_float32_is_packed_where_mkl_copies_weights(
    cpu: str, gains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_backends, "_cpu_name", lambda: cpu)
    monkeypatch.setattr("torch.backends.mkl.is_available", lambda: True)
    gains = gains and can_pack(torch.bfloat16, CPU)
    assert can_pack(torch.float32, CPU) is gains
    monkeypatch.setattr("torch.backends.mkl.is_available", lambda: False)
    assert not can_pack(torch.float32, CPU)


@needs_packing
@pytest.mark.parametrize("avx512", [False, True])
def test_with_avx2_alone_only_heads_are_packed_in_float32(
    avx512: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cpu._is_avx512_supported", lambda: avx512)
    weight = torch.randn(8, 4)
    layer, head = (fastest_backend(weight, None, drafts=False, head=one) for one in (False, True))
    assert isinstance(layer, linear_backends.OneDnnLinear) is avx512
    assert isinstance(head, linear_backends.OneDnnLinear)


def test_nothing_is_packed_where_there_is_nothing_to_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_backends, "_cpu_name", lambda: "Intel(R) Xeon(R)")
    assert not can_pack(torch.float16, CPU)
    assert not can_pack(torch.float32, CPU)
    assert not can_pack(torch.bfloat16, torch.device("meta"))
    target = fresh_target()
    target.model.half()
    assert not accelerate(target)
    assert any(type(module) is nn.Linear for module in target.model.modules())


class Projections(nn.Module):
    """Three layers of one input, as attention has them."""

    def __init__(self, *, bias: bool, bias_of_v: bool | None = None, width: int = 24) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, 16, bias=bias)
        self.k_proj = nn.Linear(width, 8, bias=bias)
        self.v_proj = nn.Linear(width, 8, bias=bias if bias_of_v is None else bias_of_v)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.q_proj(x), self.k_proj(x), self.v_proj(x)), dim=-1)


@needs_packing
@pytest.mark.parametrize("bias", [False, True])
def test_projections_of_one_input_are_one_matrix(bias: bool) -> None:
    plain = Projections(bias=bias)
    packed = copy.deepcopy(plain)
    pack_linears(packed)
    assert all(type(part) is FusedPart for part in packed.children())
    with torch.inference_mode():
        for rows in (1, 3, 9):
            x, other = torch.randn(2, rows, 24)
            # Sums of 24 float32 products in another order.
            torch.testing.assert_close(packed(x), plain(x), atol=1e-5, rtol=0)
            # Asked in another order, and for inputs in turn, each part answers for its own.
            for y in (x, other, x):
                for name in ("v_proj", "q_proj", "k_proj"):
                    torch.testing.assert_close(
                        getattr(packed, name)(y), getattr(plain, name)(y), atol=1e-5, rtol=0
                    )
    saved, expected = packed.state_dict(), plain.state_dict()
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in expected)


@needs_packing
def test_the_product_is_computed_once_and_not_kept() -> None:
    packed = Projections(bias=False)
    pack_linears(packed)
    part = packed.q_proj
    assert isinstance(part, FusedPart)
    calls = []
    part._fused.linear.register_forward_hook(lambda *_: calls.append(1))
    with torch.inference_mode():
        packed(torch.randn(2, 24))
    assert len(calls) == 1
    assert part._fused._latest is None


@needs_packing
@pytest.mark.usefixtures("bf16_instructions")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_flow_through_packed_layers(dtype: torch.dtype) -> None:
    """To what they read, as through frozen plain ones: reused layers of a target in training."""
    linear = nn.Linear(24, 40).to(dtype)
    packed = PackedLinear(linear)
    x = torch.randn(3, 24).to(dtype).requires_grad_()
    (got,) = torch.autograd.grad(packed(x).float().sum(), x)
    (expected,) = torch.autograd.grad(linear(x).float().sum(), x)
    torch.testing.assert_close(got, expected, atol=0.05, rtol=0.02)


@needs_packing
def test_layers_that_cannot_be_joined_are_packed_alone() -> None:
    packed = Projections(bias=True, bias_of_v=False)
    pack_linears(packed)
    assert all(type(part) is PackedLinear for part in packed.children())
    pair = Projections(bias=False)
    del pair.q_proj
    pack_linears(pair)
    assert all(type(part) is FusedPart for part in pair.children())
