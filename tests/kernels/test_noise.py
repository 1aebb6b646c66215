"""Noise has the same bits with kernels and without."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bits import needs_kernels, threads
from moaspec.decode import noise
from moaspec.decode.noise import gumbel, seed_bits
from moaspec.kernels import can_draw

pytestmark = needs_kernels
LAST = 2**32 - 1


@pytest.mark.parametrize("seed", [0, 7, 2**32, 2**63 - 1, 2**64 - 1])
@pytest.mark.parametrize(("choice", "position"), [(0, 0), (LAST, 5), (3, LAST)])
def test_it_has_the_bits_that_torch_computes(
    seed: int, choice: int, position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = torch.cat((torch.arange(70), torch.tensor([LAST - 1, LAST])))
    arguments = [torch.tensor(x) for x in (seed_bits(seed), choice, position)]
    assert can_draw(*arguments, tokens)
    drawn = gumbel(*arguments, tokens)
    monkeypatch.setattr(noise, "can_draw", lambda *_: False)
    assert drawn.tolist() == gumbel(*arguments, tokens).tolist()


def test_arguments_of_any_shape_and_any_threads() -> None:
    rows = torch.tensor([[1, 2, 3], [4, 5, 6]])
    tokens = torch.arange(40_000)[::2]

    def drawn(seed: Tensor) -> Tensor:
        return gumbel(*seed.unsqueeze(2).unbind(1), tokens)

    with threads(2):
        both = drawn(rows)
    assert both.shape == (2, 20_000)
    with threads(1):
        assert both.tolist() == torch.cat([drawn(rows[i : i + 1]) for i in range(2)]).tolist()
    assert gumbel(*rows[0].unbind(), tokens[:0]).shape == (0,)
    assert gumbel(*rows[0].unbind(), tokens[3]).item() == both[0, 3].item()


def test_other_devices_and_dtypes_are_left_to_torch() -> None:
    assert not can_draw(torch.arange(3, dtype=torch.int32))
    assert not can_draw(torch.arange(3), torch.arange(3, device="meta"))
