"""The operators: one package for each, whose public functions are exported here."""

from tilefold._internal.public import PACKAGE_OF as _PACKAGE_OF
from tilefold.ops.entmax import entmax as entmax
from tilefold.ops.entmax import sparsemax as sparsemax
from tilefold.ops.entmax_attention import entmax_attention as entmax_attention
from tilefold.ops.lsr_head import QuantizedWeight as QuantizedWeight
from tilefold.ops.lsr_head import lsr_head as lsr_head
from tilefold.ops.lsr_head import lsr_head_sparse as lsr_head_sparse
from tilefold.ops.lsr_head import quantize_weight as quantize_weight
from tilefold.ops.maxsim import QuantizedTokens as QuantizedTokens
from tilefold.ops.maxsim import maxsim as maxsim
from tilefold.ops.maxsim import maxsim_contrastive_loss as maxsim_contrastive_loss
from tilefold.ops.maxsim import maxsim_topk as maxsim_topk
from tilefold.ops.maxsim import quantize_tokens as quantize_tokens
from tilefold.ops.maxsim import xtr_scores as xtr_scores
from tilefold.ops.token_scatter import token_scatter as token_scatter
from tilefold.ops.token_scatter import token_scatter_sparse as token_scatter_sparse

__all__ = list(_PACKAGE_OF)
