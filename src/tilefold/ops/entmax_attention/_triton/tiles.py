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
    """Return the sequence of a tile, and where the tile is in it.

    Returns:
        The sequence, the position of the tile's first token in it, the sequence's first row in a
        packed tensor (0 if padded), and its length: 0 for tiles after the last sequence.
    """
    if PACKED:
        b = tl.load(batch_ptr + tile)
        inside = b < B
        b = tl.minimum(b, B - 1)
        # broken offsets must not read elsewhere
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
    """Return the first row of sequence ``b`` in a packed tensor (0 if padded), and its length."""
    if PACKED:
        base = tl.minimum(tl.maximum(narrowed(tl.load(cu_ptr + b)), 0), rows)
        n = tl.minimum(tl.maximum(narrowed(tl.load(cu_ptr + b + 1)), base), rows) - base
    else:
        base = 0
        n = length
    return base, n


@triton.jit
def key_range(first, last, shift, k_len, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return the keys ``[low, high)`` that some query in ``[first, last)`` may attend to."""
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
    """Return the queries ``[low, high)`` that may attend to a key in ``[first, last)``."""
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
    """Load ``[rows, BLOCK_D]`` elements of a tensor whose last stride is 1, zeros where masked."""
    d = tl.arange(0, BLOCK_D)
    mask = keep[:, None]
    if BLOCK_D != D:
        mask = mask & (d < D)[None, :]
    return tl.load(ptr + rows.to(tl.int64)[:, None] * stride + d[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(ptr, rows, stride, keep, value, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Round ``[rows, BLOCK_D]`` elements, and store them where :func:`load_rows` reads."""
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
    """Return which of the keys ``[n0, n0 + KEYS)`` exist and are not masked."""
    lane = tl.arange(0, KEYS)
    # Compilers make a counter of blocks 64 bits wide. One subtraction spares a 64-bit comparison
    # for each key.
    keep = lane < k_len - n0
    if HAS_MASK:
        keep = keep & (tl.load(mask_ptr + n0 + lane, mask=keep, other=0) != 0)
    return keep


@triton.jit
def allowed(i, j, shift, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return whether query i may attend to key j; both are broadcast."""
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
    """Return whether a pair of the queries from ``m0`` and the keys from ``n0`` may be hidden.

    There are ``ROWS`` queries and ``KEYS`` keys. Padding masks are not considered.
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
    """Set products to minus infinity where query i may not attend to key j.

    ``i``, ``j`` and ``keep`` are broadcast to the products.

    A positive power of two as scale (``EXACT``) is left to :func:`distances`: multiplying by it
    never rounds, so that a compiler may join it with a subtraction in one kernel and not in
    another. Any other is multiplied here, and the selection keeps the product apart. Blocks that
    hide nothing skip the selection.
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
    """Compute the products of queries i and keys j, as :func:`hide` returns them.

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
    """Return scores from the products that :func:`hide` returns."""
    if EXACT:
        s *= scale
    return s


@triton.jit
def distances(s, peak, scale, e, KIND: tl.constexpr, EXACT: tl.constexpr):
    """Return distances of scores below the peak of their row, for closed forms times e."""
    d = peak - scaled(s, scale, EXACT)
    if (KIND == "entmax15") | (KIND == "sparsemax"):
        d *= e
    return d


@triton.jit
def excess(s, peak, y, scale, e, EXACT: tl.constexpr):
    """Return ``[y - e (peak - s)]_+`` of the closed forms, whose y is at most 1."""
    d = peak - scaled(s, scale, EXACT)
    return saturated(d, tl.zeros_like(d) - e, tl.zeros_like(d) + y)


@triton.jit
def one_if_positive(x):
    """Return 1 where ``x`` is positive, else 0."""
    return saturated(x, tl.zeros_like(x) + 1e30, tl.zeros_like(x))


@triton.jit
def weights(s, peak, y, c, scale, e, KIND: tl.constexpr, EXACT: tl.constexpr):
    """Return the weights ``p``, and ``u = p^(2 - alpha)`` on the support."""
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
    """Return whether a distance is inside the support, by the comparison that makes weights."""
    if (KIND == "entmax15") | (KIND == "sparsemax"):
        return d < y
    elif KIND == "softmax":
        return d < float("inf")
    else:
        return root_power(d, c, e) > 0


@triton.jit
def dropout_factor(seed_ptr, i, j, plane, threshold, keep_scale):
    """Return 0 for a dropped pair, and ``1 / (1 - p)`` for any other."""
    words, _, _, _ = tl.philox(tl.load(seed_ptr), j, i, plane, 0 * plane)
    return tl.where((words >> 8).to(tl.int32) >= threshold, keep_scale, 0.0)


@triton.jit
def exponent(alpha_ptr, h, alpha_value, HAS_ALPHA: tl.constexpr):
    """Return ``alpha - 1`` of head ``h``: made valid, and as the caller passed it."""
    if HAS_ALPHA:
        e = tl.load(alpha_ptr + h).to(tl.float32) - 1
    else:
        e = alpha_value - 1
    return tl.where((e >= 0) & (e <= 1), e, 1.0), e


@triton.jit
def write_table(cu_ptr, batch_ptr, start_ptr, B, tiles, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the sequence of every tile, and the first tile of every sequence.

    ``cu``: offsets ``[B + 1]``. Writes ``batch`` ``[tiles]`` and ``start`` ``[B + 1]``. A tile has
    ``ROWS`` tokens.
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
    """Write the tables of the tiles of queries and of keys.

    Grid: ``[ceil(tiles / BLOCK), 1 or 2]``; the second axis is 0 for queries and 1 for keys. See
    :func:`write_table`.
    """
    if tl.program_id(1) == 0:
        write_table(cu_seqlens_q_ptr, q_batch_ptr, q_start_ptr, B, q_tiles, ROWS, BLOCK)
    elif KEYS > 0:  # else nothing to write to
        write_table(cu_seqlens_k_ptr, k_batch_ptr, k_start_ptr, B, k_tiles, KEYS, BLOCK)


@triton.jit
def is_broken(cu_ptr, B, rows, longest, BLOCK: tl.constexpr):
    """Count the errors of offsets ``[B + 1]``.

    They must begin with 0, end with the number of rows, and neither fall nor rise by more than
    ``longest``.
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
    """Write NaN to all elements of a dense tensor, if the offsets do not describe the rows.

    Grid: any number of programs, which share the ``size`` elements of ``out``.
    """
    if (
        is_broken(cu_seqlens_q_ptr, B, q_rows, q_rows, BLOCK)
        + is_broken(cu_seqlens_k_ptr, B, k_rows, longest, BLOCK)
        > 0
    ):
        nothing = tl.full((BLOCK,), float("nan"), tl.float32).to(out_ptr.dtype.element_ty)
        for first in range(tl.program_id(0).to(tl.int64) * BLOCK, size, tl.num_programs(0) * BLOCK):
            offs = first + tl.arange(0, BLOCK)
            tl.store(out_ptr + offs, nothing, mask=offs < size)
