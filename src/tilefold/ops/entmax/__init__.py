"""Alpha-entmax and sparsemax: sparse alternatives to softmax, with the gradient by alpha."""

from tilefold.ops.entmax._torch_ops import chosen_impl
from tilefold.ops.entmax.api import entmax, sparsemax

__all__ = ["chosen_impl", "entmax", "sparsemax"]
