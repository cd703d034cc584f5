"""Losses and regularisers of learned sparse retrieval, as parts of ``SpladeLoss``."""

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
    "PairwiseSoftmaxLoss",
    "PositionSum",
    "Regularizer",
    "RegularizerSum",
    "TermRecallLoss",
    "WeightedLosses",
    "activated_lm_loss",
    "anti_zero",
    "df_weights",
    "flops",
    "l1",
    "l2",
]
