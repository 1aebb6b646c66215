"""Muon against PyTorch's own, and in float32."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from moaspec_train import muon

SHAPES = [(24, 24), (40, 16), (16, 40), (1, 8)]


def steps(optimizer: torch.optim.Optimizer, weights: list[nn.Parameter]) -> None:
    gradients = torch.Generator().manual_seed(1)
    for _ in range(3):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=gradients)
        optimizer.step()


def parameters() -> list[nn.Parameter]:
    values = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=values)) for shape in SHAPES]


def test_in_bf16_it_is_pytorchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "compute_dtype", lambda dtype: dtype)
    mine, own = parameters(), parameters()
    steps(muon.Muon(mine, lr=0.01, weight_decay=0.1), mine)
    pytorchs = torch.optim.Muon(own, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    steps(pytorchs, own)
    for a, b in zip(mine, own, strict=True):
        assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rows", [5, 8, 23, 48])
def test_half_of_a_symmetric_product_is_enough(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of four rows, or of a sixth of them; the last one may have fewer."""
    monkeypatch.setattr(muon, "LEAST_BLOCK", 4)
    x = torch.randn(rows, 64)
    square = muon.symmetric(x)
    assert_close(square, x @ x.T)
    found = muon.symmetric(square, plus=square, beta=2.0, alpha=0.1)
    assert_close(found, 0.1 * square @ square + 2 * square)


def test_a_matrix_without_gradient_stays() -> None:
    frozen, trained = parameters()[:2]
    before = frozen.detach().clone()
    steps(muon.Muon([frozen, trained], lr=0.01, weight_decay=0.1), [trained])
    assert torch.equal(frozen, before)


@pytest.mark.parametrize("shape", SHAPES)
def test_without_bf16_instructions_float32_is_used(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """bf16 would be emulated, some thirty times slower."""
    monkeypatch.setattr(muon, "compute_dtype", lambda _: torch.float32)
    left_OX, _, right_XI = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    found = muon.orthogonal(left_OX * torch.linspace(1, 0.1, min(shape)) @ right_XI)
    assert found.dtype == torch.float32
    values = torch.linalg.svdvals(found)
    assert 0.6 < float(values.min()) <= float(values.max()) < 1.3
