"""Rows of a training: positions of texts in the collection.

The texts are read from memory or from a file when a batch needs them.
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
from tilefold.retrieval.encoding.truncation import TextCutter
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.training_data.rows import TrainingRows

Positions = npt.NDArray[np.int64]
MAX_CHARACTERS_PER_TOKEN = 8  # estimate, for lengths of texts that are not tokenized
UNLIMITED_TOKENS = 10**6  # for a model without a maximum length, or with one such as 10^30
LENGTH_BATCH_SIZE = 4096  # texts that are measured together


class TextsInMemory(list[str]):
    """Texts in memory, with the methods of :class:`LazyDocuments` that rows need."""

    def at(self, positions: Sequence[int]) -> list[str]:
        """Return the texts at positions."""
        return [self[position] for position in positions]

    def sizes(self, positions: Positions) -> Positions:
        """Return the number of characters of the texts at positions."""
        return np.array([len(self[position]) for position in positions], np.int64)

    @cached_property
    def text_keys(self) -> npt.NDArray[np.uint64]:
        """A key of each text; equal texts have equal keys."""
        return np.fromiter(map(id_key, self), np.uint64, len(self))


@dataclass(frozen=True, eq=False)
class Column(Sequence[str]):
    """The texts of n training rows.

    Attributes:
        texts: all queries or all documents.
        positions: position ``[n]`` of each row's text among them.
    """

    texts: TextsInMemory | LazyDocuments[str]
    positions: Positions

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return self.texts.at(self.positions[row].tolist())
        return self.texts.at([int(self.positions[row])])[0]


@dataclass(frozen=True)
class Examples:
    """Rows that a trainer reads.

    Attributes:
        columns: columns in the order in which the loss reads them: texts as :class:`Column`, and
            teacher scores ``[n, documents]`` in fp32 as ``"label"``.
        pairs: number of pairs of one epoch; a pair may have several rows with different negatives.
        notes: what the user should know about the rows.
        texts: digest of all queries and documents.
    """

    columns: dict[str, Any]
    pairs: int
    notes: tuple[str, ...] = ()
    texts: str = ""

    def digest(self) -> str:
        """Return the SHA-256 of the rows and of all texts."""
        sha = hashlib.sha256(self.texts.encode())
        for name, column in self.columns.items():
            values = column.positions.astype("<i8") if isinstance(column, Column) else column
            sha.update(name.encode())
            sha.update(values.tobytes())
        return sha.hexdigest()


class Pairs(NamedTuple):
    """P pairs of a query and a relevant document.

    Attributes:
        query_ids: id of the query of each pair.
        queries: position ``[P]`` of the query among the collection's queries.
        documents: position ``[P]`` of the document among the collection's documents.
    """

    query_ids: list[str]
    queries: Positions
    documents: Positions


def training_pairs(collection: Collection) -> Pairs:
    """Return the pairs of query and relevant document in the split ``"train"``.

    Args:
        collection: corpus, queries and judgements.

    Returns:
        The pairs, with the positions of their texts in the collection.

    Raises:
        ValueError: for fewer than two pairs, or for a pair whose query or document is not in the
            collection.
    """
    id_pairs = collection.pairs("train") if "train" in collection.qrels else []
    if not id_pairs:
        splits = sorted(collection.qrels) or "none"
        raise ValueError(
            f"collection {collection.name!r} has no pairs in its 'train' split (splits: {splits}); "
            "add qrels/train.tsv with at least one positive judgement.",
        )
    if len(id_pairs) < 2:
        raise ValueError(
            f"collection {collection.name!r} has a single pair in its 'train' split, which no "
            "other document is a negative for; give at least 2 positive judgements.",
        )
    query_ids = [query_id for query_id, _ in id_pairs]
    document_ids = [document_id for _, document_id in id_pairs]
    position_of_query = {query_id: position for position, query_id in enumerate(collection.queries)}
    # -1 stands for a query or document that the collection does not have
    queries = np.array([position_of_query.get(query_id, -1) for query_id in query_ids], np.int64)
    documents = collection.positions_of(document_ids)
    incomplete = np.flatnonzero((queries < 0) | (documents < 0))
    if incomplete.size:
        query_id, document_id = id_pairs[incomplete[0]]
        raise ValueError(
            f"collection {collection.name!r} judges query {query_id!r} and document "
            f"{document_id!r}, of which it lacks one; load it with unknown='drop'.",
        )
    return Pairs(query_ids, queries, documents)


def document_texts(collection: Collection) -> Column:
    """Return the contents of all documents, in their order."""
    contents: Mapping[str, str] = collection.contents()
    if isinstance(contents, LazyDocuments):
        return Column(contents, np.arange(len(contents)))
    return Column(TextsInMemory(contents.values()), np.arange(len(contents)))


def pair_examples(collection: Collection, document_column: str) -> Examples:
    """Return the rows of the training pairs, without mined negatives.

    Args:
        collection: collection of the pairs.
        document_column: name of the column of relevant documents.
    """
    pairs = training_pairs(collection)
    positions = {"query": pairs.queries, document_column: pairs.documents}
    return examples_of(collection, len(pairs.query_ids), positions)


def examples_of(
    collection: Collection,
    n_pairs: int,
    columns: Mapping[str, npt.NDArray[Any]],
    notes: tuple[str, ...] = (),
) -> Examples:
    """Create training rows from the positions of their texts in a collection.

    Args:
        collection: collection of the texts.
        n_pairs: number of pairs of one epoch. A pair may have several rows.
        columns: name -> array with a value for each of n rows. ``"query"`` has positions ``[n]``
            of queries, ``"label"`` teacher scores ``[n, documents]``, and every other column, such
            as ``"positive"``, positions ``[n]`` of documents.
        notes: what the user should know about the rows.
    """
    queries = TextsInMemory(collection.queries.values())
    documents = document_texts(collection).texts
    columns_with_texts: dict[str, Any] = {}
    for name, values in columns.items():
        if name == "label":
            columns_with_texts[name] = values
        else:
            texts = queries if name == "query" else documents
            columns_with_texts[name] = Column(texts, values)
    all_texts = texts_digest(collection.queries) + texts_digest(collection.contents())
    return Examples(columns_with_texts, n_pairs, notes, all_texts)


class PairsWithNegatives:
    """The pairs whose query has mined negatives.

    Args:
        pairs: all pairs.
        rows: mined rows: for each query, documents with their teacher's scores.
        positions: position ``[D]`` in the collection of each document of `rows`.
        scored: whether a pair needs a teacher's score of its relevant document, too.

    Attributes:
        pairs: the pairs that can be trained.

    Raises:
        DataError: if the rows call other documents relevant than the collection.
    """

    def __init__(
        self,
        pairs: Pairs,
        rows: TrainingRows,
        positions: Positions,
        *,
        scored: bool,
    ) -> None:
        """Find the negatives of each pair, and leave out pairs without any.

        Args:
            pairs: all P pairs of a query and a relevant document.
            rows: R mined rows, one for each query and document. The rows of a query follow one
                another, from ``rows.offsets[group]`` to ``rows.offsets[group + 1]``. They are
                called a group below.
            positions: position ``[D]`` in the collection of each document of `rows`.
            scored: whether a pair needs a teacher's score of its relevant document, too.

        Raises:
            DataError: if the rows call other documents relevant than the collection.
        """
        group_of_query = {query_id: group for group, query_id in enumerate(rows.queries)}
        # the group of each pair's query, or -1 if the query was not mined
        groups = np.array([group_of_query.get(name, -1) for name in pairs.query_ids], np.int64)
        positive_rows = _find_positive_rows(rows, groups, positions, pairs.documents)
        _check_relevant(rows, groups, positive_rows)
        is_negative = ~rows.relevant
        # The file may not mark a document as relevant that the collection does.
        is_negative[positive_rows[positive_rows >= 0]] = False
        # number of negatives in all rows before the first row of each group
        n_negatives_before = np.append(0, np.cumsum(is_negative))[rows.offsets]
        n_negatives_of_group = np.diff(n_negatives_before)
        # Group -1 reads the last element, which is the appended 0.
        n_negatives = np.append(n_negatives_of_group, 0)[groups]
        usable = n_negatives > 0
        if scored:
            usable &= positive_rows >= 0
        usable_pairs = np.flatnonzero(usable)
        self.pairs = Pairs(
            [pairs.query_ids[pair] for pair in usable_pairs],
            pairs.queries[usable_pairs],
            pairs.documents[usable_pairs],
        )
        self._positions = positions
        self._document_of_row = rows.document
        self._scores = rows.target if scored else None
        self._positive_rows = positive_rows[usable_pairs]
        self._negative_rows = np.flatnonzero(is_negative)
        # where the negatives of each pair's query begin in `_negative_rows`
        self._first_negative = n_negatives_before[groups[usable_pairs]]
        self._n_negatives = n_negatives[usable_pairs]

    def columns(self, n_negatives: int, n_draws: int, seed: int) -> dict[str, npt.NDArray[Any]]:
        """Return the columns of n training rows: a pair with negatives drawn for its query.

        A row has no negative twice if its query has enough of them.

        Args:
            n_negatives: number of negatives of a row.
            n_draws: number of rows of each pair. Each of them draws negatives of its own.
            seed: seed of the draws.

        Returns:
            Name -> array. ``"query"``, ``"positive"`` and ``"negative_1"`` to
            ``"negative_<n_negatives>"`` hold positions ``[n]`` of texts in the collection. If the
            pairs are scored, ``"label"`` holds the teacher's scores ``[n, 1 + n_negatives]`` of
            the positive and the negatives.
        """
        pairs = np.tile(np.arange(len(self.pairs.queries)), n_draws)  # the pair of each row
        # A draw counts the negatives of the pair's query. They follow one another in
        # `_negative_rows`, from `_first_negative` on.
        draws = draw_without_repetition(self._n_negatives[pairs], n_negatives, seed)
        negative_rows = self._negative_rows[self._first_negative[pairs, None] + draws]
        columns: dict[str, npt.NDArray[Any]] = {
            "query": self.pairs.queries[pairs],
            "positive": self.pairs.documents[pairs],
        }
        for number in range(n_negatives):
            documents = self._document_of_row[negative_rows[:, number]]
            columns[f"negative_{number + 1}"] = self._positions[documents]
        if self._scores is not None:
            rows = np.column_stack([self._positive_rows[pairs], negative_rows])
            columns["label"] = self._scores[rows]
        return columns


def _check_relevant(rows: TrainingRows, groups: Positions, positive_rows: Positions) -> None:
    """Refuse mined rows whose relevant documents are mostly not relevant by the training split.

    Such a file is often a run, in which every retrieved document is marked as relevant.

    Args:
        rows: mined rows, one for each query and document. ``rows.relevant`` ``[R]`` marks the rows
            that the file calls relevant. The rows of a query follow one another, from
            ``rows.offsets[group]`` to ``rows.offsets[group + 1]``.
        groups: group ``[P]`` of the query of each training pair, -1 for a query without rows.
        positive_rows: row ``[P]`` of the relevant document of each pair, -1 for none.

    Raises:
        DataError: if fewer than half of the documents that the file calls relevant, for the
            training queries, are relevant by the split.
    """
    n_relevant_before = np.append(0, np.cumsum(rows.relevant))
    n_relevant_of_group = np.diff(n_relevant_before[rows.offsets])
    training_groups = np.unique(groups[groups >= 0])
    n_marked = n_relevant_of_group[training_groups].sum()
    rows_of_pairs = np.unique(positive_rows[positive_rows >= 0])
    n_confirmed = rows.relevant[rows_of_pairs].sum()
    if 2 * n_confirmed < n_marked:
        raise DataError(
            "training rows: expected relevant documents as the split 'train' judges them, got "
            f"{n_marked:,} of its queries, of which it calls {n_confirmed:,} relevant. Take "
            "negatives; this may be a run.",
        )


def _find_positive_rows(
    rows: TrainingRows,
    groups: Positions,
    positions: Positions,
    relevant: Positions,
) -> Positions:
    """Find the row of each pair's relevant document among the mined rows of its query.

    This is a linear search for all P pairs at once: each step compares the next row of every pair
    that still searches.

    Args:
        rows: mined rows, one for each query and document. ``rows.document`` ``[R]`` numbers the
            document of each row. The rows of a query follow one another, from
            ``rows.offsets[group]`` to ``rows.offsets[group + 1]``.
        groups: group ``[P]`` of the query of each pair, -1 for a query without rows.
        positions: position ``[D]`` in the collection of each document of `rows`.
        relevant: position ``[P]`` in the collection of each pair's relevant document.

    Returns:
        Row ``[P]`` of each pair's relevant document, -1 for none.
    """
    positive_rows = np.full(len(groups), -1, np.int64)
    # for group -1 arbitrary rows, which are not searched
    next_row = rows.offsets[groups]
    end_row = rows.offsets[groups + 1]
    searching = np.flatnonzero(groups >= 0)  # numbers of the pairs that still search
    searching = searching[next_row[searching] < end_row[searching]]
    while searching.size:
        candidates = next_row[searching]
        is_relevant = positions[rows.document[candidates]] == relevant[searching]
        positive_rows[searching[is_relevant]] = candidates[is_relevant]
        searching = searching[~is_relevant]
        next_row[searching] += 1
        searching = searching[next_row[searching] < end_row[searching]]
    return positive_rows


def draw_without_repetition(sizes: Positions, count: int, seed: int) -> Positions:
    """Draw `count` different random numbers from each of n ranges ``0 .. size - 1``.

    All ranges are drawn from together, one number of each at a time. Numbers repeat only where
    `count` exceeds the size.

    Args:
        sizes: sizes ``[n]`` of the ranges, at least 1.
        count: how many numbers are drawn from each range.
        seed: seed of the draws.

    Returns:
        Numbers ``[n, count]``.
    """
    generator = np.random.default_rng(seed)
    drawn = np.empty((len(sizes), 0), np.int64)
    for n_drawn in range(count):
        n_left = sizes - n_drawn
        has_left = n_left > 0
        new = generator.integers(0, np.where(has_left, n_left, sizes))
        # `new` is the rank of the drawn number among the numbers that are left. Skipping the
        # numbers that were drawn before, in ascending order, turns the rank into the number.
        for drawn_number in np.sort(drawn, axis=1).T:
            new += has_left & (new >= drawn_number)
        drawn = np.column_stack([drawn, new])
    return drawn


class Reader:
    """Function that turns the positions of texts in a batch into texts.

    A text that is much longer than the model's limit is cut near the limit, so that the tokenizer
    does not read the rest of it.

    Args:
        columns: columns of all rows, as in :class:`Examples`.
        model: model that reads the texts.
        digest: digest of the rows, which identifies the reader in caches of ``datasets``.
    """

    def __init__(self, columns: dict[str, Any], model: Model, digest: str) -> None:
        """Prepare to cut texts at the model's limit, and estimate that limit in characters.

        Args:
            columns: columns of all rows by name: texts as :class:`Column`, or scores.
            model: model that reads the texts.
            digest: digest of the rows, which identifies the reader in caches of ``datasets``.
        """
        self._columns = columns
        self._text_cutter = TextCutter(model, copy_tokenizer=True)
        self._digest = digest
        # length in characters of each text that is cut, by position
        self._cut_lengths_of_queries: dict[int, int] = {}
        self._cut_lengths_of_documents: dict[int, int] = {}
        first_module = next(iter(model or ()), None)
        max_tokens = getattr(first_module, "document_length", None)  # only a ColBERT has it
        if not max_tokens:
            max_tokens = getattr(model, "max_seq_length", None) or UNLIMITED_TOKENS
        self._max_characters = MAX_CHARACTERS_PER_TOKEN * min(max_tokens, UNLIMITED_TOKENS)

    def __len__(self) -> int:
        return len(self._columns["query"])

    def _text_columns(self) -> dict[str, Column]:
        """Return the columns of texts, without the scores."""
        return {
            name: column for name, column in self._columns.items() if isinstance(column, Column)
        }

    def text_keys(self, rows: Positions) -> npt.NDArray[np.uint64]:
        """Return keys of the texts of n rows, by which equal texts are recognized.

        The keys were computed before, so that no text is read.

        Args:
            rows: numbers ``[n]`` of the rows.

        Returns:
            Keys ``[n, C]`` of the texts in C columns; equal texts have equal keys.
        """
        keys = [
            column.texts.text_keys[column.positions[rows]]
            for column in self._text_columns().values()
        ]
        return np.column_stack(keys)

    def document_lengths(self) -> Positions:
        """Return the length of the relevant document of each row, as far as the model reads it.

        All documents are read and cut for this. Their lengths are equal for texts in memory and in
        a file, so that batches by length are equal, too. The estimates of :meth:`sizes` are not.

        Returns:
            Numbers of characters ``[n]`` for all n rows.
        """
        columns = self._text_columns()
        # The column of relevant documents is the first one after the queries.
        name = next(name for name in columns if name != "query")
        positions = columns[name].positions
        lengths = np.empty(len(positions), np.int64)
        for start in range(0, len(positions), LENGTH_BATCH_SIZE):
            end = start + LENGTH_BATCH_SIZE
            texts = self._read_column(name, positions[start:end].tolist())
            lengths[start:end] = [len(text) for text in texts]
        return lengths

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Replace the positions in a batch by texts; scores stay.

        Args:
            batch: values of each column.
        """
        return {name: self._read_column(name, values) for name, values in batch.items()}

    def rows(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Read the texts and scores of some rows.

        Args:
            numbers: numbers of the rows.

        Returns:
            One dictionary per row, from the name of a column to its text or scores.
        """
        batch = {}
        for name, column in self._columns.items():
            values = column.positions if isinstance(column, Column) else column
            batch[name] = values[numbers].tolist()
        columns = self(batch)  # texts instead of positions
        return [
            dict(zip(columns, row_values, strict=True))
            for row_values in zip(*columns.values(), strict=True)
        ]

    def sizes(self, numbers: Sequence[int]) -> Positions:
        """Estimate how many characters the model reads of each of n rows.

        Texts are not tokenized. A long text counts as 8 characters for each token that the model
        reads at most.

        Args:
            numbers: numbers ``[n]`` of the rows.

        Returns:
            Numbers of characters ``[n]``, the sum over all texts of a row.
        """
        total = np.zeros(len(numbers), np.int64)
        for column in self._text_columns().values():
            text_sizes = column.texts.sizes(column.positions[numbers])
            total += np.minimum(text_sizes, self._max_characters)
        return total

    def _read_column(self, name: str, values: list[Any]) -> list[Any]:
        """Return the texts of a column, cut near the model's maximum length.

        The lengths of cut texts are cached, because cutting a text tokenizes it.

        Args:
            name: name of the column.
            values: positions of texts; or scores, which are returned unchanged.
        """
        column = self._columns[name]
        if not isinstance(column, Column):  # scores
            return values
        # position of a text -> its length in characters after the cut
        cut_lengths = self._cut_lengths_of_documents
        if name == "query":
            cut_lengths = self._cut_lengths_of_queries
        texts = column.texts.at(values)
        # texts that were not cut before; most are short, and cutting them returns them unchanged
        uncached = [row for row, position in enumerate(values) if position not in cut_lengths]
        cut_texts = self._text_cutter.cut([texts[row] for row in uncached])
        for row, cut_text in zip(uncached, cut_texts, strict=True):
            if len(cut_text) < len(texts[row]):
                cut_lengths[values[row]] = len(cut_text)
        # A text without a cut length is short enough: text[:None] is all of it.
        return [
            text[: cut_lengths.get(position)] for text, position in zip(texts, values, strict=True)
        ]

    def __deepcopy__(self, memo: object) -> Reader:
        return self

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        # datasets takes a fingerprint of what it pickles
        return str, (self._digest,)


class BalancedBatches:
    """Batches of a sampler, reordered so that all ranks read about as much text.

    Each rank takes a consecutive part of a batch. Rows are dealt from long to short, and the ranks
    take turns in alternating order.

    Args:
        sampler: batches of row numbers.
        reader: estimates the sizes of rows.
        n_ranks: number of ranks.
    """

    def __init__(self, sampler: Any, reader: Reader, n_ranks: int) -> None:
        self._sampler = sampler
        self._reader = reader
        self._n_ranks = n_ranks

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._sampler:
            if len(batch) % self._n_ranks:
                yield batch
                continue
            from_long_to_short = np.argsort(-self._reader.sizes(batch), kind="stable")
            # one row of the matrix for each turn, one column for each rank
            turns = np.array(batch)[from_long_to_short].reshape(-1, self._n_ranks)
            turns[1::2] = turns[1::2, ::-1]
            yield turns.T.ravel().tolist()
