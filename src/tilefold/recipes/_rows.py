"""Training rows, as positions of texts or page images in a collection.

They are read from memory or from files when a batch needs them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from tilefold._internal.typing import Model
from tilefold.retrieval.common.provenance import texts_digest
from tilefold.retrieval.data.collection import Collection
from tilefold.retrieval.data.documents import Content
from tilefold.retrieval.data.lazy_documents import LazyDocuments, id_key
from tilefold.retrieval.data.pages import Page
from tilefold.retrieval.encoding.truncation import TextShortener
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.training_data.rows import TrainingRows

Positions = npt.NDArray[np.int64]
PAGE_THREADS = 8  # threads that decode the images of a batch
PAGE_CHARACTERS = 8192  # size of a page in estimates: about a thousand tokens
MAX_CHARACTERS_PER_TOKEN = 8  # estimate for texts that are not tokenized
MAX_TOKENS = 10**6  # limit of a model without a maximum length, or with one such as 10^30
LENGTH_BATCH_SIZE = 4096  # number of texts that are read at a time to measure their lengths


class TextsInMemory(list[str]):
    """Texts in memory, with the methods of :class:`LazyDocuments` that training rows need."""

    def at(self, positions: Sequence[int]) -> list[str]:
        """Return the texts at the given positions."""
        return [self[position] for position in positions]

    def sizes(self, positions: Positions) -> Positions:
        """Return the numbers of characters of the texts at the given positions."""
        return np.array([len(self[position]) for position in positions], np.int64)

    @cached_property
    def text_keys(self) -> npt.NDArray[np.uint64]:
        """64-bit keys of all texts, ``[n]``; equal texts have equal keys."""
        return np.fromiter(map(id_key, self), np.uint64, len(self))


class PagesInMemory(list[Content]):
    """Page images of a collection, which are read when a batch needs them; some may be texts."""

    def at(self, positions: Sequence[int]) -> list[Any]:
        """Return the images, or the texts, at the given positions.

        Images are decoded in several threads.

        Raises:
            DataError: if a page cannot be read.
        """
        with ThreadPoolExecutor(PAGE_THREADS) as executor:
            return list(executor.map(_read_content, [self[position] for position in positions]))

    def sizes(self, positions: Positions) -> Positions:
        """Return the number of characters of each text. A page counts as a constant number.

        Args:
            positions: positions of the texts and pages.
        """
        sizes = []
        for position in positions:
            content = self[position]
            sizes.append(PAGE_CHARACTERS if isinstance(content, Page) else len(content))
        return np.array(sizes, np.int64)

    @cached_property
    def text_keys(self) -> npt.NDArray[np.uint64]:
        """64-bit keys of all pages, ``[n]``; the same page of the same file has the same key."""
        names = [
            f"{content.file}#{content.number}" if isinstance(content, Page) else content
            for content in self
        ]
        return np.fromiter(map(id_key, names), np.uint64, len(names))


def _read_content(content: Content) -> Any:
    """Return the image of a page, and a text unchanged."""
    return content.image() if isinstance(content, Page) else content


@dataclass(frozen=True, eq=False)
class Column(Sequence[str]):
    """The texts or page images of one column of n training rows.

    Attributes:
        texts: all queries or all documents of a collection.
        positions: position ``[n]`` of each row's text in `texts`.
    """

    texts: TextsInMemory | LazyDocuments[str] | PagesInMemory
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
        notes: notes about the rows for the user.
        texts_sha256: digest of all queries and documents.
    """

    columns: dict[str, Any]
    pairs: int
    notes: tuple[str, ...] = ()
    texts_sha256: str = ""

    def digest(self) -> str:
        """Return the SHA-256 of the rows and of all texts."""
        sha = hashlib.sha256(self.texts_sha256.encode())
        for name, column in self.columns.items():
            values = column.positions.astype("<i8") if isinstance(column, Column) else column
            sha.update(name.encode())
            sha.update(values.tobytes())
        return sha.hexdigest()


class Pairs(NamedTuple):
    """P pairs of a query and a relevant document.

    Attributes:
        query_ids: id of each pair's query.
        queries: position ``[P]`` of the query among the collection's queries.
        documents: position ``[P]`` of the document among the collection's documents.
    """

    query_ids: list[str]
    queries: Positions
    documents: Positions


def training_pairs(collection: Collection) -> Pairs:
    """Return the pairs of a query and a relevant document in the split ``"train"``.

    Args:
        collection: corpus, queries and judgements.

    Returns:
        The pairs, with the positions of their texts in the collection.

    Raises:
        ValueError: if there are fewer than two pairs, or if the query or document of a pair is not
            in the collection.
    """
    id_pairs = collection.pairs("train") if "train" in collection.qrels else []
    _check_pair_count(len(id_pairs), collection)
    query_ids = [query_id for query_id, _ in id_pairs]
    document_ids = [document_id for _, document_id in id_pairs]
    position_of_query = {query_id: position for position, query_id in enumerate(collection.queries)}
    # -1 stands for a query or document that the collection does not have.
    queries = np.array([position_of_query.get(query_id, -1) for query_id in query_ids], np.int64)
    documents = collection.positions_of(document_ids)
    incomplete = np.flatnonzero((queries < 0) | (documents < 0))
    if incomplete.size:
        query_id, document_id = id_pairs[incomplete[0]]
        raise ValueError(
            f"collection {collection.name!r} has a judgement for query {query_id!r} and document "
            f"{document_id!r}, but one of them is missing; load it with unknown='drop'.",
        )
    return Pairs(query_ids, queries, documents)


def _check_pair_count(n_pairs: int, collection: Collection) -> None:
    """Raise a ``ValueError`` if a collection has too few training pairs for in-batch negatives.

    Args:
        n_pairs: number of training pairs.
        collection: the collection, which the error names.
    """
    if n_pairs == 0:
        splits = sorted(collection.qrels) or "none"
        raise ValueError(
            f"collection {collection.name!r} has no pairs in its 'train' split (splits: {splits}); "
            "add at least two positive judgements, for example in a folder with corpus.jsonl, "
            "queries.jsonl and qrels/train.tsv.",
        )
    if n_pairs == 1:
        raise ValueError(
            f"collection {collection.name!r} has a single pair in its 'train' split, so there are "
            "no in-batch negatives; add at least one more positive judgement.",
        )


def document_texts(collection: Collection) -> Column:
    """Return the texts or pages of all documents of a collection, in their order."""
    contents: Mapping[str, Content] = collection.content()
    positions = np.arange(len(contents))
    if isinstance(contents, LazyDocuments):
        return Column(contents, positions)
    if any(isinstance(content, Page) for content in contents.values()):
        return Column(PagesInMemory(contents.values()), positions)
    return Column(TextsInMemory(cast("Iterable[str]", contents.values())), positions)


def pair_examples(collection: Collection, document_column: str) -> Examples:
    """Create one training row for each training pair, without mined negatives.

    Args:
        collection: collection with the pairs.
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
        collection: collection with the texts.
        n_pairs: number of pairs of one epoch. A pair may have several rows.
        columns: name -> array with a value for each of n rows. ``"query"`` has positions ``[n]``
            of queries, ``"label"`` teacher scores ``[n, documents]``, and every other column, such
            as ``"positive"``, positions ``[n]`` of documents.
        notes: notes about the rows for the user.
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
    texts_sha256 = texts_digest(collection.queries) + texts_digest(collection.content())
    return Examples(columns_with_texts, n_pairs, notes, texts_sha256)


class PairsWithNegatives:
    """The pairs whose query has mined negatives.

    Args:
        pairs: all pairs.
        rows: mined rows: for each query, documents with their teachers' scores.
        positions: position ``[D]`` in the collection of each document of `rows`.
        scored: whether a pair needs a teacher's score of its relevant document.

    Attributes:
        pairs: the pairs that can be trained.

    Raises:
        DataError: if most documents that the rows mark as relevant are not relevant in the
            collection.
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
            rows: mined rows, one for each query and document.
            positions: position ``[D]`` in the collection of each document of `rows`.
            scored: whether a pair needs a teacher's score of its relevant document.

        Raises:
            DataError: if most documents that the rows mark as relevant are not relevant in the
                collection.
        """
        number_of_query = {query_id: number for number, query_id in enumerate(rows.queries)}
        # number of each pair's query in `rows`, or -1 if the query was not mined
        queries = np.array([number_of_query.get(name, -1) for name in pairs.query_ids], np.int64)
        positive_rows = _find_positive_rows(rows, queries, positions, pairs.documents)
        _check_relevant(rows, queries, positive_rows)
        negatives = _find_negatives(rows, positive_rows)
        # The index -1 reads the last element, the appended 0: no negatives without mining.
        n_negatives = np.append(negatives.counts, 0)[queries]
        is_usable = n_negatives > 0
        if scored:
            is_usable &= positive_rows >= 0
        usable_pairs = np.flatnonzero(is_usable)
        self.pairs = Pairs(
            [pairs.query_ids[pair] for pair in usable_pairs],
            pairs.queries[usable_pairs],
            pairs.documents[usable_pairs],
        )
        self._positions = positions
        self._document_of_row = rows.document
        self._scores = rows.target if scored else None
        self._positive_rows = positive_rows[usable_pairs]
        self._negative_rows = negatives.rows
        # index in `_negative_rows` of the first negative of each pair's query
        self._first_negative = negatives.first[queries[usable_pairs]]
        self._n_negatives = n_negatives[usable_pairs]

    def columns(self, n_negatives: int, n_draws: int, seed: int) -> dict[str, npt.NDArray[Any]]:
        """Return the columns of n training rows, each a pair with negatives drawn for its query.

        The negatives of a row are distinct if its query has enough of them.

        Args:
            n_negatives: number of negatives of a row.
            n_draws: number of rows of each pair, which have independent draws of negatives.
            seed: seed of the draws.

        Returns:
            Name -> array. ``"query"``, ``"positive"`` and ``"negative_1"`` to
            ``"negative_<n_negatives>"`` hold positions ``[n]`` of texts in the collection. If the
            pairs are scored, ``"label"`` holds the teacher's scores ``[n, 1 + n_negatives]`` of
            the positive and the negatives.
        """
        pairs = np.tile(np.arange(len(self.pairs.queries)), n_draws)  # number of each row's pair
        # A draw is an index among the negatives of the pair's query.
        draws = draw_without_repetition(self._n_negatives[pairs], n_negatives, seed)
        negative_rows = self._negative_rows[self._first_negative[pairs, None] + draws]
        columns: dict[str, npt.NDArray[Any]] = {
            "query": self.pairs.queries[pairs],
            "positive": self.pairs.documents[pairs],
        }
        for number in range(n_negatives):
            mined_documents = self._document_of_row[negative_rows[:, number]]
            columns[f"negative_{number + 1}"] = self._positions[mined_documents]
        if self._scores is not None:
            rows = np.column_stack([self._positive_rows[pairs], negative_rows])
            columns["label"] = self._scores[rows]
        return columns


class _Negatives(NamedTuple):
    """The negatives among mined rows, in the order of the rows.

    Attributes:
        rows: numbers of the rows with negatives.
        first: index in `rows` of the first negative of each query, ``[Q]``.
        counts: number of negatives of each query, ``[Q]``.
    """

    rows: Positions
    first: Positions
    counts: Positions


def _find_negatives(rows: TrainingRows, positive_rows: Positions) -> _Negatives:
    """Find the negatives of each query among its mined rows.

    Args:
        rows: mined rows of Q queries. Rows that are not marked as relevant are negatives.
        positive_rows: row ``[P]`` with the relevant document of each training pair, or -1. These
            rows are not negatives, even if they are not marked as relevant.
    """
    is_negative = ~rows.relevant
    is_negative[positive_rows[positive_rows >= 0]] = False
    # number of negatives before the first row of each query, and in all rows
    n_before = np.append(0, np.cumsum(is_negative))[rows.offsets]
    return _Negatives(np.flatnonzero(is_negative), n_before[:-1], np.diff(n_before))


def _check_relevant(rows: TrainingRows, queries: Positions, positive_rows: Positions) -> None:
    """Raise an error if most documents that mined rows mark as relevant are not relevant.

    Such rows are often the results of a search, each of which is marked as relevant.

    Args:
        rows: R mined rows. ``rows.relevant`` ``[R]`` marks rows with a relevant document.
        queries: number ``[P]`` of each training pair's query in ``rows.queries``; -1 if the query
            has no rows.
        positive_rows: row ``[P]`` with the relevant document of each training pair; -1 if there is
            none.

    Raises:
        DataError: if fewer than half of the documents that the rows of training queries mark as
            relevant are relevant in the split ``"train"``.
    """
    is_training_query = np.zeros(len(rows.queries), bool)
    is_training_query[queries[queries >= 0]] = True
    has_training_query = np.repeat(is_training_query, np.diff(rows.offsets))  # [R]
    n_marked = int((rows.relevant & has_training_query).sum())
    n_confirmed = int(rows.relevant[positive_rows[positive_rows >= 0]].sum())
    if 2 * n_confirmed < n_marked:
        raise DataError(
            f"training rows: only {n_confirmed:,} of the {n_marked:,} documents that they mark as "
            "relevant for training queries are relevant in the split 'train'. Is this a run? Pass "
            "mined negatives.",
        )


def _find_positive_rows(
    rows: TrainingRows,
    queries: Positions,
    positions: Positions,
    relevant: Positions,
) -> Positions:
    """Find the row of each pair's relevant document among the mined rows of the pair's query.

    All P pairs are searched at once: each step compares one row for every pair that has not been
    found yet. Relevant documents usually come first, so there are few steps.

    Args:
        rows: R mined rows. The rows of query ``i`` are ``offsets[i]`` to ``offsets[i + 1]``.
        queries: number ``[P]`` of each pair's query in ``rows.queries``, or -1 if it has no rows.
        positions: position ``[D]`` in the collection of each document of `rows`.
        relevant: position ``[P]`` in the collection of each pair's relevant document.

    Returns:
        Row ``[P]`` of each pair's relevant document, -1 if there is none.
    """
    positive_rows = np.full(len(queries), -1, np.int64)
    pairs = np.flatnonzero(queries >= 0)  # numbers of the pairs that are searched
    candidates = rows.offsets[queries[pairs]]  # row that is compared next, for each of them
    ends = rows.offsets[queries[pairs] + 1]
    while pairs.size:
        # Drop the pairs whose rows have all been compared.
        has_candidate = candidates < ends
        pairs = pairs[has_candidate]
        candidates = candidates[has_candidate]
        ends = ends[has_candidate]
        is_match = positions[rows.document[candidates]] == relevant[pairs]
        positive_rows[pairs[is_match]] = candidates[is_match]
        # The other pairs go on with their next row.
        pairs = pairs[~is_match]
        candidates = candidates[~is_match] + 1
        ends = ends[~is_match]
    return positive_rows


def draw_without_repetition(sizes: Positions, count: int, seed: int) -> Positions:
    """Draw `count` different random numbers from each of n ranges ``0 .. size - 1``.

    One number is drawn from every range at a time. Numbers repeat only if `count` exceeds the size.

    Args:
        sizes: sizes ``[n]`` of the ranges, at least 1.
        count: number of draws from each range.
        seed: seed of the draws.

    Returns:
        Numbers ``[n, count]``.
    """
    generator = np.random.default_rng(seed)
    drawn = np.empty((len(sizes), 0), np.int64)
    for n_drawn in range(count):
        n_left = sizes - n_drawn
        has_left = n_left > 0  # an exhausted range repeats numbers
        numbers = generator.integers(0, np.where(has_left, n_left, sizes))
        # A drawn value is the rank of a number among the numbers that are left. Skipping the
        # numbers that were drawn before, in ascending order, turns the rank into the number.
        for drawn_numbers in np.sort(drawn, axis=1).T:
            numbers += has_left & (numbers >= drawn_numbers)
        drawn = np.column_stack([drawn, numbers])
    return drawn


class Reader:
    """Reads the texts of training rows, and replaces the positions in a batch by texts.

    A text that is much longer than the model's limit is truncated near the limit, so that the
    tokenizer does not have to read the rest.

    Args:
        columns: name -> column of all rows: texts as :class:`Column`, or scores.
        model: model that is trained.
        digest: digest of the rows, which identifies the reader in caches of ``datasets``.
    """

    def __init__(self, columns: dict[str, Any], model: Model, digest: str) -> None:
        """Create a reader that truncates texts near the model's token limit.

        Args:
            columns: name -> column of all rows: texts as :class:`Column`, or scores.
            model: model that is trained.
            digest: digest of the rows, which identifies the reader in caches of ``datasets``.
        """
        self._columns = columns
        self._text_shortener = TextShortener(model, copy_tokenizer=True)
        self._digest = digest
        self._max_characters = MAX_CHARACTERS_PER_TOKEN * _max_tokens(model)
        # name of a column -> (position of a truncated text -> its number of characters); columns of
        # documents share one cache
        document_lengths: dict[int, int] = {}
        self._truncated_lengths: dict[str, dict[int, int]] = {
            name: {} if name == "query" else document_lengths for name in columns
        }

    def __len__(self) -> int:
        return len(self._columns["query"])

    def _text_columns(self) -> dict[str, Column]:
        """Return the columns of texts, without the scores."""
        return {
            name: column for name, column in self._columns.items() if isinstance(column, Column)
        }

    def text_keys(self, row_numbers: Positions) -> npt.NDArray[np.uint64]:
        """Return precomputed hashes of the texts in some rows, without reading the texts.

        Args:
            row_numbers: numbers ``[n]`` of the rows.

        Returns:
            Keys ``[n, C]`` of the texts in C columns; equal texts have equal keys.
        """
        keys = [
            column.texts.text_keys[column.positions[row_numbers]]
            for column in self._text_columns().values()
        ]
        return np.column_stack(keys)

    def document_lengths(self) -> Positions:
        """Return the truncated length of each row's relevant document.

        All documents are read and truncated for this. Unlike the estimates of :meth:`sizes`, the
        lengths do not depend on whether texts are in memory or in a file.

        Returns:
            Numbers of characters ``[n]`` for all n rows.
        """
        columns = self._text_columns()
        # The column of relevant documents is the first one after the queries.
        name = next(name for name in columns if name != "query")
        positions = columns[name].positions
        if isinstance(columns[name].texts, PagesInMemory):
            return columns[name].texts.sizes(positions)
        lengths = np.empty(len(positions), np.int64)
        for start in range(0, len(positions), LENGTH_BATCH_SIZE):
            end = start + LENGTH_BATCH_SIZE
            truncated_texts = self._read_column(name, positions[start:end].tolist())
            lengths[start:end] = [len(text) for text in truncated_texts]
        return lengths

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Replace the positions in a batch by texts, as a transform of a ``Dataset``.

        Args:
            batch: name of a column -> positions of texts, or scores, which are not changed.
        """
        return {name: self._read_column(name, values) for name, values in batch.items()}

    def rows(self, row_numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Read the texts and scores of some rows.

        Args:
            row_numbers: numbers of the rows.

        Returns:
            For each row, name of a column -> text or scores.
        """
        columns = {}
        for name, column in self._columns.items():
            values = column.positions if isinstance(column, Column) else column
            columns[name] = self._read_column(name, values[row_numbers].tolist())
        return [
            dict(zip(columns, row_values, strict=True))
            for row_values in zip(*columns.values(), strict=True)
        ]

    def sizes(self, row_numbers: Sequence[int]) -> Positions:
        """Estimate how many characters of each row the model reads, without tokenizing.

        A text counts at most 8 characters per token of the model's limit.

        Args:
            row_numbers: numbers ``[n]`` of the rows.

        Returns:
            Numbers of characters ``[n]``, summed over the texts of a row.
        """
        total = np.zeros(len(row_numbers), np.int64)
        for column in self._text_columns().values():
            text_sizes = column.texts.sizes(column.positions[row_numbers])
            total += np.minimum(text_sizes, self._max_characters)
        return total

    def _read_column(self, name: str, values: list[Any]) -> list[Any]:
        """Return some texts of a column, truncated near the model's token limit, or page images.

        The lengths of truncated texts are cached, because truncation requires tokenization.

        Args:
            name: name of the column.
            values: positions of texts; or scores, which are returned unchanged.
        """
        column = self._columns[name]
        if not isinstance(column, Column):  # scores
            return values
        if isinstance(column.texts, PagesInMemory):
            return column.texts.at(values)
        lengths = self._truncated_lengths[name]
        texts = column.texts.at(values)
        uncached = [row for row, position in enumerate(values) if position not in lengths]
        truncated_texts = self._text_shortener.shorten([texts[row] for row in uncached])
        for row, truncated_text in zip(uncached, truncated_texts, strict=True):
            if len(truncated_text) < len(texts[row]):
                lengths[values[row]] = len(truncated_text)
        # Short texts have no cached length, and text[:None] is the complete text.
        return [text[: lengths.get(position)] for text, position in zip(texts, values, strict=True)]

    def __deepcopy__(self, memo: object) -> Reader:
        return self

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        # datasets pickles transforms to compute their fingerprints.
        return str, (self._digest,)


def _max_tokens(model: Model) -> int:
    """Return the maximum number of tokens of a text that a model reads."""
    first_module = next(iter(model or ()), None)
    max_tokens = getattr(first_module, "document_length", None)  # an attribute of ColBERTs
    if not max_tokens:
        max_tokens = getattr(model, "max_seq_length", None) or MAX_TOKENS
    return int(min(max_tokens, MAX_TOKENS))


class BalancedBatches:
    """Batches of a sampler, reordered so that every rank reads about the same amount of text.

    Each rank reads a consecutive part of a batch. Rows are dealt from long to short, and the order
    of the ranks alternates between turns.

    Args:
        sampler: sampler of batches of row numbers.
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
        """Yield each batch in a new order; a batch that cannot be divided evenly is not changed."""
        for batch in self._sampler:
            if len(batch) % self._n_ranks:
                yield batch
                continue
            from_long_to_short = np.argsort(-self._reader.sizes(batch), kind="stable")
            # one row of the matrix for each turn, one column for each rank
            turns = np.array(batch)[from_long_to_short].reshape(-1, self._n_ranks)
            turns[1::2] = turns[1::2, ::-1]
            yield turns.T.ravel().tolist()
