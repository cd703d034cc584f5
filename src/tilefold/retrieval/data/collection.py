"""Collections in the BEIR layout, ``corpus.jsonl``, ``queries.jsonl`` and ``qrels/<split>.tsv``, or
in other files.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar, cast

import numpy as np
import numpy.typing as npt

from tilefold._internal.arguments import (
    check_choice,
    check_instance,
    check_mapping,
    check_texts_by_id,
    list_of,
    path_of,
)
from tilefold._internal.files import atomic_directory
from tilefold.retrieval.common.files import Json, check_text_ids, is_unicode, json_line
from tilefold.retrieval.data import tables as _tables
from tilefold.retrieval.data.fields import DocumentFields, FieldError, TextColumns, text_columns_of
from tilefold.retrieval.data.metadata import kept_fields
from tilefold.retrieval.data.tables import (
    USUAL_FIELDS,
    find_table,
    query_of_line,
    query_rows,
    table_rows,
)
from tilefold.retrieval.errors import DataError

__all__ = [
    "Collection",
    "Document",
    "load_beir",
    "load_documents",
    "load_queries",
    "query_of_line",
]

T = TypeVar("T")
_IDS = ("_id", "id")  # of which neither is metadata where the other one is the id
_ANSERINI = {
    "id",
    "contents",
    "vector",
}  # fields of a line for Anserini, whose vector is no metadata
_BEIR_NAMES = ("corpus.jsonl", "queries.jsonl", "qrels")
BEIR_LAYOUT = (
    "A BEIR folder has corpus.jsonl, and for training and evaluation queries.jsonl and qrels/<split>.tsv; .jsonl.gz, "
    ".csv, .parquet, saved datasets and MS MARCO's collection.tsv, queries.<split>.tsv and qrels.<split>.tsv are read, too."
)


@dataclass(frozen=True)
class Document:
    """Document of an id, a title, which may be empty, and a text; what is no string is a
    ``TypeError``.

    Its `metadata`, field -> value, are kept by an index that is built with them, and searched by
    ``where``.
    """

    id: str
    title: str
    text: str
    metadata: Mapping[str, object] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name, value in (("id", self.id), ("title", self.title), ("text", self.text)):
            if not isinstance(value, str):
                raise TypeError(
                    f"{name}: expected a string, got {value!r} ({type(value).__name__}) in document {self.id!r}. Give "
                    f"str({value!r}), or '' for none.",
                )

    @property
    def contents(self) -> str:
        """Title and text as one string, separated by a line break: the input of every encoder and
        of BM25.
        """
        return f"{self.title}\n{self.text}" if self.title and self.text else self.title or self.text


def documents_by_id(
    name: str,
    documents: Mapping[str, Document] | Mapping[str, str],
) -> Mapping[str, Document]:
    """Return documents by id, of which each may be given as its text.

    Args:
        name: the argument, for the error.
        documents: document id -> :class:`Document` or text. Documents that stay in their file are
            not read.

    Raises:
        TypeError: `documents` is no mapping, or a value is neither a :class:`Document` nor a
            string.
    """
    check_mapping(name, documents, "id -> Document or text")
    if not isinstance(documents, dict):  # in a file, where reading all would take long
        first = next(iter(documents.values()), None)
        if isinstance(first, str):
            return _DocumentsOfTexts(cast("Mapping[str, str]", documents))
        return cast("Mapping[str, Document]", documents)
    if all(isinstance(document, Document) for document in documents.values()):
        return documents
    return {
        identifier: _as_document(name, identifier, document)
        for identifier, document in documents.items()
    }


def _as_document(name: str, identifier: str, document: object) -> Document:
    """Return a document, which may be given as its text."""
    if isinstance(document, Document):
        return document
    if not isinstance(document, str):
        raise TypeError(
            f"{name}: expected a Document or a text for {identifier!r}, got "
            f"{type(document).__name__}; pass Document({identifier!r}, title, text).",
        )
    return Document(identifier, "", document)


class _DocumentsOfTexts(Mapping[str, Document]):
    """Documents without titles, made of texts that stay in their file until they are read."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def __getitem__(self, identifier: str) -> Document:
        return Document(identifier, "", self._texts[identifier])

    def __contains__(self, identifier: object) -> bool:
        return identifier in self._texts

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)


@dataclass
class Collection:
    """Documents, queries and judgements.

    Attributes:
        name: a short name for reports.
        documents: document id -> :class:`Document`, in corpus order; one without a title may be
            given as its text.
        queries: query id -> text, of all splits.
        qrels: split -> query id -> document id -> grade (0 is judged and not relevant).
    """

    name: str
    documents: Mapping[str, Document]
    queries: dict[str, str]
    qrels: dict[str, dict[str, dict[str, int]]]

    def __post_init__(self) -> None:
        self.documents = documents_by_id("documents", self.documents)
        check_texts_by_id("queries", self.queries)
        check_mapping("qrels", self.qrels, "split -> query id -> grades by document")
        if isinstance(self.documents, dict):  # others read them from files
            check_text_ids("documents", self.documents)
        check_text_ids("queries", self.queries)
        for split in self.qrels:
            judged = self.qrels[split]
            check_mapping(f"qrels[{split!r}]", judged, "query id -> grades by document")
            check_text_ids("qrels", judged)
            for query, grades in judged.items():
                check_mapping(f"qrels[{split!r}][{query!r}]", grades, "document id -> grade")
                check_text_ids("qrels", grades)

    def contents(self) -> Mapping[str, str]:
        """Document id -> contents, in corpus order."""
        stored: Callable[[], Mapping[str, str]] | None = getattr(self.documents, "contents", None)
        return (
            stored()
            if stored
            else {document.id: document.contents for document in self.documents.values()}
        )

    def places(self, names: Iterable[str]) -> npt.NDArray[np.int64]:
        """The place of each of n `names` among the documents, -1 for an unknown one, int64 ``[n]``."""
        stored: Callable[[Iterable[str]], npt.NDArray[np.int64]] | None = getattr(
            self.documents,
            "places",
            None,
        )
        if stored:
            return stored(names)
        place_of = {name: place for place, name in enumerate(self.documents)}
        return np.fromiter((place_of.get(name, -1) for name in names), np.int64)

    def metadata(self) -> dict[str, Mapping[str, object]]:
        """Document id -> fields, of the documents that have any."""
        return {
            name: document.metadata
            for name, document in self.documents.items()
            if document.metadata
        }

    def split_qrels(self, split: str) -> dict[str, dict[str, int]]:
        """The judgements of `split`; the error for an unknown split names the known ones."""
        try:
            return self.qrels[split]
        except KeyError:
            known = ", ".join(sorted(self.qrels)) or "none"
            raise ValueError(
                f"split: {self.name} has {known}, got {split!r}. Choose one of them.",
            ) from None

    def split_queries(self, split: str) -> dict[str, str]:
        """Query id -> text of the queries judged in `split`, in the order of the judgements."""
        return {query_id: self.queries[query_id] for query_id in self.split_qrels(split)}

    def pairs(self, split: str) -> list[tuple[str, str]]:
        """``(query id, document id)`` for every positive grade in `split`."""
        judged = self.split_qrels(split).items()
        return [
            (query, document)
            for query, grades in judged
            for document, grade in grades.items()
            if grade > 0
        ]

    def save_beir(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write a BEIR folder, atomically.

        Args:
            path: the folder, new or empty.
            overwrite: replace an earlier BEIR folder.

        Raises:
            DataError: for an id that such a folder cannot hold.
            FileExistsError: if there is something else at `path`, or a BEIR folder without
                `overwrite`.
        """
        self.__post_init__()  # ids may have come since
        named = {
            name
            for qrels in self.qrels.values()
            for q, found in qrels.items()
            for name in (q, *found)
        }
        for name in (*self.documents, *self.queries, *named):
            if (
                not name
                or not is_unicode(name)
                or (name in named and any(mark in name for mark in "\t\r\n"))
            ):
                held = "no empty id, and in judgements none with a tab or a line break"
                raise DataError(f"ids: the BEIR layout holds {held}, got {name!r}. Rename it.")
        with atomic_directory(
            path_of("path", path),
            own_names=_BEIR_NAMES,
            overwrite=overwrite,
        ) as folder:
            documents = (
                {"_id": one.id, "title": one.title, "text": one.text}
                | ({"metadata": dict(one.metadata)} if one.metadata else {})
                for one in self.documents.values()
            )
            queries = ({"_id": name, "text": text} for name, text in self.queries.items())
            for name, rows in (("corpus.jsonl", documents), ("queries.jsonl", queries)):
                with (folder / name).open("w", encoding="utf-8") as stream:
                    stream.writelines(map(json_line, rows))
            (folder / "qrels").mkdir()
            for split, qrels in self.qrels.items():
                with (folder / "qrels" / f"{split}.tsv").open("w", encoding="utf-8") as stream:
                    stream.write("query-id\tcorpus-id\tscore\n")
                    for query_id, judged in qrels.items():
                        stream.writelines(
                            f"{query_id}\t{doc}\t{grade}\n" for doc, grade in judged.items()
                        )


def load_beir(
    path: str | Path,
    unknown: Literal["error", "drop"] = "error",
    *,
    documents_only: bool = False,
    splits: Sequence[str] | None = None,
    documents: Mapping[str, Document] | None = None,
    fields: DocumentFields = USUAL_FIELDS,
) -> Collection:
    """Read a BEIR folder, or the documents alone: a file or a saved dataset; queries and judgements
    may be missing.

    The rows of ``corpus`` and ``queries`` are in ``<name>.jsonl``, ``.jsonl.gz``, ``.csv`` or
    ``.parquet``, or in a folder ``<name>/`` of such files or written by ``Dataset.save_to_disk``; queries also in
    ``queries.tsv`` (id, tab, text) or ``queries.trec`` (TREC topics). Judgements are in
    ``qrels/<split>.tsv`` (three columns, or the four of TREC), ``.jsonl``, ``.csv`` or
    ``.parquet``; a grade is a whole number, and pairs with several grades are refused. MS
    MARCO's own files are read as they are: ``collection.tsv``, ``queries.<split>.tsv`` and
    ``qrels.<split>.tsv``; all documents are held in memory, but for `documents` that were read
    before.

    `unknown` is ``"error"``, or ``"drop"`` to leave out judgements of what the collection, such as
    a sample, lacks; `documents_only` leaves queries and judgements unread, and `splits` those of
    other splits; `fields` names the fields of documents, where they are not the usual ones. Malformed rows, missing, repeated or unknown ids, or no row are a ``DataError``
    that names file and line.
    """
    check_choice("unknown", unknown, ("error", "drop"))
    splits = None if splits is None else list_of("splits", splits, ordered=False)
    check_instance("fields", fields, DocumentFields, "DocumentFields(text=...)")
    folder = path_of("path", path)
    if not folder.exists():
        raise FileNotFoundError(f"{folder}: no such folder. {BEIR_LAYOUT}")
    corpus, name = documents_table(folder), folder.resolve().name
    alone = corpus == folder
    collection = Collection(
        name.partition(".")[0] if alone else name,
        documents or load_documents(corpus, fields),
        {},
        {},
    )
    if alone or documents_only:
        return collection
    if (
        queries := find_table(folder, "queries", (*_tables.ROWS, ".tsv", _tables.TOPICS))
    ) is not None:
        collection.queries = _texts(query_rows(queries), queries)
    elif files := sorted(folder.glob("queries.*.tsv")):
        collection.queries = _queries_of_splits(files)
    elif (folder / "qrels").exists():
        raise FileNotFoundError(
            f"{folder / 'queries.jsonl'}: no such file, but judgements. {BEIR_LAYOUT}",
        )
    known = collection.queries, collection.documents
    collection.qrels = _tables.read_splits(folder / "qrels", known, unknown == "drop", splits)
    return collection


def documents_table(folder: Path) -> Path:
    """Path of the rows of the documents: `folder` itself where it is a file or a saved dataset."""
    if folder.is_file() or _tables.is_saved_dataset(folder):
        return folder
    corpus = find_table(folder, "corpus", _tables.ROWS) or find_table(
        folder,
        "collection",
        (".tsv", ".tsv.gz"),
    )
    if corpus is None:
        raise FileNotFoundError(f"{folder / 'corpus.jsonl'}: no such file. {BEIR_LAYOUT}")
    return corpus


def load_documents(
    path: str | Path,
    fields: DocumentFields = USUAL_FIELDS,
) -> dict[str, Document]:
    """Document id -> :class:`Document`, from JSON lines, CSV, Parquet, a folder of those, a saved
    dataset, or text.

    Rows have ``_id``, ``text`` and optionally ``title``, under these names, other usual ones
    (``id``, ``docid``, ``doc_id``; ``contents``, ``body``) or those that `fields` gives. Other
    columns, and the fields of an object ``metadata``, are metadata; the ``vector`` of a line for
    Anserini is left out. A ``.tsv`` or ``.txt`` file has lines of an id, a tab
    and a text, or of the columns that its first line names (``id``, ``docid`` or another usual
    name, and ``text``), which is logged. A first line that may be either is a ``DataError`` with
    file and line, as are malformed rows, missing or repeated ids, or no row.
    """
    file = path_of("path", path)
    check_instance("fields", fields, DocumentFields, "DocumentFields(text=...)")
    documents: dict[str, Document] = {}
    for where, row in table_rows(file, fields=fields):
        document = document_of_row(row, where, documents, fields)
        documents[document.id] = document
    return _some(documents, file)


def document_of_row(
    row: Json,
    where: str,
    seen: Container[str],
    fields: DocumentFields = USUAL_FIELDS,
) -> Document:
    """Return the document in a row, checked.

    Args:
        row: field -> value.
        where: file and line, for the error.
        seen: ids of the documents before it.
        fields: names of fields that are not the usual ones.

    Raises:
        DataError: missing fields, all of them in one error; an id or a text that is none, or an
            id that is among those `seen`.
    """
    columns = _columns(row, where, fields)
    identifier = _id(row, columns.id, where, seen)
    text = _string(row, columns.text, where)
    title = "" if columns.title is None else _string(row, columns.title, where, missing="")
    no_metadata = {*columns}
    if columns.id in _IDS:
        no_metadata.update(_IDS)
    if row.keys() == _ANSERINI and isinstance(row["vector"], dict):
        no_metadata.add("vector")
    metadata = {name: value for name, value in row.items() if name not in no_metadata}
    nested = metadata.pop("metadata", None)  # where BEIR has it
    metadata |= nested if isinstance(nested, dict) else {"metadata": nested}
    return Document(identifier, title, text, kept_fields(metadata))


def _columns(row: Json, where: str, fields: DocumentFields) -> TextColumns:
    """Which fields of a row are the id, the title and the text."""
    try:
        return text_columns_of(tuple(row), fields)
    except FieldError as error:
        raise DataError(f"{where}: {error}") from error


def load_queries(path: str | Path) -> dict[str, str]:
    """Query id -> text, from what :func:`load_beir` reads, or from lines: ``id<tab>text``, or a
    text (id: its number).

    Names of columns and errors are as in :func:`load_documents`.
    """
    file = path_of("path", path)
    if not file.exists():
        raise FileNotFoundError(f"{file}: no such file with queries.")
    return _texts(query_rows(file, bare=True), file)


def _texts(rows: Iterable[_tables.Row], path: Path) -> dict[str, str]:
    texts: dict[str, str] = {}
    for where, row in rows:
        columns = _columns(row, where, USUAL_FIELDS)
        texts[_id(row, columns.id, where, texts)] = _string(row, columns.text, where)
    return _some(texts, path)


def _queries_of_splits(files: Sequence[Path]) -> dict[str, str]:
    """Queries of MS MARCO's files, of which one may be a part of another."""
    texts: dict[str, str] = {}
    for file in files:
        more = _texts(query_rows(file), file)
        for name in texts.keys() & more.keys():
            if texts[name] != more[name]:
                raise DataError(
                    f"{file}: query {name!r} has another text in a file before. Keep one of the two.",
                )
        texts |= more
    return texts


def _some(found: dict[str, T], path: Path) -> dict[str, T]:
    if not found:
        raise DataError(f"{path}: expected at least one line, got an empty file. {BEIR_LAYOUT}")
    return found


def _id(row: Json, field: str, where: str, seen: Container[str]) -> str:
    """The id in a field of a row, text or a whole number, that is not among those `seen`."""
    value = row[field]
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value:
        raise DataError(
            f"{where}: {field!r} must be a non-empty string, got {value!r}. Give the line an id.",
        )
    if not is_unicode(value):
        raise DataError(
            f"{where}: {field!r} must be text that UTF-8 can hold, got {value!r}. Fix that line.",
        )
    if value in seen:
        raise DataError(f"{where}: {field!r} {value!r} was given before. Ids must be unique.")
    return value


def _string(row: Json, field: str, where: str, missing: str | None = None) -> str:
    """The text in a field of a row; `missing` where it is null, if that is allowed."""
    value = row[field]
    value = missing if value is None else value
    if not isinstance(value, str):
        raise DataError(f"{where}: {field!r} must be a string, got {value!r}. Fix that line.")
    return value
