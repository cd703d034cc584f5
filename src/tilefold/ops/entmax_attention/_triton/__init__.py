"""Alpha-entmax attention in Triton: compute capability 8.0 and newer."""

from tilefold.ops.entmax_attention._triton.launch import forward
from tilefold.ops.entmax_attention._triton.launch_backward import backward

__all__ = ["backward", "forward"]
