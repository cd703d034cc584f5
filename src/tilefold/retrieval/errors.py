"""Exceptions of ``tilefold.retrieval``, each also a subclass of a built-in exception."""

from __future__ import annotations

from tilefold.distributed.errors import RankError

__all__ = [
    "DataError",
    "MissingDocumentError",
    "MissingPackageError",
    "PrecisionWarning",
    "RankError",
    "VocabularyMismatchError",
]


class DataError(ValueError):
    """The content of a file or an array is wrong; the message names the place and the remedy."""


class MissingDocumentError(DataError):
    """A `document` that an index found, by id, is not in the `argument` that belongs to it, such as
    ``"vectors"``.
    """

    def __init__(self, argument: str, document: str) -> None:
        super().__init__(
            f"{argument}: expected {document!r}, which the index found, among them; it is not "
            "there. Give "
            "those of the collection that is searched.",
        )
        self.argument, self.document = argument, document


class VocabularyMismatchError(ValueError):
    """Vectors of one vocabulary were combined with vectors or an index of another."""


class PrecisionWarning(UserWarning):
    """Vectors that were computed in different precisions are put together."""


class MissingPackageError(ImportError):
    """An optional package is needed; the message says how to install it."""
