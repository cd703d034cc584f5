"""Fused heads and scorers for neural retrieval: big score matrices are folded tile by tile, never stored."""

from tilefold._version import __version__

__all__ = ["__version__"]
