"""Philox, the generator behind positional noise, over integer arrays of NumPy or PyTorch.

A device needs no PyTorch for it. Words of 32 bits are stored in int64 arrays, because PyTorch has
no arithmetic on unsigned words. The low and high halves of a product are also correct in two's
complement. A word that is the same for all elements may be a Python integer.

Legend: K token ids.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
Words = tuple[Any, Any, Any, Any]  # int64 arrays, all of NumPy or all of PyTorch, or integers


def philox(counter: Words, key: tuple[Any, Any]) -> Words:
    """Philox4x32-10, one block of four words per counter.

    Args:
        counter: four words (0 .. 2^32 - 1), which broadcast.
        key: two such words.

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


def _product(word: Any, multiplier: int) -> tuple[Any, Any]:
    product = word * multiplier
    return (product >> 32) & _MASK, product & _MASK


def noise_bits(seed: Any, choice: Any, position: Any, token_id: Any) -> Any:
    """53 bits of noise per element of the broadcast arguments, the last one set.

    The counter holds token id, position and choice in words of their own, so no two of them share
    a block.

    Args:
        seed: its 64 bits, signed or not.
        choice: see `sampling.noise.uniform`, as the others.
    """
    key = (seed & _MASK, (seed >> 32) & _MASK)
    first, second, _, _ = philox((token_id, position, choice, 0), key)
    return (first << 21) | (second >> 11) | 1


def gumbel_noise(
    seed: int, choice: int, position: int, token_ids_K: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """`sampling.noise.gumbel` of some tokens at one position.

    The bits are the same; logarithms of NumPy and PyTorch may differ in their last bit.
    """
    uniform_K = noise_bits(seed, choice, position, token_ids_K).astype(np.float64) * 2.0**-53
    return np.asarray(-np.log(-np.log(uniform_K)))
