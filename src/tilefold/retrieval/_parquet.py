"""One shard of sparse vectors as a Parquet file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tilefold.retrieval._files import require
from tilefold.retrieval._shards import REMEDY
from tilefold.retrieval._sparse import SparseVectors
from tilefold.retrieval.errors import DataError


def arrow() -> tuple[Any, Any]:
    """``pyarrow`` and ``pyarrow.parquet``, or an error that says how to install them."""
    purpose = "Storing vectors"
    return require("pyarrow", "pyarrow", purpose), require("pyarrow.parquet", "pyarrow", purpose)


def write(vectors: SparseVectors, path: Path) -> None:
    """Columns ``id``, ``indices`` and ``weights``, one row per text."""
    pa, pq = arrow()
    if vectors.indices.size > np.iinfo(np.int32).max:
        raise ValueError(f"vectors: expected fewer than 2^31 weights per shard, got {vectors.indices.size}.")
    offsets = pa.array(vectors.indptr.astype(np.int32))
    table = pa.table(
        {
            "id": pa.array(vectors.ids, pa.string()),
            "indices": pa.ListArray.from_arrays(offsets, pa.array(vectors.indices, pa.int32())),
            "weights": pa.ListArray.from_arrays(offsets, pa.array(vectors.data, pa.float32())),
        }
    )
    # a third of the time and two thirds of the bytes of the usual dictionaries, which hold no float twice
    encodings = {"indices.list.element": "DELTA_BINARY_PACKED", "weights.list.element": "BYTE_STREAM_SPLIT"}
    pq.write_table(table, path, compression="zstd", use_dictionary=False, column_encoding=encodings)


@contextmanager
def _as_data_error(path: Path) -> Iterator[None]:
    """Turn Arrow's errors for a damaged or foreign file into one ``DataError`` that names it."""
    pa, _ = arrow()
    try:
        yield
    except (pa.ArrowException, OSError, KeyError, AttributeError) as error:
        raise DataError(f"{path}: expected Parquet with id, indices and weights, got ({error}). {REMEDY}") from error


def read_ids(path: Path) -> list[str]:
    """The ids alone; the other columns are not read."""
    _, pq = arrow()
    with _as_data_error(path):
        ids: list[str] = pq.read_table(path, columns=["id"]).column("id").to_pylist()
    return ids


def read(path: Path, make: Callable[..., SparseVectors]) -> SparseVectors:
    """``make(ids, indptr, indices, weights)`` of what the file holds."""
    _, pq = arrow()
    with _as_data_error(path):
        table = pq.read_table(path, columns=["id", "indices", "weights"]).combine_chunks()
        columns = [table.column(name).combine_chunks() for name in ("id", "indices", "weights")]
        ids, indices, weights = columns
        lengths = indices.value_lengths().to_numpy(zero_copy_only=False)
        same = bool((lengths == weights.value_lengths().to_numpy(zero_copy_only=False)).all())
        arrays = (
            indices.flatten().to_numpy(zero_copy_only=False),
            weights.flatten().to_numpy(zero_copy_only=False),
        )
    if not same or any(column.null_count for column in columns):
        raise DataError(f"{path}: expected as many weights as indices and no nulls, got others. {REMEDY}")
    indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    try:
        return make(ids.to_pylist(), indptr, *arrays)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
