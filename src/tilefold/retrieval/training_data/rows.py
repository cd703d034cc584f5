"""Mined negatives and teacher scores in one Parquet file, with a row per query and document.

===================  =======  ==================================================================
column               type     meaning
===================  =======  ==================================================================
``query_id``         string   rows of a query follow one another
``document_id``      string   at most once per query
``rank``             int32    rank in the retriever's list, from 1, where judged documents have
                              ranks, too; null if the document was not retrieved
``score``            float32  mined file: the retriever's score, null if not retrieved;
                              scored file: the score of the teachers together
``relevant``         bool     judged relevant; other rows are negatives
``retriever_score``  float32  scored file only: ``score`` of the mined file
``score:<teacher>``  float32  scored file only: score of a teacher, before normalisation
===================  =======  ==================================================================

A file is scored if it has a column ``score:<teacher>``. A JSON object under the key ``tilefold`` of
the schema's metadata describes how the rows were made. ``tilefold mine`` writes such files and
``tilefold score`` adds the teachers. Files of other programs can be read if they have the columns
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

TEACHER = "score:"
METADATA = b"tilefold"
SCHEMA_VERSION = 1
# Suffixes of the files of MS MARCO.
PUBLISHED = (".tsv", ".tsv.gz", ".json", ".json.gz", ".jsonl", ".jsonl.gz")
NARROW_RANGE = 1e-4  # range of a query's scores within which a teacher prefers no document
NARROW_SHARE = 0.5  # share of queries from which on a teacher is narrow
_ROWS_PER_GROUP = 1 << 20
_COLUMNS_PER_READ = 2  # one per core; more columns would need more memory
_MAX_THREADS = 8  # that read ids, one group of rows each
_MAX_GAP_FACTOR = 4  # numeric ids up to this multiple of the number of rows are numbered directly
_N_SHOWN_OFFSETS = 9
_IDS = ["query_id", "document_id"]
_COLUMNS = ("document", "relevant", "rank", "retrieved")  # of every table, in addition to scores
_REMEDY = "Make it again: tilefold mine, then tilefold score."

Floats = npt.NDArray[np.float32]
# Distinct ids in the order of their first row, and the position of each row's id among them.
NumberedIds = tuple[list[str], npt.NDArray[np.int32]]


class QueryRows(NamedTuple):
    """The rows of one query, as arrays ``[n]``; columns as in :class:`TrainingRows`."""

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

    The rows of query `i` are ``offsets[i]:offsets[i + 1]``.

    Attributes:
        queries: Q distinct ids.
        documents: D distinct ids.
        offsets: int64 ``[Q + 1]``, rising from 0 to N.
        document: int32 ``[N]``, positions in `documents`; a document at most once per query.
        relevant: bool ``[N]``.
        rank: int32 ``[N]``, from 1; 0 where not retrieved.
        retrieved: float32 ``[N]``, the retriever's score; NaN where not retrieved.
        teachers: name -> float32 ``[N]``, finite, as the teacher gave it.
        target: float32 ``[N]``, finite, the score to train with; None without teachers.
        made_by: JSON object that describes how the rows were made; ``texts_sha256`` and
            ``queries_sha256`` are fingerprints.

    Raises:
        TypeError: for a column that is no array of numbers.
        DataError: if shapes do not fit, a query has a document twice, or a score is not finite.
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
        if bool(self.teachers) != (self.target is not None):
            missing = "no target" if self.target is None else "no teachers"
            raise DataError(
                "target: expected it together with the scores of one teacher at least, got "
                f"{missing}.",
            )
        for name, scores in self._scores().items():
            is_finite = np.isfinite(scores)
            if not is_finite.all():
                row = int(np.flatnonzero(~is_finite)[0])
                raise DataError(f"{name}: {self._describe_row(row)} has no finite score.")
        self._check_documents_differ()

    def _convert(self) -> None:
        """Convert ids to lists and columns to arrays, by position."""
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
        for name, values in {**self._scores(), **self._columns()}.items():
            if values.ndim == 0 or values.dtype.kind not in "biuf":
                raise TypeError(
                    f"{name}: expected one number per row, got {values.ndim} dimensions of "
                    f"{values.dtype}; pass an array of numbers.",
                )
        if self.offsets.ndim == 0 or self.offsets.dtype.kind not in "iuf":
            raise TypeError(
                f"offsets: expected integers, got {self.offsets.ndim} dimensions of "
                f"{self.offsets.dtype}; pass an array of {len(self.queries) + 1} integers.",
            )

    def _columns(self) -> dict[str, npt.NDArray[Any]]:
        """Return the columns without the scores of teachers, by name."""
        return {name: getattr(self, name) for name in _COLUMNS}

    def _scores(self) -> dict[str, Floats]:
        """Return the scores of the teachers and the target, by name."""
        return self.teachers if self.target is None else {**self.teachers, "target": self.target}

    def _check_offsets(self) -> None:
        """Raise ``DataError`` for offsets that do not divide the rows among the queries.

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
        for name, values in {**self._columns(), **self._scores()}.items():
            if values.shape != (len(self),):
                raise DataError(
                    f"{name}: expected {len(self)} values, one per row, got shape {values.shape}.",
                )

    def _check_documents_differ(self) -> None:
        """Raise ``DataError`` if a query has a document twice.

        Queries are compared block by block, which limits the memory. A block has the queries of
        about ``_ROWS_PER_GROUP`` rows.
        """
        block_starts = np.arange(0, len(self) + _ROWS_PER_GROUP, _ROWS_PER_GROUP)
        boundaries = np.minimum(np.searchsorted(self.offsets, block_starts), len(self.queries))
        for first_query, end_query in itertools.pairwise(boundaries.tolist()):
            start = int(self.offsets[first_query])
            n_rows = np.diff(self.offsets[first_query : end_query + 1])
            # A key is (number of the query in the block) * (number of documents) + document, so
            # that rows have equal keys only if they have the same query and document.
            keys = np.repeat(np.arange(len(n_rows)) * max(1, len(self.documents)), n_rows)
            keys += self.document[start : start + len(keys)]
            order = np.argsort(keys, kind="stable")
            repeated = np.flatnonzero(np.diff(keys[order]) == 0)
            if repeated.size:
                row = start + int(order[repeated[0] + 1])
                raise DataError(
                    f"rows: {self._describe_row(row)} is given twice. Keep one row of it.",
                )

    def _describe_row(self, row: int) -> str:
        """Return the document and the query of a row, for errors."""
        query = int(np.searchsorted(self.offsets, row, side="right")) - 1
        return f"document {self.documents[self.document[row]]!r} of query {self.queries[query]!r}"

    def __len__(self) -> int:
        """Return N, the number of rows."""
        return len(self.document)

    @property
    def scored(self) -> bool:
        """Whether the rows have scores of teachers."""
        return self.target is not None

    @property
    def provenance(self) -> Provenance:
        """Fingerprints of the retriever's model and of the documents, where known."""
        return Provenance.from_dict(self.made_by)

    def narrow_teachers(self) -> dict[str, float]:
        """Find teachers whose scores hardly distinguish the documents of a query.

        A sigmoid at the end of a cross-encoder has this effect. Normalisation per query would then
        stretch rounding errors to the range of real differences.

        Returns:
            Name of a teacher -> share of the queries, at least :data:`NARROW_SHARE`, whose scores
            are all within :data:`NARROW_RANGE`. Queries of a single document do not count.
        """
        counts = np.diff(self.offsets)
        # reduceat() needs a row per query, so that queries without rows are left out.
        starts = self.offsets[:-1][counts > 0]
        compared = counts[counts > 0] > 1  # queries with two documents or more
        shares: dict[str, float] = {}
        if not compared.any():  # every query has one document at most
            return shares
        for name, scores in self.teachers.items():
            highest = np.maximum.reduceat(scores, starts)[compared]
            lowest = np.minimum.reduceat(scores, starts)[compared]
            share = float((highest.astype(np.float64) - lowest < NARROW_RANGE).mean())
            if share >= NARROW_SHARE:
                shares[name] = share
        return shares

    def narrow_teacher_warnings(self) -> list[str]:
        """Return a warning about each of the :meth:`narrow_teachers`."""
        return [
            f"the teacher {name!r} scores all documents of a query within {NARROW_RANGE:g} for "
            f"{share:.0%} of the queries: there is nothing to learn from them. A sigmoid at the "
            "end of a teacher does this: take its raw logits, or another teacher."
            for name, share in self.narrow_teachers().items()
        ]

    def query_of_row(self) -> npt.NDArray[np.int64]:
        """Return the position of each row's query, int64 ``[N]``."""
        return np.repeat(np.arange(len(self.queries), dtype=np.int64), np.diff(self.offsets))

    def groups(self) -> Iterator[QueryRows]:
        """Yield the rows of each query, in order."""
        for position, query in enumerate(self.queries):
            rows = slice(int(self.offsets[position]), int(self.offsets[position + 1]))
            yield QueryRows(
                query=query,
                documents=[self.documents[document] for document in self.document[rows].tolist()],
                relevant=self.relevant[rows],
                rank=self.rank[rows],
                retrieved=self.retrieved[rows],
                target=None if self.target is None else self.target[rows],
                teachers={name: scores[rows] for name, scores in self.teachers.items()},
            )

    def take(self, keep: npt.NDArray[np.bool_]) -> TrainingRows:
        """Return the rows where `keep` ``[N]`` is true.

        Queries without such a row are left out. Documents are not.
        """
        n_rows = np.bincount(self.query_of_row()[keep], minlength=len(self.queries))
        return replace(
            self,
            queries=[
                query for query, count in zip(self.queries, n_rows.tolist(), strict=True) if count
            ],
            offsets=offsets_of(n_rows[n_rows > 0]),
            document=self.document[keep],
            relevant=self.relevant[keep],
            rank=self.rank[keep],
            retrieved=self.retrieved[keep],
            teachers={name: scores[keep] for name, scores in self.teachers.items()},
            target=None if self.target is None else self.target[keep],
            made_by=dict(self.made_by),
        )

    def check_collection(self, collection: Collection) -> npt.NDArray[np.int64]:
        """Check that the rows were made from the texts of a collection.

        Returns:
            The position of each of the D documents in `collection`, ``[D]``.

        Raises:
            DataError: if the collection lacks a query or a document, or the texts have another
                fingerprint.
        """
        positions = collection.positions_of(self.documents)
        for query in self.queries:
            if query not in collection.queries:
                raise _other_collection_error("query", query, collection)
        unknown = np.flatnonzero(positions < 0)
        if unknown.size:
            raise _other_collection_error("document", self.documents[unknown[0]], collection)
        self._check_digest("texts_sha256", "documents", collection.contents(), collection)
        self._check_digest("queries_sha256", "queries", queries_of(self, collection), collection)
        return positions

    def _check_digest(
        self,
        key: str,
        texts_name: str,
        texts: Mapping[str, str],
        collection: Collection,
    ) -> None:
        """Raise ``DataError`` if the rows record a digest of other texts than these.

        Args:
            key: entry of ``made_by`` with the digest. Rows without the entry are not compared.
            texts_name: ``"documents"`` or ``"queries"``, for the error.
            texts: id -> text in the collection.
            collection: the collection, for the error.
        """
        digest = self.made_by.get(key)
        if digest is not None and digest != texts_digest(texts):
            raise DataError(
                f"training rows: they were made from other {texts_name} than those of "
                f"{collection.name}, which has changed since or is another one. {_REMEDY}",
            )


def _other_collection_error(kind: str, text_id: str, collection: Collection) -> DataError:
    return DataError(
        f"training rows: {kind} {text_id!r} is not in {collection.name}; they were made from "
        f"another collection. Give that one. {_REMEDY}",
    )


def queries_of(rows: TrainingRows, collection: Collection) -> dict[str, str]:
    """Return query id -> text of the queries of `rows`, in their order."""
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
    """Write rows as the Parquet file of this module's table, atomically.

    Args:
        rows: the rows, at least one.
        path: the file.
        overwrite: replace a file that exists.

    Raises:
        FileExistsError: if the file exists, without `overwrite`.
        ValueError: if there is no row.
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
            retrieved = pa.array(rows.retrieved[part], mask=np.isnan(rows.retrieved[part]))
            columns = {
                "query_id": [rows.queries[query] for query in query_of_row[part].tolist()],
                "document_id": [rows.documents[row] for row in rows.document[part].tolist()],
                "rank": pa.array(rows.rank[part], mask=rows.rank[part] == 0),
                "score": retrieved if rows.target is None else rows.target[part],
                "relevant": rows.relevant[part],
                "retriever_score": retrieved,
            }
            for name, scores in rows.teachers.items():
                columns[TEACHER + name] = scores[part]
            stored_columns = {name: columns[name] for name in schema.names}
            writer.write_table(pa.table(stored_columns, schema=schema))


def _schema_of(pa: ModuleType, rows: TrainingRows) -> Any:
    """Return the Arrow schema of a file of training rows.

    Args:
        pa: the module ``pyarrow``.
        rows: the rows. Scored rows have further columns. How the rows were made becomes metadata.
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
        fields += [(TEACHER + name, pa.float32()) for name in rows.teachers]
    made_by = {"schema_version": SCHEMA_VERSION, **rows.made_by}
    return pa.schema(
        fields,
        metadata={METADATA: json.dumps(made_by, ensure_ascii=False).encode()},
    )


def read_training_rows(path: str | Path) -> TrainingRows:
    """Read training rows from Parquet, or from one of the formats of MS MARCO.

    A Parquet file has the table of this module. Files of MS MARCO have lines of three ids with tabs
    between them (query, relevant, negative), or of JSON: ``[query, relevant, negative, ..]``;
    ``[query, [document, score], ..]``, the relevant document first; or ``{"qid": .., "pos": [..],
    "neg": {name: [..]}}``.

    Raises:
        FileNotFoundError: if there is no such file.
        DataError: if the file is not Parquet, a column, type or value is wrong, a score is not
            finite, or a query has a document twice.
    """
    file = path_of("path", path)
    if not file.is_file():
        raise FileNotFoundError(
            f"{file}: no such file of training rows. Make one with: tilefold mine",
        )
    pa, pq = arrow("Storing training rows")
    try:
        if file.name.endswith(PUBLISHED):
            return TrainingRows(**read_published(file))
        with pq.ParquetFile(file) as table, pq.ParquetFile(file, read_dictionary=_IDS) as encoded:
            return _from_table(file, pa, pq, table, encoded)
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{file}: expected Parquet with training rows, got ({error}). {_REMEDY}",
        ) from error
    except DataError as error:
        raise DataError(f"{file}: {error}") from error


class RowsAhead:
    """Path of a file of training rows that a thread reads in the meantime."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        pool = ThreadPoolExecutor(1)
        self._pending_reads = [pool.submit(read_training_rows, path)]
        pool.shutdown(wait=False)

    def __fspath__(self) -> str:
        return self.path

    __str__ = __fspath__

    def take(self) -> TrainingRows:
        """Return the rows and release them. A second call reads the file again."""
        if self._pending_reads:
            return self._pending_reads.pop().result()
        return read_training_rows(self.path)


def _from_table(
    file: Path,
    pa: ModuleType,
    pq: ModuleType,
    table: Any,
    encoded: Any,
) -> TrainingRows:
    """Return the rows of a Parquet file.

    Args:
        file: its path.
        pa: the module ``pyarrow``.
        pq: the module ``pyarrow.parquet``.
        table: the open file.
        encoded: the open file whose ids are read as dictionaries.
    """
    available = table.schema_arrow.names
    teacher_columns = [name for name in available if name.startswith(TEACHER)]
    _check_columns(available, has_teachers=bool(teacher_columns))
    queries, query = _read_ids(pa, encoded, "query_id")
    numeric_documents = _read_numeric_ids(file, pa, pq, table, "document_id")
    documents, document = numeric_documents or _read_ids(pa, encoded, "document_id")
    relevant = table.read(["relevant"]).column(0)
    if not pa.types.is_boolean(relevant.type) or relevant.null_count:
        raise DataError(
            "relevant: expected true or false in every row, got "
            f"{relevant.type} with nulls or numbers.",
        )
    order: Any = slice(None)
    are_grouped = not bool((np.diff(query) < 0).any())
    if not are_grouped:
        order = np.argsort(query, kind="stable")  # puts the rows of a query together
    # Name of a column -> value of its nulls, None where nulls are an error.
    retriever_column = "retriever_score" if teacher_columns else "score"
    null_values: dict[str, float | None] = {"rank": 0.0, retriever_column: np.nan}
    if teacher_columns:
        null_values.update(dict.fromkeys([*teacher_columns, "score"]))
    columns = _read_numbers(pa, table, null_values, order)
    return TrainingRows(
        queries=queries,
        documents=documents,
        offsets=offsets_of(np.bincount(query, minlength=len(queries))),
        document=document[order],
        relevant=np.asarray(relevant.to_numpy(), bool)[order],
        rank=columns["rank"].astype(np.int32),
        retrieved=columns[retriever_column],
        teachers={name.removeprefix(TEACHER): columns[name] for name in teacher_columns},
        target=columns["score"] if teacher_columns else None,
        made_by=_read_made_by(table.schema_arrow),
    )


def _check_columns(available: list[str], *, has_teachers: bool) -> None:
    """Raise ``DataError`` if a required column is missing."""
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
    """Read columns of numbers as float32, a few at a time.

    Args:
        pa: the module ``pyarrow``.
        table: the open file.
        null_values: name of a column -> value of its nulls, None where nulls are an error. A
            missing column has this value in every row.
        order: row numbers ``[N]`` or a slice, which sort the rows by query.

    Returns:
        Name of a column -> its sorted values, float32 ``[N]``.
    """
    available = table.schema_arrow.names
    columns: dict[str, Floats] = {}
    for name, null_value in null_values.items():
        if name not in available:
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
) -> NumberedIds | None:
    """Read a column of ids that are integers from 0 with few gaps.

    Such ids are common, and are read faster here than by :func:`_read_ids`.

    Args:
        file: path of the Parquet file.
        pa: the module ``pyarrow``.
        pq: the module ``pyarrow.parquet``.
        table: the open file, whose metadata is used.
        name: name of the column.

    Returns:
        The distinct ids, in the order of their first rows, and for each row the position of its id
        among them. None if the column has other ids.
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
    no_numbers = np.empty(0, np.int64)  # for a file without rows
    numbers = np.concatenate([no_numbers, *parts])
    n_rows = len(numbers)
    # The tables below have an entry for each integer up to the largest id.
    if not n_rows or numbers.min() < 0 or numbers.max() > _MAX_GAP_FACTOR * n_rows:
        return None
    distinct, position_of_row = _number_in_first_order(numbers)
    ids = pa.array(distinct).cast(pa.string()).to_pylist()
    return ids, position_of_row


def _number_in_first_order(
    numbers: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Number the distinct values of an array in the order of their first rows.

    Args:
        numbers: integers of at least 0, ``[N]``, at least one.

    Returns:
        The D distinct values in the order of their first rows, int64 ``[D]``, and for each row the
        position of its value among them, int32 ``[N]``.
    """
    n_rows = len(numbers)
    # Value -> first row with it; `n_rows` for a value that does not occur. Rows are assigned from
    # the last one to the first, so that the first row of a repeated value remains.
    first_row = np.full(numbers.max() + 1, n_rows)
    first_row[numbers[::-1]] = np.arange(n_rows)[::-1]
    distinct = numbers[np.sort(first_row[first_row < n_rows])]
    position_of_value = first_row  # its memory is used again
    position_of_value[distinct] = np.arange(len(distinct))
    return distinct, position_of_value[numbers].astype(np.int32)


def _to_integers(pa: ModuleType, column: Any, name: str) -> npt.NDArray[np.int64]:
    """Return strings as integers; ``ArrowInvalid`` if they are not integers in shortest form."""
    integers = column.cast(pa.int64())
    is_exact = (
        pa.types.is_string(column.type)
        and not column.null_count
        and integers.cast(pa.string()).equals(column)
    )
    if not is_exact:
        raise pa.ArrowInvalid(f"{name}: other ids")
    return np.asarray(integers)


def _read_ids(pa: ModuleType, table: Any, name: str) -> NumberedIds:
    """Read a column of ids that are strings.

    Returns:
        The distinct ids, in the order of their first rows, and for each row the position of its id
        among them.

    Raises:
        DataError: for another column, or a row without an id.
    """
    id_table = table.read([name])
    column = id_table.column(0)
    if not pa.types.is_dictionary(column.type) or not pa.types.is_string(column.type.value_type):
        raise DataError(f"{name}: expected strings, got {column.type}.")
    if column.null_count:
        raise DataError(f"{name}: expected an id in every row, got {column.null_count} null(s).")
    encoded = id_table.unify_dictionaries().column(0).combine_chunks()
    # The dictionary has the ids in the order of their first rows if each row's position exceeds all
    # earlier ones by at most 1, and the last id occurs.
    highest = np.maximum.accumulate(np.append(np.int32(-1), encoded.indices.to_numpy()))
    is_in_first_order = highest[-1] == len(encoded.dictionary) - 1 and not bool(
        (np.diff(highest) > 1).any()
    )
    if not is_in_first_order:
        # The dictionary is sorted, or has ids of rows that were removed: it is built again.
        encoded = column.cast(pa.string()).dictionary_encode().combine_chunks()
    return encoded.dictionary.to_pylist(), encoded.indices.to_numpy().astype(np.int32, copy=False)


def _to_float32(pa: ModuleType, column: Any, name: str, null_value: float | None) -> Floats:
    """Return a column as float32, with `null_value` for nulls.

    Raises:
        DataError: if the column has no numbers, or has nulls and `null_value` is None.
    """
    if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
        raise DataError(f"{name}: expected numbers, got {column.type}.")
    if column.null_count and null_value is None:
        raise DataError(f"{name}: expected a number in every row, got {column.null_count} null(s).")
    numbers = column if pa.types.is_float32(column.type) else column.cast(pa.float64(), safe=False)
    if null_value is not None:
        numbers = numbers.fill_null(null_value)
    values: Floats = numbers.to_numpy().astype(np.float32, copy=False)
    return values


def _read_made_by(schema: Any) -> Json:
    """Return the JSON object in the metadata of a schema; an empty one without metadata."""
    text = (schema.metadata or {}).get(METADATA)
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
