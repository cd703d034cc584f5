"""Device functions of the kernels: bounds of sequences, lists of pairs, folding a tile."""

import triton
import triton.language as tl

from tilefold.ops._shared._triton.activation import nan_max
from tilefold.ops._shared._triton.offsets import mask_if

ALL = tl.constexpr(0)
GROUPED = tl.constexpr(1)
INDEX = tl.constexpr(2)
ENDS = tl.constexpr(2)  # padded sequences with an end for each, up to which they are read
SIZES = [  # numbers of launches, whose values kernels are not built for
    "Tq",
    "Td",
    "Nq",
    "Nd",
    "length_q",
    "length_d",
    "group",
    "longest",
    "tiles",
    "slices",
    "splits",
    "steps",
    "tile_rows",
    "stride_q",
    "stride_d",
    "temperature",
    "inverse_temperature",
    "divisor",
    "factor",
    "one",
]


@triton.jit
def bounds(cu_ptr, i, count, rows, length, UNIFORM: tl.constexpr):
    """Return the first row of a sequence, the row after its last, and whether these are valid.

    A sequence with invalid offsets is empty.

    Args:
        cu_ptr: offsets ``[count + 1]``; or ends ``[count]`` of padded sequences, if UNIFORM is
            ``ENDS``.
        i: the sequence.
        count: number of sequences.
        rows: number of rows.
        length: length of all sequences, if UNIFORM.
        UNIFORM: whether all sequences have the same length, or ``ENDS``: they are padded to it, and
            each has an end up to which it is read.
    """
    if UNIFORM:
        start = i * length
        if UNIFORM == ENDS:
            length = tl.load(cu_ptr + i, mask=(i >= 0) & (i < count), other=0)
        return start, start + length, start >= 0
    else:
        inside = (i >= 0) & (i < count)
        start = tl.load(cu_ptr + i, mask=inside, other=0)
        end = tl.load(cu_ptr + i + 1, mask=inside, other=0)
        offsets_valid = (
            (start >= 0)
            & (end >= start)
            & (end <= rows)
            & ((i > 0) | (start == 0))
            & ((i < count - 1) | (end == rows))
        )
        return tl.where(offsets_valid, start, 0), tl.where(offsets_valid, end, 0), offsets_valid


@triton.jit
def sequence_at(cu_ptr, row, count, length, UNIFORM: tl.constexpr):
    """Return the sequence that contains a row.

    Args:
        cu_ptr: offsets ``[count + 1]``, unless UNIFORM.
        row: the row, a scalar.
        count: number of sequences.
        length: length of all sequences, if UNIFORM.
        UNIFORM: whether all sequences have the same length.
    """
    if UNIFORM:
        return row // length
    else:
        seq = row * 0
        for i0 in range(0, count, 256):
            i = i0 + tl.arange(0, 256)
            end = tl.load(cu_ptr + 1 + i, mask=i < count, other=2147483647)
            seq += tl.sum((end <= row).to(tl.int32))
        return tl.minimum(seq, count - 1)


@triton.jit
def load_rows(ptr, row, mask_row, k, D: tl.constexpr):
    """Load some columns of rows of a row-major matrix, zeros where masked.

    Args:
        ptr: matrix ``[rows, D]``.
        row: the rows.
        mask_row: rows that are read.
        k: the columns.
        D: number of columns.
    """
    return tl.load(
        ptr + row.to(tl.int64)[:, None] * D + k[None, :],
        mask=mask_row[:, None] & (k < D)[None, :],
        other=0.0,
    )


@triton.jit
def load_block(ptr, row0, count, k, D: tl.constexpr, BLOCK: tl.constexpr):
    """Load some columns of consecutive rows of a row-major matrix, zeros after the last row.

    Args:
        ptr: matrix ``[rows, D]``.
        row0: the first row.
        count: number of rows that may be read.
        k: the columns.
        D: number of columns.
        BLOCK: number of rows of the result.
    """
    i = tl.arange(0, BLOCK)
    # Offsets within a block are 32 bits wide, which halves the registers of addresses.
    return tl.load(
        ptr + tl.cast(row0, tl.int64) * D + (i[:, None] * D + k[None, :]),
        mask=(i < count)[:, None] & (k < D)[None, :],
        other=0.0,
    )


@triton.jit
def store_rows(ptr, row, mask_row, k, x, D: tl.constexpr):
    """Round numbers to the matrix's dtype, and store them where :func:`load_rows` reads.

    Args:
        ptr: matrix ``[rows, D]``.
        row: the rows.
        mask_row: rows that are written.
        k: the columns.
        x: the numbers, ``[len(row), len(k)]``.
        D: number of columns.
    """
    tl.store(
        ptr + row.to(tl.int64)[:, None] * D + k[None, :],
        x.to(ptr.dtype.element_ty),
        mask=mask_row[:, None] & (k < D)[None, :],
    )


@triton.jit
def split_scale(scale):
    """Split scales into a power of two and a mantissa from 1 to 2.

    Rows can be multiplied by a power of two without rounding.

    Args:
        scale: the scales, which are not negative.
    """
    power = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return power, tl.where(power > 0.0, scale / power, 1.0)


@triton.jit
def times_power(x, power):
    """Multiply rows by powers of two, which does not round.

    Args:
        x: the rows.
        power: the power of each row, which brings its entries to the order of 1.
    """
    return (x.to(tl.float32) * power[:, None]).to(x.dtype)


@triton.jit
def mask_tile(
    acc,
    start,
    length,
    t0,
    row_scale,
    mask_ptr,
    scale_ptr,
    BLOCK_T: tl.constexpr,
    HAS_MASK: tl.constexpr,
    MASK_ZERO: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    SMOOTH: tl.constexpr,
):
    """Scale a tile of products, and mask document tokens that do not count.

    Args:
        acc: products ``[BLOCK_Q, BLOCK_T]``.
        start: first row of the document.
        length: length of the document.
        t0: position of the tile's first token in the document.
        row_scale: factor of each query row, used with SMOOTH. Otherwise :func:`finish` multiplies
            the maxima by it.
        mask_ptr: mask of all document rows, with HAS_MASK.
        scale_ptr: factors of all document rows, with HAS_SCALE.
        BLOCK_T: tokens of the tile.
        HAS_MASK: whether documents have a mask.
        MASK_ZERO: whether masked tokens become 0; otherwise minus infinity.
        HAS_SCALE: whether rows have factors.
        SMOOTH: whether the smooth maximum is computed.

    Returns:
        The tile, with minus infinity for missing tokens, and the number of document tokens in it
        that count.
    """
    t = t0 + tl.arange(0, BLOCK_T)
    inside = t < length
    row = start + t
    if HAS_SCALE:
        acc *= tl.load(scale_ptr + row, mask=inside, other=0.0)[None, :]
        if SMOOTH:  # Without SMOOTH, the factor is applied to the maximum: it is not negative.
            acc *= row_scale[:, None]
    tile_tokens = tl.minimum(length - t0, BLOCK_T)
    if HAS_MASK:
        unmasked = tl.load(mask_ptr + row, mask=inside, other=0) != 0  # [BLOCK_T]
        if MASK_ZERO:
            acc = tl.where(unmasked[None, :], acc, 0.0)
            acc = tl.where(inside[None, :], acc, float("-inf"))
        else:
            acc = tl.where(unmasked[None, :], acc, float("-inf"))
            tile_tokens = tl.sum(unmasked.to(tl.int32))
    elif length - t0 < BLOCK_T:
        acc = tl.where(inside[None, :], acc, float("-inf"))
    return acc, tile_tokens


@triton.jit
def fold_tile(
    acc,
    t0,
    best,
    state,
    inverse_temperature,
    BLOCK_T: tl.constexpr,
    WITH_SAVED: tl.constexpr,
    SMOOTH: tl.constexpr,
):
    """Fold a tile of similarities into the running maximum of each query row.

    Args:
        acc: similarities ``[BLOCK_Q, BLOCK_T]``.
        t0: position of the tile's first token in the document.
        best: maxima so far, ``[BLOCK_Q]``.
        state: positions of the first tokens that have them or, with SMOOTH, sums of
            ``exp((s - best) / temperature)``.
        inverse_temperature: ``1 / temperature``, with SMOOTH.
        BLOCK_T: tokens of the tile.
        WITH_SAVED: whether positions are needed.
        SMOOTH: whether the smooth maximum is computed.

    Returns:
        The new ``best`` and ``state``.
    """
    tile_best = tl.reduce(acc, 1, nan_max)  # [BLOCK_Q]
    if SMOOTH:
        new_best = nan_max(best, tile_best)
        shift = tl.where(new_best == float("-inf"), 0.0, new_best)
        state = state * tl.exp((best - shift) * inverse_temperature)
        state += tl.sum(tl.exp((acc - shift[:, None]) * inverse_temperature), axis=1)
        best = new_best
    else:
        if WITH_SAVED:
            column = tl.where(acc == tile_best[:, None], tl.arange(0, BLOCK_T)[None, :], BLOCK_T)
            # ">", since the earlier token wins a tie
            state = tl.where(tile_best > best, t0 + tl.min(column, axis=1), state)
        best = nan_max(best, tile_best)
    return best, state


@triton.jit
def finish(
    best,
    state,
    n_tokens,
    unmasked_q,
    row_scale,
    start,
    temperature,
    mask_ptr,
    HAS_MASK: tl.constexpr,
    MASK_ZERO: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    WITH_SAVED: tl.constexpr,
    SMOOTH: tl.constexpr,
    NO_WINNER: tl.constexpr,
):
    """Return what each query token adds to a score, and what is saved for backward.

    A token that is masked adds 0 and has no winner, as does every token of a query whose document
    has no token that counts.

    Args:
        best: maxima ``[BLOCK_Q]`` over the document's tokens.
        state: state of :func:`fold_tile`.
        n_tokens: number of document tokens that count.
        unmasked_q: query tokens that are not masked.
        row_scale: factor of each query row.
        start: first row of the document.
        temperature: temperature of the smooth maximum.
        mask_ptr: mask of all document rows, with HAS_MASK.
        HAS_MASK: whether documents have a mask.
        MASK_ZERO: whether masked document tokens count with a similarity of 0.
        HAS_SCALE: whether rows have factors.
        WITH_SAVED: whether a backward pass follows.
        SMOOTH: whether the smooth maximum is computed.
        NO_WINNER: position of a token without a winner.

    Returns:
        The addends, and winners or, with SMOOTH, smooth maxima.
    """
    takes_part = mask_if(unmasked_q, n_tokens > 0)
    if SMOOTH:
        value = tl.where(takes_part, best + temperature * tl.log(state), 0.0)
        saved = tl.where(takes_part, value, float("inf"))
    else:
        if HAS_SCALE:
            best *= row_scale
        value = tl.where(takes_part, best, 0.0)
        saved = state
        if WITH_SAVED:
            if HAS_MASK and MASK_ZERO:
                winner_mask = tl.load(mask_ptr + start + state, mask=takes_part, other=0)
                takes_part = takes_part & (winner_mask != 0)
            saved = tl.where(takes_part, state, NO_WINNER)
    return value, saved


@triton.jit
def init_state(BLOCK_Q: tl.constexpr, SMOOTH: tl.constexpr):
    """Return the running maximum and state of :func:`fold_tile` before the first tile.

    Args:
        BLOCK_Q: number of query rows.
        SMOOTH: whether the smooth maximum is computed.
    """
    best = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    state = tl.zeros((BLOCK_Q,), tl.float32 if SMOOTH else tl.int32)
    return best, state


@triton.jit
def count_tiles(
    cu_documents_ptr,
    split,
    splits,
    Nd,
    Td,
    length_d,
    BLOCK_T: tl.constexpr,
    UNIFORM_D: tl.constexpr,
):
    """Return the number of tiles of a program, which has every ``splits``-th document.

    An empty document has one tile, in which its score is written.

    Args:
        cu_documents_ptr: offsets ``[Nd + 1]`` of the documents, unless UNIFORM_D.
        split: the first document of the program.
        splits: number of programs that share the documents.
        Nd: number of documents.
        Td: number of document rows.
        length_d: length of all documents, if UNIFORM_D.
        BLOCK_T: tokens of a tile.
        UNIFORM_D: whether all documents have the same length, see :func:`bounds`.
    """
    n_documents = (Nd - split + splits - 1) // splits
    if UNIFORM_D and UNIFORM_D != ENDS:
        return n_documents * tl.maximum((length_d + BLOCK_T - 1) // BLOCK_T, 1)
    else:
        n_tiles = 0
        for i0 in range(0, n_documents, 64):
            i = i0 + tl.arange(0, 64)
            start, end, _offsets_valid = bounds(
                cu_documents_ptr,
                split + i * splits,
                Nd,
                Td,
                length_d,
                UNIFORM_D,
            )
            n = tl.maximum((end - start + BLOCK_T - 1) // BLOCK_T, 1)
            n_tiles += tl.sum(tl.where(i < n_documents, n, 0))
        return n_tiles


@triton.jit
def owner_of(row_query_ptr, row, inside, length_q, UNIFORM_Q: tl.constexpr):
    """Return the query of each query row.

    Args:
        row_query_ptr: query of all rows, unless UNIFORM_Q.
        row: the rows.
        inside: rows that exist.
        length_q: length of all queries, if UNIFORM_Q.
        UNIFORM_Q: whether all queries have the same length.
    """
    if UNIFORM_Q:
        return row // length_q
    else:
        return tl.load(row_query_ptr + row, mask=inside, other=0).to(tl.int32)


@triton.jit
def item_of(entry, first_entry, order_ptr, pairs_ptr, PAIRING: tl.constexpr):
    """Return the pair, the query and the document of an entry of a query's list.

    Args:
        entry: the entry.
        first_entry: first entry of the query.
        order_ptr: listed pairs in the order of their queries.
        pairs_ptr: query and document of each listed pair, ``[P, 2]``.
        PAIRING: which pairs have a score. Only for ``INDEX`` (listed pairs) the query is one.
    """
    if PAIRING == INDEX:
        pair = tl.load(order_ptr + entry).to(tl.int32)
        return pair, tl.load(pairs_ptr + 2 * pair), tl.load(pairs_ptr + 2 * pair + 1)
    else:
        return entry, entry - first_entry, entry
