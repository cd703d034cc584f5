"""MaxSim in Triton: compute capability 8.0 and newer; TMA on 9.0 and newer."""

from tilefold.ops.maxsim._triton.launch import forward, plan_forward
from tilefold.ops.maxsim._triton.launch_backward import GRADIENT_PLANS, backward

__all__ = ["GRADIENT_PLANS", "backward", "forward", "plan_forward"]
