"""Alpha-entmax attention (AdaSplash): sparse attention weights, no scores in memory, blocks of
zeros skipped.
"""

from tilefold.ops.entmax_attention._stats import EntmaxStats
from tilefold.ops.entmax_attention.api import chosen_impl, entmax_attention, live_blocks

__all__ = ["EntmaxStats", "chosen_impl", "entmax_attention", "live_blocks"]
