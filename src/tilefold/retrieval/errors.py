"""Exceptions of ``tilefold.retrieval``, each also a subclass of a built-in exception."""

from __future__ import annotations

from tilefold._internal.arguments import ArgumentError
from tilefold.distributed.errors import RankError

__all__ = [
    "ArgumentDataError",
    "DataError",
    "MissingDocumentError",
    "MissingPackageError",
    "PrecisionWarning",
    "RankError",
    "VocabularyMismatchError",
    "WorkerError",
]


class DataError(ValueError):
    """The content of a file or an array is wrong; the message names the place and the remedy."""


class ArgumentDataError(ArgumentError, DataError):
    """The content of what was passed for an argument is wrong, such as vectors of another model."""


class MissingDocumentError(ArgumentDataError):
    """A document that an index found is not in the argument that must hold all documents.

    Args:
        argument: name of the argument, such as ``"vectors"``.
        document: id of the document.

    Attributes:
        document: id of the document.
    """

    def __init__(self, argument: str, document: str) -> None:
        super().__init__(
            argument,
            f"expected {document!r}, which the index found, among them; it is not there. Give "
            "those of the collection that is searched.",
        )
        self.args = (argument, document)  # from which pickle restores
        self.document = document


class VocabularyMismatchError(ValueError):
    """Vectors of one vocabulary were combined with vectors or an index of another."""


class PrecisionWarning(UserWarning):
    """Vectors that were computed in different precisions are put together."""


class MissingPackageError(ImportError):
    """An optional package is needed; the message says how to install it."""


class WorkerError(RuntimeError):
    """A worker process was killed, for example by the system because memory is short."""
