"""Device functions of the attention kernels: tiles, scores, dropout, tables of packed batches.

The CPU knows neither the lengths of packed sequences nor whether their offsets are valid, and a
dozen small torch operations for queries and keys would take longer than the attention of a small
batch. So kernels write these tables.

All kernels of the package use these names:

- ``b`` and ``h``: the sequence and the head of a program; ``plane = b * H + h``.
- ``i`` and ``j``: positions of queries and keys in their sequence, from ``m0`` and ``n0`` on.
- ``q_base`` and ``k_base``: the first row of the sequence in packed tensors; 0 for padded ones.
- ``q_len`` and ``k_len``: the lengths of the sequence. ``shift = k_len - q_len`` aligns the last
  query with the last key.
- ``sq_b``, ``sq_h``, ``sq_n``: strides of q over sequences, heads and tokens. The strides of k, v,
  out, dout and the gradients that are written have ``k``, ``v``, ``o``, ``d`` and ``g`` instead,
  those of dv ``w``.
- ``e = alpha - 1``, ``peak``: the largest score of a row, ``y``: its root, and ``c``: the power of
  the largest weight, ``p_max^e``.
- ``p`` and ``u = p^(2 - alpha)``: the weights of a row, and their slopes; both are 0 outside the
  support.
- ``out2_ptr``: the output with the weights ``u`` in place of ``p``. ``delta_ptr``: the number
  ``dout . out2`` of each query, ``[B, H, Nq]``, or ``[H, Tq]`` if packed.
- ``stats_ptr``: four numbers of each query, one of them for all queries after the other
  (``stat_size`` apart): peak, root, mass and support.
- ``tiles``: tiles of ``BLOCK_M`` queries in the whole batch; ``tiles_per``: those of a padded
  sequence. ``blocks``: the most blocks of ``BLOCK_N`` keys that a tile of queries visits.
- ``live_ptr``: the map of live blocks, bits ``[H, tiles, words]``. ``key_list_ptr``: the live
  blocks of each tile of queries, ``[H, tiles, blocks]``, and ``key_count_ptr``: their number.
- ``q_batch_ptr`` and ``q_start_ptr``, and those of keys: the tables of :func:`write_table`.
- ``threshold`` and ``keep_scale``: of dropout, see :func:`dropout_factor`.
- ``GROUP``: query heads that share a key head. ``EXACT``: the scale is a positive power of two.
  ``KIND``: the formula of the weights, see ``_shared/_triton/entmax.py``. ``LISTS``: live blocks
  are listed.
"""

import triton
import triton.language as tl

from tilefold.ops._shared._triton.entmax import needs_care, root_power, saturated, weight_and_slope
from tilefold.ops._shared._triton.offsets import mask_if, narrowed

# Numbers that every kernel of a call receives. A kernel is compiled once for all their values.
UNSPECIALIZED = [
    "Nq",
    "Nk",
    "Tq",
    "Tk",
    "B",
    "tiles_per",
    "window",
    "scale",
    "alpha_value",
    "threshold",
    "keep_scale",
    "stat_size",
]


@triton.jit
def locate(
    tile,
    length,
    rows,
    tiles_per,
    cu_ptr,
    batch_ptr,
    start_ptr,
    B,
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Return the sequence of a tile of tokens, and the tile's position in it.

    Args:
        tile: number of the tile in the batch.
        length: length of every sequence of a padded batch.
        rows: number of tokens of a packed batch.
        tiles_per: tiles of every sequence of a padded batch.
        cu_ptr: offsets ``[B + 1]`` of a packed batch.
        batch_ptr: sequence of each tile of a packed batch.
        start_ptr: first tile of each sequence of a packed batch.
        B: number of sequences.
        BLOCK: tokens of a tile.
        PACKED: whether the batch is packed.

    Returns:
        The sequence, the position of the tile's first token in it, the sequence's first row in a
        packed tensor (0 if padded), and its length: 0 for tiles after the last sequence.
    """
    if PACKED:
        b = tl.load(batch_ptr + tile)
        inside = b < B
        b = tl.minimum(b, B - 1)
        # Invalid offsets must not read outside the tensor.
        base = tl.minimum(tl.maximum(narrowed(tl.load(cu_ptr + b)), 0), rows)
        end = tl.minimum(tl.maximum(narrowed(tl.load(cu_ptr + b + 1)), base), rows)
        first = (tile - tl.load(start_ptr + b)) * BLOCK
        n = tl.where(inside, end - base, 0)
    else:
        b = tile // tiles_per
        first = (tile % tiles_per) * BLOCK
        base = 0
        n = length
    return b, first, base, n


@triton.jit
def bounds(cu_ptr, b, length, rows, PACKED: tl.constexpr):
    """Return the first row of a sequence in a packed tensor (0 if padded), and its length.

    Invalid offsets are clamped, so that nothing outside the tensor is read.

    Args:
        cu_ptr: offsets ``[B + 1]`` of a packed batch.
        b: the sequence.
        length: length of every sequence of a padded batch.
        rows: number of tokens of a packed batch.
        PACKED: whether the batch is packed.
    """
    if PACKED:
        base = tl.minimum(tl.maximum(narrowed(tl.load(cu_ptr + b)), 0), rows)
        n = tl.minimum(tl.maximum(narrowed(tl.load(cu_ptr + b + 1)), base), rows) - base
    else:
        base = 0
        n = length
    return base, n


@triton.jit
def row_offset(b, h, base, stride_b, stride_h, stride_n):
    """Return the offset of the first row of a sequence and head in a tensor, in int64.

    Args:
        b: the sequence.
        h: the head.
        base: the first row of the sequence in a packed tensor, 0 if padded.
        stride_b, stride_h, stride_n: strides over sequences, heads and tokens.
    """
    return (
        b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h + tl.cast(base, tl.int64) * stride_n
    )


@triton.jit
def key_range(first, last, shift, k_len, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return the range ``[low, high)`` of keys that some of a range of queries may attend to.

    Args:
        first: position of the first query.
        last: position after the last query.
        k_len: number of keys of the sequence.
        shift: ``k_len - q_len``, which aligns the last query with the last key.
        window: a query attends to keys at most this far away, with ``WINDOW``.
        CAUSAL: whether a query attends to no key after it.
        WINDOW: whether attention is limited to a window.
    """
    low = k_len * 0
    high = k_len
    if CAUSAL:
        high = tl.minimum(high, last + shift)
    if WINDOW:
        low = tl.maximum(first + shift - window, 0)
        high = tl.minimum(high, last + shift + window)
    return low, high


@triton.jit
def query_range(first, last, shift, q_len, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return the range ``[low, high)`` of queries that may attend to some of a range of keys.

    Args:
        first: position of the first key.
        last: position after the last key.
        q_len: number of queries of the sequence.
        shift: ``k_len - q_len``, which aligns the last query with the last key.
        window: a query attends to keys at most this far away, with ``WINDOW``.
        CAUSAL: whether a query attends to no key after it.
        WINDOW: whether attention is limited to a window.
    """
    low = q_len * 0
    high = q_len
    if CAUSAL:
        low = tl.maximum(first - shift, 0)
    if WINDOW:
        low = tl.maximum(first - window - shift, low)
        high = tl.minimum(high, last + window - shift)
    return low, high


@triton.jit
def load_rows(ptr, rows, stride, keep, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load rows of a tensor whose last stride is 1, ``[rows, BLOCK_D]``.

    Args:
        ptr: the first row of the sequence and head.
        rows: positions of the rows in the sequence.
        stride: distance from row to row.
        keep: rows to load. Others are 0.
        D: entries of a row. Entries from D to ``BLOCK_D`` are 0.
        BLOCK_D: the next power of two.
    """
    d = tl.arange(0, BLOCK_D)
    mask = keep[:, None]
    if BLOCK_D != D:
        mask = mask & (d < D)[None, :]
    return tl.load(ptr + rows.to(tl.int64)[:, None] * stride + d[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(ptr, rows, stride, keep, value, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Round values to the tensor's dtype, and store them as rows.

    Args:
        ptr: the first row of the sequence and head.
        rows: positions of the rows in the sequence.
        stride: distance from row to row.
        keep: rows to store.
        value: values ``[rows, BLOCK_D]``.
        D: entries of a row. Entries from D to ``BLOCK_D`` are not stored.
        BLOCK_D: the next power of two.
    """
    d = tl.arange(0, BLOCK_D)
    mask = keep[:, None]
    if BLOCK_D != D:
        mask = mask & (d < D)[None, :]
    tl.store(
        ptr + rows.to(tl.int64)[:, None] * stride + d[None, :],
        value.to(ptr.dtype.element_ty),
        mask=mask,
    )


@triton.jit
def kept_keys(mask_ptr, n0, k_len, KEYS: tl.constexpr, HAS_MASK: tl.constexpr):
    """Return which keys of a block exist and are not masked, ``[KEYS]``.

    Args:
        mask_ptr: the sequence's row of the padding mask, 0 for masked keys.
        n0: position of the block's first key.
        k_len: number of keys of the sequence.
        KEYS: keys of the block.
        HAS_MASK: whether there is a padding mask.
    """
    lane = tl.arange(0, KEYS)
    # `n0` may be 64 bits wide. Subtracting it first leaves a 32-bit comparison for each key.
    keep = lane < k_len - n0
    if HAS_MASK:
        keep = keep & (tl.load(mask_ptr + n0 + lane, mask=keep, other=0) != 0)
    return keep


@triton.jit
def allowed(i, j, shift, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return whether queries may attend to keys under a causal mask and a window.

    Args:
        i: positions of the queries, broadcast against ``j``.
        j: positions of the keys.
        shift: ``k_len - q_len``, which aligns the last query with the last key.
        window: a query attends to keys at most this far away, with ``WINDOW``.
        CAUSAL: whether a query attends to no key after it.
        WINDOW: whether attention is limited to a window.
    """
    distance = j - (i + shift)
    pairs = distance == distance
    if CAUSAL:
        pairs = pairs & (distance <= 0)
    if WINDOW:
        pairs = pairs & (distance <= window) & (distance >= -window)
    return pairs


@triton.jit
def is_edge(
    m0,
    n0,
    shift,
    k_len,
    window,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Return whether some pair of a block of queries and a block of keys may be hidden.

    Padding masks are not considered.

    Args:
        m0: position of the first query.
        n0: position of the first key.
        k_len: number of keys of the sequence.
        ROWS: queries of the block.
        KEYS: keys of the block.
        shift: ``k_len - q_len``, which aligns the last query with the last key.
        window: a query attends to keys at most this far away, with ``WINDOW``.
        CAUSAL: whether a query attends to no key after it.
        WINDOW: whether attention is limited to a window.
    """
    edge = k_len - n0 < KEYS
    if CAUSAL:
        edge = edge | (n0 + KEYS - 1 > m0 + shift)
    if WINDOW:
        edge = edge | (n0 + KEYS - 1 > m0 + shift + window) | (n0 < m0 + ROWS - 1 + shift - window)
    return edge


@triton.jit
def hide(
    s,
    i,
    j,
    keep,
    edge,
    shift,
    scale,
    window,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_MASK: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Set products to minus infinity where a query may not attend to a key.

    A scale that is a positive power of two (``EXACT``) is left to :func:`distances`. Multiplication
    by it never rounds, so that all kernels compute the same bits, even if a compiler fuses it with
    a subtraction in only some of them. Any other scale is multiplied here, where the selection that
    follows prevents this fusion.

    Args:
        s: products of queries and keys.
        i: positions of the queries, broadcast to ``s``.
        j: positions of the keys, broadcast to ``s``.
        keep: keys that exist and are not masked, broadcast to ``s``.
        edge: :func:`is_edge` of the block. Blocks that hide nothing skip the selection.
        scale: factor of the products.
        HAS_MASK: whether there is a padding mask.
        EXACT: whether the scale is a positive power of two.
        shift: ``k_len - q_len``, which aligns the last query with the last key.
        window: a query attends to keys at most this far away, with ``WINDOW``.
        CAUSAL: whether a query attends to no key after it.
        WINDOW: whether attention is limited to a window.
    """
    if EXACT and not HAS_MASK:
        if edge:
            pairs = keep
            if CAUSAL or WINDOW:
                pairs = pairs & allowed(i, j, shift, window, CAUSAL, WINDOW)
            s = tl.where(pairs, s, float("-inf"))
        return s
    else:
        pairs = keep
        if CAUSAL or WINDOW:
            pairs = pairs & allowed(i, j, shift, window, CAUSAL, WINDOW)
        if not EXACT:
            s *= scale
        return tl.where(pairs, s, float("-inf"))


@triton.jit
def score_tile(
    q,
    k_ptr,
    mask_ptr,
    m0,
    i,
    n0,
    j,
    shift,
    stride_k,
    k_len,
    scale,
    window,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_MASK: tl.constexpr,
    EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the products of a tile of queries and a block of keys, as :func:`hide` returns them.

    Args:
        q: queries ``[BLOCK_M, BLOCK_D]``.
        k_ptr: keys of the sequence and head.
        mask_ptr: the sequence's row of the padding mask, with ``HAS_MASK``.
        m0: position of the first query.
        i: positions of the queries.
        n0: position of the first key.
        j: positions of the keys.
        stride_k: distance from key to key.
        k_len: number of keys of the sequence.
        scale: factor of the products.
        D: head dimension.
        BLOCK_D: the next power of two.
        HAS_MASK: whether there is a padding mask.
        EXACT: whether the scale is a positive power of two.
        PRECISION: precision of products of fp32.
        shift: ``k_len - q_len``, which aligns the last query with the last key.
        window: a query attends to keys at most this far away, with ``WINDOW``.
        CAUSAL: whether a query attends to no key after it.
        WINDOW: whether attention is limited to a window.

    Returns:
        The products ``[BLOCK_M, BLOCK_N]``, the keys ``[BLOCK_N, BLOCK_D]``, and which keys exist
        and are not masked.
    """
    keep = kept_keys(mask_ptr, n0, k_len, j.shape[0], HAS_MASK)
    k = load_rows(k_ptr, j, stride_k, keep, D, BLOCK_D)  # [BLOCK_N, BLOCK_D]
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
    edge = is_edge(m0, n0, shift, k_len, window, i.shape[0], j.shape[0], CAUSAL, WINDOW)
    s = hide(
        s,
        i[:, None],
        j[None, :],
        keep[None, :],
        edge,
        shift,
        scale,
        window,
        CAUSAL,
        WINDOW,
        HAS_MASK,
        EXACT,
    )
    return s, k, keep


@triton.jit
def scaled(s, scale, EXACT: tl.constexpr):
    """Return scores from the products that :func:`hide` returns.

    Args:
        s: products. They are multiplied by the scale already without ``EXACT``.
        scale: factor of the products.
        EXACT: whether the scale is a positive power of two.
    """
    if EXACT:
        s *= scale
    return s


@triton.jit
def distances(s, peak, scale, e, KIND: tl.constexpr, EXACT: tl.constexpr):
    """Return the distances of scores below the peak of their row.

    Args:
        s: products that :func:`hide` returns.
        peak: the largest score of each row.
        scale: factor of the products.
        e: ``alpha - 1``.
        KIND: kind of alpha. The distances of entmax15 and sparsemax are multiplied by ``e``.
        EXACT: whether the scale is a positive power of two.
    """
    d = peak - scaled(s, scale, EXACT)
    if (KIND == "entmax15") | (KIND == "sparsemax"):
        d *= e
    return d


@triton.jit
def excess(s, peak, y, scale, e, EXACT: tl.constexpr):
    """Return ``[y - e (peak - score)]_+``, from which entmax15 and sparsemax make weights.

    It is the square root of the weight of entmax15, and the weight of sparsemax.

    Args:
        s: products that :func:`hide` returns.
        peak: the largest score of each row.
        y: the root of each row, at most 1.
        scale: factor of the products.
        e: ``alpha - 1``.
        EXACT: whether the scale is a positive power of two.
    """
    d = peak - scaled(s, scale, EXACT)
    return saturated(d, tl.zeros_like(d) - e, tl.zeros_like(d) + y)


@triton.jit
def one_if_positive(x):
    """Return 1 where ``x`` is positive, else 0."""
    return saturated(x, tl.zeros_like(x) + 1e30, tl.zeros_like(x))


@triton.jit
def weights(s, peak, y, c, scale, e, KIND: tl.constexpr, EXACT: tl.constexpr):
    """Return the weights ``p`` of scores, and their slopes ``u = p^(2 - alpha)``.

    Both are 0 off the support.

    Args:
        s: products that :func:`hide` returns.
        peak: the largest score of each row.
        y: the root of each row.
        c: :func:`peak_power` of the root.
        scale: factor of the products.
        e: ``alpha - 1``.
        KIND: kind of alpha.
        EXACT: whether the scale is a positive power of two.
    """
    if KIND == "entmax15":
        u = excess(s, peak, y, scale, e, EXACT)
        return u * u, u
    elif KIND == "sparsemax":
        p = excess(s, peak, y, scale, e, EXACT)
        return p, one_if_positive(p)
    else:
        d = distances(s, peak, scale, e, KIND, EXACT)
        return weight_and_slope(d, y, c, e, needs_care(e, KIND), KIND)


@triton.jit
def alive(d, y, c, e, KIND: tl.constexpr):
    """Return whether distances are inside the support.

    The comparison is the one by which weights are positive.

    Args:
        d: distances of scores below the peak of their row, multiplied by ``e`` for entmax15 and
            sparsemax.
        y: the root of each row.
        c: :func:`peak_power` of the root.
        e: ``alpha - 1``.
        KIND: kind of alpha.
    """
    if (KIND == "entmax15") | (KIND == "sparsemax"):
        return d < y
    elif KIND == "softmax":
        return d < float("inf")
    else:
        return root_power(d, c, e) > 0


@triton.jit
def dropout_factor(seed_ptr, i, j, plane, threshold, keep_scale):
    """Return 0 for dropped pairs of a query and a key, and ``1 / (1 - p)`` for all others.

    A Philox generator decides by the seed and the positions of a pair, so that every kernel drops
    the same pairs.

    Args:
        seed_ptr: the seed.
        i: positions of the queries.
        j: positions of the keys.
        plane: number of the sequence and head, ``b * H + h``.
        threshold: random numbers of 24 bits below it drop the pair.
        keep_scale: ``1 / (1 - p)`` for the probability p of dropout.
    """
    words, _, _, _ = tl.philox(tl.load(seed_ptr), j, i, plane, 0 * plane)
    return tl.where((words >> 8).to(tl.int32) >= threshold, keep_scale, 0.0)


@triton.jit
def exponent(alpha_ptr, h, alpha_value, HAS_ALPHA: tl.constexpr):
    """Return ``alpha - 1`` of a head, made valid, and as the caller passed it.

    Args:
        alpha_ptr: alpha ``[H]``, with ``HAS_ALPHA``.
        h: the head.
        alpha_value: alpha of all heads without ``HAS_ALPHA``.
        HAS_ALPHA: whether each head has its own alpha.

    Returns:
        ``alpha - 1`` with 1 in place of a number outside [0, 1], and ``alpha - 1``.
    """
    if HAS_ALPHA:
        e = tl.load(alpha_ptr + h).to(tl.float32) - 1
    else:
        e = alpha_value - 1
    return tl.where((e >= 0) & (e <= 1), e, 1.0), e


@triton.jit
def write_table(cu_ptr, batch_ptr, start_ptr, B, tiles, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the sequence of each tile of a packed batch, and the first tile of each sequence.

    Args:
        cu_ptr: offsets ``[B + 1]``.
        batch_ptr: sequence of each tile, ``[tiles]``, B for tiles after the last sequence; written.
        start_ptr: first tile of each sequence, ``[B + 1]``; written by the first program.
        B: number of sequences.
        tiles: number of tiles that the tables have space for.
        ROWS: tokens of a tile.
        BLOCK: tiles of a program.
    """
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sequence = tl.zeros((BLOCK,), tl.int32)
    n_before = tl.zeros((), tl.int64)
    for first in range(0, B, BLOCK):
        b = first + tl.arange(0, BLOCK)
        start = narrowed(tl.load(cu_ptr + b, mask=b < B, other=0)).to(tl.int64)
        end = narrowed(tl.load(cu_ptr + b + 1, mask=b < B, other=0)).to(tl.int64)
        # Offsets are not checked, so that the length may be negative.
        count = tl.maximum((end - start + (ROWS - 1)) // ROWS, 0)
        ends = n_before + tl.cumsum(count, axis=0)
        ends_before = (ends[None, :] <= tile[:, None]) & (b < B)[None, :]
        sequence += tl.sum(ends_before.to(tl.int32), axis=1)
        n_before += tl.sum(count, axis=0)
        tl.store(
            start_ptr + b + 1,
            tl.minimum(ends, tiles).to(tl.int32),
            mask=mask_if(b < B, tl.program_id(0) == 0),
        )
    tl.store(batch_ptr + tile, sequence, mask=tile < tiles)
    if tl.program_id(0) == 0:
        tl.store(start_ptr, 0)


@triton.jit(do_not_specialize=["B", "q_tiles", "k_tiles"])
def tables_kernel(
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    q_batch_ptr,
    q_start_ptr,
    k_batch_ptr,
    k_start_ptr,
    B,
    q_tiles,
    k_tiles,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the tables of the tiles of queries and of keys for a packed batch.

    Grid: ``[ceil(tiles / BLOCK), 1 or 2]``; the second axis is 0 for queries and 1 for keys.

    Args:
        cu_seqlens_q_ptr, cu_seqlens_k_ptr: offsets ``[B + 1]``.
        q_batch_ptr, k_batch_ptr: sequence of each tile; written.
        q_start_ptr, k_start_ptr: first tile of each sequence, ``[B + 1]``; written.
        B: number of sequences.
        q_tiles, k_tiles: numbers of tiles that the tables have space for.
        ROWS: queries of a tile.
        KEYS: keys of a tile; 0 if no table of keys is needed.
        BLOCK: tiles of a program.
    """
    if tl.program_id(1) == 0:
        write_table(cu_seqlens_q_ptr, q_batch_ptr, q_start_ptr, B, q_tiles, ROWS, BLOCK)
    elif KEYS > 0:  # else nothing to write to
        write_table(cu_seqlens_k_ptr, k_batch_ptr, k_start_ptr, B, k_tiles, KEYS, BLOCK)


@triton.jit
def is_broken(cu_ptr, B, rows, longest, BLOCK: tl.constexpr):
    """Return the number of errors of the offsets of a packed batch.

    Offsets must begin with 0, end with the number of rows, and never fall, nor rise by more than
    the longest length.

    Args:
        cu_ptr: offsets ``[B + 1]``.
        B: number of sequences.
        rows: number of rows.
        longest: the longest length of a sequence.
        BLOCK: offsets that are read at a time.
    """
    wrong = (narrowed(tl.load(cu_ptr)) != 0).to(tl.int32) + (
        narrowed(tl.load(cu_ptr + B)) != rows
    ).to(tl.int32)
    for first in range(0, B, BLOCK):
        b = first + tl.arange(0, BLOCK)
        start = narrowed(tl.load(cu_ptr + b, mask=b < B, other=0)).to(tl.int64)
        rise = narrowed(tl.load(cu_ptr + b + 1, mask=b < B, other=0)) - start
        wrong += tl.sum(((rise < 0) | (rise > longest)).to(tl.int32), axis=0)
    return wrong


@triton.jit(do_not_specialize=["B", "q_rows", "k_rows", "longest", "size"])
def nan_if_broken_kernel(
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    out_ptr,
    B,
    q_rows,
    k_rows,
    longest,
    size,
    BLOCK: tl.constexpr,
):
    """Write NaN to all elements of the output if the offsets of a packed batch are invalid.

    Grid: any number of programs, which share the elements.

    Args:
        cu_seqlens_q_ptr, cu_seqlens_k_ptr: offsets ``[B + 1]``.
        out_ptr: the output, a dense tensor; written.
        B: number of sequences.
        q_rows, k_rows: numbers of queries and keys.
        longest: the longest length of a sequence of keys that the launch allows for.
        size: number of elements of the output.
        BLOCK: elements that are written at a time.
    """
    if (
        is_broken(cu_seqlens_q_ptr, B, q_rows, q_rows, BLOCK)
        + is_broken(cu_seqlens_k_ptr, B, k_rows, longest, BLOCK)
        > 0
    ):
        nans = tl.full((BLOCK,), float("nan"), tl.float32).to(out_ptr.dtype.element_ty)
        for first in range(tl.program_id(0).to(tl.int64) * BLOCK, size, tl.num_programs(0) * BLOCK):
            offs = first + tl.arange(0, BLOCK)
            tl.store(out_ptr + offs, nans, mask=offs < size)
