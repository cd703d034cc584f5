"""Alpha-entmax attention in Triton: compute capability 8.0 and newer."""

from tilefold.ops.entmax_attention._triton.launch import forward, plan_forward
from tilefold.ops.entmax_attention._triton.launch_backward import backward, plan_backward

__all__ = ["backward", "forward", "plan_backward", "plan_forward"]
