"""The operators: one room each, the public functions re-exported here."""

from tilefold.ops.entmax import entmax, sparsemax
from tilefold.ops.entmax_attention import entmax_attention
from tilefold.ops.lsr_head import QuantizedWeight, lsr_head, lsr_head_sparse, quantize_weight
from tilefold.ops.maxsim import (
    QuantizedTokens,
    maxsim,
    maxsim_contrastive_loss,
    maxsim_topk,
    quantize_tokens,
    xtr_scores,
)
from tilefold.ops.token_scatter import token_scatter, token_scatter_sparse

__all__ = [
    "QuantizedTokens",
    "QuantizedWeight",
    "entmax",
    "entmax_attention",
    "lsr_head",
    "lsr_head_sparse",
    "maxsim",
    "maxsim_contrastive_loss",
    "maxsim_topk",
    "quantize_tokens",
    "quantize_weight",
    "sparsemax",
    "token_scatter",
    "token_scatter_sparse",
    "xtr_scores",
]
