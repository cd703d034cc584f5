"""The token scatter in Triton: compute capability 8.0 and newer."""

from tilefold.ops.token_scatter._triton.scatter import backward, forward, plan_backward, plan_forward

__all__ = ["backward", "forward", "plan_backward", "plan_forward"]
