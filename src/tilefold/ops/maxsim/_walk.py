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
from collections.abc import Iterator, Sequence
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
    query_blocks,
    similar_lengths,
)
from tilefold.ops.maxsim.tiles import SequenceTokens

# Documents of a group differ in length by at most nine eighths, so that little of it is padding.
DOCUMENT_EIGHTHS = 9


class DocumentGroup(NamedTuple):
    """Documents of similar lengths.

    Attributes:
        documents: the ``n`` documents.
        token_numbers: ``[n, L]`` numbers of their unmasked tokens.
        exists: ``[n, L]`` bools, false past the end of a document, or ``None`` if all exist.
        span: the token numbers, if they are consecutive.
    """

    documents: Selection
    token_numbers: Tensor
    exists: Tensor | None
    span: slice | None


def chunks(offsets: Sequence[int], rows: int, limit: int) -> Iterator[tuple[int, int]]:
    """Divide sequences into chunks of consecutive ones.

    Args:
        offsets: where each sequence begins, and the end of the last one.
        rows: largest number of rows of a chunk that has more than one sequence.
        limit: largest number of sequences of a chunk.

    Yields:
        First and last (excluded) sequence of each chunk.
    """
    first = 0
    while first < len(offsets) - 1:
        last_that_fits = bisect_right(offsets, offsets[first] + rows) - 1
        last = max(first + 1, min(last_that_fits, first + limit))
        yield first, last
        first = last


class Slab(NamedTuple):
    """Rows of consecutive sequences, or of a part of one sequence.

    Attributes:
        first: first sequence.
        last: end of the sequences.
        start: first row.
        stop: end of the rows.
        is_part: whether the rows are a part of one long sequence.
        part: number of the part, from 0 on.
    """

    first: int
    last: int
    start: int
    stop: int
    is_part: bool
    part: int


def slabs(offsets: Sequence[int], rows: int, limit: int) -> Iterator[Slab]:
    """Divide sequences into slabs of at most ``rows`` rows, which split long sequences.

    Args:
        offsets: where each sequence begins, and the end of the last one.
        rows: largest number of rows of a slab.
        limit: largest number of sequences of a slab.

    Yields:
        Slabs that have rows, in order.
    """
    for first, last in chunks(offsets, rows, limit):
        is_part = offsets[last] - offsets[first] > rows
        for part, start in enumerate(range(offsets[first], offsets[last], rows)):
            stop = min(start + rows, offsets[last])
            yield Slab(first, last, start, stop, is_part, part)


def document_groups(
    documents: SequenceTokens,
    first: int,
    last: int,
    rows: int,
) -> Iterator[DocumentGroup]:
    """Group documents of a chunk by length, so that those of a group need little padding.

    Documents of one length are a single group, in their own order. Otherwise groups are in the
    order of rising lengths.

    Args:
        documents: all documents.
        first: first document of the chunk.
        last: end of the chunk.
        rows: approximate largest number of tokens of a group that has more than one document.

    Yields:
        Groups of documents that have tokens.
    """
    sorted_lengths, order = documents.counts[first:last].sort(stable=True)
    lengths = sorted_lengths.tolist()
    if lengths[0] == lengths[-1]:
        whole_chunk = slice(first, last)
        first_token = int(documents.offsets[first])
        numbers, _ = documents.token_numbers(whole_chunk, 0, lengths[0], all_exist=True)
        span = slice(first_token, first_token + numbers.numel())
        yield DocumentGroup(whole_chunk, numbers, None, span)
        return
    n_without_tokens = bisect_right(lengths, 0)
    for begin, end in similar_lengths(lengths, n_without_tokens, DOCUMENT_EIGHTHS, rows):
        group = order[begin:end] + first  # positions in the chunk become documents
        shortest = lengths[begin]
        longest = lengths[end - 1]
        numbers, exists = documents.token_numbers(group, 0, longest, shortest == longest)
        single_span = None
        if end == begin + 1:
            first_token = int(numbers[0, 0])
            single_span = slice(first_token, first_token + longest)
        yield DocumentGroup(group, numbers, exists, single_span)


def blocks_of(
    problem: Problem,
    queries: SequenceTokens,
    documents: SequenceTokens,
) -> Iterator[Block]:
    """Divide a problem into blocks: documents with the query tokens that they are scored with.

    Args:
        problem: the problem.
        queries: the unmasked tokens of all queries.
        documents: the unmasked tokens of all documents.
    """
    if problem.pairing == "all":
        limit = tiles.column_limit(queries.rows.size(1))
        return _blocks_of_all_pairs(query_blocks(queries, limit), documents)
    query_of_pair, document_of_pair = pair_sequences(problem)
    return _blocks_of_listed_pairs(
        problem,
        query_of_pair,
        document_of_pair,
        queries,
        documents,
    )


def _blocks_of_all_pairs(
    blocks: list[QueryBlock],
    documents: SequenceTokens,
) -> Iterator[Block]:
    """Divide all pairs of documents and query tokens into blocks.

    Args:
        blocks: blocks of query tokens.
        documents: the unmasked tokens of all documents.

    Yields:
        For each chunk of documents, one block for every block of query tokens.
    """
    if not blocks:
        return
    # [Nd + 1] numbers of the first unmasked tokens
    offsets = [*documents.offsets.tolist(), int(documents.counts.sum())]
    n_columns = max(block.stop - block.start for block in blocks)
    max_rows = max(1, min(documents.vectors_limit(), tiles.TILE_ELEMENTS // n_columns))
    for first, last in chunks(offsets, max_rows, max_rows):
        start = offsets[first]
        stop = offsets[last]
        if stop - start > max_rows:
            yield from _blocks_of_long_document(blocks, documents, first, stop - start, max_rows)
        elif start < stop:
            yield from _blocks_of_chunk(blocks, documents, first, last, start, stop, n_columns)


def _blocks_of_long_document(
    blocks: list[QueryBlock],
    documents: SequenceTokens,
    document: int,
    length: int,
    max_rows: int,
) -> Iterator[Block]:
    """Yield the blocks of a document that is too long for one tile.

    Args:
        blocks: blocks of query tokens.
        documents: the unmasked tokens of all documents.
        document: number of the document.
        length: unmasked tokens of the document.
        max_rows: largest number of document tokens of a tile.
    """
    only_document = torch.tensor([document], device=documents.counts.device)
    for block in blocks:
        vectors = block.vectors()
        yield AllPairsBlock(
            documents=only_document,
            query_block=block,
            query_vectors=vectors,
            is_split=True,
            tiles=partial(
                _gathered_tiles,
                documents,
                only_document,
                longest=length,
                step=max_rows,
                gathered=None,
                query_vectors=vectors,
            ),
        )


def _blocks_of_chunk(
    blocks: list[QueryBlock],
    documents: SequenceTokens,
    first: int,
    last: int,
    start: int,
    stop: int,
    n_columns: int,
) -> Iterator[Block]:
    """Yield the blocks of a chunk of consecutive documents.

    All similarities of a block come from a single matrix product, of which its tiles are parts.

    Args:
        blocks: blocks of query tokens.
        documents: all documents.
        first: first document of the chunk.
        last: end of the chunk.
        start: first unmasked token of the chunk.
        stop: end of its unmasked tokens.
        n_columns: query tokens of the largest block.
    """
    document_vectors = None
    if not _uses_int8_products(blocks[0].queries, documents):
        document_vectors = documents.vectors(start, stop)
    groups = list(document_groups(documents, first, last, tiles.GROUP_ELEMENTS // n_columns))
    documents_of_chunk = groups[0].documents
    if len(groups) > 1:
        documents_of_chunk = torch.cat(
            [group.documents for group in groups if isinstance(group.documents, Tensor)],
        )
    for block in blocks:
        query_vectors = block.vectors()
        if document_vectors is None:
            product = block.int8_similarities(documents, start, stop)
        else:
            product = document_vectors @ query_vectors.T
        yield AllPairsBlock(
            documents=documents_of_chunk,
            query_block=block,
            query_vectors=query_vectors,
            is_split=False,
            tiles=partial(_tiles_of_product, documents, groups, product, start),
        )


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
    start: int,
) -> Iterator[Tile]:
    """Yield the tiles of a chunk from its product with a block of query tokens.

    Args:
        documents: the unmasked tokens of all documents.
        groups: groups of the chunk's documents, one for each tile.
        product: ``[tokens of the chunk, C]`` similarities.
        start: number of the chunk's first unmasked token.
    """
    first_document = 0
    for group in groups:
        numbers = group.token_numbers
        if group.span is None:
            similarities = product.index_select(0, (numbers - start).view(-1))
        else:
            similarities = product[group.span.start - start : group.span.stop - start]
        tokens = TileTokens(
            rows=documents.rows_of(numbers),
            exists=group.exists,
            span=group.span if documents.unmasked_rows is None else None,
            vectors=None,
        )
        yield Tile(
            documents=slice(first_document, first_document + numbers.size(0)),
            tokens=tokens,
            similarities=similarities.view(*numbers.shape, -1),
        )
        first_document += numbers.size(0)


def _blocks_of_listed_pairs(
    problem: Problem,
    query_of_pair: Tensor,
    document_of_pair: Tensor,
    queries: SequenceTokens,
    documents: SequenceTokens,
) -> Iterator[Block]:
    """Divide aligned, grouped or listed pairs into blocks.

    Args:
        problem: the problem.
        query_of_pair: ``[P]`` queries.
        document_of_pair: ``[P]`` documents.
        queries: all queries.
        documents: all documents.
    """
    limit = tiles.column_limit(queries.rows.size(1))
    batches = _pair_batches(documents, document_of_pair, queries.counts[query_of_pair])
    for batch in batches:
        pair_queries = query_of_pair[batch.pairs]
        pair_documents = document_of_pair[batch.pairs]
        gathered = None
        if batch.step >= batch.longest:
            gathered = _gather_tokens(documents, pair_documents, 0, batch.longest)
        one_query = pair_queries.numel() > 1 and bool((pair_queries == pair_queries[0]).all())
        shortest_query, longest_query = (
            int(bound) for bound in queries.counts[pair_queries].aminmax()
        )
        for start in range(0, longest_query, limit):  # long queries are split
            stop = min(start + limit, longest_query)
            numbers, exists = queries.token_numbers(
                pair_queries,
                start,
                stop,
                all_exist=shortest_query >= stop,
            )
            rows = queries.rows_of(numbers)
            vectors = queries.gather(rows[0] if one_query else rows)
            yield ListedPairsBlock(
                problem=problem,
                pairs=batch.pairs,
                documents=pair_documents,
                query_rows=rows,
                query_exists=exists,
                first_query_rows=queries.starts[pair_queries],
                query_vectors=vectors,
                is_split=gathered is None,
                tiles=partial(
                    _gathered_tiles,
                    documents,
                    pair_documents,
                    longest=batch.longest,
                    step=batch.step,
                    gathered=gathered,
                    query_vectors=vectors,
                ),
            )


def _gather_tokens(
    documents: SequenceTokens,
    selected: Tensor,
    start: int,
    stop: int,
) -> TileTokens:
    """Gather the unmasked tokens ``start`` to ``stop`` of the selected documents.

    Tokens in consecutive rows are not copied if they need no conversion.

    Args:
        documents: the unmasked tokens of all documents.
        selected: ``[n]`` documents, each with at least one unmasked token.
        start: first unmasked token, counted from 0 in each document.
        stop: end of the unmasked tokens.
    """
    numbers, exists = documents.token_numbers(
        selected,
        start,
        stop,
        all_exist=int(documents.counts[selected].min()) >= stop,
    )
    rows = documents.rows_of(numbers)
    if exists is None and documents.unmasked_rows is None:
        first_row = int(rows[0, 0])
        end_row = first_row + rows.numel()
        # First row of each document, if the documents follow each other without gaps.
        expected_first_rows = torch.arange(first_row, end_row, rows.size(1), device=rows.device)
        if end_row <= documents.rows.size(0) and bool((rows[:, 0] == expected_first_rows).all()):
            vectors = documents.vectors(first_row, end_row).view(*rows.shape, -1)
            return TileTokens(rows, None, slice(first_row, end_row), vectors)
    return TileTokens(rows, exists, None, documents.gather(rows))


def _gathered_tiles(
    documents: SequenceTokens,
    selected: Tensor,
    *,
    longest: int,
    step: int,
    gathered: TileTokens | None,
    query_vectors: Tensor,
) -> Iterator[Tile]:
    """Yield tiles of ``step`` tokens of each selected document.

    Args:
        documents: all documents.
        selected: ``[n]`` documents.
        longest: unmasked tokens of the longest of them.
        step: tokens of each document in a tile.
        gathered: all tokens, if they fit in one tile and were gathered already.
        query_vectors: ``[C, D]`` or ``[n, C, D]``.
    """
    for start in range(0, longest, step):
        tokens = gathered
        if tokens is None:
            tokens = _gather_tokens(documents, selected, start, min(start + step, longest))
        yield Tile(
            documents=slice(0, selected.numel()),
            tokens=tokens,
            similarities=tokens.vectors_of(documents) @ query_vectors.mT,
        )


class PairBatch(NamedTuple):
    """Pairs that are computed together, padded to the longest document and the longest query.

    Attributes:
        pairs: numbers of the pairs.
        longest: unmasked tokens of the longest document.
        step: tokens of each document in a tile.
    """

    pairs: Tensor
    longest: int
    step: int


def _pair_batches(
    documents: SequenceTokens,
    document_of_pair: Tensor,
    query_lengths: Tensor,
) -> Iterator[PairBatch]:
    """Batch pairs whose documents and queries have similar lengths, so that padding is small.

    The lengths of a batch's queries lie between the same two powers of two. Within such a class,
    pairs are in the order of rising document lengths. Pairs whose document or query has no unmasked
    token are left out.

    Args:
        documents: the unmasked tokens of all documents.
        document_of_pair: ``[P]`` documents.
        query_lengths: ``[P]`` unmasked tokens of the queries.
    """
    dim = documents.rows.size(1)
    document_lengths = documents.counts[document_of_pair]
    limit = tiles.row_limit(dim)
    pairs = ((document_lengths > 0) & (query_lengths > 0)).nonzero().squeeze(1)
    query_classes = torch.frexp(query_lengths[pairs].double()).exponent.long()
    # A single sort by class, then by document length: no document has 2^48 tokens.
    sort_keys = document_lengths[pairs] + query_classes * (1 << 48)
    order = sort_keys.argsort(stable=True)
    pairs = pairs[order]
    lengths = document_lengths[pairs].tolist()
    class_sizes = torch.unique_consecutive(query_classes[order], return_counts=True)[1].tolist()
    first = 0
    for class_size in class_sizes:
        end = first + class_size
        width = int(query_lengths[pairs[first:end]].max())
        max_tile_rows = min(limit, tiles.TILE_ELEMENTS // width)
        while first < end:
            # Add pairs as long as the padded documents, queries and similarities fit.
            count = 1
            while first + count < end:
                longest = lengths[first + count]
                grown = count + 1
                if grown * max(longest, width) > limit or grown * longest > max_tile_rows:
                    break
                count = grown
            longest = lengths[first + count - 1]
            step = longest
            if count == 1:  # a document may be longer than a tile
                split_width = min(width, tiles.column_limit(dim))
                step = max(1, min(limit, tiles.TILE_ELEMENTS // split_width))
            yield PairBatch(pairs[first : first + count], longest, step)
            first += count
