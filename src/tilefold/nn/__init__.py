"""Operators as modules: they own parameters and options, and leave the mathematics to ``tilefold.ops``."""

from tilefold.nn.lsr_head import LSRHead

__all__ = ["LSRHead"]
