"""Operators as modules: they own parameters and options, and leave the mathematics to
``tilefold.ops``.
"""

from tilefold.nn.heads import EntmaxAlpha, LSRHead, TokenWeightHead

__all__ = ["EntmaxAlpha", "LSRHead", "TokenWeightHead"]
