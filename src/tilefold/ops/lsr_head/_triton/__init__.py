"""The LSR head in Triton: compute capability 8.0 and newer; TMA on 9.0 and newer."""

from tilefold.ops.lsr_head._triton.launch_backward import max_backward
from tilefold.ops.lsr_head._triton.launch_forward import max_forward
from tilefold.ops.lsr_head._triton.sum_pooling import sum_backward, sum_forward

__all__ = ["max_backward", "max_forward", "sum_backward", "sum_forward"]
