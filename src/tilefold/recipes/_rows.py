"""Rows of a training: places of texts in the collection, which are read where they lie when a batch
needs them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tilefold._internal.typing import Model
from tilefold.retrieval.common.provenance import texts_digest
from tilefold.retrieval.data.collection import Collection
from tilefold.retrieval.data.lazy_documents import LazyDocuments, id_key
from tilefold.retrieval.encoding.truncation import text_cutter
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.training_data.rows import TrainingRows

Places = npt.NDArray[np.int64]
_CHARACTERS, _NO_LIMIT = (
    8,
    10**6,
)  # of a token, at most about; tokens of a model that names none, or 10^30

_TEXTS_AT_ONCE = 4096  # that are measured together


class Held(list[str]):
    """Texts in memory, with what :class:`LazyDocuments` has."""

    def at(self, places: Sequence[int]) -> list[str]:
        return [self[place] for place in places]

    def sizes(self, places: Places) -> Places:
        return np.array([len(self[place]) for place in places], np.int64)

    @cached_property
    def text_keys(self) -> npt.NDArray[np.uint64]:
        return np.fromiter(map(id_key, self), np.uint64, len(self))


@dataclass(frozen=True, eq=False)
class Column(Sequence[str]):
    """The texts of n rows, by their places ``[n]`` among all queries or documents."""

    texts: Held | LazyDocuments[str]
    places: Places

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return self.texts.at(self.places[row].tolist())
        return self.texts.at([int(self.places[row])])[0]


@dataclass(frozen=True)
class Examples:
    """Rows that a trainer reads."""

    columns: dict[
        str,
        Any,
    ]  # in the order that the loss reads them: texts, and teacher scores as "label", float32
    pairs: int  # of one epoch; there may be several rows, with other negatives, for each
    notes: tuple[str, ...] = ()  # what the user should know of them
    texts: str = ""  # digest of all queries and documents

    def digest(self) -> str:
        """SHA-256 of the rows and of all texts."""
        sha = hashlib.sha256(self.texts.encode())
        for name, column in self.columns.items():
            sha.update(name.encode())
            sha.update(
                (column.places.astype("<i8") if isinstance(column, Column) else column).tobytes(),
            )
        return sha.hexdigest()


class Pairs(NamedTuple):
    """P pairs of a query and a relevant document: ids of the queries, and the places ``[P]`` of
    both.
    """

    names: list[str]
    queries: Places
    documents: Places


def training_pairs(collection: Collection) -> Pairs:
    """The (query, relevant document) pairs of the ``"train"`` split."""
    named = collection.pairs("train") if "train" in collection.qrels else []
    if not named:
        got = f"(splits: {sorted(collection.qrels) or 'none'})"
        remedy = "add qrels/train.tsv with at least one positive judgement."
        raise ValueError(
            f"collection {collection.name!r} has no pairs in its 'train' split {got}; {remedy}",
        )
    if len(named) < 2:
        why = "which no other document is a negative for; give at least 2 positive judgements."
        raise ValueError(
            f"collection {collection.name!r} has a single pair in its 'train' split, {why}",
        )
    names = [query for query, _ in named]
    place_of = {name: place for place, name in enumerate(collection.queries)}
    queries = np.array([place_of.get(name, -1) for name in names], np.int64)
    documents = collection.places([document for _, document in named])
    for place, (query, document) in zip(
        np.minimum(queries, documents).tolist(),
        named,
        strict=True,
    ):
        if place < 0:
            lacks = f"query {query!r} and document {document!r}, of which it lacks one"
            raise ValueError(
                f"collection {collection.name!r} judges {lacks}; load it with unknown='drop'.",
            )
    return Pairs(names, queries, documents)


def document_texts(collection: Collection) -> Column:
    """The contents of all documents, in their order."""
    contents: Mapping[str, str] = collection.contents()
    return Column(
        contents if isinstance(contents, LazyDocuments) else Held(contents.values()),
        np.arange(len(contents)),
    )


def pair_examples(collection: Collection, document: str) -> Examples:
    """The columns ``"query"`` and `document` of the pairs."""
    pairs = training_pairs(collection)
    return examples_of(
        collection,
        len(pairs.names),
        {"query": pairs.queries, document: pairs.documents},
    )


def examples_of(
    collection: Collection,
    pairs: int,
    columns: dict[str, Any],
    notes: tuple[str, ...] = (),
) -> Examples:
    """Examples with texts for places: those of queries in the column ``"query"``, else those of
    documents.
    """
    queries, documents = Held(collection.queries.values()), document_texts(collection).texts
    texts = {
        name: places
        if name == "label"
        else Column(queries if name == "query" else documents, places)
        for name, places in columns.items()
    }
    return Examples(
        texts,
        pairs,
        notes,
        texts_digest(collection.queries) + texts_digest(collection.contents()),
    )


class Mined:
    """The pairs that have negatives in mined rows, and, if `scored`, a teacher's score of their
    own.

    `places` ``[D]`` are those of the documents of `rows` in the collection.
    """

    def __init__(self, pairs: Pairs, rows: TrainingRows, places: Places, *, scored: bool) -> None:
        place_of = {query: place for place, query in enumerate(rows.queries)}
        group = np.array(
            [place_of.get(query, -1) for query in pairs.names],
            np.int64,
        )  # of each pair
        self._places, positive = places, _rows_of(rows, group, places, pairs.documents)
        _check_relevant(rows, group, positive)
        negative = ~rows.relevant
        negative[positive[positive >= 0]] = False
        before = np.append(0, np.cumsum(negative))[rows.offsets]  # negatives before each query's
        count = np.append(np.diff(before), 0)[group]
        keep = np.flatnonzero((count > 0) & ((positive >= 0) | (not scored)))
        self.pairs = Pairs(
            [pairs.names[i] for i in keep],
            pairs.queries[keep],
            pairs.documents[keep],
        )
        self._first, self._count = before[group[keep]], count[keep]
        self._positive, self._negatives = positive[keep], np.flatnonzero(negative)
        self._document, self._target = rows.document, rows.target if scored else None

    def columns(self, count: int, draws: int, seed: int) -> dict[str, Any]:
        """The pairs so many times, with `count` negatives of new draws, by their places, and
        ``"label"``, the scores.

        No negative comes twice in a row where there are enough of them.
        """
        pairs = np.tile(np.arange(len(self.pairs.queries)), draws)
        drawn = self._negatives[self._first[pairs, None] + _draw(self._count[pairs], count, seed)]
        columns: dict[str, Any] = {
            "query": self.pairs.queries[pairs],
            "positive": self.pairs.documents[pairs],
        }
        for number in range(count):
            columns[f"negative_{number + 1}"] = self._places[self._document[drawn[:, number]]]
        if self._target is not None:
            columns["label"] = self._target[np.column_stack([self._positive[pairs], drawn])]
        return columns


def _check_relevant(rows: TrainingRows, group: Places, positive: Places) -> None:
    """Raise a ``DataError`` where most documents that the rows of these queries call relevant are
    not judged so.
    """
    marked = np.diff(np.append(0, np.cumsum(rows.relevant))[rows.offsets])[
        np.unique(group[group >= 0])
    ].sum()
    judged = rows.relevant[np.unique(positive[positive >= 0])].sum()
    if 2 * judged < marked:
        got = f"{marked:,} of its queries, of which it calls {judged:,} relevant. Take negatives; this may be a run."
        raise DataError(
            "training rows: expected relevant documents as the split 'train' judges them, got "
            f"{got}",
        )


def _rows_of(rows: TrainingRows, group: Places, places: Places, wanted: Places) -> Places:
    """The row of each of P pairs, -1 where there is none: of the `wanted` document among the rows
    of its query.

    `group` ``[P]`` are the queries, -1 for none, and `places` ``[D]`` those of the documents of
    `rows`.
    """
    found = np.full(len(group), -1, np.int64)
    at, ends, live = rows.offsets[group], rows.offsets[group + 1], np.flatnonzero(group >= 0)
    while (live := live[at[live] < ends[live]]).size:
        hit = places[rows.document[at[live]]] == wanted[live]
        found[live[hit]] = at[live[hit]]
        live = live[~hit]
        at[live] += 1
    return found


def _draw(sizes: Places, count: int, seed: int) -> Places:
    """`count` of the numbers below each of the n `sizes`, ``[n, count]``; again and again only
    where they run out.
    """
    chance = np.random.default_rng(seed)
    drawn = np.empty((len(sizes), 0), np.int64)
    for number in range(count):
        left = sizes - number
        new = chance.integers(0, np.where(left > 0, left, sizes))
        for taken in np.sort(drawn, axis=1).T:  # numbers that are left, counted from 0
            new += (left > 0) & (new >= taken)
        drawn = np.column_stack([drawn, new])
    return drawn


class Reader:
    """Turns places in a batch into texts, without ends that `model` would not read; `digest` tells
    readers apart.
    """

    def __init__(self, columns: dict[str, Any], model: Model, digest: str) -> None:
        self._columns, self._cut, self._digest = (
            columns,
            text_cutter(model, copy_tokenizer=True),
            digest,
        )
        self._ends: tuple[dict[int, int], ...] = (
            {},
            {},
        )  # of texts that are cut, of documents and queries, by place
        late = getattr(next(iter(model or ()), None), "document_length", None)
        self._longest = _CHARACTERS * min(
            late or getattr(model, "max_seq_length", None) or _NO_LIMIT,
            _NO_LIMIT,
        )

    def __len__(self) -> int:
        return len(self._columns["query"])

    def text_keys(self, rows: Places) -> npt.NDArray[np.uint64]:
        """Keys ``[n, C]`` of the texts of `n` rows, equal for equal texts; no text is read."""
        columns = [column for column in self._columns.values() if isinstance(column, Column)]
        return np.column_stack([column.texts.text_keys[column.places[rows]] for column in columns])

    def document_lengths(self) -> Places:
        """Characters of the relevant document of each row, as far as the model reads it.

        Texts in memory and in a file have the same lengths, unlike :meth:`sizes`.
        """
        name, column = next(
            (name, column)
            for name, column in self._columns.items()
            if name != "query" and isinstance(column, Column)
        )
        lengths = np.empty(len(column), np.int64)
        for start in range(0, len(column), _TEXTS_AT_ONCE):
            part = slice(start, start + _TEXTS_AT_ONCE)
            texts = self._read(name, column.places[part].tolist())
            lengths[part] = [len(text) for text in texts]
        return lengths

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {name: self._read(name, values) for name, values in batch.items()}

    def rows(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """The rows of a batch."""
        values = {
            name: getattr(column, "places", column)[numbers].tolist()
            for name, column in self._columns.items()
        }
        return [
            dict(zip(values, row, strict=True)) for row in zip(*self(values).values(), strict=True)
        ]

    def sizes(self, numbers: Sequence[int]) -> Places:
        """About how long the texts of n rows are that the model reads, ``[n]``."""
        columns = [column for column in self._columns.values() if isinstance(column, Column)]
        return sum(
            np.minimum(one.texts.sizes(one.places[numbers]), self._longest) for one in columns
        )  # type: ignore[return-value]

    def _read(self, name: str, places: list[Any]) -> list[Any]:
        if not isinstance(column := self._columns[name], Column):
            return places
        texts, ends = column.texts.at(places), self._ends[name == "query"]
        new = [row for row, place in enumerate(places) if place not in ends]
        for row, short in zip(new, self._cut([texts[row] for row in new]), strict=True):
            if len(short) < len(texts[row]):
                ends[places[row]] = len(short)
        return [text[: ends.get(place)] for text, place in zip(texts, places, strict=True)]

    def __deepcopy__(self, memo: object) -> Reader:
        return self

    def __reduce__(
        self,
    ) -> tuple[type[str], tuple[str]]:  # datasets takes a fingerprint of what it pickles
        return str, (self._digest,)


class Dealt:
    """Batches of a sampler, whose rows are dealt to ranks, a part each, so that the parts take
    about equally long.
    """

    def __init__(self, sampler: Any, reader: Reader, ranks: int) -> None:
        self._sampler, self._reader, self._ranks = sampler, reader, ranks

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._sampler:
            if len(batch) % self._ranks:
                yield batch
                continue
            dealt = np.array(batch)[np.argsort(-self._reader.sizes(batch), kind="stable")].reshape(
                -1,
                self._ranks,
            )
            dealt[1::2] = dealt[1::2, ::-1]
            yield dealt.T.ravel().tolist()
