"""Noise has the same bits with kernels and without."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bits import needs_kernels, threads
from moaspec.backends import fast_sampling  # noqa: F401 - registers the kernels
from moaspec.backends.cpu.fused_sampling import can_draw
from moaspec.sampling import noise
from moaspec.sampling.noise import gumbel, seed_bits

pytestmark = [needs_kernels, pytest.mark.kernels]
LAST = 2**32 - 1


def drawn(places_N3: Tensor, tokens: Tensor) -> Tensor:
    """Noise of these tokens at each place, (N, tokens)."""
    seed_N1, choice_N1, position_N1 = places_N3[..., None].unbind(1)
    return gumbel(seed_N1, choice_N1, position_N1, tokens)


@pytest.mark.parametrize("seed", [0, 7, 2**32, 2**63 - 1, 2**64 - 1])
@pytest.mark.parametrize(("choice", "position"), [(0, 0), (LAST, 5), (3, LAST)])
def test_it_has_the_bits_that_torch_computes(
    seed: int, choice: int, position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = torch.cat((torch.arange(70), torch.tensor([LAST - 1, LAST])))
    place = torch.tensor([[seed_bits(seed), choice, position]])
    assert can_draw(place, tokens)
    got = drawn(place, tokens)
    monkeypatch.setattr(noise, "registered", lambda: None)
    assert got.tolist() == drawn(place, tokens).tolist()


def test_arguments_of_any_shape_and_any_threads() -> None:
    places = torch.tensor([[1, 2, 3], [4, 5, 6]])
    tokens = torch.arange(40_000)[::2]
    with threads(2):
        both = drawn(places, tokens)
    assert both.shape == (2, 20_000)
    with threads(1):
        singly = [drawn(places[i : i + 1], tokens) for i in range(2)]
    assert both.tolist() == torch.cat(singly).tolist()
    assert drawn(places, tokens[:0]).shape == (2, 0)
    seed_N, choice_N, position_N = places.unbind(1)
    own = gumbel(seed_N, choice_N, position_N, tokens[[3, 19_999]])
    assert own.tolist() == [both[0, 3].item(), both[1, 19_999].item()]
    alone = gumbel(seed_N[0], choice_N[0], position_N[0], tokens[3])
    assert alone.shape == ()
    assert alone.item() == both[0, 3].item()


def test_other_devices_and_dtypes_are_left_to_torch() -> None:
    assert not can_draw(torch.arange(3, dtype=torch.int32))
    assert not can_draw(torch.arange(3), torch.arange(3, device="meta"))
