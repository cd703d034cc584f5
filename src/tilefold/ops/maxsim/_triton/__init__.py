"""MaxSim in Triton: compute capability 8.0 and newer; TMA on 9.0 and newer."""

from tilefold.ops.maxsim._triton.launch import forward
from tilefold.ops.maxsim._triton.launch_backward import backward
from tilefold.ops.maxsim._triton.rows import quantize_rows

__all__ = ["backward", "forward", "quantize_rows"]
