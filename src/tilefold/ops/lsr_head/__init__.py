"""The fused LSR head (Sparton): hidden states and decoder weight to ``[B, V]`` scores."""

from tilefold.ops.lsr_head._choice import chosen_impl
from tilefold.ops.lsr_head.api import lsr_head, lsr_head_sparse

__all__ = ["chosen_impl", "lsr_head", "lsr_head_sparse"]
