"""Launch configurations of the LSR head, as tables by architecture and dtype."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch

from tilefold.ops._shared._triton import releases
from tilefold.ops._shared.fallback import KernelFallback
from tilefold.ops._shared.plan import Constants, Setting, cdiv, power_of_two
from tilefold.ops._shared.tuning import Between, ConfigRow, lookup
from tilefold.ops.lsr_head._problem import HeadOptions

FP8 = torch.float8_e4m3fn
SIXTEEN_BITS = frozenset({torch.bfloat16, torch.float16})
# conditions of rows
INTERPRETED = {"capability": (0, 0)}
FP32 = {"dtype": torch.float32}
FP16 = {"dtype": torch.float16}
HOPPER = {"capability": (9, 0), "dtype": SIXTEEN_BITS}
LARGE_BATCH = HOPPER | {"batch": Between(least=33)}  # sequences
BEFORE_HOPPER = {"capability": Between(most=(8, 9))}
BLACKWELL = {"capability": Between(least=(9, 1))}
# sources of rows
MEASURED = "H200, Triton 3.6"
COMPILED = "compiled without spills with Triton 3.4 to 3.9, not timed"
SMALL = "small, for tests"

MAX_SPLITS = 32  # of the token tiles, if sequences have one length
L2_BYTES = 48e6  # of the L2 cache, which has 50 MB on an H100 and 60 MB on an H200
# Shares of rows that are valid, over which the splits of sequences of different lengths are chosen.
RAGGED_SHARES = (0.25, 0.33, 0.5, 0.75, 1.0)
LONG_SEQUENCE_TILES = 16  # a longer sequence may be divided among splits

# names of kernels, for warnings and Setting.failed_kernels
BY_ROLES = "lsr_head's kernel whose warps load or compute"
BY_SCREEN = "lsr_head's screen of scores that cannot be positive"
BY_TMA = "lsr_head's portable kernel with TMA"
PORTABLE = "lsr_head's portable kernel"
_SAME_RESULTS = "instead: the same results, a slower forward pass."
FALLBACKS = {
    BY_ROLES: KernelFallback(BY_ROLES, f"Max pooling runs {BY_TMA} {_SAME_RESULTS}"),
    BY_TMA: KernelFallback(BY_TMA, f"Max pooling runs {PORTABLE} {_SAME_RESULTS}"),
    BY_SCREEN: KernelFallback(BY_SCREEN, f"Every logit is computed {_SAME_RESULTS}"),
}

# Forward of max pooling. Sequences begin at multiples of GROUP rows. With WARP_ROLES, num_warps
# counts the warps of a computing group. The facts "tma" and "roles" say whether kernels with TMA
# descriptors, and kernels with warp roles, can run: see :func:`fastest_kernel`.
MAX_FORWARD = (
    ConfigRow(
        {},
        {
            "BLOCK_V": 128,
            "BLOCK_T": 128,
            "BLOCK_K": 32,
            "GROUP": 16,
            "num_warps": 8,
            "num_stages": 3,
            "USE_TMA": False,
            "PRECISION": "ieee",
            "WARP_ROLES": False,
        },
        COMPILED,
    ),
    ConfigRow({"dtype": FP8}, {"BLOCK_K": 64}, COMPILED),
    ConfigRow({"tma": True}, {"BLOCK_T": 256, "BLOCK_K": 64, "USE_TMA": True}, MEASURED),
    ConfigRow({"tma": True, "dtype": FP8}, {"BLOCK_K": 128}, MEASURED),
    ConfigRow(
        {"tma": True, "dtype": SIXTEEN_BITS} | BLACKWELL,
        {"BLOCK_T": 128},
        "compiled: copies of products, which lie in a memory of their own, and places of winners "
        "spill from 3.7 on",
    ),
    ConfigRow(
        {"roles": True},
        {"num_warps": 4, "num_stages": 4, "WARP_ROLES": True, "LEAN_WINNERS": False},
        MEASURED,
    ),
    ConfigRow(
        {"roles": True, "release": Between(least=(3, 8))},
        {"LEAN_WINNERS": True},
        "compiled: winners are looked for with constants, since a register for each place of a "
        "tile spills",
    ),
    ConfigRow(
        FP32,
        {
            "BLOCK_V": 64,
            "BLOCK_T": 64,
            "BLOCK_K": 32,
            "num_warps": 4,
            "num_stages": 2,
            "PRECISION": "tf32x3",
        },
        MEASURED,
    ),
    ConfigRow(FP32 | {"tf32": True}, {"PRECISION": "tf32"}, COMPILED),
    ConfigRow(
        INTERPRETED,
        {
            "BLOCK_V": 16,
            "BLOCK_T": 32,
            "BLOCK_K": 16,
            "num_warps": 4,
            "num_stages": 1,
            "PRECISION": "ieee",
        },
        SMALL,
    ),
)
# Costs by which splits are chosen. ITEM is the work on an item besides its tiles, in tiles. With
# sequences of different lengths it is RAGGED_ITEM, since each item searches for its first sequence.
# READ is the cost of reading an entry of an operand from memory, in products of two entries.
# Program instances hardly wait for reads. But reads take power, and at the limit of its power the
# GPU slows its clock down. They are not counted up to 1,024 dimensions, where operands stay in the
# L2 cache.
SPLIT_COSTS = (
    ConfigRow(
        {},
        {"ITEM": 0.1, "RAGGED_ITEM": 0.15, "READ": 0.0, "MAX_RAGGED_SPLITS": 8},
        MEASURED,
    ),
    ConfigRow(
        HOPPER | {"dim": Between(least=1025)},
        {"ITEM": 0.02, "RAGGED_ITEM": 0.03, "READ": 23.0, "MAX_RAGGED_SPLITS": 16},
        MEASURED,
    ),
)
# The screen, on 9.0. It runs for at least LEAST_WORK operations, which take long enough for a
# sample, and up to WIDEST dimensions, for which its kernels and its bound are made. All logits are
# computed if more than MOST_SAMPLED of the sampled scores may be positive (128 tokens of a text
# determine half to two thirds of those that may), or more than MOST_KEPT of all scores.
WHEN_SCREENED = (
    ConfigRow(
        {},
        {"LEAST_WORK": 7e11, "WIDEST": 4096, "MOST_SAMPLED": 0.12, "MOST_KEPT": 0.5},
        MEASURED,
    ),
)
# The int8 product of the screen. Tiles of 256 tokens read the weight half as often. That pays where
# operands do not stay in the L2 cache, as in SPLIT_COSTS.
SCREEN = (
    ConfigRow({}, {"BLOCK_T": 128, "BLOCK_K": 128, "num_warps": 4, "STAGES": 6}, MEASURED),
    ConfigRow({"dim": Between(least=1025)}, {"BLOCK_T": 256, "STAGES": 4}, MEASURED),
)
SAMPLE = {
    "BLOCK_V": 64,
    "BLOCK_T": 32,
    "BLOCK_K": 64,
    "MOST_T": 128,
    "num_warps": 4,
    "num_stages": 6,
}
SAMPLED = 12  # largest number of sequences in a sample
# An instance rounds rows of up to ENTRIES numbers in all at a time, which it holds in registers.
ROUND = {"num_warps": 8, "PROGRAMS": 2, "ENTRIES": 16384}
REFINE = {
    "BLOCK_V": 128,
    "BLOCK_T": 128,
    "BLOCK_K": 64,
    "num_warps": 8,
    "num_stages": 3,
    "PROGRAMS": 1,
}
# Backward of max pooling. BLOCK_R rows of hidden (at most 32) have a common list of entries. A
# program instance of SCAN reads SPLIT_V columns.
SCAN = (
    ConfigRow({}, {"BLOCK_R": 32, "SPLIT_V": 8192, "BLOCK": 1024, "num_warps": 4}, MEASURED),
    ConfigRow(INTERPRETED, {"BLOCK_R": 16, "SPLIT_V": 64, "BLOCK": 32}, SMALL),
)
DHIDDEN = (
    ConfigRow(
        {},
        {"BLOCK_D": 128, "BLOCK_E": 128, "num_warps": 4, "num_stages": 2, "PRECISION": "ieee"},
        MEASURED,
    ),
    ConfigRow(FP32, {"BLOCK_E": 32}, MEASURED),
    ConfigRow(INTERPRETED, {"BLOCK_D": 16, "BLOCK_E": 16}, SMALL),
)
# Entries of BLOCK_B sequences are listed at a time, and BLOCK_E of them multiplied at a time.
# PROGRAMS instances run on a multiprocessor.
DWEIGHT = (
    ConfigRow(
        {},
        {
            "BLOCK_V": 16,
            "BLOCK_D": 128,
            "BLOCK_B": 32,
            "BLOCK_E": 32,
            "num_warps": 4,
            "num_stages": 2,
            "PRECISION": "ieee",
            "PROGRAMS": 8,
        },
        MEASURED,
    ),
    ConfigRow(FP32, {"BLOCK_E": 16}, MEASURED),
    ConfigRow(
        BEFORE_HOPPER | {"release": Between(most=(3, 5))},
        {"num_stages": 1},
        "compiled: lists spill in a pipeline, in fp32 with 3.4, in 16 bits with 3.5",
    ),
    ConfigRow(BLACKWELL | FP16, {"BLOCK_E": 16}, "compiled: with 32, scaling spills on some"),
    ConfigRow(HOPPER, {"BLOCK_D": 256, "BLOCK_B": 16, "BLOCK_E": 16, "num_stages": 1}, MEASURED),
    ConfigRow(LARGE_BATCH, {"BLOCK_B": 32}, MEASURED),
    ConfigRow(
        LARGE_BATCH | {"release": (3, 7)},
        {"num_stages": 2},
        "compiled: long lists spill without a pipeline",
    ),
    ConfigRow(
        LARGE_BATCH | FP16,
        {"maxnreg": 128},
        "H200, Triton 3.6: scaling would take 152, and a multiprocessor then holds three programs "
        "where four do",
    ),
    ConfigRow(
        LARGE_BATCH | FP16 | {"release": (3, 4)},
        {"maxnreg": 168},
        "compiled: scaled entries with offsets in int64 spill in 128",
    ),
    ConfigRow(
        INTERPRETED,
        {"BLOCK_V": 16, "BLOCK_D": 16, "BLOCK_B": 4, "BLOCK_E": 16, "num_stages": 2, "PROGRAMS": 1},
        SMALL,
    ),
)
# Sum and mean pooling. Backward has SLAB_ELEMENTS of dlogits in memory at a time. Up to FEW_ROWS
# rows of hidden are multiplied by our kernels.
SUM = (
    ConfigRow(
        {},
        {
            "BLOCK_V": 128,
            "BLOCK_T": 64,
            "BLOCK_K": 64,
            "num_warps": 8,
            "num_stages": 3,
            "PRECISION": "ieee",
            "SLAB_ELEMENTS": 1 << 25,
            "FEW_ROWS": 64,
        },
        MEASURED,
    ),
    ConfigRow(BEFORE_HOPPER, {"BLOCK_K": 32}, COMPILED),
    ConfigRow(
        BLACKWELL,
        {"num_warps": 16},
        "compiled: copies of products in their memory take registers",
    ),
    ConfigRow(
        FP32,
        {
            "BLOCK_V": 32,
            "BLOCK_T": 32,
            "BLOCK_K": 32,
            "num_warps": 4,
            "num_stages": 2,
            "PRECISION": "tf32x3",
        },
        MEASURED,
    ),
    ConfigRow(
        BEFORE_HOPPER | FP32,
        {"BLOCK_K": 16},
        "compiled: with 32, some of Triton 3.6 to 3.8 spill at any depth",
    ),
    ConfigRow(FP32 | {"tf32": True}, {"PRECISION": "tf32"}, COMPILED),
    ConfigRow(
        INTERPRETED,
        {
            "BLOCK_V": 16,
            "BLOCK_T": 16,
            "BLOCK_K": 16,
            "num_warps": 4,
            "num_stages": 1,
            "PRECISION": "ieee",
            "SLAB_ELEMENTS": 4096,
            "FEW_ROWS": 32,
        },
        SMALL,
    ),
)
# Poolings of one token per sequence. A tile has BLOCK_B sequences (in forward at most). Forward
# searches masks of up to MAX_MASK entries itself, FIND at a time. Larger masks are searched by a
# launch before it, FIND_BLOCK entries at a time, which is then faster.
ONE_TOKEN = (
    ConfigRow(
        {},
        {
            "BLOCK_B": 64,
            "BLOCK_V": 64,
            "BLOCK_K": 64,
            "num_warps": 4,
            "num_stages": 4,
            "PRECISION": "ieee",
            "MAX_MASK": 1024,
            "FIND": 64,
            "FIND_BLOCK": 1024,
        },
        MEASURED,
    ),
    ConfigRow(
        FP32, {"BLOCK_B": 32, "BLOCK_K": 32, "num_stages": 2, "PRECISION": "tf32x3"}, MEASURED
    ),
    ConfigRow(FP32 | {"tf32": True}, {"PRECISION": "tf32"}, COMPILED),
    ConfigRow(
        INTERPRETED,
        {"BLOCK_B": 16, "BLOCK_V": 16, "BLOCK_K": 16, "num_stages": 1, "PRECISION": "ieee"},
        SMALL,
    ),
)
# Gradients of one token per sequence. PROGRAMS instances for that of hidden run on a
# multiprocessor, and clear CLEAR numbers at a time.
ONE_TOKEN_GRADIENTS = (
    ConfigRow(
        {},
        {
            "BLOCK_B": 32,
            "BLOCK_V": 64,
            "BLOCK_D": 128,
            "num_stages": 3,
            "PRECISION": "ieee",
            "PROGRAMS": 2,
            "HIDDEN_WARPS": 4,
            "WEIGHT_WARPS": 8,
            "CLEAR": 1024,
        },
        MEASURED,
    ),
    ConfigRow(
        FP32, {"BLOCK_V": 32, "BLOCK_D": 64, "num_stages": 2, "PRECISION": "tf32x3"}, MEASURED
    ),
    ConfigRow(FP32 | {"tf32": True}, {"PRECISION": "tf32"}, COMPILED),
    ConfigRow(
        INTERPRETED,
        {
            "BLOCK_B": 16,
            "BLOCK_V": 16,
            "BLOCK_D": 16,
            "num_stages": 1,
            "PRECISION": "ieee",
            "PROGRAMS": 1,
        },
        SMALL,
    ),
)


def constants_of(
    table: Iterable[ConfigRow],
    dtype: torch.dtype,
    setting: Setting,
    **facts: object,
) -> Constants:
    """Return a table's constants for products in ``dtype``."""
    return lookup(table, capability=setting.capability, dtype=dtype, tf32=setting.tf32, **facts)


def max_forward(dtype: torch.dtype, setting: Setting, descriptors: bool = True) -> Constants:
    """Return the constants of the fastest forward kernel of max pooling that can run.

    Args:
        dtype: dtype of the operands.
        setting: the device, and the kernels that failed to build there.
        descriptors: whether TMA descriptors of the tensors can be made.
    """
    kernel = fastest_kernel(dtype, setting.capability, setting.failed_kernels, descriptors)
    return constants_of(
        MAX_FORWARD,
        dtype,
        setting,
        tma=kernel != PORTABLE,
        roles=kernel == BY_ROLES,
    )


def fastest_kernel(
    dtype: torch.dtype,
    capability: tuple[int, int],
    failed_kernels: Collection[str],
    descriptors: bool = True,
) -> str:
    """Return the name of the fastest forward kernel of max pooling that can run.

    Args:
        dtype: dtype of the operands.
        capability: compute capability of the device, ``(0, 0)`` if kernels are interpreted.
        failed_kernels: names of the kernels that failed to build on the device.
        descriptors: whether TMA descriptors of the tensors can be made.

    Returns:
        ``BY_ROLES``, a kernel for Hopper GPUs in which some warps load tiles and others compute;
        ``BY_TMA``, the portable kernel with TMA loads; or ``PORTABLE``.
    """
    if capability == (0, 0):
        return BY_TMA if descriptors else PORTABLE
    # Devices of 12.0 have TMA, but no more shared memory than those of 8.9.
    has_tma = descriptors and (9, 0) <= capability < (12, 0) and dtype != torch.float32
    if not has_tma:
        return PORTABLE
    can_build_roles = capability == (9, 0) and releases.why_no_warp_roles() is None
    if can_build_roles and BY_ROLES not in failed_kernels:
        return BY_ROLES
    return BY_TMA if BY_TMA not in failed_kernels else PORTABLE


def may_screen(options: HeadOptions, setting: Setting, rows: int, vocab: int, dim: int) -> bool:
    """Return whether a screen should first exclude scores that cannot be positive.

    The screen bounds every logit from above by an int8 product. Scores that cannot be positive are
    0 after a ReLU, and are not computed. This saves time for large problems. Only max pooling is
    supported, because the largest bound of a sequence's logits bounds their maximum.

    Args:
        options: options of the call.
        setting: the device, and the kernels that failed to build there.
        rows: number of token states.
        vocab: V.
        dim: D.
    """
    limits = lookup(WHEN_SCREENED)
    is_supported = (
        options.pooling == "max"
        and dim % 16 == 0  # TMA loads rows of int8 at multiples of 16 bytes
        and dim <= limits["WIDEST"]
        and options.logit_scale > 0
        and "relu" in options.activation
    )
    is_large = 2.0 * rows * vocab * dim >= limits["LEAST_WORK"]
    return options.screen and is_supported and is_large and BY_SCREEN not in setting.failed_kernels


def rounded_rows(dim: int, group: int) -> int:
    """Return how many rows are rounded to int8 at a time, before the product of the screen.

    Args:
        dim: D.
        group: rows at whose multiples sequences begin. The result divides it, so that rows that are
            rounded together belong to one sequence.
    """
    return max(1, min(group, ROUND["ENTRIES"] // power_of_two(dim)))


class ForwardWork(NamedTuple):
    """Product that the persistent kernel of max pooling computes, and its division into tiles.

    Attributes:
        n_rows: rows of hidden, valid or not.
        uniform_length: length of all sequences, or 0 if lengths differ.
        vocab: V.
        dim: D.
        dtype: dtype of the operands.
        block_v: vocabulary columns of a tile.
        block_t: rows of hidden of a tile.
    """

    n_rows: int
    uniform_length: int
    vocab: int
    dim: int
    dtype: torch.dtype
    block_v: int
    block_t: int


class Splits(NamedTuple):
    """Division of the token tiles into splits.

    Attributes:
        number: number of splits.
        multiple: number of tiles that a split's size is a multiple of. It is the length of a
            sequence if sequences consist of whole tiles, else 1.
    """

    number: int
    multiple: int


def plan_splits(work: ForwardWork, setting: Setting) -> Splits:
    """Choose how the token tiles are divided into splits.

    A program instance computes one item after another. An item is a tile of the vocabulary with a
    split of the token tiles. The choice gives the least work to the busiest instance. Work is
    counted in tiles: an item costs a part of a tile more, and reading operands from memory
    lengthens each tile. If sequences differ in length, only the device knows how many rows are
    valid. The choice is then the best on average over several shares of valid rows.

    Args:
        work: the product and its tiles.
        setting: the device, whose multiprocessors have one program instance each.
    """
    costs = constants_of(SPLIT_COSTS, work.dtype, setting, dim=work.dim)
    n_programs = setting.multiprocessors
    has_whole_tiles = work.uniform_length % work.block_t == 0
    tiles_per_sequence = work.uniform_length // work.block_t if has_whole_tiles else 0
    multiple = tiles_per_sequence if 1 <= tiles_per_sequence <= LONG_SEQUENCE_TILES else 1
    if work.uniform_length:
        shares: tuple[float, ...] = (1.0,)
        item_cost = costs["ITEM"]
        max_splits = MAX_SPLITS
    else:
        shares = RAGGED_SHARES
        item_cost = costs["RAGGED_ITEM"]
        max_splits = costs["MAX_RAGGED_SPLITS"]
    tile_counts = [max(1, cdiv(int(work.n_rows * share), work.block_t)) for share in shares]
    n_vocabulary_tiles = cdiv(work.vocab, work.block_v)

    def cost_of_busiest_instance(splits: int) -> float:
        """Cost of the busiest instance, summed over the shares, relative to all tiles."""
        total = 0.0
        for n_tiles in tile_counts:
            split_size = cdiv(cdiv(n_tiles, splits), multiple) * multiple
            n_splits = cdiv(n_tiles, split_size)
            n_items = cdiv(n_vocabulary_tiles * n_splits, n_programs)
            read_cost = costs["READ"] * _reads_per_product(work, n_splits, split_size, n_programs)
            total += n_items * (split_size + item_cost) * (1.0 + read_cost) / n_tiles
        return total

    numbers = range(1, min(tile_counts[-1], max_splits) + 1)
    return Splits(min(numbers, key=cost_of_busiest_instance), multiple)


def _reads_per_product(
    work: ForwardWork,
    n_splits: int,
    split_size: int,
    n_programs: int,
) -> float:
    """Return how many entries of the operands are read from memory, relative to their products.

    All program instances work on tiles at the same time. These tiles form a rectangle: some
    vocabulary tiles by one token tile of each split. Each operand of the rectangle is read once. An
    instance needs its vocabulary tile again for the next token tile of its split. That is still in
    the L2 cache if the operands of a rectangle fit there. Each half of that cache has a copy of
    what instances on both sides read.

    Args:
        work: the product and its tiles.
        n_splits: number of splits of the token tiles.
        split_size: token tiles of a split.
        n_programs: number of program instances.
    """
    n_token_tiles = min(n_splits, n_programs)
    n_vocabulary_tiles = min(cdiv(n_programs, n_splits), cdiv(work.vocab, work.block_v))
    token_rows = n_token_tiles * work.block_t
    vocabulary_rows = n_vocabulary_tiles * work.block_v
    vocabulary_copies = 1 if n_token_tiles == 1 else 2
    cached_rows = vocabulary_copies * vocabulary_rows + 2 * token_rows
    weight_reads = 1.0 / token_rows
    if cached_rows * work.dim * work.dtype.itemsize <= L2_BYTES:
        weight_reads /= split_size
    return weight_reads + 1.0 / vocabulary_rows


def kernel_name(constants: Constants) -> str:
    """Return the name of the forward kernel that has these constants."""
    if constants["WARP_ROLES"]:
        return BY_ROLES
    return BY_TMA if constants["USE_TMA"] else PORTABLE
