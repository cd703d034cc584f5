"""MaxSim in Triton: compute capability 8.0 and newer; TMA on 9.0 and newer."""

from tilefold.ops.maxsim._triton.launch import forward, plan_forward
from tilefold.ops.maxsim._triton.launch_backward import backward

__all__ = ["backward", "forward", "plan_forward"]
