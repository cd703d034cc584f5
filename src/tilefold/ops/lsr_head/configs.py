"""Launch configurations of the LSR head: kernels' constants by architecture and dtype, as tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from tilefold.ops._shared._triton import releases
from tilefold.ops._shared.plan import KernelFallback, Setting, cdiv
from tilefold.ops._shared.tuning import Between, ConfigRow, lookup
from tilefold.ops.lsr_head._problem import HeadOptions

Constants = dict[str, Any]  # of a kernel, by their names
FP8 = torch.float8_e4m3fn
INTERPRETED, FP32, FP16 = {"capability": (0, 0)}, {"dtype": torch.float32}, {"dtype": torch.float16}
SIXTEEN = frozenset({torch.bfloat16, torch.float16})
HOPPER = {"capability": (9, 0), "dtype": SIXTEEN}
LARGE_BATCH = HOPPER | {"batch": Between(least=33)}  # sequences
BEFORE_HOPPER, BLACKWELL = (
    {"capability": Between(most=(8, 9))},
    {"capability": Between(least=(9, 1))},
)
MEASURED, COMPILED = "H200, Triton 3.6", "compiled without spills with Triton 3.4 to 3.9, not timed"
SMALL = "small, for tests"
MAX_SPLITS = 32
MAX_RAGGED_SPLITS = 8  # where sequences differ, each split looks for its first one
RAGGED_SHARES = (
    0.25,
    0.33,
    0.5,
    0.75,
    1.0,
)  # of valid rows, that a split of ragged rows is chosen for
LONG_SEQUENCE_TILES = 16  # longer sequences are rather cut than kept in one split
BY_ROLES = "lsr_head's kernel whose warps load or compute"
BY_SCREEN = "lsr_head's screen of scores that cannot be positive"
BY_TMA = "lsr_head's portable kernel with TMA"
PORTABLE = "lsr_head's portable kernel"
INSTEAD = {
    kernel: KernelFallback(kernel, f"{does} instead: the same results, a slower forward pass.")
    for kernel, does in (
        (BY_ROLES, f"Max pooling runs {BY_TMA}"),
        (BY_TMA, f"Max pooling runs {PORTABLE}"),
        (BY_SCREEN, "Every logit is computed"),
    )
}

# Forward of max pooling; sequences begin at multiples of GROUP rows. With WARP_ROLES warps are of a
# computing group. The facts tma and roles say whether kernels with descriptors, and with such
# warps, can run: :func:`max_forward`.
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
        {"tma": True, "dtype": SIXTEEN} | BLACKWELL,
        {"BLOCK_T": 128},
        "compiled: copies of products, which lie in a memory of their own, and places of winners spill from 3.7 on",
    ),
    ConfigRow(
        {"roles": True},
        {"num_warps": 4, "num_stages": 4, "WARP_ROLES": True, "LEAN_PLACES": False},
        MEASURED,
    ),
    ConfigRow(
        {"roles": True, "release": Between(least=(3, 8))},
        {"LEAN_PLACES": True},
        "compiled: winners are looked for with constants, since a register for each place of a tile spills",
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
# The screen, on 9.0, of work that takes long enough for a sample; unless more than MOST_SAMPLED of
# the sample stay (128 tokens of a text find half to two thirds of what stays of it), or MOST_KEPT
# of all, which costs both.
WHEN_SCREENED = (
    ConfigRow(
        {}, {"LEAST_WORK": 7e11, "WIDEST": 1024, "MOST_SAMPLED": 0.12, "MOST_KEPT": 0.5}, MEASURED
    ),
)
SCREEN = {"BLOCK_T": 128, "BLOCK_K": 128, "num_warps": 4, "STAGES": 6}
SAMPLE = {
    "BLOCK_V": 64,
    "BLOCK_T": 32,
    "BLOCK_K": 64,
    "MOST_T": 128,
    "num_warps": 4,
    "num_stages": 6,
}
SAMPLED = 12  # sequences of a sample, at most
ROUND = {"num_warps": 8, "PROGRAMS": 2}
REFINE = {
    "BLOCK_V": 128,
    "BLOCK_T": 128,
    "BLOCK_K": 64,
    "num_warps": 8,
    "num_stages": 3,
    "PROGRAMS": 1,
}
# Backward of max pooling. BLOCK_R hidden rows own a list of entries, at most 32; a program of SCAN
# looks at SPLIT_V.
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
# Entries of BLOCK_B sequences are listed at a time, and BLOCK_E multiplied; PROGRAMS run on a
# multiprocessor.
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
        "H200, Triton 3.6: scaling would take 152, and a multiprocessor then holds three programs where four do",
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
# Sums. Backward holds SLAB_ELEMENTS of dlogits at a time; kernels of ours multiply FEW_ROWS rows of
# hidden at most.
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
# One token per sequence: a tile has BLOCK_B sequences, in forward at most. Programs of forward look
# at FIND entries of a mask at a time, of MAX_MASK at most: more cost the device more than a launch,
# whose programs look at FIND_BLOCK.
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
# Its gradients; PROGRAMS of that of hidden run on a multiprocessor, and zero CLEAR numbers at a
# time.
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
    """Constants by a table, for products in ``dtype``."""
    return lookup(table, capability=setting.capability, dtype=dtype, tf32=setting.tf32, **facts)


def max_forward(dtype: torch.dtype, setting: Setting, descriptors: bool = True) -> Constants:
    """Constants of the best forward kernel of max pooling that was not given up; pointers are taken
    by all.
    """
    capability, given_up = setting.capability, setting.given_up
    # 12.0 has TMA, but no more shared memory than 8.9
    tma = descriptors and (9, 0) <= capability < (12, 0) and dtype != torch.float32
    roles = (
        tma
        and capability == (9, 0)
        and releases.why_no_warp_roles() is None
        and BY_ROLES not in given_up
    )
    tma = roles or (tma and BY_TMA not in given_up) or (descriptors and capability == (0, 0))
    return constants_of(MAX_FORWARD, dtype, setting, tma=tma, roles=roles)


def may_screen(options: HeadOptions, setting: Setting, rows: int, vocab: int, dim: int) -> bool:
    """Whether an 8-bit product first looks which scores can be positive."""
    when = lookup(WHEN_SCREENED)
    fits = (
        dim % 16 == 0
        and dim <= when["WIDEST"]
        and options.logit_scale > 0
        and "relu" in options.activation
    )
    worth = 2.0 * rows * vocab * dim >= when["LEAST_WORK"]
    return options.screen and fits and worth and BY_SCREEN not in setting.given_up


def plan_splits(
    rows: int,
    vocab: int,
    uniform_length: int,
    block_v: int,
    block_t: int,
    programs: int,
) -> tuple[int, int]:
    """Number of splits of the token tiles, and the number of tiles that a split's size is a
    multiple of.

    The choice that leaves the fewest tiles to the busiest program, at a price per item: 0.1 tile
    where all sequences have one length (``uniform_length``, else 0), 0.15 where the first one has
    to be looked for. Splits end with sequences if that length is a multiple of ``block_t``. How
    many of ragged ``rows`` are valid only the device knows: the choice is then the best on average
    over several shares.
    """
    tiles_per_sequence = uniform_length // block_t if uniform_length % block_t == 0 else 0
    multiple = tiles_per_sequence if 1 <= tiles_per_sequence <= LONG_SEQUENCE_TILES else 1
    shares, price = ((1.0,), 0.1) if uniform_length else (RAGGED_SHARES, 0.15)
    counts = [max(1, cdiv(int(rows * share), block_t)) for share in shares]
    n_vocab = cdiv(vocab, block_v)

    def busiest(splits: int) -> float:
        total = 0.0
        for n_tiles in counts:
            tiles = cdiv(cdiv(n_tiles, splits), multiple) * multiple
            total += cdiv(n_vocab * cdiv(n_tiles, tiles), programs) * (tiles + price) / n_tiles
        return total

    limit = MAX_SPLITS if uniform_length else MAX_RAGGED_SPLITS
    return min(range(1, min(counts[-1], limit) + 1), key=busiest), multiple


def kernel_name(constants: Constants) -> str:
    """The family of forward kernels that has these constants."""
    return BY_ROLES if constants["WARP_ROLES"] else BY_TMA if constants["USE_TMA"] else PORTABLE
