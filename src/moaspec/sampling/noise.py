"""Positional noise: a random number per token from a sequence's seed, choice and position.

The functions have no state. The noise of a token depends only on (seed, choice, position, token
id), so its bits do not depend on the order of computation, nor on other tokens. All arithmetic is
on integer tensors, so it is the same on every device.

Words of 32 bits are stored in int64 tensors, because torch has no arithmetic on unsigned words. The
low and high halves of a product are also correct in two's complement.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moaspec.backends.cpu.fused_sampling import can_draw, draw_bits

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Philox4x32-10, one block of four words per counter.

    Args:
        counter: four int64 tensors of words (0 .. 2^32 - 1), which broadcast.
        key: two such tensors.

    Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high1, low1 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def _product(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    product = word * multiplier
    return (product >> 32) & _MASK, product & _MASK


def uniform(seed: Tensor, choice: Tensor, position: Tensor, token_id: Tensor) -> Tensor:
    """Float64 in the open interval (0, 1), one per element of the broadcast arguments.

    The counter holds token id, position and choice in words of their own, so no two of them share
    a block. Of the block's first 64 bits the leading 53 make the mantissa, the last of them always
    set: 0 and 1 cannot occur, and every value is exact.

    Args:
        seed: int64 tensor; the 64 bits of the seed (see `seed_bits`).
        choice: int64, which of several continuations of a prompt.
        position: int64, index of the token in its sequence, pads not counted.
        token_id: int64.
    """
    arguments = (seed, choice, position, token_id)
    bits = draw_bits(*arguments) if can_draw(*arguments) else _bits(*arguments)
    return bits.double() * 2.0**-53


def _bits(seed: Tensor, choice: Tensor, position: Tensor, token_id: Tensor) -> Tensor:
    zero = torch.zeros_like(token_id)
    key = (seed & _MASK, (seed >> 32) & _MASK)
    first, second, _, _ = philox((token_id, position, choice, zero), key)
    return (first << 21) | (second >> 11) | 1


def gumbel(seed: Tensor, choice: Tensor, position: Tensor, token_id: Tensor) -> Tensor:
    """Gumbel noise, float64; arguments as for `uniform`.

    The argmax over tokens of log-probability plus this is a sample of the distribution.
    """
    return -torch.log(-torch.log(uniform(seed, choice, position, token_id)))


def seed_bits(seed: int) -> int:
    """A seed of 0 .. 2^64 - 1 as the int64 with the same bits."""
    return seed - 2**64 if seed >= 2**63 else seed
