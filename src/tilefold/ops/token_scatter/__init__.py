"""Token weights to the vocabulary (uniCOIL, DeepImpact, BGE-M3): one weight per token to ``[B, V]``
scores.
"""

from tilefold.ops.token_scatter.api import chosen_impl, token_scatter, token_scatter_sparse

__all__ = ["chosen_impl", "token_scatter", "token_scatter_sparse"]
