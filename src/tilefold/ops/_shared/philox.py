"""Dropout by counter-based random words, the same in every implementation: Philox 4x32-10, as in
Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85


def philox_word(seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor) -> Tensor:
    """The first word of Philox with key ``seed`` (int64) and counter ``(c0, c1, c2, 0)``, int64 in
    [0, 2^32).
    """
    x0, x1, x2 = torch.broadcast_tensors(c0.long(), c1.long(), c2.long())  # type: ignore[no-untyped-call]
    x3 = torch.zeros_like(x0)
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        high_b, low_b = _product(_ROUND_B, x2)
        high_a, low_a = _product(_ROUND_A, x0)
        x0, x1, x2, x3 = high_b ^ x1 ^ k0, low_b, high_a ^ x3 ^ k1, low_a
        k0, k1 = (k0 + _KEY_A) & _MASK, (k1 + _KEY_B) & _MASK
    word: Tensor = x0
    return word


def _product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low words of ``a * b``, through halves of ``b``: int64 holds 48 bits, not 64
    unsigned ones.
    """
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    middle = high + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def dropout_threshold(p: float) -> int:
    """A word whose upper 24 bits are below this is dropped."""
    return round(p * (1 << 24))


def kept(seed: Tensor, i: Tensor, j: Tensor, plane: Tensor, p: float) -> Tensor:
    """Mask of pairs of query ``i`` and key ``j`` of ``plane`` (sequence times heads plus head) that
    dropout keeps.
    """
    return (philox_word(seed, j, i, plane) >> 8) >= dropout_threshold(p)
