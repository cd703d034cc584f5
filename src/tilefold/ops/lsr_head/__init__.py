"""The fused LSR head (Sparton): hidden states and decoder weight to ``[B, V]`` scores."""

from tilefold.ops.lsr_head._quantized import QuantizedWeight, quantize_weight
from tilefold.ops.lsr_head._sparse import CapacityRows, rows_of_scores
from tilefold.ops.lsr_head.ahead import (
    ExpectedCall,
    compile_ahead,
    compile_training_ahead,
)
from tilefold.ops.lsr_head.api import chosen_impl, lsr_head, lsr_head_rows, lsr_head_sparse

__all__ = [
    "CapacityRows",
    "ExpectedCall",
    "QuantizedWeight",
    "chosen_impl",
    "compile_ahead",
    "compile_training_ahead",
    "lsr_head",
    "lsr_head_rows",
    "lsr_head_sparse",
    "quantize_weight",
    "rows_of_scores",
]
