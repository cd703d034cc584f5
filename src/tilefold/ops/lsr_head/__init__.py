"""The fused LSR head (Sparton): hidden states and decoder weight to ``[B, V]`` scores."""

from tilefold.ops.lsr_head.api import chosen_impl, lsr_head, lsr_head_sparse

__all__ = ["chosen_impl", "lsr_head", "lsr_head_sparse"]
