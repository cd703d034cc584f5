"""Late-interaction scores (MaxSim) without the query-token by document-token similarities."""

from tilefold.ops.maxsim.api import chosen_impl, maxsim, maxsim_topk
from tilefold.ops.maxsim.contrastive import maxsim_contrastive_loss
from tilefold.ops.maxsim.quantized import QuantizedTokens, quantize_tokens
from tilefold.ops.maxsim.xtr import xtr_scores

__all__ = [
    "QuantizedTokens",
    "chosen_impl",
    "maxsim",
    "maxsim_contrastive_loss",
    "maxsim_topk",
    "quantize_tokens",
    "xtr_scores",
]
