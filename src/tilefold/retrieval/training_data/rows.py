"""Mined negatives and teacher scores in one Parquet file, with a row per query and document.

===================  =======  ==================================================================
column               type     meaning
===================  =======  ==================================================================
``query_id``         string   rows of a query follow one another
``document_id``      string   at most once per query
``rank``             int32    rank in the retriever's list, from 1, in which judged documents also
                              have ranks; null if the document was not retrieved
``score``            float32  mined file: the retriever's score, null if not retrieved;
                              scored file: the combined score of the teachers
``relevant``         bool     whether the document was judged relevant; other rows are negatives
``retriever_score``  float32  scored file only: ``score`` of the mined file
``score:<teacher>``  float32  scored file only: score of a teacher, before normalisation
===================  =======  ==================================================================

A file is scored if it has a column ``score:<teacher>``. A JSON object under the key ``tilefold`` of
the schema's metadata describes how the rows were made. ``tilefold mine`` writes such files and
``tilefold score`` adds the teachers. Files from other programs can be read if they have the columns
``query_id``, ``document_id`` and ``relevant``, and ``score`` if there are teachers.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tilefold._internal.arguments import (
    ArgumentError,
    check_instance,
    check_mapping,
    list_of,
    path_of,
)
from tilefold._internal.files import exported_file
from tilefold.pipeline.ragged import offsets_of
from tilefold.retrieval.common.files import Json, arrow
from tilefold.retrieval.common.provenance import Provenance, texts_digest
from tilefold.retrieval.data.collection import Collection
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.training_data.published import read_published

__all__ = ["QueryRows", "TrainingRows", "read_training_rows", "write_training_rows"]

TEACHER_PREFIX = "score:"
METADATA_KEY = b"tilefold"
SCHEMA_VERSION = 1
PUBLISHED_SUFFIXES = (".tsv", ".tsv.gz", ".json", ".json.gz", ".jsonl", ".jsonl.gz")
"""Suffixes of files in one of the formats of MS MARCO."""
NARROW_RANGE = 1e-4  # a teacher whose scores of a query are within this range has no preference
NARROW_SHARE = 0.5  # smallest share of such queries for which a teacher counts as narrow
_ROWS_PER_GROUP = 1 << 20  # number of rows that are written or checked at a time
_COLUMNS_PER_READ = 2  # one per core; more columns would need more memory
_MAX_THREADS = 8  # threads that read ids, one row group each
_MAX_GAP_FACTOR = 4  # numeric ids up to this multiple of the number of rows are numbered directly
_N_SHOWN_OFFSETS = 9
_ID_COLUMNS = ["query_id", "document_id"]
_COLUMNS = ("document", "relevant", "rank", "retrieved")  # columns of all training rows
_REMEDY = "Make it again: tilefold mine, then tilefold score."

Floats = npt.NDArray[np.float32]


class _IdColumn(NamedTuple):
    """A column of ids, each of which is stored once.

    Attributes:
        ids: the D distinct ids, in the order of their first rows.
        positions: position ``[N]`` of each row's id in `ids`.
    """

    ids: list[str]
    positions: npt.NDArray[np.int32]


class QueryRows(NamedTuple):
    """The n training rows of one query: documents, and columns ``[n]`` of ranks and scores.

    The attributes have the same meaning as those of :class:`TrainingRows`.
    """

    query: str
    documents: list[str]
    relevant: npt.NDArray[np.bool_]
    rank: npt.NDArray[np.int32]
    retrieved: Floats
    target: Floats | None
    teachers: dict[str, Floats]


@dataclass
class TrainingRows:
    """Training rows in memory: Q queries with N rows over D documents.

    The rows of query ``i`` are ``offsets[i]:offsets[i + 1]``.

    Attributes:
        queries: ids of the Q distinct queries.
        documents: ids of the D distinct documents.
        offsets: int64 ``[Q + 1]``, rising from 0 to N.
        document: int32 ``[N]``, position of each row's document in `documents`; a
            document occurs at most once per query.
        relevant: bool ``[N]``, whether the document is relevant.
        rank: int32 ``[N]``, rank in the retriever's list, from 1; 0 if not retrieved.
        retrieved: float32 ``[N]``, the retriever's score; NaN if not retrieved.
        teachers: name of a teacher -> its scores, float32 ``[N]``, finite.
        target: float32 ``[N]``, finite, the score to train with; None without teachers.
        made_by: JSON object that describes how the rows were made; ``texts_sha256`` and
            ``queries_sha256`` are digests of the texts.

    Raises:
        TypeError: if a column is not an array of numbers.
        DataError: if shapes differ, a query has a document twice, or a score is not finite.
    """

    queries: list[str]
    documents: list[str]
    offsets: npt.NDArray[np.int64]
    document: npt.NDArray[np.int32]
    relevant: npt.NDArray[np.bool_]
    rank: npt.NDArray[np.int32]
    retrieved: Floats
    teachers: dict[str, Floats] = field(default_factory=dict)
    target: Floats | None = None
    made_by: Json = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Convert the columns to arrays, and check them."""
        self._convert()
        self._check_offsets()
        self._check_shapes()
        self._check_scores()
        self._check_distinct_documents()

    def _convert(self) -> None:
        """Convert ids to lists and columns to arrays.

        Raises:
            TypeError: if an attribute has another type.
        """
        check_mapping("teachers", self.teachers, "name -> scores")
        check_mapping("made_by", self.made_by, "name -> JSON value")
        self.queries = list_of("queries", self.queries)
        self.documents = list_of("documents", self.documents)
        self.offsets = np.asarray(self.offsets)
        for name in _COLUMNS:
            setattr(self, name, np.asarray(getattr(self, name)))
        self.teachers = {name: np.asarray(scores) for name, scores in self.teachers.items()}
        if self.target is not None:
            self.target = np.asarray(self.target)
        for name, values in self._columns().items():
            if values.ndim == 0 or values.dtype.kind not in "biuf":
                raise TypeError(
                    f"{name}: expected an array of numbers, one per row, got shape "
                    f"{list(values.shape)} of {values.dtype}.",
                )
        if self.offsets.ndim == 0 or self.offsets.dtype.kind not in "iuf":
            raise TypeError(
                f"offsets: expected an array of {len(self.queries) + 1} integers, got shape "
                f"{list(self.offsets.shape)} of {self.offsets.dtype}.",
            )

    def _columns(self) -> dict[str, npt.NDArray[Any]]:
        """Return name -> values of each column, including scores."""
        return {**{name: getattr(self, name) for name in _COLUMNS}, **self._scores()}

    def _scores(self) -> dict[str, Floats]:
        """Return name -> scores of each teacher, and of the target."""
        return self.teachers if self.target is None else {**self.teachers, "target": self.target}

    def _check_offsets(self) -> None:
        """Raise ``DataError`` if the offsets do not divide the rows among the queries.

        There must be one offset per query and one more. They begin at 0 and never fall.
        """
        n_offsets = len(self.queries) + 1
        is_valid = (
            len(self.offsets) == n_offsets
            and self.offsets[0] == 0
            and not bool((np.diff(self.offsets) < 0).any())
        )
        if not is_valid:
            raise DataError(
                f"offsets: expected {n_offsets} numbers that rise from 0, got "
                f"{self.offsets.tolist()[:_N_SHOWN_OFFSETS]}.",
            )

    def _check_shapes(self) -> None:
        """Raise ``DataError`` if a column does not have one value per row."""
        for name, values in self._columns().items():
            if values.shape != (len(self),):
                raise DataError(
                    f"{name}: expected {len(self)} values, one per row, got shape {values.shape}.",
                )

    def _check_scores(self) -> None:
        """Raise ``DataError`` if scores are missing or not finite."""
        if bool(self.teachers) != (self.target is not None):
            missing = "no target" if self.target is None else "no teachers"
            raise DataError(
                f"target: expected a target together with scores of teachers, got {missing}.",
            )
        for name, scores in self._scores().items():
            is_finite = np.isfinite(scores)
            if not is_finite.all():
                row = int(np.flatnonzero(~is_finite)[0])
                raise DataError(f"{name}: {self.describe_row(row)} has no finite score.")

    def _check_distinct_documents(self) -> None:
        """Raise ``DataError`` if a query has a document twice.

        Queries are checked in blocks of about ``_ROWS_PER_GROUP`` rows, to limit the memory.
        """
        n_queries = len(self.queries)
        n_documents = max(1, len(self.documents))
        # Blocks of queries begin at the first query at or after each of these rows.
        block_rows = np.arange(0, len(self) + _ROWS_PER_GROUP, _ROWS_PER_GROUP)
        block_queries = np.minimum(np.searchsorted(self.offsets, block_rows), n_queries)
        for first_query, end_query in itertools.pairwise(block_queries.tolist()):
            first_row = int(self.offsets[first_query])
            row_counts = np.diff(self.offsets[first_query : end_query + 1])
            # A key is a number for the pair of a row's query and document.
            keys = np.repeat(np.arange(len(row_counts)) * n_documents, row_counts)
            keys += self.document[first_row : first_row + len(keys)]
            order = np.argsort(keys, kind="stable")
            repeated = np.flatnonzero(np.diff(keys[order]) == 0)
            if repeated.size:
                row = first_row + int(order[repeated[0] + 1])
                raise DataError(
                    f"rows: {self.describe_row(row)} is given twice. Keep only one of them.",
                )

    def describe_row(self, row: int) -> str:
        """Return the ids of the document and the query of a row, for error messages."""
        query = int(np.searchsorted(self.offsets, row, side="right")) - 1
        document_id = self.documents[self.document[row]]
        return f"document {document_id!r} of query {self.queries[query]!r}"

    def __len__(self) -> int:
        """Return N, the number of rows."""
        return len(self.document)

    @property
    def scored(self) -> bool:
        """Whether the rows have scores of teachers."""
        return self.target is not None

    @property
    def provenance(self) -> Provenance:
        """Fingerprints of the retriever's model and of the documents, if they are known."""
        return Provenance.from_dict(self.made_by)

    def narrow_teachers(self) -> dict[str, float]:
        """Find teachers whose scores hardly distinguish the documents of a query.

        A sigmoid at the end of a cross-encoder has this effect. Normalization per query would then
        stretch rounding errors to the range of real differences.

        Returns:
            Name of a teacher -> share of queries whose scores are all within :data:`NARROW_RANGE`,
            if it is at least :data:`NARROW_SHARE`. Queries with a single document do not count.
        """
        counts = np.diff(self.offsets)
        has_rows = counts > 0  # reduceat() needs a row per query, so other queries are skipped
        starts = self.offsets[:-1][has_rows]
        has_several_rows = counts[has_rows] > 1
        shares: dict[str, float] = {}
        if not has_several_rows.any():
            return shares
        for name, scores in self.teachers.items():
            highest = np.maximum.reduceat(scores, starts)[has_several_rows]
            lowest = np.minimum.reduceat(scores, starts)[has_several_rows]
            share = float((highest.astype(np.float64) - lowest < NARROW_RANGE).mean())
            if share >= NARROW_SHARE:
                shares[name] = share
        return shares

    def narrow_teacher_warnings(self) -> list[str]:
        """Return a warning about each of the :meth:`narrow_teachers`."""
        return [
            f"the teacher {name!r} scores all documents of a query within {NARROW_RANGE:g} for "
            f"{share:.0%} of the queries: there is nothing to learn from them. A sigmoid at the "
            "end of a teacher does this: use its raw logits, or another teacher."
            for name, share in self.narrow_teachers().items()
        ]

    def query_of_row(self) -> npt.NDArray[np.int64]:
        """Return the position of each row's query, int64 ``[N]``."""
        return np.repeat(np.arange(len(self.queries), dtype=np.int64), np.diff(self.offsets))

    def groups(self) -> Iterator[QueryRows]:
        """Yield the training rows of each query, in the order of the queries."""
        for number, query in enumerate(self.queries):
            rows = slice(int(self.offsets[number]), int(self.offsets[number + 1]))
            positions = self.document[rows].tolist()
            yield QueryRows(
                query=query,
                documents=[self.documents[position] for position in positions],
                relevant=self.relevant[rows],
                rank=self.rank[rows],
                retrieved=self.retrieved[rows],
                target=None if self.target is None else self.target[rows],
                teachers={name: scores[rows] for name, scores in self.teachers.items()},
            )

    def take(self, keep: npt.NDArray[np.bool_]) -> TrainingRows:
        """Return the rows for which a mask is true.

        Queries without rows are left out. All documents are kept.

        Args:
            keep: the mask, bool ``[N]``.
        """
        counts = np.bincount(self.query_of_row()[keep], minlength=len(self.queries))
        return replace(
            self,
            queries=[
                query for query, count in zip(self.queries, counts.tolist(), strict=True) if count
            ],
            offsets=offsets_of(counts[counts > 0]),
            document=self.document[keep],
            relevant=self.relevant[keep],
            rank=self.rank[keep],
            retrieved=self.retrieved[keep],
            teachers={name: scores[keep] for name, scores in self.teachers.items()},
            target=None if self.target is None else self.target[keep],
            made_by=dict(self.made_by),
        )

    def check_collection(self, collection: Collection) -> None:
        """Check that the rows were made from the texts of a collection.

        Raises:
            DataError: if the collection lacks a query or a document, or if a text has changed.
        """
        self.positions_in(collection)

    def positions_in(self, collection: Collection) -> npt.NDArray[np.int64]:
        """Return the positions of the documents in the collection that the rows were made from.

        Args:
            collection: the collection.

        Returns:
            Position in `collection` of each of the D documents, int64 ``[D]``.

        Raises:
            DataError: if the collection lacks a query or a document, or if a text has changed.
        """
        positions = collection.positions_of(self.documents)
        for query in self.queries:
            if query not in collection.queries:
                raise _other_collection_error("query", query, collection)
        unknown = np.flatnonzero(positions < 0)
        if unknown.size:
            raise _other_collection_error("document", self.documents[unknown[0]], collection)
        self._check_digest(
            "texts_sha256",
            texts=collection.contents(),
            kind="documents",
            collection_name=collection.name,
        )
        self._check_digest(
            "queries_sha256",
            texts=queries_of(self, collection),
            kind="queries",
            collection_name=collection.name,
        )
        return positions

    def _check_digest(
        self,
        key: str,
        *,
        texts: Mapping[str, str],
        kind: str,
        collection_name: str,
    ) -> None:
        """Raise ``DataError`` if the rows were made from other texts.

        Args:
            key: entry of ``made_by`` with the digest of the texts. Rows without it are not checked.
            texts: id -> text in the collection.
            kind: ``"documents"`` or ``"queries"``, for the error message.
            collection_name: name of the collection, for the error message.
        """
        digest = self.made_by.get(key)
        if digest is not None and digest != texts_digest(texts):
            raise DataError(
                f"training rows: they were made from other {kind} than those of {collection_name}, "
                f"which may have changed. {_REMEDY}",
            )


def _other_collection_error(kind: str, text_id: str, collection: Collection) -> DataError:
    """Return the error for a query or document that is not in a collection."""
    return DataError(
        f"training rows: {kind} {text_id!r} is not in {collection.name}; they were made from "
        f"another collection. Pass that collection. {_REMEDY}",
    )


def queries_of(rows: TrainingRows, collection: Collection) -> dict[str, str]:
    """Return query id -> text for the queries of training rows, in their order."""
    return {query: collection.queries[query] for query in rows.queries}


def check_rows(name: str, rows: object) -> None:
    """Raise ``TypeError`` unless an argument is :class:`TrainingRows`."""
    check_instance(name, rows, TrainingRows, "read_training_rows(path)")


def write_training_rows(
    rows: TrainingRows,
    path: str | Path,
    *,
    overwrite: bool = False,
) -> None:
    """Write training rows to a Parquet file with the columns listed at the top of this module.

    The file appears atomically.

    Args:
        rows: the rows, at least one.
        path: path of the file.
        overwrite: whether to replace an existing file.

    Raises:
        FileExistsError: if the file exists, and `overwrite` is not set.
        ValueError: if there are no rows.
    """
    check_rows("rows", rows)
    pa, pq = arrow("Storing training rows")
    if not len(rows):
        raise ArgumentError("rows", "expected at least one row, got an empty table.")
    schema = _schema_of(pa, rows)
    query_of_row = rows.query_of_row()
    with (
        exported_file(path_of("path", path), overwrite=overwrite) as temporary,
        pq.ParquetWriter(temporary, schema, compression="zstd") as writer,
    ):
        for start in range(0, len(rows), _ROWS_PER_GROUP):
            part = slice(start, start + _ROWS_PER_GROUP)
            query_positions = query_of_row[part].tolist()
            document_positions = rows.document[part].tolist()
            # Ranks and scores of documents that were not retrieved are null.
            rank = pa.array(rows.rank[part], mask=rows.rank[part] == 0)
            retrieved = pa.array(rows.retrieved[part], mask=np.isnan(rows.retrieved[part]))
            columns = {
                "query_id": [rows.queries[position] for position in query_positions],
                "document_id": [rows.documents[position] for position in document_positions],
                "rank": rank,
                "score": retrieved if rows.target is None else rows.target[part],
                "relevant": rows.relevant[part],
                "retriever_score": retrieved,
            }
            for name, scores in rows.teachers.items():
                columns[TEACHER_PREFIX + name] = scores[part]
            stored_columns = {name: columns[name] for name in schema.names}
            writer.write_table(pa.table(stored_columns, schema=schema))


def _schema_of(pa: ModuleType, rows: TrainingRows) -> Any:
    """Return the Arrow schema of a file of training rows.

    Scored rows have additional columns. ``rows.made_by`` becomes metadata of the schema.

    Args:
        pa: the module ``pyarrow``.
        rows: the training rows.
    """
    fields = [
        ("query_id", pa.string()),
        ("document_id", pa.string()),
        ("rank", pa.int32()),
        ("score", pa.float32()),
        ("relevant", pa.bool_()),
    ]
    if rows.scored:
        fields.append(("retriever_score", pa.float32()))
        fields += [(TEACHER_PREFIX + name, pa.float32()) for name in rows.teachers]
    made_by = {"schema_version": SCHEMA_VERSION, **rows.made_by}
    return pa.schema(
        fields,
        metadata={METADATA_KEY: json.dumps(made_by, ensure_ascii=False).encode()},
    )


def read_training_rows(path: str | Path) -> TrainingRows:
    """Read training rows from a Parquet file, or from a file in one of the formats of MS MARCO.

    A Parquet file has the columns listed at the top of this module. Other files have lines of

    - three ids with tabs between them: query, relevant document, negative;
    - JSON ``[query, relevant, negative, negative, ...]``;
    - JSON ``[query, [document, score], [document, score], ...]``, the relevant document first;
    - JSON ``{"qid": query, "pos": [document, ...], "neg": {retriever: [document, ...]}}``.

    Args:
        path: path of the file.

    Raises:
        FileNotFoundError: if there is no such file.
        DataError: if the file has another format, a value is wrong, a score is not finite, or a
            query of a Parquet file has a document twice.

    Examples:
        >>> from pathlib import Path
        >>> _ = Path("negatives.jsonl").write_text('["q1", "cards", "pin", "abroad"]')
        >>> rows = read_training_rows("negatives.jsonl")
        >>> rows.documents, rows.relevant.tolist()
        (['cards', 'pin', 'abroad'], [True, False, False])
    """
    file = path_of("path", path)
    if not file.is_file():
        raise FileNotFoundError(
            f"{file}: no such file of training rows. Create one with: tilefold mine",
        )
    try:
        if file.name.endswith(PUBLISHED_SUFFIXES):
            return TrainingRows(**read_published(file))
        return _read_parquet(file)
    except DataError as error:
        raise DataError(f"{file}: {error}") from error
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error}). {_REMEDY}") from error


class RowsAhead:
    """Path of a file of training rows, which a thread starts to read at once.

    Args:
        path: path of the file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        pool = ThreadPoolExecutor(1)
        self._pending_reads = [pool.submit(read_training_rows, path)]
        pool.shutdown(wait=False)

    def __fspath__(self) -> str:
        return self.path

    __str__ = __fspath__

    def take(self) -> TrainingRows:
        """Wait for the rows, and return them. A second call reads the file again."""
        if self._pending_reads:
            return self._pending_reads.pop().result()
        return read_training_rows(self.path)


def _read_parquet(file: Path) -> TrainingRows:
    """Read training rows from a Parquet file.

    Args:
        file: path of the file.

    Raises:
        DataError: if the file is not Parquet, or a column is missing or wrong.
    """
    pa, pq = arrow("Reading training rows")
    try:
        # Ids are read in dictionary encoding, and all other columns as plain values.
        with (
            pq.ParquetFile(file) as table,
            pq.ParquetFile(file, read_dictionary=_ID_COLUMNS) as id_table,
        ):
            return _rows_of_table(file, pa, pq, table, id_table)
    except pa.ArrowException as error:
        raise DataError(
            f"expected Parquet with training rows, got ({error}). {_REMEDY}",
        ) from error


def _rows_of_table(
    file: Path,
    pa: ModuleType,
    pq: ModuleType,
    table: Any,
    id_table: Any,
) -> TrainingRows:
    """Convert an open Parquet file to training rows.

    Args:
        file: path of the file.
        pa: the module ``pyarrow``.
        pq: the module ``pyarrow.parquet``.
        table: the open file.
        id_table: the same file, opened to read columns of ids in dictionary encoding: each distinct
            id once, and its number in every row.

    Raises:
        DataError: if a column is missing or wrong.
    """
    available = table.schema_arrow.names
    teacher_columns = [name for name in available if name.startswith(TEACHER_PREFIX)]
    _check_columns(available, has_teachers=bool(teacher_columns))
    query_ids = _read_ids(pa, id_table, "query_id")
    document_ids = _read_numeric_ids(file, pa, pq, table, "document_id")
    if document_ids is None:
        document_ids = _read_ids(pa, id_table, "document_id")
    relevant = table.read(["relevant"]).column(0)
    if not pa.types.is_boolean(relevant.type) or relevant.null_count:
        raise DataError(
            "relevant: expected true or false in every row, got "
            f"{relevant.type} with {relevant.null_count} null(s).",
        )
    order: Any = slice(None)  # the order of the file, in which queries usually are grouped
    if (np.diff(query_ids.positions) < 0).any():
        order = np.argsort(query_ids.positions, kind="stable")  # groups the rows of each query
    # In a file with teachers, ``score`` is the combined score of the teachers.
    retriever_column = "retriever_score" if teacher_columns else "score"
    # Documents that were not retrieved have neither a rank nor a retriever's score.
    null_values: dict[str, float | None] = {"rank": 0.0, retriever_column: np.nan}
    if teacher_columns:
        for name in (*teacher_columns, "score"):
            null_values[name] = None  # a null is an error
    columns = _read_numbers(pa, table, null_values, order)
    return TrainingRows(
        queries=query_ids.ids,
        documents=document_ids.ids,
        offsets=offsets_of(np.bincount(query_ids.positions, minlength=len(query_ids.ids))),
        document=document_ids.positions[order],
        relevant=np.asarray(relevant.to_numpy(), bool)[order],
        rank=columns["rank"].astype(np.int32),
        retrieved=columns[retriever_column],
        teachers={name.removeprefix(TEACHER_PREFIX): columns[name] for name in teacher_columns},
        target=columns["score"] if teacher_columns else None,
        made_by=_read_made_by(table.schema_arrow),
    )


def _check_columns(available: list[str], *, has_teachers: bool) -> None:
    """Raise ``DataError`` if a required column is missing.

    Args:
        available: names of the columns of a file.
        has_teachers: whether the file has scores of teachers, which require a combined score.
    """
    required = ["query_id", "document_id", "relevant"]
    if has_teachers:
        required.append("score")
    missing = [name for name in required if name not in available]
    if missing:
        raise DataError(
            f"expected the columns {', '.join(required)}, got {available!r:.80} without "
            f"{missing[0]!r}. {_REMEDY}",
        )


def _read_numbers(
    pa: ModuleType,
    table: Any,
    null_values: Mapping[str, float | None],
    order: Any,
) -> dict[str, Floats]:
    """Read columns of numbers as float32, a few at a time to limit the memory.

    Args:
        pa: the module ``pyarrow``.
        table: the open file.
        null_values: name of a column -> value that replaces nulls, or None if nulls are errors. A
            column that may have nulls may also be missing, and then has only this value.
        order: index of the rows in their new order: row numbers ``[N]``, or a slice of all rows.

    Returns:
        Name of a column -> values in the new order, float32 ``[N]``.
    """
    available = table.schema_arrow.names
    columns: dict[str, Floats] = {}
    for name, null_value in null_values.items():
        if name not in available and null_value is not None:
            columns[name] = np.full(table.metadata.num_rows, null_value, np.float32)
    stored = [name for name in null_values if name in available]
    for start in range(0, len(stored), _COLUMNS_PER_READ):
        part = table.read(stored[start : start + _COLUMNS_PER_READ])
        for name in part.column_names:
            columns[name] = _to_float32(pa, part.column(name), name, null_values[name])[order]
    return columns


def _read_numeric_ids(
    file: Path,
    pa: ModuleType,
    pq: ModuleType,
    table: Any,
    name: str,
) -> _IdColumn | None:
    """Read a column of ids that are integers from 0 with few gaps.

    Such ids are common, and are read faster here than by :func:`_read_ids`.

    Args:
        file: path of the Parquet file.
        pa: the module ``pyarrow``.
        pq: the module ``pyarrow.parquet``.
        table: the open file, whose metadata is used.
        name: name of the column.

    Returns:
        The ids; None if the column has other ids.
    """

    def read_group(group: int) -> list[npt.NDArray[np.int64]]:
        """Read the ids in a row group of the file.

        Each thread opens the file again, because threads cannot share a reader.
        """
        with pq.ParquetFile(file, metadata=table.metadata) as group_file:
            batches = group_file.iter_batches(_ROWS_PER_GROUP, [group], [name])
            return [_to_integers(pa, batch.column(0), name) for batch in batches]

    try:
        with ThreadPoolExecutor(min(_MAX_THREADS, pa.cpu_count())) as pool:
            groups = pool.map(read_group, range(table.num_row_groups))
            parts = list(itertools.chain.from_iterable(groups))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None
    no_numbers = np.empty(0, np.int64)  # concatenate() needs an array if the file has no rows
    numbers = np.concatenate([no_numbers, *parts])
    n_rows = len(numbers)
    # Numbering needs an array with an element for each integer up to the largest id.
    if not n_rows or numbers.min() < 0 or numbers.max() > _MAX_GAP_FACTOR * n_rows:
        return None
    distinct_numbers, positions = _number_in_first_order(numbers)
    ids = pa.array(distinct_numbers).cast(pa.string()).to_pylist()
    return _IdColumn(ids, positions)


def _number_in_first_order(
    values: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Number the distinct values of an array in the order of their first rows.

    Args:
        values: nonempty array of nonnegative integers, ``[N]``.

    Returns:
        The D distinct values in the order of their first rows, int64 ``[D]``, and the number of
        each row's value, int32 ``[N]``.
    """
    n_rows = len(values)
    # Rows are assigned from the last one to the first, so that the first row of a repeated value
    # remains. `n_rows` marks values that do not occur.
    first_row_of_value = np.full(values.max() + 1, n_rows)
    first_row_of_value[values[::-1]] = np.arange(n_rows)[::-1]
    first_rows = np.sort(first_row_of_value[first_row_of_value < n_rows])
    distinct = values[first_rows]
    number_of_value = np.empty(values.max() + 1, np.int32)
    number_of_value[distinct] = np.arange(len(distinct))
    return distinct, number_of_value[values]


def _to_integers(pa: ModuleType, column: Any, name: str) -> npt.NDArray[np.int64]:
    """Convert a column of ids such as ``"7"`` to integers, from which the ids can be restored.

    Args:
        pa: the module ``pyarrow``.
        column: the column.
        name: name of the column, for the error message.

    Raises:
        ArrowInvalid: if the column does not have strings, if a value is missing, or if a value is
            not an integer in its shortest form, such as ``"007"``.
    """
    if not pa.types.is_string(column.type) or column.null_count:
        raise pa.ArrowInvalid(f"{name}: other ids")
    integers = column.cast(pa.int64())
    if not integers.cast(pa.string()).equals(column):
        raise pa.ArrowInvalid(f"{name}: other ids")
    return np.asarray(integers)


def _read_ids(pa: ModuleType, id_table: Any, name: str) -> _IdColumn:
    """Read a column of ids that are strings.

    Args:
        pa: the module ``pyarrow``.
        id_table: the file, opened to read the column in dictionary encoding: each distinct id once,
            and its number in every row.
        name: name of the column.

    Raises:
        DataError: if the column does not have strings, or a row has no id.
    """
    column = id_table.read([name]).column(0)
    if not pa.types.is_dictionary(column.type) or not pa.types.is_string(column.type.value_type):
        raise DataError(f"{name}: expected strings, got {column.type}.")
    if column.null_count:
        raise DataError(f"{name}: expected an id in every row, got {column.null_count} null(s).")
    encoded = column.unify_dictionaries().combine_chunks()
    if not _is_in_first_order(encoded.indices.to_numpy(), len(encoded.dictionary)):
        # The dictionary is sorted, or has ids that no row has: build it again.
        encoded = column.cast(pa.string()).dictionary_encode().combine_chunks()
    positions = encoded.indices.to_numpy().astype(np.int32, copy=False)
    return _IdColumn(encoded.dictionary.to_pylist(), positions)


def _is_in_first_order(positions: npt.NDArray[Any], n_ids: int) -> bool:
    """Return whether a list of distinct ids is in the order of their first rows.

    If it is, each row has either the id of an earlier row or the next id of the list, and the last
    id of the list occurs.

    Args:
        positions: position ``[N]`` of each row's id in the list.
        n_ids: number of ids in the list.
    """
    highest_so_far = np.maximum.accumulate(np.append(np.int32(-1), positions))
    skips_ids = bool((np.diff(highest_so_far) > 1).any())
    return not skips_ids and bool(highest_so_far[-1] == n_ids - 1)


def _to_float32(pa: ModuleType, column: Any, name: str, null_value: float | None) -> Floats:
    """Convert a column of numbers to float32.

    Args:
        pa: the module ``pyarrow``.
        column: the column.
        name: name of the column, for error messages.
        null_value: value that replaces nulls, or None if nulls are errors.

    Raises:
        DataError: if the column is not numeric, or has nulls and `null_value` is None.
    """
    if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
        raise DataError(f"{name}: expected numbers, got {column.type}.")
    if column.null_count and null_value is None:
        raise DataError(f"{name}: expected a number in every row, got {column.null_count} null(s).")
    if not pa.types.is_float32(column.type):
        # An unsafe cast rounds large integers. numpy then rounds float64 to float32.
        column = column.cast(pa.float64(), safe=False)
    if null_value is not None:
        column = column.fill_null(null_value)
    values: Floats = column.to_numpy().astype(np.float32, copy=False)
    return values


def _read_made_by(schema: Any) -> Json:
    """Return how the rows of a file were made, from the metadata of its schema.

    Args:
        schema: the Arrow schema.

    Returns:
        The JSON object that becomes ``TrainingRows.made_by``; empty if there is no metadata.

    Raises:
        DataError: if the metadata is not JSON, or has another version.
    """
    text = (schema.metadata or {}).get(METADATA_KEY)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"metadata: expected JSON, got other text ({error}). {_REMEDY}") from error
    version = value.pop("schema_version", None) if isinstance(value, dict) else None
    if version != SCHEMA_VERSION:
        raise DataError(
            f"metadata: expected schema_version {SCHEMA_VERSION}, got {version!r}. {_REMEDY}",
        )
    return dict(value)
