"""Token weights to ``[B, V]`` scores of the vocabulary, as in uniCOIL, DeepImpact and BGE-M3."""

from tilefold.ops.token_scatter.api import chosen_impl, token_scatter, token_scatter_sparse

__all__ = ["chosen_impl", "token_scatter", "token_scatter_sparse"]
