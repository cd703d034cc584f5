"""Mined negatives and teacher scores on disk: one Parquet file, a row per query and document.

===================  =======  ==============================================================================
column               type     meaning
===================  =======  ==============================================================================
``query_id``         string   rows of a query stand together
``document_id``      string   at most once per query
``rank``             int32    in the retriever's list, from 1, judged documents counted; null if not retrieved
``score``            float32  mined file: the retriever's (null if not retrieved); scored file: the teachers'
``relevant``         bool     judged relevant; the other rows are negatives
``retriever_score``  float32  scored file only: what ``score`` was when the rows were mined
``score:<teacher>``  float32  scored file only: what each teacher gave, before normalisation
===================  =======  ==============================================================================

A file is scored when it has a column ``score:<teacher>``. What made it is a JSON object under the
key ``tilefold`` of the schema's metadata. ``tilefold mine`` writes such files and ``tilefold
score`` adds the teachers; files of other programs are read too, of which only ``query_id``,
``document_id`` and ``relevant`` are required (and ``score`` where there are teachers).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tilefold._internal.arguments import check_instance, list_of, path_of
from tilefold._internal.files import atomic_file
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
PUBLISHED = (
    ".tsv",
    ".tsv.gz",
    ".json",
    ".json.gz",
    ".jsonl",
    ".jsonl.gz",
)  # ends of the names of MS MARCO's files
NARROW_RANGE = 1e-4  # of the scores of a query's documents, in which a teacher prefers none
NARROW_SHARE = 0.5  # of the queries, from which a teacher counts as narrow
_ROWS_PER_GROUP = 1 << 20
_COLUMNS_AT_ONCE = 2  # read by two cores; more of them would need more memory
_THREADS = 8  # that read ids, a group of rows each
_IDS = ["query_id", "document_id"]
_COLUMNS = ("document", "relevant", "rank", "retrieved")  # of every table, beside its scores
_REMEDY = "Make it again: tilefold mine, then tilefold score."

Floats = npt.NDArray[np.float32]
Numbered = tuple[list[str], npt.NDArray[np.int32]]  # distinct ids, and which is whose


class QueryRows(NamedTuple):
    """The rows of one query: arrays ``[n]`` in the order of `documents`; columns as in
    :class:`TrainingRows`.
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
    """Q queries with N rows over D documents, in memory; rows of query `i` are
    ``offsets[i]:offsets[i + 1]``.

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
        made_by: JSON object that says what made the rows; ``texts_sha256`` and ``queries_sha256``
            are fingerprints.

    Shapes that do not fit, a document given twice for a query, or a score that is not finite are a
    ``DataError``.
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
        self._convert()
        n, needed = len(self), len(self.queries) + 1
        if (
            len(self.offsets) != needed
            or self.offsets[0] != 0
            or bool((np.diff(self.offsets) < 0).any())
        ):
            raise DataError(
                f"offsets: expected {needed} numbers that rise from 0, got {self.offsets.tolist()[:9]}.",
            )
        for name, values in (
            {name: getattr(self, name) for name in _COLUMNS} | self._scores()
        ).items():
            if values.shape != (n,):
                raise DataError(
                    f"{name}: expected {n} values, one per row, got shape {values.shape}.",
                )
        if bool(self.teachers) != (self.target is not None):
            alone = "no target" if self.target is None else "no teachers"
            raise DataError(
                f"target: expected it together with the scores of one teacher at least, got {alone}.",
            )
        for name, values in self._scores().items():
            if not np.isfinite(values).all():
                row = self._row(int(np.flatnonzero(~np.isfinite(values))[0]))
                raise DataError(f"{name}: {row} has no finite score.")
        self._check_once()

    def _convert(self) -> None:
        """Convert ids to lists and columns to arrays, by position."""
        self.queries = list_of("queries", self.queries)
        self.documents = list_of("documents", self.documents)
        self.offsets = np.asarray(self.offsets)
        for name in _COLUMNS:
            setattr(self, name, np.asarray(getattr(self, name)))
        self.teachers = {name: np.asarray(scores) for name, scores in self.teachers.items()}
        if self.target is not None:
            self.target = np.asarray(self.target)

    def _scores(self) -> dict[str, Floats]:
        return self.teachers if self.target is None else {**self.teachers, "target": self.target}

    def _check_once(self) -> None:
        bounds = np.searchsorted(
            self.offsets,
            np.arange(0, len(self) + _ROWS_PER_GROUP, _ROWS_PER_GROUP),
        )
        for first, last in itertools.pairwise(np.minimum(bounds, len(self.queries)).tolist()):
            low, counts = int(self.offsets[first]), np.diff(self.offsets[first : last + 1])
            keys = np.repeat(np.arange(len(counts)) * max(1, len(self.documents)), counts)
            keys += self.document[low : low + len(keys)]
            order = np.argsort(keys, kind="stable")
            twice = np.flatnonzero(np.diff(keys[order]) == 0)
            if twice.size:
                row = self._row(low + int(order[twice[0] + 1]))
                raise DataError(f"rows: {row} is given twice. Keep one row of it.")

    def _row(self, at: int) -> str:
        query = int(np.searchsorted(self.offsets, at, side="right")) - 1
        return f"document {self.documents[self.document[at]]!r} of query {self.queries[query]!r}"

    def __len__(self) -> int:
        """N, the number of rows."""
        return len(self.document)

    @property
    def scored(self) -> bool:
        return self.target is not None

    @property
    def provenance(self) -> Provenance:
        """Fingerprints of the retriever's model and of the documents, where known."""
        return Provenance.from_dict(self.made_by)

    def narrow_teachers(self) -> dict[str, float]:
        """Teachers that hardly tell documents apart, by their scores before normalisation.

        A sigmoid at the end of a cross-encoder does this. Normalisation per query then stretches
        rounding errors to the range of real differences.

        Returns:
            Name of a teacher -> share of the queries, at least :data:`NARROW_SHARE`, whose scores
            are all within :data:`NARROW_RANGE`. Queries of a single document do not count.
        """
        counts = np.diff(self.offsets)
        starts = self.offsets[:-1][counts > 0]
        compared = counts[counts > 0] > 1
        shares: dict[str, float] = {}
        for name, scores in self.teachers.items() if compared.any() else ():
            highest = np.maximum.reduceat(scores, starts)[compared]
            lowest = np.minimum.reduceat(scores, starts)[compared]
            share = float((highest.astype(np.float64) - lowest < NARROW_RANGE).mean())
            if share >= NARROW_SHARE:
                shares[name] = share
        return shares

    def narrow_teacher_warnings(self) -> list[str]:
        """A warning about each of the :meth:`narrow_teachers`."""
        return [
            f"the teacher {name!r} scores all documents of a query within {NARROW_RANGE:g} for "
            f"{share:.0%} of the queries: there is nothing to learn from them. A sigmoid at the end "
            "of a teacher does this: take its raw logits, or another teacher."
            for name, share in self.narrow_teachers().items()
        ]

    def query_of_row(self) -> npt.NDArray[np.int64]:
        """int64 ``[N]``: the position of each row's query."""
        return np.repeat(np.arange(len(self.queries), dtype=np.int64), np.diff(self.offsets))

    def _part(self, rows: slice | npt.NDArray[np.bool_]) -> Json:
        """The columns of some rows, by attribute."""
        teachers = {name: scores[rows] for name, scores in self.teachers.items()}
        target = None if self.target is None else self.target[rows]
        return {name: getattr(self, name)[rows] for name in _COLUMNS} | {
            "teachers": teachers,
            "target": target,
        }

    def groups(self) -> Iterator[QueryRows]:
        """The rows query by query, in order."""
        for query, low, high in zip(
            self.queries,
            self.offsets[:-1].tolist(),
            self.offsets[1:].tolist(),
            strict=True,
        ):
            part = self._part(slice(low, high))
            yield QueryRows(
                query,
                [self.documents[i] for i in part.pop("document").tolist()],
                **part,
            )

    def take(self, keep: npt.NDArray[np.bool_]) -> TrainingRows:
        """The rows where `keep` ``[N]`` is true; queries without any are left out, documents are
        not.
        """
        counts = np.bincount(self.query_of_row()[keep], minlength=len(self.queries))
        queries = [
            query for query, count in zip(self.queries, counts.tolist(), strict=True) if count
        ]
        offsets, made_by = offsets_of(counts[counts > 0]), dict(self.made_by)
        return replace(self, queries=queries, offsets=offsets, made_by=made_by, **self._part(keep))

    def check_collection(self, collection: Collection) -> npt.NDArray[np.int64]:
        """The place of each of the D documents in `collection`, ``[D]``.

        Raises ``DataError`` unless the rows are of its texts, by ids and by known fingerprints.
        """
        places = collection.places(self.documents)
        unknown = np.flatnonzero(places < 0)
        for what, stray in (
            (
                "query",
                next((name for name in self.queries if name not in collection.queries), None),
            ),
            ("document", self.documents[unknown[0]] if unknown.size else None),
        ):
            if stray is not None:
                said = f"is not in {collection.name}; they were made from another collection. Give that one"
                raise DataError(f"training rows: {what} {stray!r} {said}. {_REMEDY}")
        digests = {
            "texts_sha256": collection.contents(),
            "queries_sha256": queries_of(self, collection),
        }
        for key, texts in digests.items():
            if (known := self.made_by.get(key)) is not None and known != texts_digest(texts):
                what = "documents" if key == "texts_sha256" else "queries"
                said = f"those of {collection.name}, which has changed since or is another one"
                raise DataError(
                    f"training rows: they were made from other {what} than {said}. {_REMEDY}",
                )
        return places


def queries_of(rows: TrainingRows, collection: Collection) -> dict[str, str]:
    """Query id -> text, of the queries of `rows`, in their order."""
    return {query: collection.queries[query] for query in rows.queries}


def check_rows(name: str, rows: object) -> None:
    """Raise ``TypeError`` unless an argument is :class:`TrainingRows`."""
    check_instance(name, rows, TrainingRows, "read_training_rows(path)")


def write_training_rows(rows: TrainingRows, path: str | Path) -> None:
    """Write the Parquet file of this module's table, atomically; ValueError where there is no row."""
    check_rows("rows", rows)
    pa, pq = arrow("Storing training rows")
    if not len(rows):
        raise ValueError("rows: expected at least one row, got an empty table.")
    fields = [("query_id", pa.string()), ("document_id", pa.string()), ("rank", pa.int32())]
    fields += [("score", pa.float32()), ("relevant", pa.bool_())]
    if rows.scored:
        fields += [
            ("retriever_score", pa.float32()),
            *((TEACHER + name, pa.float32()) for name in rows.teachers),
        ]
    made_by = json.dumps(
        {"schema_version": SCHEMA_VERSION, **rows.made_by},
        ensure_ascii=False,
    ).encode()
    schema = pa.schema(fields, metadata={METADATA: made_by})
    query = rows.query_of_row()
    with (
        atomic_file(path_of("path", path)) as temporary,
        pq.ParquetWriter(temporary, schema, compression="zstd") as writer,
    ):
        for low in range(0, len(rows), _ROWS_PER_GROUP):
            part = slice(low, low + _ROWS_PER_GROUP)
            found = pa.array(rows.retrieved[part], mask=np.isnan(rows.retrieved[part]))
            columns = {
                "query_id": [rows.queries[i] for i in query[part].tolist()],
                "document_id": [rows.documents[i] for i in rows.document[part].tolist()],
                "rank": pa.array(rows.rank[part], mask=rows.rank[part] == 0),
                "score": found if rows.target is None else rows.target[part],
                "relevant": rows.relevant[part],
                "retriever_score": found,
                **{TEACHER + name: scores[part] for name, scores in rows.teachers.items()},
            }
            writer.write_table(
                pa.table({name: columns[name] for name in schema.names}, schema=schema),
            )


def read_training_rows(path: str | Path) -> TrainingRows:
    """Read what :func:`write_training_rows`, or another program, wrote; or one of the files that MS
    MARCO comes with.

    Those are lines of three ids with tabs (query, relevant, negative), or of JSON: ``[query,
    relevant, negative, ..]``; ``[query, [document, score], ..]``, the relevant one first; ``{"qid":
    .., "pos": [..], "neg": {name: [..]}}``.

    ``DataError`` says what is no Parquet, column, type, value or finite score, and which document
    comes twice.
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
    """The path of a file of training rows, which a thread reads meanwhile."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        pool = ThreadPoolExecutor(1)
        self._reading = [pool.submit(read_training_rows, path)]
        pool.shutdown(wait=False)

    def __fspath__(self) -> str:
        return self.path

    __str__ = __fspath__

    def take(self) -> TrainingRows:
        """The rows, which are not held: taken again, they are read again."""
        return self._reading.pop().result() if self._reading else read_training_rows(self.path)


def _from_table(
    file: Path,
    pa: ModuleType,
    pq: ModuleType,
    table: Any,
    encoded: Any,
) -> TrainingRows:
    known = table.schema_arrow.names
    names = [name for name in known if name.startswith(TEACHER)]
    needed = ("query_id", "document_id", "relevant", *(("score",) if names else ()))
    if missing := [name for name in needed if name not in known]:
        got = f"{known!r:.80} without {missing[0]!r}"
        raise DataError(f"expected the columns {', '.join(needed)}, got {got}. {_REMEDY}")
    queries, query = _ids(pa, encoded, "query_id")
    documents, document = _numbered(file, pa, pq, table, "document_id") or _ids(
        pa,
        encoded,
        "document_id",
    )
    flags = table.read(["relevant"]).column(0)
    if not pa.types.is_boolean(flags.type) or flags.null_count:
        raise DataError(
            f"relevant: expected true or false in every row, got {flags.type} with nulls or numbers.",
        )
    order: Any = slice(None)
    if bool((np.diff(query) < 0).any()):
        order = np.argsort(query, kind="stable")  # rows of a query together, in their order
    retriever = "retriever_score" if names else "score"
    nulls = {"rank": 0.0, retriever: np.nan, **dict.fromkeys((*names, "score") if names else ())}
    values = {
        name: np.full(len(query), null, np.float32)
        for name, null in nulls.items()
        if name not in known
    }
    stored = [name for name in nulls if name in known]
    for low in range(0, len(stored), _COLUMNS_AT_ONCE):
        part = table.read(stored[low : low + _COLUMNS_AT_ONCE])
        for name in part.column_names:
            values[name] = _numbers(pa, part.column(name), name, nulls[name])[order]
    offsets = offsets_of(np.bincount(query, minlength=len(queries)))
    arrays = (
        document[order],
        np.asarray(flags.to_numpy(), bool)[order],
        values["rank"].astype(np.int32),
    )
    teachers, target = (
        {name.removeprefix(TEACHER): values[name] for name in names},
        values["score"] if names else None,
    )
    made_by = _made_by(table.schema_arrow)
    return TrainingRows(
        queries,
        documents,
        offsets,
        *arrays,
        values[retriever],
        teachers,
        target,
        made_by,
    )


def _numbered(file: Path, pa: ModuleType, pq: ModuleType, table: Any, name: str) -> Numbered | None:
    """:func:`_ids` of numbers from 0 without gaps of note, faster; None of others."""

    def numbers(column: Any) -> npt.NDArray[np.int64]:
        found = column.cast(pa.int64())
        if (
            not pa.types.is_string(column.type)
            or column.null_count
            or not found.cast(pa.string()).equals(column)
        ):
            raise pa.ArrowInvalid(f"{name}: other ids")
        return np.asarray(found)

    def of_group(group: int) -> list[npt.NDArray[np.int64]]:
        with pq.ParquetFile(file, metadata=table.metadata) as own:
            return [
                numbers(batch.column(0))
                for batch in own.iter_batches(_ROWS_PER_GROUP, [group], [name])
            ]

    try:
        with ThreadPoolExecutor(min(_THREADS, pa.cpu_count())) as pool:
            parts = itertools.chain.from_iterable(pool.map(of_group, range(table.num_row_groups)))
            every = np.concatenate([np.empty(0, np.int64), *parts])
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None
    if not len(every) or every.min() < 0 or every.max() > 4 * len(every):
        return None
    first = np.full(every.max() + 1, len(every))
    first[every[::-1]] = np.arange(len(every))[
        ::-1
    ]  # of a number given twice the last value is kept
    distinct = every[np.sort(first[first < len(every)])]
    first[distinct] = np.arange(len(distinct))
    return pa.array(distinct).cast(pa.string()).to_pylist(), first[every].astype(np.int32)


def _ids(pa: ModuleType, table: Any, name: str) -> Numbered:
    """Distinct ids in the order of their first row, and the position of each row's."""
    whole = table.read([name])
    column = whole.column(0)
    if not pa.types.is_dictionary(column.type) or not pa.types.is_string(column.type.value_type):
        raise DataError(f"{name}: expected strings, got {column.type}.")
    if column.null_count:
        raise DataError(f"{name}: expected an id in every row, got {column.null_count} null(s).")
    encoded = whole.unify_dictionaries().column(0).combine_chunks()
    highest = np.maximum.accumulate(np.append(np.int32(-1), encoded.indices.to_numpy()))
    if highest[-1] != len(encoded.dictionary) - 1 or bool((np.diff(highest) > 1).any()):
        encoded = (
            column.cast(pa.string()).dictionary_encode().combine_chunks()
        )  # sorted, or of rows that are gone
    return encoded.dictionary.to_pylist(), encoded.indices.to_numpy().astype(np.int32, copy=False)


def _numbers(pa: ModuleType, column: Any, name: str, null: float | None) -> Floats:
    """A column as float32; nulls become `null`, and are an error where that is None."""
    if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
        raise DataError(f"{name}: expected numbers, got {column.type}.")
    if column.null_count and null is None:
        raise DataError(f"{name}: expected a number in every row, got {column.null_count} null(s).")
    numbers = column if pa.types.is_float32(column.type) else column.cast(pa.float64(), safe=False)
    filled = numbers if null is None else numbers.fill_null(null)
    values: Floats = filled.to_numpy().astype(np.float32, copy=False)
    return values


def _made_by(schema: Any) -> Json:
    if (text := (schema.metadata or {}).get(METADATA)) is None:
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
