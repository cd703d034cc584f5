"""The fused LSR head (Sparton): hidden states and decoder weight to ``[B, V]`` scores."""

from tilefold.ops.lsr_head._choice import chosen_impl
from tilefold.ops.lsr_head._quantized import QuantizedWeight, quantize_weight
from tilefold.ops.lsr_head.api import lsr_head, lsr_head_sparse

__all__ = ["QuantizedWeight", "chosen_impl", "lsr_head", "lsr_head_sparse", "quantize_weight"]
