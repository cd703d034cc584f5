"""Operators as modules: they own parameters and options, and leave the mathematics to ``tilefold.ops``."""

from tilefold.nn.entmax import EntmaxAlpha
from tilefold.nn.lsr_head import LSRHead
from tilefold.nn.token_weight_head import TokenWeightHead

__all__ = ["EntmaxAlpha", "LSRHead", "TokenWeightHead"]
