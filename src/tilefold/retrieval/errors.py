"""Exceptions of ``tilefold.retrieval``, each also a subclass of a built-in exception."""

from __future__ import annotations

__all__ = ["DataError", "MissingPackageError", "RankError", "VocabularyMismatchError"]


class DataError(ValueError):
    """The content of a file or an array is wrong; the message names the place and the remedy."""


class VocabularyMismatchError(ValueError):
    """Vectors of one vocabulary were combined with vectors or an index of another."""


class MissingPackageError(ImportError):
    """An optional package is needed; the message says how to install it."""


class RankError(RuntimeError):
    """Another rank of a process group failed, ended, or did not come."""
