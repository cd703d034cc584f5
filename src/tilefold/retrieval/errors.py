"""Exceptions of the retrieval rooms. All are also built-in exceptions, so plain handlers catch them."""

from __future__ import annotations

__all__ = ["DataError", "MissingPackageError", "VocabularyMismatchError"]


class DataError(ValueError):
    """A file or an array does not hold what it should; the message names the place and the remedy."""


class VocabularyMismatchError(ValueError):
    """Vectors of one vocabulary met vectors or an index of another."""


class MissingPackageError(ImportError):
    """An optional package is needed; the message says how to install it."""
