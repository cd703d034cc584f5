"""The operators of ``tilefold.ops`` as modules with parameters and options."""

from tilefold.nn.heads import EntmaxAlpha, LSRHead, TokenWeightHead

__all__ = ["EntmaxAlpha", "LSRHead", "TokenWeightHead"]
