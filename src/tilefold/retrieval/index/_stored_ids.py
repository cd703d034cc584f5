"""Ids of documents on disk, of which only those are read that are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import overload

import numpy as np
import numpy.typing as npt

from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index.protocol import REMEDY

__all__ = ["ID_FILES", "StoredIds", "save_ids"]

ID_FILES = ("ids.npy", "id_ends.npy")
_ERRORS = "surrogatepass"  # an id may hold half a surrogate pair


class StoredIds(Sequence[str]):
    """Strings as UTF-8, one after the other, and where each ends.

    Args:
        text: uint8, all strings.
        ends: int64 ``[N]``, rising to the length of `text`.
    """

    def __init__(self, text: npt.NDArray[np.uint8], ends: npt.NDArray[np.int64]) -> None:
        self._text, self._ends = text, ends

    @overload
    def __getitem__(self, at: int) -> str: ...

    @overload
    def __getitem__(self, at: slice) -> list[str]: ...

    def __getitem__(self, at: int | slice) -> str | list[str]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        if not 0 <= at < len(self):
            raise IndexError(f"at: expected a position in [0, {len(self)}), got {at}.")
        low = int(self._ends[at - 1]) if at else 0
        try:
            return self._text[low : int(self._ends[at])].tobytes().decode("utf-8", _ERRORS)
        except UnicodeDecodeError as error:
            raise DataError(f"{ID_FILES[0]}: expected ids in UTF-8, got ({error}). {REMEDY}") from error

    def __iter__(self) -> Iterator[str]:
        return (self[at] for at in range(len(self)))

    def __len__(self) -> int:
        return len(self._ends)

    @classmethod
    def load(cls, folder: Path, count: int) -> StoredIds:
        """Those that :func:`save_ids` wrote, memory-mapped; ``DataError`` unless they are `count`."""
        try:
            text, ends = (np.asarray(np.load(folder / name, mmap_mode="r", allow_pickle=False)) for name in ID_FILES)
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{folder}: expected ids in {' and '.join(ID_FILES)}, got ({error}).") from error
        fits = ends.shape == (count,) and ends.dtype == np.int64 and text.dtype == np.uint8 and text.ndim == 1
        if not fits or (np.diff(ends, prepend=0) < 1).any() or (count and int(ends[-1]) != text.size):
            raise DataError(f"{folder}: expected the ids of {count} documents, got others. {REMEDY}")
        return cls(text, ends)


def save_ids(ids: Iterable[str], folder: Path) -> None:
    """Write `ids` for :meth:`StoredIds.load`."""
    encoded = [name.encode("utf-8", _ERRORS) for name in ids]
    ends = np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)))
    text, where = ID_FILES
    np.save(folder / text, np.frombuffer(b"".join(encoded), np.uint8), allow_pickle=False)
    np.save(folder / where, ends, allow_pickle=False)
