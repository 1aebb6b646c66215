"""Positional noise: a random number per token from a sequence's seed, choice and position.

The functions have no state. The noise of a token depends only on (seed, choice, position, token
id), so its bits do not depend on the order of computation, nor on other tokens. All arithmetic is
on integers (`philox.py`), so it is the same on every device.
"""

import torch
from torch import Tensor

from moaspec.sampling.kernels import registered
from moaspec_core.sampling.philox import noise_bits


def uniform(seed: Tensor, choice: Tensor, position: Tensor, token_id: Tensor) -> Tensor:
    """Float64 in the open interval (0, 1), one per element of the broadcast arguments.

    `noise_bits` make the mantissa, the last of them always set: 0 and 1 cannot occur, and every
    value is exact.

    Args:
        seed: int64 tensor; the 64 bits of the seed (see `seed_bits`).
        choice: int64, which of several continuations of a prompt.
        position: int64, index of the token in its sequence, pads not counted.
        token_id: int64.
    """
    arguments = (seed, choice, position, token_id)
    kernels = registered()
    if kernels is not None and kernels.can_draw(*arguments):
        bits = kernels.draw_bits(*arguments)
    else:
        bits = noise_bits(*arguments)
    return bits.double() * 2.0**-53


def gumbel(seed: Tensor, choice: Tensor, position: Tensor, token_id: Tensor) -> Tensor:
    """Gumbel noise, float64; arguments as for `uniform`.

    The argmax over tokens of log-probability plus this is a sample of the distribution.
    """
    return -torch.log(-torch.log(uniform(seed, choice, position, token_id)))


def seed_bits(seed: int) -> int:
    """A seed of 0 .. 2^64 - 1 as the int64 with the same bits."""
    return seed - 2**64 if seed >= 2**63 else seed
