"""Division of a problem into tiles of similarities, for the tiled path.

The problem is divided into blocks of documents and query tokens, whatever the layout and the
pairing. A block is divided into tiles, whose documents have nearly one length.
:meth:`Block.accumulate` reduces every tile over its document tokens, and combines the results.

With all pairs, consecutive documents share one product: their unmasked tokens, without padding,
times the query tokens. Similarities are then gathered and padded by groups of documents. With other
pairings, the documents' unmasked tokens are gathered and padded. Past the end of a document its
last token is repeated. Long sequences are split.

Groups of one product are not blocks of their own, since their scores are added to the result in one
operation: one at a time, ragged documents would take 5 to 10 percent longer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared.internals import has_int8_products
from tilefold.ops.maxsim import tiles
from tilefold.ops.maxsim._blocks import (
    AllPairsBlock,
    Block,
    ListedPairsBlock,
    Tile,
    TileTokens,
)
from tilefold.ops.maxsim._problem import Problem, pair_sequences
from tilefold.ops.maxsim._query_blocks import (
    QueryBlock,
    Selection,
    divide_queries,
    split_by_length,
)
from tilefold.ops.maxsim.tiles import SequenceTokens

# The longest document of a group is at most this many times as long as the shortest one, so that
# little of the group is padding.
MAX_DOCUMENT_RATIO = 1.125


class Slab(NamedTuple):
    """Consecutive sequences, or a part of one long sequence.

    Attributes:
        first_sequence: the first sequence.
        end_sequence: the sequence after the last one.
        start: the first token, numbered over all sequences.
        stop: the token after the last one.
        part: position of the part in its sequence, from 0 on; ``None`` for complete sequences.
    """

    first_sequence: int
    end_sequence: int
    start: int
    stop: int
    part: int | None = None

    @property
    def n_tokens(self) -> int:
        """Number of tokens."""
        return self.stop - self.start


def split_into_chunks(
    offsets: Sequence[int],
    max_tokens: int,
    max_sequences: int,
) -> Iterator[Slab]:
    """Divide sequences into chunks, each of complete consecutive sequences.

    Args:
        offsets: the first token of each sequence, and the end of the last one.
        max_tokens: largest number of tokens of a chunk. A longer sequence is a chunk of its own.
        max_sequences: largest number of sequences of a chunk.

    Yields:
        Slabs of complete sequences, in order.
    """
    first = 0
    n_sequences = len(offsets) - 1
    while first < n_sequences:
        end_that_fits = bisect_right(offsets, offsets[first] + max_tokens) - 1
        end = max(first + 1, min(end_that_fits, first + max_sequences))
        yield Slab(first, end, offsets[first], offsets[end])
        first = end


def split_into_slabs(offsets: Sequence[int], max_tokens: int, max_sequences: int) -> Iterator[Slab]:
    """Divide sequences into slabs of at most ``max_tokens`` tokens, and split long sequences.

    Args:
        offsets: the first token of each sequence, and the end of the last one.
        max_tokens: largest number of tokens of a slab.
        max_sequences: largest number of sequences of a slab.

    Yields:
        Slabs with tokens, in order.
    """
    for chunk in split_into_chunks(offsets, max_tokens, max_sequences):
        if 0 < chunk.n_tokens <= max_tokens:
            yield chunk
        elif chunk.n_tokens > max_tokens:  # a single long sequence
            for part, start in enumerate(range(chunk.start, chunk.stop, max_tokens)):
                stop = min(start + max_tokens, chunk.stop)
                yield chunk._replace(start=start, stop=stop, part=part)


class DocumentGroup(NamedTuple):
    """Documents of similar lengths.

    Attributes:
        documents: the ``n`` documents.
        token_numbers: ``[n, L]`` numbers of their unmasked tokens.
        exists: ``[n, L]`` bools, false past the end of a document, or ``None`` if all exist.
        span: the token numbers, if they are consecutive. Reading a span needs no gather.
    """

    documents: Selection
    token_numbers: Tensor
    exists: Tensor | None
    span: slice | None

    def rows_in(self, product: Tensor, first_token: int) -> Tensor:
        """Select the rows of the group's tokens from a matrix with a row for each token.

        Args:
            product: ``[tokens, C]``.
            first_token: number of the token of the first row.

        Returns:
            ``[n * L, C]``; a view if the tokens are consecutive.
        """
        if self.span is not None:
            return product[self.span.start - first_token : self.span.stop - first_token]
        return product.index_select(0, (self.token_numbers - first_token).view(-1))


def group_documents(
    documents: SequenceTokens,
    chunk: Slab,
    max_tokens: int,
) -> Iterator[DocumentGroup]:
    """Group consecutive documents by length, so that a group needs little padding.

    Documents of equal length are a single group, in their order. Otherwise groups are sorted by
    length, and documents without tokens are in no group.

    Args:
        documents: the unmasked tokens of all documents.
        chunk: the consecutive documents, of which at least one has tokens.
        max_tokens: approximate largest number of tokens of a group of several documents.
    """
    chunk_documents = slice(chunk.first_sequence, chunk.end_sequence)
    sorted_lengths, order = documents.counts[chunk_documents].sort(stable=True)
    lengths = sorted_lengths.tolist()
    if lengths[0] == lengths[-1]:
        # The number of a token counts the unmasked tokens of all documents before it.
        numbers, _ = documents.token_numbers(chunk_documents, 0, lengths[0], all_exist=True)
        yield DocumentGroup(
            documents=chunk_documents,
            token_numbers=numbers,
            exists=None,
            span=slice(chunk.start, chunk.start + numbers.numel()),
        )
        return
    n_without_tokens = bisect_right(lengths, 0)
    runs = split_by_length(
        lengths,
        start=n_without_tokens,
        max_ratio=MAX_DOCUMENT_RATIO,
        max_elements=max_tokens,
    )
    for start, stop in runs:
        documents_of_group = order[start:stop] + chunk.first_sequence
        shortest = lengths[start]
        longest = lengths[stop - 1]
        numbers, exists = documents.token_numbers(
            documents_of_group,
            0,
            longest,
            all_exist=shortest == longest,
        )
        span = None
        is_single_document = stop == start + 1
        if is_single_document:
            first_token = int(numbers[0, 0])
            span = slice(first_token, first_token + longest)
        yield DocumentGroup(documents_of_group, numbers, exists, span)


def divide_into_blocks(
    problem: Problem,
    queries: SequenceTokens,
    documents: SequenceTokens,
) -> Iterator[Block]:
    """Divide the similarities of a call into blocks, each of some documents and query tokens.

    Args:
        problem: tensors and options of the call.
        queries: the unmasked tokens of all queries.
        documents: the unmasked tokens of all documents.
    """
    if problem.pairing == "all":
        dim = queries.rows.size(1)
        blocks_of_queries = divide_queries(queries, max_tokens=tiles.column_limit(dim))
        return _blocks_of_all_pairs(blocks_of_queries, documents)
    query_of_pair, document_of_pair = pair_sequences(problem)
    return _blocks_of_listed_pairs(
        problem,
        query_of_pair,
        document_of_pair,
        queries,
        documents,
    )


def _blocks_of_all_pairs(
    blocks_of_queries: list[QueryBlock],
    documents: SequenceTokens,
) -> Iterator[Block]:
    """Divide the similarities of all query tokens to all document tokens into blocks.

    Args:
        blocks_of_queries: blocks of query tokens.
        documents: the unmasked tokens of all documents.

    Yields:
        For each chunk, which is several consecutive documents or a long one, one block for every
        block of query tokens.
    """
    if not blocks_of_queries:
        return
    widest = max(block.stop - block.start for block in blocks_of_queries)  # query tokens
    max_tokens = max(1, min(documents.vectors_limit(), tiles.TILE_ELEMENTS // widest))
    max_group_tokens = tiles.GROUP_ELEMENTS // widest
    document_chunks = split_into_chunks(
        documents.all_offsets(),
        max_tokens=max_tokens,
        max_sequences=max_tokens,
    )
    for chunk in document_chunks:
        if chunk.n_tokens > max_tokens:
            yield from _blocks_of_long_document(blocks_of_queries, documents, chunk, max_tokens)
        elif chunk.n_tokens:
            yield from _blocks_of_chunk(blocks_of_queries, documents, chunk, max_group_tokens)


def _blocks_of_long_document(
    blocks_of_queries: list[QueryBlock],
    documents: SequenceTokens,
    chunk: Slab,
    max_tokens: int,
) -> Iterator[Block]:
    """Yield the blocks of a document that is too long for one tile of similarities.

    The tiles of such a block are consecutive parts of the document.

    Args:
        blocks_of_queries: blocks of query tokens.
        documents: the unmasked tokens of all documents.
        chunk: the document.
        max_tokens: largest number of document tokens of a tile.
    """
    document = torch.tensor([chunk.first_sequence], device=documents.counts.device)
    for query_block in blocks_of_queries:
        query_vectors = query_block.vectors()
        yield AllPairsBlock(
            documents=document,
            query_block=query_block,
            query_vectors=query_vectors,
            is_split=True,
            tiles=partial(
                _tiles_of_parts,
                documents,
                document,
                longest=chunk.n_tokens,
                part_length=max_tokens,
                query_vectors=query_vectors,
            ),
        )


def _blocks_of_chunk(
    blocks_of_queries: list[QueryBlock],
    documents: SequenceTokens,
    chunk: Slab,
    max_group_tokens: int,
) -> Iterator[Block]:
    """Yield the blocks of a chunk of consecutive documents.

    Each block is one matrix product: all document tokens of the chunk times the query tokens. Its
    tiles are the rows of documents of similar lengths.

    Args:
        blocks_of_queries: blocks of query tokens.
        documents: the unmasked tokens of all documents.
        chunk: the documents.
        max_group_tokens: approximate largest number of document tokens of a tile.
    """
    document_vectors = None
    if not _uses_int8_products(blocks_of_queries[0].queries, documents):
        document_vectors = documents.vectors(chunk.start, chunk.stop)
    groups = list(group_documents(documents, chunk, max_group_tokens))
    grouped_documents = _documents_of(groups)
    for query_block in blocks_of_queries:
        query_vectors = query_block.vectors()
        if document_vectors is None:
            product = query_block.int8_similarities(documents, chunk.start, chunk.stop)
        else:
            product = document_vectors @ query_vectors.T
        yield AllPairsBlock(
            documents=grouped_documents,
            query_block=query_block,
            query_vectors=query_vectors,
            is_split=False,
            tiles=partial(_tiles_of_product, documents, groups, product, chunk.start),
        )


def _documents_of(groups: list[DocumentGroup]) -> Selection:
    """Return the documents of all groups of a chunk, in the order of the groups."""
    if len(groups) == 1:
        return groups[0].documents
    # `group_documents` yields a slice only if there is a single group
    return torch.cat([torch.as_tensor(group.documents) for group in groups])


def _uses_int8_products(queries: SequenceTokens, documents: SequenceTokens) -> bool:
    """Return whether both sides are int8, no document is masked, and this CPU is fast at int8."""
    both_int8 = queries.rows.dtype == documents.rows.dtype == torch.int8
    return (
        both_int8
        and documents.unmasked_rows is None
        and documents.rows.device.type == "cpu"
        and has_int8_products()
    )


def _tiles_of_product(
    documents: SequenceTokens,
    groups: list[DocumentGroup],
    product: Tensor,
    first_token: int,
) -> Iterator[Tile]:
    """Yield a tile of similarities for each group of documents, from the product of all of them.

    Args:
        documents: the unmasked tokens of all documents.
        groups: consecutive documents, grouped by length.
        product: ``[tokens of these documents, C]`` similarities to ``C`` query tokens.
        first_token: number of the first token of these documents, counted over the unmasked tokens
            of all documents.
    """
    # without a mask, the numbers of tokens are their rows
    numbers_are_rows = documents.unmasked_rows is None
    first_document = 0
    for group in groups:
        n_documents, length = group.token_numbers.shape
        similarities = group.rows_in(product, first_token)
        yield Tile(
            documents=slice(first_document, first_document + n_documents),
            tokens=TileTokens(
                rows=documents.rows_of(group.token_numbers),
                exists=group.exists,
                span=group.span if numbers_are_rows else None,
                vectors=None,
            ),
            similarities=similarities.view(n_documents, length, -1),
        )
        first_document += n_documents


def _blocks_of_listed_pairs(
    problem: Problem,
    query_of_pair: Tensor,
    document_of_pair: Tensor,
    queries: SequenceTokens,
    documents: SequenceTokens,
) -> Iterator[Block]:
    """Divide aligned, grouped or listed (query, document) pairs into blocks of similarities.

    Args:
        problem: tensors and options of the call.
        query_of_pair: ``[P]`` query of each pair.
        document_of_pair: ``[P]`` document of each pair.
        queries: the unmasked tokens of all queries.
        documents: the unmasked tokens of all documents.
    """
    max_query_tokens = tiles.column_limit(queries.rows.size(1))
    batches = _batch_pairs(documents, document_of_pair, queries.counts[query_of_pair])
    for batch in batches:
        pair_queries = query_of_pair[batch.pairs]
        pair_documents = document_of_pair[batch.pairs]
        document_tokens = None
        if not batch.is_split:  # documents that are split are gathered part by part
            document_tokens = _gather_tokens(documents, pair_documents, 0, batch.longest)
        # Pairs of one query need its vectors once, and one product for all documents.
        share_query = pair_queries.numel() > 1 and bool((pair_queries == pair_queries[0]).all())
        shortest_query, longest_query = (
            int(bound) for bound in queries.counts[pair_queries].aminmax()
        )
        for start in range(0, longest_query, max_query_tokens):  # long queries are split
            stop = min(start + max_query_tokens, longest_query)
            numbers, exists = queries.token_numbers(
                pair_queries,
                start,
                stop,
                all_exist=shortest_query >= stop,
            )
            rows = queries.rows_of(numbers)
            vectors = queries.gather(rows[0] if share_query else rows)
            tiles_of_block: Callable[[], Iterator[Tile]]
            if document_tokens is None:
                tiles_of_block = partial(
                    _tiles_of_parts,
                    documents,
                    pair_documents,
                    longest=batch.longest,
                    part_length=batch.part_length,
                    query_vectors=vectors,
                )
            else:
                tiles_of_block = partial(_single_tile, documents, document_tokens, vectors)
            yield ListedPairsBlock(
                problem=problem,
                pairs=batch.pairs,
                documents=pair_documents,
                query_rows=rows,
                query_exists=exists,
                first_query_rows=queries.starts[pair_queries],
                query_vectors=vectors,
                is_split=batch.is_split,
                tiles=tiles_of_block,
            )


def _gather_tokens(
    documents: SequenceTokens,
    selected: Tensor,
    start: int,
    stop: int,
) -> TileTokens:
    """Gather the unmasked tokens ``start`` to ``stop`` of the selected documents.

    Tokens in consecutive rows are not copied, if they need no conversion.

    Args:
        documents: the unmasked tokens of all documents.
        selected: ``[n]`` documents, each with at least one unmasked token.
        start: first unmasked token, counted from 0 in each document.
        stop: end of the unmasked tokens.
    """
    token_numbers, exists = documents.token_numbers(
        selected,
        start,
        stop,
        all_exist=int(documents.counts[selected].min()) >= stop,
    )
    rows = documents.rows_of(token_numbers)
    span = None
    if exists is None and documents.unmasked_rows is None:
        span = _consecutive_span(rows, documents.rows.size(0))
    if span is None:
        return TileTokens(rows, exists, span=None, vectors=documents.gather(rows))
    vectors = documents.vectors(span.start, span.stop).view(*rows.shape, -1)
    return TileTokens(rows, exists=None, span=span, vectors=vectors)


def _consecutive_span(rows: Tensor, n_rows: int) -> slice | None:
    """Return the rows as a slice if documents follow each other without gaps, else ``None``.

    Args:
        rows: ``[n, L]`` rows, consecutive in each document.
        n_rows: number of rows of all documents.
    """
    n_documents, length = rows.shape
    first_row = int(rows[0, 0])
    end_row = first_row + n_documents * length
    if end_row > n_rows:
        return None
    expected_first_rows = torch.arange(first_row, end_row, length, device=rows.device)
    if not bool((rows[:, 0] == expected_first_rows).all()):
        return None
    return slice(first_row, end_row)


def _single_tile(
    documents: SequenceTokens,
    tokens: TileTokens,
    query_vectors: Tensor,
) -> Iterator[Tile]:
    """Yield the tile of all tokens of some documents.

    Args:
        documents: the unmasked tokens of all documents.
        tokens: the tokens of ``n`` documents.
        query_vectors: ``[C, D]`` or ``[n, C, D]``.
    """
    yield Tile(
        documents=slice(0, tokens.rows.size(0)),
        tokens=tokens,
        similarities=tokens.vectors_of(documents) @ query_vectors.mT,
    )


def _tiles_of_parts(
    documents: SequenceTokens,
    selected: Tensor,
    *,
    longest: int,
    part_length: int,
    query_vectors: Tensor,
) -> Iterator[Tile]:
    """Yield the similarities of some documents part by part, as documents are too long for a tile.

    Args:
        documents: the unmasked tokens of all documents.
        selected: ``[n]`` documents.
        longest: number of unmasked tokens of the longest of these documents.
        part_length: number of tokens of each document in a tile.
        query_vectors: ``[C, D]`` or ``[n, C, D]``.
    """
    for start in range(0, longest, part_length):
        stop = min(start + part_length, longest)
        tokens = _gather_tokens(documents, selected, start, stop)
        yield from _single_tile(documents, tokens, query_vectors)


class PairBatch(NamedTuple):
    """Pairs that are computed together, padded to the longest document and the longest query.

    Attributes:
        pairs: positions of the pairs.
        longest: number of unmasked tokens of the longest document.
        part_length: number of tokens of each document in a tile.
    """

    pairs: Tensor
    longest: int
    part_length: int

    @property
    def is_split(self) -> bool:
        """Whether the documents are too long for one tile."""
        return self.part_length < self.longest


def _batch_pairs(
    documents: SequenceTokens,
    document_of_pair: Tensor,
    query_lengths: Tensor,
) -> Iterator[PairBatch]:
    """Batch pairs whose documents and queries have similar lengths, so that padding is small.

    Pairs are divided into classes by query length: the lengths of a class are between the same two
    powers of two. Within a class, pairs are sorted by document length, and consecutive pairs form a
    batch. Pairs whose document or query has no unmasked token are left out.

    Args:
        documents: the unmasked tokens of all documents.
        document_of_pair: ``[P]`` document of each pair.
        query_lengths: ``[P]`` number of unmasked tokens of each pair's query.
    """
    dim = documents.rows.size(1)
    document_lengths = documents.counts[document_of_pair]
    max_rows = tiles.row_limit(dim)
    pairs = ((document_lengths > 0) & (query_lengths > 0)).nonzero().squeeze(1)
    query_classes = torch.frexp(query_lengths[pairs].double()).exponent.long()  # powers of two
    # One sort by class, then by document length, which is below 2^48.
    sort_keys = document_lengths[pairs] + query_classes * (1 << 48)
    order = sort_keys.argsort(stable=True)
    pairs = pairs[order]
    lengths = document_lengths[pairs].tolist()
    class_sizes = torch.unique_consecutive(query_classes[order], return_counts=True)[1].tolist()
    first = 0
    for class_size in class_sizes:
        end = first + class_size
        longest_query = int(query_lengths[pairs[first:end]].max())
        max_tile_rows = min(max_rows, tiles.TILE_ELEMENTS // longest_query)
        while first < end:
            # Add pairs as long as the padded documents, queries and similarities fit.
            count = 1
            while first + count < end:
                longest = lengths[first + count]
                new_count = count + 1
                rows_fit = new_count * max(longest, longest_query) <= max_rows
                if not rows_fit or new_count * longest > max_tile_rows:
                    break
                count = new_count
            longest = lengths[first + count - 1]
            part_length = longest
            if count == 1:  # a document may be longer than a tile
                n_columns = min(longest_query, tiles.column_limit(dim))
                part_length = max(1, min(max_rows, tiles.TILE_ELEMENTS // n_columns))
            yield PairBatch(pairs[first : first + count], longest, part_length)
            first += count
