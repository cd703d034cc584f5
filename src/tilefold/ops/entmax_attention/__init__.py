"""Alpha-entmax attention (AdaSplash), which skips blocks of zero weights."""

from tilefold.ops.entmax_attention._stats import EntmaxStats
from tilefold.ops.entmax_attention.api import chosen_impl, entmax_attention, live_blocks

__all__ = ["EntmaxStats", "chosen_impl", "entmax_attention", "live_blocks"]
