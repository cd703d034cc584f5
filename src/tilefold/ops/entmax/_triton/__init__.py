"""Alpha-entmax in Triton: compute capability 8.0 and newer."""

from tilefold.ops.entmax._triton.rows import backward, forward

__all__ = ["backward", "forward"]
