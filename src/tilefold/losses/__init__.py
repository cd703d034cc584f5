"""Losses and regularisers of learned sparse retrieval that sentence-transformers lacks, as parts of
``SpladeLoss``.
"""

from tilefold.losses.functional import (
    ActivatedLmLoss,
    activated_lm_loss,
    anti_zero,
    df_weights,
    flops,
    l1,
    l2,
)
from tilefold.losses.ranking import PairwiseSoftmaxLoss, TermRecallLoss, WeightedLosses
from tilefold.losses.regularizers import (
    AntiZeroLoss,
    DFFlopsLoss,
    GlobalFlopsLoss,
    L1Loss,
    L2Loss,
    NoPenalty,
    PositionSum,
    Regularizer,
    RegularizerSum,
)

__all__ = [
    "ActivatedLmLoss",
    "AntiZeroLoss",
    "DFFlopsLoss",
    "GlobalFlopsLoss",
    "L1Loss",
    "L2Loss",
    "NoPenalty",
]
__all__ += [
    "PairwiseSoftmaxLoss",
    "PositionSum",
    "Regularizer",
    "RegularizerSum",
    "TermRecallLoss",
    "WeightedLosses",
]
__all__ += ["activated_lm_loss", "anti_zero", "df_weights", "flops", "l1", "l2"]
