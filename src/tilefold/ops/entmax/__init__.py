"""Alpha-entmax and sparsemax: sparse alternatives to softmax, with the gradient by alpha."""

from tilefold.ops.entmax.api import chosen_impl, entmax, sparsemax

__all__ = ["chosen_impl", "entmax", "sparsemax"]
