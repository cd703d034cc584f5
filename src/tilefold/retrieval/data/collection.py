"""Collections of documents, queries and judgements: the BEIR layout and other files."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar, cast

import numpy as np
import numpy.typing as npt

from tilefold._internal.arguments import (
    ArgumentError,
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
from tilefold.retrieval.data.documents import Content, Document, text_of
from tilefold.retrieval.data.fields import (
    TEXT_NAMES,
    DocumentFields,
    FieldError,
    TextColumns,
    text_columns_of,
)
from tilefold.retrieval.data.metadata import kept_fields
from tilefold.retrieval.data.page_folders import has_pages, open_page_folder, page_of_name
from tilefold.retrieval.data.pages import PageRanges
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
    "Content",
    "Document",
    "load_beir",
    "load_documents",
    "load_queries",
    "query_of_line",
]

T = TypeVar("T")
_IDS = ("_id", "id")  # if one is the id of a row, the other one is not metadata
_ANSERINI = {"id", "contents", "vector"}  # fields of Anserini's rows; the vector is not metadata
IMAGE_FIELD = "image"  # field of a row with the path of an image, in place of a text
_BEIR_NAMES = ("corpus.jsonl", "queries.jsonl", "qrels")
BEIR_LAYOUT = (
    "A BEIR folder has corpus.jsonl, and for training and evaluation queries.jsonl and "
    "qrels/<split>.tsv; .jsonl.gz, .csv, .parquet, saved datasets and MS MARCO's collection.tsv, "
    "queries.<split>.tsv and qrels.<split>.tsv are read, too."
)


def documents_by_id(
    name: str,
    documents: Mapping[str, Document] | Mapping[str, str],
) -> Mapping[str, Document]:
    """Convert documents that are passed as texts to :class:`Document`.

    Args:
        name: name of the argument, for the error.
        documents: document id -> :class:`Document` or text.

    Returns:
        Document id -> :class:`Document`. A mapping that is not a ``dict`` stays lazy.

    Raises:
        TypeError: if `documents` is not a mapping, or a value is neither a :class:`Document` nor a
            string.
    """
    check_mapping(name, documents, "id -> Document or text")
    if not isinstance(documents, dict):
        # Another mapping, such as LazyDocuments, reads its values from a file. Reading all of them
        # would take long, so the first one decides the type.
        first = next(iter(documents.values()), None)
        if isinstance(first, str):
            return _DocumentsOfTexts(cast("Mapping[str, str]", documents))
        return cast("Mapping[str, Document]", documents)
    if all(isinstance(document, Document) for document in documents.values()):
        return documents
    return {
        document_id: _as_document(name, document_id, document)
        for document_id, document in documents.items()
    }


def _as_document(name: str, document_id: str, document: object) -> Document:
    """Return a document that a caller passed as a :class:`Document` or as its text.

    Args:
        name: name of the argument, for the error.
        document_id: id of the document.
        document: the document, or its text.
    """
    if isinstance(document, Document):
        return document
    if not isinstance(document, str):
        raise TypeError(
            f"{name}: expected a Document or a text for {document_id!r}, got "
            f"{type(document).__name__}; pass Document({document_id!r}, title, text).",
        )
    return Document(document_id, "", document)


class _DocumentsOfTexts(Mapping[str, Document]):
    """Documents without titles, created from the texts of a lazy mapping one by one."""

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
        documents: document id -> :class:`Document`, in corpus order. A document without a title
            may be passed as its text.
        queries: query id -> text, of all splits.
        qrels: split -> query id -> document id -> grade (0 is judged and not relevant).
        passages: settings by which documents were divided into passages
            (:class:`tilefold.retrieval.Passages` as a text); None for whole documents.
        unread_files: name of a file of pages -> reason why its pages are not among the documents.

    Examples:
        >>> collection = Collection(
        ...     "bank",
        ...     documents={"cards": "Block a lost card in the app.", "pin": "A forgotten PIN."},
        ...     queries={"q1": "my card was stolen"},
        ...     qrels={"test": {"q1": {"cards": 1}}},
        ... )
        >>> collection.split_queries("test")
        {'q1': 'my card was stolen'}
        >>> collection.pairs("test")
        [('q1', 'cards')]
    """

    name: str
    documents: Mapping[str, Document]
    queries: dict[str, str]
    qrels: dict[str, dict[str, dict[str, int]]]
    passages: str | None = None
    unread_files: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check()

    def _check(self) -> None:
        """Convert texts to documents, and check all ids and mappings."""
        self.documents = documents_by_id("documents", self.documents)
        check_texts_by_id("queries", self.queries)
        check_mapping("qrels", self.qrels, "split -> query id -> grades by document")
        if isinstance(self.documents, dict):  # lazy mappings check ids while reading
            _check_document_ids(self.documents)
        check_text_ids("queries", self.queries)
        for split, qrels in self.qrels.items():
            check_mapping(f"qrels[{split!r}]", qrels, "query id -> grades by document")
            check_text_ids("qrels", qrels)
            for query, grades in qrels.items():
                check_mapping(f"qrels[{split!r}][{query!r}]", grades, "document id -> grade")
                check_text_ids("qrels", grades)

    def whole_document_of(self, name: str) -> str:
        """Return the id of a document in the original collection.

        Args:
            name: id of one of `documents`, which may be a passage.
        """
        return name if self.passages is None else name.rpartition("#")[0]

    def content(self) -> Mapping[str, Content]:
        """Return document id -> what a model encodes, a text or a page, in corpus order."""
        if self._is_lazy():  # documents that are read from a file of lines are texts
            return self.contents()
        return {document.id: document.content for document in self.documents.values()}

    def _is_lazy(self) -> bool:
        """Return whether documents are read from their file one by one."""
        return hasattr(self.documents, "contents")

    def contents(self) -> Mapping[str, str]:
        """Return document id -> contents, which are its title and text in one string.

        Documents are in corpus order.

        Raises:
            DataError: if a document is the image of a page, which has no text.
        """
        # LazyDocuments, which reads a file line by line, has a method for its contents.
        read_lazily: Callable[[], Mapping[str, str]] | None = getattr(
            self.documents,
            "contents",
            None,
        )
        if read_lazily:
            return read_lazily()
        return {document.id: text_of(document) for document in self.documents.values()}

    def positions_of(self, names: Iterable[str]) -> npt.NDArray[np.int64]:
        """Return the positions of n documents in the corpus, int64 ``[n]``; -1 if unknown.

        Args:
            names: ids of the documents.
        """
        # LazyDocuments, which keeps no ids in memory, looks them up by its own method.
        look_up: Callable[[Iterable[str]], npt.NDArray[np.int64]] | None = getattr(
            self.documents,
            "positions_of",
            None,
        )
        if look_up:
            return look_up(names)
        positions = {name: position for position, name in enumerate(self.documents)}
        return np.fromiter((positions.get(name, -1) for name in names), np.int64)

    def metadata(self) -> dict[str, Mapping[str, object]]:
        """Return document id -> metadata, without the documents that have none."""
        return {
            name: document.metadata
            for name, document in self.documents.items()
            if document.metadata
        }

    def split_qrels(self, split: str) -> dict[str, dict[str, int]]:
        """Return the judgements of a split: query id -> document id -> grade.

        Raises:
            ValueError: if the split does not exist.
        """
        try:
            return self.qrels[split]
        except KeyError:
            splits = ", ".join(sorted(self.qrels)) or "none"
            raise ArgumentError(
                "split",
                f"{self.name} has the splits {splits}, got {split!r}. Choose one of them.",
            ) from None

    def split_queries(self, split: str) -> dict[str, str]:
        """Return query id -> text of the queries judged in a split, in the order of judgements."""
        return {query_id: self.queries[query_id] for query_id in self.split_qrels(split)}

    def pairs(self, split: str) -> list[tuple[str, str]]:
        """Return ``(query id, document id)`` for every positive grade in a split."""
        pairs: list[tuple[str, str]] = []
        for query, grades in self.split_qrels(split).items():
            pairs.extend((query, document) for document, grade in grades.items() if grade > 0)
        return pairs

    def save_beir(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write a BEIR folder, atomically.

        Args:
            path: the folder, new or empty.
            overwrite: replace an earlier BEIR folder.

        Raises:
            DataError: if the BEIR layout cannot represent an id, or a document is a page.
            FileExistsError: if `path` holds something else, or a BEIR folder without `overwrite`.
        """
        self._check()  # the mappings may have changed since the collection was created
        self._check_beir_ids()
        if not self._is_lazy() and any(document.page for document in self.documents.values()):
            raise DataError(
                "documents: expected texts, got page images, which are not copied into a BEIR "
                "folder. Write corpus.jsonl with a field 'image' that names the file of each page.",
            )
        with atomic_directory(
            path_of("path", path),
            own_names=_BEIR_NAMES,
            overwrite=overwrite,
        ) as folder:
            documents = (_beir_row(document) for document in self.documents.values())
            queries = ({"_id": name, "text": text} for name, text in self.queries.items())
            _write_json_lines(folder / "corpus.jsonl", documents)
            _write_json_lines(folder / "queries.jsonl", queries)
            (folder / "qrels").mkdir()
            for split, qrels in self.qrels.items():
                _write_qrels(folder / "qrels" / f"{split}.tsv", qrels)

    def _check_beir_ids(self) -> None:
        """Raise ``DataError`` if the BEIR layout cannot represent an id.

        Ids must be nonempty and valid Unicode. Judgements are tab-separated lines, so their ids
        cannot contain tabs or line breaks.
        """
        judged: set[str] = set()
        for qrels in self.qrels.values():
            for query, grades in qrels.items():
                judged.update((query, *grades))
        for name in (*self.documents, *self.queries, *judged):
            breaks_table = name in judged and any(mark in name for mark in "\t\r\n")
            if not name or not is_unicode(name) or breaks_table:
                raise DataError(
                    "ids: the BEIR layout needs nonempty Unicode, without tabs and line breaks in "
                    f"judgements, got {name!r}. Rename it.",
                )


def _check_document_ids(documents: Mapping[str, Document]) -> None:
    """Raise an error if an id is invalid, or the key of a document is not its id.

    With other keys, two documents could have the same id, and a corpus file would lose one.
    """
    check_text_ids("documents", documents)
    for key, document in documents.items():
        if document.id != key:
            raise ArgumentError(
                "documents",
                f"expected each document under its id, got Document.id {document.id!r} "
                f"under the key {key!r}. Use the same id for both.",
            )


def _beir_row(document: Document) -> Json:
    """Return a document as a row of a corpus file."""
    row: Json = {"_id": document.id, "title": document.title, "text": document.text}
    if document.metadata:
        row["metadata"] = dict(document.metadata)
    return row


def _write_json_lines(file: Path, rows: Iterable[Json]) -> None:
    with file.open("w", encoding="utf-8") as stream:
        stream.writelines(map(json_line, rows))


def _write_qrels(file: Path, qrels: Mapping[str, Mapping[str, int]]) -> None:
    """Write the judgements of a split as lines of query, document and grade."""
    with file.open("w", encoding="utf-8") as stream:
        stream.write("query-id\tcorpus-id\tscore\n")
        for query, grades in qrels.items():
            for document, grade in grades.items():
                stream.write(f"{query}\t{document}\t{grade}\n")


def load_beir(
    path: str | Path,
    unknown: Literal["error", "drop"] = "error",
    *,
    documents_only: bool = False,
    splits: Sequence[str] | None = None,
    documents: Mapping[str, Document] | None = None,
    fields: DocumentFields = USUAL_FIELDS,
    page_ranges: PageRanges | None = None,
    cache_dir: Path | None = None,
) -> Collection:
    """Read a BEIR folder, a file or saved dataset of documents, or a folder of page images.

    The rows of ``corpus`` and ``queries`` are in ``<name>.jsonl``, ``.jsonl.gz``, ``.csv`` or
    ``.parquet``, or in a folder ``<name>/`` of such files or written by ``Dataset.save_to_disk``.
    Queries may also be in ``queries.tsv`` (id, tab, text) or ``queries.trec`` (TREC topics).
    Judgements are in ``qrels/<split>.tsv`` (three columns, or the four of TREC), ``.jsonl``,
    ``.csv`` or ``.parquet``. A grade is a whole number, and pairs with several grades are refused.
    MS MARCO's own files are read too: ``collection.tsv``, ``queries.<split>.tsv`` and
    ``qrels.<split>.tsv``. Queries and judgements may be missing.

    A row may have a field ``image`` in place of a text: the path of an image or a PDF in the
    folder, with ``#p12`` for its page 12. A folder without a corpus may have PDFs and images (PNG,
    JPEG, WebP, TIFF) at any depth, whose pages are the documents. Page 12 of ``report.pdf`` has the
    id ``report.pdf#p12``, and the metadata ``file`` and ``page``. Files that cannot be opened are
    in :attr:`Collection.unread_files`. Pages need the extra ``pages``.

    Args:
        path: the folder, the file or the saved dataset.
        unknown: what to do with judgements of unknown queries or documents: ``"error"``, or
            ``"drop"`` to leave them out, for instance if the corpus is a sample.
        documents_only: leave queries and judgements unread.
        splits: the splits whose judgements are read; all by default.
        documents: the documents, if they were read before; otherwise all are read into memory.
        fields: custom names of the document fields.
        page_ranges: the pages of each PDF and TIFF of a folder of page images; all by default.
        cache_dir: folder that stores the digests of page images, so that only files that have
            changed are read again. None stores none.

    Raises:
        FileNotFoundError: if the folder, the documents or the judged queries are missing.
        DataError: if a row is malformed, an id is missing, repeated or unknown, or there are no
            rows. The message names file and line.

    Examples:
        >>> collection = load_beir("bank", splits=["test"])
        >>> collection.qrels
        {'test': {'q5': {'joint': 1}, 'q6': {'close': 1}}}
    """
    check_choice("unknown", unknown, ("error", "drop"))
    splits = None if splits is None else list_of("splits", splits, ordered=False)
    check_instance("fields", fields, DocumentFields, "DocumentFields(text=...)")
    folder = path_of("path", path)
    if not folder.exists():
        raise FileNotFoundError(f"{folder}: no such folder. {BEIR_LAYOUT}")
    unread_files: dict[str, str] = {}
    if is_page_collection(folder):
        pages = open_page_folder(folder, page_ranges, cache_dir)
        documents, unread_files = pages.documents, pages.unread_files
        has_queries = folder.is_dir()
    else:
        _refuse_page_ranges(folder, page_ranges)
        corpus = documents_table(folder)
        documents = documents or load_documents(corpus, fields)
        has_queries = corpus != folder  # not a file or a saved dataset of documents only
    name = folder.resolve().name
    collection = Collection(
        name if has_queries else name.partition(".")[0],
        documents,
        queries={},
        qrels={},
        unread_files=unread_files,
    )
    if documents_only or not has_queries:
        return collection
    collection.queries = _load_folder_queries(folder)
    collection.qrels = _tables.read_splits(
        folder / "qrels",
        collection.queries,
        collection.documents,
        drop_unknown=unknown == "drop",
        names=splits,
    )
    return collection


def is_page_collection(path: Path) -> bool:
    """Return whether the documents at a path are pages: of a folder without corpus, or of a file.

    Args:
        path: an existing file or folder.
    """
    return _find_corpus(path) is None and has_pages(path)


def _refuse_page_ranges(path: Path, page_ranges: PageRanges | None) -> None:
    """Raise ``ArgumentError`` for a range of pages of documents that are not pages of a folder."""
    if page_ranges is not None:
        raise ArgumentError(
            "page_ranges",
            f"expected a folder of PDFs and images, got {path}. Leave the ranges out.",
        )


def _load_folder_queries(folder: Path) -> dict[str, str]:
    """Read the queries of a BEIR folder, or MS MARCO's files ``queries.<split>.tsv``.

    Returns:
        Query id -> text; empty if the folder has neither queries nor judgements.

    Raises:
        FileNotFoundError: if the folder has judgements without queries.
    """
    table = find_table(folder, "queries", (*_tables.ROW_SUFFIXES, ".tsv", _tables.TOPICS_SUFFIX))
    if table is not None:
        return _read_queries(table)
    files = sorted(folder.glob("queries.*.tsv"))
    if files:
        return _queries_of_splits(files)
    if (folder / "qrels").exists():
        raise FileNotFoundError(
            f"{folder / 'queries.jsonl'}: no such file, although the folder has judgements. "
            f"{BEIR_LAYOUT}",
        )
    return {}


def documents_table(folder: Path) -> Path:
    """Find the file or folder with the documents of a collection.

    Args:
        folder: a BEIR folder, or a file or saved dataset that is itself the corpus.

    Raises:
        FileNotFoundError: if there are no documents in rows.
    """
    corpus = _find_corpus(folder)
    if corpus is None:
        raise FileNotFoundError(f"{folder / 'corpus.jsonl'}: no such file. {BEIR_LAYOUT}")
    return corpus


def _find_corpus(path: Path) -> Path | None:
    """Find the file or folder with the rows of documents of a collection.

    Args:
        path: a BEIR folder, or a file or saved dataset that is itself the corpus.

    Returns:
        The path of the rows. None if there are none: for a folder without a corpus, and for a PDF
        or an image, whose pages are the documents.
    """
    if path.is_file():
        is_pdf_or_image = has_pages(path)
        return None if is_pdf_or_image else path
    if _tables.is_saved_dataset(path):
        return path
    corpus = find_table(path, "corpus", _tables.ROW_SUFFIXES)
    if corpus is None:
        corpus = find_table(path, "collection", (".tsv", ".tsv.gz"))  # MS MARCO
    return corpus


def load_documents(
    path: str | Path,
    fields: DocumentFields = USUAL_FIELDS,
) -> dict[str, Document]:
    """Read documents from JSON lines, CSV, Parquet, text, a folder of files or a saved dataset.

    * JSON lines, CSV, Parquet and saved datasets have rows with the fields ``_id``, ``text`` and
      optionally ``title``. Other usual names are recognised, such as ``id``, ``docid``,
      ``contents`` and ``body``. All other fields are metadata, and so are the fields of an object
      ``metadata``. The ``vector`` of Anserini's rows is left out. A row without a text may have an
      ``image``, the path of an image or a PDF in the folder of the file (:func:`load_beir`).
    * A ``.tsv`` or ``.txt`` file has lines ``id<tab>text``. If its first line is a header with an
      id and a text, the lines have the columns that it names, and a warning is logged.

    Args:
        path: the file, folder or saved dataset.
        fields: custom names of the document fields.

    Returns:
        Document id -> :class:`Document`.

    Raises:
        DataError: if a row is malformed, an id is missing or repeated, there are no rows, or the
            first line could be a header or a row. The message names file and line.

    Examples:
        >>> documents = load_documents("bank/corpus.jsonl")
        >>> documents["pin"].title, documents["pin"].metadata["year"]
        ('PIN', 2021)
    """
    file = path_of("path", path)
    check_instance("fields", fields, DocumentFields, "DocumentFields(text=...)")
    documents: dict[str, Document] = {}
    for where, row in table_rows(file, fields=fields):
        document = document_of_row(row, where, documents, fields, page_root=file.parent)
        documents[document.id] = document
    return _require_rows(documents, file)


def document_of_row(
    row: Json,
    where: str,
    earlier_ids: Container[str],
    fields: DocumentFields = USUAL_FIELDS,
    page_root: Path | None = None,
) -> Document:
    """Create a document from a row of a file.

    Args:
        row: field -> value.
        where: file and line, for the error.
        earlier_ids: ids of the documents in earlier rows.
        fields: custom names of the document fields.
        page_root: folder of the files that rows name in the field ``image``; None if the caller
            reads texts only.

    Raises:
        DataError: if fields are missing, the id or the text is not a string, or an earlier row has
            the same id.
        PageRowError: if the row has an image in place of a text, and `page_root` is None.
    """
    if _names_image(row, fields):
        return _document_of_image_row(row, where, earlier_ids, fields, page_root)
    columns = _find_columns(row, where, fields)
    identifier = _read_unique_id(row, columns.id, where, earlier_ids)
    text = _read_string(row, columns.text, where)
    title = "" if columns.title is None else _read_string(row, columns.title, where, missing="")
    return Document(identifier, title, text, kept_fields(_metadata_of(row, columns)))


class PageRowError(DataError):
    """A row has an image in place of a text, where only texts are read."""


def _text_fields(row: Json, fields: DocumentFields) -> list[str]:
    """Return the fields of a row that may hold its text."""
    if fields.text is not None:
        return [fields.text]
    return [name for name in row if name.strip().lower() in TEXT_NAMES["text"]]


def _names_image(row: Json, fields: DocumentFields) -> bool:
    """Return whether a row has the path of an image, and no text.

    In a row with a text, an ``image`` is metadata.
    """
    if not isinstance(row.get(IMAGE_FIELD), str):
        return False
    return not any(row.get(name) for name in _text_fields(row, fields))


def _document_of_image_row(
    row: Json,
    where: str,
    earlier_ids: Container[str],
    fields: DocumentFields,
    page_root: Path | None,
) -> Document:
    """Create a document from a row that names an image or the page of a PDF.

    Args:
        row: field -> value.
        where: file and line, for the error.
        earlier_ids: ids of the documents in earlier rows.
        fields: custom names of the document fields.
        page_root: folder of the images and PDFs; None if the caller reads texts only.

    Raises:
        DataError: if the id is missing or repeated, or there is no such page.
        PageRowError: if `page_root` is None.
    """
    if page_root is None:
        raise PageRowError(
            f"{where}: expected a text, got the image {row[IMAGE_FIELD]!r}. This command reads "
            "texts only: leave the images out.",
        )
    text_fields = _text_fields(row, fields) or ["text"]
    row = {**row, **dict.fromkeys(text_fields, "")}  # null becomes an empty text
    columns = _find_columns(row, where, fields)
    identifier = _read_unique_id(row, columns.id, where, earlier_ids)
    title = "" if columns.title is None else _read_string(row, columns.title, where, missing="")
    try:
        page = page_of_name(row[IMAGE_FIELD], page_root)
    except DataError as error:
        raise DataError(f"{where}: {IMAGE_FIELD!r}: {error}") from error
    return Document(identifier, title, "", kept_fields(_metadata_of(row, columns)), page)


def _metadata_of(row: Json, columns: TextColumns) -> Json:
    """Return the fields of a row that are metadata: all but the id, the title and the text.

    Fields that repeat the id are left out, and so are the vectors of Anserini's rows.

    Args:
        row: field -> value.
        columns: names of the fields with the id, the title and the text.
    """
    not_metadata = {*columns}
    if columns.id in _IDS:
        not_metadata.update(_IDS)
    if row.keys() == _ANSERINI and isinstance(row["vector"], dict):
        not_metadata.add("vector")
    metadata = {name: value for name, value in row.items() if name not in not_metadata}
    nested = metadata.get("metadata")
    if isinstance(nested, dict):  # BEIR has all metadata in one object
        del metadata["metadata"]
        metadata.update(nested)
    return metadata


def _find_columns(row: Json, where: str, fields: DocumentFields) -> TextColumns:
    """Find which fields of a row hold the id, the title and the text."""
    try:
        return text_columns_of(tuple(row), fields)
    except FieldError as error:
        raise DataError(f"{where}: {error}") from error


def load_queries(path: str | Path) -> dict[str, str]:
    """Read queries from the files that :func:`load_beir` reads, or from lines of text.

    A line is ``id<tab>text``, or a text whose id is the number of the line. See
    :func:`load_documents` for column names and errors.

    Returns:
        Query id -> text.

    Examples:
        >>> load_queries("bank/queries.jsonl")["q1"]
        'my card was stolen'
    """
    file = path_of("path", path)
    if not file.exists():
        raise FileNotFoundError(f"{file}: no such file of queries.")
    return _read_queries(file, allow_missing_ids=True)


def _read_queries(file: Path, *, allow_missing_ids: bool = False) -> dict[str, str]:
    """Read a file of queries.

    Args:
        file: the file, or a folder of files.
        allow_missing_ids: whether a line of a text file may be a query without an id.

    Returns:
        Query id -> text.
    """
    texts: dict[str, str] = {}
    for where, row in query_rows(file, allow_missing_ids=allow_missing_ids):
        columns = _find_columns(row, where, USUAL_FIELDS)
        query_id = _read_unique_id(row, columns.id, where, earlier_ids=texts)
        texts[query_id] = _read_string(row, columns.text, where)
    return _require_rows(texts, file)


def _queries_of_splits(files: Sequence[Path]) -> dict[str, str]:
    """Read the queries of all splits of MS MARCO.

    Args:
        files: the file of each split. A file may repeat queries of an earlier one.

    Returns:
        Query id -> text.

    Raises:
        DataError: if two files have different texts for a query.
    """
    texts: dict[str, str] = {}
    for file in files:
        file_texts = _read_queries(file)
        for name in texts.keys() & file_texts.keys():
            if texts[name] != file_texts[name]:
                raise DataError(
                    f"{file}: query {name!r} has a different text in an earlier file. Keep one of "
                    "the two.",
                )
        texts.update(file_texts)
    return texts


def _require_rows(rows: dict[str, T], path: Path) -> dict[str, T]:
    """Return the rows of a file, or raise ``DataError`` if there are none."""
    if not rows:
        raise DataError(
            f"{path}: expected at least one line with a row, got none. {BEIR_LAYOUT}",
        )
    return rows


def _read_unique_id(row: Json, field: str, where: str, earlier_ids: Container[str]) -> str:
    """Read the id of a row as a string, and check that no earlier row has it.

    Args:
        row: field -> value.
        field: the field with the id, which is a string or an integer.
        where: file and line, for the error.
        earlier_ids: ids of earlier rows.

    Raises:
        DataError: if the id is missing, invalid or repeated.
    """
    value = row[field]
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value:
        raise DataError(
            f"{where}: {field!r} must be a non-empty string or an integer, got {value!r}. Give the "
            "line an id.",
        )
    if not is_unicode(value):
        raise DataError(
            f"{where}: {field!r} must be valid Unicode, got {value!r}. Fix that line.",
        )
    if value in earlier_ids:
        raise DataError(f"{where}: {field!r} {value!r} is a duplicate. Ids must be unique.")
    return value


def _read_string(row: Json, field: str, where: str, missing: str | None = None) -> str:
    """Return the text in a field of a row.

    Args:
        row: field -> value.
        field: the field with the text.
        where: file and line, for the error.
        missing: text that replaces null; None if null is an error.

    Raises:
        DataError: if the value is not a text.
    """
    value = row[field]
    if value is None:
        value = missing
    if not isinstance(value, str):
        raise DataError(f"{where}: {field!r} must be a string, got {value!r}. Fix that line.")
    return value
