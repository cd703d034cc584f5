"""Dropout by counter-based random words, equal in every implementation.

The words come from Philox 4x32-10, as in Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF  # the low 32 bits
# Constants of Philox 4x32: multipliers of a round, and increments of the key.
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85


def philox_word(seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor) -> Tensor:
    """Return a random word in [0, 2^32) for each counter, by Philox 4x32-10.

    Philox (Salmon et al., 2011) turns a counter of four words of 32 bits into four random words, by
    ten rounds of multiplications that depend on a key of two words. Only the first word is used.
    Words are held in int64, since torch computes little in uint32.

    Args:
        seed: the key, int64.
        c0: first word of the counter. The three words are broadcast, and the fourth is 0.
        c1: second word.
        c2: third word.
    """
    counters = torch.broadcast_tensors(  # type: ignore[no-untyped-call]
        c0.long(),
        c1.long(),
        c2.long(),
    )
    x0, x1, x2 = counters
    x3 = torch.zeros_like(x0)
    # the key: low and high half of the seed
    k0 = seed & _MASK
    k1 = (seed >> 32) & _MASK
    for _ in range(10):
        high_b, low_b = _product(_ROUND_B, x2)
        high_a, low_a = _product(_ROUND_A, x0)
        x0, x1, x2, x3 = high_b ^ x1 ^ k0, low_b, high_a ^ x3 ^ k1, low_a
        k0 = (k0 + _KEY_A) & _MASK
        k1 = (k1 + _KEY_B) & _MASK
    word: Tensor = x0
    return word


def _product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and the low 32 bits of ``a * b``, for unsigned words of 32 bits.

    Halves of ``b`` are multiplied, since int64 does not hold 64 unsigned bits.
    """
    low = a * (b & 0xFFFF)
    high = a * (b >> 16)
    middle = high + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def dropout_threshold(p: float) -> int:
    """Return the number below which the upper 24 bits of a random word mean "drop"."""
    return round(p * (1 << 24))


def keep_mask(seed: Tensor, i: Tensor, j: Tensor, plane: Tensor, p: float) -> Tensor:
    """Return bools, true for the pairs of queries and keys that dropout keeps.

    Args:
        seed: the seed of a call, int64.
        i: position of the query.
        j: position of the key.
        plane: number of the head, counted over the heads of all sequences.
        p: probability that a pair is dropped.
    """
    return (philox_word(seed, j, i, plane) >> 8) >= dropout_threshold(p)
