"""Regularisers of learned sparse retrieval that sentence-transformers lacks, computed over the batch of all ranks.

Functions take scores ``[B, V]``; the modules plug into ``SpladeLoss`` as ``document_regularizer`` or
``query_regularizer``.
"""

from tilefold.losses.functional import anti_zero, df_weights, flops, l1
from tilefold.losses.regularizers import (
    AntiZeroLoss,
    DFFlopsLoss,
    GlobalFlopsLoss,
    L1Loss,
    Regularizer,
    RegularizerSum,
)

__all__ = [
    "AntiZeroLoss",
    "DFFlopsLoss",
    "GlobalFlopsLoss",
    "L1Loss",
    "Regularizer",
    "RegularizerSum",
    "anti_zero",
    "df_weights",
    "flops",
    "l1",
]
