"""Collections in the BEIR layout: ``corpus.jsonl``, ``queries.jsonl`` and ``qrels/<split>.tsv``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tilefold.retrieval._files import atomic_directory, is_unicode, json_line, numbered_lines
from tilefold.retrieval.errors import DataError

__all__ = ["Collection", "Document", "load_beir"]

Qrels = dict[str, dict[str, int]]

_BEIR_NAMES = ("corpus.jsonl", "queries.jsonl", "qrels")
BEIR_LAYOUT = "A BEIR folder has corpus.jsonl, queries.jsonl and qrels/<split>.tsv."


@dataclass(frozen=True)
class Document:
    """One document. `title` may be empty."""

    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """Title and text as one string, separated by a line break: the input of every encoder and of BM25."""
        return f"{self.title}\n{self.text}" if self.title and self.text else self.title or self.text


@dataclass
class Collection:
    """Documents, queries and judgements.

    Attributes:
        name: a short name for reports.
        documents: document id -> :class:`Document`, in corpus order.
        queries: query id -> text, of all splits.
        qrels: split -> query id -> document id -> grade (0 is judged and not relevant).
    """

    name: str
    documents: dict[str, Document]
    queries: dict[str, str]
    qrels: dict[str, dict[str, dict[str, int]]]

    def contents(self) -> dict[str, str]:
        """Document id -> contents, in corpus order."""
        return {document.id: document.contents for document in self.documents.values()}

    def split_qrels(self, split: str) -> dict[str, dict[str, int]]:
        """The judgements of `split`; the error for an unknown split names the known ones."""
        try:
            return self.qrels[split]
        except KeyError:
            known = ", ".join(sorted(self.qrels)) or "none"
            raise ValueError(f"split: {self.name} has {known}, got {split!r}. Choose one of them.") from None

    def split_queries(self, split: str) -> dict[str, str]:
        """Query id -> text of the queries judged in `split`, in the order of the judgements."""
        return {query_id: self.queries[query_id] for query_id in self.split_qrels(split)}

    def pairs(self, split: str) -> list[tuple[str, str]]:
        """``(query id, document id)`` for every positive grade in `split`."""
        return [
            (query_id, document_id)
            for query_id, judged in self.split_qrels(split).items()
            for document_id, grade in judged.items()
            if grade > 0
        ]

    def save_beir(self, path: str | Path) -> None:
        """Write a BEIR folder atomically; only an earlier BEIR folder is replaced.

        Raises:
            FileExistsError: `path` holds other files.
            DataError: an empty id, or a judged one with a tab or a line break, which the layout cannot hold.
        """
        self._check_savable()
        with atomic_directory(Path(path), own_names=_BEIR_NAMES) as folder:
            with (folder / "corpus.jsonl").open("w", encoding="utf-8") as stream:
                for document in self.documents.values():
                    row = {"_id": document.id, "title": document.title, "text": document.text}
                    stream.write(json_line(row))
            with (folder / "queries.jsonl").open("w", encoding="utf-8") as stream:
                for query_id, text in self.queries.items():
                    stream.write(json_line({"_id": query_id, "text": text}))
            (folder / "qrels").mkdir()
            for split, qrels in self.qrels.items():
                with (folder / "qrels" / f"{split}.tsv").open("w", encoding="utf-8") as stream:
                    stream.write("query-id\tcorpus-id\tscore\n")
                    for query_id, judged in qrels.items():
                        stream.writelines(f"{query_id}\t{doc}\t{grade}\n" for doc, grade in judged.items())

    def _check_savable(self) -> None:
        judged = {name for qrels in self.qrels.values() for q, found in qrels.items() for name in (q, *found)}
        for name in (*self.documents, *self.queries, *judged):
            if not name or not is_unicode(name) or (name in judged and any(mark in name for mark in "\t\r\n")):
                raise DataError(
                    f"ids: the BEIR layout holds no empty id, and in judgements none with a tab or a line break, "
                    f"got {name!r}. Rename it."
                )


def load_beir(path: str | Path, unknown: Literal["error", "drop"] = "error") -> Collection:
    """Read a BEIR folder.

    Args:
        path: the folder.
        unknown: ``"error"``, or ``"drop"`` to leave out judgements of queries or documents that are not in the
            collection (in a sample of a corpus).

    Raises:
        FileNotFoundError: the folder, the corpus, the queries or every qrels file is missing.
        DataError: malformed JSONL or TSV, missing or repeated ids, an empty collection, unknown ids in the
            judgements. Messages name file and line.
    """
    if unknown not in ("error", "drop"):
        raise ValueError(f"unknown: expected 'error' or 'drop', got {unknown!r}.")
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder. {BEIR_LAYOUT}")
    documents: dict[str, Document] = {}
    for line, row in _read_rows(folder / "corpus.jsonl"):
        document_id = _text_id(row, folder / "corpus.jsonl", line, documents)
        title = _string(row, "title", folder / "corpus.jsonl", line, optional=True)
        documents[document_id] = Document(document_id, title, _string(row, "text", folder / "corpus.jsonl", line))
    queries: dict[str, str] = {}
    for line, row in _read_rows(folder / "queries.jsonl"):
        query_id = _text_id(row, folder / "queries.jsonl", line, queries)
        queries[query_id] = _string(row, "text", folder / "queries.jsonl", line)
    for name, found in (("corpus.jsonl", documents), ("queries.jsonl", queries)):
        if not found:
            raise DataError(f"{folder / name}: expected at least one line, got an empty file. {BEIR_LAYOUT}")
    files = sorted((folder / "qrels").glob("*.tsv"))
    if not files:
        raise FileNotFoundError(f"{folder / 'qrels'}: no .tsv file with judgements. {BEIR_LAYOUT}")
    qrels = {file.stem: _read_qrels(file, queries, documents, unknown) for file in files}
    return Collection(folder.resolve().name, documents, queries, qrels)


def _read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file. {BEIR_LAYOUT}")
    with path.open(encoding="utf-8-sig") as stream:
        for number, line in numbered_lines(stream, path):
            if line.strip():
                yield number, _json_object(line, path, number)


def _json_object(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # malformed JSON, a number with thousands of digits, too deep nesting
        raise DataError(
            f"{path}:{number}: expected one JSON object a line, got malformed JSON ({error}). Fix that line."
        ) from error
    if not isinstance(row, dict):
        raise DataError(f"{path}:{number}: expected one JSON object a line, got {type(row).__name__}. Fix that line.")
    return row


def _text_id(row: dict[str, Any], path: Path, number: int, seen: dict[str, Any]) -> str:
    value = row.get("_id")
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value:
        raise DataError(f"{path}:{number}: '_id' must be a non-empty string, got {value!r}. Give the line an '_id'.")
    if not is_unicode(value):
        raise DataError(f"{path}:{number}: '_id' must be text that UTF-8 can hold, got {value!r}. Fix that line.")
    if value in seen:
        raise DataError(f"{path}:{number}: '_id' {value!r} was given before. Ids must be unique.")
    return value


def _string(row: dict[str, Any], key: str, path: Path, number: int, optional: bool = False) -> str:
    value = row.get(key)
    if value is None and optional:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{path}:{number}: {key!r} must be a string, got {value!r}. Fix that line.")
    return value


def _read_qrels(
    path: Path, queries: dict[str, str], documents: dict[str, Document], unknown: Literal["error", "drop"]
) -> Qrels:
    qrels: Qrels = {}
    strays: list[str] = []
    with path.open(encoding="utf-8-sig") as stream:
        for number, line in numbered_lines(stream, path):
            fields = line.rstrip("\r\n").split("\t")
            if not line.strip() or (number == 1 and fields[0] in ("query-id", "query_id", "qid")):
                continue
            query_id, document_id, grade = _judgement(fields, path, number)
            if query_id not in queries or document_id not in documents:
                what = "query" if query_id not in queries else "document"
                name = query_id if what == "query" else document_id
                strays.append(f"{path}:{number}: unknown {what} {name!r}")
                continue
            judged = qrels.setdefault(query_id, {})
            if judged.get(document_id, grade) != grade:
                raise DataError(
                    f"{path}:{number}: query {query_id!r} and document {document_id!r} were judged "
                    f"{judged[document_id]} before, got {grade}. Keep one of the two lines."
                )
            judged[document_id] = grade
    if strays and unknown == "error":
        raise DataError(
            f"{strays[0]}; {len(strays)} judgement(s) in this file name queries or documents that are not in "
            "the collection. Complete the collection, or load it with unknown='drop' to leave them out."
        )
    if not qrels:
        raise DataError(f"{path}: expected at least one judgement of a known query and document, got none.")
    return qrels


def _judgement(fields: list[str], path: Path, number: int) -> tuple[str, str, int]:
    if len(fields) != 3:
        raise DataError(
            f"{path}:{number}: expected 3 tab-separated fields (query-id, corpus-id, score), "
            f"got {len(fields)}. Fix that line."
        )
    try:
        return fields[0], fields[1], int(fields[2])
    except ValueError:
        raise DataError(f"{path}:{number}: expected an integer grade, got {fields[2]!r}. Fix that line.") from None
